"""Forwards that a guard does not look at: while it neither serves nor learns, to look costs more than it brings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import monotonic, thread_time
from typing import Any, Final

from torch import Tensor

from attmemo.forward.engine import Engine
from attmemo.forward.stats import Skip

BETWEEN: Final = 0.1
"""Seconds of forwards from one that is looked at to the next one. To look at one takes up to 0.25 ms, for its code and
tables are not in the caches any more: a tenth of a line of a small model."""
LONGEST: Final = 1.0
"""Seconds after which a forward is looked at, however little was asked."""
REMEMBERED: Final = 64
"""Inputs that are remembered at most."""


class Rest:
    """The time between two forwards that a guard looks at.

    Attributes
    ----------
    left, taken : float
        Seconds of forwards until it is over, and of those that were not looked at.
    forwards : int
        So many were not looked at, until `end`.
    """

    def __init__(self) -> None:
        self._why: Skip | bool = False
        self.left = self.taken = self._until = 0.0
        self.forwards = 0
        self._inputs: list[tuple[Tensor, Tensor]] = []

    @property
    def lasts(self) -> bool:
        """Whether the next forward is not to be looked at."""
        return self.left > 0.0 and monotonic() < self._until

    def begin(self, why: Skip, rests: bool) -> None:
        """Begin behind a forward that was left to the blocks, if all is to rest."""
        self._why, self.left, self._until = why, BETWEEN if rests else 0.0, monotonic() + LONGEST

    def end(self) -> tuple[float, list[tuple[Tensor, Tensor]]]:
        """Look at the next forward; return the seconds, and ids and masks, of those that were not looked at."""
        found = self.taken, self._inputs
        self.left, self.taken, self.forwards, self._inputs = 0.0, 0.0, 0, []
        return found

    def run(self, engine: Engine, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the output of a forward that is not looked at; it is left for the reason of the one before."""
        start = thread_time()
        with engine.open(left=self._why):
            output = forward(*args, **kwargs)
        taken = thread_time() - start
        self.left -= taken
        self.taken += taken
        self.forwards += 1
        # No copies: if the caller writes other ids into them meanwhile, those count.
        ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
        if isinstance(ids, Tensor) and isinstance(mask, Tensor) and len(self._inputs) < REMEMBERED:
            self._inputs.append((ids, mask))
        return output
