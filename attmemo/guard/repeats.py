"""How much of what is asked was asked before, word for word: known before anything is stored."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attmemo.system.locking import ThreadLock

TOGETHER: Final = 6
"""Tokens, one behind the other, that are seen as one."""
REMEMBERED: Final = 1 << 18
"""Places of the table; where a quarter is taken, it is begun anew."""
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
        self._seen = np.zeros(REMEMBERED, np.bool_)
        self._lock = ThreadLock()

    def look(self, ids: Any, mask: Tensor) -> None:
        """See the tokens of a forward, ids and mask ``[B, L]``."""
        if not isinstance(ids, Tensor) or ids.shape != mask.shape or ids.shape[1] < TOGETHER:
            return
        places = _hashes(ids.numpy(), mask.numpy())
        with self._lock:
            if len(places):
                self.share += LATELY * (float(self._seen[places].mean()) - self.share)
            self._seen[places] = True
            if 4 * int(np.count_nonzero(self._seen)) > REMEMBERED:
                self._seen[:] = False


def _hashes(ids: npt.NDArray[Any], mask: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """A place of the table for each `TOGETHER` valid tokens of an input."""
    tokens = ids.astype(np.uint64)
    found = np.zeros((len(tokens), tokens.shape[1] - TOGETHER + 1), np.uint64)
    for place in range(TOGETHER):
        found = (found + tokens[:, place : place + found.shape[1]]) * _FACTOR
    valid = (mask[:, TOGETHER - 1 :] != 0) & (mask[:, : found.shape[1]] != 0)
    places: npt.NDArray[np.uint64] = found[valid] >> np.uint64(64 - REMEMBERED.bit_length() + 1)
    return places
