"""A thread that turns what requests hand over into records, off their way.

A request hands over references and goes on. If more waits than is allowed, what comes is left out and counted: a
request never waits. The thread also reads what other processes have added.

The thread rests after each item, and within it (`attmemo.reuse.pace`). A transaction is done in one go.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from attmemo.kernels.team import leave_team
from attmemo.reuse.pace import Pace

POLL: Final = 0.25
"""Seconds between two looks for what other processes have added."""
MOST_WAITING: Final = 16 << 20
"""Bytes that requests may hold back for the thread: the work of about a second while requests are busy."""
MOST_SLOWLY: Final = 2 << 20
"""The same while the thread takes little: else what waits would be stored seconds later."""
PIECE: Final = 0.00015
"""Seconds of work, about: after so many the thread rests, also within an item."""
_LOOK = 0.001  # seconds of work: a look for news that takes no longer is not counted
_CLOSING = 5.0  # seconds
TOO_MANY: Final = "too many waited to be stored"

Item = TypeVar("Item")


class Filler(Generic[Item]):
    """Hands items to `work` in a thread of its own; calls it with nothing every `POLL` seconds.

    Parameters
    ----------
    work : method
        Gets one item, or all if a caller waits for them to be stored, and whether one waits; held weakly. It must not
        raise.
    end : function
        Called once nothing holds the filler any more, if it was not closed.
    pace : Pace, optional
        How long it rests.
    """

    def __init__(
        self, work: Callable[[Sequence[Item], bool], None], end: Callable[[], None], pace: Pace | None = None
    ) -> None:
        self._work, self._end = weakref.WeakMethod(work), end
        self.skipped: Counter[str] = Counter()
        self.pace = pace or Pace()
        self._begin()
        self.wake()

    def _begin(self) -> None:
        self._waiting: deque[tuple[Item, int]] = deque()
        self._bytes, self._busy, self._closed, self._asleep = 0, False, False, True
        self._free = 1  # bytes that must be free before items are admitted
        self._rests_until, self._hurry = 0.0, False  # a flush waits
        self._hurries = False  # one waits for the work that is done now
        self._polled = 0.0  # when it was called with nothing
        self._begun = 0.0  # processor time of the thread, when it rested last
        self._changed = threading.Condition()

    def wake(self) -> None:
        """Have a thread, if there is none: a forked child gets its own only once something is asked of it."""
        if self._asleep and not self._closed:
            self._asleep = False
            threading.Thread(
                target=_run, args=(weakref.ref(self), self._changed, self._end), daemon=True, name="attmemo-filler"
            ).start()

    def admit(self, items: int) -> bool:
        """Whether items may be handed over now. If too much waits, so many are counted as left out.

        After items had to be left out, nothing is admitted until there is room for as many again, and for half of
        what may wait: to keep what a forward computed takes 1 to 3 % of its time, for nothing if there is no room at
        its end.
        """
        if self._bytes + self._free <= self._most and not self._closed:
            return True
        with self._changed:
            self.skipped["closed" if self._closed else TOO_MANY] += items
        return False

    def offer(self, items: Sequence[Item], nbytes: int) -> bool:
        """Hand over; False: too much waits, or it is closed, and these are left out. `nbytes`: what they hold back.

        If nothing waits, all are taken; while the thread takes little, those that may wait, but one at least.
        """
        self.wake()
        with self._changed:
            most = self._most
            full = bool(self._waiting) and self._bytes + nbytes > most
            if self._closed or full:
                self.skipped[TOO_MANY if full else "closed"] += len(items)
                self._free = min(max(nbytes, most // 2), most)
                return False
            each = nbytes // max(len(items), 1)
            taken = items[: max(1, most // max(each, 1))] if self.pace.is_slow else items
            if len(taken) < len(items):
                self.skipped[TOO_MANY] += len(items) - len(taken)
                self._free = most
            self._waiting.extend((item, each) for item in taken)
            self._bytes += each * len(taken)
            if not self._rest():
                self._changed.notify_all()
        return True

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

    def leave_to_parent(self) -> None:
        """In a forked child: what waited, the parent stores. See `wake`."""
        if not self._closed:
            self._begin()

    def _take(self) -> tuple[list[Item], bool]:
        """What is worked on next, and whether that has to be stored at once."""
        found: list[Item] = []
        taken, hurry, now = 0, self._hurry or self._closed, time.monotonic()
        if hurry or now - self._polled < POLL:
            while self._waiting and (hurry or not found):
                item, nbytes = self._waiting.popleft()
                found.append(item)
                taken += nbytes
        self._bytes -= taken
        if self._bytes + self._free <= self._most:
            self._free = 1
        self._busy, self._hurry, self._hurries = True, False, hurry
        return found, hurry

    @property
    def _most(self) -> int:
        """Bytes that may wait now."""
        return MOST_SLOWLY if self.pace.is_slow else MOST_WAITING

    def _rest(self) -> float:
        """Seconds until the thread works again."""
        return 0.0 if self._hurry or self._closed else max(0.0, self._rests_until - time.monotonic())

    def breathe(self) -> None:
        """Rest within the work on an item, if it is time for that and no caller waits. In the thread only."""
        worked = time.thread_time() - self._begun
        if worked < PIECE or self._hurries:
            return
        with self._changed:
            self.pace.look()
            rest = self.pace.rest(worked)
            self._rests_until = time.monotonic() + rest  # what is offered meanwhile wakes no thread
            self._changed.wait_for(lambda: self._hurry or self._closed, rest)
        self._begun += worked  # to rest takes processor time too: the next piece pays for it

    def _done(self, polled: bool) -> None:
        worked = time.thread_time() - self._begun
        with self._changed:
            self._busy = False
            if polled and worked <= _LOOK:
                worked = 0.0
            self._rests_until = time.monotonic() + self.pace.rest(worked)
            if polled:
                self._polled = self._rests_until  # items get their turn, however long the rest after a look is
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
            rest = filler._rest()
            if rest or not (filler._waiting or filler._hurry):
                pause = rest or POLL
                del filler
                if changed.wait(pause) or rest:  # what has come is looked at from the start
                    continue
                filler = own()
                if filler is None:
                    continue
                if filler._changed is not changed or filler._closed:
                    return
            items, hurry = filler._take()
        work, filler._begun = filler._work(), time.thread_time()
        try:
            if work is not None:
                work(items, hurry)
        finally:
            filler._done(not items)
        del filler, items, work
        time.sleep(0)  # let requests go on
