"""A pool in a folder, shared by the processes of a machine: all read, one at a time fills.

    FILLING.json          whose records these are, written once
    catalogue/            LMDB: the truth. What it does not name does not exist
    segments/NUMBER       bytes of records (`attmemo.db.segment`)
    fill.lock             the lease: held while a batch is added
    present.lock          says that a process fills (`attmemo.db.ahead`)

To add is: take the lease, begin a transaction of LMDB, catch up with what others have added, write the bytes behind
the end that the catalogue names, make them durable, commit. A process that is killed leaves bytes that nothing names;
the next one writes over them. The kernel takes the lease from a process that ends, so no clock is asked.

A process that fills by and by writes bytes ahead, into room that it holds, and publishes many records together.

Readers look at the number of LMDB's last transaction a few times a second and read the log of changes behind the last
one that they know. They never hold a transaction open.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from attmemo.db.ahead import Ahead
from attmemo.db.catalogue import naming
from attmemo.db.environments import ENVIRONMENTS, is_whole
from attmemo.db.files import CATALOGUE, MANIFEST, RESTORE, storing, sync
from attmemo.db.filling import FILLING, Filling, is_filling
from attmemo.db.history import History, Work
from attmemo.db.lease import LEASE, PRESENCE, lease
from attmemo.db.pool import Pool
from attmemo.db.records import Draft, Entry, Kept, News, Tail
from attmemo.db.scrub import DUE, scrub
from attmemo.db.segment import Pause, Segment, no_pause
from attmemo.errors import DatabaseCorruptError, DatabaseError

SEGMENTS: Final = "segments"
PATIENCE: Final = 2.0
"""Seconds that the lease is waited for."""
LOGGED: Final = 512
"""Batches in the log of changes. A reader that is farther behind reads everything."""

_NUMBER = struct.Struct(">Q")
_PLACE = struct.Struct(">QI")  # segment, place: the key of a record
_RECORD = struct.Struct("<QQQQdQI")  # number, offset, bytes, checksum, made, carried, bytes of the note
_META, _LOG, _RECORDS, _SEGMENTS, _HISTORY = b"m", b"l", b"r", b"s", b"h"


class SharedPool(Pool):
    """Records in a folder.

    Parameters
    ----------
    path : path
        Of the folder.
    max_bytes : int or None
        Most bytes of all segments, while this process fills; see `Pool`.
    filling : Filling, optional
        What a new pool is made for. None: the folder must be a pool.
    fills : bool
        Whether this process writes.

    Raises
    ------
    DatabaseError
        The folder is no pool, is damaged, or cannot be made.
    """

    def __init__(
        self, path: os.PathLike[str] | str, max_bytes: int | None, filling: Filling | None = None, *, fills: bool = True
    ) -> None:
        super().__init__(max_bytes)
        self.path, self.fills = Path(path), fills
        self._seq = self._transaction = -1  # of the last change that is known
        self._lock = threading.RLock()
        self._env: Any = None
        self._key = (0, 0)  # of the environment
        self._closed = False
        self._due = self.path / DUE
        self._ahead = Ahead(self.path)
        self._head, self._same = str(self.path / FILLING), (0, 0, 0, 0)  # device, inode, time and size of this file
        if filling is not None and not is_filling(self.path):
            _check_new(self.path)
            with storing(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.mkdir(mode=0o700, exist_ok=True)  # it holds what inputs say
                filling.write(self.path)
        self.filling = Filling.read(self.path)
        if fills:
            with storing(self.path):
                (self.path / SEGMENTS).mkdir(mode=0o700, exist_ok=True)
        with ENVIRONMENTS.working(), ExitStack() as making:
            if fills and not is_whole(self.path):
                making.enter_context(lease(self.path, PATIENCE))
                half = self.path / CATALOGUE / "data.mdb"
                if half.is_file() and not is_whole(self.path):  # a process died while it made this
                    shutil.rmtree(self.path / CATALOGUE, ignore_errors=True)
            self._environment()

    # ---- reading ----

    def news(self) -> News:
        with self._lock, ENVIRONMENTS.working(), naming(self.path / CATALOGUE):
            env = self._environment()
            tried = -1
            while (last := env.info()["last_txnid"]) != self._transaction:
                with env.begin() as transaction:
                    try:
                        self._known += self._catch_up(transaction)
                    except DatabaseCorruptError:
                        if transaction.id() == tried:
                            raise  # else a segment may have gone between the transaction and the look at its file
                        tried = transaction.id()
                        continue
                if self._transaction < last:  # a process died as it published: LMDB tells readers at the next write
                    break
            return super().news()

    def _environment(self) -> Any:
        if self._closed:
            raise DatabaseError(f"{self.path} was closed.", "memoize the model again")
        if self._env is None:
            self._key, self._env = ENVIRONMENTS.enter(self.path, self.fills)
        return self._env

    def _catch_up(self, transaction: Any) -> News:
        """Apply what was published since the last call: all of it or, after an error, nothing."""
        seen, raw = transaction.id(), self._get(transaction, _META)
        if raw is None:
            self._transaction, self._seq = seen, max(self._seq, 0)
            return News()
        meta = json.loads(raw)
        if meta["uuid"] != self.filling.uuid:
            raise self._corrupt(f"its records are of {meta['uuid'][:8]}…, the folder is of {self.filling.uuid[:8]}…")
        found = News()
        if meta["seq"] != self._seq:
            segments, tails = self._read_segments(transaction)
            changes = None if self._seq < 0 else self._log(transaction, self._seq + 1, meta["seq"])
            if changes is None:
                kept = [self._kept(key, raw, segments) for key, raw in self._entries(transaction, _RECORDS)]
                gone = self.records.keys() - {one.number for one in kept}
            else:
                keys = [_RECORDS + _PLACE.pack(*key) for added, moved, _ in changes for key in (*added, *moved)]
                there = [(key, self._get(transaction, key)) for key in keys]  # what came and went is not there
                kept = [self._kept(key, raw, segments) for key, raw in there if raw is not None]
                gone = {number for *_, removed in changes for number in removed} & self.records.keys()
            kept.sort(key=lambda one: one.number)
            found = News([one for one in kept if one.number not in self.records], sorted(gone))
            self.records.update((one.number, one) for one in kept)
            for number in gone:
                del self.records[number]
            self._segments, self._tails = segments, tails
        self._next, self._next_segment, self.counts = meta["next"], meta["next_segment"], meta["counts"]
        self._seq, self._transaction = meta["seq"], seen
        self._usual = meta.get("usual", self._usual)
        return found

    def _log(self, transaction: Any, first: int, last: int) -> list[tuple[Any, Any, Any]] | None:
        """Changes with these numbers; None: the log does not reach back so far."""
        found = []
        for number in range(first, last + 1):
            raw = self._get(transaction, _LOG + _NUMBER.pack(number))
            if raw is None:
                return None
            found.append(tuple(json.loads(raw)))
        return found

    def _read_segments(self, transaction: Any) -> tuple[dict[int, Segment], dict[int, Tail]]:
        segments, tails = {}, {}
        for key, raw in self._entries(transaction, _SEGMENTS):
            (number,) = _NUMBER.unpack_from(key, len(_SEGMENTS))
            nbytes, end, count = json.loads(raw)
            known = self._segments.get(number)
            segments[number] = known or Segment.open(self._file(number), number, nbytes)
            tails[number] = Tail(end, count)
        return segments, tails

    def _kept(self, key: bytes, raw: bytes, segments: Mapping[int, Segment]) -> Kept:
        number, offset, nbytes, checksum, made, carried, noted = _RECORD.unpack_from(raw)
        segment_number, place = _PLACE.unpack_from(key, len(_RECORDS))
        segment = segments.get(segment_number)
        if segment is None or offset < segment.start or offset + nbytes > segment.nbytes or place >= segment.room:
            raise self._corrupt(f"record {number} lies outside of segment {segment_number}")
        note = raw[_RECORD.size : _RECORD.size + noted]
        tokens = np.frombuffer(raw[_RECORD.size + noted :], np.int32)
        return Kept(number, tokens, segment, place, offset, nbytes, checksum, made, carried, note)

    def _get(self, transaction: Any, key: bytes) -> bytes | None:
        raw = transaction.get(key)
        return None if raw is None else self._unsealed(key, raw)

    def _entries(self, transaction: Any, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values with a prefix."""
        cursor = transaction.cursor()
        for key, raw in cursor if cursor.set_range(prefix) else ():
            if not key.startswith(prefix):
                return
            yield key, self._unsealed(key, raw)

    def _unsealed(self, key: bytes, raw: bytes) -> bytes:
        """A value without its checksum. DatabaseCorruptError: the checksum does not fit."""
        value = raw[_NUMBER.size :]
        if not raw.startswith(_checksum(key, value)):
            raise self._corrupt(f"the entry {key!r} does not match its checksum")
        return value

    def _corrupt(self, why: str) -> DatabaseCorruptError:
        return DatabaseCorruptError(f"{self.path / CATALOGUE}: {why}.", RESTORE)

    def load_history(self) -> None:
        """Read what requests cost, those of all processes."""
        with self._lock, ENVIRONMENTS.working(), naming(self.path / CATALOGUE):
            env = self._environment()
            with env.begin() as transaction:
                self.history = self._history(transaction)

    def _history(self, transaction: Any) -> History:
        raw = self._get(transaction, _HISTORY)
        try:
            return History() if raw is None else History.of(json.loads(raw))
        except (ValueError, TypeError, KeyError):  # of another version: no reason to keep nothing
            return History()

    # ---- writing ----

    def note(self, work: Work) -> None:
        """DatabaseError: it cannot be written, or another process writes."""
        with self._filling(), storing(self.path):
            with self._environment().begin(write=True) as transaction:
                history = self._history(transaction)
                history.add(time.time(), work)
                _put(transaction, _HISTORY, json.dumps(history.state()).encode())
            self.history = history

    def write(self, entry: Entry, pause: Pause = no_pause) -> Kept | None:
        """As `Pool.write`. If the next `add` fails, what was written is lost. DatabaseError: the disk refuses."""
        with self._lock, storing(self.path):
            return self._ahead.write(entry, pause)

    def _change(self, make: Callable[[Draft], object]) -> None:
        with self._filling():
            draft: Draft | None = None
            try:
                with self._environment().begin(write=True) as transaction:
                    self._known += self._catch_up(transaction)
                    draft = self._draft()
                    self._ahead.enter(draft, self._in)
                    self._ahead.name(draft)
                    make(draft)
                    self._ahead.take(draft, self.usual)
                    changed = draft.touched or draft.removed or draft.segments.keys() != self._segments.keys()
                    if changed:
                        with storing(self.path):
                            self._store(transaction, draft)
                    seen = transaction.id()
            except BaseException:
                self._transaction = -1  # another process may use the number of the transaction that is given up
                if draft is not None:
                    self._unlink(draft.made)  # a full disk needs the room
                self._ahead.lose()
                raise
            gone = (self._segments.keys() | draft.made) - draft.segments.keys()
            self._known += self._apply(draft)
            if changed:
                self._seq, self._transaction = self._seq + 1, seen
            else:
                self._transaction = -1  # its number is given up, too
            self._unlink(gone)  # what is published does not name them; readers hold what they read
            self._ahead.publish()

    def _unlink(self, segments: Iterable[int]) -> None:
        for number in segments:
            with suppress(OSError):
                self._file(number).unlink()

    @property
    def needs_scrub(self) -> bool:
        """Whether records were removed, and what was left of them in the catalogue was not written over."""
        return self._due.exists()

    def scrub(self) -> None:
        """Write zeros over what nothing can read in the catalogue: there may be tokens of removed records."""
        with self._filling(), storing(self.path):
            scrub(self._environment(), self.path / CATALOGUE / "data.mdb", PATIENCE)
            self._due.unlink(missing_ok=True)

    def _store(self, transaction: Any, draft: Draft) -> None:
        """Make a draft durable, as part of a transaction."""
        for number in draft.touched & draft.segments.keys():
            draft.segments[number].sync()
        if draft.made:
            sync(self.path / SEGMENTS)
        if draft.counts["forgotten"]:
            self._due.touch(0o600)
            sync(self.path)
        for number in self._segments.keys() - draft.segments.keys():
            transaction.delete(_SEGMENTS + _NUMBER.pack(number))
        for number in draft.touched & draft.segments.keys():
            tail, nbytes = draft.tails[number], draft.segments[number].nbytes
            _put(transaction, _SEGMENTS + _NUMBER.pack(number), json.dumps([nbytes, tail.end, tail.count]).encode())
        added: list[list[int]] = []
        moved: list[list[int]] = []
        for number in draft.removed | draft.kept.keys():
            if number in self.records:
                transaction.delete(_key(self.records[number]))
        for number, kept in sorted(draft.kept.items()):
            if number in draft.removed:
                continue
            head = _RECORD.pack(
                number, kept.offset, kept.nbytes, kept.checksum, kept.made, kept.carried, len(kept.note)
            )
            _put(transaction, _key(kept), head + kept.note + kept.tokens.tobytes())
            (moved if number in self.records else added).append([kept.segment.number, kept.place])
        removed = sorted(number for number in draft.removed if number in self.records)
        seq = self._seq + 1
        _put(transaction, _LOG + _NUMBER.pack(seq), json.dumps([added, moved, removed]).encode())
        if seq >= LOGGED:
            transaction.delete(_LOG + _NUMBER.pack(seq - LOGGED))
        counts = dict(Counter(self.counts) + draft.counts)
        meta = {
            "uuid": self.filling.uuid, "next": draft.next, "next_segment": draft.next_segment, "seq": seq,
            "counts": counts, "usual": self.usual,
        }  # fmt: skip
        _put(transaction, _META, json.dumps(meta).encode())

    @contextmanager
    def _filling(self) -> Iterator[None]:
        """The right to fill, and the certainty that the folder is still the same."""
        if not self.fills:
            raise DatabaseError(f"{self.path} was opened to be read only.", "open it with fill=True")
        with self._lock, lease(self.path, PATIENCE), ENVIRONMENTS.working(), naming(self.path / CATALOGUE):
            self._check_same()
            yield

    def _check_same(self) -> None:
        """DatabaseError: the folder is not the one that was opened."""
        try:
            seen = os.stat(self._head)
        except OSError:
            seen = None  # reading says why
        if seen is None or (seen.st_dev, seen.st_ino, seen.st_mtime_ns, seen.st_size) != self._same:
            if Filling.read(self.path).uuid != self.filling.uuid:
                raise DatabaseError(f"{self.path} was begun anew by another process.", "memoize the model again")
            if seen is not None:
                self._same = seen.st_dev, seen.st_ino, seen.st_mtime_ns, seen.st_size

    def _segment(self, number: int, nbytes: int) -> Segment:
        self._sweep()
        with storing(self.path):
            return Segment.create(self._file(number), number, nbytes)

    def _sweep(self) -> None:
        """Remove files that a process has left that did not live to publish them, and entries of its readers."""
        self._env.reader_check()
        for file in (self.path / SEGMENTS).iterdir():
            if file.name.isdigit() and int(file.name) not in self._segments and int(file.name) < self._next_segment:
                file.unlink(missing_ok=True)

    def _discard(self, draft: Draft, segment: Segment) -> None:
        if segment.number in draft.made:  # it was never published
            self._unlink([segment.number])

    def _file(self, number: int) -> Path:
        return self.path / SEGMENTS / f"{number:010d}"

    def close(self) -> None:
        with self._lock:
            self._ahead.stop()
            if self._ahead and not self._closed:
                with suppress(DatabaseError):  # what is lost was never published
                    self.add([])
            self._ahead.close()
            super().close()
            self._closed = True
            if self._env is not None:
                self._env = None
                ENVIRONMENTS.leave(self._key)

    def leave_to_parent(self) -> None:
        """In a forked child: LMDB must be opened anew, and a lock may be held by a thread that is not here."""
        self._lock, self._env = threading.RLock(), None
        self._ahead.close()
        self._seq = self._transaction = -1  # the fork may have come in the middle of a change
        self._known = News()


def _check_new(path: Path) -> None:
    """DatabaseError: something else is in the folder."""
    try:
        own = (SEGMENTS, CATALOGUE, LEASE, PRESENCE, FILLING, DUE)  # of a pool that another process makes at this moment
        found = sorted(file.name for file in path.iterdir() if not file.name.startswith(own))
    except OSError:
        return  # there is no such folder, or what comes next says why it cannot be read
    if found:
        what = "is a prepared database" if MANIFEST in found else f"holds other files ({found[0]})"
        raise DatabaseError(f"{path} {what}: no database can fill itself there.", "give fill= an empty folder")


def _key(kept: Kept) -> bytes:
    return _RECORDS + _PLACE.pack(kept.segment.number, kept.place)


def _checksum(key: bytes, value: bytes) -> bytes:
    return xxhash.xxh3_64_digest(key + value)


def _put(transaction: Any, key: bytes, value: bytes) -> None:
    """Store a value behind its checksum."""
    transaction.put(key, _checksum(key, value) + value)
