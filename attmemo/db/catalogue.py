"""The catalogue: what each record is, where its slots lie, and what their bytes must hash to.

LMDB, one entry a record: small, transactional, many reader processes; it takes inserts and deletes while others read.
Slots never go into it (its values have no alignment that a window could map). A reader takes one snapshot into numpy
arrays at open and closes the environment: lookups then never touch LMDB, and no reader transaction can go stale.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import lmdb
import numpy as np
import numpy.typing as npt
import xxhash

from attmemo.db.files import CATALOGUE, RESTORE
from attmemo.db.lmdbfile import check_environment
from attmemo.db.manifest import Manifest
from attmemo.errors import DatabaseCorruptError, DatabaseError, StorageFullError

RECORDS: Final = b"r"  # prefix of a record's key; entries with other prefixes are ignored
_ID = struct.Struct(">Q")
_FIXED = [("length", "<u4"), ("source", "<u4"), ("row", "<u8"), ("place", "<u8"), ("split", "u1")]
# An upper bound on the file, not an allocation: LMDB reserves address space and grows the file as it is used.
_MAP_BYTES = 64 << 30
_LOCK_BYTES = 8192  # LMDB's reader table for its default of 126 readers
# A process may have an environment open only once; threads that open databases take turns.
_ENVIRONMENT = threading.RLock()
SPLIT_TRAIN = 0
SPLIT_HELD_OUT = 1

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Record:
    """One stored sequence; `checksums` has one number for each slot, kind by kind and layer by layer."""

    length: int
    source: int
    row: int
    place: int
    split: int
    checksums: tuple[int, ...]

    def dump(self) -> bytes:
        """The LMDB value."""
        fixed = (self.length, self.source, self.row, self.place, self.split, self.checksums)
        return np.array([fixed], value_type(len(self.checksums))).tobytes()


def value_type(slots: int) -> np.dtype[Any]:
    """The LMDB value of a record with so many slots, as numpy reads it."""
    return np.dtype([*_FIXED, ("checksums", "<u8", (slots,))])


@dataclass(frozen=True)
class Snapshot:
    """All published records as arrays, ``R`` records in the order of their ids."""

    ids: Ints  # [R], ascending; gaps are records that are gone
    lengths: Ints  # [R]
    sources: Ints  # [R]
    rows: Ints  # [R]
    places: Ints  # [R]
    splits: Ints  # [R]
    checksums: npt.NDArray[np.uint64]  # [R, slots of a record]

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def of(cls, ids: list[int], values: npt.NDArray[Any]) -> Snapshot:
        """The snapshot of values of `value_type`; ValueError for a number that no array of numpy can index."""
        if len(values) and max(int(values[name].max()) for name in ("row", "place")) >= 1 << 62:
            raise ValueError("a record has an impossible row or place")
        length, source, row, place, split = (values[name].astype(np.int64) for name, _ in _FIXED)
        return cls(np.array(ids, np.int64), length, source, row, place, split, values["checksums"])

    def record(self, position: int) -> Record:
        """One record, by its position in the snapshot."""
        columns = (self.lengths, self.sources, self.rows, self.places, self.splits)
        length, source, row, place, split = (int(column[position]) for column in columns)
        return Record(length, source, row, place, split, tuple(self.checksums[position].tolist()))


class Catalogue:
    """The LMDB environment of one database.

    Parameters
    ----------
    path : Path
        Database directory.
    write : bool
        Open for writing; creates it if needed.
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

    def __init__(self, path: Path, *, write: bool = False, check: bool = True) -> None:
        self._path = path / CATALOGUE
        file = self._path / "data.mdb"
        if not write and not file.is_file():
            raise DatabaseCorruptError(
                f"{self._path} is missing: the records cannot be found without their catalogue.", RESTORE
            )
        if check and (not write or file.exists()):
            try:
                check_environment(file)
            except ValueError as error:
                raise self.corrupt(str(error)) from error
            except OSError as error:
                raise self.corrupt(f"it cannot be read: {error.strerror}") from error
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
        options |= {"readonly": True, "create": False}
        try:
            self._reserve_lock()
            return lmdb.open(str(self._path), **options)
        except (OSError, lmdb.ReadonlyError):
            return lmdb.open(str(self._path), lock=False, **options)
        except lmdb.Error as error:
            if "Read-only" in str(error) or "Permission" in str(error):
                return lmdb.open(str(self._path), lock=False, **options)
            raise

    def _reserve_lock(self) -> None:
        """Give LMDB's lock file its blocks. LMDB maps it and writes: on a full disk that would be SIGBUS."""
        fd = os.open(self._path / "lock.mdb", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(fd).st_blocks * 512 < _LOCK_BYTES:
                os.posix_fallocate(fd, 0, _LOCK_BYTES)
        finally:
            os.close(fd)

    def entries(self, prefix: bytes = RECORDS) -> Iterator[tuple[int, bytes]]:
        """Ids and values of all entries with this prefix, in the order of ids."""
        try:
            with self._env.begin() as transaction:
                cursor = transaction.cursor()
                if not cursor.set_range(prefix):
                    return
                for key, raw in cursor:
                    if not key.startswith(prefix):
                        return
                    if len(key) == len(prefix) + _ID.size:
                        yield _ID.unpack_from(key, len(prefix))[0], bytes(raw)
        except lmdb.Error as error:
            raise self._named(error) from error

    def put(self, entries: Iterable[tuple[int, bytes]]) -> None:
        """Store records under their ids in one durable transaction.

        Raises
        ------
        StorageFullError
            The disk is full; nothing of the batch is stored.
        """
        try:
            with self._env.begin(write=True) as transaction:
                for number, raw in entries:
                    transaction.put(RECORDS + _ID.pack(number), raw)
        except lmdb.Error as error:
            raise self._named(error) from error

    def delete(self, first: int = 0, prefix: bytes = RECORDS) -> None:
        """Remove the entries with this prefix whose ids are not below `first`."""
        try:
            with self._env.begin(write=True) as transaction:
                cursor = transaction.cursor()
                found = cursor.set_range(prefix + _ID.pack(first))
                while found and cursor.key().startswith(prefix) and len(cursor.key()) == len(prefix) + _ID.size:
                    found = cursor.delete()
        except lmdb.Error as error:
            raise self._named(error) from error

    def snapshot(self, manifest: Manifest) -> Snapshot:
        """The records that a manifest of version 2 counts.

        Raises
        ------
        DatabaseCorruptError
            They are not as many as it says, have another digest, or one of them is malformed.
        """
        expected = value_type(sum(kind.layers for kind in manifest.kinds))
        gone = set(manifest.removed)
        entries = [(n, raw) for n, raw in self.entries() if n < manifest.next_id and n not in gone]
        for number, raw in entries:
            if len(raw) != expected.itemsize:
                raise self.corrupt(f"record {number} has {len(raw)} bytes, expected {expected.itemsize}")
        if len(entries) != manifest.records:
            raise self.corrupt(f"it holds {len(entries)} records, the manifest says {manifest.records}")
        digest = add_to_digest(None, entries)
        if digest != manifest.records_digest:
            raise self.corrupt(f"its records have digest {digest}, expected {manifest.records_digest}")
        try:
            values = np.frombuffer(b"".join(raw for _, raw in entries), expected)
            return Snapshot.of([number for number, _ in entries], values)
        except ValueError as error:
            raise self.corrupt(str(error)) from error

    def close(self) -> None:
        """Close the environment."""
        self._env.close()
        _ENVIRONMENT.release()

    def corrupt(self, why: str) -> DatabaseCorruptError:
        """The error for a damaged catalogue."""
        return DatabaseCorruptError(f"{self._path}: {why}.", RESTORE)

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
            return self.corrupt(f"LMDB says {text}")
        return DatabaseError(f"{self._path}: LMDB says {text}.", "attmemo check " + str(self._path.parent))


def read_records(path: Path, manifest: Manifest) -> Snapshot:
    """The records of a generation, of any version that this library reads."""
    with closing(Catalogue(path)) as catalogue:
        if manifest.version == 1:
            from attmemo.db.version1 import snapshot

            return snapshot(catalogue, manifest)
        return catalogue.snapshot(manifest)


def add_to_digest(digest: str | None, entries: Iterable[tuple[int, bytes]]) -> str:
    """The digest of records after more were added: a sum, so neither the order nor a later removal matters."""
    total = 0 if digest is None else int(digest, 16)
    for number, raw in entries:
        total += xxhash.xxh3_128_intdigest(_ID.pack(number) + raw)
    return f"{total % (1 << 128):032x}"
