"""Reading a database: open a published generation, look records up, hand out their slots."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from torch import Tensor

from attmemo.db import format as fmt
from attmemo.db.catalogue import Catalogue, Snapshot
from attmemo.db.format import KINDS, Manifest, SlotClass
from attmemo.db.forms import KIND_INPUT, KIND_MAP, unpack
from attmemo.db.index import LayerIndex
from attmemo.errors import (
    DatabaseCorruptError,
    DatabaseError,
    DatabaseNotFoundError,
    EmbedderMissingError,
    GenerationMismatchError,
    PageSizeError,
)
from attmemo.mmap import Arena, Residency, page_size

_LOG = logging.getLogger("attmemo")
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing `Database.check` found wrong."""

    where: str
    what: str


class Database:
    """A published generation of an attention database, opened for reading.

    Opening checks the manifest, the size and header of every arena file, the catalogue, and the digests of the
    derived files; it reads no slot. `check` reads every one.

    Parameters
    ----------
    path : path-like
        Database directory.
    residency : {"page-cache", "hugepages"}
        Where maps are served from; ``"hugepages"`` loads all of them into 2 MiB pages now, if the machine gives any.
        Where it does not they stay in the page cache, and one line in the log says what would help.
    progress : callable, optional
        Called with (bytes loaded, bytes in total) while they are.

    Attributes
    ----------
    path : Path
    manifest : Manifest
    records : Snapshot
        Lengths, provenance, slots and checksums of all records, as arrays.

    Raises
    ------
    DatabaseNotFoundError, FormatVersionError, DatabaseCorruptError, DatabaseTruncatedError, PageSizeError
        The first rule that is broken.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        residency: Residency = "page-cache",
        progress: Progress | None = None,
    ) -> None:
        self.path = Path(path)
        self.residency: Residency = residency
        self.manifest: Manifest = fmt.read_manifest(self.path)
        self._arenas: dict[str, Arena] = {}
        self._indexes: dict[int, LayerIndex] = {}
        self._opening = threading.Lock()
        self._closed = False
        if self.manifest.page_size % page_size():
            raise PageSizeError(
                f"{self.path} was built for pages of {self.manifest.page_size} bytes; these have {page_size()}.",
                "build it again on a machine with these pages",
            )
        self._classes = {(c.kind, c.length): c for c in self.manifest.classes}
        for found in self.manifest.classes:
            fmt.check_arena(self.path, self.manifest.uuid, found)
        catalogue = Catalogue(self.path, len(KINDS), self.manifest.model.layers)
        try:
            self.records: Snapshot = catalogue.snapshot(self.manifest.records, self.manifest.records_digest)
        finally:
            catalogue.close()
        self._check_references()
        if residency == "hugepages":
            self._load(progress)

    # -- ask

    def __len__(self) -> int:
        return len(self.records)

    @property
    def trained(self) -> bool:
        """Whether there is an embedder, so that records can be looked up."""
        return self.manifest.embedder is not None

    @property
    def bytes(self) -> int:
        """Bytes of all arena files."""
        return sum(c.layout.file_bytes for c in self.manifest.classes)

    @property
    def lengths(self) -> dict[int, int]:
        """Records by token length."""
        values, counts = np.unique(self.records.lengths, return_counts=True)
        return dict(zip(values.tolist(), counts.tolist(), strict=True))

    def slots_of(self, kind: str, layer: int, records: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Slot numbers of a kind and layer for record ids."""
        found: npt.NDArray[np.int64] = self.records.slots[records, KINDS.index(kind), layer]
        return found

    def arena(self, kind: str, length: int) -> Arena:
        """The arena of a slot class, opened at the first use."""
        found = self._classes.get((kind, length))
        if found is None:
            raise KeyError(f"no record of {length} tokens")
        arena = self._arenas.get(found.name)
        if arena is None:
            with self._opening:
                self._check_open()
                arena = self._arenas.get(found.name)
                if arena is None:
                    # Inputs are read by training only, never while serving: they stay in the page cache.
                    residency: Residency = self.residency if kind == KIND_MAP else "page-cache"
                    arena = self._open_arena(found, residency)
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
        length = int(self.records.lengths[record])
        mapping = self.arena(kind, length).mapping
        mapping.check_whole()
        return mapping.slot(int(self.records.slots[record, KINDS.index(kind), layer]))

    def index(self, layer: int) -> LayerIndex:
        """The index of a layer, or of the once-per-sequence lookup (-1), loaded at the first use.

        Raises
        ------
        EmbedderMissingError
            The embedder was never trained.
        DatabaseCorruptError
            The container is missing or is not what the manifest says.
        """
        found = self._indexes.get(layer)
        if found is None:
            with self._opening:
                self._check_open()
                found = self._indexes.get(layer)
                if found is None:
                    embedder = self.embedder_ref()
                    ref = embedder.indexes.get(str(layer))
                    if ref is None:
                        raise EmbedderMissingError(f"{self.path} has no index for layer {layer}.", self._train())
                    dimension = int(embedder.report.get("dimension", 128))
                    found = LayerIndex.load(self.derived(ref), dimension, embedder.backend, embedder.records)
                    for length in found.lengths:
                        if (self.records.lengths[found.records_of(length)] != length).any():
                            raise DatabaseCorruptError(
                                f"{self.path / ref.file}: names a record of another length than {length}.",
                                self._train(),
                            )
                    self._indexes[layer] = found
        return found

    def embedder_ref(self) -> fmt.EmbedderRef:
        """Where the trained embedder is; EmbedderMissingError if it was never trained."""
        if self.manifest.embedder is None:
            raise EmbedderMissingError(
                f"{self.path} holds {len(self)} records but no trained embedder, so nothing can be looked up.",
                self._train(),
            )
        return self.manifest.embedder

    def derived(self, ref: fmt.FileRef) -> Path:
        """Path of a derived file, its digest checked: nothing parses bytes that the builder did not write."""
        file = self.path / ref.file
        try:
            digest = fmt.file_digest(file)
        except OSError as error:
            raise DatabaseCorruptError(f"{file} cannot be read: {error.strerror}.", self._train()) from error
        if digest != ref.digest:
            self._check_generation(ref)
            raise DatabaseCorruptError(
                f"{file} has digest {digest[:16]}…, expected {ref.digest[:16]}….", self._train()
            )
        return file

    def check(self, progress: Progress | None = None) -> Iterator[Finding]:
        """Read everything: every slot's checksum, its padding, every reference, every derived file.

        Parameters
        ----------
        progress : callable, optional
            Called with (slots done, slots in total).

        Yields
        ------
        Finding
            In the order found; none if the database is whole.
        """
        kept = {kind: self.manifest.layers_kept(kind) for kind in KINDS}
        total, done = len(self) * sum(kept.values()), 0
        for record in range(len(self)):
            length = int(self.records.lengths[record])
            for k, kind in enumerate(KINDS):
                found = self._classes[(kind, length)]
                arena = self.arena(kind, length)
                for layer in range(kept[kind]):
                    slot = int(self.records.slots[record, k, layer])
                    where = f"{found.file}, slot {slot} (record {record}, layer {layer})"
                    arena.mapping.check_whole()
                    payload = arena.slot_bytes(slot)
                    checksum = fmt.slot_checksum(self.manifest.uuid, found.name, slot, payload)
                    if checksum != int(self.records.checksums[record, k, layer]):
                        yield Finding(where, "the bytes do not match their checksum")
                done += kept[kind]
                if progress is not None:
                    progress(done, total)
        for found in self.manifest.classes:
            yield from self._check_padding(found)
        embedder = self.manifest.embedder
        if embedder is not None:
            for ref in (embedder.weights, *embedder.indexes.values()):
                try:
                    self.derived(ref)
                except DatabaseCorruptError as error:
                    yield Finding(ref.file, error.what)
            for name in embedder.indexes:
                with suppress(DatabaseCorruptError):  # a wrong digest is already reported
                    try:
                        self.index(int(name))
                    except EmbedderMissingError as error:
                        yield Finding(f"index {name}", error.what)

    # -- do

    def close(self) -> None:
        """Unmap everything. Views that are still held stay valid. Closing twice is fine."""
        with self._opening:
            self._closed = True
            arenas, self._arenas, self._indexes = self._arenas, {}, {}
        for arena in arenas.values():
            arena.close()

    def __enter__(self) -> Database:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Database({str(self.path)!r}, {len(self)} records, generation {self.manifest.generation})"

    def reside(self, residency: Residency, progress: Progress | None = None) -> None:
        """Serve maps from elsewhere from now on; ``"hugepages"`` loads all of them now (see `Database`)."""
        self.residency = residency
        if residency == "hugepages":
            self._load(progress)

    # -- inside

    def _load(self, progress: Progress | None) -> None:
        """Open every arena of maps, which loads it, and say once where they could not be had as asked."""
        classes = [found for found in self.manifest.classes if found.kind == KIND_MAP]
        total, done = sum(found.layout.file_bytes for found in classes), 0
        notices = []
        for found in classes:
            arena = self._open_arena(found, "hugepages", _shifted(progress, done, total))
            done += found.layout.file_bytes
            if arena.notice is not None:
                notices.append(arena.notice)
            if progress is not None:
                progress(done, total)
        if notices:
            more = f" (the same for {len(notices) - 1} more of {len(classes)} arenas)" if notices[1:] else ""
            _LOG.warning("attmemo: %s%s", notices[0], more)

    def _open_arena(self, found: SlotClass, residency: Residency, progress: Progress | None = None) -> Arena:
        arena = Arena(self.path / found.file, found.layout, residency, progress)
        fmt.check_arena(self.path, self.manifest.uuid, found)  # again: another file may have been put in its place
        self._arenas[found.name] = arena
        return arena

    def _check_open(self) -> None:
        if self._closed:
            raise DatabaseError(f"{self.path} was closed", f"open it again: Database({str(self.path)!r})")

    def _check_generation(self, ref: fmt.FileRef) -> None:
        """If a derived file says whose it is, and it is not the one that is named: say that instead of a digest."""
        file = self.path / ref.file
        try:
            with safe_open(str(file), framework="np") as container:
                owner = container.metadata() or {}
        except (SafetensorError, OSError, ValueError):
            return
        if "database" in owner and owner["database"] != self.manifest.uuid:
            raise GenerationMismatchError(
                f"{file} belongs to database {owner['database'][:8]}…, expected {self.manifest.uuid[:8]}….",
                self._train(),
            )
        named = "".join(filter(str.isdecimal, ref.file.split("/")[0])).lstrip("0")
        if "generation" in owner and owner["generation"] != named:
            raise GenerationMismatchError(
                f"{file} was written for generation {owner['generation'][:20]}, expected {named}: {fmt.MANIFEST} "
                "names another file of this name.",
                self._train(),
            )

    def _check_references(self) -> None:
        records = self.records
        for length in np.unique(records.lengths).tolist():
            rows = records.lengths == length
            for k, kind in enumerate(KINDS):
                found = self._classes.get((kind, length))
                if found is None:
                    raise self._corrupt(f"a record has {length} tokens, but there are no {kind} slots of that length")
                slots = records.slots[rows, k, : self.manifest.layers_kept(kind)]
                if int(slots.max()) >= found.slots:
                    raise self._corrupt(f"a record names a slot beyond the {found.slots} of {found.name}")
                if len(np.unique(slots)) != slots.size:
                    raise self._corrupt(f"two records name the same slot of {found.name}")
        if len(records) and records.sources.max() >= max(1, len(self.manifest.sources)):
            raise self._corrupt("a record names a data source that is not listed")
        for found in self.manifest.classes:
            layers = self.manifest.layers_kept(found.kind)
            if found.slots % layers:
                raise self._corrupt(f"{found.name} has {found.slots} slots, not a multiple of {layers} layers")
        embedder = self.manifest.embedder
        if embedder is not None and embedder.records > len(records):
            raise self._corrupt(f"the index covers {embedder.records} records of {len(records)}")

    def _check_padding(self, found: SlotClass) -> Iterator[Finding]:
        spare = found.stride - found.layout.nbytes
        with (self.path / found.file).open("rb") as stream:
            stream.seek(fmt.HEADER_BYTES)
            gap = found.header - fmt.HEADER_BYTES
            if stream.read(gap).count(0) != gap:
                yield Finding(found.file, "the bytes between the header and the first slot are not zero")
            if not spare:
                return
            for slot in range(found.slots):
                stream.seek(found.layout.offset(slot) + found.layout.nbytes)
                if stream.read(spare).count(0) != spare:
                    yield Finding(f"{found.file}, slot {slot}", "the padding behind the slot is not zero")

    def _corrupt(self, why: str) -> DatabaseCorruptError:
        return DatabaseCorruptError(f"{self.path}: {why}.", self._restore())

    def _restore(self) -> str:
        return "restore the database from a copy, or build it again with attmemo build-database"

    def _train(self) -> str:
        return f"attmemo train-embedder {self.path}"


