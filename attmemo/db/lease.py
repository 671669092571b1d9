"""The right to fill a folder: a lock of the kernel, which goes with its process. No clock is asked who holds it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from attmemo.db.files import storing
from attmemo.errors import DatabaseLockedError

LEASE: Final = "fill.lock"

_HELD: set[int] = set()  # descriptors


@contextmanager
def lease(path: Path, patience: float) -> Iterator[None]:
    """Held while inside. DatabaseLockedError: another process has held it for `patience` seconds."""
    with storing(path):
        fd = os.open(path / LEASE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _HELD.add(fd)
    try:
        until = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > until:
                    raise DatabaseLockedError(
                        f"{path} is being filled by another process for more than {patience:g} seconds.",
                        "nothing: this process goes on without new records, and tries again",
                    ) from error
                time.sleep(0.005)
        yield
    finally:
        _HELD.discard(fd)
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor too
        os.close(fd)


def _in_child() -> None:
    for fd in _HELD:
        os.close(fd)
    _HELD.clear()


os.register_at_fork(after_in_child=_in_child)
