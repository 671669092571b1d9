"""Sources of maps: the arena, or a stand-in for checks and measurements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attmemo.db import KIND_MAP, Database
from attmemo.db.encodings import length_of, unpack
from attmemo.kernels import map_product
from attmemo.mmap import CACHE_LINE, Arena, Batch, Fetcher, FetcherName, Slots, choose_fetcher
from attmemo.system.locking import thread_lock

Ints = npt.NDArray[np.int64]


class MapSource(ABC):
    """Gives maps for records of one token length, or only their product with V."""

    @abstractmethod
    def fetch(self, layer: int, length: int, records: Ints) -> AbstractContextManager[Batch]:
        """Maps of these records in this layer as they are stored, to be read inside the ``with`` block."""

    def multiply(
        self, layer: int, length: int, records: Ints, values: Tensor, starts: Ints, context: Tensor, rows: Ints
    ) -> None:
        """A·V of these records in this layer, in place.

        Parameters
        ----------
        values : Tensor
            V, ``[N, h * d]``; n rows from ``starts[i]`` on are those of record i.
        context : Tensor
            ``[B, L, h * d]``; ``context[rows[i], :n]`` becomes the product, the rest of the row zero.
        """
        with self.fetch(layer, length, records) as maps:
            multiply_fetched(maps, length, values, starts, context, rows)

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""


class StoredMaps(MapSource):
    """The records' own maps, where they lie in the arena: no copy.

    Parameters
    ----------
    database : Database
    fetch : {"auto", "direct", "map", "view", "copy"}
        "direct" multiplies from the arena without fetching, where that beats torch (see `kernels`). "auto" does so
        too, and elsewhere takes what measures fastest for the pages that the arena got, as "direct" does there.
    """

    def __init__(self, database: Database, fetch: FetcherName = "auto") -> None:
        if fetch not in get_args(FetcherName):
            raise ValueError(f"fetch must be one of {', '.join(get_args(FetcherName))}, got {fetch!r}")
        self._database = database
        self._direct = fetch in ("auto", "direct")
        self._name: FetcherName = "auto" if fetch == "direct" else fetch
        self._fetchers: dict[int, Fetcher] = {}
        self._lock = thread_lock()

    def fetch(self, layer: int, length: int, records: Ints) -> AbstractContextManager[Batch]:
        arena = self._database.arena(KIND_MAP, length)
        slots = self._database.slots_of(KIND_MAP, layer, records)
        return self._fetcher(arena.window_page_bytes).fetch(arena, slots)

    def multiply(
        self, layer: int, length: int, records: Ints, values: Tensor, starts: Ints, context: Tensor, rows: Ints
    ) -> None:
        arena = self._database.arena(KIND_MAP, length)
        if self._direct and map_product.is_direct(arena.layout.shape, arena.layout.dtype, values.dtype):
            multiply(arena, self._database.slots_of(KIND_MAP, layer, records), values, starts, context, rows)
        else:
            super().multiply(layer, length, records, values, starts, context, rows)

    def close(self) -> None:
        for fetcher in self._fetchers.values():
            fetcher.close()
        self._fetchers.clear()

    def _fetcher(self, page_bytes: int) -> Fetcher:
        fetcher = self._fetchers.get(page_bytes)
        if fetcher is None:
            with self._lock:
                fetcher = self._fetchers.setdefault(page_bytes, choose_fetcher(self._name, page_bytes))
        return fetcher


class HeldMaps(MapSource):
    """Maps in memory, in the form that a database stores: the self-check serves them through the kernel that serves.

    Parameters
    ----------
    maps : mapping of (layer, record) to Tensor
        Stored maps (`attmemo.db.encodings.pack`).
    """

    def __init__(self, maps: Mapping[tuple[int, int], Tensor]) -> None:
        self._maps = dict(maps)

    def fetch(self, layer: int, length: int, records: Ints) -> AbstractContextManager[Batch]:
        return Batch(None, [self._maps[layer, record] for record in records.tolist()])

    def multiply(
        self, layer: int, length: int, records: Ints, values: Tensor, starts: Ints, context: Tensor, rows: Ints
    ) -> None:
        stored = [self._maps[layer, record] for record in records.tolist()]
        shape, dtype = tuple(stored[0].shape), stored[0].dtype
        if not map_product.is_direct(shape, dtype, values.dtype):
            super().multiply(layer, length, records, values, starts, context, rows)
            return
        nbytes = stored[0].numel() * stored[0].itemsize
        stride = -(-nbytes // CACHE_LINE) * CACHE_LINE
        memory = np.zeros(stride * len(stored), np.uint8)
        for place, apm in enumerate(stored):
            memory[place * stride : place * stride + nbytes] = apm.reshape(-1).view(torch.uint8).numpy()
        offsets = np.arange(len(stored), dtype=np.int64) * stride
        map_product.multiply(memory, offsets, shape, dtype, length, values, starts, context, rows)

    def close(self) -> None:
        self._maps.clear()


def multiply(arena: Arena, slots: Slots, values: Tensor, starts: Ints, context: Tensor, rows: Ints) -> None:
    """`kernels.map_product.multiply` for slots of an arena, which it reads where they lie.

    Raises
    ------
    IndexError
        There is no such slot.
    ValueError
        Shapes or types do not fit; nothing was written.
    DatabaseTruncatedError
        The file was cut short since it was opened.
    """
    mapping = arena.mapping
    indices = mapping.indices(slots)
    mapping.check_whole()
    if len(indices):
        layout, offsets = mapping.layout, mapping.offsets(indices)
        length = length_of(layout.shape)
        map_product.multiply(
            mapping.memory, offsets, layout.shape, layout.dtype, length, values, starts, context, rows
        )


def multiply_fetched(
    maps: Batch, n: int, values: Tensor, starts: Ints, context: Tensor, rows: Ints
) -> None:
    """`MapSource.multiply` by torch.

    One tensor is multiplied at once only if it is contiguous and of the right type: `torch.matmul` would silently
    copy a batch with an irregular stride. Otherwise one sequence at a time, whose converted map stays in the cache.
    """
    stacked = maps.stacked
    heads = stacked.shape[1] if stacked is not None else maps[0].shape[0]
    if stacked is not None and stacked.dim() == 4 and stacked.dtype == values.dtype and stacked.is_contiguous():
        v = torch.stack([values[start : start + n] for start in starts.tolist()]).view(len(rows), n, heads, -1)
        products = torch.matmul(stacked, v.transpose(1, 2))  # [g, h, n, d]
        for place, row in enumerate(rows.tolist()):
            context[row, :n].view(n, heads, -1).copy_(products[place].transpose(0, 1))
    else:
        for place, (start, row) in enumerate(zip(starts.tolist(), rows.tolist(), strict=True)):
            apm = unpack(maps[place])
            if apm.dtype != values.dtype:
                apm = apm.to(values.dtype)
            v = values[start : start + n].view(n, heads, -1)
            context[row, :n].view(n, heads, -1).copy_(torch.matmul(apm, v.transpose(0, 1)).transpose(0, 1))
    if n < context.shape[1]:
        for row in rows.tolist():
            context[row, n:] = 0
