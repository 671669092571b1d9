"""What fetching maps costs: copy, window, view; alone and with the A·V that follows; and A·V without a fetch."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attmemo.db import KIND_MAP, SlotKind
from attmemo.db.forms import TYPES, pack, unpack
from attmemo.db.slots import SlotClass
from attmemo.errors import AttmemoError, StorageFullError
from attmemo.kernels.map_product import is_direct
from attmemo.mmap import (
    Arena,
    Batch,
    CopyFetcher,
    Fetcher,
    MapFetcher,
    Residency,
    SlotLayout,
    ViewFetcher,
    choose_fetcher,
    page_size,
)
from attmemo.profiler.bench.timing import (
    MAX_BYTES,
    SEED,
    Job,
    Progress,
    Times,
    busy,
    check_choice,
    check_sizes,
    interleave,
    silent,
    temporary_folder,
)
from attmemo.profiler.conditions import conditions
from attmemo.reuse.source import multiply

Ints = npt.NDArray[np.int64]

VARIANTS: Final = ("copy", "copy_reused", "map", "view", "direct", "contiguous")
"""What is compared; `bench_gather` says what they are."""

SWEEP_BATCHES: Final = (1, 4, 16, 64)
SWEEP_LENGTHS: Final = (128, 256, 512)

_DTYPES: Final = ("float32", "bfloat16", "float16", "uint8")
_PRODUCT_TOLERANCE: Final = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
_COLD_TURNS: Final = 3
_STILL_THERE: Final = 0.01  # share of the file's pages that may be left in the page cache of a cold turn


class _ReusedFetcher:
    """Copies into a buffer that is kept: what a careful program without mapping would do."""

    name = "copy_reused"

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer

    def fetch(self, arena: Arena, slots: Ints) -> Batch:
        return Batch(torch.stack([arena.slot(slot) for slot in slots.tolist()], out=self.buffer))

    def close(self) -> None:
        pass


class _ThereFetcher:
    """Hands out what was put there before: no fetch at all, the floor of the others."""

    name = "contiguous"

    def __init__(self, there: Tensor) -> None:
        self.there = there

    def fetch(self, _arena: Arena, _slots: Ints) -> Batch:
        return Batch(self.there)

    def close(self) -> None:
        pass


@dataclass
class _Work:
    """What the variants work on: the batch of each turn, V, and where products go.

    Attributes
    ----------
    slots : list of int64 array, shape [batch]
        Slots of each turn.
    values, out : Tensor
        V and A·V as torch multiplies them, ``[batch, heads, length, width]``.
    there : _ThereFetcher
        Maps ``[batch, heads, length, length]`` of the type of `values`.
    fetchers : dict of name to fetcher
        All variants but ``direct``.
    packed, context : Tensor
        V and A·V as the engine has them, ``[batch * length, heads * width]`` and ``[batch, length, heads * width]``.
    """

    slots: list[Ints]
    values: Tensor
    out: Tensor
    there: _ThereFetcher
    fetchers: dict[str, Any]
    packed: Tensor = field(init=False)
    context: Tensor = field(init=False)

    def __post_init__(self) -> None:
        batch, heads, length, width = self.values.shape
        self.packed = self.values.transpose(1, 2).reshape(batch * length, heads * width).contiguous()
        self.context = torch.empty(batch, length, heads * width, dtype=self.values.dtype)
        self._starts, self._rows = np.arange(batch, dtype=np.int64) * length, np.arange(batch, dtype=np.int64)

    def put_there(self, arena: Arena, turn: int) -> None:
        """Have the maps of this turn there for ``contiguous``."""
        for place, slot in enumerate(self.slots[turn].tolist()):
            self.there.there[place].copy_(unpack(arena.slot(slot)))

    def fetches(self, arena: Arena) -> dict[str, Job]:
        """The fetches alone, the ends of their batches included."""
        kept = {name: fetcher for name, fetcher in self.fetchers.items() if fetcher is not self.there}
        return {name: self._fetch(fetcher, arena) for name, fetcher in kept.items()}

    def products(self, arena: Arena) -> dict[str, Job]:
        """Fetch and A·V. Maps in 8 bits are fetched as they are stored, so that only two have a product with V."""
        stored = arena.layout.dtype == self.values.dtype
        kept = {name: fetcher for name, fetcher in self.fetchers.items() if stored or fetcher is self.there}
        jobs = {name: self._product(fetcher, arena) for name, fetcher in kept.items()}
        jobs["direct"] = self._direct(arena)
        return {name: jobs[name] for name in VARIANTS if name in jobs}

    def _fetch(self, fetcher: Fetcher, arena: Arena) -> Job:
        def job(turn: int) -> None:
            with fetcher.fetch(arena, self.slots[turn]):
                pass

        return job

    def _product(self, fetcher: Fetcher, arena: Arena) -> Job:
        def job(turn: int) -> None:
            with fetcher.fetch(arena, self.slots[turn]) as maps:
                _multiply(maps, self.values, self.out)

        return job

    def _direct(self, arena: Arena) -> Job:
        def job(turn: int) -> None:
            multiply(arena, self.slots[turn], self.packed, self._starts, self.context, self._rows)

        return job

    def check(self, arena: Arena) -> None:
        """Every variant must give the same bytes, and the same product but for the order of its sums.

        Raises
        ------
        AttmemoError
            One does not.
        """
        slots = self.slots[0]
        self.put_there(arena, 0)
        for name, fetcher in self.fetchers.items():
            if fetcher is not self.there:
                with fetcher.fetch(arena, slots) as maps:
                    pairs = zip(range(len(slots)), slots.tolist(), strict=True)
                    if len(maps) != len(slots) or not all(torch.equal(maps[i], arena.slot(slot)) for i, slot in pairs):
                        raise _differs(name, "maps")
        expected = torch.matmul(self.there.there, self.values)
        tolerance = _PRODUCT_TOLERANCE[self.values.dtype]
        for name, job in self.products(arena).items():
            self.out.fill_(torch.nan)
            self.context.fill_(torch.nan)
            job(0)
            found = self.out
            if name == "direct":
                batch, heads, length, width = self.values.shape
                found = self.context.view(batch, length, heads, width).transpose(1, 2)
            if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance):
                raise _differs(name, "products")


def bench_gather(
    *,
    heads: int = 12,
    length: int = 512,
    batch: int = 32,
    dtype: str = "bfloat16",
    residency: Residency = "page-cache",
    width: int = 64,
    repeats: int = 9,
    cold: bool = True,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Cost of fetching a batch of maps scattered in an arena, alone and with the A·V that follows.

    Both together are what counts: mapping small pages only moves the cost into the product, where they are faulted in.

    Parameters
    ----------
    heads, length, batch, width : int
        Maps are ``[batch, heads, length, length]``, V is ``[batch, heads, length, width]``.
    dtype : {"float32", "bfloat16", "float16", "uint8"}
        Of the stored maps, and of V; with maps in 8 bits (`attmemo.db.forms`) V is float32, and only ``direct`` and
        ``contiguous`` have a product, the others None.
    residency : {"page-cache", "hugepages"}
        Where the arena is served from.
    repeats : int
        Turns counted; each fetches other slots.
    cold : bool
        Also measure with the file out of the page cache.
    max_bytes : int
        Most bytes for the temporary arena, which holds twice the batch, and again for the copies in memory.
    progress : callable, optional
        Called with (what, done, total).

    Returns
    -------
    dict
        ``rows``: for each variant

        - ``copy``: into a fresh tensor;
        - ``copy_reused``: into a kept one;
        - ``map``: a window mapped, which takes away what is left of the batch before, and made inaccessible at the
          end of the batch: all in the time;
        - ``view``: no gathering, one product for each record;
        - ``direct``: our kernel reads the maps where they lie; V was packed before, outside the time;
        - ``contiguous``: maps that are there already, in the type of V;

        ``fetch_ms``, ``fetch_matmul_ms``, ``gb_per_s`` and ``gb_per_s_matmul`` (10⁹ bytes of the maps, as they are
        read, by those times; None without a fetch), ``faults`` and ``faults_matmul`` (minor page faults in a batch).
        ``cold_ms`` and ``cold_matmul_ms``: the first fetch, alone and with its product, from an arena opened anew
        whose file the kernel had dropped from its page cache, median of 3; ``cold_faults_matmul``, minor and major
        faults of the latter. None for ``contiguous``, which has no file, and with a note for all others if the arena
        is in huge pages or the kernel did not drop the file. The disk's own cache, and that of the machine around a
        virtual one, are as they are.
        The same at the top level as ``<variant>_ms``, ``<variant>_matmul_ms``, ``<variant>_gb_per_s``,
        ``<variant>_faults``, ``<variant>_matmul_faults``, ``<variant>_cold_ms``, ``<variant>_cold_matmul_ms``. There
        too: ``fetcher``, what the engine takes here by itself: "direct", "map" or "view"; ``faults``, those of that
        one with its A·V; ``page_bytes``, the pages of the arena; ``window_page_bytes``, those of a window over it;
        ``residency``, where the arena really was, and ``notice``, what it said about that, or None; ``bytes``, those
        of a batch as it is stored. Ratios of times: ``chosen_over_contiguous`` (``fetcher`` with its product over
        ``contiguous``), ``copy_over_map`` (fresh copy over map and unmap), ``map_matmul_over_contiguous``.
        ``conditions`` and ``notes``.

    Raises
    ------
    ValueError
        A size is not a positive integer, or a name is not one of those listed.
    StorageFullError
        The limit, the disk or the memory has no room for it.
    AttmemoError
        The variants did not give the same maps or products; no number would mean anything.
    """
    check_sizes(heads=heads, length=length, batch=batch, width=width, repeats=repeats, max_bytes=max_bytes)
    check_choice("dtype", dtype, _DTYPES)
    check_choice("residency", residency, get_args(Residency))
    tell = progress or silent
    where = conditions()
    shape, kind = (heads, length, length), TYPES[dtype]
    wide = torch.float32 if kind == torch.uint8 else kind
    # As in a database: where slots begin decides which pages a window over them can have.
    layout = SlotClass.make(SlotKind(KIND_MAP, 1, dtype, shape), length).layout.with_slots(2 * batch)
    nbytes = batch * layout.nbytes
    there_bytes = nbytes // kind.itemsize * wide.itemsize
    generator = torch.Generator().manual_seed(SEED)
    # A fresh copy, a kept one and the maps that are there already; huge pages hold the arena a second time. V and
    # its product, both in two layouts.
    in_memory = 2 * nbytes + there_bytes + (2 if residency == "hugepages" else 1) * layout.file_bytes
    in_memory += 4 * batch * heads * length * width * wide.itemsize
    notes = busy(where)
    with temporary_folder(layout.file_bytes, in_memory, max_bytes) as folder:
        scattered = np.random.default_rng(SEED)
        file = folder / "bench.slots"
        _write_maps(file, layout, dtype, generator, tell)
        values = torch.randn(batch, heads, length, width, generator=generator).to(wide)
        there = _ThereFetcher(torch.empty(batch, *shape, dtype=wide))
        mapped = MapFetcher(strict=True)  # nothing of a batch can be read after its end
        fetchers: dict[str, Any] = {
            "copy": CopyFetcher(),
            "copy_reused": _ReusedFetcher(torch.empty(batch, *shape, dtype=kind)),
            "map": mapped,
            "view": ViewFetcher(),
            "contiguous": there,
        }
        slots = [scattered.permutation(layout.slots)[:batch] for _ in range(1 + max(repeats, _COLD_TURNS))]
        work = _Work(slots, values, torch.empty_like(values), there, fetchers)
        try:
            with Arena(file, layout, residency) as arena:
                found, facts = _warm(work, arena, repeats, tell)
                if facts["notice"] is not None:
                    facts["notice"] = facts["notice"].replace(str(file), "the arena")
                    notes.append(facts["notice"])
                if not arena.mapping.layout.dense:
                    notes.append("slots are padded to pages: 'map' is multiplied one record at a time, as 'view' is")
            dropped: dict[str, Times] = {}
            if cold and facts["residency"] == "hugepages":
                notes.append("nothing was measured cold: a copy of the arena in huge pages is always in memory")
            elif cold:
                dropped, left = _cold(work, file, layout, tell)
                if left is not None:
                    notes.append(left)
        finally:
            for fetcher in fetchers.values():
                fetcher.close()
        if mapped.fallbacks:
            notes.append(f"{mapped.fallbacks} batches of 'map' were copied instead: {mapped.fallback_reason}")
    if wide != kind:
        notes.append("maps in 8 bits: V is float32; only 'direct' multiplies them as they are stored")
    settings = {"heads": heads, "length": length, "batch": batch, "dtype": dtype, "width": width}
    flat: dict[str, Any] = {}
    rows = []
    for name in VARIANTS:
        read = there_bytes if name == "contiguous" else nbytes
        row = _numbers(found.get(name), found.get(f"{name}_matmul"), read)
        row |= _cold_numbers(dropped.get(name), dropped.get(f"{name}_matmul"))
        flat |= {f"{name}_{key}": row[inner] for key, inner in _FLAT.items() if name in found or "matmul" in key}
        rows.append({"variant": name, **settings, **row})
    flat["faults"] = flat[f"{facts['fetcher']}_matmul_faults"]
    flat["chosen_over_contiguous"] = _ratio(flat[f"{facts['fetcher']}_matmul_ms"], flat["contiguous_matmul_ms"])
    flat["copy_over_map"] = _ratio(flat["copy_ms"], flat["map_ms"])
    flat["map_matmul_over_contiguous"] = _ratio(flat["map_matmul_ms"], flat["contiguous_matmul_ms"])
    where |= settings | {"repeats": repeats, "residency": facts["residency"], "notice": facts["notice"]}
    return {"rows": rows, **flat, **facts, "bytes": nbytes, "conditions": where, "notes": notes}


