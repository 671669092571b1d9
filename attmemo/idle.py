"""Work for times in which nothing else is to be done, in a thread of its own."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from time import monotonic, perf_counter
from typing import Final

from attmemo.locking import ThreadLock

QUIET: Final = 0.02
"""Seconds without a request after which work may begin."""
PATIENCE: Final = 10.0
"""Seconds that a closing process waits for work that runs."""


class Idle:
    """Works while no request runs, at most half of the time.

    A thread begins with the first work. A forked child has a thread of its own.

    Parameters
    ----------
    work : bound method
        Does a part of the work, and says whether there is more. Its object is not kept alive.
    """

    def __init__(self, work: Callable[[], bool]) -> None:
        self._work, self._quiet = weakref.WeakMethod(work), QUIET
        self._lock = ThreadLock()
        self._begin()
        self._leave = partial(_close, weakref.ref(self))
        atexit.register(self._leave)

    def _begin(self) -> None:
        self._process, self._running, self._ended = os.getpid(), 0, monotonic()
        self._signal = _Signal()
        self._thread: threading.Thread | None = None

    def began(self) -> None:
        """A request begins."""
        with self._lock:
            if self._process != os.getpid():  # the parent's thread is not here, nor are its requests
                self._begin()
            self._running += 1

    def ended(self) -> None:
        """A request has ended."""
        with self._lock:
            self._running, self._ended = max(self._running - 1, 0), monotonic()

    def wake(self) -> None:
        """There is work."""
        with self._lock:
            if self._thread is None and not self._signal.closing.is_set():
                weakref.finalize(self, self._signal.close)  # a thread that waits ends when nothing holds this
                self._thread = threading.Thread(
                    target=_run, args=(weakref.ref(self), self._signal), daemon=True, name="attmemo-idle"
                )
                self._thread.start()
        self._signal.work.set()

    def wait(self) -> float:
        """Seconds until work may begin, if no request comes; 0: now."""
        with self._lock:
            return self._quiet if self._running else max(self._ended + self._quiet - monotonic(), 0.0)

    def part(self) -> bool:
        """Do a part of the work; whether there is more."""
        work = self._work()
        return work is not None and work()

    def close(self) -> None:
        """End the thread, after the part that it works at."""
        atexit.unregister(self._leave)
        self._signal.close()
        thread = self._thread if self._process == os.getpid() else None
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
    while True:
        signal.work.wait()
        idle = None if signal.closing.is_set() else own()
        if idle is None:
            return
        rest = idle.wait()
        if not rest:
            signal.work.clear()
            start = perf_counter()
            if idle.part():
                signal.work.set()
            rest = perf_counter() - start  # as long as it worked
        del idle
        signal.closing.wait(rest)


def _close(own: weakref.ref[Idle]) -> None:
    idle = own()
    if idle is not None:
        idle.close()
