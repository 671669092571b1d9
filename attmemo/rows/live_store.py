"""Records of pools: those of a prepared one, if any, and those that come while the model serves.

    a request ──► offers (references to what was computed) ──► the filler's thread: kept, if they are not yet
    the pool's news (own, and those of other processes) ──► the index, where the next request finds them
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch

from attmemo.db.pools.history import Work
from attmemo.db.pools.pool import Pool
from attmemo.db.pools.shared_pool import SharedPool
from attmemo.db.records import Entry, Kept, News
from attmemo.errors import DatabaseError
from attmemo.rows.candidate import Offer
from attmemo.rows.filler import Filler
from attmemo.rows.index import TokenIndex, hash_of
from attmemo.rows.layout import Placed, RowLayout
from attmemo.rows.store import Ints, RowStore
from attmemo.rows.throttle import Account
from attmemo.system.locking import weakly

_LOG = logging.getLogger("attmemo")

DAMAGED: Final = "damaged"
KNOWN: Final = "known"
LARGE: Final = "too_large"
SPARE: Final = "no_room"
STALE: Final = "other_layers"

_AT_EXIT = 5.0  # seconds
_NOTED = 10.0  # seconds between two notes of what requests cost
GATHERED: Final = 0.7
"""Seconds after which what was written is published. Other processes then see it."""
_LINKED = 64  # records that go to the index's graph with each look for news, while it is behind


class GrowingRows(RowStore):
    """A store that keeps what was computed exactly.

    Parameters
    ----------
    pool : Pool or None
        Where records are kept. None: no others come than those that are prepared.
    layout : RowLayout
    prepared : sequence of Kept
        Records of another pool, which stay. Their numbers in the index come first.
    fills : bool
        Whether what is offered is kept.

    Attributes
    ----------
    index : TokenIndex
        Finds records by tokens.
    grows : bool
        Whether others than the prepared records may come.
    bound : callable or None
        Says how many bytes the pool may take now, where stores share a bound. Asked in the filler's thread.
    """

    def __init__(
        self, pool: Pool | None, layout: RowLayout, prepared: Sequence[Kept] = (), *, fills: bool = True
    ) -> None:
        self.grows = pool is not None
        self.pool = Pool(0) if pool is None else pool
        self.layout, self.fills = layout, fills and self.grows
        self.index = TokenIndex()
        self.kept: Counter[str] = Counter()  # what became of offers
        self.bound: Callable[[], int] | None = None
        self._sure_of: Callable[[bytes], float] = lambda note: math.nan
        self._prepared = dict(enumerate(prepared))  # by number in the index
        self._index(prepared)
        self._first = self.index.next
        self._numbers: dict[int, int] = {}  # of the pool, by number in the index
        self._records: dict[int, int] = {}  # the other way
        # What was handed over and is not stored yet, by the hash of its tokens: it goes with whatever becomes of it.
        self._offered: WeakValueDictionary[int, Offer] = WeakValueDictionary()
        self._ahead: dict[int, Kept] = {}  # by number in the index: written, and not published yet
        self._since = 0.0  # when the first of them was written
        self._sound: dict[int, int] = {}  # records that match their checksum, and in which segment
        self._told: set[str] = set()
        self._anew = False
        self._empties = False  # whether all records are to go
        self._work: Callable[[], Work] | None = None
        self._worked: Work | None = None  # what was noted; None: the parent of a forked child notes what it did
        self._noted = time.monotonic()
        self._learn(self.pool.news())
        self._filler: Filler[Offer] = Filler(self._fill, self.pool.close)
        os.register_at_fork(after_in_child=weakly(self.leave_to_parent))
        self._leave = weakly(self._end)
        atexit.register(self._leave)

    @property
    def folder(self) -> Path | None:
        """Where records are kept; None: in memory."""
        return self.pool.path if isinstance(self.pool, SharedPool) else None

    @property
    def storage(self) -> tuple[torch.dtype, torch.dtype]:
        """Types of K and V, and of the last hidden states."""
        return self.layout.storage

    @property
    def nbytes(self) -> int:
        """Bytes that the records take, without the prepared ones."""
        return self.pool.nbytes

    def __len__(self) -> int:
        return len(self.pool) + len(self._ahead)

    def offer(self, offers: Sequence[Offer]) -> None:
        """Have these sequences of one batch kept; returns at once."""
        self._filler.wake()
        if self.fills and offers:
            for one in offers:
                self._offered[hash_of(one.tokens)] = one
            self._filler.offer(offers, [len(one.body) for one in offers])

    def waits(self) -> float:
        """Return the seconds that it takes to store what was offered."""
        return self._filler.waits

    @property
    def has_room(self) -> bool:
        """Whether records can be added and nothing has to go, as the filler saw it last."""
        return self._filler.pace.has_room

    def pay_from(self, account: Account) -> None:
        """Let this account pay from now on for what is stored beside requests."""
        self._filler.pace.account = account

    def took(self, seconds: float) -> None:
        """A forward took so long."""
        self._filler.pace.forward(seconds)

    def keep(self, offers: Sequence[Offer], seconds: float) -> None:
        """Have these sequences kept now, in idle times, and wait for that: so long at most."""
        if self.fills and offers:
            self._filler.store(offers, [len(one.body) for one in offers], seconds)

    def admit(self, lengths: Ints) -> int:
        """Return how many sequences of these lengths may be offered now, the first ones; the others are counted."""
        return self._filler.admit([self.layout.nbytes(n) for n in lengths.tolist()]) if self.fills else 0

    def fits(self, lengths: Ints) -> npt.NDArray[np.bool_]:
        """Return which sequences of these lengths ``[B]`` can be kept at all."""
        sizes = [self.layout.nbytes(n) for n in lengths.tolist()]
        return np.array([self.fills and self.pool.fits(size) for size in sizes], np.bool_)

    def awaiting(self, tokens: npt.NDArray[np.int32], starts: Ints) -> npt.NDArray[np.bool_]:
        """Return of which sequences ``[B]`` a record of just these tokens may be on its way."""
        found, offered = np.zeros(len(starts) - 1, np.bool_), self._offered
        if not offered:
            return found
        for place, (begin, end) in enumerate(pairwise(starts.tolist())):
            one = offered.get(hash_of(tokens[begin:end]))
            found[place] = one is not None and np.array_equal(one.tokens, tokens[begin:end])
        return found

    def flush(self, seconds: float = 60.0) -> bool:
        """Wait until all that was offered is kept or left out; False: it takes longer."""
        return self._filler.flush(seconds)

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """Have other blocks compute from now on: there are no records of those before, and none of theirs is kept.

        TimeoutError: records do not go.
        """
        self.generation, self._empties = self.generation + 1, True
        try:
            if not self.flush() or (self._empties and not self._filler.is_closed):
                raise TimeoutError("records of exact layers could not be removed")
            yield
        finally:
            self.generation, self._empties = self.generation + 1, False

    def notes_of(self, records: Sequence[int]) -> list[bytes]:
        """Return what was kept with each record; nothing where there is no such record."""
        ahead, numbers, kept = self._ahead, self._numbers, self.pool.records
        found = []
        for record in records:  # no call for a record: a batch has many
            one = ahead.get(record) or kept.get(numbers.get(record, -1))
            found.append(b"" if one is None else one.note)
        return found

    def know(self, sure_of: Callable[[bytes], float]) -> None:
        """Tell the index how sure the own answers of records are, from what is kept with them, now and later."""
        self._sure_of = sure_of
        own = [record for record in self.index.numbers() if record >= self._first]
        self.index.note_sureness(own, [sure_of(note) for note in self.notes_of(own)])

    @property
    def done(self) -> dict[str, int]:
        """What became of offers: kept, or why not."""
        return dict(self.kept + self._filler.skipped)

    # ---- the filler's thread ----

    def _fill(self, offers: Sequence[Offer], hurry: bool) -> None:
        """Keep what no record serves; and learn what others have kept.

        A record serves here once it is written. It is published a little later, with others: a transaction takes as
        long as some records. `hurry`: publish now.
        """
        lost, rest = len(offers), dict[bytes, Entry]()
        try:
            if hurry or not offers or self._anew:  # else it was done a moment ago
                self._learn(self._news())
            if self.bound is not None and self.fills:
                self._keep_within(self.bound())
            if not offers:
                self.index.link(_LINKED)
            for one in offers:
                entry = self._entry(one, rest)
                if entry is None or self._write(entry):
                    lost -= 1
                else:
                    rest[one.tokens.tobytes()] = entry
            lost = len(rest) + len(self._ahead)
            if rest or (self._ahead and (hurry or time.monotonic() - self._since > GATHERED)):
                self._publish(list(rest.values()))
                self.kept["kept"] += lost
            if self._empties and hurry:
                self._learn(self.pool.remove(list(self.pool.records)))
                self._empties = False
            self._filler.pace.has_room = self.pool.has_room
        except Exception as error:  # the thread must live: whatever it is, it costs records, no requests
            self.kept[type(error).__name__] += lost
            self._tell(type(error).__name__, f"new records are not kept: {error}")
        self.note(_NOTED)

    def _keep_within(self, most: int) -> None:
        """Have the pool take no more than so many bytes."""
        self.pool.max_bytes = most
        if self.pool.nbytes > most:
            self.pool.trim()
            self._learn(self.pool.news())

    def _write(self, entry: Entry) -> bool:
        """Write a record ahead and let it be found; False: it has to be added."""
        try:
            kept = self.pool.write(entry, self._filler.breathe)
        except DatabaseError:  # to add it says why
            return False
        if kept is None:
            return False
        if not self._ahead:
            self._since = time.monotonic()
        record = self.index.next
        self._ahead[record] = kept
        self._index([kept])
        self._sound[record] = kept.segment.number  # the checksum was made of what was written just now
        return True

    def _publish(self, rest: Sequence[Entry]) -> None:
        """Publish what was written ahead, and add the rest."""
        try:
            self._learn(self.pool.add(rest, self._filler.breathe))
        except DatabaseError:
            self._learn(self.pool.news())  # some of them may have been kept
            raise
        finally:
            for record in list(self._ahead):  # what was not published is lost
                self._forget(record)

    def watch(self, work: Callable[[], Work]) -> None:
        """Note from now on what requests do; `work` says how much they have done so far."""
        self._work, self._worked = work, work()

    def note(self, seconds: float = 0.0) -> None:
        """Keep what requests did since the last time, if that is so long ago. It raises nothing."""
        now = time.monotonic()
        if self._work is None or not self.fills or now - self._noted < seconds:
            return
        with suppress(Exception):  # the next note has it; the filler's thread, a close and an exit must go on
            done, self._noted = self._work(), now
            new = Work() if self._worked is None else done.since(self._worked)
            if new.requests:
                self.pool.note(new)
            self._worked = done

    def _news(self) -> News:
        """The pool's news; in a forked child, all that the index does not have."""
        news, anew, self._anew = self.pool.news(), self._anew, False
        if not anew:
            return news
        self._ahead.clear()  # the parent publishes them
        own = [record for record in self.index.numbers() if record >= self._first]
        for record in own:
            if record not in self._numbers:
                self._forget(record)
        self._numbers = {record: self._numbers[record] for record in own if record in self._numbers}
        self._records = {number: record for record, number in self._numbers.items()}
        records = dict(self.pool.records)
        known = self._records.keys()
        return News([records[number] for number in sorted(records.keys() - known)], sorted(known - records.keys()))

    def _entry(self, one: Offer, rest: Mapping[bytes, Entry]) -> Entry | None:
        """What is kept of an offer; None: it is not kept, which is counted. `rest`, by tokens: what waits to be added.

        Sequences that are much alike are all kept: of log lines, neighbours of a batch serve 0.05 more than one of
        them alone (docs/filling.md).
        """
        why = None
        if one.generation != self.generation:
            why = STALE
        elif self.index.same(one.tokens) >= 0 or one.tokens.tobytes() in rest:
            why = KNOWN
        elif not one.is_finite_in(self.storage):
            why = "not_finite"
        elif not self.pool.fits(self.layout.nbytes(len(one.tokens))):
            why = LARGE
        elif one.spare and not self.pool.has_room:
            why = SPARE
        if why is not None:
            self.kept[why] += 1
            return None
        return Entry(one.tokens.copy(), one.as_record(self.layout), one.note)  # a copy: tokens are of the whole batch

    def _learn(self, news: News) -> None:
        """Let what came be found, and what went no more."""
        written = {(kept.segment.number, kept.place): record for record, kept in self._ahead.items()}
        fresh: list[Kept] = []
        for kept in news.added:
            record = written.get((kept.segment.number, kept.place), self.index.next + len(fresh))
            self._numbers[record], self._records[kept.number] = kept.number, record
            if self._ahead.pop(record, None) is None:
                fresh.append(kept)
        self._index(fresh)
        for number in news.removed:
            record = self._records.get(number, -1)
            if record >= 0:
                self._forget(record)

    def _index(self, found: Sequence[Kept]) -> None:
        """Let records be found, under the next numbers of the index."""
        first = self.index.next
        self.index.extend(
            [kept.tokens for kept in found], range(first, first + len(found)),
            [self._sure_of(kept.note) for kept in found],
        )  # fmt: skip

    def _forget(self, record: int) -> None:
        """Let a record be found no more."""
        self._ahead.pop(record, None)
        self._sound.pop(record, None)
        self._records.pop(self._numbers.pop(record, -1), None)
        if record in self.index:
            self.index.remove(record)

    def _tell(self, kind: str, text: str) -> None:
        """Warn once of each kind of trouble."""
        if kind not in self._told:
            self._told.add(kind)
            _LOG.warning("attmemo: %s", text)

    # ---- requests ----

    def fetch(self, records: Ints) -> Placed:
        """Rows of these records. DatabaseError: a record was dropped since it was found, or is damaged."""
        return Placed(self.layout, self._held(records.tolist()))

    def _held(self, records: Sequence[int]) -> list[Kept | None]:
        """Return where these records lie, and count their use; None: no record."""
        prepared, ahead, numbers, kept = self._prepared, self._ahead, self._numbers, self.pool.records
        found: list[Kept | None] = []
        segments, sound = set[int](), self._sound
        for record in records:  # no call for a record: a batch has many
            if record < 0:
                found.append(None)
                continue
            one = prepared.get(record) or ahead.get(record) or kept.get(numbers.get(record, -1))
            if one is None:
                raise DatabaseError("a record was dropped since it was found.", "a larger max_bytes, if it is often")
            segment = one.segment
            if segment.address not in segments:
                segment.check_whole()  # before anything of it is read: a page that is cut off ends the process
                segments.add(segment.address)
            if sound.get(record) != segment.number:
                self._check(record, one)
            if segment.marks is not None:
                segment.marks[one.place] += 1
            found.append(one)
        return found

    def _check(self, record: int, kept: Kept) -> None:
        """Note that a record matches its checksum. DatabaseError: it does not, and is never found again."""
        if not kept.is_sound or kept.nbytes != self.layout.nbytes(len(kept.tokens)):
            if record in self.index:
                self.index.remove(record)  # the file is left to `attmemo check`
            number = kept.number
            self._tell(DAMAGED, f"record {number} is damaged and is not used; attmemo check lists all that are")
            raise DatabaseError(f"record {number} does not match its checksum.", "attmemo check")
        self._sound[record] = kept.segment.number

    def close(self) -> None:
        atexit.unregister(self._leave)
        self._filler.close()
        self.note()
        self.pool.close()
        self._prepared, self._sound = {}, {}
        self._work = None  # it leads to the packed weights, and these lead here

    def leave_to_parent(self) -> None:
        """In a forked child: threads are gone, and locks may be held by them."""
        self._anew = True
        self._worked = None  # no lock may be taken: a thread of the parent may hold it
        self.index.leave_to_parent()
        self.pool.leave_to_parent()
        self._filler.leave_to_parent()

    def _end(self) -> None:
        """At exit: what was handed over is stored, and the thread ends.

        A thread that is inside of the graph's C++ while the interpreter ends would abort the process.
        """
        self.flush(_AT_EXIT)
        self.note()
        self._filler.close()
