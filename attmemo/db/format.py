"""The database directory's format: names, the manifest, and how both are checked.

    MANIFEST.json        the commit point: replaced by write-to-temporary, fsync, rename, fsync of the directory
    arena/*.slots        one file per slot class (kind, length): fixed-stride slots behind a one-page header
    catalogue/           LMDB: record -> length, provenance, and per kind and layer the slot and its checksum
    embedder-N.safetensors, index-N/    derived from the records; rebuilt by `attmemo train-embedder`

Published generations are immutable: a builder appends slots and catalogue entries beyond the manifest's counts and
then publishes new counts. Whatever lies beyond the counts is invisible and is overwritten by the next builder.
Every field read from a manifest is untrusted until `Manifest.parse` has looked at it. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import xxhash

from attmemo.db.forms import KIND_INPUT, KIND_MAP, STORAGE, TYPES, map_shape, type_of
from attmemo.errors import (
    DatabaseCorruptError,
    DatabaseError,
    DatabaseNotFoundError,
    DatabaseTruncatedError,
    FormatVersionError,
)
from attmemo.mmap import CACHE_LINE, HUGE_PAGE, SlotLayout, round_up

FORMAT: Final = "attmemo-database"
VERSION: Final = 1
MANIFEST: Final = "MANIFEST.json"
CATALOGUE: Final = "catalogue"
ARENA: Final = "arena"
LOCK: Final = "builder.lock"
KINDS: Final = (KIND_MAP, KIND_INPUT)
CAUSAL: Final = "causal"  # mask kind of a model whose maps are lower triangles
INPUTS: Final = ("all", "first")  # setting: the layers whose hidden states are kept
ARENA_MAGIC: Final = b"ATTMEMO1"
HEADER_BYTES: Final = 512  # of an arena file; zeros, or a hole, follow up to the first slot
TIGHT: Final = 256 << 10  # bytes below which padding a slot to a page is worth avoiding
MAX_MANIFEST_BYTES: Final = 256 << 20
SEQUENCE: Final = -1  # the "layer" of the once-per-sequence embedder and index


def is_tight(shape: tuple[int, ...], dtype: str) -> bool:
    """Whether slots like these need not begin at a page: bytes that are never mapped, and little of them."""
    return TYPES[dtype].itemsize == 1 and math.prod(shape) < TIGHT


@dataclass(frozen=True)
class SlotClass:
    """Slots of one kind and length: one arena file."""

    kind: str
    length: int
    shape: tuple[int, ...]
    dtype: str
    stride: int
    header: int
    slots: int

    @property
    def name(self) -> str:
        """Key of the class, and the stem of its file."""
        return f"{self.kind}-{self.length:05d}"

    @property
    def file(self) -> str:
        """Path inside the database directory."""
        return f"{ARENA}/{self.name}.slots"

    @property
    def layout(self) -> SlotLayout:
        """The same, as the mapping room understands it."""
        return SlotLayout(self.shape, TYPES[self.dtype], self.stride, self.header, self.slots)

    @classmethod
    def make(cls, kind: str, length: int, shape: tuple[int, ...], dtype: str) -> SlotClass:
        """An empty class with the smallest stride that its readers can use.

        Small slots in 8 bits are multiplied where they lie and never mapped one by one: rounded up to a page, short
        sequences would take a twentieth more. Others begin at a page, those of 2 MiB and more at a multiple of 2 MiB:
        some file systems then give huge pages by themselves. The header's unused part is a hole in the file.
        """
        tight = is_tight(shape, dtype)
        layout = (SlotLayout.packed if tight else SlotLayout.paged)(shape, TYPES[dtype], slots=0, header=1)
        if layout.nbytes >= HUGE_PAGE:
            layout = SlotLayout.paged(shape, TYPES[dtype], slots=0, header=HUGE_PAGE)
        return cls(kind, length, shape, dtype, layout.stride, layout.header, 0)


@dataclass(frozen=True)
class ModelInfo:
    """The model a database belongs to."""

    name: str
    family: str
    mask_kind: str
    layers: int
    heads: int
    hidden: int
    dtype: str
    max_length: int
    fingerprint: str
    fields: dict[str, str]
    tokenizer: str | None


@dataclass(frozen=True)
class Source:
    """One data file that was read, and how far."""

    name: str
    digest: str


@dataclass(frozen=True)
class FileRef:
    """A derived file and what it must contain."""

    file: str
    digest: str


@dataclass(frozen=True)
class EmbedderRef:
    """The trained embedder and its indexes; they cover the first `records` records."""

    weights: FileRef
    backend: str
    records: int
    indexes: dict[str, FileRef]  # layer number as text ("-1": once per sequence) -> container
    calibration: dict[str, Any]
    report: dict[str, Any]


@dataclass(frozen=True)
class Manifest:
    """Everything a reader needs to know before it opens another file."""

    uuid: str
    generation: int
    page_size: int
    model: ModelInfo
    storage: str
    records: int
    records_digest: str | None = None  # of the catalogue's entries; None: written before there was one, not checked
    classes: tuple[SlotClass, ...] = ()
    sources: tuple[Source, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    embedder: EmbedderRef | None = None
    profile: dict[str, Any] | None = None
    tuning: dict[str, Any] | None = None

    def layers_kept(self, kind: str) -> int:
        """Layers of which a record has a slot of this kind: the first so many."""
        return layers_kept(kind, self.model, self.settings)

    def slot_class(self, kind: str, length: int) -> SlotClass | None:
        """The class of a kind and length, or None if no such record is stored."""
        return next((c for c in self.classes if c.kind == kind and c.length == length), None)

    def dump(self) -> bytes:
        """The manifest as bytes, with its own checksum on the last line."""
        body = {"format": FORMAT, "version": VERSION} | asdict(self)
        text = json.dumps(body, indent=1, sort_keys=True, allow_nan=False)
        return f"{text}\n{_checksum(text)}\n".encode()

    @classmethod
    def parse(cls, raw: bytes, path: Path) -> Manifest:
        """Read and check a manifest.

        Raises
        ------
        FormatVersionError
            Another version of the format.
        DatabaseCorruptError
            Anything else that is not as `dump` writes it; the message names the first field that is wrong.
        """
        try:
            text, checksum, rest = raw.decode().rsplit("\n", 2)
        except ValueError as error:
            raise _corrupt(path, "not a manifest: no checksum line") from error
        if rest or checksum != _checksum(text):
            raise _corrupt(path, f"checksum {checksum[:16]!r}, expected {_checksum(text)}")
        try:
            body = json.loads(text, parse_constant=_not_a_number)
        except (ValueError, RecursionError) as error:
            raise _corrupt(path, f"not JSON: {error}") from error
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise _corrupt(path, "the field 'format' is missing or wrong")
        if body.get("version") != VERSION:
            raise FormatVersionError(
                f"{path} has format version {body.get('version')!r}; this attmemo reads version {VERSION}.",
                "build the database again with this version, or use the version that wrote it",
            )
        return _Parser(path).manifest(body)


class _Parser:
    """Turns parsed JSON into a `Manifest`, field by field, so that the first wrong one can be named."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, data: Any, key: str, kind: type | tuple[type, ...], where: str = "") -> Any:
        if not isinstance(data, Mapping) or key not in data:
            raise _corrupt(self.path, f"the field {where}{key} is missing")
        value = data[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise _corrupt(self.path, f"the field {where}{key} has the wrong type: {type(value).__name__}")
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:  # half a surrogate pair: JSON can escape it, no file name or terminal
                raise _corrupt(self.path, f"the field {where}{key} is not text: {error.reason}") from error
        return value

    def count(self, data: Any, key: str, where: str = "", low: int = 0, high: int = 1 << 48) -> int:
        value: int = self.get(data, key, int, where)
        if not low <= value <= high:
            raise _corrupt(self.path, f"the field {where}{key} is {value}, expected {low} to {high}")
        return value

    def choice(self, data: Any, key: str, allowed: Mapping[str, Any] | tuple[str, ...], where: str = "") -> str:
        value: str = self.get(data, key, str, where)
        if value not in allowed:
            raise _corrupt(self.path, f"the field {where}{key} is {value!r}, expected one of {', '.join(allowed)}")
        return value

    def manifest(self, body: dict[str, Any]) -> Manifest:
        model = self.model(self.get(body, "model", dict))
        storage = self.choice(body, "storage", STORAGE)
        page = self.count(body, "page_size", low=512, high=1 << 30)
        if page & (page - 1):
            raise _corrupt(self.path, f"the field page_size is {page}, not a power of two")
        uuid: str = self.get(body, "uuid", str)
        if not re.fullmatch("[0-9a-f]{32}", uuid):
            raise _corrupt(self.path, f"the field uuid is {uuid[:40]!r}, not 32 hexadecimal digits")
        records = self.count(body, "records", high=1 << 40)
        digest: str | None = None
        if body.get("records_digest") is not None:
            digest = self.get(body, "records_digest", str)
            if not re.fullmatch("([0-9a-f]{32})?", digest):
                raise _corrupt(self.path, f"the field records_digest is {digest[:40]!r}, not a digest")
        classes = tuple(self.slot_class(entry, model, storage, page) for entry in self.get(body, "classes", list))
        if len({c.name for c in classes}) != len(classes):
            raise _corrupt(self.path, "two slot classes have the same kind and length")
        settings: dict[str, Any] = self.get(body, "settings", dict)
        if settings.get("inputs", "all") not in INPUTS:
            raise _corrupt(self.path, f"the field settings.inputs is {settings['inputs']!r}, expected one of {INPUTS}")
        for kind in KINDS:
            slots, layers = sum(c.slots for c in classes if c.kind == kind), layers_kept(kind, model, settings)
            if slots != records * layers:
                raise _corrupt(
                    self.path, f"{slots} slots of kind {kind}, expected {records} records of {layers} layers"
                )
        sources = tuple(
            Source(self.get(s, "name", str, "sources."), self.get(s, "digest", str, "sources."))
            for s in self.get(body, "sources", list)
        )
        embedder = self.get(body, "embedder", (dict, type(None)))
        return Manifest(
            uuid=uuid,
            generation=self.count(body, "generation"),
            page_size=page,
            model=model,
            storage=storage,
            records=records,
            records_digest=digest,
            classes=classes,
            sources=sources,
            settings=settings,
            embedder=None if embedder is None else self.embedder(embedder, model, records),
            profile=self.get(body, "profile", (dict, type(None))),
            tuning=self.get(body, "tuning", (dict, type(None))),
        )

    def model(self, data: dict[str, Any]) -> ModelInfo:
        at = "model."
        fields = self.get(data, "fields", dict, at)
        if not all(isinstance(k, str) and isinstance(v, str) for k, v in fields.items()):
            raise _corrupt(self.path, "the field model.fields holds something else than text")
        return ModelInfo(
            name=self.get(data, "name", str, at),
            family=self.get(data, "family", str, at),
            mask_kind=self.get(data, "mask_kind", str, at),
            layers=self.count(data, "layers", at, 1, 4096),
            heads=self.count(data, "heads", at, 1, 4096),
            hidden=self.count(data, "hidden", at, 1, 1 << 20),
            dtype=self.get(data, "dtype", str, at),
            max_length=self.count(data, "max_length", at, 1, 1 << 24),
            fingerprint=self.get(data, "fingerprint", str, at),
            fields=fields,
            tokenizer=self.get(data, "tokenizer", (str, type(None)), at),
        )

    def slot_class(self, data: Any, model: ModelInfo, storage: str, page: int) -> SlotClass:
        at = "classes."
        kind = self.choice(data, "kind", KINDS, at)
        length = self.count(data, "length", at, 1, 1 << 24)
        shape = tuple(self.get(data, "shape", list, at))
        expected = slot_shape(kind, length, model)
        if shape != expected:
            raise _corrupt(self.path, f"classes.shape of {kind} {length} is {shape}, expected {expected}")
        dtype = self.choice(data, "dtype", (type_of(kind, storage),), at)
        # Nothing that can be computed is believed: a wrong stride would read one slot's bytes as another's.
        nbytes = math.prod(expected) * TYPES[dtype].itemsize
        stride = round_up(nbytes, page)
        # Small slots in 8 bits lie closer; in databases of before they did not.
        least = round_up(nbytes, CACHE_LINE) if is_tight(expected, dtype) else stride
        given = self.count(data, "stride", at, least, stride)
        if given not in (least, stride):
            raise _corrupt(self.path, f"classes.stride is {given}, expected {least} or {stride}")
        found = SlotClass(
            kind=kind,
            length=length,
            shape=expected,
            dtype=dtype,
            stride=given,
            header=self.count(data, "header", at, page, max(page, HUGE_PAGE)),
            slots=self.count(data, "slots", at, 0, 1 << 40),
        )
        if found.header % page:
            raise _corrupt(self.path, f"classes.header of {found.name} is {found.header}, not in pages of {page}")
        layout = found.layout
        if layout.file_bytes > 1 << 56:
            raise _corrupt(self.path, f"slot class {found.name} claims {layout.file_bytes} bytes")
        return found

    def file(self, data: Any, where: str) -> FileRef:
        name: str = self.get(data, "file", str, where)
        # A derived file lies in the database directory, under a name this library gives; never elsewhere.
        if not re.fullmatch(r"[a-z0-9-]+(/[a-z0-9-]+)?\.safetensors", name):
            raise _corrupt(self.path, f"the field {where}file is not a file name of this format: {name[:80]!r}")
        return FileRef(name, self.get(data, "digest", str, where))

    def embedder(self, data: dict[str, Any], model: ModelInfo, records: int) -> EmbedderRef:
        at = "embedder."
        indexes = self.get(data, "indexes", dict, at)
        known = {str(layer) for layer in range(SEQUENCE, model.layers)}
        for key in indexes:
            if key not in known:
                raise _corrupt(self.path, f"embedder.indexes names layer {key[:20]!r} of {model.layers}")
        report = self.get(data, "report", dict, at)
        if "dimension" in report:
            self.count(report, "dimension", "embedder.report.", 1, 1 << 16)
        return EmbedderRef(
            weights=self.file(self.get(data, "weights", dict, at), "embedder.weights."),
            backend=self.get(data, "backend", str, at),
            records=self.count(data, "records", at, 0, records),
            indexes={key: self.file(value, f"embedder.indexes.{key}.") for key, value in indexes.items()},
            calibration=self.get(data, "calibration", dict, at),
            report=report,
        )


def slot_shape(kind: str, length: int, model: ModelInfo) -> tuple[int, ...]:
    """Shape of one slot of a kind for a sequence of `length` valid tokens."""
    return map_shape(model.heads, length, model.mask_kind == CAUSAL) if kind == KIND_MAP else (length, model.hidden)


def layers_kept(kind: str, model: ModelInfo, settings: Mapping[str, Any]) -> int:
    """Layers of which a record has a slot of this kind: the first so many."""
    return 1 if kind == KIND_INPUT and settings.get("inputs") == "first" else model.layers


def arena_header(uuid: str, found: SlotClass) -> bytes:
    """The first bytes of an arena file: they bind it to its database and class, against swapped files."""
    name = found.name.encode()
    body = ARENA_MAGIC + struct.pack("<II", VERSION, len(name)) + bytes.fromhex(uuid) + name
    return (body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))).ljust(HEADER_BYTES, b"\0")


