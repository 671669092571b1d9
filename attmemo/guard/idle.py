"""Work for times in which nothing else is to be done, in a thread of its own."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections import deque
from contextlib import suppress
from time import monotonic, perf_counter
from typing import Final, Protocol

from attmemo.kernels.omp_team import leave_team
from attmemo.system.locking import thread_lock, weakly

_LOG = logging.getLogger("attmemo")

QUIET: Final = 0.002
"""Seconds without a request after which work may begin, if it ends before the next request is expected."""
LONG: Final = 0.1
"""Seconds without a request after which work may begin whatever is expected, if a request is not just due."""
OVERDUE: Final = 2.0
"""Times the expected pause after which a request is no longer due, if a part fits into such a pause: requests have
ended for now."""
GAPS: Final = 8
"""Pauses between requests that tell how long the next one is: the second shortest of them."""
FIRST: Final = 0.01
"""Seconds that a part is expected to take where its work does not know."""
FADES: Final = 0.995
"""With each request without a part, one is expected to take so many times as long: what once took too long is tried
again, seldom, for it makes a request take longer."""
NICE: Final = 5
"""Added to the thread's nice value: what else runs gets three quarters of a core that both want."""
_LOOK: Final = 0.005  # seconds between two looks whether work may begin: requests that come and go wake nothing
_SELDOM: Final = 0.25  # the same where pauses are too short: two hundred looks a second took 2 % of a core
_FEW: Final = 2  # pauses that tell whether there are any
PATIENCE: Final = 10.0
"""Seconds that a closing process waits for work that runs."""


class Work(Protocol):
    """What is to be done in idle times, part by part."""

    def do_part(self, seconds: float) -> bool:
        """Do a part; return whether there is more. So many seconds are probably left for it; 0: it is not known."""

    def part_takes(self) -> float:
        """Return the seconds that the next part takes at least; 0: they are not known."""