def sweep_gather(
    *,
    length: int = 512,
    batch: int = 32,
    repeats: int = 9,
    progress: Progress | None = None,
    **settings: Any,
) -> tuple[list[dict[str, Any]], list[str]]:
    """`bench_gather`, warm only, over batch sizes at one length and over lengths at one batch size.

    Parameters
    ----------
    length, batch : int
        The length at which batches of `SWEEP_BATCHES` are measured; the batch at which `SWEEP_LENGTHS` are.
    repeats : int
        At most 5 are made of each.
    **settings
        The others of `bench_gather`.

    Returns
    -------
    points : list of dict
        ``axis`` ("batch" or "length": which of the two was swept), ``batch``, ``length``, ``fetcher``,
        ``page_bytes``, and ``<variant>_matmul_ms`` of each variant.
    notes : list of str
        What was left out because there was no room for it.
    """
    check_sizes(length=length, batch=batch, repeats=repeats)
    tell = progress or silent
    wanted = [("batch", size, length) for size in SWEEP_BATCHES] + [("length", batch, size) for size in SWEEP_LENGTHS]
    points: list[dict[str, Any]] = []
    notes: list[str] = []
    for axis, size, tokens in wanted:
        name = f"batch {size}, length {tokens}"

        def told(what: str, done: int, total: int, name: str = name) -> None:
            tell(f"{name}: {what}", done, total)

        try:
            found = bench_gather(
                length=tokens, batch=size, repeats=min(repeats, 5), cold=False, progress=told, **settings
            )
        except StorageFullError as error:
            notes.append(f"{name} is left out of the plot: {error.what}")
            continue
        keys = ("fetcher", "page_bytes", *(f"{variant}_matmul_ms" for variant in VARIANTS))
        points.append({"axis": axis, "batch": size, "length": tokens} | {key: found[key] for key in keys})
    return points, notes


