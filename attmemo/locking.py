"""A lock that processes share. Imports nothing of attmemo."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


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
