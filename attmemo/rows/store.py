"""Where rows of records come from.

A record keeps the tokens of a sequence, K and V of every layer, and the last hidden states. K and V are read where
they lie: a store only says where.

Shapes: n tokens of a record, hidden size H, h heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attmemo.db.encodings import quantize
from attmemo.kernels.row_attention import Stored

Ints = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Record:
    """One record in memory."""

    tokens: npt.NDArray[np.int32]  # [n]
    rows: Tensor  # [layers, 2, n, H]
    scales: Tensor | None  # [layers, 2, n, h] of rows in 8 bits
    last: Tensor  # [n, H]

    @classmethod
    def pack(
        cls, tokens: npt.NDArray[np.int32], rows: Tensor, last: Tensor, storage: tuple[torch.dtype, torch.dtype],
        heads: int,
    ) -> Record:  # fmt: skip
        """A record of computed rows ``[layers, 2, n, H]`` in the types of a choice of storage."""
        of_rows, of_last = storage
        if of_rows is torch.int8:
            codes, scales = quantize(rows, heads)
            return cls(tokens, codes, scales, last.to(of_last))
        return cls(tokens, rows.to(of_rows), None, last.to(of_last))

    @property
    def nbytes(self) -> int:
        """Bytes of its rows and last hidden states."""
        scales = 0 if self.scales is None else self.scales.nbytes
        return self.rows.nbytes + self.last.nbytes + scales + self.tokens.nbytes


def records_of(
    lengths: list[int], rows: Tensor, last: Tensor, storage: tuple[torch.dtype, torch.dtype], heads: int,
    tokens: list[Any] | None = None,
) -> list[Record]:  # fmt: skip
    """Records of the sequences of one exactly computed batch, from what `Stack.keep` gets."""
    found, start = [], 0
    for number, n in enumerate(lengths):
        own = np.zeros(n, np.int32) if tokens is None else tokens[number]
        part = slice(start, start + n)
        found.append(Record.pack(own, rows[:, :, part].clone(), last[part].clone(), storage, heads))
        start += n
    return found


class Fetched(Protocol):
    """Rows of the records of one batch; what they lie in is held as long as this object is."""

    def layer(self, number: int) -> Stored:
        """K and V of one layer."""

    def last(self) -> tuple[Addresses, torch.dtype]:
        """Where the last hidden states of each record begin, ``[B]`` (0: no record), and their type."""


class RowStore(Protocol):
    """A collection of records."""

    def fetch(self, records: Ints) -> Fetched:
        """Rows of these records, ``[B]``; -1: none."""

    def close(self) -> None:
        """Give everything back."""


class HeldRows(RowStore):
    """Records in memory: the self-check serves them through the path that serves a database."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._held = list(records)

    def fetch(self, records: Ints) -> Held:
        return Held([None if record < 0 else self._held[record] for record in records.tolist()])

    def close(self) -> None:
        self._held.clear()


class Held:
    """Rows of records in memory, one for each place of a batch; None: the place has no record."""

    def __init__(self, records: Sequence[Record | None]) -> None:
        self._records = records

    def layer(self, number: int) -> Stored:
        def addresses(name: str, plane: int) -> Addresses:
            found = [None if record is None else getattr(record, name)[number, plane] for record in self._records]
            return np.array([0 if part is None else part.data_ptr() for part in found], np.uint64)

        some = next(record for record in self._records if record is not None)
        rows = np.array([0 if record is None else len(record.tokens) for record in self._records], np.int64)
        coded = some.scales is not None
        return Stored(
            addresses("rows", 0), addresses("rows", 1), rows, some.rows.dtype,
            some.rows.shape[-1] * some.rows.itemsize,
            addresses("scales", 0) if coded else None, addresses("scales", 1) if coded else None,
            some.scales.shape[-1] * 4 if some.scales is not None else 0,
        )  # fmt: skip

    def last(self) -> tuple[Addresses, torch.dtype]:
        addresses = [0 if record is None else record.last.data_ptr() for record in self._records]
        return np.array(addresses, np.uint64), next(r for r in self._records if r is not None).last.dtype
