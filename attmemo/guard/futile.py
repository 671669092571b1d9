"""Changes after which an answer is too far away to be served at any margin.

An answer below the margin is computed twice: from a record, and then exactly. Lines of some templates hold a number
that moves every embedding far, or a classifier is never sure of them. Of such a kind of change it is soon known that
to try costs more than it saves. A kind is the set of slots that changed. What is known of kinds is not stored.
"""

from __future__ import annotations

from typing import Final

from attmemo.guard.verified import Gaps

FEWEST: Final = 5
"""Answers of a kind before anything is expected of it."""
SHARE: Final = 0.6
"""Share of them above which a kind is futile: a record supplies about as much of an input."""
FORGETS: Final = 64
"""Answers after which older ones count half."""
MOST: Final = 1 << 16
"""Kinds that are remembered."""


class Futile:
    """Kinds of change, and how often their answers were too far away."""

    def __init__(self) -> None:
        self._kinds: dict[int, tuple[float, float]] = {}  # answers, and those too far away

    def note(self, gaps: Gaps, far: bool) -> None:
        """An answer after these changes was too far away, or not."""
        kind = _kind(gaps)
        if kind not in self._kinds and len(self._kinds) >= MOST:
            return
        seen, found = self._kinds.get(kind, (0.0, 0.0))
        if seen >= FORGETS:
            seen, found = seen / 2, found / 2
        self._kinds[kind] = seen + 1, found + far

    def expects(self, gaps: Gaps) -> bool:
        """Whether the answer after these changes will be too far away."""
        seen, found = self._kinds.get(_kind(gaps), (0.0, 0.0))
        return seen >= FEWEST and found > SHARE * seen


def _kind(gaps: Gaps) -> int:
    return hash(frozenset(gaps.slot.tolist()))