_FLAT: Final = {
    "ms": "fetch_ms",
    "gb_per_s": "gb_per_s",
    "faults": "faults",
    "cold_ms": "cold_ms",
    "matmul_ms": "fetch_matmul_ms",
    "matmul_faults": "faults_matmul",
    "cold_matmul_ms": "cold_matmul_ms",
}
"""Names at the top level, behind that of the variant, and those in its row."""


def _numbers(alone: Times | None, product: Times | None, nbytes: int) -> dict[str, float | None]:
    """What a row says of a variant that reads so many bytes of maps."""
    return {
        "fetch_ms": None if alone is None else alone.ms,
        "fetch_matmul_ms": None if product is None else product.ms,
        "gb_per_s": None if alone is None else nbytes / alone.ms / 1e6,
        "gb_per_s_matmul": None if product is None else nbytes / product.ms / 1e6,
        "faults": None if alone is None else alone.faults_median,
        "faults_matmul": None if product is None else product.faults_median,
    }


def _cold_numbers(alone: Times | None, product: Times | None) -> dict[str, float | None]:
    return {
        "cold_ms": None if alone is None else alone.ms,
        "cold_matmul_ms": None if product is None else product.ms,
        "cold_faults_matmul": None if product is None else product.faults_median,
    }


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def _warm(work: _Work, arena: Arena, repeats: int, tell: Progress) -> tuple[dict[str, Times], dict[str, Any]]:
    """Times in turns, and what the arena is. Nothing in what is returned keeps it mapped."""
    work.check(arena)
    jobs = work.fetches(arena) | {f"{name}_matmul": job for name, job in work.products(arena).items()}
    found = interleave(jobs, repeats, before=lambda turn: work.put_there(arena, turn), tell=tell)
    default = choose_fetcher("auto", arena.window_page_bytes)
    default.close()
    facts = {
        "fetcher": "direct" if is_direct(arena.layout.shape, arena.layout.dtype, work.values.dtype) else default.name,
        "page_bytes": arena.page_bytes,
        "window_page_bytes": arena.window_page_bytes,
        "residency": arena.residency,
        "notice": arena.notice,
    }
    return found, facts