def _shifted(progress: Progress | None, before: int, total: int) -> Progress | None:
    """The progress of one arena as a part of that of all."""
    return None if progress is None else lambda done, _: progress(before + done, total)


def cache_directory() -> Path:
    """Where databases are looked for by fingerprint: ``$ATTMEMO_CACHE``, or the user's cache directory."""
    from platformdirs import user_cache_path

    chosen = os.environ.get("ATTMEMO_CACHE")
    return Path(chosen) if chosen else user_cache_path("attmemo", appauthor=False) / "databases"


def find_database(fingerprint: str) -> Path:
    """The database of a model in the cache directory, the one with most records if there are several.

    Raises
    ------
    DatabaseNotFoundError
        There is none for this fingerprint.
    """
    folder = cache_directory()
    best: tuple[int, Path] | None = None
    for file in sorted(folder.glob(f"*/{fmt.MANIFEST}")):
        try:
            manifest = fmt.read_manifest(file.parent)
        except DatabaseError:  # damaged, or of another version: not the one we look for
            continue
        if manifest.model.fingerprint == fingerprint and (best is None or manifest.records > best[0]):
            best = manifest.records, file.parent
    if best is None:
        raise DatabaseNotFoundError(
            f"no database for this model (fingerprint {fingerprint[:12]}…) in {folder}.",
            "attmemo build-database --model … --data …, or pass database=PATH",
        )
    return best[1]


def default_path(fingerprint: str) -> Path:
    """Where a database is built when the user names no place: found again by `find_database`."""
    return cache_directory() / fingerprint[:16]


__all__ = ["Database", "Finding", "cache_directory", "default_path", "find_database"]
