"""What fetching maps costs: copy, window, view; alone and with the A·V that follows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attmemo.db import KIND_MAP
from attmemo.db.format import SlotClass
from attmemo.db.forms import TYPES
from attmemo.errors import AttmemoError
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
)
from attmemo.profiler.bench.timing import (
    MAX_BYTES,
    SEED,
    Job,
    Progress,
    busy,
    check_choice,
    check_sizes,
    interleave,
    silent,
    temporary_folder,
)
from attmemo.profiler.conditions import conditions

_PRODUCT_TOLERANCE: Final = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


class _ReusedFetcher:
    """Copies into a buffer that is kept: what a careful program without mapping would do."""

    name = "copy_reused"

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer

    def fetch(self, arena: Arena, slots: npt.NDArray[np.int64]) -> Batch:
        return Batch(torch.stack([arena.slot(slot) for slot in slots.tolist()], out=self.buffer))

    def close(self) -> None:
        pass


class _ThereFetcher:
    """Hands out what was put there before: no fetch at all, the floor of the others."""

    name = "contiguous"

    def __init__(self, there: Tensor) -> None:
        self.there = there

    def fetch(self, _arena: Arena, _slots: npt.NDArray[np.int64]) -> Batch:
        return Batch(self.there)

    def close(self) -> None:
        pass


def bench_gather(
    *,
    heads: int = 12,
    length: int = 512,
    batch: int = 32,
    dtype: str = "bfloat16",
    residency: Residency = "page-cache",
    width: int = 64,
    repeats: int = 9,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Cost of fetching a batch of maps scattered in an arena, alone and with the A·V that follows.

    Both together are what counts: mapping small pages only moves the cost into the product, where they are faulted in.

    Parameters
    ----------
    heads, length, batch, width : int
        Maps are ``[batch, heads, length, length]``, V is ``[batch, heads, length, width]``.
    dtype : {"float32", "bfloat16", "float16"}
        Of maps and V.
    residency : {"page-cache", "hugepages"}
        Where the arena is served from.
    repeats : int
        Turns counted; each fetches other slots.
    max_bytes : int
        Most bytes for the temporary arena, which holds twice the batch, and again for the copies in memory.
    progress : callable, optional
        Called with (what, done, total).

    Returns
    -------
    dict
        ``rows``: for each variant (``copy``: into a fresh tensor; ``copy_reused``: into a kept one; ``map``: a window
        remapped, which takes down what the last fetch mapped; ``view``: no gathering; ``contiguous``: maps that are
        there already) ``fetch_ms``, ``fetch_matmul_ms``, ``gb_per_s`` and ``gb_per_s_matmul`` (bytes of the maps by
        those times; None without a fetch), ``faults`` and ``faults_matmul`` (minor page faults in a batch).
        The same at the top level as ``<variant>_ms``, ``<variant>_matmul_ms``, ``<variant>_gb_per_s``,
        ``<variant>_faults``, ``<variant>_matmul_faults``. There too: ``fetcher``, the default one here; ``faults``,
        those of the default one with its A·V; ``page_bytes``, the pages of the arena; ``window_page_bytes``, those of
        a window over it; ``residency``, where the arena really was, and ``notice``, what it said about that, or None;
        ``bytes``, those of a batch. ``conditions`` and ``notes``.

    Raises
    ------
    ValueError
        A size is not a positive integer, or a name is not one of those listed.
    StorageFullError
        The limit, the disk or the memory has no room for it.
    AttmemoError
        The variants did not give the same maps; no number would mean anything.
    """
    check_sizes(heads=heads, length=length, batch=batch, width=width, repeats=repeats, max_bytes=max_bytes)
    check_choice("dtype", dtype, ("float32", "bfloat16", "float16"))
    check_choice("residency", residency, get_args(Residency))
    tell = progress or silent
    where = conditions()
    shape, kind = (heads, length, length), TYPES[dtype]
    # As in a database: where slots begin decides which pages a window over them can have.
    layout = SlotClass.make(KIND_MAP, length, shape, dtype).layout.with_slots(2 * batch)
    nbytes = batch * layout.nbytes
    generator = torch.Generator().manual_seed(SEED)
    # A fresh copy, a kept one and the maps that are there already; huge pages hold the arena a second time.
    in_memory = 3 * nbytes + (2 if residency == "hugepages" else 1) * layout.file_bytes
    with temporary_folder(layout.file_bytes, in_memory, max_bytes) as folder:
        scattered = np.random.default_rng(SEED)
        slots = [scattered.permutation(layout.slots)[:batch] for _ in range(1 + repeats)]
        file = folder / "bench.slots"
        _write_maps(file, layout, generator, tell)
        values = torch.randn(batch, heads, length, width, generator=generator).to(kind)
        out = torch.empty_like(values)
        there = _ThereFetcher(torch.empty(batch, *shape, dtype=kind))
        mapped = MapFetcher()
        fetchers: dict[str, Any] = {
            "copy": CopyFetcher(),
            "copy_reused": _ReusedFetcher(torch.empty(batch, *shape, dtype=kind)),
            "map": mapped,
            "view": ViewFetcher(),
            "contiguous": there,
        }
        with Arena(file, layout, residency) as arena:
            try:
                there.there.copy_(_stacked(arena, slots[0]))
                _check_twins(fetchers, arena, slots[0], values, out)
                jobs: dict[str, Job] = {}
                for name, fetcher in fetchers.items():
                    if fetcher is not there:
                        jobs[name] = _fetch_job(fetcher, arena, slots)
                    jobs[f"{name}_matmul"] = _product_job(fetcher, arena, slots, values, out)

                def put_there(turn: int) -> None:
                    there.there.copy_(_stacked(arena, slots[turn]))

                found = interleave(jobs, repeats, before=put_there, tell=tell)
                notice = None if arena.notice is None else arena.notice.replace(str(file), "the arena")
                notes = busy(where) + ([] if notice is None else [notice])
                if mapped.fallbacks:
                    notes.append(f"{mapped.fallbacks} batches of 'map' were copied instead: {mapped.fallback_reason}")
                if not arena.mapping.layout.dense:
                    notes.append("slots are padded to pages: 'map' is multiplied one record at a time, as 'view' is")
                default = choose_fetcher("auto", arena.window_page_bytes)
                default.close()
                facts = {
                    "fetcher": default.name,
                    "page_bytes": arena.page_bytes,
                    "window_page_bytes": arena.window_page_bytes,
                    "bytes": nbytes,
                    "residency": arena.residency,
                    "notice": notice,
                }
            finally:
                for fetcher in fetchers.values():
                    fetcher.close()
    settings = {"heads": heads, "length": length, "batch": batch, "dtype": dtype, "width": width}
    flat: dict[str, Any] = {}
    rows = []
    for name in fetchers:
        alone, product = found.get(name), found[f"{name}_matmul"]
        if alone is not None:
            flat[f"{name}_ms"] = alone.ms
            flat[f"{name}_gb_per_s"] = nbytes / alone.ms / 1e6
            flat[f"{name}_faults"] = alone.faults_median
        flat[f"{name}_matmul_ms"] = product.ms
        flat[f"{name}_matmul_faults"] = product.faults_median
        rows.append(
            {
                "variant": name,
                **settings,
                "fetch_ms": None if alone is None else alone.ms,
                "fetch_matmul_ms": product.ms,
                "gb_per_s": None if alone is None else nbytes / alone.ms / 1e6,
                "gb_per_s_matmul": nbytes / product.ms / 1e6,
                "faults": None if alone is None else alone.faults_median,
                "faults_matmul": product.faults_median,
            }
        )
    flat["faults"] = flat[f"{facts['fetcher']}_matmul_faults"]
    where |= settings | {"repeats": repeats, "residency": facts["residency"], "notice": facts["notice"]}
    return {"rows": rows, **flat, **facts, "conditions": where, "notes": notes}


