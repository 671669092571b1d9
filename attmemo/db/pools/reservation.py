"""Room behind the published records of a segment that one process holds: it writes there without the lease."""

from __future__ import annotations

import os
import time
from typing import Final

import xxhash

from attmemo.db.files import write_all
from attmemo.db.pools.segment import BYTES_PER_MARK, Pause, Segment, pieces_of, rounded
from attmemo.db.records import Entry, Kept, Tail

UNNAMED: Final = -1
"""Number of a record that is not published yet."""


class Hold:
    """Room in a segment, and what was written there and is not published yet.

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
    end : Tail
        Where it ends.
    written : list of Kept
        Without numbers.
    is_short : bool
        Whether there was no room for a record.
    """

    def __init__(self, segment: Segment, begin: Tail, nbytes: int) -> None:
        assert segment.path is not None
        self.segment, self._next = segment, begin
        end = min(segment.nbytes, begin.end + nbytes)
        places = min(segment.room - begin.count, max(1, (end - begin.end) // BYTES_PER_MARK))
        self.end = Tail(max(end, begin.end), begin.count + max(places, 0))
        self.written: list[Kept] = []
        self.is_short = False
        self._fd = os.open(segment.path, os.O_WRONLY | os.O_CLOEXEC)  # the file may be another's when it is written

    @property
    def rest(self) -> Tail:
        """Where the room begins that nothing was written to."""
        return self._next

    def write(self, entry: Entry, pause: Pause) -> Kept | None:
        """Write a record. None: there is no room. OSError: the disk refuses."""
        if self._next.end + rounded(len(entry.body)) > self.end.end or self._next.count >= self.end.count:
            self.is_short = True
            return None
        body = entry.body
        offset, place = self._next.end, self._next.count
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
        self._next = Tail(offset + rounded(len(body)), place + 1)
        self.written.append(kept)
        return kept

    def close(self) -> None:
        """Doing so twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
