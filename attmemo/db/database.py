"""Reading a database: open a published generation, look records up, hand out their slots."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from torch import Tensor

from attmemo.arguments import check_choices, check_places
from attmemo.db.catalogue import Snapshot, read_records
from attmemo.db.encodings import unpack
from attmemo.db.files import MANIFEST, RESTORE, file_digest
from attmemo.db.index import LayerIndex
from attmemo.db.manifest import EmbedderRef, FileRef, Manifest, read_manifest
from attmemo.db.slot_kinds import KIND_INPUT, KIND_MAP
from attmemo.db.slots import HEADER_BYTES, SlotClass, check_arena, slot_checksum
from attmemo.errors import (
    DatabaseCorruptError,
    DatabaseError,
    EmbedderMissingError,
    GenerationMismatchError,
    PageSizeError,
)
from attmemo.mmap import Arena, Residency, page_size
from attmemo.system.locking import thread_lock

_LOG = logging.getLogger("attmemo")
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that `Database.check` found wrong."""

    where: str
    what: str


class Database:
    """A published generation of an attention database, opened for reading.

    Opening checks the manifest, the catalogue, and the size and header of every arena file; it reads no slot. The
    attribute `records` has lengths, provenance, places and checksums of all records as arrays; "a record" is a
    position in them.

    Parameters
    ----------
    path : path-like
        Database directory.
    residency : {"page-cache", "hugepages"}
        Where maps are served from; ``"hugepages"`` loads all of them into 2 MiB pages now, if the machine gives any.
        Where it does not they stay in the page cache, and one line in the log says what would help.

    Raises
    ------
    DatabaseNotFoundError, FormatVersionError, DatabaseCorruptError, DatabaseTruncatedError, PageSizeError
        The first rule that is broken.
    """

    def __init__(self, path: str | os.PathLike[str], residency: Residency = "page-cache") -> None:
        check_choices(residency=(residency, get_args(Residency)))
        check_places(path, fill=False)
        self.path = Path(path)
        self.residency: Residency = residency
        self._arenas: dict[tuple[str, int], Arena] = {}
        self._indexes: dict[int, LayerIndex] = {}
        self._opening = thread_lock()
        self._closed = False
        self.manifest: Manifest = read_manifest(self.path)
        if self.manifest.page_size % page_size():
            what = f"{self.path} was built for pages of {self.manifest.page_size} bytes; these have {page_size()}."
            raise PageSizeError(what, "build it again on a machine with these pages")
        self.records: Snapshot = self._read_records()
        for found in self.manifest.classes:
            check_arena(self.path, self.manifest.uuid, found)
        self._kinds = {kind.name: kind for kind in self.manifest.kinds}
        self._classes = {(c.kind.name, c.length): c for c in self.manifest.classes}
        self._check_references()
        self.reside(residency)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def bytes(self) -> int:
        """Bytes of all arena files."""
        return sum(c.file_bytes for c in self.manifest.classes)

    @property
    def lengths(self) -> dict[int, int]:
        """Records by token length."""
        values, counts = np.unique(self.records.lengths, return_counts=True)
        return dict(zip(values.tolist(), counts.tolist(), strict=True))

    def slots_of(self, kind: str, layer: int, records: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Slot numbers of a kind and layer for records; DatabaseError if records keep none."""
        known = self._kinds.get(kind)
        layers = 0 if known is None else known.layers
        if not 0 <= layer < layers:
            kept = ", ".join(f"{found.name} (layers 0 to {found.layers - 1})" for found in self._kinds.values())
            what = f"{self.path} keeps no slots of kind {kind!r} and layer {layer}."
            raise DatabaseError(what, f"ask for one of: {kept}")
        return np.asarray(self.records.places[records] * layers + layer)

    def arena(self, kind: str, length: int) -> Arena:
        """The arena of a kind and length, opened at the first use; DatabaseError if there is none."""
        found = self._classes.get((kind, length))
        if found is None:
            what = f"{self.path} has no record of {length} tokens with slots of kind {kind!r}."
            hint = f"attmemo inspect {self.path} lists lengths; the kinds are {', '.join(self._kinds)}"
            raise DatabaseError(what, hint)
        arena = self._arenas.get((kind, length))
        if arena is None:
            with self._opening:
                self._check_open()
                residency: Residency = self.residency if kind == KIND_MAP else "page-cache"
                arena = self._arenas.get((kind, length)) or self._open_arena(found, residency)
        return arena

    def slot(self, kind: str, layer: int, record: int) -> Tensor:
        """A slot as it is stored; a copy, to keep and to write."""
        return self.view(kind, layer, record).clone()

    def map(self, layer: int, record: int) -> Tensor:
        """A record's map ``[heads, n, n]``, float32 from 8 bits, else in the stored type. To be read only."""
        return unpack(self.view(KIND_MAP, layer, record))

    def input(self, layer: int, record: int) -> Tensor:
        """A record's hidden states as they entered the layer, ``[n, hidden]``, float32."""
        return self.view(KIND_INPUT, layer, record).float()

    def view(self, kind: str, layer: int, record: int) -> Tensor:
        """A slot where it lies, without a copy. To be read only: the pages are, and a store ends the process."""
        if not 0 <= record < len(self):
            raise DatabaseError(f"{self.path} has no record {record}.", f"its {len(self)} records are numbered from 0")
        slot = int(self.slots_of(kind, layer, np.array(record)))
        mapping = self.arena(kind, int(self.records.lengths[record])).mapping
        mapping.check_whole()
        return mapping.slot(slot)

    def index(self, layer: int) -> LayerIndex:
        """The index of a layer, or of the once-per-sequence lookup (-1), loaded at the first use.

        EmbedderMissingError if there is none, DatabaseCorruptError if its container is not what the manifest says.
        """
        found = self._indexes.get(layer)
        if found is not None:
            return found
        with self._opening:
            self._check_open()
            found = self._indexes.get(layer)
            if found is None:
                embedder = self.embedder_ref()
                ref = embedder.indexes.get(str(layer))
                if ref is None:
                    raise EmbedderMissingError(f"{self.path} has no index for layer {layer}.", self._train)
                dimension, file = int(embedder.report.get("dimension", 128)), self.derived(ref)
                found = LayerIndex.load(file, dimension, embedder.backend, self.records, embedder.next_id)
                self._indexes[layer] = found
        return found

    def embedder_ref(self) -> EmbedderRef:
        """Where the trained embedder is; EmbedderMissingError if it was never trained."""
        if self.manifest.embedder is None:
            what = f"{self.path} holds {len(self)} records but no trained embedder, so nothing can be looked up."
            raise EmbedderMissingError(what, self._train)
        return self.manifest.embedder

    def derived(self, ref: FileRef) -> Path:
        """Path of a derived file, its digest checked: nothing parses bytes that the builder did not write."""
        file = self.path / ref.file
        try:
            digest = file_digest(file)
        except OSError as error:
            raise DatabaseCorruptError(f"{file} cannot be read: {error.strerror}.", self._train) from error
        if digest != ref.digest:
            self._check_generation(ref)
            raise DatabaseCorruptError(f"{file} has digest {digest[:16]}…, expected {ref.digest[:16]}….", self._train)
        return file

    def check(self, progress: Progress | None = None) -> list[Finding]:
        """Read every slot, its padding and every derived file; `progress` is called with (slots done, in total)."""
        return [*self._check_slots(progress), *self._check_padding(), *self._check_derived()]

    def close(self) -> None:
        """Unmap everything. Views that are still held stay valid. Closing twice is fine."""
        with self._opening:
            self._closed = True
            arenas, self._arenas, self._indexes = self._arenas, {}, {}
        for arena in arenas.values():
            arena.close()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Database({str(self.path)!r}, {len(self)} records, generation {self.manifest.generation})"

    def _read_records(self) -> Snapshot:
        """The records of the manifest; of a later one, if a builder has published since it was read."""
        while True:
            try:
                return read_records(self.path, self.manifest)
            except DatabaseCorruptError:
                again = read_manifest(self.path)
                if again.generation == self.manifest.generation:
                    raise
                self.manifest = again

    def reside(self, residency: Residency, progress: Progress | None = None) -> None:
        """Serve maps from elsewhere (see `Database`); `progress` is called with (bytes loaded, bytes in total)."""
        self.residency = residency
        if residency == "page-cache":
            return
        classes = [found for found in self.manifest.classes if found.kind.name == KIND_MAP]
        total, done = sum(found.file_bytes for found in classes), 0
        notices = []
        for found in classes:
            part = None if progress is None else lambda n, _, before=done: progress(before + n, total)
            arena = self._open_arena(found, "hugepages", part)
            done += found.file_bytes
            if arena.notice is not None:
                notices.append(arena.notice)
            if progress is not None:
                progress(done, total)
        if notices:
            more = f" (the same for {len(notices) - 1} more of {len(classes)} arenas)" if notices[1:] else ""
            _LOG.warning("attmemo: %s%s", notices[0], more)

    def _open_arena(self, found: SlotClass, residency: Residency, progress: Progress | None = None) -> Arena:
        arena = Arena(self.path / found.file, found.layout, residency, progress)
        check_arena(self.path, self.manifest.uuid, found)  # again: another file may have been put in its place
        before = self._arenas.get((found.kind.name, found.length))
        self._arenas[found.kind.name, found.length] = arena
        if before is not None:
            before.close()
        return arena

    def _check_open(self) -> None:
        if self._closed:
            raise DatabaseError(f"{self.path} was closed", f"open it again: Database({str(self.path)!r})")

    def _check_generation(self, ref: FileRef) -> None:
        """If a derived file says whose it is, and it is not the one that is named: say that instead of a digest."""
        file = self.path / ref.file
        try:
            with safe_open(str(file), framework="np") as container:
                owner = container.metadata() or {}
        except (SafetensorError, OSError, ValueError):
            return
        if "database" in owner and owner["database"] != self.manifest.uuid:
            what = f"{file} belongs to database {owner['database'][:8]}…, expected {self.manifest.uuid[:8]}…."
            raise GenerationMismatchError(what, self._train)
        named = "".join(filter(str.isdecimal, ref.file.split("/")[0])).lstrip("0")
        if "generation" in owner and owner["generation"] != named:
            written = f"{file} was written for generation {owner['generation'][:20]}, expected {named}"
            raise GenerationMismatchError(f"{written}: {MANIFEST} names another file of this name.", self._train)

    def _check_references(self) -> None:
        records, manifest = self.records, self.manifest
        for length in np.unique(records.lengths).tolist():
            places = records.places[records.lengths == length]
            if length not in manifest.places:
                raise self._corrupt(f"a record has {length} tokens, but there are no slots of that length")
            if int(places.max()) >= manifest.places[length]:
                raise self._corrupt(f"a record is beyond the {manifest.places[length]} places of length {length}")
            if len(np.unique(places)) != len(places):
                raise self._corrupt(f"two records have the same place of length {length}")
        if len(records) and records.sources.max() >= max(1, len(manifest.sources)):
            raise self._corrupt("a record names a data source that is not listed")

    def _check_slots(self, progress: Progress | None) -> Iterator[Finding]:
        total, done = len(self) * sum(kind.layers for kind in self.manifest.kinds), 0
        for record, length in enumerate(self.records.lengths.tolist()):
            checksums = iter(self.records.checksums[record].tolist())
            for kind in self.manifest.kinds:
                found, arena = self._classes[(kind.name, length)], self.arena(kind.name, length)
                for layer in range(kind.layers):
                    slot = int(self.records.places[record]) * kind.layers + layer
                    arena.mapping.check_whole()
                    checksum = slot_checksum(self.manifest.uuid, found.name, slot, arena.slot_bytes(slot))
                    if checksum != next(checksums):
                        where = f"{found.file}, slot {slot} (record {record}, layer {layer})"
                        yield Finding(where, "the bytes do not match their checksum")
                done += kind.layers
                if progress is not None:
                    progress(done, total)

    def _check_padding(self) -> Iterator[Finding]:
        for found in self.manifest.classes:
            layout, spare = found.layout, found.stride - found.layout.nbytes
            with (self.path / found.file).open("rb") as stream:
                stream.seek(HEADER_BYTES)
                gap = found.header - HEADER_BYTES
                if stream.read(gap).count(0) != gap:
                    yield Finding(found.file, "the bytes between the header and the first slot are not zero")
                for slot in range(found.slots if spare else 0):
                    stream.seek(layout.offset(slot) + layout.nbytes)
                    if stream.read(spare).count(0) != spare:
                        yield Finding(f"{found.file}, slot {slot}", "the padding behind the slot is not zero")

    def _check_derived(self) -> Iterator[Finding]:
        embedder = self.manifest.embedder
        if embedder is None:
            return
        for ref in (embedder.weights, *embedder.indexes.values()):
            try:
                self.derived(ref)
            except DatabaseCorruptError as error:
                yield Finding(ref.file, error.what)
        for name in embedder.indexes:
            with suppress(DatabaseCorruptError):  # a wrong digest is already reported
                self.index(int(name))

    def _corrupt(self, why: str) -> DatabaseCorruptError:
        return DatabaseCorruptError(f"{self.path}: {why}.", RESTORE)

    @property
    def _train(self) -> str:
        return f"attmemo train-embedder {self.path}"