def check_arena(path: Path, uuid: str, found: SlotClass) -> None:
    """Check that the arena file of a slot class is there, long enough, and of this database.

    Raises
    ------
    DatabaseTruncatedError, DatabaseCorruptError
    """
    file = path / found.file
    hint = "restore the database from a copy, or build it again with attmemo build-database"
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header = stream.read(HEADER_BYTES)
    except OSError as error:
        raise DatabaseCorruptError(f"{file} cannot be read: {error.strerror}.", hint) from error
    if size < found.layout.file_bytes:
        raise DatabaseTruncatedError(
            f"{file} is {size} bytes long, the manifest says at least {found.layout.file_bytes} "
            f"({found.slots} slots of {found.stride} bytes).",
            hint,
        )
    if header != arena_header(uuid, found):
        raise DatabaseCorruptError(
            f"{file} does not begin with the header of slot class {found.name} of this database.", hint
        )


def slot_checksum(uuid: str, name: str, slot: int, payload: Any) -> int:
    """Checksum of a slot's bytes, bound to where they lie: a slot copied to another place does not verify."""
    seed = xxhash.xxh3_64_intdigest(f"{uuid}/{name}/{slot}".encode())
    return xxhash.xxh3_64_intdigest(payload, seed=seed)


def file_digest(path: Path) -> str:
    """Digest of a whole (derived) file."""
    state = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            state.update(chunk)
    return state.hexdigest()


