"""A pool in a folder, shared by the processes of a machine: all read, one at a time fills.

    FILLING.json          whose records these are, written once; PREPARED.json: builds alone fill (`Filling`)
    catalogue/            LMDB: the truth. What it does not name does not exist
    segments/NUMBER       bytes of records (`attmemo.db.pools.segment`)
    fill.lock             the lease: held while a batch is added
    present.lock          says that a process fills (`attmemo.db.pools.prewrite`)
    scrub.due             records were removed, and what is left of them is not yet written over (`attmemo.db.scrub`)
    set-aside/            what was found damaged (`attmemo.db.aside`)

To add is: take the lease, begin a transaction of LMDB, catch up with what others have added, write the bytes behind
the end that the catalogue names, make them durable, commit. A process that is killed leaves bytes that nothing names;
the next one writes over them. The kernel takes the lease from a process that ends, so no clock is asked.

A process that fills by and by writes bytes ahead, into room that it holds, and publishes many records together.

A process that serves a prepared pool reads it once (`release`), and writes nothing to it, not even how often a record
was used.

Readers look at the number of LMDB's last transaction a few times a second and read the log of changes behind the last
one that they know. They never hold a transaction open.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from attmemo.db.catalogue import naming
from attmemo.db.entries import (
    HISTORY,
    LOG,
    META,
    RECORDS,
    SEGMENT_ENTRIES,
    Entries,
    number_of,
    numbered,
    put,
    record_key,
    record_value,
)
from attmemo.db.environments import ENVIRONMENTS
from attmemo.db.files import ANEW, CATALOGUE, DAMAGED, storing, sync
from attmemo.db.folder import SEGMENTS, begin, check_parts, is_begun, make_folder
from attmemo.db.pools.fill_lock import lease
from attmemo.db.pools.filling import Filling
from attmemo.db.pools.history import History, Work
from attmemo.db.pools.pool import Pool
from attmemo.db.pools.prewrite import Ahead
from attmemo.db.pools.segment import Pause, Segment, no_pause
from attmemo.db.records import Draft, Entry, Kept, News, Tail
from attmemo.db.scrub import DUE, scrub
from attmemo.errors import DatabaseError

PATIENCE: Final = 2.0
"""Seconds that the lease is waited for."""
LOGGED: Final = 512
"""Batches in the log of changes. A reader that is farther behind reads everything."""


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
        self, path: os.PathLike[str] | str, max_bytes: int | None, filling: Filling | None = None, *,
        fills: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(max_bytes)
        self.path, self.fills = Path(path), fills
        self._seq = self._transaction = -1  # of the last change that is known
        self._lock = threading.RLock()
        self._env: Any = None
        self._key = (0, 0)  # of the environment
        self._closed = False
        self._due = self.path / DUE
        self._ahead, self._entries = Ahead(self.path), Entries(self.path / CATALOGUE)
        self._same = 0, 0, 0, 0  # device, inode, time and size of the file that describes it
        if filling is None or (self.path / filling.file).exists():
            Filling.read(self.path)  # before anything is made in a folder that is none
        else:
            make_folder(self.path, filling)
        check_parts(self.path)
        with ExitStack() as making:
            if fills and not is_begun(self.path):
                making.enter_context(lease(self.path, PATIENCE))
                with storing(self.path):
                    begin(self.path, filling)
            making.enter_context(ENVIRONMENTS.working())
            self.filling = Filling.read(self.path)
            self._environment()
            with ExitStack() as undo:
                undo.callback(ENVIRONMENTS.leave, self._key)
                if fills:
                    self._check_same()  # another process may have set what was damaged aside, and begun anew
                    with storing(self.path):
                        (self.path / SEGMENTS).mkdir(mode=0o700, exist_ok=True)
                undo.pop_all()

    # ---- reading ----

    def news(self) -> News:
        self.look()
        return super().news()

    def look(self) -> None:
        """Catch up with what others have published; `news` tells it."""
        with self._lock, ENVIRONMENTS.working(), self._naming():
            env = self._environment()
            tried = -1
            while (last := env.info()["last_txnid"]) != self._transaction:
                with env.begin() as transaction:
                    try:
                        self._known += self._catch_up(transaction)
                    except DAMAGED:
                        if transaction.id() == tried:
                            raise  # else a segment may have gone between the transaction and the look at its file
                        tried = transaction.id()
                        continue
                if self._transaction < last:  # a process died as it published: LMDB tells readers at the next write
                    break

    def _naming(self) -> AbstractContextManager[None]:
        return naming(self.path / CATALOGUE, ANEW)

    def _environment(self) -> Any:
        if self._closed:
            raise DatabaseError(f"{self.path} was closed.", "memoize the model again")
        if self._env is None:
            self._key, self._env = ENVIRONMENTS.enter(self.path, self.fills)
        return self._env

    def _catch_up(self, transaction: Any, lost: dict[int, DatabaseError] | None = None) -> News:
        """Apply what was published since the last call: all of it or, after an error, nothing.

        `lost`, if given, gets segments that cannot be read, and why; else they are an error.
        """
        entries, seen = self._entries, transaction.id()
        raw = entries.get(transaction, META)
        if raw is None:
            self._transaction, self._seq = seen, max(self._seq, 0)
            return News()
        meta = json.loads(raw)
        if meta["uuid"] != self.filling.uuid:
            raise entries.corrupt(
                f"its records are of {meta['uuid'][:8]}…, the folder is of {self.filling.uuid[:8]}…"
            )
        found = News()
        if meta["seq"] != self._seq:
            segments, tails = self._read_segments(transaction, lost)
            changes = None if self._seq < 0 else entries.changes(transaction, self._seq + 1, meta["seq"])
            if changes is None:
                kept = [entries.record(key, raw, segments) for key, raw in entries.all(transaction, RECORDS)]
                gone = self.records.keys() - {one.number for one in kept}
            else:
                keys = [record_key(*place) for added, moved, _ in changes for place in (*added, *moved)]
                there = [(key, entries.get(transaction, key)) for key in keys]  # what came and went is not there
                kept = [entries.record(key, raw, segments) for key, raw in there if raw is not None]
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

    def _read_segments(
        self, transaction: Any, lost: dict[int, DatabaseError] | None
    ) -> tuple[dict[int, Segment], dict[int, Tail]]:
        segments, tails = {}, {}
        for key, raw in self._entries.all(transaction, SEGMENT_ENTRIES):
            number = number_of(key)
            nbytes, end, count = json.loads(raw)
            tails[number] = Tail(end, count)
            segment = self._segments.get(number)
            if segment is None:
                try:
                    segment = Segment.open(self._file(number), number, nbytes, marked=not self.filling.sealed)
                except DAMAGED as error:
                    if lost is None:
                        raise
                    lost[number] = error
                    segment = Segment.unreadable(self._file(number), number, nbytes)
            segments[number] = segment
        return segments, tails

    def history(self) -> History:
        """What requests cost, those of all processes."""
        with self._lock, ENVIRONMENTS.working(), self._naming(), self._environment().begin() as transaction:
            return self._entries.history(transaction)

    # ---- writing ----

    def note(self, work: Work) -> None:
        """DatabaseError: it cannot be written, or another process writes."""
        with self._filling(), storing(self.path), self._environment().begin(write=True) as transaction:
            history = self._entries.history(transaction)
            history.add(time.time(), work)
            put(transaction, HISTORY, json.dumps(history.state()).encode())

    def write(self, entry: Entry, pause: Pause = no_pause) -> Kept | None:
        """As `Pool.write`. If the next `add` fails, what was written is lost. DatabaseError: the disk refuses."""
        with self._lock, storing(self.path):
            return self._ahead.write(entry, pause)

    def mend(self, move: Callable[[Sequence[str]], object]) -> list[tuple[DatabaseError, int]]:
        """Go on without segments that cannot be read: why not, and how many records each had.

        `move` gets the names of their files, and moves them away.
        """
        lost: dict[int, DatabaseError] = {}
        records: Counter[int] = Counter()

        def leave(draft: Draft) -> None:
            if lost:
                move([f"{SEGMENTS}/{self._file(number).name}" for number in lost])
                records.update(kept.segment.number for kept in self.records.values())
                draft.counts["damaged"] += sum(records[number] for number in lost)
                self._replace(draft, set(lost), [])

        self._seq = -1  # all of the catalogue is read
        self._change(leave, lost)
        return [(error, records[number]) for number, error in lost.items()]

    def _change(self, make: Callable[[Draft], object], lost: dict[int, DatabaseError] | None = None) -> None:
        with self._filling():
            draft: Draft | None = None
            try:
                with self._environment().begin(write=True) as transaction:
                    self._known += self._catch_up(transaction, lost)
                    draft = self._draft()
                    self._ahead.enter(draft, self._in)
                    self._ahead.name(draft)
                    with storing(self.path):
                        make(draft)
                    self._ahead.take(draft, self.usual)
                    changed = draft.touched or draft.removed or draft.segments.keys() != self._segments.keys()
                    if changed:
                        with storing(self.path):
                            if self.filling.sealed:  # before, too: who is killed in between leaves no old edition
                                replace(self.filling, edition=uuid.uuid4().hex).write(self.path)
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
            if changed and self.filling.sealed:
                with storing(self.path):
                    replace(self.filling, edition=uuid.uuid4().hex, records=len(self)).write(self.path)

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
            transaction.delete(numbered(SEGMENT_ENTRIES, number))
        for number in draft.touched & draft.segments.keys():
            tail, nbytes = draft.tails[number], draft.segments[number].nbytes
            put(transaction, numbered(SEGMENT_ENTRIES, number), json.dumps([nbytes, tail.end, tail.count]).encode())
        added: list[list[int]] = []
        moved: list[list[int]] = []
        for number in draft.removed | draft.kept.keys():
            if number in self.records:
                transaction.delete(_key(self.records[number]))
        for number, kept in sorted(draft.kept.items()):
            if number not in draft.removed:
                put(transaction, _key(kept), record_value(kept))
                (moved if number in self.records else added).append([kept.segment.number, kept.place])
        removed = sorted(number for number in draft.removed if number in self.records)
        seq = self._seq + 1
        put(transaction, numbered(LOG, seq), json.dumps([added, moved, removed]).encode())
        if seq >= LOGGED:
            transaction.delete(numbered(LOG, seq - LOGGED))
        meta = {
            "uuid": self.filling.uuid, "next": draft.next, "next_segment": draft.next_segment, "seq": seq,
            "counts": dict(Counter(self.counts) + draft.counts), "usual": self.usual,
        }  # fmt: skip
        put(transaction, META, json.dumps(meta).encode())

    @contextmanager
    def _filling(self) -> Iterator[None]:
        """The right to fill, and the certainty that the folder is still the same."""
        if not self.fills:
            raise DatabaseError(f"{self.path} was opened to be read only.", "open it with fill=True")
        with self._lock, lease(self.path, PATIENCE), ENVIRONMENTS.working(), self._naming():
            self._check_same()
            yield

    def _check_same(self) -> None:
        """DatabaseError: the folder is not the one that was opened."""
        try:
            seen, catalogue = os.stat(self.path / self.filling.file), os.stat(self.path / CATALOGUE)
            if (catalogue.st_dev, catalogue.st_ino) != self._key:
                raise DatabaseError(f"{self.path} was begun anew by another process.", "memoize the model again")
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

    def release(self) -> None:
        """Close the catalogue: the records that are known stay, and no others come. Doing so twice is fine."""
        with self._lock:
            self._closed = True
            if self._env is not None:
                self._env = None
                ENVIRONMENTS.leave(self._key)

    def close(self) -> None:
        with self._lock:
            self._ahead.stop()
            if self._ahead and not self._closed:
                with suppress(DatabaseError):  # what is lost was never published
                    self.add([])
            self._ahead.close()
            super().close()
            self.release()

    def leave_to_parent(self) -> None:
        """In a forked child: LMDB must be opened anew, and a lock may be held by a thread that is not here."""
        self._lock, self._env = threading.RLock(), None
        self._ahead.close()
        self._seq = self._transaction = -1  # the fork may have come in the middle of a change
        self._known = News()


def _key(kept: Kept) -> bytes:
    return record_key(kept.segment.number, kept.place)
