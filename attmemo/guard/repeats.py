"""How much of what is asked was asked before, word for word: known before anything is stored."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attmemo.kernels import _sketch
from attmemo.system.locking import thread_lock

TOGETHER: Final = 6
"""Tokens, one behind the other, that are seen as one."""
PLACES: Final = 1 << 20
"""Of a table: a byte each."""
FULL: Final = 1 / 16
"""Share of a table that is taken until another one is begun; this one is the former then. At most twice as many of the
tokens that never stood together are taken for some that did."""
LATELY: Final = 0.25
"""Weight of the newest forward."""


class Repeats:
    """Remembers which tokens stood together.

    Attributes
    ----------
    share : float
        Of all `TOGETHER` tokens that stood together lately, how many stood so in an earlier forward.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self._seen, self._former = np.zeros((2, PLACES), np.uint8)
        self._taken = 0  # places of the table
        self._lock = thread_lock()

    def look(self, ids: Any, mask: Tensor) -> npt.NDArray[np.float64] | None:
        """See the tokens of a forward, ids and mask ``[B, L]``; return the share of each sequence that was known.

        A sequence of fewer tokens is known; None: there are no such tokens.
        """
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape != mask.shape or ids.shape[1] < TOGETHER:
            return None
        tokens = np.ascontiguousarray(ids.numpy(), np.int64)
        valid = np.ascontiguousarray(mask.numpy() != 0).view(np.uint8)
        counts = np.empty((len(tokens), 3), np.int64)  # tokens together, of these known, and new in the table
        with self._lock:
            _sketch.look(tokens, valid, self._former, self._seen, counts, TOGETHER)
            count, known, new = counts.sum(0).tolist()
            if count:
                self.share += LATELY * (known / count - self.share)
            self._taken += new
            if self._taken > FULL * PLACES:
                self._seen, self._former, self._taken = np.zeros(PLACES, np.uint8), self._seen, 0
        shares: npt.NDArray[np.float64] = np.where(counts[:, 0], counts[:, 1] / np.maximum(counts[:, 0], 1), 1.0)
        return shares
