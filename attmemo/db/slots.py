"""Arena files: slots of one kind and one length, behind a header that binds the file to its database."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from attmemo.db.encodings import TYPES
from attmemo.db.files import ARENA, RESTORE
from attmemo.db.slot_kinds import SlotKind
from attmemo.errors import DatabaseCorruptError, DatabaseTruncatedError
from attmemo.mmap import CACHE_LINE, HUGE_PAGE, SlotLayout, round_up
from attmemo.system.json_fields import Field

MAGIC: Final = b"ATTMEMO1"
ARENA_VERSION: Final = 1  # of the file's header
HEADER_BYTES: Final = 512  # zeros, or a hole, follow up to the first slot
TIGHT: Final = 256 << 10  # bytes from which a slot of an 8-bit type begins at a page


@dataclass(frozen=True)
class SlotClass:
    """One arena file: slots of a kind and length. A record's slot of layer l is number ``place * kind.layers + l``."""

    kind: SlotKind
    length: int
    stride: int
    header: int
    places: int

    @property
    def name(self) -> str:
        return f"{self.kind.name}-{self.length:05d}"

    @property
    def file(self) -> str:
        return f"{ARENA}/{self.name}.slots"

    @property
    def slots(self) -> int:
        return self.places * self.kind.layers

    @property
    def file_bytes(self) -> int:
        """Bytes that the file must have, as its layout says: a builder adds those of all files with each record."""
        return self.header + self.slots * self.stride

    @property
    def layout(self) -> SlotLayout:
        dtype = TYPES[self.kind.dtype]
        return SlotLayout(self.kind.shape_for(self.length), dtype, self.stride, self.header, self.slots)

    @classmethod
    def make(cls, kind: SlotKind, length: int) -> SlotClass:
        """An empty class with the smallest stride that its readers can use.

        Small slots in 8 bits are multiplied where they lie and never mapped one by one: rounded up to a page, short
        sequences would take a twentieth more. Others begin at a page, those of 2 MiB and more at a multiple of 2 MiB:
        some file systems then give huge pages by themselves.
        """
        make = SlotLayout.packed if _is_tight(kind, length) else SlotLayout.paged
        header = HUGE_PAGE if kind.nbytes(length) >= HUGE_PAGE else 1
        layout = make(kind.shape_for(length), TYPES[kind.dtype], header=header)
        return cls(kind, length, layout.stride, layout.header, 0)

    @classmethod
    def read(cls, field: Field, kind: SlotKind, length: int, places: int, page: int) -> SlotClass:
        """Read stride and header of a class. A wrong stride would read the bytes of one slot as another's."""
        wanted = round_up(kind.nbytes(length), CACHE_LINE if _is_tight(kind, length) else page)
        stride, header = field["stride"].integer(), field["header"].integer(page, max(page, HUGE_PAGE))
        if stride != wanted:
            field["stride"].refuse(str(wanted))
        if header % page:
            field["header"].refuse(f"a multiple of {page}")
        if header + stride * places * kind.layers > 1 << 56:
            field.refuse(f"an arena that a disk can hold, not {places} places of {stride} bytes")
        return cls(kind, length, stride, header, places)


def _is_tight(kind: SlotKind, length: int) -> bool:
    """Whether slots need not begin at a page: they have few bytes each, and are never mapped one by one."""
    return TYPES[kind.dtype].itemsize == 1 and kind.nbytes(length) < TIGHT


def arena_header(uuid: str, found: SlotClass) -> bytes:
    """The first bytes of an arena file: they bind it to its database and class, against swapped files."""
    name = found.name.encode()
    body = MAGIC + struct.pack("<II", ARENA_VERSION, len(name)) + bytes.fromhex(uuid) + name
    return (body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))).ljust(HEADER_BYTES, b"\0")


def check_arena(path: Path, uuid: str, found: SlotClass) -> None:
    """Check that the arena file of a slot class is there, long enough, and of this database."""
    file = path / found.file
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header = stream.read(HEADER_BYTES)
    except OSError as error:
        raise DatabaseCorruptError(f"{file} cannot be read: {error.strerror}.", RESTORE) from error
    if size < found.file_bytes:
        least = f"at least {found.file_bytes} ({found.slots} slots of {found.stride} bytes)"
        raise DatabaseTruncatedError(f"{file} is {size} bytes long, the manifest says {least}.", RESTORE)
    if header != arena_header(uuid, found):
        what = f"{file} does not begin with the header of slot class {found.name} of this database."
        raise DatabaseCorruptError(what, RESTORE)


def slot_checksum(uuid: str, name: str, slot: int, payload: Any) -> int:
    """Checksum of a slot's bytes, bound to where they lie: a slot copied to another place does not verify."""
    seed = xxhash.xxh3_64_intdigest(f"{uuid}/{name}/{slot}".encode())
    return xxhash.xxh3_64_intdigest(payload, seed=seed)
