"""Environments of LMDB that stay open: of one folder a process may have only one.

LMDB does not survive a fork that happens while it works. So all work with these environments is done under one lock,
and a fork waits for this lock. The child closes what it has inherited; what it needs it opens anew.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import lmdb

from attmemo.db.catalogue import naming, open_lmdb
from attmemo.db.files import ANEW, CATALOGUE, sync
from attmemo.db.lmdbfile import check_environment
from attmemo.errors import DatabaseCorruptError, DatabaseNotFoundError

_WHOLE: Final = 8192
"""Bytes of a file of LMDB that was made and holds nothing."""

Key = tuple[int, int]


class Environments:
    """The environments that this process has open, by device and inode of their folder."""

    def __init__(self) -> None:
        self._open: dict[Key, tuple[Any, int]] = {}
        self._lock = threading.RLock()

    @contextmanager
    def working(self) -> Iterator[None]:
        """While inside, no thread of this process forks."""
        with self._lock:
            yield

    def enter(self, path: Path, write: bool) -> tuple[Key, Any]:
        """The environment of a folder, and the key to leave it."""
        with self._lock:
            folder = path / CATALOGUE
            if write and not folder.is_dir():
                with naming(folder, ANEW):
                    folder.mkdir(mode=0o700, exist_ok=True)  # it holds tokens
                    sync(path)
            try:
                found = folder.stat()
            except OSError as error:
                raise _nothing_yet(folder) from error
            key = found.st_dev, found.st_ino
            env, users = self._open.get(key, (None, 0))
            if env is None:
                env = _opened(folder, write)
            self._open[key] = env, users + 1
            return key, env

    def leave(self, key: Key) -> None:
        """One user less."""
        with self._lock:
            env, users = self._open.get(key, (None, 0))
            if users > 1:
                self._open[key] = env, users - 1
            elif env is not None:
                del self._open[key]
                env.close()

    def before_fork(self) -> None:
        """Wait for work that is going on."""
        self._lock.acquire()

    def after_fork(self) -> None:
        """In the parent."""
        self._lock.release()

    def in_child(self) -> None:
        """In a forked child."""
        for env, _ in self._open.values():
            env.close()
        self._open, self._lock = {}, threading.RLock()


def is_whole(path: Path) -> bool:
    """Whether the catalogue of a folder was made to its end."""
    try:
        found = (path / CATALOGUE / "data.mdb").stat()
        return stat.S_ISREG(found.st_mode) and found.st_size >= _WHOLE
    except OSError:
        return False


def _opened(folder: Path, write: bool) -> Any:
    file = folder / "data.mdb"
    with naming(folder, ANEW):
        try:
            if is_whole(folder.parent):
                check_environment(file)
            elif not write:
                raise _nothing_yet(folder)
            env = _environment(folder, write)
        except ValueError as error:
            raise DatabaseCorruptError(f"{folder}: {error}.", ANEW) from error
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EISDIR):
                raise
            raise DatabaseCorruptError(f"{folder} cannot be read: {error.strerror}.", ANEW) from error
        return env


def _environment(folder: Path, write: bool) -> Any:
    try:
        env = open_lmdb(folder, write=True)
    except (OSError, lmdb.Error):
        if write:
            raise
        return open_lmdb(folder, write=False)
    env.reader_check()
    return env


def _nothing_yet(folder: Path) -> DatabaseNotFoundError:
    return DatabaseNotFoundError(f"{folder} is not made yet.", "open it again when something was stored")


ENVIRONMENTS: Final = Environments()
"""Those of this process."""
os.register_at_fork(
    before=ENVIRONMENTS.before_fork, after_in_parent=ENVIRONMENTS.after_fork, after_in_child=ENVIRONMENTS.in_child
)
