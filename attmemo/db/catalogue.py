"""The catalogue: what each record is, where its slots lie, and what their bytes must hash to: LMDB, an entry a record.

A reader takes one snapshot into numpy arrays at open and closes the environment: lookups then never touch LMDB, and
no reader transaction can go stale. Values of LMDB have no alignment that a window could map, so slots lie elsewhere.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

import lmdb
import numpy as np
import numpy.typing as npt
import xxhash

from attmemo.db.files import CATALOGUE, FULL, RESTORE
from attmemo.db.lmdbfile import check_environment
from attmemo.db.manifest import Manifest
from attmemo.errors import DatabaseCorruptError, DatabaseError, StorageFullError

RECORDS: Final = b"r"  # prefix of a record's key; entries with other prefixes are ignored
_ID = struct.Struct(">Q")
_FIXED = [("length", "<u4"), ("source", "<u4"), ("row", "<u8"), ("place", "<u8"), ("split", "u1")]
# An upper bound on the file, not an allocation: LMDB reserves address space and grows the file as it is used.
_MAP_BYTES = 64 << 30
_LOCK_BYTES = 8192  # LMDB's reader table for its default of 126 readers
_DAMAGED = (lmdb.CorruptedError, lmdb.InvalidError, lmdb.PageNotFoundError, lmdb.VersionMismatchError)
# A process may have an environment open only once; threads that open databases take turns.
_ENVIRONMENT = threading.RLock()
SPLIT_TRAIN, SPLIT_HELD_OUT = 0, 1
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
        return np.array([astuple(self)], value_type(len(self.checksums))).tobytes()


def value_type(slots: int) -> np.dtype[Any]:
    """The LMDB value of a record with so many slots, as numpy reads it."""
    return np.dtype([*_FIXED, ("checksums", "<u8", (slots,))])


@dataclass(frozen=True)
class Snapshot:
    """All published records as arrays, ``R`` records in the order of their ids, which count from 0."""

    lengths: Ints
    sources: Ints
    rows: Ints
    places: Ints
    splits: Ints
    checksums: npt.NDArray[np.uint64]  # [R, slots of a record]

    def __len__(self) -> int:
        return len(self.lengths)

    def record(self, position: int) -> Record:
        """One record, by its position in the snapshot."""
        columns = (self.lengths, self.sources, self.rows, self.places, self.splits)
        length, source, row, place, split = (int(column[position]) for column in columns)
        return Record(length, source, row, place, split, tuple(self.checksums[position].tolist()))


class Catalogue:
    """The LMDB environment of one database; `write` creates it if needed.

    A damaged file would end the process, so its structure is checked first. A builder that holds the lock need not
    `check` twice. DatabaseCorruptError if it is missing or damaged, DatabaseError if it cannot be opened.
    """

    def __init__(self, path: Path, *, write: bool = False, check: bool = True) -> None:
        self._path = path / CATALOGUE
        file = self._path / "data.mdb"
        if not write and not file.is_file():
            what = f"{self._path} is missing: the records cannot be found without their catalogue."
            raise DatabaseCorruptError(what, RESTORE)
        if check and (not write or file.exists()):
            try:
                check_environment(file)
            except (ValueError, OSError) as error:
                why = f"it cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
                raise self.corrupt(why) from error
        _ENVIRONMENT.acquire()
        try:
            with self._naming():
                self._env = open_lmdb(self._path, write)
        except BaseException:
            _ENVIRONMENT.release()
            raise

    def entries(self) -> Iterator[tuple[int, bytes]]:
        """Ids and values of all records, in the order of ids."""
        with self._naming(), self._env.begin() as transaction:
            cursor = transaction.cursor()
            for key, raw in cursor if cursor.set_range(RECORDS) else ():
                if not key.startswith(RECORDS):
                    return
                if len(key) == len(RECORDS) + _ID.size:
                    yield _ID.unpack_from(key, len(RECORDS))[0], bytes(raw)

    def put(self, entries: Iterable[tuple[int, bytes]]) -> None:
        """Store records under their ids in one durable transaction; on a full disk nothing is stored."""
        with self._naming(), self._env.begin(write=True) as transaction:
            for number, raw in entries:
                transaction.put(RECORDS + _ID.pack(number), raw)

    def delete(self, first: int = 0) -> None:
        """Remove the records whose ids are not below `first`."""
        with self._naming(), self._env.begin(write=True) as transaction:
            cursor = transaction.cursor()
            found = cursor.set_range(RECORDS + _ID.pack(first))
            while found and cursor.key().startswith(RECORDS) and len(cursor.key()) == len(RECORDS) + _ID.size:
                found = cursor.delete()

    def snapshot(self, manifest: Manifest) -> Snapshot:
        """The records that a manifest counts; DatabaseCorruptError names what is wrong."""
        expected = value_type(sum(kind.layers for kind in manifest.kinds))
        entries = [(n, raw) for n, raw in self.entries() if n < manifest.records]
        for number, raw in entries:
            if len(raw) != expected.itemsize:
                raise self.corrupt(f"record {number} has {len(raw)} bytes, expected {expected.itemsize}")
        if len(entries) != manifest.records:
            raise self.corrupt(f"it holds {len(entries)} records, the manifest says {manifest.records}")
        digest = add_to_digest(None, entries)
        if digest != manifest.records_digest:
            raise self.corrupt(f"its records have digest {digest}, expected {manifest.records_digest}")
        values = np.frombuffer(b"".join(raw for _, raw in entries), expected)
        # Numbers that an array of numpy must be able to index.
        if len(values) and max(int(values[name].max()) for name in ("row", "place")) >= 1 << 62:
            raise self.corrupt("a record has an impossible row or place")
        length, source, row, place, split = (values[name].astype(np.int64) for name, _ in _FIXED)
        return Snapshot(length, source, row, place, split, values["checksums"])

    def close(self) -> None:
        self._env.close()
        _ENVIRONMENT.release()

    def corrupt(self, why: str) -> DatabaseCorruptError:
        return DatabaseCorruptError(f"{self._path}: {why}.", RESTORE)

    def _naming(self) -> AbstractContextManager[None]:
        return naming(self._path)


def open_lmdb(path: Path, write: bool) -> Any:
    """The environment in a folder of its own. lmdb.Error, OSError: as they come."""
    # Format 0.9 is what every lmdb reads; readers on a read-only file system cannot take the reader lock.
    options: dict[str, Any] = {"map_size": _MAP_BYTES, "subdir": True, "max_dbs": 0}
    if write:
        path.mkdir(exist_ok=True)
    else:
        options |= {"readonly": True, "create": False}
    try:
        # LMDB maps its lock file and writes: without blocks, on a full disk, that would be SIGBUS.
        with (path / "lock.mdb").open("ab") as stream:
            if os.fstat(stream.fileno()).st_blocks * 512 < _LOCK_BYTES:
                os.posix_fallocate(stream.fileno(), 0, _LOCK_BYTES)
        return lmdb.open(str(path), **options)
    except (OSError, lmdb.Error) as error:
        text = str(error)
        denied = isinstance(error, OSError | lmdb.ReadonlyError) or "Read-only" in text or "Permission" in text
        if write or not denied:
            raise
        return lmdb.open(str(path), lock=False, **options)


@contextmanager
def naming(path: Path, restore: str = RESTORE) -> Iterator[None]:
    """Turn errors of LMDB and of the system into errors of this library; `path` is that of the environment.

    `restore`: the next step if it is damaged.
    """
    try:
        yield
    except (lmdb.Error, OSError) as error:
        raise _named(path, error, restore) from error


def _named(path: Path, error: Exception, restore: str) -> DatabaseError:
    text = str(error)
    full = isinstance(error, lmdb.MapFullError | lmdb.DiskError) or any(os.strerror(code) in text for code in FULL)
    if not full and "Input/output error" in text:  # what LMDB makes of a write that ended early
        with suppress(OSError):
            room = os.statvfs(path)
            full = room.f_bavail * room.f_frsize < _LOCK_BYTES
    if full:
        return StorageFullError(f"{path}: no room for the catalogue ({text}).", "free space and run again")
    if isinstance(error, _DAMAGED):
        return DatabaseCorruptError(f"{path}: LMDB says {text}.", restore)
    return DatabaseError(f"{path}: LMDB says {text}.", "attmemo check " + str(path.parent))


def read_records(path: Path, manifest: Manifest) -> Snapshot:
    """The records of a generation."""
    with closing(Catalogue(path)) as catalogue:
        return catalogue.snapshot(manifest)


def add_to_digest(digest: str | None, entries: Iterable[tuple[int, bytes]]) -> str:
    """The digest of records after more were added: a sum, so neither the order nor a later removal matters."""
    total = 0 if digest is None else int(digest, 16)
    for number, raw in entries:
        total += xxhash.xxh3_128_intdigest(_ID.pack(number) + raw)
    return f"{total % (1 << 128):032x}"
