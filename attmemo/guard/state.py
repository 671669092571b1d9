"""Where a guard stands, and the sentence that says so."""

from __future__ import annotations

import time
from dataclasses import dataclass

from attmemo.guard.certificate import Counts


@dataclass(frozen=True, slots=True)
class State:
    """Where a guard stands."""

    name: str  # "learning", "certified" or "alarm"
    highest: float  # share of all answers that changed, at most
    counts: Counts
    margin: float
    verified: int  # changes
    since: float  # seconds of the Unix epoch
    done: dict[str, int]  # requests by what became of them

    def sentence(self, confidence: float) -> str:
        """The state in a sentence."""
        c = self.counts
        day = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        share = f"{c.served / c.requests:.0%}" if c.requests else "none"
        return (
            f"{self.name}: {c.same + c.changed} served answers verified, {c.changed} changed; {share} of "
            f"{c.requests} requests served; at most {100 * self.highest:.2g} % of all answers changed, "
            f"{confidence:.0%}, since {day}"
        )
