"""Where rows of records come from.

A record keeps the tokens of a sequence, K and V of every layer, and the last hidden states. K and V are read where
they lie: a store only says where.

Shapes: n tokens of a record, hidden size H, h heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attmemo.db.encodings import quantize

if TYPE_CHECKING:
    from attmemo.rows.layout import Placed

Ints = npt.NDArray[np.int64]


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


class RowStore(Protocol):
    """A collection of records.

    Attributes
    ----------
    generation : int
        Another one from the moment on in which other blocks compute.
    """

    generation: int = 0

    def fetch(self, records: Ints) -> Placed:
        """Rows of these records, ``[B]``; -1: none."""

    def close(self) -> None:
        """Give everything back."""
