"""Where a guard stands, and the sentence that says so."""

from __future__ import annotations

import time
from dataclasses import dataclass

from attmemo.guard.certificate import Counts
from attmemo.wording import percent


@dataclass(frozen=True, slots=True)
class State:
    """Where a guard stands."""

    name: str  # "learning": evidence is collected; "certified" or "alarm"
    needed: int | None  # verified answers, about, from which it is certified if none changes; None: it is, or too many
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
        name, needed = self.name, ""
        if name == "learning":
            name, needed = "evidence collected", "" if self.needed is None else f"of {self.needed} "
        return (
            f"{name}: {c.same + c.changed} {needed}reused answers verified, {c.changed} changed; "
            f"of {c.requests} requests {_count(c.served, c.requests)} reused and {_count(c.repeated, c.requests)} "
            f"repeated; at most {100 * self.highest:.2g} % of all answers changed, {percent(confidence)}, since {day}"
        )


def _count(part: int, requests: int) -> str:
    return f"{part} ({percent(part / requests)})" if requests else "0"