def read_manifest(path: Path) -> Manifest:
    """The published manifest of a database directory.

    Raises
    ------
    DatabaseNotFoundError
        There is no directory, or no manifest in it.
    DatabaseCorruptError, FormatVersionError
        See `Manifest.parse`.
    """
    file = path / MANIFEST
    try:
        if file.stat().st_size > MAX_MANIFEST_BYTES:
            raise _corrupt(file, f"{file.stat().st_size} bytes long, at most {MAX_MANIFEST_BYTES} expected")
        raw = file.read_bytes()
    except FileNotFoundError as error:
        what = "has no MANIFEST.json, so it is not a database" if path.is_dir() else "does not exist"
        foreign = path.is_dir() and any(path.iterdir()) and not (path / ARENA).is_dir()
        place = "OTHER_PLACE" if foreign else path
        raise DatabaseNotFoundError(
            f"{path} {what}.", f"attmemo build-database --model … --data … --output {place}"
        ) from error
    except NotADirectoryError as error:
        raise DatabaseNotFoundError(f"{path} is a file; a database is a directory.", "give the directory") from error
    except OSError as error:
        raise DatabaseError(f"cannot read {file}: {error.strerror}", f"check who may read it: ls -l {file}") from error
    manifest = Manifest.parse(raw, file)
    return manifest


def write_manifest(path: Path, manifest: Manifest) -> Manifest:
    """Publish the next generation: the one write that makes everything before it visible."""
    following = replace(manifest, generation=manifest.generation + 1)
    write_durably(path / MANIFEST, following.dump())
    return following


def write_durably(file: Path, content: bytes) -> None:
    """Replace a file so that a crash leaves the old one or the new one, whole."""
    temporary = file.with_name(file.name + ".tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
    except OSError:
        temporary.unlink(missing_ok=True)  # on a full disk it would be the first thing in the way
        raise
    sync_directory(file.parent)


def sync_file(file: Path) -> None:
    """Make a file that was written elsewhere durable, and its name."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_directory(file.parent)


def sync_directory(path: Path) -> None:
    """Make renames and new names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _checksum(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())


def _not_a_number(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _corrupt(path: Path, why: str) -> DatabaseCorruptError:
    return DatabaseCorruptError(
        f"{path}: {why}.", "restore the database from a copy, or build it again with attmemo build-database"
    )
