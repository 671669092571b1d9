"""Computed rows and rows of records, put where a batch wants them: `native/rows.c` and its oracle in torch.

THE DRIFT.  A reused row has not seen the tokens that changed. Some of the computed rows are those of tokens that the
record has too: the first and the last one, and most neighbours of what changed. How far these moved from the record's
rows tells how far the others would have moved. A share of the mean of these moves is added to the reused rows: the
intraclass correlation of the moves, which is what one move tells of another. It is 1 if the moves are equal, and 0 if
they are as different as moves without a common part. With m moves, c the squared length of their mean, and w the sum
of squares of what is left, divided by m - 1, it is ``d / (d + w)`` with ``d = max(c - w / m, 0)``.

Means of the last hidden states are then nearer to the exact ones (docs/rows.md). A class that is read from the first
token is what it was: its row is computed.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attmemo.kernels import _rows as native
from attmemo.kernels.omp_team import join_torch

_TYPES: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as `enum type` has them
_MANY: Final = 1 << 17  # numbers of the result: less is faster done than another thread is told of

Ints = npt.NDArray[np.int64]

join_torch(native.use_team)


@dataclass(frozen=True)
class Supply:
    """What a batch takes from records.

    Attributes
    ----------
    source : int32 [N]
        For each token the row of its record that supplies it. Below 0: computed. -2 - r: computed, although row r of
        the record is of the same token. Without a record all are -1.
    starts : int64 [B + 1]
        Where the tokens of each sequence begin, and N.
    firsts : int64 [B + 1]
        Where the computed rows of each sequence begin, and M.
    places : int64 [B]
        The row of the result of each sequence's first token; the others stand behind.
    begins : uint64 [B]
        Where the last hidden states of each sequence's record begin in memory; 0: it has none. The caller vouches for
        the addresses and for the rows of records, and keeps the memory alive.
    dtype : torch.dtype
        Of the records.
    """

    source: npt.NDArray[np.int32]
    starts: Ints
    firsts: Ints
    places: Ints
    begins: npt.NDArray[np.uint64]
    dtype: torch.dtype


def supply_rows(
    out: Tensor, fresh: Tensor, supply: Supply, padded: int, share: float = 1.0, *, threads: int | None = None,
    isa: str = "",
) -> None:  # fmt: skip
    """Put computed rows, and those that records supply, to their places; zeros behind the tokens of a sequence.

    Parameters
    ----------
    out : Tensor [R, H]
        The result; float32, float16 or bfloat16, contiguous on the CPU.
    fresh : Tensor [M, H]
        Computed rows, one behind the other, of the same type.
    supply : Supply
        Rows of records move by what the computed ones have in common.
    padded : int
        Rows of each sequence in the result, with those behind its tokens.
    share : float
        Of the expected move. 0 leaves reused rows as they are in the record.
    threads : int, optional
        None: as many as torch uses.
    isa : str
        One of `instruction_sets`, empty for the best.

    Raises
    ------
    ValueError
        Anything does not fit; nothing was written.
    MemoryError
        There is no memory for a few rows.
    """
    _check(out, fresh, supply.dtype)
    if threads is None:
        threads = torch.get_num_threads() if out.numel() > _MANY else 1
    native.supply(
        supply.source, supply.starts, supply.firsts, supply.places, supply.begins, (fresh.data_ptr(), len(fresh)),
        (out.data_ptr(), *out.shape, padded, _TYPES[supply.dtype], _TYPES[out.dtype]), share, threads, isa,
    )  # fmt: skip


def supply_rows_in_torch(
    out: Tensor, fresh: Tensor, supply: Supply, padded: int, share: float = 1.0
) -> None:  # fmt: skip
    """The same, row by row."""
    _check(out, fresh, supply.dtype)
    dtype, ends = supply.dtype, pairwise(supply.starts.tolist())
    for number, ((start, stop), place, begin) in enumerate(
        zip(ends, supply.places.tolist(), supply.begins.tolist(), strict=True)
    ):
        own = supply.source[start:stop].tolist()
        computed = iter(fresh[supply.firsts[number] : supply.firsts[number + 1]])
        for token, row in enumerate(own):
            if row < 0:
                out[place + token] = next(computed)
        out[place + len(own) : place + padded] = 0

        def stored(row: int, begin: int = begin) -> Tensor:
            memory = (ctypes.c_char * (out.shape[1] * dtype.itemsize)).from_address(
                begin + row * out.shape[1] * dtype.itemsize
            )
            return torch.frombuffer(bytearray(memory), dtype=dtype)

        moves = [
            out[place + token].float() - stored(-2 - row).to(out.dtype).float()
            for token, row in enumerate(own) if row < -1
        ]  # fmt: skip
        step = torch.zeros(out.shape[1])
        if len(moves) > 1:  # one move alone has no variance, and tells nothing
            every = torch.stack(moves)
            within = float(every.var(0).sum())
            common = max(float(every.mean(0).square().sum()) - within / len(moves), 0.0)
            if common > 0:
                step = share * common / (common + within) * every.mean(0)
        for token, row in enumerate(own):
            if row >= 0:
                out[place + token] = (stored(row).float() + step).to(out.dtype)


def instruction_sets() -> list[str]:
    """The instruction sets of this processor that the kernel was built for, best first."""
    return native.instruction_sets()


def _check(out: Tensor, fresh: Tensor, dtype: torch.dtype) -> None:
    for name, rows in (("out", out), ("fresh", fresh)):
        if rows.dim() != 2 or not rows.is_contiguous() or rows.device.type != "cpu":
            shape = tuple(rows.shape)
            raise ValueError(f"{name} must be contiguous, [R, H] on the CPU, not {shape} on {rows.device.type}")
    if out.dtype != fresh.dtype or out.shape[1] != fresh.shape[1]:
        raise ValueError(f"out and fresh must fit, not {out.dtype} {out.shape} and {fresh.dtype} {fresh.shape}")
    if dtype not in _TYPES or out.dtype not in _TYPES:
        raise ValueError(f"rows are float32, float16 or bfloat16, not {dtype} and {out.dtype}")
