"""The catalogue: which record has which slots, where each comes from, and what its bytes must hash to.

LMDB, one entry a record: small, transactional, many reader processes. Maps never go into it (values have no
alignment that a window could map). A reader takes one snapshot into numpy arrays at open and closes the
environment: lookups then never touch LMDB, and no reader transaction can go stale.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt
import xxhash

from attmemo.db.format import CATALOGUE
from attmemo.db.lmdbfile import check_environment
from attmemo.errors import DatabaseCorruptError, DatabaseError, StorageFullError

_HEAD = struct.Struct("<IIQB")  # length, source, row, split
_KEY = struct.Struct(">Q")
# An upper bound on the file, not an allocation: LMDB reserves address space and grows the file as it is used.
_MAP_BYTES = 64 << 30
_LOCK_BYTES = 8192  # LMDB's reader table for its default of 126 readers
# A process may have an environment open only once; threads that open databases take turns.
_ENVIRONMENT = threading.RLock()
SPLIT_TRAIN = 0
SPLIT_HELD_OUT = 1


@dataclass(frozen=True, slots=True)
class Record:
    """One stored sequence.

    ``slots`` and ``checksums`` are indexed ``[kind][layer]``, kinds in the order of `attmemo.db.format.KINDS`.
    """

    length: int
    source: int
    row: int
    split: int
    slots: npt.NDArray[np.uint64]  # [kinds, layers]
    checksums: npt.NDArray[np.uint64]  # [kinds, layers]

    def dump(self) -> bytes:
        """The LMDB value."""
        both = np.stack([self.slots, self.checksums]).astype("<u8")
        return _HEAD.pack(self.length, self.source, self.row, self.split) + both.tobytes()

    @classmethod
    def parse(cls, raw: bytes, kinds: int, layers: int) -> Record:
        """Read a value; ValueError if it has another size."""
        expected = _HEAD.size + 2 * kinds * layers * 8
        if len(raw) != expected:
            raise ValueError(f"{len(raw)} bytes, expected {expected}")
        length, source, row, split = _HEAD.unpack_from(raw)
        both = np.frombuffer(raw, "<u8", offset=_HEAD.size).reshape(2, kinds, layers)
        return cls(length, source, row, split, both[0], both[1])


@dataclass(frozen=True)
class Snapshot:
    """All published records as arrays, ``R`` records."""

    lengths: npt.NDArray[np.int64]  # [R]
    sources: npt.NDArray[np.int64]  # [R]
    rows: npt.NDArray[np.int64]  # [R]
    splits: npt.NDArray[np.int64]  # [R]
    slots: npt.NDArray[np.int64]  # [R, kinds, layers]
    checksums: npt.NDArray[np.uint64]  # [R, kinds, layers]

    def __len__(self) -> int:
        return len(self.lengths)


class Catalogue:
    """The LMDB environment of one database.

    Parameters
    ----------
    path : Path
        Database directory.
    kinds, layers : int
        Shape of every entry.
    write : bool
        Open for appending; creates it if needed.
    check : bool
        Look at the file's structure first, without which a damaged file would end the process. A builder that holds
        the lock need not look twice.

    Raises
    ------
    DatabaseCorruptError
        It is missing or damaged.
    DatabaseError
        It cannot be opened.
    """

    def __init__(self, path: Path, kinds: int, layers: int, *, write: bool = False, check: bool = True) -> None:
        self._path = path / CATALOGUE
        self._kinds, self._layers = kinds, layers
        file = self._path / "data.mdb"
        if not write and not file.is_file():
            raise DatabaseCorruptError(
                f"{self._path} is missing: the records cannot be found without their catalogue.",
                "restore the database from a copy, or build it again with attmemo build-database",
            )
        if check and (not write or file.exists()):
            try:
                check_environment(file)
            except ValueError as error:
                raise self._corrupt(str(error)) from error
            except OSError as error:
                raise self._corrupt(f"it cannot be read: {error.strerror}") from error
        _ENVIRONMENT.acquire()
        try:
            self._env = self._open(write)
        except (lmdb.Error, OSError) as error:
            _ENVIRONMENT.release()
            raise self._named(error) from error
        except BaseException:
            _ENVIRONMENT.release()
            raise

    def _open(self, write: bool) -> Any:
        # Format 0.9 is what every lmdb reads; readers on a read-only file system cannot take the reader lock.
        options: dict[str, Any] = {"map_size": _MAP_BYTES, "subdir": True, "max_dbs": 0}
        if write:
            self._path.mkdir(exist_ok=True)
            self._reserve_lock()
            return lmdb.open(str(self._path), **options)
        try:
            self._reserve_lock()
        except OSError:
            return lmdb.open(str(self._path), readonly=True, create=False, lock=False, **options)
        try:
            return lmdb.open(str(self._path), readonly=True, create=False, **options)
        except lmdb.ReadonlyError:
            return lmdb.open(str(self._path), readonly=True, create=False, lock=False, **options)
        except lmdb.Error as error:
            if "Read-only" in str(error) or "Permission" in str(error):
                return lmdb.open(str(self._path), readonly=True, create=False, lock=False, **options)
            raise

    def _reserve_lock(self) -> None:
        """Give LMDB's lock file its blocks. LMDB maps it and writes: on a full disk that would be SIGBUS."""
        fd = os.open(self._path / "lock.mdb", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(fd).st_blocks * 512 < _LOCK_BYTES:
                os.posix_fallocate(fd, 0, _LOCK_BYTES)
        finally:
            os.close(fd)

    def append(self, first: int, records: Sequence[Record]) -> None:
        """Store records under consecutive ids in one durable transaction.

        Raises
        ------
        StorageFullError
            The disk is full; nothing of the batch is stored.
        """
        try:
            with self._env.begin(write=True) as transaction:
                for offset, record in enumerate(records):
                    transaction.put(_KEY.pack(first + offset), record.dump())
        except lmdb.Error as error:
            raise self._named(error) from error

    def truncate(self, records: int) -> None:
        """Remove entries that were never published."""
        try:
            with self._env.begin(write=True) as transaction:
                cursor = transaction.cursor()
                found = cursor.set_range(_KEY.pack(records))
                while found:
                    found = cursor.delete()
        except lmdb.Error as error:
            raise self._named(error) from error

    def entries(self, records: int, digest: str | None = None) -> Iterator[tuple[int, Record]]:
        """The first `records` entries in order.

        Raises
        ------
        DatabaseCorruptError
            An entry is missing or has the wrong size; or, after the last one, they do not have the digest.
        """
        expected = 0
        state = b""
        try:
            with self._env.begin() as transaction:
                for key, raw in transaction.cursor():
                    if expected == records:
                        break
                    if len(key) != _KEY.size or _KEY.unpack(key)[0] != expected:
                        raise self._corrupt(f"record {expected} of {records} is missing")
                    raw = bytes(raw)
                    state = _chain(state, raw)
                    try:
                        record = Record.parse(raw, self._kinds, self._layers)
                    except ValueError as error:
                        raise self._corrupt(f"record {expected}: {error}") from error
                    yield expected, record
                    expected += 1
        except lmdb.Error as error:
            raise self._named(error) from error
        if expected != records:
            raise self._corrupt(f"it holds {expected} records, the manifest says {records}")
        if digest is not None and state.hex() != digest:
            raise self._corrupt(f"its records have digest {state.hex()[:16]}…, expected {digest[:16]}…")

    def snapshot(self, records: int, digest: str | None = None) -> Snapshot:
        """The first `records` entries as arrays."""
        held = int(self._env.stat()["entries"])
        if held < records:  # before there is memory for as many as a damaged manifest likes
            raise self._corrupt(f"it holds {held} records, the manifest says {records}")
        heads = np.zeros((records, 4), np.int64)
        slots = np.zeros((records, self._kinds, self._layers), np.int64)
        checksums = np.zeros((records, self._kinds, self._layers), np.uint64)
        for number, record in self.entries(records, digest):
            if record.row >= 1 << 62 or int(record.slots.max(initial=0)) >= 1 << 62:
                raise self._corrupt(f"record {number} has an impossible row or slot number")
            heads[number] = record.length, record.source, record.row, record.split
            slots[number] = record.slots
            checksums[number] = record.checksums
        return Snapshot(heads[:, 0], heads[:, 1], heads[:, 2], heads[:, 3], slots, checksums)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()
        _ENVIRONMENT.release()

    def _corrupt(self, why: str) -> DatabaseCorruptError:
        return DatabaseCorruptError(
            f"{self._path}: {why}.", "restore the database from a copy, or build it again with attmemo build-database"
        )

    def _named(self, error: Exception) -> DatabaseError:
        text = str(error)
        full = isinstance(error, lmdb.MapFullError | lmdb.DiskError) or "No space left" in text
        if not full and "Input/output error" in text:  # what LMDB makes of a write that ended early
            with suppress(OSError):
                room = os.statvfs(self._path)
                full = room.f_bavail * room.f_frsize < _LOCK_BYTES
        if full:
            return StorageFullError(f"{self._path}: no room for the catalogue ({text}).", "free space and run again")
        if isinstance(
            error, lmdb.CorruptedError | lmdb.InvalidError | lmdb.PageNotFoundError | lmdb.VersionMismatchError
        ):
            return self._corrupt(f"LMDB says {text}")
        return DatabaseError(f"{self._path}: LMDB says {text}.", "attmemo check " + str(self._path.parent))


def extend_digest(digest: str, records: Iterable[Record]) -> str:
    """Digest of a catalogue's entries after more of them were appended; the digest of none is empty."""
    state = bytes.fromhex(digest)
    for record in records:
        state = _chain(state, record.dump())
    return state.hex()


def _chain(state: bytes, raw: bytes) -> bytes:
    return xxhash.xxh3_128_digest(state + raw)
