"""What requests cost over time: sums by period, so few that they can be kept for ever.

Periods begin as ten seconds. Whenever there are too many of them, each two become one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

SECONDS: Final = 10
"""Of the first periods."""
MOST: Final = 256
"""Periods in which there was a request."""


class Work(NamedTuple):
    """What requests did."""

    requests: int = 0
    tokens: int = 0
    rows: int = 0  # computed, those of verifications too

    def plus(self, other: Work) -> Work:
        """Both."""
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def since(self, before: Work) -> Work:
        """What was done after `before`; all of it, if counters were reset meanwhile."""
        found = Work(*(a - b for a, b in zip(self, before, strict=True)))
        return self if min(found) < 0 else found


class Period(NamedTuple):
    """A stretch of time in which there were requests."""

    begin: float  # seconds of the Unix epoch
    seconds: int
    work: Work


@dataclass(slots=True)
class History:
    """Work by period."""

    seconds: int = SECONDS
    _sums: dict[int, Work] = field(default_factory=dict)  # by the number of the period

    def add(self, moment: float, work: Work) -> None:
        """Work that was done about this moment, seconds of the Unix epoch."""
        number = int(moment // self.seconds)
        self._sums[number] = self._sums.get(number, Work()).plus(work)
        while len(self._sums) > MOST:
            self._coarsen()

    def _coarsen(self) -> None:
        self.seconds *= 2
        sums: dict[int, Work] = {}
        for number, work in self._sums.items():
            sums[number // 2] = sums.get(number // 2, Work()).plus(work)
        self._sums = sums

    @property
    def periods(self) -> list[Period]:
        """Oldest first."""
        return [Period(n * self.seconds, self.seconds, work) for n, work in sorted(self._sums.items())]

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        return {"seconds": self.seconds, "sums": [[number, *work] for number, work in sorted(self._sums.items())]}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> History:
        """From what `state` gave."""
        return cls(int(state["seconds"]), {int(number): Work(*work) for number, *work in state["sums"]})
