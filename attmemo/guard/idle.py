"""Work for times in which nothing else is to be done, in a thread of its own."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import monotonic, perf_counter
from typing import Final

from attmemo.kernels.omp_team import leave_team
from attmemo.system.locking import ThreadLock

_LOG = logging.getLogger("attmemo")

QUIET: Final = 0.01
"""Seconds without a request after which work may begin."""
NICE: Final = 5
"""Added to the thread's nice value: what else runs gets three quarters of a core that both want."""
PATIENCE: Final = 10.0
"""Seconds that a closing process waits for work that runs."""


class Idle:
    """Works while no request runs, on one core, at most half of the time.

    A thread begins with the first work. A fork waits for the part of the work that is being done: a child that is
    copied from the middle of a forward may find locks of libraries held for ever. The child has its own thread.

    Parameters
    ----------
    work : bound method
        Does a part of the work, and says whether there is more. Its object is not kept alive.
    """

    def __init__(self, work: Callable[[], bool]) -> None:
        self._work, self._quiet = weakref.WeakMethod(work), QUIET
        self._lock = ThreadLock()
        self._begin()
        own = weakref.ref(self)
        self._leave = partial(_call, own, "close")
        atexit.register(self._leave)
        os.register_at_fork(
            before=partial(_call, own, "_before_fork"), after_in_parent=partial(_call, own, "_after_fork"),
            after_in_child=partial(_call, own, "_begin"),
        )  # fmt: skip

    def _begin(self) -> None:
        self._running, self._ended = 0, monotonic()
        self._signal = _Signal()
        self._thread: threading.Thread | None = None
        self._part = threading.Lock()  # held while a part is done, and while a fork is made
        self._forks = False  # whether the fork that is made holds it

    def _before_fork(self) -> None:
        self._forks = threading.current_thread() is not self._thread and self._part.acquire(timeout=PATIENCE)

    def _after_fork(self) -> None:
        if self._forks:
            self._part.release()

    def began(self) -> None:
        """A request begins."""
        with self._lock:
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
            return self._quiet if self._running else max(self._ended + self._quiet - monotonic(), 0.0)

    def part(self) -> bool:
        """Do a part of the work; whether there is more."""
        with self._part:
            work = self._work()
            return work is not None and work()

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
            rest = perf_counter() - start  # as long as it worked
        del idle
        signal.closing.wait(rest)


def _yield_to_others() -> None:
    """Let others go first from now on: Linux has a nice value for each thread."""
    if sys.platform == "linux":
        with suppress(OSError):
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, min(os.getpriority(os.PRIO_PROCESS, own) + NICE, 19))


def _call(own: weakref.ref[Idle], name: str) -> None:
    idle = own()
    if idle is not None:
        getattr(idle, name)()
