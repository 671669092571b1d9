"""The manifest: everything that a reader must know before it opens another file, and how each field is checked.

A builder appends slots and catalogue entries beyond the counts of the manifest and then publishes new counts. A reader
does not see anything beyond the counts, and the next builder overwrites it. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import xxhash

from attmemo.db.encodings import STORAGE
from attmemo.db.files import FILLING, MANIFEST, PREPARED, RESTORE, write_durably
from attmemo.db.slot_kinds import SlotKind
from attmemo.db.slots import SlotClass
from attmemo.errors import (
    DatabaseCorruptError,
    DatabaseError,
    DatabaseNotFoundError,
    FormatVersionError,
    StaleDatabaseError,
)
from attmemo.fingerprint import check_fields
from attmemo.system.json_fields import Field

FORMAT: Final = "attmemo-database"
VERSION: Final = 2
MAX_BYTES: Final = 256 << 20
SEQUENCE: Final = -1  # the "layer" of the once-per-sequence embedder and index
EMPTY_DIGEST: Final = "0" * 32
DIGEST: Final = "[0-9a-f]{32}"


@dataclass(frozen=True)
class ModelInfo:
    """The model that a database belongs to."""

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

    def check_same(self, path: Path, asked: ModelInfo) -> None:
        """Refuse to go on with records of this model for another one: StaleDatabaseError."""
        if self.fingerprint == asked.fingerprint:
            return
        what = f"{path} was built for another model ({self.name}; asked: {asked.name})."
        try:
            check_fields(self.fields, asked.fields, path)
        except StaleDatabaseError as error:
            what = error.what
        raise StaleDatabaseError(what, "choose another --output, or the model it was built for")

    @classmethod
    def read(cls, data: Field) -> ModelInfo:
        tokenizer = data.get("tokenizer")
        words = ("name", "family", "mask_kind", "dtype", "fingerprint")
        limits = {"layers": 4096, "heads": 4096, "hidden": 1 << 20, "max_length": 1 << 24}
        values: dict[str, Any] = {key: data[key].text() for key in words}
        values |= {key: data[key].integer(1, high) for key, high in limits.items()}
        values["fields"] = {name: value.text() for name, value in data["fields"].members().items()}
        return cls(**values, tokenizer=None if tokenizer is None else tokenizer.text())


@dataclass(frozen=True)
class Source:
    name: str
    digest: str


@dataclass(frozen=True)
class FileRef:
    """A derived file and what it must contain."""

    file: str
    digest: str

    @classmethod
    def read(cls, data: Field) -> FileRef:
        """Read a reference. The file lies in the database directory, never elsewhere."""
        return cls(data["file"].text(r"[a-z0-9-]+(/[a-z0-9-]+)?\.safetensors"), data["digest"].text())


@dataclass(frozen=True)
class EmbedderRef:
    """The trained embedder and its indexes; the indexes name records with ids below `next_id`."""

    weights: FileRef
    backend: str
    next_id: int
    indexes: dict[str, FileRef]  # layer number as text ("-1": once per sequence) -> container
    calibration: dict[str, Any]
    report: dict[str, Any]

    @classmethod
    def read(cls, data: Field, model: ModelInfo) -> EmbedderRef:
        """Read the field `embedder` of a manifest."""
        report, indexes = data["report"], data["indexes"].members()
        if "dimension" in report.object():
            report["dimension"].integer(1, 1 << 16)
        for index in indexes.values():
            index.key(SEQUENCE, model.layers - 1)
        refs = {name: FileRef.read(index) for name, index in indexes.items()}
        weights, backend, next_one = FileRef.read(data["weights"]), data["backend"].text(), data["next_id"].integer()
        return cls(weights, backend, next_one, refs, data["calibration"].object(), report.object())


@dataclass(frozen=True)
class Manifest:
    """One published generation."""

    uuid: str
    generation: int
    page_size: int
    model: ModelInfo
    storage: str
    kinds: tuple[SlotKind, ...]
    records: int = 0  # their ids are below
    records_digest: str = EMPTY_DIGEST  # of the catalogue
    places: dict[int, int] = field(default_factory=dict)  # length -> number of places
    classes: tuple[SlotClass, ...] = ()
    sources: tuple[Source, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    embedder: EmbedderRef | None = None
    profile: dict[str, Any] | None = None
    tuning: dict[str, Any] | None = None
    version: int = VERSION

    def layers_kept(self, kind: str) -> int:
        """Slots that a record has of a kind, one for each of the first so many layers; 0 if it keeps none."""
        return next((found.layers for found in self.kinds if found.name == kind), 0)

    def dump(self) -> bytes:
        """The manifest as bytes, with its own checksum on the last line."""
        body = {"format": FORMAT} | asdict(self)
        del body["classes"], body["places"]
        arenas: dict[int, dict[str, Any]] = {length: {} for length in self.places}
        for found in self.classes:
            arenas[found.length][found.kind.name] = {"stride": found.stride, "header": found.header}
        counts = sorted(self.places.items())
        body["lengths"] = [{"length": n, "places": count, "arenas": arenas[n]} for n, count in counts]
        text = json.dumps(body, indent=1, sort_keys=True, allow_nan=False)
        return sealed(text)

    @classmethod
    def parse(cls, raw: bytes, path: Path) -> Manifest:
        """Read and check a manifest; DatabaseCorruptError names the first field that is wrong."""
        body = Field.parse(unsealed(raw, path), str(path), RESTORE)
        if body["format"].value != FORMAT:
            body["format"].refuse(repr(FORMAT))
        version = body.object().get("version")
        if version != VERSION:
            what = f"{path} has format version {version!r}; this attmemo reads version {VERSION}."
            hint = "build it again with attmemo build-database, or use the attmemo that wrote it"
            raise FormatVersionError(what, hint)
        return _parse(body)


def _parse(body: Field) -> Manifest:
    model, page = ModelInfo.read(body["model"]), body["page_size"].integer(512, 1 << 30)
    if page & (page - 1):
        body["page_size"].refuse("a power of two")
    if any(item.object().get("name") == "rows" for item in body["kinds"].items()):
        what = f"{body.source} names rows in a form that this attmemo does not read."
        raise FormatVersionError(what, "build it again: attmemo build-database --reuse rows --model … --data …")
    storage = body["storage"].text(among=STORAGE)
    kinds = tuple(SlotKind.read(item, model, storage) for item in body["kinds"].items())
    if len({kind.name for kind in kinds}) != len(kinds):
        body["kinds"].refuse("each kind once")
    records = body["records"].integer()
    places: dict[int, int] = {}
    classes: list[SlotClass] = []
    for item in body["lengths"].items():
        length, count = item["length"].integer(1, 1 << 24), item["places"].integer(1, 1 << 40)
        if length in places:
            item["length"].refuse("each length once")
        places[length] = count
        arenas = item["arenas"]
        classes += (SlotClass.read(arenas[k.name], k, length, count, page) for k in kinds)
    if records > sum(places.values()):
        body["records"].refuse(f"at most {sum(places.values())} places")
    classes.sort(key=lambda found: found.name)
    profile, tuning, embedder = body.get("profile"), body.get("tuning"), body.get("embedder")
    if embedder is not None and embedder["next_id"].integer() > records:
        embedder["next_id"].refuse(f"at most {records}")
    return Manifest(
        uuid=body["uuid"].text(DIGEST), generation=body["generation"].integer(), page_size=page, model=model,
        storage=storage, kinds=kinds, records=records, records_digest=body["records_digest"].text(DIGEST),
        places=places, classes=tuple(classes),
        sources=tuple(Source(s["name"].text(), s["digest"].text()) for s in body["sources"].items()),
        settings=body["settings"].object(),
        embedder=None if embedder is None else EmbedderRef.read(embedder, model),
        profile=None if profile is None else profile.object(),
        tuning=None if tuning is None else tuning.object(),
    )  # fmt: skip


def read_manifest(path: Path) -> Manifest:
    """The published manifest of a database directory; DatabaseNotFoundError if there is none. See `Manifest.parse`."""
    file = path / MANIFEST
    try:
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise DatabaseCorruptError(f"{file}: {size} bytes long, at most {MAX_BYTES} expected.", RESTORE)
        return Manifest.parse(file.read_bytes(), file)
    except FileNotFoundError as error:
        if (path / FILLING).exists() or (path / PREPARED).exists():
            what = f"{path} keeps rows; a database of maps is asked for."
            raise DatabaseNotFoundError(what, f"attmemo inspect {path} shows what it holds") from error
        what = f"has no {MANIFEST}, so it is not a database" if path.is_dir() else "does not exist"
        hint = "name a database, or build one: attmemo build-database --model … --data …"
        raise DatabaseNotFoundError(f"{path} {what}.", hint) from error
    except NotADirectoryError as error:
        raise DatabaseNotFoundError(f"{path} is a file; a database is a directory.", "give the directory") from error
    except OSError as error:
        raise DatabaseError(f"cannot read {file}: {error.strerror}", f"check who may read it: ls -l {file}") from error


def write_manifest(path: Path, manifest: Manifest) -> Manifest:
    """Publish the next generation: the one write that makes everything before it visible."""
    following = replace(manifest, generation=manifest.generation + 1)
    write_durably(path / MANIFEST, following.dump())
    return following


def sealed(text: str) -> bytes:
    """A text as bytes, with its own checksum on the last line."""
    return f"{text}\n{_checksum(text)}\n".encode()


def unsealed(raw: bytes, path: Path, hint: str = RESTORE) -> str:
    """The text of a file that was `sealed`; DatabaseCorruptError: it is not as it was written."""
    try:
        text, checksum, rest = raw.decode().rsplit("\n", 2)
    except ValueError as error:
        raise DatabaseCorruptError(f"{path}: it is cut or damaged: no checksum line.", hint) from error
    if rest:
        raise DatabaseCorruptError(f"{path}: there are {len(rest)} characters behind its checksum.", hint)
    if checksum != _checksum(text):
        raise DatabaseCorruptError(f"{path}: checksum {checksum[:16]!r}, expected {_checksum(text)}.", hint)
    return text


def _checksum(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())
