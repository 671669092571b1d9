"""Twins: sequences of one batch with the very same embedded rows. One of them is computed, for all of them.

Lines of a log that were written in the same second are often the same, and they arrive together: no record of an
earlier batch can serve them. What a block does with a sequence depends on its valid rows alone, so this is exact.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]

_LOOKED_AT = 4  # numbers of each row: lines of one template differ in few rows


@dataclass(frozen=True, slots=True)
class Twins:
    """Which sequences of a batch are computed for which.

    Attributes
    ----------
    firsts : int64 [B]
        For each sequence the first one of its twins: often itself.
    own : bool [B]
        Whether a sequence is the first one: only these are computed.
    """

    firsts: Ints
    own: npt.NDArray[np.bool_]

    @classmethod
    def none(cls, batch: int) -> Twins:
        """Every sequence is computed."""
        return cls(np.arange(batch), np.ones(batch, np.bool_))

    @classmethod
    def alike(cls, kinds: Sequence[Hashable]) -> Twins:
        """Sequences of one kind are twins, ``[B]``."""
        first: dict[Hashable, int] = {}
        firsts = np.array([first.setdefault(kind, place) for place, kind in enumerate(kinds)], np.int64)
        return cls(firsts, firsts == np.arange(len(firsts)))

    @classmethod
    def of(
        cls, hidden: Tensor, lengths: Sequence[int], kinds: Sequence[Hashable] | None = None, *, left: bool = False
    ) -> Twins:
        """The twins of a batch.

        Parameters
        ----------
        hidden : Tensor
            Embedded rows, ``[B, L, H]``.
        lengths : sequence of int
            Valid tokens of each sequence, at least 1.
        kinds : sequence, optional
            What twins have in common beside their rows, ``[B]``: how a record serves them.
        left : bool
            Whether padding is on the left of them.
        """
        found = cls.none(len(lengths))
        if len(lengths) < 2:
            return found
        firsts: dict[Hashable, list[int]] = {}
        whole = (hidden if hidden.stride(-1) == 1 else hidden.contiguous()).view(torch.uint8).numpy()
        marks = np.ascontiguousarray(whole[:, :, : _LOOKED_AT * hidden.itemsize])
        for place, n in enumerate(lengths):
            own = slice(whole.shape[1] - n, None) if left else slice(n)
            kind = marks[place, own].tobytes(), None if kinds is None else kinds[place]
            alike = firsts.get(kind)
            if alike is None:
                firsts[kind] = [place]
                continue
            for first in alike:
                if np.array_equal(whole[place, own], whole[first, own]):
                    found.firsts[place], found.own[place] = first, False
                    break
            else:
                alike.append(place)
        return found

    @property
    def some(self) -> bool:
        """Whether there are any."""
        return not self.own.all()

    def spread(self, output: Tensor) -> None:
        """Give each sequence of ``[B, L, H]`` the rows of the first of its twins."""
        rows = output.view(torch.uint8).numpy()  # NumPy: an operator of torch for each twin takes as long as the copy
        for place in np.flatnonzero(~self.own).tolist():
            rows[place] = rows[self.firsts[place]]
