"""Which threshold keeps a budget such as "at most 1 % of answers may change, with 95 % confidence".

The paper leaves the threshold to the user and picks its own per model, apparently on the data it reports (seed
004_17cf05913cb31f45.txt, Table 2). A number chosen on the data it is judged on looks better than it is, and a share
seen on n sequences is only an estimate. Here the user states the budget, and the threshold follows from it by a test:
data that is not in the database, an exact binomial bound, and a rule for trying several thresholds that does
not spend the confidence on the attempts.

**The rule** is fixed-sequence testing, as in Learn then Test (Angelopoulos, Bates, Candès, Jordan and Lei, "Learn then
Test: Calibrating Predictive Algorithms to Achieve Risk Control", 2021). Candidates are tested from the strictest down,
each at the full level, and testing stops at the first failure. For a threshold that breaks the budget to be
chosen, the first such one in the order must pass its own test, which happens with probability at most 1 - confidence.
So the family-wise error needs no correction, however many candidates there are. It holds
whatever the dependence between candidates, which all see the same sequences.

**What it promises.** With the stated confidence over the draw of the tuning data, the share of *all* sequences like
these whose answer changes is within the budget. "Like these" carries weight: sequences drawn independently
from the traffic that will be served. Lines that come in near-identical bursts are fewer than they look.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

import numpy as np
from numpy.typing import ArrayLike

from attmemo.errors import TuningError

GRID = tuple(i / 100 for i in range(100, -1, -1))
"""Candidates unless others are given: 1.00, 0.99, ..., 0.00, strictest first.

