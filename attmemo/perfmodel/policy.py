"""Which policies are worth a test: a radius for each group of layers, when one lookup serves all layers.

Layers differ in how much a foreign map hurts them: on a six-layer DeBERTa the last four can be served for 96 % of the
sequences while 0.5 % of the answers change, the first two for 60 %. So the layers are put into nested groups, the most
robust first, and each group gets a radius, not increasing from group to group: a sequence whose nearest record lies at
distance d is served in the groups k with d <= r_k. K forced passes (the first group served, the first two, ...) tell
how *every* such policy would do without a gate. They see the selection part of the sequences only, since a policy
picked among many looks better than it is. The certification part tests what `propose` gives (`tuner.choose`).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

NEVER = -1.0
"""The radius of a layer that is never served: no distance is that small."""

_GRID = 40  # radii to choose from
_STRETCH = 20  # consecutive sequences that never go to both parts, but at the border between the parts
_WIDEST = 0.03  # of the greatest gain: where two policies lie further apart, one between them is tested too
# Added to the changes that a move costs. A move over ten sequences that saw no change is not free: after x changes the
# Jeffreys estimate of a Poisson mean is x + 1/2. It also makes the larger of two moves without changes the better one.
_UNSEEN = 0.5

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


def split(total: int, judged: int, seed: int) -> tuple[_Ints, _Ints]:
    """Sequence numbers of the selection part, and of the `judged` sequences of the certification part.

    Stretches of consecutive sequences go to one part together: neighbours in a log are near copies of each other, and
    dealt out one by one they would make the parts agree more than a new day agrees with either.
    """
    stretch = max(1, min(_STRETCH, total // 40))
    stretches = np.random.default_rng(seed).permutation(-(-total // stretch))
    order = np.concatenate([np.arange(s * stretch, min(total, (s + 1) * stretch)) for s in stretches])
    return order[: total - judged], order[total - judged :]


def propose(
    distances: ArrayLike, changed: ArrayLike, gains: ArrayLike, allowed: float, most: int = 30
) -> list[tuple[float, ...]]:
    """At most `most` policies worth a test, each containing the one before; the first serves nothing.

    Each is a radius for each of K groups; `NEVER` for a group that is not served. `distances` ``[Q]`` are those of the
    nearest records, inf where there is none. ``changed[k - 1, q]`` (``[K, Q]``) says whether the answer to sequence q
    is another one when it is served in the first k groups. `gains` ``[K]``, > 0, say what serving one sequence in each
    group saves; only ratios matter. `allowed` of as many sequences as these may change in the test.
    """
    radii, reach, changes = _counts(np.asarray(distances, np.float64), np.asarray(changed, np.bool_))
    weights = np.asarray(gains, np.float64)
    path = _path(reach, changes, weights)
    count = np.maximum.accumulate(_changed(changes, path))
    # Policies with a few more changes than may pass: this part may have been unlucky.
    most_changes = 1.5 * allowed + 1
    hopeful = count <= most_changes
    gain, count = (reach[path] @ weights)[hopeful], count[hopeful]
    # Half of the steps by gain, half by changes: where changes begin to count, steps are small.
    progress = gain / max(float(gain[-1]), 1e-12) + count / max(int(count[-1]), 1)
    ends = np.linspace(0.0, float(progress[-1]), max(2, most // 2))
    steps = np.searchsorted(progress, ends, side="right") - 1
    levels = _close(path[np.unique(steps)], reach, weights, most, changes, most_changes)
    return [tuple(radii[one].tolist()) for one in levels]


def _changed(changes: _Ints, levels: _Ints) -> _Ints:
    """Changed answers of policies ``[..., groups]``."""
    found: _Ints = changes[np.arange(len(changes)), levels].sum(axis=-1)
    return found


def _close(levels: _Ints, reach: _Ints, gains: _Floats, most: int, changes: _Ints, most_changes: float) -> _Ints:
    """The policies and others between them, at most `most`, until no two are far apart in gain.

    The first that breaks the budget ends the test, and what lies before it is served. Between two policies this part
    may have seen more changes than at the second one. Such a policy is tested too, while the changes are hopeful.
    """
    found, closed = list(levels), set[tuple[int, ...]]()
    whole = float(reach[found[-1]] @ gains)
    while len(found) < most:
        wide = [
            (float((reach[after] - reach[before]) @ gains), place)
            for place, (before, after) in enumerate(pairwise(found))
            if int((after - before).sum()) > 1 and tuple(before) not in closed
        ]
        gap, place = max(wide, default=(0.0, 0))
        if gap <= _WIDEST * whole:
            break
        middle = _between(found[place], found[place + 1])
        if _changed(changes, middle) <= most_changes:
            found.insert(place + 1, middle)
        else:
            closed.add(tuple(found[place]))
    return np.stack(found)


def _between(before: _Ints, after: _Ints) -> _Ints:
    """A policy that contains the first and lies in the second, and is neither."""
    middle = (before + after) // 2
    if np.array_equal(middle, before):  # no group is two levels higher: half of those that are one level higher
        higher = np.flatnonzero(after > before)
        middle = before.copy()
        middle[higher[: len(higher) // 2]] += 1
    return middle


def _counts(distance: _Floats, changed: NDArray[np.bool_]) -> tuple[_Floats, _Ints, _Ints]:
    """Sequences counted by distance, so that every policy with radii on a grid is judged by a few look-ups.

    A policy is a row of levels, one for each group: level 0 serves nothing, level j serves up to ``radii[j]``. Levels
    do not increase from group to group, so raising group k turns "the first k - 1 groups served" into "the first k"
    for the sequences in between and touches no others. So changes and gain are sums over the groups of a function of
    one level.
    """
    seen = distance[np.isfinite(distance)]
    shares = np.arange(1, _GRID + 1) / _GRID
    # Distances that were seen, not interpolated, and none twice.
    grid = np.unique(np.quantile(seen, shares, method="inverted_cdf")) if seen.size else seen
    radii = np.concatenate(([NEVER], grid))
    levels = len(radii)
    level = np.searchsorted(radii, distance)  # the lowest that serves a sequence; beyond all of them for inf
    reach = np.cumsum(np.bincount(level, minlength=levels + 1)[:levels])  # [levels] sequences served
    # changes[k, j]: answers that change because of group k served up to level j, beside the groups before it.
    # It may fall with j: a sequence changed by the groups before may be right again.
    before = np.concatenate((np.zeros((1, distance.size), np.int64), changed[:-1]))
    more = [np.bincount(level, weights=row, minlength=levels + 1)[:levels] for row in changed - before]
    return radii, reach, np.cumsum(more, axis=1).astype(np.int64)


def _path(reach: _Ints, changes: _Ints, gains: _Floats) -> _Ints:
    """Policies from nothing served to everything served, ``[steps, groups]`` levels; radii only grow.

    Again and again by the move that costs fewest changed answers per unit of gain. A move raises one radius, and takes
    along the smaller radii of the groups before it. So one radius for all is among the moves, and a group that hurts
    only until the next one is served as well (answers do change back) does not stand in the way.
    """
    groups, levels = changes.shape
    every = np.arange(groups)
    current = np.zeros(groups, np.int64)
    path = [current]
    while current[-1] < levels - 1:  # levels do not increase from group to group, so the last one arrives last
        # Move [k, j]: raise group k to level j, and the groups before it that are not there yet.
        raised = np.maximum(current[:, None], np.arange(levels))
        cost = np.cumsum(changes[every[:, None], raised] - changes[every, current][:, None], axis=0)
        gain = np.cumsum(gains[:, None] * (reach[raised] - reach[current][:, None]), axis=0)
        group, to = np.nonzero(raised > current[:, None])
        costs, brings = cost[group, to], gain[group, to]
        # The least price, and of equal ones the one with fewer changes. Where changes fall although more is gained the
        # price is negative, so such a move comes before all that cost anything.
        best = np.lexsort((costs, (costs + _UNSEEN) / brings))[0]
        k, limit = group[best], _changed(changes, current) + costs[best]
        for j in range(int(current[k]) + 1, int(to[best]) + 1):
            stop = current.copy()
            stop[: k + 1] = np.maximum(stop[: k + 1], j)
            # A stop on the way with more changes than the end of the move is worse in both respects.
            if _changed(changes, stop) <= limit:
                path.append(stop)
        current = path[-1]
    return np.stack(path)
