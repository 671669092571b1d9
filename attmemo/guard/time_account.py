"""What reuse may cost: a small share of the time without it, and half of what it has saved.

Whole forwards are timed, with records and without, everything included that the guard does about them: by the
processor time of their thread, which other processes hardly change. What a forward with records took less than one
without was saved; what verifications and stored records took is what learning costs. Beside requests, learning goes on
while the account covers it. Where records could supply most rows, it is lent something; as changes become known, it is
lent what those will pay back. Elsewhere it goes on slowly, and where records could supply next to nothing not at all.
To look up a batch costs about as much as some of its inputs, whatever is learned from it; so the account is saved up,
and spent on few forwards. Records serve while that takes less time than none. While no request runs, learning costs
nothing (`attmemo.guard.deferred`).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from attmemo.system.locking import thread_lock

SHARE: Final = 0.01
"""Share of the time without reuse that learning may cost."""
GIVEN: Final = 8.0
"""Requests without reuse whose time the account begins with. It holds no more: so much is lost where a stream
changes."""
OVERHEAD: Final = 0.15
"""Share of a forward that reuse takes itself, about. Where records could supply no more, nothing is learned."""
WORTH: Final = 0.45
"""Share of a forward beyond `OVERHEAD` that records could supply from which on learning is lent something: the records
and samples of a proof take as long as some hundred requests. Lines of logs are worth 0.3 to 0.7, pairs and forms 0.1
to 0.2, free text nothing."""
SEED: Final = 128.0
"""Requests without reuse whose time is lent first: a quarter of what a proof takes."""
PAYS_BACK: Final = 768.0
"""Requests within which known changes pay back what is lent more, if as many stay known as lately at best."""
FULL: Final = 0.5
"""Share of `GIVEN` from which on learning begins; it goes on until nothing is left, and nothing is lent."""
LATELY: Final = 0.25
"""Weight of the newest forward in what records supply."""
RECENT: Final = 128.0
"""Requests that count for the share whose changes are known: single ones must not lend what a batch may."""
FADES: Final = 0.25
"""Their weight where fewer changes are known than before: new kinds of inputs are learned as the others were."""
SAVED: Final = 0.5
"""Share of what reuse saved that learning may cost."""
FEW: Final = 8
"""A forward that learned from one of so many sequences at most tells what records save, its rows left out."""
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
_WILD: Final = 2.0  # times what was done beside: what takes longer was not this process, or the machine was slow


@dataclass(slots=True)
class _Times:
    """The last forwards of a kind."""

    last: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))
    usual: float = 0.0  # the median: the first ones of a process are slow

    def record(self, value: float) -> None:
        self.last.append(value)
        self.usual = statistics.median(self.last)


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

    Attributes
    ----------
    lends : bool
        Whether learning may be lent something: where it has no idle times. To be set.
    """

    def __init__(self, always: bool = False) -> None:
        self.always = always
        self.lends = False
        self.balance: float | None = None  # seconds; None: what they are worth is not known yet
        self._holds = False  # it was full enough, and something is left
        self._saved = 0.0  # seconds that reuse saved in all
        # Shares of the rows that records supply, as far as changes are known; could supply, if all were verified; and
        # could supply if all that is asked had become records. None: not seen yet.
        self._known = self._supplied = 0.0  # lately, and in the newest forward
        self._found: float | None = None
        self._hoped: float | None = None
        self._request = _Times()  # seconds a sequence, of forwards without reuse
        self._gains: deque[float] = deque(maxlen=LAST)  # share saved by forwards that verified nothing
        self._overheads = _Times()  # shares that such forwards were supplied and did not save
        self._unknown = 0.0  # taken for it while there are few; above 0: what is not known is tried
        self._sizes: dict[int, _Size] = {}  # by the tokens of the first forward: batches of a stream are all alike
        self._seen: dict[int, _Size] = {}  # by tokens that were seen: batches of one are of many lengths, and quick
        self._lock = thread_lock()

    def ask(self, tokens: int) -> bool:
        """Whether a forward of so many tokens is to be looked up. Changes nothing."""
        with self._lock:
            size = self._size_or_none(tokens)
            if self.always or size is None:
                return True
            # What is not known to pay is tried whenever so much was saved up, whatever it is expected to bring.
            return not size.is_due and (not size.is_known or self._learns or self._is_full or self._gain > 0.0)

    @property
    def learns(self) -> bool:
        """Whether there is something left for learning."""
        with self._lock:
            return self._learns

    @property
    def has_own(self) -> bool:
        """Whether there is something left that was not lent: what never pays a loan back takes none."""
        with self._lock:
            return self.always or (self._holds and self.balance is not None and self.balance > 0.0)

    def afford(self, owed: float = 0.0) -> float:
        """Return how many requests without reuse may take their time again, to learn, once `owed` seconds are paid."""
        with self._lock:
            if self.always:
                return math.inf
            if self.balance is None or not self._learns:
                return 0.0
            return max((self.balance - owed) / self._request.usual + self._lent, 0.0)

    @property
    def _gains_at_most(self) -> float:
        """Share of a forward that records could save, once all is learned; 1: not seen yet."""
        known = [share for share in (self._found, self._hoped) if share is not None]
        return max(known) - OVERHEAD if known else 1.0

    @property
    def _lent(self) -> float:
        """Requests that are lent."""
        if not self.lends or self._hoped is None:
            return 0.0
        first = SEED if self._gains_at_most >= WORTH else 0.0
        takes = OVERHEAD
        if len(self._overheads.last) >= _TRIED:  # a lookup may take longer than the rows: single lines on AMX
            takes = max(takes, self._overheads.usual)
        return first + PAYS_BACK * max(self._known - takes, 0.0)

    def expect(self, share: float, known: float, sequences: int) -> None:
        """Records could supply this share of the rows of a forward, if all were verified; `known` of them as it is."""
        with self._lock:
            weight = min(LATELY, sequences / RECENT) * (FADES if known < self._known else 1.0)
            self._known += weight * (known - self._known)
            self._supplied = known
            self._found = share if self._found is None else self._found + LATELY * (share - self._found)
            self._see()

    def hope(self, share: float | None) -> None:
        """If all that is asked had become records, they could supply this share of the rows; None: it is not known."""
        with self._lock:
            self._hoped = share
            self._see()

    @property
    def _learns(self) -> bool:
        return self.always or (self._holds and self._gains_at_most > 0.0)

    @property
    def _is_full(self) -> bool:
        return self.balance is not None and self.balance > FULL * GIVEN * self._request.usual

    @property
    def _gain(self) -> float:
        """Share of their time that records save lately, without verifications."""
        return statistics.median(self._gains) if len(self._gains) >= _TRIED else self._unknown

    def record(
        self, tokens: int, sequences: int, seconds: float, reused: bool, learned: int = 0, again: int = 0
    ) -> None:
        """A forward of so many tokens and sequences took so long.

        `reused`: it was looked up. `learned`: so many answers of it were verified, or kept. `again`: so many rows were
        computed to verify.
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
            if not size.is_known or not size.whole.usual:  # a clock may be too coarse for a small model
                return
            usual = tokens * size.whole.usual
            done = OVERHEAD + again / tokens + learned / (2 * sequences)  # a record costs half a request here, about
            saved, cost = usual - min(seconds, usual * (1.0 + _WILD * done)), 0.0
            if reused and FEW * learned > sequences:  # a part of it is paid for once, whatever is verified
                cost, saved = max(self._gain, 0.0) * usual - saved, max(self._gain, 0.0) * usual
            elif reused:
                cost = again * size.whole.usual
                saved += cost
                self._gains.append(saved / usual)
                self._overheads.record(self._supplied - saved / usual)
            if reused:
                before = self._share(self._saved)
                self._saved += saved
                saved = self._share(self._saved) - before
            self._earn(SHARE * usual + (saved if reused else 0.0) - cost)

    def rested(self, seconds: float) -> None:
        """Forwards that were not looked at took so long together."""
        with self._lock:
            if self.balance is not None and seconds:
                self._earn(SHARE * seconds)

    @staticmethod
    def _share(saved: float) -> float:
        """What learning gets of so many seconds that were saved, or lost, in all.

        Of the sum, not of each forward: times go up and down, and each loss would count twice as much as a gain.
        """
        return SAVED * saved if saved > 0.0 else saved

    def _earn(self, seconds: float) -> None:
        most = GIVEN * self._request.usual
        self.balance = min((most if self.balance is None else self.balance) + seconds, most)
        self._see()

    def _see(self) -> None:
        """Begin or end learning, as the account stands."""
        if self.balance is not None:
            least = 0.0 if self._holds else FULL * GIVEN
            self._holds = self.balance > (least - self._lent) * self._request.usual

    def spend(self, seconds: float) -> None:
        """Something else took so long that the account is to pay."""
        with self._lock:
            if self.balance is not None:
                self.balance -= seconds
                self._see()

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
            self._unknown = SHARE

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