def _cold(work: _Work, file: Path, layout: SlotLayout, tell: Progress) -> tuple[dict[str, Times], str | None]:
    """Times of the first fetch after the file left the page cache, and a note if it did not leave.

    A variant of which no turn was cold is missing from the times.
    """
    times: dict[str, Times] = {}
    left = 0.0
    for turn in range(_COLD_TURNS):
        tell("measure cold", turn, _COLD_TURNS)
        with Arena(file, layout) as arena:
            names = [*work.fetches(arena), *(f"{name}_matmul" for name in work.products(arena))]
        names.remove("contiguous_matmul")
        for name in names if turn % 2 else reversed(names):
            share = _drop(file)
            left = max(left, share)
            if share > _STILL_THERE:
                continue
            with Arena(file, layout) as arena:
                fetched = work.fetches(arena)
                job = fetched[name] if name in fetched else work.products(arena)[name.removesuffix("_matmul")]
                faults, start = _faults(), time.perf_counter()
                job(turn)
                spent, faults = time.perf_counter() - start, _faults() - faults
                del fetched, job  # or they keep the arena
            one = times.setdefault(name, Times())
            one.milliseconds.append(1e3 * spent)
            one.faults.append(faults)
    tell("measure cold", _COLD_TURNS, _COLD_TURNS)
    if left <= _STILL_THERE:
        return times, None
    what = "some cold turns were left out" if times else "nothing was measured cold"
    return times, f"{what}: asked to drop the arena from its page cache, the kernel kept up to {left:.0%} of it"