Fixed before any data is seen, because the test needs hypotheses that do not depend on the sample. The tempting
alternative, the observed scores themselves, puts each candidate just where the sample changes its mind: then it is
the data that chooses what is tested, and the argument above no longer applies as it stands.
"""


class CurvePoint(TypedDict):
    """One candidate: shares of all sequences, each in [0, 1]."""

    threshold: float
    served: float | None
    changed: float
    upper_bound: float
    total: int
    certified: bool


@dataclass(frozen=True, slots=True)
class TuningResult:
    """A threshold, and what may be said about it.

    Parameters
    ----------
    threshold : float or None
        Similarity score that a hit needs; None if none can be certified.
    budget : float
        Share of answers that may change, in (0, 1).
    confidence : float
        Confidence asked for, in (0, 1).
    observed : float
        Share of sequences whose answer changed at the threshold. Where `threshold` is None, this and the next three
        describe the strictest candidate instead, which shows how near it came.
    upper_bound : float
        Share of answers that may change, at most, with `confidence`.
    served : float or None
        Share of sequences served from memory; None if it was not given.
    total : int
        Number of sequences the candidate was judged on.
    certified : bool
        True if the budget holds with `confidence`.
    needed : int
        Sequences needed to certify the budget even if no answer changes.
    reached : float or None
        Confidence at which the same test would just have got as far as the threshold; below `confidence` if not
        certified. Read off after the fact, so it describes the data and is no promise made beforehand. None if
        there is no threshold.
    curve : list of CurvePoint
        Every candidate, strictest first, also those after the stop (`certified` is False for these).

    Notes
    -----
    The test is described in the module's docstring.
    """

    threshold: float | None
    budget: float
    confidence: float
    observed: float
    upper_bound: float
    served: float | None
    total: int
    certified: bool
    needed: int
    reached: float | None
    curve: list[CurvePoint]

    def to_dict(self) -> dict[str, Any]:
        """All fields, JSON-able."""
        return asdict(self)

    def sentence(self, name: Callable[[float], str] = "threshold {:g}".format) -> str:
        """What a user should know, in one sentence; `name` says what a candidate is."""
        changed = round(self.observed * self.total)
        said = "" if self.threshold is None else name(self.threshold)
        counted = f"{changed} of {self.total} held-out answers changed ({percent(self.observed)})"
        if self.certified:
            if self.served is None:
                benefit = ""
            elif self.served > 0.0:
                benefit = f"; {percent(self.served)} of the sequences are served from memory"
            else:
                benefit = "; but it serves nothing, and no threshold that serves anything could be certified"
            return (
                f"{said.capitalize()} keeps the budget: {counted}, so with {percent(self.confidence)} "
                f"confidence at most {percent_up(self.upper_bound)} of answers change on data like this "
                f"(budget {percent(self.budget)}){benefit}."
            )
        if self.threshold is not None:
            assert self.reached is not None  # there is a threshold
            return (
                f"NOT CERTIFIED: on the data seen {said} keeps the budget of "
                f"{percent(self.budget)}, since {counted}, but only with {percent_down(self.reached)} confidence "
                f"instead of {percent(self.confidence)}; at {percent(self.confidence)} up to "
                f"{percent_up(self.upper_bound)} of answers may change, and certifying the budget takes at least "
                f"{self.needed} sequences even if no answer changes."
            )
        if self.total < self.needed:
            return (
                f"No threshold can be certified: to show that at most {percent(self.budget)} of answers change, with "
                f"{percent(self.confidence)} confidence, takes at least {self.needed} held-out sequences even if "
                f"none changes, and there are {self.total}."
            )
        return (
            f"No threshold can be certified: already at the strictest candidate, {name(self.curve[0]['threshold'])}, "
            f"{counted}, so with {percent(self.confidence)} confidence up to {percent_up(self.upper_bound)} "
            f"may change (budget {percent(self.budget)})."
        )


def upper_bound(changed: int, total: int, confidence: float = 0.95) -> float:
    """Largest share of changed answers that is compatible with `changed` of `total` (one-sided Clopper-Pearson).

    The true share lies below it with at least `confidence`, for every true share and every `total`: the bound is
    exact and needs no large sample. The usual normal approximation gives 0 for no change seen, however few sequences
    were looked at.

    Parameters
    ----------
    changed, total : int
        Answers that changed, of how many; 0 <= changed <= total, total >= 1.
    confidence : float
        In (0, 1).

    Raises
    ------
    TuningError
        A parameter is out of range.

    Notes
    -----
    Clopper and Pearson, Biometrika 26 (1934). It is the `confidence` quantile of Beta(changed + 1, total - changed).

    Examples
    --------
    >>> round(upper_bound(0, 299), 5), round(upper_bound(0, 298), 5)
    (0.00997, 0.01)
    >>> upper_bound(0, 299) <= 0.01, upper_bound(0, 298) <= 0.01
    (True, False)
    """
    _check_counts(changed, total)
    check_share("confidence", confidence)
    if changed == total:
        return 1.0
    # The quantile function behind scipy.stats.beta.ppf. Imported here, and from `special`: serving imports this
    # package for the gate alone, and importing scipy.stats takes longer than everything else in it together.
    from scipy.special import betaincinv  # type: ignore[import-untyped,unused-ignore]

    return float(betaincinv(changed + 1, total - changed, confidence))


def sequences_needed(budget: float, confidence: float = 0.95) -> int:
    """Sequences needed to certify `budget` even if no answer changes: the least n with upper_bound(0, n) <= budget.

    Raises
    ------
    TuningError
        `budget` or `confidence` is outside (0, 1).

    Examples
    --------
    >>> sequences_needed(0.01), sequences_needed(0.05), sequences_needed(0.01, 0.99)
    (299, 59, 459)
    """
    check_share("budget", budget)
    check_share("confidence", confidence)
    # upper_bound(0, n) = 1 - (1 - confidence)**(1/n); the loop undoes a logarithm rounded to the wrong side.
    needed = max(1, math.ceil(math.log1p(-confidence) / math.log1p(-budget)) - 1)
    while upper_bound(0, needed, confidence) > budget:
        needed += 1
    return needed


def choose_threshold(
    scores: ArrayLike,
    changed: ArrayLike,
    budget: float,
    confidence: float = 0.95,
    candidates: Sequence[float] | None = None,
    *,
    allow_uncertified: bool = False,
) -> TuningResult:
    """Choose the threshold for once-per-sequence lookups from one forced pass over held-out data.

    In the forced pass every sequence is served with the record it found, whatever its score. At a threshold t those
    with score >= t would be served, and only a served answer can change, so one pass gives the counts for every t.

    Candidates are tested from the strictest down until the first whose upper bound exceeds the budget (fixed-sequence
    testing, Learn then Test: see the module's docstring for why no correction is needed). Of those that pass, the
    one that serves most is taken; between those that serve the same sequences the strictest, because a looser
    one gains nothing that was measured.

    High up the grid, where nothing is served, no answer changes and the bound depends on the number of sequences only.
    So with `sequences_needed(budget, confidence)` sequences or more (299 for 1 % at 95 %) these candidates pass and
    cost nothing; with fewer the very first fails, and rightly so: no data of that size can show what is asked.

    Parameters
    ----------
    scores : array of float, shape [n]
        Predicted similarity of the record that each held-out sequence found; -inf or any negative number if none.
    changed : array of bool, shape [n]
        Whether the sequence's answer is another one when it is served.
    budget : float
        Share of *all* sequences whose answer may change, in (0, 1).
    confidence : float
        In (0, 1).
    candidates : sequence of float, optional
        Thresholds to test, in any order, chosen without looking at this data. Default: `GRID`.
    allow_uncertified : bool
        If no candidate can be certified, fall back to the observed share: walk down while it is within the budget. The
        result says `certified=False` and the confidence that was reached, which is not the one asked for.

    Raises
    ------
    TuningError
        Empty input, lengths that differ, a score that is NaN, `changed` that is not boolean, no candidates, a
        candidate that is not a finite number, or a budget or confidence outside (0, 1).
    """
    score = np.asarray(scores, dtype=np.float64)
    flag = np.asarray(changed)
    if score.ndim != 1 or score.shape != flag.shape:
        raise TuningError(f"scores and changed must be two lists of one length, got {score.shape} and {flag.shape}")
    if score.size == 0:
        raise TuningError("there are no held-out sequences to tune on", "hold out data that is not in the database")
    if np.isnan(score).any():
        raise TuningError(f"{int(np.isnan(score).sum())} of {score.size} scores are NaN")
    if flag.dtype != np.bool_ and not np.isin(flag, (0, 1)).all():
        raise TuningError("changed must hold true or false for each sequence")
    grid = GRID if candidates is None else candidates
    order = np.argsort(score, kind="stable")
    ascending = score[order]
    # changes_from[i]: changed answers among the sequences from rank i upwards
    changes_from = np.concatenate((np.cumsum(flag[order].astype(np.int64)[::-1])[::-1], [0]))
    rows: list[tuple[float, int, int]] = []
    served: list[float] = []
    for threshold in grid:
        first = int(np.searchsorted(ascending, threshold, side="left"))  # the first one with score >= threshold
        rows.append((float(threshold), int(changes_from[first]), int(score.size)))
        served.append(float(score.size - first) / float(score.size))
    return choose_from_counts(
        rows,
        budget,
        confidence,
        served=served,
        allow_uncertified=allow_uncertified,
    )


def choose_from_counts(
    rows: Sequence[tuple[float, int, int]],
    budget: float,
    confidence: float = 0.95,
    *,
    served: Sequence[float] | None = None,
    allow_uncertified: bool = False,
) -> TuningResult:
    """Choose the threshold when each candidate had a run of its own.

    Needed for a lookup in each layer: what layer 5 looks up depends on what layers 0 to 4 were served, so no single
    pass gives the answers at every threshold. The test is that of `choose_threshold`. It does not need the
    changes to grow as the threshold falls, and runs over the same sequences are as good as independent ones. A run may
    also be skipped: after the first candidate that fails, nothing below it is looked at.

    Parameters
    ----------
    rows : sequence of (threshold, changed, total)
        For each candidate, how many answers changed of how many; any order. Candidates chosen before the runs.
    budget, confidence : float
        In (0, 1).
    served : sequence of float, optional
        Share of sequences (or of lookups) served in each run, in the order of `rows`. With it, the certified candidate
        that serves most is taken, without it the loosest one.
    allow_uncertified : bool
        As for `choose_threshold`.

    Raises
    ------
    TuningError
        No rows, a threshold that is not finite or comes twice, counts that are not 0 <= changed <= total with
        total >= 1, shares outside [0, 1] or not as many as rows, or a budget or confidence outside (0, 1).
    """
    needed = sequences_needed(budget, confidence)
    if len(rows) == 0:
        raise TuningError("there are no candidate thresholds to choose from")
    if served is not None and len(served) != len(rows):
        raise TuningError(f"{len(served)} shares served for {len(rows)} candidate thresholds")
    shares: Sequence[float | None] = [None] * len(rows) if served is None else served
    if any(share is not None and not 0.0 <= share <= 1.0 for share in shares):
        raise TuningError("a share served must be in [0, 1]")
    if not all(math.isfinite(threshold) for threshold, _, _ in rows):
        raise TuningError("a candidate threshold is not a finite number")
    if len({threshold for threshold, _, _ in rows}) != len(rows):
        # Two runs at one threshold would have to be tested in some order, and the counts would decide which.
        raise TuningError("a candidate threshold comes twice")

    curve: list[CurvePoint] = []
    reached: list[float] = []  # confidence with which the candidate and all stricter ones keep the budget
    passing = within = True
    last_within = 0
    for (threshold, changed, total), share in sorted(zip(rows, shares, strict=True), key=lambda item: -item[0][0]):
        bound = upper_bound(changed, total, confidence)
        passing = passing and bound <= budget
        within = within and changed <= budget * total
        last_within += within
        reached.append(min(confidence_reached(changed, total, budget), reached[-1] if reached else 1.0))
        curve.append(
            CurvePoint(
                threshold=float(threshold),
                served=None if share is None else float(share),
                changed=changed / total,
                upper_bound=bound,
                total=int(total),
                certified=passing,
            )
        )

    certified = curve[0]["certified"]
    if certified:
        chosen = _serves_most([point for point in curve if point["certified"]])
    elif allow_uncertified and last_within:
        chosen = _serves_most(curve[:last_within])
    else:
        chosen = None
    shown = curve[0 if chosen is None else chosen]
    return TuningResult(
        threshold=None if chosen is None else shown["threshold"],
        budget=budget,
        confidence=confidence,
        observed=shown["changed"],
        upper_bound=shown["upper_bound"],
        served=shown["served"],
        total=shown["total"],
        certified=certified,
        needed=needed,
        reached=None if chosen is None else reached[chosen],
        curve=curve,
    )


def _serves_most(points: Sequence[CurvePoint]) -> int:
    """Index of the candidate to take; `points` come strictest first, and any of them may be taken."""
    best = 0
    for i, point in enumerate(points):
        now, before = point["served"], points[best]["served"]
        if now is None or before is None or now > before:
            best = i
    return best


def confidence_reached(changed: int, total: int, budget: float) -> float:
    """Confidence at which `upper_bound` equals the budget: P(Beta(changed + 1, total - changed) <= budget)."""
    if changed == total:
        return 0.0
    from scipy.special import betainc  # type: ignore[import-untyped,unused-ignore]

    return float(betainc(changed + 1, total - changed, budget))


def _check_counts(changed: int, total: int) -> None:
    if not (total >= 1 and 0 <= changed <= total):
        raise TuningError(f"expected 0 <= changed <= total and total >= 1, got {changed} of {total}")


def check_share(name: str, value: float) -> None:
    if not 0.0 < value < 1.0:
        raise TuningError(f"{name} must be between 0 and 1, both excluded, got {value!r}")


def percent(share: float) -> str:
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
