"""How much of what is asked was asked before, word for word: known before anything is stored."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attmemo.system.locking import ThreadLock

TOGETHER: Final = 6
"""Tokens, one behind the other, that are seen as one."""
PLACES: Final = 1 << 20
"""Of a table: a byte each."""
FULL: Final = 1 / 16
"""Share of a table that is taken until another one is begun; this one is the former then. At most twice as many of the
tokens that never stood together are taken for some that did."""
LATELY: Final = 0.25
"""Weight of the newest forward."""
_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)


class Repeats:
    """Remembers which tokens stood together.

    Attributes
    ----------
    share : float
        Of all `TOGETHER` tokens that stood together lately, how many stood so in an earlier forward.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self._seen, self._former = np.zeros((2, PLACES), np.bool_)
        self._taken = 0  # places of the table
        self._lock = ThreadLock()

    def look(self, ids: Any, mask: Tensor) -> npt.NDArray[np.float64] | None:
        """See the tokens of a forward, ids and mask ``[B, L]``; return the share of each sequence that was known.

        A sequence of fewer tokens is known; None: there are no such tokens.
        """
        if not isinstance(ids, Tensor) or ids.shape != mask.shape or ids.shape[1] < TOGETHER:
            return None
        places, valid = _hashes(ids.numpy(), mask.numpy())
        with self._lock:
            seen = self._seen[places]
            known = (seen | self._former[places]) & valid
            if count := int(np.count_nonzero(valid)):
                self.share += LATELY * (np.count_nonzero(known) / count - self.share)
            self._seen[places[valid]] = True
            self._taken += int(np.count_nonzero(valid & ~seen))
            if self._taken > FULL * PLACES:
                self._seen, self._former, self._taken = np.zeros(PLACES, np.bool_), self._seen, 0
        counts = valid.sum(1)
        shares: npt.NDArray[np.float64] = np.where(counts, known.sum(1) / np.maximum(counts, 1), 1.0)
        return shares


def _hashes(ids: npt.NDArray[Any], mask: npt.NDArray[Any]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
    """A place of the table for each `TOGETHER` tokens of an input, and whether all of these are valid."""
    tokens = ids.astype(np.uint64)
    found = np.zeros((len(tokens), tokens.shape[1] - TOGETHER + 1), np.uint64)
    for place in range(TOGETHER):
        found = (found + tokens[:, place : place + found.shape[1]]) * _FACTOR
    valid = (mask[:, TOGETHER - 1 :] != 0) & (mask[:, : found.shape[1]] != 0)
    return found >> np.uint64(64 - PLACES.bit_length() + 1), valid
