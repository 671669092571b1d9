"""A pool: records that come and go within a bound of bytes.

    new records ──► the newest segment ──► …older segments… ──► the oldest segment: used records are carried to the
                                                               newest one, the others go with the segment

A record that was used since it was written outlives its segment; one that was not is dropped with it. This is FIFO
with reinsertion (the CLOCK of operating systems), at the grain of segments: bytes are given back by whole files, and
no byte that a reader may look at is ever written again. See docs/filling.md for what other policies keep.

A pool of this class lies in memory. `attmemo.db.shared_pool` keeps one in a folder, for many processes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from attmemo.db.history import History, Work
from attmemo.db.segment import Bytes, Pause, Segment, bytes_for, no_pause, rounded

Tokens = npt.NDArray[np.int32]

SEGMENTS: Final = 32
"""Segments that a full pool has, if no record is larger than one."""
LARGEST: Final = 32 << 20
"""Most bytes of a segment of usual records."""
MOST_SEGMENTS: Final = 256
"""Segments of a large pool: each is an open file. Only a pool above 256 GiB has more."""
HUGE: Final = 1 << 30
"""Most bytes of a segment of usual records in a large pool."""
CARRIED: Final = 0.5
"""Share of a segment that records of the segment it replaces may take."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What becomes a record.

    Parameters
    ----------
    tokens : int32 [n]
    body : uint8 [bytes]
        What the record keeps, opaque to the pool.
    note : bytes
        A few bytes more that readers hold in memory.
    made : float, optional
        When it was computed, seconds of the Unix epoch; now, by default.
    carried : int
        Uses in another pool.
    """

    tokens: Tokens
    body: Bytes
    note: bytes = b""
    made: float | None = None
    carried: int = 0


class Kept(NamedTuple):  # a frozen dataclass takes five times as long to make, and a pool has 100,000
    """A record, and where it lies."""

    number: int
    tokens: Tokens
    segment: Segment
    place: int  # among the records of the segment
    offset: int
    nbytes: int
    checksum: int
    made: float  # seconds of the Unix epoch
    carried: int  # uses before it was carried to this place
    note: bytes

    @property
    def address(self) -> int:
        """Where its bytes begin in memory, valid as long as the segment is held."""
        return self.segment.address + self.offset

    @property
    def hits(self) -> int:
        """How often it was used."""
        return self.carried + self.segment.hits(self.place)

    @property
    def body(self) -> Bytes:
        """Its bytes, where they lie."""
        return self.segment.bytes_at(self.offset, self.nbytes)

    @property
    def is_sound(self) -> bool:
        """Whether its bytes are those that were written."""
        return checksum_of(self.body) == self.checksum


def checksum_of(body: Bytes) -> int:
    """XXH3-64 of the bytes of a record."""
    return xxhash.xxh3_64_intdigest(body.data)


@dataclass
class News:
    """What changed in a pool: records that came, and numbers of those that went."""

    added: list[Kept] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.added or self.removed)

    def __iadd__(self, later: News) -> News:
        """Both, one behind the other: what came and went is neither."""
        gone = set(later.removed)
        came = {kept.number for kept in self.added}
        self.added = [kept for kept in self.added if kept.number not in gone] + later.added
        self.removed += [number for number in later.removed if number not in came]
        return self


@dataclass(frozen=True, slots=True)
class Tail:
    """How far a segment is filled."""

    end: int  # bytes
    count: int  # records, also those that are gone


@dataclass
class Draft:
    """Changes of a pool that are not published yet."""

    next: int  # number of the next record
    next_segment: int
    segments: dict[int, Segment]
    tails: dict[int, Tail]
    kept: dict[int, Kept] = field(default_factory=dict)  # added, or carried to another place
    removed: set[int] = field(default_factory=set)
    touched: set[int] = field(default_factory=set)  # segments that were written to
    made: set[int] = field(default_factory=set)  # segments, also those that are gone again
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments.values())


class Pool:
    """Records in memory. One thread writes; any number of threads read `records` meanwhile.

    Parameters
    ----------
    max_bytes : int
        Most bytes of all segments. A record that is larger than a usual segment may take its own bytes more while it
        is added.

    Attributes
    ----------
    records : dict of int to Kept
        By number. Numbers rise, and none is used twice.
    counts : dict of str to int
        Records since the pool was made, by what became of them: ``added``, ``evicted``, ``carried`` (to another
        segment), ``forgotten``; of those evicted, ``evicted_used``: they were used, but less than others that were
        carried, and ``evicted_anew``: there was no room for them when the pool was written anew.
    history : History
        What requests cost.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.records: dict[int, Kept] = {}
        self._segments: dict[int, Segment] = {}  # oldest first
        self._tails: dict[int, Tail] = {}
        self._next = self._next_segment = 0
        self._known = News()  # what is still to be told
        self.counts: dict[str, int] = {}
        self.history = History()

    def __len__(self) -> int:
        return len(self.records)

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.nbytes for segment in list(self._segments.values()))

    @property
    def has_room(self) -> bool:
        """Whether another segment, as large as the newest, can be made and nothing has to go."""
        sizes = [segment.nbytes for segment in list(self._segments.values())]  # oldest first
        return sum(sizes) + max([self.usual, *sizes[-1:]]) <= self._bound

    @property
    def _bound(self) -> int:
        """Most bytes before a record goes. What is carried is copied before its segment goes: that takes room."""
        return self.max_bytes - self.usual if self.max_bytes >= 4 * self.usual else self.max_bytes

    @property
    def segments(self) -> int:
        """How many segments there are."""
        return len(self._segments)

    @property
    def usual(self) -> int:
        """Bytes of a segment, if no record needs more."""
        most = max(LARGEST, min(self.max_bytes // MOST_SEGMENTS, HUGE))
        return max(1 << 14, min(self.max_bytes // SEGMENTS, most) & ~4095)

    def news(self) -> News:
        """What has changed since it was told last; what is new can be read from now on."""
        found, self._known = self._known, News()
        return found

    def note(self, work: Work) -> None:
        """What requests did since the last call."""
        self.history.add(time.time(), work)

    def add(self, entries: Sequence[Entry], pause: Pause = no_pause) -> News:
        """Keep these; what has to go for them goes. An entry that is larger than the pool is left out.

        `pause` is called between pieces of what is written to memory. DatabaseError: there is no room on the disk, or
        another process writes; `news` tells what was kept before.
        """

        for part in self._parts(entries):
            self._change(partial(self._put, part, pause))
        return self.news()

    def write(self, entry: Entry, pause: Pause = no_pause) -> Kept | None:
        """Write a record that `add` publishes later, also an `add` of nothing. None: only `add` can keep it.

        Until then the record has no number, and only this process can read it. `pause` is called between pieces.
        """
        del entry, pause
        return None  # in memory nothing is saved by this

    def fits(self, nbytes: int) -> bool:
        """Whether a record of so many bytes can be kept at all."""
        return bytes_for(rounded(nbytes), self.usual) <= self.max_bytes

    def _parts(self, entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
        """Entries, a segment's worth at a time: until a change is published, what goes for it is still there."""
        first = nbytes = 0
        for place, entry in enumerate(entries):
            if place > first and nbytes + len(entry.body) > self.usual:
                yield entries[first:place]
                first, nbytes = place, 0
            nbytes += rounded(len(entry.body))
        yield entries[first:]

    def remove(self, numbers: Iterable[int]) -> News:
        """Forget records, and write what else is in their segments to new ones: none of their bytes is left."""
        gone = set(numbers)

        def forget(draft: Draft) -> None:
            found = gone & self.records.keys()
            draft.removed |= found
            draft.counts["forgotten"] += len(found)
            self._rewrite(draft, {self.records[number].segment.number for number in found})

        self._change(forget)
        return self.news()

    def rewrite(self) -> News:
        """Write all records to new segments, one behind the other, and drop the old ones."""
        self._change(lambda draft: self._rewrite(draft, set(draft.segments)))
        return self.news()

    def close(self) -> None:
        """Give everything back; what is still read stays until it is read."""
        self.records, self._segments, self._tails = {}, {}, {}

    def leave_to_parent(self) -> None:
        """In a forked child: what the parent's pool writes from now on is not seen here."""

    # ---- drafts ----

    def _change(self, make: Callable[[Draft], object]) -> None:
        """Make a draft and publish it."""
        draft = self._draft()
        make(draft)
        self._known += self._apply(draft)

    def _draft(self) -> Draft:
        return Draft(self._next, self._next_segment, dict(self._segments), dict(self._tails))

    def _put(self, entries: Sequence[Entry], pause: Pause, draft: Draft) -> None:
        for entry in entries:
            if not self.fits(len(entry.body)):
                continue
            segment, place, offset = self._room(draft, len(entry.body))
            body, checksum, nbytes = entry.body, checksum_of(entry.body), len(entry.body)
            made = time.time() if entry.made is None else entry.made
            kept = Kept(
                draft.next, entry.tokens, segment, place, offset, nbytes, checksum, made, entry.carried, entry.note
            )  # fmt: skip
            self._write(draft, kept, body, pause)
            draft.next += 1
            draft.counts["added"] += 1

    def _rewrite(self, draft: Draft, segments: set[int]) -> None:
        old = [draft.segments.pop(number) for number in sorted(segments)]
        for segment in old:
            del draft.tails[segment.number]
        for segment in old:
            for kept in sorted(self._in(segment, draft), key=lambda kept: kept.number):
                if segment.is_whole:
                    self._carry(draft, kept)
                else:
                    draft.removed.add(kept.number)
        while draft.nbytes > self.max_bytes and len(draft.segments) > 1:  # records lie otherwise than before
            for kept in self._evict(draft):
                draft.removed.add(kept.number)
                draft.counts.update(("evicted", "evicted_anew"))

    def _carry(self, draft: Draft, kept: Kept) -> None:
        """Copy a record to the newest segment."""
        segment, place, offset = self._room(draft, kept.nbytes, evicting=False)
        self._write(draft, kept._replace(segment=segment, place=place, offset=offset, carried=kept.hits), kept.body)

    def _write(self, draft: Draft, kept: Kept, body: Bytes, pause: Pause = no_pause) -> None:
        kept.segment.write(kept.offset, body, pause)
        draft.kept[kept.number] = kept
        draft.tails[kept.segment.number] = Tail(kept.offset + rounded(kept.nbytes), kept.place + 1)
        draft.touched.add(kept.segment.number)

    def _room(self, draft: Draft, nbytes: int, *, evicting: bool = True) -> tuple[Segment, int, int]:
        """Where a record of so many bytes goes: its segment, its place there, and its offset."""
        if draft.segments:
            newest = draft.segments[max(draft.segments)]
            tail = draft.tails[newest.number]
            if tail.end + nbytes <= newest.nbytes and tail.count < newest.room:
                return newest, tail.count, tail.end
        size, used = bytes_for(rounded(nbytes), self.usual), []
        bound = self._bound
        while evicting and draft.segments and draft.nbytes + size > max(bound, size):
            used += self._evict(draft)
        segment = self._segment(draft.next_segment, size)
        draft.made.add(draft.next_segment)
        draft.next_segment += 1
        draft.segments[segment.number] = segment
        draft.tails[segment.number] = Tail(segment.start, 0)
        draft.touched.add(segment.number)
        room = CARRIED * (size - segment.start) if bound < self.max_bytes else 0.0
        for kept in sorted(used, key=lambda kept: -kept.hits):
            room -= rounded(kept.nbytes)
            if room < 0:
                draft.removed.add(kept.number)
                draft.counts.update(("evicted", "evicted_used"))
            else:
                self._carry(draft, kept)
                draft.counts["carried"] += 1
        tail = draft.tails[segment.number]
        if tail.end + nbytes > size or tail.count >= segment.room:  # a record as large as its segment
            return self._room(draft, nbytes, evicting=evicting)
        return segment, tail.count, tail.end

    def _evict(self, draft: Draft) -> list[Kept]:
        """Drop the oldest segment, and return those of its records that were used since they were written."""
        oldest = draft.segments.pop(min(draft.segments))
        del draft.tails[oldest.number]
        self._discard(draft, oldest)
        used = []
        for kept in self._in(oldest, draft):
            if oldest.is_whole and oldest.hits(kept.place):
                used.append(kept)
            else:
                draft.removed.add(kept.number)
                draft.counts["evicted"] += 1
        return used

    def _in(self, segment: Segment, draft: Draft) -> list[Kept]:
        """Records of a segment, as the draft has them."""
        every: Mapping[int, Kept] = self.records | draft.kept
        return [
            kept for kept in every.values() if kept.segment is segment and kept.number not in draft.removed
        ]  # fmt: skip

    def _discard(self, draft: Draft, segment: Segment) -> None:
        """A segment has left a draft."""

    def _segment(self, number: int, nbytes: int) -> Segment:
        return Segment.in_memory(number, nbytes)

    def _apply(self, draft: Draft) -> News:
        """Publish a draft: readers see it from now on."""
        added = [kept for number, kept in draft.kept.items() if number >= self._next and number not in draft.removed]
        removed = [number for number in draft.removed if number in self.records]
        for number, kept in draft.kept.items():
            if number not in draft.removed:
                self.records[number] = kept
        for number in removed:
            del self.records[number]
        self.counts = dict(Counter(self.counts) + draft.counts)
        self._segments, self._tails = draft.segments, draft.tails
        self._next, self._next_segment = draft.next, draft.next_segment
        return News(added, removed)
