"""How much of what is asked records could supply, by token ids alone: known before anything is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attmemo.forward.batch_slices import ids_in
from attmemo.kernels.align import Tokens
from attmemo.rows.index import TokenIndex
from attmemo.rows.planner import Asked
from attmemo.system.locking import ThreadLock

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
        self._lock = ThreadLock()

    def look(self, given: Mapping[str, Any], mask: Tensor) -> None:
        """See the arguments of a forward, with this mask ``[B, L]``, if it is time for that."""
        ids = ids_in(given)
        if ids is None or ids.shape != mask.shape:
            return
        with self._lock:
            self._forwards += 1
            turn = self._forwards % FIRST
            if self._forwards <= FIRST or turn == 0:
                self._see(ids.numpy(), mask.numpy() != 0)
            elif turn == FIRST - 1 and len(ids) < EACH:  # it is what the next one may be like
                self._see(ids.numpy(), mask.numpy() != 0, asks=False)

    def _see(self, ids: npt.NDArray[Any], valid: npt.NDArray[np.bool_], asks: bool = True) -> None:
        lengths = valid.sum(1)
        lengths = lengths[lengths > 0]
        if not len(lengths):
            return
        inputs = np.split(ids[valid].astype(np.int32), np.cumsum(lengths)[:-1])
        if self._inputs and asks:
            some = [inputs[place] for place in range(0, len(inputs), max(len(inputs) // EACH, 1))]
            found = self._supplied(Asked.of(np.concatenate(some), np.array([len(one) for one in some])), self._index)
            self._weight += LATELY * (1.0 - self._weight)
            before = self.share or 0.0
            self.share = before + LATELY / self._weight * (found - before)
        self._inputs += inputs
        if len(self._inputs) > MOST:
            inputs = self._inputs = self._inputs[-MOST // 2 :]
            self._index = TokenIndex()
        self._index.extend(inputs, range(self._index.next, self._index.next + len(inputs)))
