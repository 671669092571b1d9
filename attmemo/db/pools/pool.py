"""A pool: records that come and go within a bound of bytes.

    new records ──► the newest segment ──► …older segments… ──► the oldest segment: used records are carried to the
                                                               newest one, the others go with the segment

A record that was used since it was written outlives its segment; one that was not is dropped with it. This is FIFO
with reinsertion (the CLOCK of operating systems), at the grain of segments: bytes are given back by whole files, and
no byte that a reader may look at is ever written again. See docs/filling.md for what other policies keep.

A pool of this class lies in memory. `attmemo.db.pools.shared_pool` keeps one in a folder, for many processes.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Final

from attmemo.db.pools.history import Work
from attmemo.db.pools.segment import Bytes, Pause, Segment, bytes_for, no_pause, packed, rounded
from attmemo.db.records import Draft, Entry, Kept, News, Tail, checksum_of
from attmemo.errors import StorageFullError

SEGMENTS: Final = 32
"""Segments that a full pool has, if no record is larger than one."""
LARGEST: Final = 32 << 20
"""Most bytes of a segment of usual records."""
MOST_SEGMENTS: Final = 256
"""Segments of a large pool: each is an open file. Only a pool above 256 GiB has more."""
HUGE: Final = 1 << 30
"""Most bytes of a segment of usual records in a large pool."""
CARRIED: Final = 0.5
"""Share of a segment, of its bytes and of its places, that records of the segment it replaces may take."""
SPARSE: Final = 0.25
"""Share of a segment that must be given back for its records to be written anew, where a pool is above its bound."""


class Pool:
    """Records in memory. One thread writes; any number of threads read `records` meanwhile.

    Parameters
    ----------
    max_bytes : int or None
        Most bytes of all segments. A record that is larger than a usual segment may take its own bytes more while it
        is added. None: all is kept, and new segments are no larger than what is written to them.

    Attributes
    ----------
    records : dict of int to Kept
        By number. Numbers rise, and none is used twice.
    counts : dict of str to int
        Records since the pool was made, by what became of them: ``added``, ``evicted``, ``carried`` (to another
        segment), ``forgotten``, ``damaged`` (with their segment); of those evicted, ``evicted_used``: they were used,
        but less than others that were carried.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self._usual = LARGEST  # of the process that filled last, where this one has no bound
        self.records: dict[int, Kept] = {}
        self._segments: dict[int, Segment] = {}  # oldest first
        self._tails: dict[int, Tail] = {}
        self._next = self._next_segment = 0
        self._known = News()  # what is still to be told
        self.counts: dict[str, int] = {}

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
    def _bound(self) -> float:
        """Most bytes before a record goes. What is carried is copied before its segment goes: that takes room."""
        if self.max_bytes is None:
            return math.inf
        return self.max_bytes - self.usual if self._carries else self.max_bytes

    @property
    def _carries(self) -> bool:
        """Whether used records outlive their segment."""
        return self.max_bytes is not None and self.max_bytes >= 4 * self.usual

    @property
    def segments(self) -> int:
        """How many segments there are."""
        return len(self._segments)

    @property
    def usual(self) -> int:
        """Bytes of a segment, if no record needs more."""
        if self.max_bytes is None:
            return self._usual
        return max(1 << 14, min(self.max_bytes // SEGMENTS, usual_for(self.max_bytes)) & ~4095)

    def expect(self, nbytes: int) -> None:
        """Say how many bytes there will be where there is no bound: segments of a large pool are larger."""
        self._usual = max(self._usual, usual_for(nbytes))

    def news(self) -> News:
        """What has changed since it was told last; what is new can be read from now on."""
        found, self._known = self._known, News()
        return found

    def note(self, work: Work) -> None:
        """What requests did since the last call; in memory it is not kept."""

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
        return self.max_bytes is None or bytes_for(rounded(nbytes), self.usual) <= self.max_bytes

    def _parts(self, entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
        """Entries, a segment's worth at a time: until a change is published, what goes for it is still there."""
        first = nbytes = 0
        if self.max_bytes is None:
            for count, _ in packed((len(entry.body) for entry in entries), self.usual):
                yield entries[first : first + count]
                first += count
            return
        for place, entry in enumerate(entries):
            if place > first and nbytes + len(entry.body) > self.usual:
                yield entries[first:place]
                first, nbytes = place, 0
            nbytes += rounded(len(entry.body))
        yield entries[first:]

    def remove(self, numbers: Iterable[int]) -> News:
        """Forget records, and write what else is in their segments to new ones: none of their bytes is left.

        The pool is never larger afterwards; nor is it after `rewrite` and `trim`.
        """
        gone = set(numbers)

        def forget(draft: Draft) -> None:
            found = gone & self.records.keys()
            draft.removed |= found
            draft.counts["forgotten"] += len(found)
            segments = {self.records[number].segment.number for number in found}
            self._replace(draft, segments, self._without_gaps(draft, segments))

        self._change(forget)
        return self.news()

    def rewrite(self) -> News:
        """Write all records to new segments, one behind the other, if that takes fewer bytes."""

        def anew(draft: Draft) -> None:
            plan = self._without_gaps(draft, set(draft.segments))
            if sum(nbytes for _, nbytes in plan) < draft.nbytes:
                self._replace(draft, set(draft.segments), plan)

        self._change(anew)
        return self.news()

    def trim(self) -> None:
        """Bring the pool within its bound, if it takes more bytes. `news` tells what went.

        What lies in segments with much room to spare is written anew. If that is not enough, the oldest records go, as
        they do for new ones.
        """
        if self.max_bytes is not None and self.nbytes > self.max_bytes:
            try:
                self._change(partial(self._trim, self.max_bytes))
            except StorageFullError:  # there is no room to write anything anew
                self._change(lambda draft: self._start(draft, 0))

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
        for number, entry in enumerate(entries):
            if not self.fits(len(entry.body)):
                continue
            following = (len(one.body) for one in islice(entries, number, None))
            segment, place, offset = self._room(draft, len(entry.body), following)
            body, checksum, nbytes = entry.body, checksum_of(entry.body), len(entry.body)
            made = time.time() if entry.made is None else entry.made
            kept = Kept(
                draft.next, entry.tokens, segment, place, offset, nbytes, checksum, made, entry.carried, entry.note
            )  # fmt: skip
            self._write(draft, kept, body, pause)
            draft.next += 1
            draft.counts["added"] += 1

    def _without_gaps(self, draft: Draft, segments: set[int]) -> list[tuple[list[Kept], int]]:
        """How records of these segments can be written anew: what goes to each new segment, and its bytes.

        One behind the other, in segments of the usual size. If this takes more bytes than now, each to its own.
        """
        every = self._by_segment(draft)
        groups = [every.get(number, []) for number in sorted(segments) if draft.segments[number].is_whole]
        found = _grouped([list(chain.from_iterable(groups))], self.usual)
        if sum(nbytes for _, nbytes in found) > sum(draft.segments[number].nbytes for number in segments):
            found = _grouped(groups, sys.maxsize)
        return found

    def _replace(self, draft: Draft, segments: set[int], plan: list[tuple[list[Kept], int]]) -> None:
        """Write records anew as planned, in place of these segments. What cannot be read is dropped."""
        every = self._by_segment(draft)
        for number in segments:
            old = draft.segments.pop(number)
            del draft.tails[number]
            if not old.is_whole:
                draft.removed.update(kept.number for kept in every.get(number, []))
        for records, nbytes in plan:
            self._begin(draft, nbytes)
            for kept in records:
                self._carry(draft, kept)

    def _trim(self, bound: int, draft: Draft) -> None:
        every, spare = self._by_segment(draft), dict[int, int]()
        for number, segment in draft.segments.items():
            needed = sum(nbytes for _, nbytes in _grouped([every.get(number, [])], self.usual))
            if needed <= (1.0 - SPARSE) * segment.nbytes:
                spare[number] = segment.nbytes - needed
        sparse: set[int] = set()
        for number in sorted(spare, key=lambda number: -spare[number]):
            if draft.nbytes - sum(spare[one] for one in sparse) > bound:
                sparse.add(number)
        self._replace(draft, sparse, self._without_gaps(draft, sparse))
        if draft.nbytes > bound:
            self._start(draft, self.usual if self.usual <= bound else 0)

    def _carry(self, draft: Draft, kept: Kept) -> None:
        """Copy a record to the newest segment, which has room for it."""
        segment = draft.segments[max(draft.segments)]
        tail = draft.tails[segment.number]
        place = kept._replace(segment=segment, place=tail.count, offset=tail.end, carried=kept.hits)
        self._write(draft, place, kept.body)

    def _write(self, draft: Draft, kept: Kept, body: Bytes, pause: Pause = no_pause) -> None:
        kept.segment.write(kept.offset, body, pause)
        draft.kept[kept.number] = kept
        draft.tails[kept.segment.number] = Tail(kept.offset + rounded(kept.nbytes), kept.place + 1)
        draft.touched.add(kept.segment.number)

    def _room(self, draft: Draft, nbytes: int, following: Iterable[int]) -> tuple[Segment, int, int]:
        """Where a record of so many bytes goes: its segment, its place there, and its offset.

        `following`: the bytes of this record and of those that are added behind it.
        """
        while True:
            if draft.segments:
                newest = draft.segments[max(draft.segments)]
                tail = draft.tails[newest.number]
                if tail.end + nbytes <= newest.nbytes and tail.count < newest.room:
                    return newest, tail.count, tail.end
            if self.max_bytes is None:
                self._begin(draft, next(packed(following, self.usual))[1])
            else:
                self._start(draft, bytes_for(rounded(nbytes), self.usual))  # what is carried may take all of it

    def _start(self, draft: Draft, size: int) -> None:
        """Make a segment of so many bytes, if any, and carry to it what was used of what goes for it."""
        used = []
        while draft.segments and draft.nbytes + size > max(self._bound, size):
            used += self._evict(draft)
        room = places = 0.0
        if size:
            segment = self._begin(draft, size)
            if self._carries:
                room, places = CARRIED * (size - segment.start), CARRIED * segment.room
        for kept in sorted(used, key=lambda kept: -kept.hits):
            room, places = room - rounded(kept.nbytes), places - 1
            if room < 0 or places < 0:
                draft.removed.add(kept.number)
                draft.counts.update(("evicted", "evicted_used"))
            else:
                self._carry(draft, kept)
                draft.counts["carried"] += 1

    def _begin(self, draft: Draft, size: int) -> Segment:
        """Make a segment: the newest."""
        segment = self._segment(draft.next_segment, size)
        draft.made.add(draft.next_segment)
        draft.next_segment += 1
        draft.segments[segment.number] = segment
        draft.tails[segment.number] = Tail(segment.start, 0)
        draft.touched.add(segment.number)
        return segment

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

    def _by_segment(self, draft: Draft) -> dict[int, list[Kept]]:
        """Records as the draft has them, by the number of their segment, those with the lowest numbers first."""
        every = self.records | draft.kept
        found: dict[int, list[Kept]] = {}
        for number in sorted(every.keys() - draft.removed):
            found.setdefault(every[number].segment.number, []).append(every[number])
        return found

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


def usual_for(nbytes: int) -> int:
    """Most bytes of a segment of usual records in a pool of so many bytes."""
    return max(LARGEST, min(nbytes // MOST_SEGMENTS, HUGE)) & ~4095


def _grouped(groups: Iterable[list[Kept]], most: int) -> list[tuple[list[Kept], int]]:
    """Records of each group by the segment that they go to, of so many bytes at most; and the bytes of each."""
    found = []
    for group in groups:
        first = 0
        for count, nbytes in packed((kept.nbytes for kept in group), most):
            found.append((group[first : first + count], nbytes))
            first += count
    return found
