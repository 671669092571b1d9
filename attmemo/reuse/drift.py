"""The drift of last hidden states: reused rows follow those that were computed anew.

A reused row has not seen the tokens that changed. Some of the computed rows are those of tokens that the record has
too: the first and the last one, and neighbours of what changed. How far these moved from the record's rows tells how
far the others would have moved. A share of the mean of these moves is added to the reused rows: the intraclass
correlation of the moves, which is what one move tells of another. It is 1 if the moves are equal, and 0 if they are as
different as moves without a common part.

Means of the last hidden states are then nearer to the exact ones (docs/rows.md). A class that is read from the first
token is what it was: its row is computed.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attmemo.kernels.rows import copy_rows

SHARE: Final = 1.0
"""Of what is expected: 0 leaves reused rows where they are."""

Ints = npt.NDArray[np.int64]


def steps_of(
    output: Tensor, source: npt.NDArray[np.int32], sequence: Ints, places: Ints, begins: npt.NDArray[np.uint64],
    dtype: torch.dtype,
) -> npt.NDArray[np.float32] | None:  # fmt: skip
    """By how much the reused rows of each sequence move: ``[B, H]``; None if no row moves.

    NumPy, not torch: these are a few rows, and an operator of torch would wake its threads for each step.

    Parameters
    ----------
    output : Tensor [R, H]
        Last hidden states; those of computed rows are read.
    source : int32 [N]
        For each token what supplies it, as in `attmemo.kernels.align.Alignment`.
    sequence, places : int64 [N]
        The sequence of each token, ascending, and its row of `output`.
    begins : uint64 [B]
        Where the last hidden states of each sequence's record begin in memory.
    dtype : torch.dtype
        Their type.
    """
    known = np.flatnonzero(source < -1)
    owners = sequence[known]
    counts = np.bincount(owners, minlength=len(begins)).astype(np.float32)
    moving = np.flatnonzero(counts >= 2)  # one move alone has no variance, and tells nothing
    if not len(moving) or not (source >= 0).any():
        return None
    before = torch.empty(len(known), output.shape[1], dtype=output.dtype)
    row_bytes = np.uint64(output.shape[1] * dtype.itemsize)
    copy_rows(
        begins[owners] + (-2 - source[known]).astype(np.uint64) * row_bytes, dtype, np.arange(len(known)), before
    )
    moves = _floats(output[torch.from_numpy(places[known])]) - _floats(before)
    firsts = np.searchsorted(owners, np.flatnonzero(counts))  # each sequence's moves lie one behind the other
    means = np.zeros((len(begins), output.shape[1]), np.float32)
    means[counts > 0] = np.add.reduceat(moves, firsts)
    means[moving] /= counts[moving, None]
    moves -= means[owners]
    apart = np.bincount(owners, np.einsum("nh,nh->n", moves, moves), minlength=len(begins))
    within = apart[moving] / (counts[moving] - 1.0)  # variance of the moves of a sequence
    common = np.maximum(np.einsum("nh,nh->n", means[moving], means[moving]) - within / counts[moving], 0.0)
    every = common + within
    steps = np.zeros_like(means)
    steps[moving] = means[moving] * (SHARE * common / np.where(every > 0.0, every, 1.0))[:, None]
    return steps


def _floats(rows: Tensor) -> npt.NDArray[np.float32]:
    found: npt.NDArray[np.float32] = rows.float().numpy()
    return found
