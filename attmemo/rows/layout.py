"""How the rows of a record lie in one run of bytes, and where the rows of many such records lie in memory.

    K of layer 0 [n, H], V of layer 0 [n, H], K of layer 1, …
    scales of rows in 8 bits [layers, 2, n, h]
    last hidden states [n, H]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attmemo.db import ModelInfo
from attmemo.db.encodings import row_types
from attmemo.db.pools.pool import Pool
from attmemo.db.records import Entry, Kept
from attmemo.kernels.row_attention import Stored
from attmemo.rows.store import Record

_ALIGNED = 64  # bytes: each part begins at a multiple

Number = TypeVar("Number", int, npt.NDArray[np.int64])


@dataclass(frozen=True)
class RowLayout:
    """The parts of records of one model.

    Parameters
    ----------
    layers, hidden, heads : int
    storage : (torch.dtype, torch.dtype)
        Types of K and V, and of the last hidden states.
    """

    layers: int
    hidden: int
    heads: int
    storage: tuple[torch.dtype, torch.dtype]

    @classmethod
    def of(cls, model: ModelInfo, storage: str) -> RowLayout:
        """Of the records of a database that says this about its model, in a storage of `ROW_STORAGE`."""
        return cls(model.layers, model.hidden, model.heads, row_types(storage))

    @cached_property
    def coded(self) -> bool:
        """Whether rows have scales."""
        return self.storage[0] is torch.int8

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of K, or V, of a token in one layer, scales left out."""
        return self.hidden * self.storage[0].itemsize

    def scales_at(self, n: Number) -> Number:
        """Where scales begin in a record of n tokens."""
        return _up(2 * self.layers * self.row_bytes * n)

    def last_at(self, n: Number) -> Number:
        """Where the last hidden states begin in a record of n tokens."""
        begin = self.scales_at(n)
        return _up(begin + 8 * self.layers * self.heads * n) if self.coded else begin

    def nbytes(self, n: int) -> int:
        """Bytes of a record of n tokens."""
        return self.last_at(n) + n * self.hidden * self.storage[1].itemsize

    def parts_of(self, body: npt.NDArray[np.uint8], n: int) -> tuple[Tensor, Tensor]:
        """K and V ``[layers, 2, n, H]`` and the last hidden states ``[n, H]`` in the bytes of a record without scales.

        To write to these is to write the record; the bytes between them become 0.
        """
        end, last = 2 * self.layers * n * self.row_bytes, self.last_at(n)
        body[end:last] = 0
        octets = torch.from_numpy(body)
        rows = octets[:end].view(self.storage[0]).view(self.layers, 2, n, self.hidden)
        return rows, octets[last:].view(self.storage[1]).view(n, self.hidden)

    def body_of(self, record: Record) -> npt.NDArray[np.uint8]:
        """The bytes of a record."""
        n = len(record.tokens)
        body = np.zeros(self.nbytes(n), np.uint8)
        parts: list[tuple[int, Tensor]] = [(0, record.rows), (self.last_at(n), record.last)]
        if record.scales is not None:
            parts.append((self.scales_at(n), record.scales))
        for start, part in parts:
            octets = part.contiguous().view(-1).view(torch.uint8).numpy()
            body[start : start + len(octets)] = octets
        return body

    def record_of(self, kept: Kept) -> Record:
        """A copy of a record of a pool."""
        n, body = len(kept.tokens), torch.from_numpy(kept.body.copy())

        def part(start: int, dtype: torch.dtype, *shape: int) -> Tensor:
            return body[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

        rows = part(0, self.storage[0], self.layers, 2, n, self.hidden)
        scales = part(self.scales_at(n), torch.float32, self.layers, 2, n, self.heads) if self.coded else None
        return Record(kept.tokens, rows, scales, part(self.last_at(n), self.storage[1], n, self.hidden))


def _up(number: Number) -> Number:
    return -(-number // _ALIGNED) * _ALIGNED


class Placed:
    """Rows of records of a pool, one for each place of a batch; None: the place has no record.

    What they lie in is held as long as this object is.
    """

    def __init__(self, layout: RowLayout, records: Sequence[Kept | None]) -> None:
        self._layout, self._records = layout, records
        self._begin, self._rows = np.zeros((2, len(records)), np.int64)
        for place, kept in enumerate(records):
            if kept is not None:
                self._begin[place], self._rows[place] = kept.segment.address + kept.offset, len(kept.tokens)
        self._there = self._begin > 0
        self._last = np.where(self._there, self._begin + layout.last_at(self._rows), 0).astype(np.uint64)

    # Where records supply all, no layer is asked for.

    @cached_property
    def _planes(self) -> npt.NDArray[np.uint64]:
        return self._each(self._begin, self._rows * self._layout.row_bytes)

    @cached_property
    def _scales(self) -> npt.NDArray[np.uint64] | None:
        layout, rows = self._layout, self._rows
        begin = self._begin + layout.scales_at(rows)
        return self._each(begin, 4 * layout.heads * rows) if layout.coded else None

    def _each(self, of: npt.NDArray[np.int64], step: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Addresses of K and V of each layer, ``[layers, 2, B]``; 0: no record."""
        places = np.arange(2 * self._layout.layers, dtype=np.int64).reshape(-1, 2, 1)
        return np.where(self._there, of + places * step, 0).astype(np.uint64)

    @classmethod
    def copied(cls, layout: RowLayout, records: Sequence[Record | None]) -> Placed:
        """Copies of records that no pool has."""
        entries = [Entry(record.tokens, layout.body_of(record)) for record in records if record is not None]
        kept = iter(Pool(None).add(entries).added)
        return cls(layout, [None if record is None else next(kept) for record in records])

    def layer(self, number: int) -> Stored:
        """K and V of one layer."""
        layout = self._layout
        keys, values = self._planes[number]
        key_scales, value_scales = (None, None) if self._scales is None else self._scales[number]
        return Stored(
            keys, values, self._rows, layout.storage[0], layout.row_bytes, key_scales, value_scales,
            4 * layout.heads if layout.coded else 0,
        )  # fmt: skip

    def last(self) -> tuple[npt.NDArray[np.uint64], torch.dtype]:
        """Where the last hidden states of each record begin, ``[B]`` (0: no record), and their type."""
        return self._last, self._layout.storage[1]
