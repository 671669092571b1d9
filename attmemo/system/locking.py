"""A lock that processes share, and one of threads that a fork does not leave locked. Imports nothing of attmemo."""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the lock of a file while inside; wait for it as long as another process or thread holds it.

    The kernel takes the lock from a process that ends.

    Parameters
    ----------
    file : Path
        Made if there is none; its folder must exist.

    Raises
    ------
    OSError
        The file cannot be made, or its file system has no locks.
    """
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile holds the file too
        os.close(fd)


def thread_lock() -> threading.RLock:
    """Return a lock of threads, to hold in a ``with`` statement. In a forked child the lock is free.

    Another thread that held the lock at the fork is not there, so a usual lock would be held for ever. A thread that
    forks inside of the statement leaves it in the child too. To enter the lock is no call in Python: a request enters
    a dozen.
    """
    lock = threading.RLock()
    _THREAD_LOCKS.add(lock)
    return lock


def weakly(method: Callable[[], object]) -> Callable[[], None]:
    """Return a function that calls a method as long as its object lives. A hook that holds it keeps nothing alive."""
    own = weakref.WeakMethod(method)

    def call() -> None:
        if (bound := own()) is not None:
            bound()

    return call


_THREAD_LOCKS: weakref.WeakSet[Any] = weakref.WeakSet()


def _in_child() -> None:
    for lock in list(_THREAD_LOCKS):
        if not lock._is_owned():
            lock._at_fork_reinit()


os.register_at_fork(after_in_child=_in_child)
