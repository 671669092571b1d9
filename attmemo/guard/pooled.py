"""Answers that are pooled from last hidden states of records, here or by the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from attmemo.guard.answers import Answers, Read

BOTH_WAYS: Final = 32
"""Batches whose pooled answers are verified by a run of the model too: so many at first, one in so many later."""


class Pooled:
    """Pools answers as the model would.

    Where a model gives out the hidden states of its blocks as they are, and answers are pooled from those, they are
    pooled here: to run the model for that takes longer than all else that the guard does. The first batches that are
    verified so, and one in so many later, run the model too. If that gives other answers, all later do.

    Parameters
    ----------
    answers : Answers
    """

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._agrees, self._times = True, 0

    def read(
        self, last: Tensor, mask: Tensor | None, gives_out: bool, by_model: Callable[[], Read | None]
    ) -> Read | None:
        """Answers from last hidden states ``[b, L, H]``; None: they cannot be had.

        `gives_out`: the model gives out what its blocks gave. `by_model` runs it.
        """
        pooled = None
        if self._agrees and gives_out:
            pooled = self._answers.read({"last_hidden_state": last}, mask)
            self._times += 1
            if self._times > BOTH_WAYS and self._times % BOTH_WAYS:
                return pooled
        found = by_model()
        if found is not None and pooled is not None and not torch.equal(pooled.values, found.values):
            self._agrees = False
        return found
