"""Files of a database directory: their names, durable writes, digests, the builder's lock, and errors of the disk."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import xxhash
from safetensors import SafetensorError

from attmemo.errors import (
    DatabaseCorruptError,
    DatabaseError,
    DatabaseLockedError,
    DatabaseTruncatedError,
    StorageFullError,
)

MANIFEST: Final = "MANIFEST.json"
FILLING: Final = "FILLING.json"
PREPARED: Final = "PREPARED.json"
"""As `FILLING`, of a pool that builds alone fill."""
CATALOGUE: Final = "catalogue"
ARENA: Final = "arena"
LOCK: Final = "builder.lock"
FULL: Final = (errno.ENOSPC, errno.EDQUOT)
DAMAGED: Final = (DatabaseCorruptError, DatabaseTruncatedError)
"""Errors that say that a file is not as it was written."""
WHEN_FULL: Final = "free space and run the same command again"
RESTORE: Final = "restore the database from a copy, or build it again with attmemo build-database"
ANEW: Final = (
    "let a model fill it (attmemo serve MODEL --fill DB): what is damaged is set aside, and it goes on without"
)
"""Next step for a database that fills itself."""
_NO_PLACE = (errno.EROFS, errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR)


def write_durably(file: Path, content: bytes) -> None:
    """Replace a file so that a crash leaves the old one or the new one, whole."""
    temporary = file.with_name(file.name + ".tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
    except OSError:
        temporary.unlink(missing_ok=True)  # on a full disk it would be the first thing in the way
        raise
    sync(file.parent)


def write_all(fd: int, body: bytes | memoryview, offset: int) -> None:
    """Write all bytes at an offset; one call of the system may write fewer, above 2 GiB it always does."""
    view = memoryview(body)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def sync(path: Path) -> None:
    """Make a file durable, or the names in a directory."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def file_digest(path: Path) -> str:
    """XXH3-128 of a whole file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


class BuilderLock:
    """The lock of the one writer of a database; it goes with the process. DatabaseLockedError names its holder."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError as error:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            self.release()
            what = f"{path} is being written by another process (pid {holder})."
            raise DatabaseLockedError(what, "wait for it to finish, or stop it") from error
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give the lock back. Doing so twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)  # flock goes with the descriptor
            self._fd = -1


@contextmanager
def storing(path: Path, when_full: str = WHEN_FULL) -> Iterator[None]:
    """Turn what fails while files are written into an error of this library."""
    try:
        yield
    except SafetensorError as error:
        text = str(error)
        full = "No space left" in text or "os error 28" in text or "quota" in text
        raise named(OSError(errno.ENOSPC if full else errno.EIO, text), path, when_full) from error
    except OSError as error:
        raise named(error, path, when_full) from error


def named(error: OSError, path: Path, when_full: str = WHEN_FULL) -> DatabaseError:
    """The error of this library for one of the system; `when_full` is the next step if the disk is full."""
    if error.errno in FULL:
        try:
            room = os.statvfs(path)
            free = f"{room.f_bavail * room.f_frsize / 2**20:.0f} MiB free"
        except OSError:
            free = "no space left"
        return StorageFullError(f"{path}: the disk is full ({free}). What was published stays.", when_full)
    if error.errno in _NO_PLACE:
        hint = "name a directory that exists and that you may write to"
        return DatabaseError(f"{path} cannot be written: {error.strerror}.", hint)
    hint = "see whether the disk is sound (dmesg), then run the same command again"
    return DatabaseError(f"{path}: {error.strerror or error}. What was published stays.", hint)
