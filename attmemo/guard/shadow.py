"""Shadow mode: every answer that is given is exact; what would have been reused is found while no request runs.

    a request  ─► exact; looked up nowhere
    idle times ─► the guard decides as it would have; what it would have reused is computed from records and compared
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

from attmemo.guard.verdict import Verdict
from attmemo.kernels.plan import Evidence


@dataclass(slots=True)
class Shadow:
    """What would have become of answers.

    Attributes
    ----------
    seen : int
        Answers that were given, all of them exact.
    tried : int
        Of these, answers that the guard decided about afterwards: as many as idle times allow, chosen by chance.
    reused, repeated : int
        Of those that were tried: would have come from a record of another input, or of the very input.
    changed : int
        Of both: would have been another answer.
    """

    seen: int = 0
    tried: int = 0
    reused: int = 0
    repeated: int = 0
    changed: int = 0

    def choose(self, batch: int, room: int) -> list[int]:
        """Count the answers of a batch; return which of them are tried later, so many at most."""
        self.seen += batch
        return sorted(random.sample(range(batch), min(batch, room)))

    def verdict(self, verdict: Verdict, evidence: Evidence, low: bool, changed: bool) -> Verdict | None:
        """Count an answer from a record; return what the guard is told it was. None: nothing.

        `low`: it is below the margin, so it would have been computed again. Of those that would have been reused each
        one is a sample, for each one is compared.
        """
        if not verdict.serves:
            return verdict
        if low:
            return Verdict.SERVE
        same = evidence is Evidence.SAME
        self.repeated += same
        self.reused += not same
        self.changed += changed
        return None if same else Verdict.OWE

    def stats(self) -> dict[str, Any]:
        """The counts, and a sentence, JSON-able."""
        return asdict(self) | {"says": self.sentence}

    @property
    def sentence(self) -> str:
        """The counts in a sentence."""
        return (
            f"shadow mode: all {self.seen} answers were exact; of {self.tried} that were tried {self.reused} would "
            f"have been reused and {self.repeated} repeated, and {self.changed} of these would have changed"
        )
