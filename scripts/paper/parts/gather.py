"""The cost of fetching maps: copy and window, alone and with the A·V that follows; and A·V without a fetch."""

from __future__ import annotations

import os
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attmemo.db import KIND_MAP, SlotKind
from attmemo.db.encodings import TYPES
from attmemo.db.slots import SlotClass
from attmemo.errors import AttmemoError
from attmemo.kernels.map_product import is_direct
from attmemo.maps.source import multiply, multiply_fetched
from attmemo.mmap import Arena, SlotLayout, choose_fetcher
from attmemo.mmap.fetch import Batch, CopyFetcher, Fetcher, MapFetcher
from attmemo.profiler.turns import Job, interleave
from attmemo.system.machine import conditions
from paper.parts import limits

Ints = npt.NDArray[np.int64]
VARIANTS: Final = ("copy", "copy_reused", "map", "direct", "contiguous")  # see `bench_gather`
_PRODUCT_TOLERANCE: Final = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


class _Buffer:
    """Hands out one tensor: filled at each fetch, or as it is. The latter is no fetch, and the floor of the others."""

    def __init__(self, tensor: Tensor, fill: bool) -> None:
        self.tensor, self.fill = tensor, fill

    def fetch(self, arena: Arena, slots: Ints) -> Batch:
        if self.fill:
            torch.stack([arena.slot(slot) for slot in slots.tolist()], out=self.tensor)
        return Batch(self.tensor)

    def close(self) -> None:
        pass


class _Work:
    """The variants' jobs, and their tensors.

    `slots` has an int64 array ``[batch]`` for each turn, `values` is V as the engine has it,
    ``[batch * length, heads * width]``; `fetchers` are all variants but ``direct``.
    """

    def __init__(self, slots: list[Ints], values: Tensor, fetchers: dict[str, Any]) -> None:
        self.slots, self.values, self.fetchers = slots, values, fetchers
        self.there: Tensor = fetchers["contiguous"].tensor  # [batch, heads, length, length]
        batch, _, self._length, _ = self.there.shape
        self.context = torch.empty(batch, self._length, values.shape[1], dtype=values.dtype)
        self._rows = np.arange(batch, dtype=np.int64)
        self._starts = self._rows * self._length

    def put_there(self, arena: Arena, turn: int) -> None:
        """Have the maps of this turn there for ``contiguous``."""
        for place, slot in enumerate(self.slots[turn].tolist()):
            self.there[place].copy_(arena.slot(slot))

    def jobs(self, arena: Arena) -> dict[str, Job]:
        """By variant: the fetch and the end of its batch; as ``<variant>_matmul``, the same with A·V."""
        jobs: dict[str, Job] = {}
        for name, fetcher in self.fetchers.items():
            if name != "contiguous":
                jobs[name] = partial(self._fetch, arena, fetcher)
            jobs[f"{name}_matmul"] = partial(self._product, arena, fetcher)
        return jobs | {"direct_matmul": partial(self._direct, arena)}

    def _fetch(self, arena: Arena, fetcher: Fetcher, turn: int) -> None:
        with fetcher.fetch(arena, self.slots[turn]):
            pass

    def _product(self, arena: Arena, fetcher: Fetcher, turn: int) -> None:
        with fetcher.fetch(arena, self.slots[turn]) as maps:
            multiply_fetched(maps, self._length, self.values, self._starts, self.context, self._rows)

    def _direct(self, arena: Arena, turn: int) -> None:
        multiply(arena, self.slots[turn], self.values, self._starts, self.context, self._rows)

    def check(self, arena: Arena) -> None:
        """An AttmemoError if a variant gives other bytes, or another product beyond the order of its sums."""
        self.put_there(arena, 0)
        wanted = [arena.slot(slot) for slot in self.slots[0].tolist()]
        batch, heads, length, _ = self.there.shape
        values = self.values.view(batch, length, heads, -1).transpose(1, 2)
        expected = torch.matmul(self.there, values).transpose(1, 2).reshape(self.context.shape)
        tolerance = _PRODUCT_TOLERANCE[self.values.dtype]
        for name, job in self.jobs(arena).items():
            variant = name.removesuffix("_matmul")
            if name == variant:
                with self.fetchers[name].fetch(arena, self.slots[0]) as maps:
                    if not all(torch.equal(maps[i], apm) for i, apm in enumerate(wanted)):
                        raise _differs(name, "maps")
                continue
            self.context.fill_(torch.nan)
            job(0)
            if not torch.allclose(self.context, expected, rtol=tolerance, atol=tolerance):
                raise _differs(variant, "products")