def _write_maps(file: Path, layout: SlotLayout, generator: torch.Generator, tell: Progress) -> None:
    """Random probability maps, one in each slot."""
    with file.open("wb") as stream:
        stream.write(bytes(layout.header))
        for slot in range(layout.slots):
            tell("records", slot, layout.slots)
            apm = torch.randn(layout.shape, generator=generator).mul_(2.0).softmax(-1).to(layout.dtype)
            stream.write(apm.view(torch.uint8).numpy().tobytes())
            stream.write(bytes(layout.stride - layout.nbytes))
        stream.flush()
        os.fsync(stream.fileno())  # or the kernel writes them out while we measure
    tell("records", layout.slots, layout.slots)


def _stacked(arena: Arena, slots: npt.NDArray[np.int64]) -> Tensor:
    return torch.stack([arena.slot(slot) for slot in slots.tolist()])


def _multiply(maps: Batch, values: Tensor, out: Tensor) -> None:
    """A·V as the engine does it: at once if the batch is one dense tensor, else one record at a time."""
    stacked = maps.stacked
    if stacked is not None and stacked.is_contiguous():
        torch.matmul(stacked, values, out=out)
        return
    for place in range(len(maps)):
        torch.matmul(maps[place], values[place], out=out[place])


def _fetch_job(fetcher: Fetcher, arena: Arena, slots: Sequence[npt.NDArray[np.int64]]) -> Job:
    def job(turn: int) -> None:
        with fetcher.fetch(arena, slots[turn]):
            pass

    return job


def _product_job(
    fetcher: Fetcher, arena: Arena, slots: Sequence[npt.NDArray[np.int64]], values: Tensor, out: Tensor
) -> Job:
    def job(turn: int) -> None:
        with fetcher.fetch(arena, slots[turn]) as maps:
            _multiply(maps, values, out)

    return job


def _check_twins(
    fetchers: Mapping[str, Fetcher], arena: Arena, slots: npt.NDArray[np.int64], values: Tensor, out: Tensor
) -> None:
    """Every variant must give the same bytes, and the same product but for the order of its sums."""
    expected = _stacked(arena, slots)
    products = torch.matmul(expected, values)
    tolerance = _PRODUCT_TOLERANCE[values.dtype]
    for name, fetcher in fetchers.items():
        with fetcher.fetch(arena, slots) as maps:
            equal = len(maps) == len(slots) and all(torch.equal(maps[i], expected[i]) for i in range(len(slots)))
            _multiply(maps, values, out)
        if not equal or not torch.allclose(out, products, rtol=tolerance, atol=tolerance):
            raise AttmemoError(
                f"fetching with {name!r} gave other {'products' if equal else 'maps'} than stacking the slots.",
                "report this with the output of uname -a; use fetch='copy' until then",
            )
