"""Records that come while the model serves, in memory, in front of those of a prepared database if there is one.

Memory is bounded. A record that was not used since the hand passed it last goes first (SIEVE,
Zhang et al., NSDI 2024).
"""

from __future__ import annotations

import threading
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attmemo.embed.tokens import TokenIndex
from attmemo.errors import DatabaseError
from attmemo.kernels.row_attention import Stored
from attmemo.memory import free_memory
from attmemo.reuse.row_store import DatabaseRows, Fetched, Held, Ints, Record, RowStore

SHARE: Final = 0.125
"""Share of the memory that is free at first which records may take."""


class GrowingRows(RowStore):
    """A store that keeps what was computed exactly.

    Parameters
    ----------
    storage : (torch.dtype, torch.dtype)
        Types of K and V, and of the last hidden states.
    heads : int
        Of the model; scales of rows in 8 bits are kept by head.
    base : DatabaseRows, optional
        Records that are there already. Their numbers come first.
    max_bytes : int, optional
        Most bytes of records in memory. Default: an eighth of the free memory.

    Attributes
    ----------
    index : TokenIndex
        Finds records by tokens.
    """

    def __init__(
        self, storage: tuple[torch.dtype, torch.dtype], heads: int, base: DatabaseRows | None = None,
        max_bytes: int | None = None,
    ) -> None:  # fmt: skip
        if max_bytes is None:
            max_bytes = int(SHARE * free_memory())
        if not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 0:
            raise ValueError(f"max_bytes must be a whole number of bytes and must not be negative; got {max_bytes!r}")
        self.storage, self.max_bytes = storage, max_bytes
        self.index = TokenIndex() if base is None else base.index
        self._heads, self._base = heads, base
        self._first = self.index.next
        self._held: dict[int, Record] = {}  # by number, oldest first
        self._used: set[int] = set()  # since the hand passed
        self._hand: int | None = None
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of records in memory."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._held)

    def add(self, tokens: npt.NDArray[np.int32], rows: Tensor, last: Tensor) -> int | None:
        """Keep an exactly computed sequence; one that fits nowhere is left out."""
        record = Record.pack(tokens, rows, last, self.storage, self._heads)
        if record.nbytes > self.max_bytes:
            return None
        with self._lock:
            while self._bytes + record.nbytes > self.max_bytes:
                self._evict()
            number = self.index.next
            self._held[number] = record  # before it can be found
            try:
                self.index.add(tokens)
            except BaseException:
                del self._held[number]
                raise
            self._bytes += record.nbytes
        return number

    def _evict(self) -> None:
        """Drop the next record, from the oldest on, that was not used since the hand passed it last."""
        numbers = list(self._held)
        place = 0 if self._hand is None else int(np.searchsorted(numbers, self._hand))
        while True:
            number = numbers[place % len(numbers)]
            if number not in self._used:
                break
            self._used.discard(number)
            place += 1
        self._hand = number + 1
        self._bytes -= self._held.pop(number).nbytes  # first: a record that cannot be found must not be fetched
        self.index.remove(number)

    def fetch(self, records: Ints) -> Fetched:
        """Rows of these records. DatabaseError: a record was dropped since it was found."""
        own = records >= self._first
        held: list[Record | None] = [None] * len(records)
        for place in np.flatnonzero(own).tolist():
            number = int(records[place])
            found = self._held.get(number)
            if found is None:
                raise DatabaseError("a record was dropped since it was found.", "a larger max_bytes, if it is often")
            held[place] = found
            self._used.add(number)
        if self._base is None or (own | (records < 0)).all():
            return Held(held)
        prepared = self._base.fetch(np.where(own, -1, records))
        return prepared if not own.any() else _Both(prepared, Held(held), own)

    def close(self) -> None:
        with self._lock:
            self._held.clear()
            self._bytes = 0


class _Both:
    """Rows of a batch of which some records are prepared and some are not."""

    def __init__(self, prepared: Fetched, held: Held, own: npt.NDArray[np.bool_]) -> None:
        self._prepared, self._held, self._own = prepared, held, own

    def layer(self, number: int) -> Stored:
        a, b, own = self._prepared.layer(number), self._held.layer(number), self._own
        scales: list[npt.NDArray[np.uint64] | None] = [None, None]
        if a.key_scales is not None and b.key_scales is not None:
            assert a.value_scales is not None
            assert b.value_scales is not None
            scales = [np.where(own, b.key_scales, a.key_scales), np.where(own, b.value_scales, a.value_scales)]
        return Stored(
            np.where(own, b.keys, a.keys), np.where(own, b.values, a.values), np.where(own, b.rows, a.rows), a.dtype,
            a.row_bytes, scales[0], scales[1], a.scale_row_bytes,
        )  # fmt: skip

    def last(self) -> tuple[npt.NDArray[np.uint64], torch.dtype]:
        prepared, dtype = self._prepared.last()
        return np.where(self._own, self._held.last()[0], prepared), dtype
