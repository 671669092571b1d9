"""The embedded rows of a batch of token ids, without padding: `native/embed.c` and its oracle in torch.

A row is the sum of rows of a few tables: of the token, of its type, of its position, in this order. Each sum is
rounded to the tables' type, as torch does it. Shapes: B sequences of padded length L, N rows of H numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import embedding

from attmemo.kernels import _embed as native
from attmemo.kernels.omp_team import join_torch

Ints = npt.NDArray[np.int64]

_ANY_LENGTH: Final = 1 << 40  # rows of a table of positions that is not there
_MANY: Final = 1 << 17  # numbers of the result: less is faster done than another thread is told of

join_torch(native.use_team)

TYPES = (torch.float32, torch.bfloat16)
"""Number types of the tables."""


class Tables:
    """The tables of a model.

    Parameters
    ----------
    words : Tensor
        ``[rows, H]``, contiguous on the CPU.
    types, positions : Tensor or None
        The same, of the same type. None: tokens have no types, or positions add nothing.
    padding : int
        The token that does not count as a position: it has this position itself, and the others count up from the
        next one. -1: all count from 0.
    """

    __slots__ = ("dtype", "native", "padding", "positions", "rows", "types", "width", "words")

    def __init__(self, words: Tensor, types: Tensor | None, positions: Tensor | None, padding: int = -1) -> None:
        for table in (one for one in (words, types, positions) if one is not None):
            if table.dtype not in TYPES or not table.is_contiguous() or table.device.type != "cpu" or table.dim() != 2:
                raise ValueError(f"tables are contiguous, float32 or bfloat16, on the CPU, not {table.dtype}")
            if table.dtype != words.dtype or table.shape[1] != words.shape[1]:
                raise ValueError(f"tables are of one type and width, not {table.dtype} {tuple(table.shape)}")
        self.words, self.types, self.positions, self.padding = words, types, positions, padding
        self.dtype, self.width = words.dtype, words.shape[1]
        kinds, places = (0 if one is None else len(one) for one in (types, positions))
        self.rows = len(words), kinds, _ANY_LENGTH if positions is None else places
        kinds, places = (0 if one is None else one.data_ptr() for one in (types, positions))
        self.native = words.data_ptr(), kinds, places, words.shape[1], words.itemsize


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of token ids whose padding is on the right.

    Attributes
    ----------
    given : tuple of arrays
        Ids, types and mask, int64 ``[B, L]``; types and mask may be None.
    starts : int64 [B + 1]
        Where the rows of each sequence begin.
    lengths : int64 [B]
        Valid tokens of each sequence.
    firsts : int64 [B]
        The first sequence that is the same: often itself. Only this one has rows.
    longest, tokens : int
        The most tokens of a sequence, and those of all.
    distinct : int
        Sequences that have rows.
    """

    given: tuple[Ints, Ints | None, Ints | None]
    starts: Ints
    lengths: Ints
    firsts: Ints
    longest: int
    tokens: int
    distinct: int

    @property
    def rows(self) -> int:
        """Rows to compute, N."""
        return int(self.starts[-1])

    @property
    def own(self) -> Ints:
        """Numbers of the sequences that have rows."""
        return np.flatnonzero(self.firsts == np.arange(len(self.firsts)))


