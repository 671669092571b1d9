"""What becomes of a request that has a record."""

from __future__ import annotations

from enum import Enum


class Verdict(Enum):
    """What becomes of a request that has a record; the values are what it is counted as."""

    SERVE = "reused"
    OWE = "owed"  # reused, and verified afterwards
    SAMPLE = "sampled"  # exact, and verified: its changes are verified
    LEARN = "learned"  # exact, and verified: a change is not, or the kind of change is futile
    LEAVE = "left"  # exact

    @property
    def serves(self) -> bool:
        """Whether the answer is one from a record."""
        return self in (Verdict.SERVE, Verdict.OWE)


def served_name(same: bool) -> str:
    """What an answer from a record is counted as; `same`: it is that of the input's own record."""
    return "repeated" if same else "reused"
