"""One bound of bytes for several pools: each is told what it may take now, and no sum ever exceeds the bound.

    in use lately    what they hold and some room more; if that is too much, the same for all that want more
    not in use       what they hold, as far as it is left; the one that was used longest ago gives way first
    what is left     to those in use, the same for each

A pool asks before it writes. Until it has asked again it may grow to what it was told, so that much is kept free of
others: a pool that has to shrink is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Final

from attmemo.system.locking import thread_lock

LONG: Final = 600.0
"""Seconds after which a pool counts as not in use."""
ROOM: Final = 1 / 16
"""Share of the bound: the room beyond what it holds that a pool in use has before others keep theirs."""


@dataclass(eq=False, slots=True)
class Sharer:
    """One of the pools.

    Attributes
    ----------
    nbytes : callable
        Bytes that it takes now.
    used : float
        When it was used last, by the monotonic clock.
    told : int
        Bytes that it was told to take at most.
    """

    nbytes: Callable[[], int]
    used: float
    told: int = 0


class Shares:
    """Parts of a bound.

    Parameters
    ----------
    total : int
        Bytes of all pools, at most.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._sharers: list[Sharer] = []
        self._lock = thread_lock()

    def add(self, nbytes: Callable[[], int], used: float | None = None, told: int = 0) -> Sharer:
        """Have a pool share the bound; it was told before that it may take so many bytes."""
        one = Sharer(nbytes, monotonic() if used is None else used, told)
        with self._lock:
            self._sharers.append(one)
        return one

    def remove(self, one: Sharer) -> None:
        """Have a pool share it no more."""
        with self._lock:
            self._sharers.remove(one)

    def of(self, one: Sharer) -> int:
        """Tell a pool how many bytes it may take from now on; it may have to give some back."""
        with self._lock:
            held = {id(other): other.nbytes() for other in self._sharers}
            wanted = claims(self.total, self._sharers, held, monotonic() - LONG)[self._sharers.index(one)]
            others = sum(max(held[id(other)], other.told) for other in self._sharers if other is not one)
            one.told = max(min(wanted, self.total - others), min(wanted, held[id(one)]))
            return one.told


def claims(total: int, sharers: Sequence[Sharer], held: dict[int, int], since: float) -> list[int]:
    """What each may take, `held` being bytes by identity; those used before `since` are not in use."""
    found, left = {id(one): 0 for one in sharers}, total
    active = [one for one in sharers if one.used >= since]
    hungry = sorted(active, key=lambda one: held[id(one)])
    for place, one in enumerate(hungry):
        found[id(one)] = min(held[id(one)] + int(ROOM * total), left // (len(hungry) - place))
        left -= found[id(one)]
    for one in sorted((one for one in sharers if one.used < since), key=lambda one: -one.used):
        found[id(one)] = min(held[id(one)], left)
        left -= found[id(one)]
    for one in active:
        found[id(one)] += left // len(active)
    return [found[id(one)] for one in sharers]
