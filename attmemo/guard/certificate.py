"""How often served answers differ, at most, and when they differ too often: statistics that may be looked at any time.

Every verified answer is a sample: 1 if reuse changed it, else 0. A bet against "the rate is t or more" multiplies
a stake by ``p / t`` for a 1 and by ``(1 - p) / (1 - t)`` for a 0, for some p below t. If the rate is t or more, the
stake does not grow on average, so it ever reaches ``1 / (1 - confidence)`` with probability ``1 - confidence`` at
most (Ville's inequality). Stakes are spread over several p. Sources: Waudby-Smith and Ramdas (arXiv 2010.09686), Shin,
Ramdas and Rinaldo (arXiv 2203.03532) for the alarm.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

_PARTS: Final = np.geomspace(0.02, 0.95, 24)
"""p as a share of t. Logarithmic steps favour small rates, at little cost for others."""
_SPREAD: Final = 1 / _PARTS / (1 / _PARTS).sum()
"""Shares of the stake, one for each part. Small parts get more: 1 % at 95 % takes 318 samples if no answer changed,
and 644 if one did. Every such test needs at least 299."""
_HALVINGS: Final = 40
_MOST_SAMPLES: Final = 1 << 16

EARNINGS: Final = 1000
"""Requests of which the budget may be saved up."""
WORSE: Final = (2.0, 4.0, 8.0)
"""Rates that the alarm looks for, in budgets."""
JUDGED: Final = 128
"""Samples from which on it is judged whether a proof will come: what changed first is known by then."""
HOPELESS: Final = 20.0
"""Times as likely that they are of a rate that the alarm looks for, where it is judged that none will come."""
BETWEEN_ALARMS: Final = 400.0
"""Verified samples between two false alarms, on average, if the rate is just the budget."""


def stake(t: float, changed: float, same: float) -> float:
    """The stake of a bet against "the rate is t or more" after so many samples; it began as 1."""
    p = t * _PARTS
    logs = changed * np.log(_PARTS) + same * (np.log1p(-p) - np.log1p(-t))
    top = float(logs.max())
    return float(np.exp(min(top, 700.0)) * (_SPREAD * np.exp(logs - top)).sum())


def highest_rate(changed: int, same: int, confidence: float) -> float:
    """The highest rate that the samples do not rule out; 1 if there are none."""
    if same == 0:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if stake(middle, changed, same) >= 1.0 / (1.0 - confidence):
            high = middle
        else:
            low = middle
    return high


def certifies(highest: float, could: int, requests: int, budget: float) -> bool:
    """Whether every answer whose changes are verified may be served, where at most `highest` of them change."""
    return highest < 1.0 and highest * _share_served(could, requests) <= budget


def _share_served(could: int, requests: int) -> float:
    """Share of all requests that `could` be served: that were, or were verified in place of it; supposed: a half."""
    return min(max(could / max(requests, 1), 0.5), 1.0)


def samples_needed(changed: int, could: int, requests: int, budget: float, confidence: float) -> int | None:
    """About how many verified answers `certifies` needs in all, if no further one changes; None: too many."""
    rate = budget / _share_served(could, requests)
    if rate >= 1.0:  # one that did not change
        return changed + 1
    samples = range(changed + 1, _MOST_SAMPLES + 1)
    enough = 1.0 / (1.0 - confidence)
    place = bisect_left(samples, True, key=lambda count: stake(rate, changed, count - changed) >= enough)
    return samples[place] if place < len(samples) else None


@dataclass(slots=True)
class Counts:
    """Samples and requests since an epoch began. All but `lowest` are sums: those of several processes are added."""

    same: int = 0
    changed: int = 0
    requests: int = 0
    served: int = 0  # of these, from a record of another input
    owed: int = 0  # of the samples, those that were served first
    charged: float = 0.0  # sum of the highest rates under which answers were served
    lost: float = 0.0  # what was saved up for too long
    repeated: int = 0  # of the requests, those whose own record answered: nothing changed
    lowest: float = 1.0  # of the highest rates so far: not a sum, the lowest of all processes holds

    @property
    def could(self) -> int:
        """Requests that could be served from another input: those that were, and those verified in place of it."""
        return self.served + self.same + self.changed - self.owed

    def copy(self) -> Counts:
        """The same numbers."""
        return Counts(*(getattr(self, name) for name in Counts.__slots__))


class Certificate:
    """Which answers may be served within a budget.

    Each request of any kind earns `budget`. A served answer costs the highest rate of changed answers that the samples
    do not rule out. Later samples may rule out more: the bounds hold for all numbers of samples at once, so the lowest
    one is what an answer cost. While the account covers the cost, an answer may be served: the expected number of
    changed answers stays below ``budget * requests`` with probability `confidence`, from the first request on.

    Parameters
    ----------
    budget : float
        Share of all answers that may change.
    confidence : float
    """

    def __init__(self, budget: float, confidence: float) -> None:
        self.budget, self.confidence = budget, confidence
        self.counts = Counts()
        self._highest: float | None = 1.0  # None: to be found
        self._hopeless: bool | None = False  # the same
        self._alarm = np.ones(len(WORSE))

    @property
    def highest(self) -> float:
        """The highest rate of changed answers that the samples do not rule out.

        It is found when it is asked for: that takes half a millisecond, and a batch may have many samples.
        """
        if self._highest is None:
            c = self.counts
            self._highest = highest_rate(c.changed, c.same, self.confidence)
            c.lowest = min(c.lowest, self._highest)
        return self._highest

    def rules_out(self, changed: float, samples: float) -> bool:
        """Return whether so many changed answers among samples rule out that more than the budget change."""
        return stake(self.budget, changed, samples - changed) >= 1.0 / (1.0 - self.confidence)

    def affords(self, more: int = 1) -> bool:
        """Return whether so many answers more may be served: their own requests earn, too."""
        return self._saved + more * self.budget >= more * self.highest

    def spend(self, times: Sequence[int], wanted: Sequence[bool], repeated: Sequence[bool]) -> list[bool]:
        """Count the requests of a batch; return which of them are served from records of other inputs.

        Parameters
        ----------
        times : sequence of int
            How often each request is in the batch. All of them get one answer: the budget must afford all, or none is
            served.
        wanted : sequence of bool
            Whether a record of another input could serve it.
        repeated : sequence of bool
            Whether its own record answers.
        """
        highest, found = self.highest, list[bool]()
        c, budget = self.counts, self.budget
        most, lowest = budget * EARNINGS, c.lowest
        if not any(wanted) and not any(repeated):  # one by one they would come to the same
            c.requests += sum(times)
            c.lost += max(budget * c.requests - min(c.charged, c.served * lowest) - c.lost - most, 0.0)
            return [False] * len(times)
        for count, want, same in zip(times, wanted, repeated, strict=True):
            saved = budget * c.requests - min(c.charged, c.served * lowest) - c.lost
            serves = want and saved + count * budget >= count * highest
            for _ in range(count):
                c.requests += 1
                c.repeated += same
                if serves:
                    c.served += 1
                    c.charged += highest
                over = budget * c.requests - min(c.charged, c.served * lowest) - c.lost - most
                if over > 0.0:
                    c.lost += over
            found.append(serves)
        return found

    def give_back(self) -> None:
        """An answer that was to be served was computed exactly after all."""
        c = self.counts
        c.served = max(c.served - 1, 0)
        c.charged = max(c.charged - self.highest, 0.0)

    @property
    def is_hopeless(self) -> bool:
        """Whether what is verified changes so often that a proof will hardly come."""
        if self._hopeless is None:
            self._hopeless = self._find_hopeless()
        return self._hopeless

    def _find_hopeless(self) -> bool:
        c = self.counts
        rate = self.budget / _share_served(c.could, c.requests)
        if c.same + c.changed < JUDGED or rate >= 1.0:
            return False
        worse = np.minimum(rate * np.array(WORSE), (1.0 + rate) / 2)
        logs = c.changed * np.log(worse / rate) + c.same * (np.log1p(-worse) - math.log1p(-rate))
        return bool(np.exp(np.minimum(logs, 700.0)).mean() >= HOPELESS)

    @property
    def cost(self) -> float:
        """Changed answers so far, at most: what was served costs no more than the lowest bound there was."""
        lowest = min(self.highest, self.counts.lowest)
        return min(self.counts.charged, self.counts.served * lowest)

    @property
    def _saved(self) -> float:
        """Changed answers that the requests so far have earned and not spent."""
        c = self.counts
        return self.budget * c.requests - self.cost - c.lost

    def sample(self, changed: bool, served: bool = False) -> bool:
        """One verified answer, as it would have been served, or was. True: too many answers change."""
        self.counts.owed += served
        self.counts.changed += changed
        self.counts.same += not changed
        self._highest = self._hopeless = None
        return self.alarms(changed)

    def alarms(self, changed: bool) -> bool:
        """Go on with the bet that the rate is above the budget; whether it is won."""
        rate = min(self.budget / max(self.share_served, self.budget), 0.5)
        worse = np.minimum(rate * np.array(WORSE), 0.99)
        self._alarm = np.maximum(self._alarm, 1.0) * (worse / rate if changed else (1.0 - worse) / (1.0 - rate))
        return bool(self._alarm.mean() >= BETWEEN_ALARMS)

    def adopt(self, counts: Counts) -> None:
        """Go on from these counts."""
        self.counts, self._highest, self._hopeless = counts, None, None

    def restart(self) -> None:
        """Begin a new epoch."""
        self.counts, self._highest, self._hopeless, self._alarm = Counts(), 1.0, False, np.ones(len(WORSE))

    @property
    def share_served(self) -> float:
        """Share of the requests of this epoch that were served from a record."""
        return self.counts.served / self.counts.requests if self.counts.requests else 0.0