def read_batch(given: tuple[Ints, Ints | None, Ints | None], tables: Tables) -> Batch | None:
    """Read ids, types and mask, int64 ``[B, L]`` without gaps; types and mask may be None.

    None: they are others, the mask is not plain padding on the right, a sequence is empty, or a table has no row for a
    token, padding too.
    """
    count = len(given[0])
    starts, lengths, firsts = np.empty(count + 1, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    read = native.read(given, tables.rows, tables.padding, starts, lengths, firsts)
    return None if read is None else Batch(given, starts, lengths, firsts, *read)


def embed(batch: Batch, tables: Tables, out: Tensor, places: Ints | None = None) -> None:
    """Embed the sequences of a batch that differ, or the tokens at some places.

    Parameters
    ----------
    out : Tensor [N, H]
        The result; of the tables' type, contiguous on the CPU.
    places : int64 [N], optional
        Places of tokens in the padded batch, counted through all of it.

    Raises
    ------
    ValueError
        Arguments do not fit each other.
    """
    rows = len(out)
    if out.shape != (rows, tables.width) or out.dtype != tables.dtype or not out.is_contiguous():
        raise ValueError(f"out is {tables.dtype} [N, {tables.width}], not {out.dtype} {tuple(out.shape)}")
    threads = torch.get_num_threads() if rows * tables.width > _MANY else 1
    native.add(
        batch.given, tables.rows, tables.padding, batch.starts, places, tables.native, (out.data_ptr(), rows), threads
    )  # fmt: skip


def spread(rows: Tensor, batch: Batch) -> Tensor:
    """Put rows ``[N, H]`` to the places of all sequences, ``[B, L, H]``; zeros behind their tokens."""
    count, padded = batch.given[0].shape
    if batch.tokens == count * padded and batch.distinct == count:
        return rows.view(count, padded, -1)
    rows, width = rows.contiguous(), rows.shape[1]
    out = rows.new_empty(count, padded, width)
    line = width * rows.itemsize
    native.spread((rows.data_ptr(), line), batch.starts, batch.lengths, batch.firsts, (out.data_ptr(), padded))
    return out


def read_batch_plain(given: tuple[Ints, Ints | None, Ints | None], tables: Tables) -> Batch | None:
    """`read_batch`, sequence by sequence."""
    ids, types, mask = given
    parts = [part for part in given if part is not None]
    if not ids.size or any(part.dtype != np.int64 or part.shape != ids.shape or part.ndim != 2 for part in parts):
        return None
    words, kinds, positions = tables.rows
    padded = ids.shape[1]
    valid = np.ones_like(ids) if mask is None else mask
    lengths = (valid == 1).sum(1)
    if not np.array_equal(valid, np.arange(padded) < lengths[:, None]) or not lengths.all():
        return None
    if ids.min() < 0 or ids.max() >= words or positions_in_torch(torch.from_numpy(ids), tables).max() >= positions:
        return None
    if types is not None and (types.min() < 0 or types.max() >= kinds):
        return None
    seen: dict[tuple[bytes, bytes], int] = {}
    firsts, rows = [], []
    for number, n in enumerate(lengths.tolist()):
        alike = ids[number, :n].tobytes(), b"" if types is None else types[number, :n].tobytes()
        firsts.append(seen.setdefault(alike, number))
        rows.append(n if firsts[-1] == number else 0)
    starts, counts = np.cumsum([0, *rows]), (int(lengths.max()), int(lengths.sum()), len(seen))
    return Batch(given, starts, lengths, np.array(firsts), *counts)


def embed_in_torch(batch: Batch, tables: Tables) -> Tensor:
    """`embed`, with an operator for each table and each sum, over the padded batch."""
    ids, types = (None if part is None else torch.from_numpy(part) for part in batch.given[:2])
    assert ids is not None
    rows = embedding(ids, tables.words)
    if tables.types is not None:
        rows = rows + embedding(torch.zeros_like(ids) if types is None else types, tables.types)
    if tables.positions is not None:
        rows = rows + embedding(positions_in_torch(ids, tables), tables.positions)
    own = zip(rows, batch.lengths.tolist(), batch.firsts.tolist(), strict=True)
    return torch.cat([row[:n] for number, (row, n, first) in enumerate(own) if first == number])


def spread_in_torch(rows: Tensor, batch: Batch) -> Tensor:
    """`spread`, sequence by sequence."""
    out = rows.new_zeros(*batch.given[0].shape, rows.shape[1])
    for number, (n, first) in enumerate(zip(batch.lengths.tolist(), batch.firsts.tolist(), strict=True)):
        out[number, :n] = rows[batch.starts[first] : batch.starts[first] + n]
    return out


def positions_in_torch(ids: Tensor, tables: Tables) -> Tensor:
    """The position of each token, ``[B, L]``."""
    if tables.padding < 0:
        return torch.arange(ids.shape[1]).expand(ids.shape)
    counts = (ids != tables.padding).long()
    return counts.cumsum(1) * counts + tables.padding
