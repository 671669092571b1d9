"""Building a database: append records, publish generations, resume after any interruption.

Order of a publication: slots are written and synced, then the catalogue transaction, then the manifest is replaced.
A crash before the last step leaves the previous generation; the next builder cuts off what lies behind it.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attmemo.db import files
from attmemo.db.catalogue import SPLIT_TRAIN, Catalogue, Record, Snapshot, add_to_digest, read_records
from attmemo.db.encodings import STORAGE, TYPES, unpack
from attmemo.db.files import BuilderLock, named, storing
from attmemo.db.manifest import EmbedderRef, Manifest, ModelInfo, Source, read_manifest, write_manifest
from attmemo.db.slot_kinds import FORMS, KIND_INPUT, KIND_MAP, SlotKind, kinds_of_maps
from attmemo.db.slots import SlotClass, arena_header, check_arena, slot_checksum
from attmemo.errors import ArgumentError, DatabaseCorruptError, DatabaseError, ForkedHandleError
from attmemo.mmap import page_size

_OPTIONS = {"storage": "--dtype", "inputs": "--inputs", "max_length": "--max-length"}


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a record's text came from."""

    source: int
    row: int
    split: int = SPLIT_TRAIN


class DatabaseWriter:
    """The one writer of a database directory, which is created if absent.

    A resumed build must ask for the same model, storage and `settings`, which the manifest keeps. `when_full` is the
    next step in a message of a full disk.
    DatabaseLockedError if another process is building; DatabaseError if the directory cannot be gone on with.
    """

    def __init__(
        self, path: Path, model: ModelInfo, storage: str, settings: Mapping[str, Any] | None = None, *,
        when_full: str = files.WHEN_FULL,
    ) -> None:  # fmt: skip
        if storage not in STORAGE:
            raise ArgumentError(f"storage must be one of {', '.join(STORAGE)}; got {storage!r}.", "storage='float16'")
        self.path, self._when_full, self._pid = path, when_full, os.getpid()
        self._files: dict[str, int] = {}
        self._pending: list[Record] = []
        self._lock: BuilderLock | None = None
        self._published: Snapshot | None = None  # read when a published record is asked for
        self._lost: OSError | None = None  # the error of a write that the system could not make durable
        settings = dict(settings or {})
        kinds = kinds_of_maps(model, storage, settings)
        asked = Manifest(uuid.uuid4().hex, 0, page_size(), model, storage, kinds, settings=settings)
        try:
            with storing(path, when_full):
                # The last published one; of generation 0 if there is none.
                self.manifest: Manifest = self._begin(asked)
                with self._catalogue(check=True) as catalogue:
                    catalogue.delete(self.manifest.records)
        except BaseException:
            self.close()
            raise
        self._classes = {c.name: c for c in self.manifest.classes}
        self._places = dict(self.manifest.places)

    @classmethod
    def reopen(cls, path: Path) -> DatabaseWriter:
        """The writer of a database that exists, with all that it was built with."""
        found = read_manifest(path)
        return cls(path, found.model, found.storage, found.settings)

    @property
    def records(self) -> int:
        """Records stored, published or not."""
        return self.manifest.records + len(self._pending)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all arena files, unpublished slots included."""
        return sum(found.file_bytes for found in self._classes.values())

    def stored_rows(self) -> dict[int, set[int]]:
        """Data rows already published, by source number: what a resumed build skips."""
        if not self.manifest.generation:
            return {}
        found = read_records(self.path, self.manifest)
        return {int(source): set(found.rows[found.sources == source].tolist()) for source in np.unique(found.sources)}

    def cost(self, length: int) -> int:
        """Bytes that one more record of this length will take."""
        classes = [self._class(kind, length) for kind in self.manifest.kinds]
        headers = sum(found.header for found in classes if found.name not in self._classes)
        return headers + sum(found.stride * found.kind.layers for found in classes)

    def maps(self, record: int) -> list[Tensor]:
        """Maps ``[heads, n, n]`` of every layer of a record, published or not; copies."""
        return [unpack(stored) for stored in self._read(KIND_MAP, record)]

    def first_input(self, record: int) -> Tensor:
        """Hidden states ``[n, hidden]`` that entered the first layer, published or not, float32; a copy."""
        return next(self._read(KIND_INPUT, record)).float()

    def add_source(self, name: str, digest: str) -> int:
        """Number of a data file, the same one for the same content."""
        for number, source in enumerate(self.manifest.sources):
            if source.digest == digest:
                return number
        self.manifest = replace(self.manifest, sources=(*self.manifest.sources, Source(name, digest)))
        return len(self.manifest.sources) - 1

    def add(self, slots: Mapping[str, Sequence[Tensor]], length: int, provenance: Provenance) -> int:
        """Store one sequence of `length` valid tokens: for each kind of the database, a tensor for each layer.

        Layers beyond those that a kind keeps are ignored. The record of the position returned becomes visible with
        `publish`. Nothing is stored after ValueError (a kind is missing, a tensor has another shape than its kind),
        DatabaseCorruptError (rows of a map that do not sum to 1, numbers not finite in the storage type) or
        StorageFullError.
        """
        self._check_process()
        kinds = self.manifest.kinds
        if slots.keys() != {kind.name for kind in kinds}:
            raise ValueError(f"expected slots of the kinds {[k.name for k in kinds]}, got {sorted(slots)}")
        payloads = [_payloads(slots[kind.name][: kind.layers], kind, length, provenance) for kind in kinds]
        return self.copy(payloads, length, provenance)

    def copy(self, payloads: Sequence[Sequence[bytes]], length: int, provenance: Provenance) -> int:
        """As `add`, for slots that are bytes already and checked: for each kind, those of each layer."""
        self._check_process()
        kinds = self.manifest.kinds
        place = self._places.get(length, 0)
        checksums: list[int] = []
        grown: dict[str, SlotClass] = {}
        for kind, bodies in zip(kinds, payloads, strict=True):
            found = self._class(kind, length)
            for slot, body in enumerate(bodies, place * kind.layers):
                checksums.append(slot_checksum(self.manifest.uuid, found.name, slot, body))
            self._write(found, b"".join(body.ljust(found.stride, b"\0") for body in bodies))
            grown[found.name] = replace(found, places=place + 1)
        record = Record(length, provenance.source, provenance.row, place, provenance.split, tuple(checksums))
        # Only now, with every kind written: a full disk half-way leaves the counts as they were. And in one statement:
        # Ctrl-C falls before it or behind it, so no place is ever counted without its record.
        places = self._places | {length: place + 1}
        self._classes, self._places, self._pending = self._classes | grown, places, [*self._pending, record]
        return self.records - 1

    def publish(self, **changes: Any) -> Manifest:
        """Make everything stored so far visible, as one generation, with changed fields of the manifest."""
        self._check_process()
        before = self.manifest
        entries = [(number, record.dump()) for number, record in enumerate(self._pending, before.records)]
        try:
            for fd in self._files.values():
                os.fdatasync(fd)
            files.sync(self.path / files.ARENA)
            embedder = changes.get("embedder")
            if isinstance(embedder, EmbedderRef):
                for ref in (embedder.weights, *embedder.indexes.values()):
                    file = self.path / ref.file
                    files.sync(file)
                    files.sync(file.parent)
            if entries:
                with self._catalogue() as catalogue:
                    catalogue.put(entries)
                files.sync(self.path / files.CATALOGUE)
            # The manifest names files and directories: their names must not be lost by what it survives.
            files.sync(self.path)
            classes = tuple(self._classes[name] for name in sorted(self._classes))
            digest = add_to_digest(before.records_digest, entries)
            following = replace(
                before, records=self.records, records_digest=digest, places=self._places, classes=classes, **changes,
            )  # fmt: skip
            # One statement again: after Ctrl-C a second publication must not append the same records twice.
            self.manifest, self._pending = write_manifest(self.path, following), []
        except OSError as error:
            if error.errno not in files.FULL:
                self._lost = error
            raise named(error, self.path, self._when_full) from error
        return self.manifest

    def close(self) -> None:
        """Release files and the builder's lock; what was not published is not visible."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> DatabaseWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, asked: Manifest) -> Manifest:
        """Take the lock; the manifest to go on from."""
        path = self.path
        fresh = not path.exists()
        check_target(path)
        (path / files.ARENA).mkdir(parents=True, exist_ok=True)
        if fresh:
            files.sync(path.parent)
        self._lock = BuilderLock(path)
        if (path / files.MANIFEST).exists():
            return _resume(path, asked)
        # Nothing was ever published: what a killed builder began may not even be whole.
        for name in ("data.mdb", "lock.mdb"):
            (path / files.CATALOGUE / name).unlink(missing_ok=True)
        return asked

    def _read(self, name: str, record: int) -> Iterator[Tensor]:
        """Slots of a record as they are stored, layer by layer."""
        published = self.manifest.records
        if record < published and (self._published is None or record >= len(self._published)):
            self._published = read_records(self.path, self.manifest)  # since the last time, more were published
        known = self._published
        entry = known.record(record) if known and record < published else self._pending[record - published]
        (kind,) = (kind for kind in self.manifest.kinds if kind.name == name)
        found = self._class(kind, entry.length)
        layout, first = found.layout, entry.place * kind.layers
        with (self.path / found.file).open("rb", buffering=0) as stream:
            for slot in range(first, first + kind.layers):
                raw = bytearray(os.pread(stream.fileno(), layout.nbytes, layout.offset(slot)))
                yield torch.frombuffer(raw, dtype=layout.dtype).view(layout.shape)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            what = f"{self.path} was opened for writing by process {self._pid}; this one ({os.getpid()}) is its fork."
            raise ForkedHandleError(what, "open a DatabaseWriter in the process that writes, when the other is done")
        if self._lost is not None:
            # After a failed fsync the kernel may call pages clean that it never wrote: a second one would succeed.
            raise named(self._lost, self.path, self._when_full)

    def _catalogue(self, check: bool = False) -> closing[Catalogue]:
        # Opened for each use: LMDB must not be open twice in a process, and a trainer reads what it holds the lock of.
        return closing(Catalogue(self.path, write=True, check=check))

    def _class(self, kind: SlotKind, length: int) -> SlotClass:
        return self._classes.get(f"{kind.name}-{length:05d}") or SlotClass.make(kind, length)

    def _write(self, found: SlotClass, body: bytes) -> None:
        """Write slots behind those of a class."""
        end = found.file_bytes
        with storing(self.path, self._when_full):
            fd = self._files.get(found.name)
            if fd is None:
                fd = os.open(self.path / found.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                try:
                    os.ftruncate(fd, end if found.slots else 0)  # slots that a killed builder never published
                    if not found.slots:
                        files.write_all(fd, arena_header(self.manifest.uuid, found), 0)
                except BaseException:
                    os.close(fd)  # the next attempt begins with the header again
                    raise
                self._files[found.name] = fd
            # pwrite, not a store through a mapping: a full disk is then an error code and not a signal.
            files.write_all(fd, body, end)


def check_target(path: Path) -> None:
    """Refuse a place where no database can be built: DatabaseError."""
    if path.exists() and not path.is_dir():
        raise DatabaseError(f"{path} is a file; a database is a directory.", "choose another --output")
    begun = {files.ARENA, files.CATALOGUE, files.LOCK, files.MANIFEST + ".tmp"}  # before the first publication
    there = {entry.name for entry in path.iterdir()} if path.exists() else set()
    if files.MANIFEST not in there and not there <= begun:
        what = "is not empty and is not a database"
        if files.FILLING in there:
            what = "fills itself: no builder adds to it"
        elif files.PREPARED in there:
            what = "keeps rows: no builder of maps adds to it"
        raise DatabaseError(f"{path} {what}.", "choose another --output")


def _resume(path: Path, asked: Manifest) -> Manifest:
    """The manifest on the disk, if a builder that asks for this one may go on with it."""
    manifest = read_manifest(path)
    manifest.model.check_same(path, asked.model)
    old, new = _asked_for(manifest), _asked_for(asked)
    for key in [*_OPTIONS, *sorted(old.keys() | new.keys())]:  # the user's options first: others follow from them
        if old.get(key) != new.get(key):
            what = f"{path} was built with {_OPTIONS.get(key, key)} {old.get(key)}; asked: {new.get(key)}."
            raise DatabaseError(what, "ask for the same, or choose another --output")
    if manifest.kinds != asked.kinds:
        what = f"{path} keeps the kinds {', '.join(k.name for k in manifest.kinds)}; this build would write others."
        raise DatabaseError(what, "ask for the same, or choose another --output")
    if manifest.page_size != asked.page_size:
        what = f"{path} was built for pages of {manifest.page_size} bytes, this machine has {asked.page_size}."
        raise DatabaseError(what, "append on a machine like the one that built it, or build a new database here")
    for found in manifest.classes:  # appending to a short file would fill the gap with zeros, and hide it
        check_arena(path, manifest.uuid, found)
    if not (path / files.CATALOGUE / "data.mdb").exists():
        Catalogue(path).close()  # raises: it is missing
    return manifest


def _asked_for(asked: Manifest) -> dict[str, Any]:
    return {"storage": asked.storage, "max_length": asked.model.max_length, "inputs": "all"} | asked.settings


def _payloads(tensors: Sequence[Tensor], kind: SlotKind, length: int, provenance: Provenance) -> list[bytes]:
    """The bytes of all slots of a kind, checked."""
    if len(tensors) != kind.layers:
        raise ValueError(f"expected {kind.layers} slots of kind {kind.name}, got {len(tensors)}")
    store, found = FORMS[kind.name], []
    for layer, tensor in enumerate(tensors):
        try:
            stored = store(tensor, kind)
        except DatabaseCorruptError as error:
            where = f"row {provenance.row} of the data, layer {layer}"
            raise DatabaseCorruptError(f"{where}: {error.what}; nothing was stored.", error.hint) from error
        if tuple(stored.shape) != kind.shape_for(length) or stored.dtype != TYPES[kind.dtype]:
            raise ValueError(f"{kind.name} of layer {layer} has shape {tuple(tensor.shape)}, expected {kind.shape}")
        found.append(stored.contiguous().view(torch.uint8).numpy().tobytes())
    return found
