"""Records that lie in segments: what becomes one, where it lies, and what a change of a pool does to them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from attmemo.db.pools.segment import Bytes, Segment

Tokens = npt.NDArray[np.int32]


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