def _faults() -> int:
    """Page faults of this process so far, minor and major."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


def _drop(file: Path) -> float:
    """Ask the kernel to forget the file's pages, and see which share of them it kept; 1 if it does not tell.

    Pages that a process has mapped are kept.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)  # only clean pages are dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        nbytes = os.fstat(descriptor).st_size
        with mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
            memory = np.frombuffer(mapped, np.uint8)
            resident = np.zeros(-(-nbytes // page_size()), np.uint8)
            failed = ctypes.CDLL(None).mincore(
                ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(nbytes), ctypes.c_void_p(resident.ctypes.data)
            )
            del memory  # or the map cannot be closed
    finally:
        os.close(descriptor)
    return 1.0 if failed else float(np.mean(resident & 1))


def _write_maps(file: Path, layout: SlotLayout, dtype: str, generator: torch.Generator, tell: Progress) -> None:
    """Random probability maps, one in each slot."""
    with file.open("wb") as stream:
        stream.write(bytes(layout.header))
        for slot in range(layout.slots):
            tell("records", slot, layout.slots)
            apm = torch.randn(layout.shape, generator=generator).mul_(2.0).softmax(-1)
            stream.write(pack(apm, dtype, causal=False).view(torch.uint8).numpy().tobytes())
            stream.write(bytes(layout.stride - layout.nbytes))
        stream.flush()
        os.fsync(stream.fileno())  # or the kernel writes them out while we measure
    tell("records", layout.slots, layout.slots)


def _multiply(maps: Batch, values: Tensor, out: Tensor) -> None:
    """A·V as the engine does it: at once if the batch is one dense tensor, else one record at a time."""
    stacked = maps.stacked
    if stacked is not None and stacked.is_contiguous():
        torch.matmul(stacked, values, out=out)
        return
    for place in range(len(maps)):
        torch.matmul(maps[place], values[place], out=out[place])


def _differs(name: str, what: str) -> AttmemoError:
    return AttmemoError(
        f"fetching with {name!r} gave other {what} than stacking the slots.",
        "report this with the output of uname -a; use fetch='copy' until then",
    )
