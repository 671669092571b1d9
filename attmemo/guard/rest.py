"""Forwards that a guard does not look at: while it neither serves nor learns, to look costs more than it brings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import thread_time
from typing import Any, Final

from attmemo.forward.engine import Engine
from attmemo.forward.stats import Skip

BETWEEN: Final = 0.025
"""Seconds of forwards from one that is looked at to the next one. To look at one takes up to 0.25 ms, for its code and
tables are not in the caches any more: a tenth of a line of a small model."""


class Rest:
    """The time between two forwards that a guard looks at."""

    def __init__(self) -> None:
        self._why: Skip | bool = False
        self._left = self._taken = 0.0

    @property
    def lasts(self) -> bool:
        """Whether the next forward is not to be looked at."""
        return self._left > 0.0

    def begin(self, why: Skip, taught_nothing: bool) -> None:
        """Begin behind a forward that was left to the blocks, if it taught nothing."""
        self._why, self._left = why, BETWEEN if taught_nothing else 0.0

    def end(self) -> float:
        """Look at the next forward; return the seconds of those that were not looked at since this was asked last."""
        taken, self._left, self._taken = self._taken, 0.0, 0.0
        return taken

    def run(self, engine: Engine, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the output of a forward that is not looked at; it is left for the reason of the one before."""
        start = thread_time()
        with engine.open(left=self._why):
            output = forward(*args, **kwargs)
        taken = thread_time() - start
        self._left -= taken
        self._taken += taken
        return output
