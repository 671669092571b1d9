"""Entries of the catalogue of a pool: what keys and values say, each value behind its checksum."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from attmemo.db.files import ANEW
from attmemo.db.pools.history import History
from attmemo.db.pools.segment import Segment
from attmemo.db.records import Kept
from attmemo.errors import DatabaseCorruptError

META: Final = b"m"
HISTORY: Final = b"h"
LOG: Final = b"l"
RECORDS: Final = b"r"
SEGMENT_ENTRIES: Final = b"s"

_NUMBER = struct.Struct(">Q")
_PLACE = struct.Struct(">QI")  # segment, place: the key of a record
_RECORD = struct.Struct("<QQQQdQI")  # number, offset, bytes, checksum, made, carried, bytes of the note


class Entries:
    """Reads the entries of one catalogue, in transactions of LMDB.

    Parameters
    ----------
    path : Path
        Of the catalogue.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, transaction: Any, key: bytes) -> bytes | None:
        """A value; DatabaseCorruptError, as below."""
        raw = transaction.get(key)
        return None if raw is None else self._unsealed(key, raw)

    def all(self, transaction: Any, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values with a prefix."""
        cursor = transaction.cursor()
        for key, raw in cursor if cursor.set_range(prefix) else ():
            if not key.startswith(prefix):
                return
            yield key, self._unsealed(key, raw)

    def record(self, key: bytes, raw: bytes, segments: Mapping[int, Segment]) -> Kept:
        """The record that an entry is of."""
        number, offset, nbytes, checksum, made, carried, noted = _RECORD.unpack_from(raw)
        segment_number, place = place_of(key)
        segment = segments.get(segment_number)
        if segment is None or offset < segment.start or offset + nbytes > segment.nbytes or place >= segment.room:
            raise self.corrupt(f"record {number} lies outside of segment {segment_number}")
        note = raw[_RECORD.size : _RECORD.size + noted]
        tokens = np.frombuffer(raw[_RECORD.size + noted :], np.int32)
        return Kept(number, tokens, segment, place, offset, nbytes, checksum, made, carried, note)

    def changes(self, transaction: Any, first: int, last: int) -> list[tuple[Any, Any, Any]] | None:
        """Changes with these numbers: records added, moved and removed. None: the log does not reach back so far."""
        found = []
        for number in range(first, last + 1):
            raw = self.get(transaction, numbered(LOG, number))
            if raw is None:
                return None
            found.append(tuple(json.loads(raw)))
        return found

    def history(self, transaction: Any) -> History:
        """What requests cost."""
        raw = self.get(transaction, HISTORY)
        try:
            return History() if raw is None else History.of(json.loads(raw))
        except (ValueError, TypeError, KeyError):  # of another version: no reason to keep nothing
            return History()

    def corrupt(self, why: str) -> DatabaseCorruptError:
        """The error that says what is wrong."""
        return DatabaseCorruptError(f"{self._path}: {why}.", ANEW)

    def _unsealed(self, key: bytes, raw: bytes) -> bytes:
        """A value without its checksum. DatabaseCorruptError: the checksum does not fit."""
        value = raw[_NUMBER.size :]
        if not raw.startswith(_checksum(key, value)):
            raise self.corrupt(f"the entry {key!r} does not match its checksum")
        return value


def put(transaction: Any, key: bytes, value: bytes) -> None:
    """Store a value behind its checksum."""
    transaction.put(key, _checksum(key, value) + value)


def numbered(prefix: bytes, number: int) -> bytes:
    """The key of a segment, or of a batch of changes."""
    return prefix + _NUMBER.pack(number)


def number_of(key: bytes) -> int:
    """The number in such a key."""
    (number,) = _NUMBER.unpack_from(key, 1)
    return int(number)


def record_key(segment: int, place: int) -> bytes:
    """The key of the record at a place of a segment."""
    return RECORDS + _PLACE.pack(segment, place)


def place_of(key: bytes) -> tuple[int, int]:
    """Segment and place of the record with this key."""
    segment, place = _PLACE.unpack_from(key, len(RECORDS))
    return segment, place


def record_value(kept: Kept) -> bytes:
    """The value of a record."""
    head = _RECORD.pack(
        kept.number, kept.offset, kept.nbytes, kept.checksum, kept.made, kept.carried, len(kept.note)
    )  # fmt: skip
    return head + kept.note + kept.tokens.tobytes()


def _checksum(key: bytes, value: bytes) -> bytes:
    return xxhash.xxh3_64_digest(key + value)