def bench_gather(
    *, heads: int = 12, length: int = 512, batch: int = 32, dtype: str = "bfloat16", width: int = 64,
    repeats: int = 9,
) -> dict[str, Any]:  # fmt: skip
    """Cost of fetching a batch of maps scattered in an arena, alone and with the A·V that follows.

    The sum counts: a window of small pages only moves the cost into the product, which faults them in.

    Maps are ``[batch, heads, length, length]``, V is ``[batch, heads, length, width]``; each turn has other slots.
    Variants: ``copy`` into a fresh tensor; ``copy_reused`` into a kept one; ``map``, a window mapped, and made
    inaccessible at the end of the batch, all in the time; ``direct``, our kernel reads the maps where they lie;
    ``contiguous``, maps that are there already. ``fetch_ms`` is None without a fetch; ``fetcher`` is the choice of the
    engine here, ``bytes`` are those of a batch.

    StorageFullError, AttmemoError: there is no room; the variants did not give the same maps or products.
    """
    where = conditions()
    shape, kind = (heads, length, length), TYPES[dtype]
    # As in a database: where slots begin decides which pages a window over them can have.
    layout = SlotClass.make(SlotKind(KIND_MAP, 1, dtype, shape), length).layout.with_slots(2 * batch)
    nbytes = batch * layout.nbytes
    # A fresh copy, a kept one, the maps that are there already, and the arena; V, its product, and both of them in
    # another layout.
    in_memory = 3 * nbytes + layout.file_bytes + 4 * batch * heads * length * width * kind.itemsize
    limits.check_room(in_memory, layout.file_bytes)
    notes = limits.busy(where)
    generator, scattered = torch.Generator().manual_seed(limits.SEED), np.random.default_rng(limits.SEED)
    mapped = MapFetcher(strict=True)  # nothing of a batch can be read after its end
    with tempfile.TemporaryDirectory(prefix=limits.PREFIX) as folder:
        file = Path(folder) / "bench.slots"
        _write_maps(file, layout, generator)
        values = torch.randn(batch * length, heads * width, generator=generator).to(kind)
        fetchers: dict[str, Any] = {
            "copy": CopyFetcher(),
            "copy_reused": _Buffer(torch.empty(batch, *shape, dtype=kind), fill=True),
            "map": mapped,
            "contiguous": _Buffer(torch.empty(batch, *shape, dtype=kind), fill=False),
        }
        work = _Work([scattered.permutation(layout.slots)[:batch] for _ in range(1 + repeats)], values, fetchers)
        try:
            with Arena(file, layout) as arena:
                work.check(arena)
                before = partial(work.put_there, arena)
                found = interleave(work.jobs(arena), repeats, before=before)
                del before  # or it keeps the arena mapped
                with closing(choose_fetcher("auto", arena.window_page_bytes)) as chosen:
                    fetcher = "direct" if is_direct(shape, kind, kind) else chosen.name
                facts = {
                    "fetcher": fetcher, "page_bytes": arena.page_bytes, "window_page_bytes": arena.window_page_bytes,
                }  # fmt: skip
                if not arena.mapping.layout.dense:
                    notes.append("slots are padded to pages: 'map' is multiplied one record at a time")
        finally:
            for fetcher in fetchers.values():
                fetcher.close()
    if mapped.fallbacks:
        notes.append(f"{mapped.fallbacks} batches of 'map' were copied instead: {mapped.fallback_reason}")
    settings = {"heads": heads, "length": length, "batch": batch, "dtype": dtype, "width": width}
    rows = [
        {"variant": name, **settings, "fetch_ms": found[name].ms if name in found else None,
         "fetch_matmul_ms": found[f"{name}_matmul"].ms}
        for name in VARIANTS
    ]  # fmt: skip
    where |= settings | {"repeats": repeats}
    return {"rows": rows, **facts, "bytes": nbytes, "conditions": where, "notes": notes}


def _write_maps(file: Path, layout: SlotLayout, generator: torch.Generator) -> None:
    """Random probability maps, one in each slot."""
    with file.open("wb") as stream:
        stream.write(bytes(layout.header))
        for _ in range(layout.slots):
            apm = torch.randn(layout.shape, generator=generator).mul_(2.0).softmax(-1)
            stream.write(apm.to(layout.dtype).view(torch.uint8).numpy().tobytes())
            stream.write(bytes(layout.stride - layout.nbytes))
        stream.flush()
        os.fsync(stream.fileno())  # or the kernel writes them out while we measure


def _differs(name: str, what: str) -> AttmemoError:
    return AttmemoError(
        f"fetching with {name!r} gave other {what} than stacking the slots.",
        "report this with the output of uname -a; use fetch='copy' until then",
    )
