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


def follow(
    output: Tensor, source: npt.NDArray[np.int32], sequence: Ints, places: Ints, begins: npt.NDArray[np.uint64],
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Move reused rows, in place.

    Parameters
    ----------
    output : Tensor [R, H]
        Last hidden states.
    source : int32 [N]
        For each token what supplies it, as in `attmemo.kernels.align.Alignment`.
    sequence, places : int64 [N]
        The sequence of each token, and its row of `output`.
    begins : uint64 [B]
        Where the last hidden states of each sequence's record begin in memory.
    dtype : torch.dtype
        Their type.
    """
    known, reused = np.flatnonzero(source < -1), np.flatnonzero(source >= 0)
    if not len(known) or not len(reused):
        return
    before = torch.empty(len(known), output.shape[1], dtype=output.dtype)
    row_bytes = np.uint64(output.shape[1] * dtype.itemsize)
    copy_rows(
        begins[sequence[known]] + (-2 - source[known]).astype(np.uint64) * row_bytes, dtype, np.arange(len(known)),
        before,
    )  # fmt: skip
    moves = (output[torch.from_numpy(places[known])] - before).float()
    owners = torch.from_numpy(sequence[known])
    counts = torch.bincount(owners, minlength=len(begins)).float()
    means = torch.zeros(len(begins), output.shape[1]).index_add_(0, owners, moves) / counts.clamp(min=1.0)[:, None]
    apart = torch.zeros(len(begins)).index_add_(0, owners, (moves - means[owners]).square().sum(1))
    within = apart / (counts - 1.0)  # variance of the moves of a sequence; one move alone has none, and tells nothing
    common = (means.square().sum(1) - within / counts).clamp(min=0.0)
    correlation = (common / (common + within)).nan_to_num(0.0)
    steps = (SHARE * correlation[:, None] * means).to(output.dtype)
    output.index_add_(0, torch.from_numpy(places[reused]), steps[torch.from_numpy(sequence[reused])])
