"""The right to fill a folder, and the knowledge who else does: locks of the kernel, which go with their process.

No clock is asked who holds them.
"""

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
PRESENCE: Final = "present.lock"

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


class Presence:
    """Says that this process fills a folder, until it ends or closes this.

    Attributes
    ----------
    alone : bool
        Whether no other process filled the folder when this was made.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path / PRESENCE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.alone = False
        with suppress(BlockingIOError):
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.alone = True
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def close(self) -> None:
        """Doing so twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _in_child() -> None:
    for fd in _HELD:
        os.close(fd)
    _HELD.clear()


os.register_at_fork(after_in_child=_in_child)
