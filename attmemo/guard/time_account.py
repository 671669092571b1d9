"""What reuse may cost: a small share of the time without it, and half of what it has saved.

Whole forwards are timed, with records and without, everything included that the guard does about them. What a forward
with records took less than one without was saved; what verifications and stored records took is what learning costs.
Beside requests, learning goes on while the account covers it: slowly at first, faster once answers are reused, and
hardly where nothing comes of it. Records serve while that takes less time than none. So forwards take hardly longer
than without reuse, whatever comes. While no request runs, learning costs nothing (`attmemo.guard.deferred`).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from attmemo.system.locking import ThreadLock

SHARE: Final = 0.01
"""Share of the time without reuse that learning may cost."""
GIVEN: Final = 8.0
"""Requests without reuse whose time the account begins with. It holds no more: so much is lost where a stream
changes."""
SAVED: Final = 0.5
"""Share of what reuse saved that learning may cost."""
FEW: Final = 8
"""A forward that verified at most one of so many sequences counts as one that verified nothing."""
LAST: Final = 8
"""Forwards of a kind that count."""
OFTEN: Final = 8
"""One of so many forwards of a size runs without reuse, until `LAST` did; later one of `SELDOM`."""
SELDOM: Final = 64
ALIKE: Final = 1.5
"""Forwards with so many times the tokens of the first one of a size, or so many times fewer, are of that size."""
_KNOWN: Final = 2  # forwards without reuse before others are compared with them
_TRIED: Final = 3  # forwards with records before it is judged what they save
_MOST_SEEN: Final = 4096
_WILD: Final = 3.0  # times the usual: what takes longer was not this process


@dataclass(slots=True)
class _Times:
    """The last forwards of a kind."""

    last: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))
    mean: float = 0.0

    def record(self, value: float) -> None:
        self.last.append(value)
        most = _WILD * sorted(self.last)[len(self.last) // 2]
        self.mean = sum([min(one, most) for one in self.last]) / len(self.last)


@dataclass(slots=True)
class _Size:
    """Forwards of about as many tokens."""

    whole: _Times = field(default_factory=_Times)  # seconds a token, without reuse
    since: int = 0  # forwards since the last one without reuse

    @property
    def is_known(self) -> bool:
        return len(self.whole.last) >= _KNOWN

    @property
    def is_due(self) -> bool:
        """Whether the next forward is to run without reuse, so that its time is known."""
        count = len(self.whole.last)
        # At first every third one: who asks the same twice finds it again.
        return self.since >= (2 if count < _KNOWN else OFTEN if count < LAST else SELDOM)


class TimeAccount:
    """Decides whether a forward is to reuse anything, and whether it may verify.

    Parameters
    ----------
    always : bool
        Always do both.
    """

    def __init__(self, always: bool = False) -> None:
        self.always = always
        self.balance: float | None = None  # seconds; None: what they are worth is not known yet
        self._request = _Times()  # seconds a sequence, of forwards without reuse
        self._gains: deque[float] = deque(maxlen=LAST)  # share saved by forwards that verified nothing
        self._sizes: dict[int, _Size] = {}  # by the tokens of the first forward: batches of a stream are all alike
        self._seen: dict[int, _Size] = {}  # by tokens that were seen: batches of one are of many lengths, and quick
        self._lock = ThreadLock()

    def ask(self, tokens: int) -> bool:
        """Whether a forward of so many tokens is to be looked up. Changes nothing."""
        with self._lock:
            size = self._size_or_none(tokens)
            if self.always or size is None:
                return True
            return not size.is_due and (not size.is_known or self._learns or self._gain > 0.0)

    @property
    def learns(self) -> bool:
        """Whether there is something left for learning."""
        with self._lock:
            return self._learns

    @property
    def requests(self) -> float:
        """Requests without reuse whose time may be spent on learning in one forward."""
        with self._lock:
            if self.always:
                return math.inf
            return self.balance / self._request.mean if self.balance is not None and self._learns else 0.0

    @property
    def _learns(self) -> bool:
        return self.always or (self.balance is not None and self.balance > 0.0)

    @property
    def _gain(self) -> float:
        """Share of their time that records save lately, without verifications; a little above 0: not known."""
        return statistics.median(self._gains) if len(self._gains) >= _TRIED else SHARE

    def record(self, tokens: int, sequences: int, seconds: float, reused: bool, verified: int = 0) -> None:
        """A forward of so many tokens and sequences took so long, and so many answers were verified in it.

        `reused`: it was looked up.
        """
        if not tokens or not sequences:
            return
        with self._lock:
            size = self._size_or_none(tokens) or self._sizes.setdefault(tokens, _Size())
            if len(self._seen) < _MOST_SEEN:
                self._seen[tokens] = size
            size.since = size.since + 1 if reused else 0
            if not reused:
                size.whole.record(seconds / tokens)
                self._request.record(seconds / sequences)
            if not size.is_known:
                return
            usual = tokens * size.whole.mean
            saved, earned = usual - min(seconds, _WILD * usual), SHARE * usual
            if reused and FEW * verified <= sequences:
                self._gains.append(saved / usual)
                earned += SAVED * saved if saved > 0.0 else saved
            elif reused:
                earned += saved - max(self._gain, 0.0) * usual
                self._gains.clear()  # what was learned may save more
            self._earn(earned)

    def _earn(self, seconds: float) -> None:
        balance = GIVEN * self._request.mean if self.balance is None else self.balance
        self.balance = min(balance + seconds, GIVEN * self._request.mean)

    def spend(self, seconds: float) -> None:
        """Something else took so long that the account is to pay."""
        with self._lock:
            if self.balance is not None:
                self.balance -= seconds

    def _size_or_none(self, tokens: int) -> _Size | None:
        """The nearest size, as far as sizes were known when so many tokens were seen first; None: all are far."""
        if tokens in self._seen:
            return self._seen[tokens]
        far = {first: max(tokens, first) / min(tokens, first) for first in self._sizes} if tokens else {}
        nearest = min(far, key=far.__getitem__, default=None)
        return None if nearest is None or far[nearest] > ALIKE else self._sizes[nearest]

    def try_again(self) -> None:
        """Forget what records save: more of them may serve from now on."""
        with self._lock:
            self._gains.clear()

    @property
    def pays(self) -> bool | None:
        """Whether records save time lately; None: not known."""
        with self._lock:
            return self._gain > 0.0 if len(self._gains) >= _TRIED else None

    @property
    def rests(self) -> bool:
        """Whether forwards are not looked up now."""
        with self._lock:
            known = any(size.is_known for size in self._sizes.values())
            return known and not (self._learns or self._gain > 0.0)
