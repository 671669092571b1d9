"""Which candidate keeps a budget such as "at most 1 % of answers may change, with 95 % confidence"?

A number chosen on the data that judges it looks better than it is, so `choose` tests candidates on data that is not
in the database, or that was judged while the database grew (`Outcome.growth`). The rule is fixed-sequence testing, as
in Learn then Test (arXiv 2110.01052): candidates, fixed without this data, are tested from the strictest on, each at
the full level with an exact binomial bound, up to the first failure. A candidate that breaks the budget is chosen
only if the first such candidate passes its own test, a probability of at most 1 - confidence. So the number of
candidates needs no correction, whatever their dependence. The promise is about sequences drawn independently from the
traffic that will be served: near-identical bursts count less.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# The functions behind `scipy.stats.beta`, which takes long to import.
from scipy.special import betainc, betaincinv  # type: ignore[import-untyped,unused-ignore]

from attmemo.errors import TuningError

JUDGED = 0.75
"""Of the sequences; the others choose. Certifying needs more: few sequences tell which layers are robust."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Thresholds to test."""

    name: str  # for sentences, such as "the distance 0.1 for all layers"
    thresholds: tuple[float, ...]  # similarity score that a hit needs, by layer
    radii: tuple[float, ...]  # the same as greatest distances, by layer; -1: the layer is never served


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of a candidate gave: changed answers, of how many, and the share of attention calls served."""

    changed: int
    total: int
    served: float
    growth: float = 1.0  # so many times as many sequences are served by the database as it is than were served here

    def bound(self, confidence: float) -> float:
        """Share of answers that may change, at most. Where more are served, as many times more may change."""
        return min(1.0, self.growth * upper_bound(self.changed, self.total, confidence))


@dataclass(frozen=True, slots=True)
class Choice:
    """A candidate, and what may be said about it. All shares are in [0, 1]."""

    candidate: Candidate | None  # None if nothing can be certified; the numbers then describe the strictest candidate
    budget: float
    confidence: float
    observed: float  # share of the judged sequences whose answer changed
    upper_bound: float  # share of answers that may change, at most, with `confidence`
    served: float  # share of attention calls served from memory (sequences times layers)
    judged: int  # sequences that the candidate was judged on
    certified: bool  # whether the budget holds with `confidence`
    needed: int  # sequences needed to certify the budget even if no answer changes
    reached: float | None  # confidence at which the same test would just have reached the candidate; no promise
    path: list[dict[str, Any]]  # every candidate that was tested, the strictest first
    growth: float = 1.0  # that of the candidate

    def to_dict(self) -> dict[str, Any]:
        """All fields but the candidate, and the sentence; JSON-able."""
        fields = asdict(self) | {"sentence": self.sentence()}
        del fields["candidate"]
        return fields

    def sentence(self) -> str:
        """What a user should know, in one sentence."""
        budget, confidence = percent(self.budget), f"{percent(self.confidence)} confidence"
        changed = round(self.observed * self.judged)
        counted = f"{changed} of {self.judged} held-out answers changed ({percent(self.observed)})"
        bound = percent_up(self.upper_bound)
        if self.candidate is None and self.judged < self.needed:
            return (
                f"Nothing can be certified: to show that at most {budget} of answers change, with {confidence}, takes "
                f"at least {self.needed} held-out sequences even if none changes, and there are {self.judged}."
            )
        if self.candidate is None:
            return (
                f"Nothing can be certified: already with the strictest candidate {counted}, so with {confidence} up "
                f"to {bound} may change (budget {budget})."
            )
        name = self.candidate.name
        if self.growth > 1.0:
            counted += f", while the database grew; as it is now it reuses {self.growth:.4g} times as many"
        if self.certified:
            benefit = f"{percent(self.served)} of the attention calls reuse a stored map"
            if self.served == 0.0:
                benefit = "but it reuses nothing, and nothing that reuses could be certified"
            return (
                f"{name[:1].upper()}{name[1:]} keeps the budget: {counted}, so with {confidence} at most {bound} of "
                f"answers change on data like this (budget {budget}); {benefit}."
            )
        assert self.reached is not None  # there is a candidate
        return (
            f"NOT CERTIFIED: on the data seen {name} keeps the budget of {budget}, since {counted}, but only with "
            f"{percent_down(self.reached)} confidence instead of {percent(self.confidence)}. With {confidence} up to "
            f"{bound} of answers may change. Certifying the budget takes at least {self.needed} sequences even if no "
            f"answer changes."
        )


def choose(
    candidates: Sequence[Candidate],
    run: Callable[[Candidate], Outcome],
    budget: float,
    confidence: float = 0.95,
    *,
    allow_uncertified: bool = False,
) -> Choice:
    """Test candidates, the strictest first, and take the one that serves most; of equals the strictest.

    `run` serves the data by one candidate, one after the other, and none after the first failure. It may give the
    same outcome again for a candidate that serves the same. `budget` is the share of all sequences whose answer may
    change, in (0, 1). With `allow_uncertified`, if not even the first candidate can be certified, the observed share
    decides, and the result says ``certified=False``. TuningError: `budget` or `confidence` is outside (0, 1).
    """
    needed = sequences_needed(budget, confidence)

    def passes(outcome: Outcome) -> bool:
        if certified or not allow_uncertified:
            return outcome.bound(confidence) <= budget
        return outcome.growth * outcome.changed <= budget * outcome.total

    outcomes = [run(candidates[0])]
    certified = outcomes[0].bound(confidence) <= budget
    while passes(outcomes[-1]) and len(outcomes) < len(candidates):
        outcomes.append(run(candidates[len(outcomes)]))
    passing = outcomes if passes(outcomes[-1]) else outcomes[:-1]
    served = [outcome.served for outcome in passing]
    chosen = served.index(max(served)) if passing else None  # the first of equals
    shown = outcomes[chosen or 0]
    reached = [confidence_reached(one.changed, one.total, budget / one.growth) for one in outcomes]
    return Choice(
        candidate=None if chosen is None else candidates[chosen],
        budget=budget,
        confidence=confidence,
        observed=shown.changed / shown.total,
        upper_bound=shown.bound(confidence),
        growth=shown.growth,
        served=shown.served,
        judged=shown.total,
        certified=certified,
        needed=needed,
        # A candidate is reached only through those before it, so the weakest of them counts.
        reached=None if chosen is None else min(reached[: chosen + 1]),
        path=[
            {
                "radii": candidate.radii,
                "served": outcome.served,
                "changed": outcome.changed / outcome.total,
                "upper_bound": outcome.bound(confidence),
                "certified": certified and step < len(passing),
            }
            for step, (candidate, outcome) in enumerate(zip(candidates, outcomes, strict=False))
        ],
    )


def upper_bound(changed: int, total: int, confidence: float = 0.95) -> float:
    """Largest share of changed answers that is compatible with `changed` of `total` (one-sided Clopper-Pearson).

    The true share lies below it with at least `confidence`, for every true share and every `total`: the `confidence`
    quantile of Beta(changed + 1, total - changed) (Biometrika 26, 1934). The usual normal approximation gives 0 for no
    change seen, however few sequences were looked at.

    >>> round(upper_bound(0, 299), 5), round(upper_bound(0, 298), 5)
    (0.00997, 0.01)
    >>> upper_bound(0, 299) <= 0.01, upper_bound(0, 298) <= 0.01
    (True, False)
    """
    if changed == total:
        return 1.0
    return float(betaincinv(changed + 1, total - changed, confidence))


def confidence_reached(changed: int, total: int, budget: float) -> float:
    """Confidence at which `upper_bound` equals the budget: P(Beta(changed + 1, total - changed) <= budget)."""
    if changed == total:
        return 0.0
    return float(betainc(changed + 1, total - changed, budget))


def sequences_needed(budget: float, confidence: float = 0.95) -> int:
    """Sequences needed to certify `budget` even if no answer changes: the least n with upper_bound(0, n) <= budget.

    TuningError: `budget` or `confidence` is outside (0, 1).

    >>> sequences_needed(0.01), sequences_needed(0.05), sequences_needed(0.01, 0.99)
    (299, 59, 459)
    """
    for name, share in (("budget", budget), ("confidence", confidence)):
        if not 0.0 < share < 1.0:
            raise TuningError(f"{name} must be between 0 and 1, both excluded, got {share!r}")
    # upper_bound(0, n) = 1 - (1 - confidence)**(1/n); the loop undoes a logarithm rounded to the wrong side.
    needed = max(1, math.ceil(math.log1p(-confidence) / math.log1p(-budget)) - 1)
    while upper_bound(0, needed, confidence) > budget:
        needed += 1
    return needed


def sequences_judged(total: int, budget: float, confidence: float = 0.95) -> int:
    """How many of `total` sequences to judge candidates on, where the others choose the candidates; 0: too few.

    At most `JUDGED` of them, and no more than it takes to allow as many changes: another one may change too, but
    allows no further change. It is better used to choose.

    >>> sequences_judged(398, 0.01), sequences_judged(399, 0.01), sequences_judged(700, 0.01)
    (0, 299, 473)
    """
    most = int(JUDGED * total)
    allowed = changes_allowed(most, budget, confidence)
    if allowed < 0:
        return 0
    counts = range(allowed, most + 1)
    return counts[bisect_left(counts, True, key=lambda n: upper_bound(allowed, n, confidence) <= budget)]


def changes_allowed(total: int, budget: float, confidence: float = 0.95) -> int:
    """Most changed answers of `total` that still certify the budget; -1 if none do."""
    return bisect_right(range(total), budget, key=lambda changed: upper_bound(changed, total, confidence)) - 1


def percent(share: float) -> str:
    """Four digits."""
    return f"{100.0 * share:.4g} %"


def percent_up(share: float) -> str:
    """Round up to three digits: a bound printed smaller than it is would be a promise not kept."""
    if share <= 0.0:
        return "0 %"
    step = 10.0 ** (math.floor(math.log10(share)) - 2)
    return percent(math.ceil(share / step - 1e-9) * step)


def percent_down(share: float) -> str:
    """Round down to tenths of a percent, for a confidence."""
    return percent(math.floor(share * 1e3 + 1e-9) / 1e3)
