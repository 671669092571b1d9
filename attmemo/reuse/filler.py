"""A thread that turns what requests hand over into records, off their way.

A request hands over references and goes on. If more waits than is allowed, what comes is left out and counted: a
request never waits. The thread also reads what other processes have added.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from attmemo.kernels.team import leave_team

POLL: Final = 0.25
"""Seconds between two looks for what other processes have added."""
MOST_WAITING: Final = 128 << 20
"""Bytes that requests may hold back for the thread."""

Item = TypeVar("Item")


class Filler(Generic[Item]):
    """Hands items to `work` in a thread of its own; calls it with nothing every `POLL` seconds.

    Parameters
    ----------
    work : method
        Gets a list of items; held weakly. It must not raise.
    end : function
        Called once nothing holds the filler any more, if it was not closed.
    """

    def __init__(self, work: Callable[[Sequence[Item]], None], end: Callable[[], None]) -> None:
        self._work, self._end = weakref.WeakMethod(work), end
        self.skipped: Counter[str] = Counter()
        self._begin()
        self.wake()

    def _begin(self) -> None:
        self._waiting: deque[tuple[Sequence[Item], int]] = deque()
        self._bytes, self._busy, self._closed, self._asleep = 0, False, False, True
        self._changed = threading.Condition()

    def wake(self) -> None:
        """Have a thread, if there is none: a forked child gets its own only once something is asked of it."""
        if self._asleep and not self._closed:
            self._asleep = False
            threading.Thread(
                target=_run, args=(weakref.ref(self), self._changed, self._end), daemon=True, name="attmemo-filler"
            ).start()

    def offer(self, items: Sequence[Item], nbytes: int) -> bool:
        """Hand over; False: too much waits, or it is closed, and these are left out. `nbytes`: what they hold back."""
        self.wake()
        with self._changed:
            full = bool(self._waiting) and self._bytes + nbytes > MOST_WAITING
            if self._closed or full:
                self.skipped["too many waited to be stored" if full else "closed"] += len(items)
                return False
            self._waiting.append((items, nbytes))
            self._bytes += nbytes
            self._changed.notify_all()
        return True

    def flush(self, seconds: float) -> bool:
        """Wait until all that was handed over is stored, and what others added is read; False: it takes longer."""
        self.wake()
        with self._changed:
            if not self._closed:
                self._waiting.append(([], 0))
                self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, seconds)

    def close(self) -> None:
        """Store what waits, and end the thread."""
        with self._changed:
            closed, self._closed = self._closed, True
            self._changed.notify_all()
        if not closed:
            self.flush(5.0)

    def leave_to_parent(self) -> None:
        """In a forked child: what waited, the parent stores. See `wake`."""
        if not self._closed:
            self._begin()

    def _take(self) -> list[Item]:
        found = [item for items, _ in self._waiting for item in items]
        self._waiting.clear()
        self._bytes, self._busy = 0, True
        return found

    def _done(self) -> None:
        with self._changed:
            self._busy = False
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
            if not filler._waiting:
                if filler._closed:
                    return
                del filler
                if changed.wait(POLL):  # what has come is looked at from the start
                    continue
                filler = own()
                if filler is None:
                    continue
                if filler._changed is not changed or filler._closed:
                    return
            items = filler._take()
        work = filler._work()
        try:
            if work is not None:
                work(items)
        finally:
            filler._done()
        del filler, items, work
        time.sleep(0)  # let requests go on
