"""A thread that turns what requests hand over into records, off their way.

A request hands over references and goes on. If more waits than is allowed, what comes is left out and counted: a
request never waits, and keeps only what will be stored. The thread also reads what other processes have added.

The thread rests after each item, and within it (`attmemo.rows.throttle`). A transaction is done in one go. What was
taken is stored within a second, however large it is and however little the thread may take: nothing is taken while
a long rest lies ahead, and what cannot be rested in time is rested when nothing waits any more.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, Generic, TypeVar

from attmemo.kernels.omp_team import leave_team
from attmemo.rows.throttle import Pace

POLL: Final = 0.25
"""Seconds between two looks for what other processes have added."""
MOST_WAITING: Final = 16 << 20
"""Most bytes that requests may hold back for the thread, beside a first batch."""
SOON: Final = 0.25
"""Seconds: nothing is taken that would wait for so long."""
DUE: Final = 0.4
"""Seconds after which all that was taken is to be stored."""
COST: Final = 2e-9
"""Seconds of work for each byte, before one was seen."""
PIECE: Final = 0.00015
"""Seconds of work, about: after so many the thread rests, also within an item. Such rests take a third of a record's
time; so where forwards take long, a piece does, too."""
OF_FORWARD: Final = 1 / 64
"""Share of a forward that a piece takes, if that is longer."""
LOOKING: Final = 0.1
"""Share of a core that a look gets at least: what was written is published soon."""
LONGEST: Final = 0.3
"""Seconds: the longest rest after a look."""
LEARNS: Final = 0.2
"""Weight of the newest item in what a byte costs."""
_LOOK = 0.001  # seconds of work: a look for news that takes no longer is not counted
_CLOSING = 5.0  # seconds
TOO_MANY: Final = "queue_full"

Item = TypeVar("Item")


class Filler(Generic[Item]):
    """Hands items to `work` in a thread of its own; calls it with nothing every `POLL` seconds, or a little later.

    Parameters
    ----------
    work : method
        Gets one item, or all if a caller waits for them to be stored, and whether one waits; held weakly. It must not
        raise.
    end : function
        Called once nothing holds the filler any more, if it was not closed.

    Attributes
    ----------
    pace : Pace
        How long it rests.
    """

    def __init__(self, work: Callable[[Sequence[Item], bool], None], end: Callable[[], None]) -> None:
        self._work, self._end = weakref.WeakMethod(work), end
        self.skipped: Counter[str] = Counter()
        self.pace = Pace()
        self._begin()
        self.wake()

    def _begin(self) -> None:
        self._waiting: deque[tuple[Item, int, float]] = deque()  # each with its bytes, and when it is to be stored
        self.pace.begin()
        self._bytes, self._busy, self._closed, self._asleep = 0, False, False, True
        self._rests_until, self._slowly = 0.0, False  # items rest; because the thread takes little
        self._hurry = False  # a flush waits
        self._hurries = False  # one waits for the work that is done now
        self._polled = time.monotonic()  # when it was called with nothing; behind the rest for that
        self._begun = 0.0  # processor time of the thread, when it rested last
        self._cost = COST  # seconds of work for each byte
        self._taken, self._spent = 0, 0.0  # bytes that are worked on, and seconds of work on them
        self._due = self._own_due = 0.0  # when all that waits, and what is worked on, is to be stored
        self._changed = threading.Condition()

    def wake(self) -> None:
        """Have a thread, if there is none: a forked child gets its own only once something is asked of it."""
        if self._asleep and not self._closed:
            self._asleep = False
            threading.Thread(
                target=_run, args=(weakref.ref(self), self._changed, self._end), daemon=True, name="attmemo-filler"
            ).start()

    def admit(self, sizes: Sequence[int]) -> int:
        """Return how many of these items may be handed over now, the first ones; the others are counted as left out.

        To keep what a forward computed takes up to a quarter of its time: only what will be stored is worth that.
        `sizes`: bytes that each holds back.
        """
        with self._changed:
            count = self._fit(sizes)
            self._leave_out(len(sizes) - count)
        return count

    @property
    def waits(self) -> float:
        """Seconds of work that wait."""
        return self.takes(self._bytes + (self._taken if self._busy else 0))

    def takes(self, nbytes: int) -> float:
        """Return the seconds of work on so many bytes."""
        return nbytes * self._cost

    def offer(self, items: Sequence[Item], sizes: Sequence[int]) -> int:
        """Hand over, and return how many were taken, the first ones. `sizes`: bytes that each holds back.

        Nothing is taken while the thread rests for long, or once it is closed. If nothing waits, as many are taken as
        are stored in time, but one at least.
        """
        self.wake()
        with self._changed:
            count = self._fit(sizes)
            self._leave_out(len(items) - count)
            if count:
                self._put(items[:count], sizes[:count])
                if not self._rest():
                    self._changed.notify_all()
        return count

    def store(self, items: Sequence[Item], sizes: Sequence[int], seconds: float) -> bool:
        """Hand over however much it is, and wait until it is stored; False: it takes longer."""
        with self._changed:
            if self._closed:
                self._leave_out(len(items))
                return False
            self._put(items, sizes)
        return self.flush(seconds)

    def _put(self, items: Sequence[Item], sizes: Sequence[int]) -> None:
        self._due = time.monotonic() + DUE
        self._waiting.extend((item, nbytes, self._due) for item, nbytes in zip(items, sizes, strict=True))
        self._bytes += sum(sizes)

    def _fit(self, sizes: Sequence[int]) -> int:
        """How many items of so many bytes may be taken now."""
        if self._closed or self._late or not sizes:
            return 0
        room = self._most - self._bytes if self._waiting else self._bytes_in(DUE)
        count = sum(total <= room for total in accumulate(sizes))
        return count if self._waiting else max(count, 1)

    def _leave_out(self, items: int) -> None:
        if items:
            self.skipped["closed" if self._closed else TOO_MANY] += items

    def flush(self, seconds: float) -> bool:
        """Wait until all that was handed over is stored, and what others added is read; False: it takes longer."""
        self.wake()
        with self._changed:
            self._hurry = not self._closed
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not (self._waiting or self._busy or self._hurry), seconds)

    def close(self) -> None:
        """Store what waits, and end the thread."""
        stored = self._asleep or self._closed or self.flush(_CLOSING)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if stored:  # but for what came since
                self._changed.wait_for(lambda: not (self._waiting or self._busy), _CLOSING)

    @property
    def is_closed(self) -> bool:
        """Whether nothing is taken any more."""
        return self._closed

    def leave_to_parent(self) -> None:
        """In a forked child: what waited, the parent stores. See `wake`."""
        if not self._closed:
            self._begin()

    def _take(self) -> tuple[list[Item], bool]:
        """What is worked on next, and whether that has to be stored at once."""
        found: list[Item] = []
        taken, hurry, now = 0, self._hurry or self._closed, time.monotonic()
        if hurry or now - self._polled < POLL:
            # Else it is time for a look: how others get on must not wait for a long rest.
            while self._waiting and (hurry or not found):
                item, nbytes, self._own_due = self._waiting.popleft()
                found.append(item)
                taken += nbytes
        self._bytes -= taken
        self._busy, self._hurry, self._hurries = True, False, hurry
        self._taken, self._spent = taken, 0.0
        return found, hurry

    @property
    def _most(self) -> int:
        """Bytes that may wait now."""
        return min(self._bytes_in(SOON), MOST_WAITING)

    def _bytes_in(self, seconds: float) -> int:
        """Bytes that the thread stores in so many seconds at its pace."""
        return int(seconds * self.pace.share / self._cost)

    @property
    def _late(self) -> bool:
        """Whether what is handed over now would be stored too late."""
        return self._rest() + self.pace.owed > SOON

    def _rest(self) -> float:
        """Seconds until the thread takes items again."""
        if self._hurry or self._closed or (self._slowly and not self.pace.is_slow):
            return 0.0
        return max(0.0, self._rests_until - time.monotonic())

    def _least(self) -> float:
        """The share of a core that the thread must get for all to be stored in time."""
        now, own = time.monotonic(), 0.0
        if self._busy and self._taken:
            expected = self.takes(self._taken)
            own = max(expected - self._spent, expected / 8, PIECE)  # some take more than expected
        both = own + self.takes(self._bytes)
        return min(1.0, max(own / max(self._own_due - now, PIECE), both / max(self._due - now, PIECE)))

    def _pause(self) -> float:
        """Seconds until there is something to do."""
        if self._hurry or self._closed:
            return 0.0
        look, rest = max(0.0, self._polled + POLL - time.monotonic()), self._rest()
        return min(look, rest) if self._waiting or rest else look  # what is offered during a rest wakes no thread

    def breathe(self) -> None:
        """Rest within the work on an item, if it is time for that and no caller waits. In the thread only."""
        worked = time.thread_time() - self._begun
        if worked < max(PIECE, OF_FORWARD * self.pace.forward_takes) or self._hurries:
            return
        with self._changed:
            self.pace.look()
            self._spent += worked
            if self._taken:
                rest = self.pace.rest(worked, self._least())
                self._rests_until = time.monotonic() + rest
            else:
                rest = min(self.pace.spend(worked), worked * (1.0 / max(LOOKING, self._least()) - 1.0))
            self._changed.wait_for(lambda: self._hurry or self._closed, rest)
        self._begun += worked  # to rest takes processor time too: the next piece pays for it

    def _done(self, polled: bool) -> None:
        worked = time.thread_time() - self._begun
        with self._changed:
            self._busy = False
            now = time.monotonic()
            if polled:  # items get their turn, however long the rest after a look is
                self._polled = now + min(self.pace.spend(worked if worked > _LOOK else 0.0), LONGEST)
            elif self._hurries or self._hurry:  # a caller waited for that: it was no work beside requests
                self._rests_until = self.pace.owed = 0.0
            else:
                if self._spent + worked >= PIECE:  # less is no record that was written
                    self._cost += LEARNS * ((self._spent + worked) / max(self._taken, 1) - self._cost)
                self._rests_until = now + self.pace.rest(worked, self._least())
                self._slowly = self.pace.is_slow
            self._changed.notify_all()


def _run(own: weakref.ref[Filler[Item]], changed: threading.Condition, end: Callable[[], None]) -> None:
    """Until the filler is closed, or nothing else holds it."""
    leave_team()
    while True:
        with changed:
            filler = own()
            if filler is None:
                end()
                return
            if filler._changed is not changed:
                return
            if filler._closed and not filler._waiting:
                return
            filler.pace.look()
            pause = filler._pause()
            if pause:
                del filler
                changed.wait(pause)  # what has come is looked at from the start
                continue
            items, hurry = filler._take()
        work, filler._begun = filler._work(), time.thread_time()
        try:
            if work is not None:
                work(items, hurry)
        finally:
            filler._done(not items)
        del filler, items, work
        time.sleep(0)  # let requests go on
