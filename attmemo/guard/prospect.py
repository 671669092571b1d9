"""How much of what is asked records could supply, by token ids alone: known before anything is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attmemo.forward.batch_slices import ids_in
from attmemo.kernels.align import Tokens
from attmemo.rows.index import TokenIndex
from attmemo.rows.planner import Asked
from attmemo.system.locking import thread_lock

FIRST: Final = 8
"""Forwards that are all seen. Of later ones one of so many is looked up, and where it has few inputs the one before is
remembered."""
EACH: Final = 8
"""Inputs of a forward that are looked up."""
MOST: Final = 512
"""Inputs that are remembered at most."""
LATELY: Final = 0.25
"""Weight of the newest forward."""


class Prospect:
    """Remembers the tokens of inputs as if each had become a record, and looks up others among them.

    Parameters
    ----------
    supplied : callable
        Says which share of the rows of inputs the records of an index could supply.

    Attributes
    ----------
    share : float or None
        This share of what was asked lately; None: not known yet.
    """

    def __init__(self, supplied: Callable[[Asked, TokenIndex], float]) -> None:
        self.share: float | None = None
        self._supplied, self._forwards, self._weight = supplied, 0, 0.0
        self._index, self._inputs = TokenIndex(), list[Tokens]()
        self._lock = thread_lock()

    def look(self, given: Mapping[str, Any], mask: Tensor) -> None:
        """See the arguments of a forward, with this mask ``[B, L]``, if it is time for that."""
        ids = ids_in(given)
        if ids is None or ids.shape != mask.shape:
            return
        with self._lock:
            self._forwards += 1
            looks = self._forwards <= FIRST or self._forwards % FIRST == 0
            # Of few inputs, the one before may be what those that are looked up are like.
            if not (looks or (self._forwards % FIRST == FIRST - 1 and len(ids) < EACH)):
                return
            inputs = _inputs_of(ids.numpy(), mask.numpy() != 0)
            if looks and inputs and self._inputs:
                self._look_up(inputs)
            self._remember(inputs)

    def _look_up(self, inputs: Sequence[Tokens]) -> None:
        """See what the inputs that are remembered could supply to some of these."""
        some = [inputs[place] for place in range(0, len(inputs), max(len(inputs) // EACH, 1))]
        found = self._supplied(Asked.of(np.concatenate(some), np.array([len(one) for one in some])), self._index)
        self._weight += LATELY * (1.0 - self._weight)
        before = self.share or 0.0
        self.share = before + LATELY / self._weight * (found - before)

    def _remember(self, inputs: list[Tokens]) -> None:
        self._inputs += inputs
        if len(self._inputs) > MOST:
            inputs = self._inputs = self._inputs[-MOST // 2 :]
            self._index = TokenIndex()
        self._index.extend(inputs, range(self._index.next, self._index.next + len(inputs)))


def _inputs_of(ids: npt.NDArray[Any], valid: npt.NDArray[np.bool_]) -> list[Tokens]:
    """Return the tokens of each input that has any."""
    lengths = valid.sum(1)
    lengths = lengths[lengths > 0]
    return np.split(ids[valid].astype(np.int32), np.cumsum(lengths)[:-1]) if len(lengths) else []
