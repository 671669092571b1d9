"""What a process writes before it publishes.

With the transaction that publishes what was written before, a process takes room for what comes next (`Hold`). So
bytes go to the file as they come, a little at a time, and what is left to do under the lease is short. Other processes
write behind the room. The room is given back with the next transaction if nothing lies behind it.

A process that is killed leaves its room unused. The next one that fills while no other does takes the room back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import xxhash

from attmemo.db.files import write_all
from attmemo.db.pools.fill_lock import Presence
from attmemo.db.pools.segment import BYTES_PER_MARK, Pause, Segment, pieces_of, rounded
from attmemo.db.records import Draft, Entry, Kept, Tail

UNNAMED: Final = -1
"""Number of a record that is not published yet."""


class Hold:
    """Room behind the published records of a segment, and what was written there without the lease.

    Parameters
    ----------
    segment : Segment
        With a file.
    begin : Tail
        Where the room begins.
    nbytes : int
        How much of it, at most.

    Attributes
    ----------
    rest : Tail
        Where the room begins that nothing was written to.
    end : Tail
        Where it ends.
    written : list of Kept
        Without numbers.
    is_short : bool
        Whether there was no room for a record.
    """

    def __init__(self, segment: Segment, begin: Tail, nbytes: int) -> None:
        assert segment.path is not None
        self.segment, self.rest = segment, begin
        end = min(segment.nbytes, begin.end + nbytes)
        places = min(segment.room - begin.count, max(1, (end - begin.end) // BYTES_PER_MARK))
        self.end = Tail(max(end, begin.end), begin.count + max(places, 0))
        self.written: list[Kept] = []
        self.is_short = False
        self._fd = os.open(segment.path, os.O_WRONLY | os.O_CLOEXEC)  # the file may be another's when it is written

    def write(self, entry: Entry, pause: Pause) -> Kept | None:
        """Write a record. None: there is no room. OSError: the disk refuses."""
        if self.rest.end + rounded(len(entry.body)) > self.end.end or self.rest.count >= self.end.count:
            self.is_short = True
            return None
        body = entry.body
        offset, place = self.rest.end, self.rest.count
        checksum = xxhash.xxh3_64()  # as `checksum_of`, while the bytes are in the caches
        for at, piece in pieces_of(body, offset):
            write_all(self._fd, piece.data, at)
            checksum.update(piece.data)
            pause()
        if self.segment.marks is not None:
            self.segment.marks[place] = 0  # of a process that was killed before it published a record there
        made = time.time() if entry.made is None else entry.made
        kept = Kept(
            UNNAMED, entry.tokens, self.segment, place, offset, len(body), checksum.intdigest(), made,
            entry.carried, entry.note,
        )  # fmt: skip
        self.rest = Tail(offset + rounded(len(body)), place + 1)
        self.written.append(kept)
        return kept

    def close(self) -> None:
        """Doing so twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Ahead:
    """The room that a process holds in a folder. All but `write` is called under the lease.

    Parameters
    ----------
    path : Path
        Of the folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hold: Hold | None = None
        self._next: Hold | None = None  # of the transaction that is not done
        self._presence: Presence | None = None
        self._wanted = False

    def __bool__(self) -> bool:
        """Whether room is held."""
        return self._hold is not None

    def write(self, entry: Entry, pause: Pause) -> Kept | None:
        """Write a record; None: there is no room now. OSError: the disk refuses."""
        self._wanted = True
        return None if self._hold is None else self._hold.write(entry, pause)

    def enter(self, draft: Draft, records: Callable[[Segment, Draft], list[Kept]]) -> None:
        """Say that this process fills. Room that a killed one held is used again, if no other process fills.

        `records` are those of a segment.
        """
        if self._presence is not None:
            return
        with suppress(OSError):
            self._presence = Presence(self._path)
        if self._presence is not None and self._presence.alone and draft.segments:
            newest = draft.segments[max(draft.segments)]
            own = records(newest, draft)
            tail = Tail(
                max((kept.offset + rounded(kept.nbytes) for kept in own), default=newest.start),
                max((kept.place + 1 for kept in own), default=0),
            )
            if tail != draft.tails[newest.number]:
                draft.tails[newest.number] = tail
                draft.touched.add(newest.number)

    def name(self, draft: Draft) -> None:
        """Give numbers to what was written, and the rest of the room back, unless others wrote behind."""
        hold = self._next = self._hold
        if hold is None:
            return
        number = hold.segment.number
        if draft.segments.get(number) is not hold.segment:  # it went, and what was written with it
            self._next = None
            return
        for kept in hold.written:
            draft.kept[draft.next] = kept._replace(number=draft.next)
            draft.next += 1
            draft.counts["added"] += 1
            draft.touched.add(number)
        if draft.tails[number] == hold.end and number == max(draft.segments):
            draft.tails[number] = hold.rest
            draft.touched.add(number)
            self._next = None

    def take(self, draft: Draft, usual: int) -> None:
        """Take room for what is written next: what is still held, or all that is left of the newest segment.

        Less room would be full sooner, and each time a transaction follows.
        """
        hold = self._next
        if hold is not None and not hold.is_short and hold.segment.number in draft.segments:
            return
        self._next = None
        if not self._wanted or not draft.segments:
            return
        newest = draft.segments[max(draft.segments)]
        with suppress(OSError):  # too many files are open: everything is added under the lease
            self._next = Hold(newest, draft.tails[newest.number], usual)
            draft.tails[newest.number] = self._next.end
            draft.touched.add(newest.number)

    def publish(self) -> None:
        """The transaction is done."""
        if self._hold is not None:
            self._hold.written.clear()
            if self._hold is not self._next:
                self._hold.close()
        self._hold, self._next = self._next, None

    def lose(self) -> None:
        """The transaction failed. What was written is never published; its bytes stay: a request may read them."""
        if self._next is not None and self._next is not self._hold:
            self._next.close()
        self._next = None
        if self._hold is not None:
            self._hold.written.clear()

    def stop(self) -> None:
        """Take no more room from now on."""
        self._wanted = False

    def close(self) -> None:
        """Let go of all, without a transaction. Doing so twice is fine."""
        for one in (self._hold, self._presence):
            if one is not None:
                one.close()
        self._hold = self._presence = None