class Idle:
    """Works while no request runs, on one core, at most half of the time.

    Work that runs into a request makes it take longer, for its threads wait for each other. So a part begins only if
    it will probably have ended by then: pauses and parts are timed.

    A thread begins with the first work. A fork waits for the part of the work that is being done: a child that is
    copied from the middle of a forward may find locks of libraries held for ever. The child has its own thread.

    Parameters
    ----------
    work : Work
        It is not kept alive.
    """

    def __init__(self, work: Work) -> None:
        self._work, self._quiet = weakref.ref(work), QUIET
        self._lock = thread_lock()
        self._begin()
        self._leave = weakly(self.close)
        atexit.register(self._leave)
        os.register_at_fork(
            before=weakly(self._before_fork), after_in_parent=weakly(self._after_fork),
            after_in_child=weakly(self._begin),
        )  # fmt: skip

    def _begin(self) -> None:
        self._running, self._ended = 0, monotonic()
        self._gaps: deque[float] = deque(maxlen=GAPS)
        self._since, self._works = 0, False  # requests since the last part began; whether there was one
        self._without = 0  # that began while others ran, since the last pause
        self._part_takes = FIRST  # seconds, as they were seen last
        self._signal = _Signal()
        self._thread: threading.Thread | None = None
        self._part = threading.Lock()  # held while a part is done, and while a fork is made
        self._forks = False  # whether the fork that is made holds it

    def _before_fork(self) -> None:
        self._forks = threading.current_thread() is not self._thread and self._part.acquire(timeout=PATIENCE)

    def _after_fork(self) -> None:
        if self._forks:
            self._part.release()

    @property
    def is_busy(self) -> bool:
        """Whether pauses between requests are too short for work, most of them, or there are none, or no thread.

        Where work was done a few requests ago, there are pauses.
        """
        with self._lock:
            if self._signal.closing.is_set() or self._without > GAPS or len(self._gaps) < _FEW:
                return True
            return not self.works and sorted(self._gaps)[len(self._gaps) // 2] < self._quiet + self._part_takes

    @property
    def is_over(self) -> bool:
        """Whether a request came since the part began that is done now, or nothing more is to be done."""
        return self._running > 0 or self._since > 0 or self._signal.closing.is_set()

    @property
    def works(self) -> bool:
        """Whether work was done a few requests ago."""
        return self._works and self._since < GAPS

    def began(self) -> None:
        """A request begins."""
        with self._lock:
            self._without = self._without + 1 if self._running else 0
            if not self._running:  # else it may be the same request: 8 bits and rows are guarded one around the other
                self._gaps.append(monotonic() - self._ended)
                self._since += 1
            self._running += 1

    def ended(self) -> None:
        """A request has ended."""
        with self._lock:
            self._running, self._ended = max(self._running - 1, 0), monotonic()

    def wake(self) -> None:
        """There is work. If no thread can be had, it stays undone."""
        with self._lock:
            if self._thread is None and not self._signal.closing.is_set():
                thread = threading.Thread(
                    target=_run, args=(weakref.ref(self), self._signal), daemon=True, name="attmemo-idle"
                )
                try:
                    thread.start()
                except RuntimeError:
                    return
                self._thread = thread
                weakref.finalize(self, self._signal.close)  # a thread that waits ends when nothing holds this
        self._signal.work.set()

    def wait(self) -> float:
        """Seconds until work may begin, if no request comes; 0: now."""
        with self._lock:
            passed = monotonic() - self._ended
            if self._running or passed < self._quiet:
                return self._quiet if self._running else self._quiet - passed
            self._see_part()
            if passed + self._part_takes <= self._expected:
                return 0.0
            due = OVERDUE * self._expected if self._fits else 0.0  # else no pause would do
            return max(max(LONG, self._quiet, due) - passed, 0.0)

    @property
    def look(self) -> float:
        """Seconds until it is to be seen again whether work may begin, at most."""
        with self._lock:
            self._see_part()
            return _LOOK if self._fits else _SELDOM

    def _see_part(self) -> None:
        """See how long the next part is expected to take."""
        work = self._work()
        self._part_takes = ((0.0 if work is None else work.part_takes()) or FIRST) * FADES**self._since

    @property
    def _expected(self) -> float:
        """Seconds that a pause between requests probably takes; 0: not known."""
        return sorted(self._gaps)[1] if len(self._gaps) == GAPS else 0.0

    @property
    def _fits(self) -> bool:
        """Whether the next part probably fits into a pause."""
        return self._quiet + self._part_takes <= self._expected

    def part(self) -> bool:
        """Do a part of the work; whether there is more."""
        with self._part:
            work = self._work()
            with self._lock:
                self._since, self._works, left = 0, True, max(self._ended + self._expected - monotonic(), 0.0)
            more = work is not None and work.do_part(left)
            self._see_part()
            return more

    def close(self) -> None:
        """End the thread, after the part that it works at. Nothing is done any more."""
        atexit.unregister(self._leave)
        self._signal.close()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(PATIENCE)


class _Signal:
    """What a thread waits for: it holds nothing else."""

    def __init__(self) -> None:
        self.work, self.closing = threading.Event(), threading.Event()

    def close(self) -> None:
        self.closing.set()
        self.work.set()


def _run(own: weakref.ref[Idle], signal: _Signal) -> None:
    leave_team()
    _yield_to_others()
    while True:
        signal.work.wait()
        idle = None if signal.closing.is_set() else own()
        if idle is None:
            return
        rest = idle.wait()
        if not rest:
            signal.work.clear()
            start = perf_counter()
            try:
                if idle.part():
                    signal.work.set()
            except Exception as error:
                _LOG.warning("attmemo: work for idle times failed: %s", error)
            worked = perf_counter() - start
        pause = min(rest, idle.look) if rest else worked  # it rests as long as it worked
        del idle
        signal.closing.wait(pause)


def _yield_to_others() -> None:
    """Let others go first from now on: Linux has a nice value for each thread."""
    if sys.platform == "linux":
        with suppress(OSError):
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, min(os.getpriority(os.PRIO_PROCESS, own) + NICE, 19))
