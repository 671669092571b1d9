"""Which threshold for EACH layer keeps one budget of changed answers, when one lookup serves all layers.

Layers differ greatly in how much a foreign map hurts them. On a six-layer DeBERTa the last four layers can be served
for 96 % of the sequences while 0.5 % of the answers change; the first two can be served for 60 %. One radius for
all layers is held down by the most sensitive one. So the layers are put into nested groups, from the most robust to
the most sensitive, and each group gets a radius of its own: a sequence whose nearest record lies at distance d is
served in the groups k with d <= r_k. Radii do not increase from group to group, so these are always the first m
groups, and K forced passes (the first group served, the first two, ...) tell how *every* such policy would do.

K radii are many more policies than one threshold is, and a policy picked among many looks better than it is. Hence:

1. **Split** the sequences, in stretches at random, into a selection half and a certification half. What follows
   chooses freely on the first; nothing chosen there has seen the second, so there an exact binomial bound holds.
   (Bounding all the policies at once on all the data would need a correction for their number, in the millions.)
2. **Grid.** Radii are quantiles of the distances of the selection half: steps that each concern about as many
   sequences, whatever the unit and shape of the distances. The last is the greatest distance seen: beyond it nothing
   was measured.
3. **Path.** From nothing served to everything served, radii only growing, by the move that costs fewest changed
   answers per unit of gain, again and again. A path, because a sequence of policies can be tested without correction
   (4). Growing, because then the changes mostly grow along it as well: the first failure is close to where the budget
   really ends, and little is lost by stopping there. A move raises one radius, and takes along the radii of the
   groups before it that are smaller; so one radius for all is among the moves, and a group that hurts only until the
   next one is served as well (answers do change back) does not stand in the way.
4. **Certification** along the path, each policy at the full level, stopping at the first failure: fixed-sequence
   testing, explained in `tuner`. The first policy that breaks the budget has to pass its own test to be chosen, and
   that happens with probability at most 1 - confidence, however many steps the path has. So steps are made small:
   a move over many grid distances is tested at each of them on the way.

**What it promises** is what the tuner promises: with the stated confidence over the draw of the certification half,
the share of all sequences like these whose answer changes is within the budget. That holds whatever the selection half
was like; only how much is served depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attmemo.errors import TuningError
from attmemo.perfmodel.tuner import (
    confidence_reached,
    percent,
    percent_down,
    percent_up,
    sequences_needed,
    upper_bound,
)

NEVER = -1.0
"""The radius of a group that is never served: no distance is that small."""

_GRID = 40  # radii to choose from
_STRETCH = 20  # consecutive sequences that are never split between the halves
_SHOWN = 60  # points of the path that a result holds
# Added to the changes that a move costs. A move over ten sequences that saw no change is not free: after x changes the
# Jeffreys estimate of a Poisson mean is x + 1/2. It also makes the larger of two moves without changes the better one.
_UNSEEN = 0.5

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


class PolicyPoint(TypedDict):
    """One policy of the path, judged on the certification half; shares in [0, 1]."""

    radii: list[float]
    served: float
    changed: float
    upper_bound: float
    certified: bool


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """A radius for each group of layers, and what may be said about them together.

    Parameters
    ----------
    radii : tuple of float
        Greatest distance served, by group, from the most robust to the most sensitive; not increasing. `NEVER` (-1)
        for a group that is never served, as all are if nothing can be certified.
    budget : float
        Share of answers that may change, in (0, 1).
    confidence : float
        Confidence asked for, in (0, 1).
    observed : float
        Share of the judged sequences whose answer changed.
    upper_bound : float
        Share of answers that may change, at most, with `confidence`: always by the certification half alone, because
        the other half chose the radii and would flatter them.
    served : float
        Share of attention calls served from memory (sequences times layers), over the judged sequences.
    gain_share : float
        Share of the gain that serving everything would bring, over the judged sequences.
    total : int
        Number of tuning sequences, both halves.
    judged : int
        Number of sequences that `observed`, `served` and `gain_share` are about: the certification half; both halves
        for a policy taken without certificate.
    certified : bool
        True if the budget holds with `confidence`.
    needed : int
        Tuning sequences (both halves) needed to certify the budget even if no answer changes.
    reached : float or None
        Confidence at which the same test would just have got as far as this policy, by the certification half alone;
        below `confidence` if not certified. Read off after the fact, so it describes the data and is no promise made
        beforehand. None if no policy was chosen.
    path : list of PolicyPoint
        The path, from nothing served to everything, on the certification half; at most 60 points of it, the first,
        the last and the chosen one among them. `certified` is False from the first failure on.

    Notes
    -----
    The method is described in the module's docstring.
    """

    radii: tuple[float, ...]
    budget: float
    confidence: float
    observed: float
    upper_bound: float
    served: float
    gain_share: float
    total: int
    judged: int
    certified: bool
    needed: int
    reached: float | None
    path: list[PolicyPoint]

    def to_dict(self) -> dict[str, Any]:
        """All fields, JSON-able."""
        return {**asdict(self), "radii": list(self.radii)}

    def sentence(self) -> str:
        """What a user should know, in one sentence."""
        if self.reached is None:
            return (
                f"No policy can be certified: to show that at most {percent(self.budget)} of answers change, with "
                f"{percent(self.confidence)} confidence, takes at least {self.needed} held-out sequences even if "
                f"none changes, half of them to choose the radii, and there are {self.total}."
            )
        changed = round(self.observed * self.judged)
        counted = f"{changed} of {self.judged} held-out answers changed ({percent(self.observed)})"
        policy = f"the policy with radii {', '.join('never' if r < 0.0 else f'{r:.4g}' for r in self.radii)}"
        if self.certified:
            benefit = (
                f"; {percent(self.served)} of the attention calls are served from memory"
                if self.served > 0.0
                else "; but it serves nothing, and no policy that serves anything could be certified"
            )
            return (
                f"{policy.capitalize()} keeps the budget: {counted}, so with {percent(self.confidence)} confidence "
                f"at most {percent_up(self.upper_bound)} of answers change on data like this "
                f"(budget {percent(self.budget)}){benefit}."
            )
        return (
            f"NOT CERTIFIED: on the data seen {policy} keeps the budget of {percent(self.budget)}, since {counted}, "
            f"but by the half that did not choose the radii only with {percent_down(self.reached)} confidence instead "
            f"of {percent(self.confidence)}; at {percent(self.confidence)} up to {percent_up(self.upper_bound)} of "
            f"answers may change, and certifying the budget takes at least {self.needed} sequences even if no answer "
            f"changes."
        )


def choose_policy(
    distances: ArrayLike,
    changed: ArrayLike,
    sizes: Sequence[int],
    gains: Sequence[float],
    budget: float,
    confidence: float = 0.95,
    *,
    seed: int = 0,
    allow_uncertified: bool = False,
) -> PolicyResult:
    """Choose one radius for each group of layers, so that all of them together keep one budget.

    The method and the reason for each step of it are in the module's docstring. Of the policies certified along the
    path the one with the greatest gain is taken; between those with equal gain on the certification half the one
    that serves least, because serving more gains nothing that was measured.

    The empty policy is on the path, first: it changes nothing, so whether it passes depends on the number of sequences
    only. With fewer than ``2 * sequences_needed(budget, confidence) - 1`` sequences it fails, and nothing
    can be certified; with more, a result that serves nothing is possible, and its sentence says so.

    Parameters
    ----------
    distances : array of float, shape [Q]
        Distance of the nearest record of each tuning sequence, >= 0; inf if its length has no record: never served.
    changed : array of bool, shape [K, Q]
        ``changed[k - 1, q]``: whether the answer to sequence q is another one when it is served in the first k groups.
        Groups are ordered from the most robust to the most sensitive; with all K of them every layer is served.
        Entries of sequences at distance inf are not looked at.
    sizes : sequence of int, length K
        Layers in each group.
    gains : sequence of float, length K
        What serving one sequence in each group saves: milliseconds, or the number of layers. Only ratios matter.
    budget : float
        Share of *all* sequences whose answer may change, in (0, 1).
    confidence : float
        In (0, 1).
    seed : int
        Of the random split. Fix it before looking at results: trying seeds until one pleases is choosing on the
        certification half.
    allow_uncertified : bool
        If there are too few sequences to certify anything, go along the path as long as the share observed on both
        halves together is within the budget. The result says `certified=False` and the confidence that was reached.

    Returns
    -------
    PolicyResult

    Raises
    ------
    TuningError
        Input that is empty, of shapes that do not match, NaN or negative where it must not be, or a budget or
        confidence outside (0, 1).
    """
    distance, flags, size, gain = _checked(distances, changed, sizes, gains)
    needed = sequences_needed(budget, confidence)
    if seed < 0:
        raise TuningError(f"seed must be >= 0, got {seed}")
    total = int(distance.size)
    chosen_on, certified_on = split_halves(total, seed)

    grid = _grid(distance[chosen_on])
    path = _path(_Half(distance[chosen_on], flags[:, chosen_on], grid), gain)
    half = _Half(distance[certified_on], flags[:, certified_on], grid)

    counted = counts = half.changed(path)
    bounds = _bounds(counted, half.total, confidence)
    everything = _Half(distance, flags, grid)
    # The half alone carries the guarantee; passing on all of the data as well can only make the choice stricter, and
    # keeps a certification half that was lucky from overruling a selection half that was not.
    passing = _leading((bounds <= budget) & (_bounds(everything.changed(path), total, confidence) <= budget))
    certified = passing > 0
    judge, within = half, passing
    if not certified and allow_uncertified:
        judge = everything
        counts = judge.changed(path)
        within = _leading(counts <= budget * judge.total)  # at least 1: the empty policy changes nothing
    gained = judge.share(path, gain)
    # Along the path the gain never falls: the first of those with the greatest.
    chosen = int(np.argmax(gained[:within])) if within else 0
    # A policy is reached only through those before it, so the weakest of them counts.
    reached = min(confidence_reached(int(count), half.total, budget) for count in counted[: chosen + 1])

    radius = np.concatenate(([NEVER], grid))
    served = half.share(path, size)
    points: list[PolicyPoint] = [
        {
            "radii": radius[path[i]].tolist(),
            "served": float(served[i]),
            "changed": int(counted[i]) / half.total,
            "upper_bound": float(bounds[i]),
            "certified": i < passing,
        }
        for i in _thinned(len(path), chosen)
    ]
    return PolicyResult(
        radii=tuple(radius[path[chosen]].tolist()),
        budget=budget,
        confidence=confidence,
        observed=int(counts[chosen]) / judge.total,
        upper_bound=float(bounds[chosen]),
        served=float(judge.share(path[chosen : chosen + 1], size)[0]),
        gain_share=float(gained[chosen]),
        total=total,
        judged=judge.total,
        certified=certified,
        needed=2 * needed - 1,
        reached=reached if within else None,
        path=points,
    )


def split_halves(total: int, seed: int) -> tuple[_Ints, _Ints]:
    """Sequence numbers of the selection half and of the certification half, which may be one larger.

    Stretches of consecutive sequences go to one half together: neighbours in a log are near copies of each other, and
    dealt out one by one they would make the halves agree more than a new day agrees with either.
    """
    stretch = max(1, min(_STRETCH, total // 40))
    stretches = np.random.default_rng(seed).permutation(-(-total // stretch))
    order = np.concatenate([np.arange(s * stretch, min(total, (s + 1) * stretch)) for s in stretches])
    return order[: total // 2], order[total // 2 :]


class _Half:
    """Sequences counted by distance, so that any policy with radii on the grid is judged by a few look-ups.

    A policy is a row of levels, one for each group: 0 serves nothing, j serves up to ``grid[j - 1]``. Levels do not
    increase from group to group, so raising group k turns "the first k - 1 groups served" into "the first k" for the
    sequences in between and touches no others. Changes and gain are therefore sums over the groups of a function
    of one level.
    """

    def __init__(self, distances: _Floats, changed: NDArray[np.bool_], grid: _Floats) -> None:
        groups = len(changed)
        levels = len(grid) + 1
        self.total = int(distances.size)
        # The lowest level that serves each sequence; `levels` is beyond them all, as for inf.
        level = np.searchsorted(grid, distances, side="left") + 1
        self.reach: _Ints = np.cumsum(np.bincount(level, minlength=levels + 1)[:levels])  # [levels] sequences served
        # changes[k, j]: answers that change because of group k served up to level j, beside the groups before it.
        # It may fall with j: a sequence changed by the groups before may be right again.
        before = np.zeros(distances.size, np.int64)
        self.changes: _Ints = np.empty((groups, levels), np.int64)
        for k, flags in enumerate(changed.astype(np.int64)):
            more = np.bincount(level, weights=flags - before, minlength=levels + 1)  # by level, -1 for each put right
            self.changes[k] = np.cumsum(more[:levels])
            before = flags

    def changed(self, policies: _Ints) -> _Ints:
        """Number of changed answers of each policy, ``[n, groups] -> [n]``."""
        result: _Ints = self.changes[np.arange(len(self.changes)), policies].sum(axis=1)
        return result

    def share(self, policies: _Ints, weights: _Floats) -> _Floats:
        """What each policy serves, of what there is to serve, with a weight for each group; ``[n, groups] -> [n]``."""
        result: _Floats = self.reach[policies] @ weights / (self.total * weights.sum())
        return result


def _grid(distances: _Floats) -> _Floats:
    """Radii to choose from, increasing: distances that were seen, not interpolated, and none twice."""
    finite = distances[np.isfinite(distances)]
    if finite.size == 0:
        return np.empty(0)
    shares = np.arange(1, _GRID + 1) / _GRID
    return np.unique(np.quantile(finite, shares, method="inverted_cdf"))


def _path(half: _Half, gains: _Floats) -> _Ints:
    """Policies from nothing served to everything served, each containing the one before; ``[steps, groups]``."""
    groups, levels = half.changes.shape
    every = np.arange(groups)
    current = np.zeros(groups, np.int64)
    path = [current.copy()]
    while current[-1] < levels - 1:  # levels do not increase from group to group, so the last one arrives last
        # Move [k, j]: raise group k to level j, and the groups before it that are not there yet.
        raised = np.maximum(current[:, None], np.arange(levels))
        cost = np.cumsum(half.changes[every[:, None], raised] - half.changes[every, current][:, None], axis=0)
        gain = np.cumsum(gains[:, None] * (half.reach[raised] - half.reach[current][:, None]), axis=0)
        group, level = np.nonzero(raised > current[:, None])
        costs, brings = cost[group, level], gain[group, level]
        # The least price, and of equal ones the one with fewer changes. Where changes fall although more is gained the
        # price is negative, so such a move comes before all that cost anything.
        best = np.lexsort((costs, (costs + _UNSEEN) / brings))[0]
        k, most = group[best], half.changes[every, current].sum() + costs[best]
        for j in range(int(current[k]) + 1, int(level[best]) + 1):
            stop = current.copy()
            stop[: k + 1] = np.maximum(stop[: k + 1], j)
            # A stop on the way with more changes than the end of the move is worse in both respects.
            if half.changes[every, stop].sum() <= most:
                path.append(stop)
        current = path[-1].copy()
    return np.stack(path)


def _bounds(counts: _Ints, total: int, confidence: float) -> _Floats:
    """`upper_bound` of every count; few of them differ."""
    known = {int(count): upper_bound(int(count), total, confidence) for count in np.unique(counts)}
    return np.array([known[int(count)] for count in counts])


def _leading(passed: NDArray[np.bool_]) -> int:
    """How many pass before the first that does not."""
    return int(passed.size if passed.all() else np.argmin(passed))


def _thinned(steps: int, keep: int) -> list[int]:
    """At most `_SHOWN` of the indices 0..steps-1, evenly, with both ends and `keep`."""
    even = np.linspace(0, steps - 1, min(steps, _SHOWN - 1)).round().astype(int)
    return sorted({*even.tolist(), keep})


def _checked(
    distances: ArrayLike, changed: ArrayLike, sizes: Sequence[int], gains: Sequence[float]
) -> tuple[_Floats, NDArray[np.bool_], _Floats, _Floats]:
    """The arrays, or a TuningError that says what is wrong with them."""
    distance = np.asarray(distances, dtype=np.float64)
    flags = np.asarray(changed)
    if distance.ndim != 1:
        raise TuningError(f"distances must be one list, got shape {distance.shape}")
    if distance.size == 0:
        raise TuningError("there are no held-out sequences to tune on", "hold out data that is not in the database")
    if np.isnan(distance).any():
        raise TuningError(f"{int(np.isnan(distance).sum())} of {distance.size} distances are NaN")
    if (distance < 0.0).any():
        raise TuningError(f"a distance must be >= 0, or inf where there is no record; got {float(distance.min()):g}")
    if flags.ndim != 2 or len(flags) == 0 or flags.shape[1] != distance.size:
        raise TuningError(
            f"changed must have one row for each group and one column for each of {distance.size} sequences, "
            f"got shape {flags.shape}"
        )
    if flags.dtype != np.bool_ and not np.isin(flags, (0, 1)).all():
        raise TuningError("changed must hold true or false for each group and sequence")
    groups = len(flags)
    if len(sizes) != groups or len(gains) != groups:
        raise TuningError(f"changed has {groups} groups, but there are {len(sizes)} sizes and {len(gains)} gains")
    if not all(size >= 1 and size == size // 1 for size in sizes):
        raise TuningError(f"the size of a group is its number of layers, at least 1, got {list(sizes)}")
    if not all(math.isfinite(gain) and gain > 0.0 for gain in gains):
        raise TuningError(f"the gain of a group must be finite and > 0, got {list(gains)}")
    return distance, flags.astype(np.bool_), np.asarray(sizes, np.float64), np.asarray(gains, np.float64)
