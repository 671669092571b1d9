"""Does reuse pay? Whole forwards, timed with and without it as this process runs them.

What a lookup saves in the blocks says little of a small model on a fast processor: planning, verifications, and what
the model runs again for them take as long. So forwards themselves are compared, by the number of their tokens. Where
reuse takes longer, the model runs as if there were no records, and tries again: soon at first, then more and more
seldom. The first forwards with reuse may have run while many records were stored, and later ones are faster. Where
reuse pays, a forward now and then runs without, so that both are known.

LEARNING takes longer at first, and pays later or never. So what it costs is an investment, and it ends: forwards that
learn may take longer than those without reuse by as much as so many requests take, anew after each alarm.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from attmemo.system.locking import ThreadLock

KNOWN: Final = 6
"""Forwards of each kind before a judgement; where reuse does not pay, a try has so many."""
LAST: Final = 32
"""Forwards of each kind that count."""
OFTEN: Final = 8
"""While forwards without reuse are not known, one of so many runs without."""
SELDOM: Final = 64
"""Where reuse pays, one forward of so many runs without."""
SOONEST: Final = 12
"""Where it does not pay, so many forwards run without before the first try; before each later try twice as many."""
PERIOD: Final = 384
"""The most that run without before a try."""
INVESTED: Final = 500.0
"""Requests without reuse whose time learning may cost."""
SLOWER: Final = 1.02
"""Reuse ends where it takes so many times as long, and begins again where a try is as much faster."""
ALIKE: Final = 1.5
"""Forwards with so many times the tokens of the first one of a size, or so many times fewer, are of that size."""
_MOST_SEEN: Final = 4096
_WILD: Final = 3.0  # times the median: what takes longer was not this process


@dataclass(slots=True)
class _Kind:
    """Forwards with reuse, or without."""

    last: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))  # seconds a token
    mean: float = 0.0

    def record(self, seconds: float) -> None:
        self.last.append(seconds)
        most = _WILD * statistics.median(self.last)
        self.mean = statistics.fmean(min(one, most) for one in self.last)

    @property
    def is_known(self) -> bool:
        return len(self.last) >= KNOWN


@dataclass(slots=True)
class _Size:
    """Forwards of about as many tokens."""

    reused: _Kind = field(default_factory=_Kind)
    whole: _Kind = field(default_factory=_Kind)
    pays: bool = True
    forwards: int = 0  # since reuse last began to pay, ended, or was tried
    wait: int = SOONEST  # forwards before the next try
    seen: int = 0  # forwards in all

    @property
    def are_known(self) -> bool:
        return self.reused.is_known and self.whole.is_known

    def judge(self, *, tried: bool) -> None:
        """Whether reuse pays from now on. `tried`: the last forward reused; where reuse does not pay, a try ends."""
        ratio = self.reused.mean / self.whole.mean
        if not self.pays:
            if tried:
                self.pays, self.forwards, self.wait = ratio <= 1 / SLOWER, 0, min(2 * self.wait, PERIOD)
        elif not ratio <= SLOWER:
            self.pays, self.forwards = False, 0
        elif len(self.reused.last) == LAST:
            self.wait = SOONEST


class ForwardTimes:
    """Decides whether a forward is to reuse anything.

    Parameters
    ----------
    always : bool
        Always reuse.
    """

    def __init__(self, always: bool = False) -> None:
        self.always = always
        self._request = _Kind()  # seconds a sequence, of forwards without reuse
        self._lost = 0.0  # seconds that learning cost
        self._sizes: dict[int, _Size] = {}  # by the tokens of the first forward: batches of a stream are all alike
        self._seen: dict[int, _Size] = {}  # by tokens that were seen: batches of one are of many lengths, and quick
        self._lock = ThreadLock()

    def ask(self, tokens: int, *, learns: bool = False) -> bool:
        """Whether a forward of so many tokens is to reuse records. Changes nothing.

        `learns`: it is not known yet what records may serve.
        """
        with self._lock:
            size = self._size_or_none(tokens)
            if self.always or size is None:
                return True
            learns = learns and self._may_learn
            if not (size.reused.is_known or learns):
                return True
            if not size.whole.is_known:
                return size.forwards % OFTEN != OFTEN - 1
            return size.forwards % SELDOM != 0 if size.pays or learns else size.forwards >= size.wait

    def record(self, tokens: int, sequences: int, seconds: float, reused: bool, *, learns: bool = False) -> None:
        """A forward of so many tokens and sequences took so long. While it `learns`, reuse is not judged."""
        if not tokens or not sequences:
            return
        with self._lock:
            size = self._size_or_none(tokens) or self._sizes.setdefault(tokens, _Size())
            if len(self._seen) < _MOST_SEEN:
                self._seen[tokens] = size
            size.forwards += 1
            size.seen += 1
            if reused and learns and self._may_learn:
                if size.whole.is_known:
                    whole = tokens * size.whole.mean
                    lost = self._lost + min(seconds, _WILD * whole) - whole
                    self._lost = max(lost, -INVESTED * self._request.mean)
                return
            if reused and not size.pays and size.reused.is_known:
                if size.forwards <= size.wait:  # it began before the judgement, in another thread
                    return
                size.reused = _Kind()  # a try begins: what earlier ones took is over
            (size.reused if reused else size.whole).record(seconds / tokens)
            if not reused:
                self._request.record(seconds / sequences)
            if size.are_known:
                size.judge(tried=reused)

    def _size_or_none(self, tokens: int) -> _Size | None:
        """The nearest size, as far as sizes were known when so many tokens were seen first; None: all are far."""
        if tokens in self._seen:
            return self._seen[tokens]
        far = {first: max(tokens, first) / min(tokens, first) for first in self._sizes} if tokens else {}
        nearest = min(far, key=far.__getitem__, default=None)
        return None if nearest is None or far[nearest] > ALIKE else self._sizes[nearest]

    @property
    def _may_learn(self) -> bool:
        """Whether learning has not cost its share yet."""
        return self._lost <= INVESTED * self._request.mean

    def invest(self) -> None:
        """Learning begins anew, and may cost as much again."""
        with self._lock:
            self._lost = 0.0

    @property
    def ended(self) -> bool:
        """Whether reuse takes longer for forwards of some size."""
        with self._lock:
            return not self.always and any(not size.pays for size in self._sizes.values())

    @property
    def pays(self) -> bool | None:
        """Whether reuse pays for forwards of the size that was seen most; None: not known yet."""
        with self._lock:
            known = [size for size in self._sizes.values() if size.are_known]
            return max(known, key=lambda size: size.seen).pays if known else None
