"""A segment: the bytes of many records, one behind the other, in a mapped file or in memory.

Bytes are only ever appended, and bytes of a published record never change. So a reader needs no lock: what it found
stays where it is as long as it holds the segment, also after the file was removed. Space is given back by dropping
whole segments.

A file begins with a page that says what it is. Then come marks: for each record how often it was used. All processes
write marks, without a lock: a count that is lost now and then does no harm.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from attmemo.db.files import ANEW, write_all
from attmemo.errors import DatabaseCorruptError, DatabaseError, DatabaseTruncatedError
from attmemo.mmap import round_up

Bytes = npt.NDArray[np.uint8]
Pause = Callable[[], object]
"""Called between two pieces of a record that is written; it may take its time."""

MAGIC: Final = b"attmemo-segment1"
ALIGNED: Final = 64
"""Records begin at multiples of so many bytes."""
PIECE: Final = 1 << 15
"""Bytes that are written at a time: to touch that much new memory may take a tenth of a millisecond."""
AHEAD: Final = 1 << 16
"""Bytes of memory that are asked of the system at a time. Half a megabyte is written in 0.22 ms then, in 0.35 where
each page is asked for as it is touched."""
BYTES_PER_MARK: Final = 4096
"""A segment has room for one record in so many bytes."""
FEWEST_MARKS: Final = 64

_HEAD = struct.Struct("<16sQQQ")  # magic, number, bytes of the file, marks
_HEADER: Final = 4096
_POPULATE: Final = 23  # MADV_POPULATE_WRITE, from Linux 5.14 on
_MARK = np.dtype("<u4")  # times that a record was used


def marks_for(nbytes: int) -> int:
    """Records that a segment of so many bytes has room for."""
    return max(FEWEST_MARKS, nbytes // BYTES_PER_MARK)


def start_of(marks: int) -> int:
    """Where the first record begins in a segment with so many marks."""
    return round_up(_HEADER + marks * _MARK.itemsize, 4096)


def bytes_for(record: int, usual: int) -> int:
    """Bytes of a new segment that must hold a record of so many bytes; `usual` if this is enough."""
    return max(usual, round_up(record + start_of(FEWEST_MARKS) + record // 256, 4096))


def bytes_of(records: int, body: int) -> int:
    """Bytes of the smallest segment for so many records that take `body` bytes in all."""
    body = max(body, 1)
    nbytes = max(body, records * BYTES_PER_MARK if records > FEWEST_MARKS else 0)
    while nbytes < (needed := round_up(start_of(marks_for(nbytes)) + body, 4096)):
        nbytes = needed
    return nbytes


def packed(records: Iterable[int], usual: int) -> Iterator[tuple[int, int]]:
    """How many records of these bytes, in their order, go to each segment of `usual` bytes at most; and its bytes.

    A record that is larger has a segment of its own.
    """
    count = body = nbytes = 0
    for record in map(rounded, records):
        larger = bytes_of(count + 1, body + record)
        if count and larger > usual:
            yield count, nbytes
            count, body, larger = 0, 0, bytes_of(1, record)
        count, body, nbytes = count + 1, body + record, larger
    if count:
        yield count, nbytes


def rounded(nbytes: int) -> int:
    """Bytes that a record takes."""
    return round_up(nbytes, ALIGNED)


def no_pause() -> None:
    """Go on at once."""


def pieces_of(body: Bytes, offset: int) -> Iterator[tuple[int, Bytes]]:
    """The bytes of a record in pieces, and where each goes."""
    for first in range(0, len(body), PIECE):
        yield offset + first, body[first : first + PIECE]


class Segment:
    """Room for records, mapped once.

    Attributes
    ----------
    number : int
        Rising in the order in which segments were made.
    nbytes : int
        Bytes of the file, or of the memory.
    start : int
        Offset of the first record.
    marks : uint32 [m] or None
        How often each record was used, shared by all processes; None: they cannot be written here.
    """

    def __init__(self, number: int, nbytes: int, memory: mmap.mmap, path: Path | None = None, *, marked: bool) -> None:
        self.number, self.nbytes, self.path, self._memory = number, nbytes, path, memory
        self.room = marks_for(nbytes)
        self.start = self._asked = start_of(self.room)  # memory is asked for up to here
        self._bytes: Bytes = np.frombuffer(memory, np.uint8)
        self.address = int(self._bytes.ctypes.data)
        self.marks: npt.NDArray[Any] | None = None
        if marked:
            self.marks = np.frombuffer(memory, _MARK, self.room, _HEADER)
            self._bytes.flags.writeable = False  # records are written otherwise

    @classmethod
    def in_memory(cls, number: int, nbytes: int) -> Segment:
        """A segment that no file stands behind. Pages of 2 MiB are slower at the first touch, and no faster later."""
        memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return cls(number, nbytes, memory, marked=True)

    @classmethod
    def create(cls, path: Path, number: int, nbytes: int) -> Segment:
        """A new file, its space taken from the disk at once. OSError: there is no such space."""
        with suppress(FileNotFoundError):
            path.unlink()  # left by a process that did not live to publish it
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            head = _HEAD.pack(MAGIC, number, nbytes, marks_for(nbytes))
            # Marks too: else the first read of one fills many pages behind it with zeros.
            write_all(fd, head.ljust(start_of(marks_for(nbytes)), b"\0"), 0)
            return cls(number, nbytes, mmap.mmap(fd, nbytes), path, marked=True)
        except BaseException:
            with suppress(OSError):
                path.unlink()
            raise
        finally:
            os.close(fd)  # the mapping has a descriptor of its own

    @classmethod
    def open(cls, path: Path, number: int, nbytes: int, *, marked: bool = True) -> Segment:
        """A published file. `marked`: how often its records are used is noted, if it can be.

        DatabaseCorruptError, DatabaseTruncatedError: it is not what the catalogue says; DatabaseError: a limit.
        """
        try:
            try:
                fd = os.open(path, (os.O_RDWR if marked else os.O_RDONLY) | os.O_CLOEXEC)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
                fd, marked = os.open(path, os.O_RDONLY | os.O_CLOEXEC), False
        except OSError as error:
            raise _unreadable(path, error) from error
        try:
            if os.fstat(fd).st_size < nbytes:
                raise DatabaseTruncatedError(
                    f"{path} has {os.fstat(fd).st_size} bytes, expected {nbytes}.", ANEW
                )
            head = _HEAD.unpack(os.pread(fd, _HEAD.size, 0))
            if head != (MAGIC, number, nbytes, marks_for(nbytes)) or nbytes <= start_of(marks_for(nbytes)):
                raise DatabaseCorruptError(f"{path} begins with {head}, expected segment {number}.", ANEW)
            access = mmap.ACCESS_WRITE if marked else mmap.ACCESS_READ
            return cls(number, nbytes, mmap.mmap(fd, nbytes, access=access), path, marked=marked)
        except OSError as error:
            raise _unreadable(path, error) from error
        finally:
            os.close(fd)

    @classmethod
    def unreadable(cls, path: Path, number: int, nbytes: int) -> Segment:
        """What stands for a published file that cannot be opened: it is not whole."""
        fd = os.memfd_create("attmemo")
        try:
            os.ftruncate(fd, 1)
            return cls(number, nbytes, mmap.mmap(fd, 1), path, marked=False)
        finally:
            os.close(fd)

    def write(self, offset: int, body: Bytes, pause: Pause = no_pause) -> None:
        """Put the bytes of a record at an offset where no record is. OSError: the disk refuses.

        A file is written without a pause: others wait for the lease meanwhile. See `Hold` for what is written before.
        """
        if self.path is None:
            own = np.frombuffer(self._memory, np.uint8)
            for place, piece in pieces_of(body, offset):
                self._ask_for(place + len(piece), offset + len(body))
                own[place : place + len(piece)] = piece
                pause()
            return
        fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)  # not through the mapping: a full disk would be a signal
        try:
            write_all(fd, body.data, offset)
        finally:
            os.close(fd)

    def _ask_for(self, needed: int, end: int) -> None:
        """Ask for memory up to what is needed now, and for some more up to the end of the record."""
        while self._asked < min(needed, self.nbytes):
            begin = self._asked // mmap.PAGESIZE * mmap.PAGESIZE
            self._asked = begin + min(AHEAD, round_up(max(end - begin, 1), mmap.PAGESIZE), self.nbytes - begin)
            with suppress(OSError, ValueError):  # an older system: pages are asked for as they are touched
                self._memory.madvise(_POPULATE, begin, self._asked - begin)

    def sync(self) -> None:
        """Make what was written durable."""
        if self.path is not None:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)

    @property
    def is_whole(self) -> bool:
        """Whether the file is as long as it was. Reading a page that it no longer has would end the process."""
        return self.path is None or self._memory.size() >= self.nbytes

    def check_whole(self) -> None:
        """DatabaseTruncatedError: the file is shorter than it was."""
        if not self.is_whole:
            raise DatabaseTruncatedError(f"{self.path} was cut to {self._memory.size()} bytes.", ANEW)

    def bytes_at(self, offset: int, nbytes: int) -> Bytes:
        """The bytes of a record, where they lie. DatabaseTruncatedError, as all below."""
        self.check_whole()
        return self._bytes[offset : offset + nbytes]

    def hits(self, place: int) -> int:
        """How often a record was used since it was written here."""
        self.check_whole()
        return 0 if self.marks is None else int(self.marks[place])


def _unreadable(path: Path, error: OSError) -> DatabaseError:
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return DatabaseError(f"{path} cannot be opened: {error.strerror}.", "check the limits: ulimit -n, ulimit -v")
    if error.errno in (errno.EACCES, errno.EPERM):
        return DatabaseError(f"{path} cannot be opened: {error.strerror}.", f"check who may read it: ls -l {path}")
    return DatabaseCorruptError(f"{path} cannot be read: {error.strerror}.", ANEW)
