"""Building a database: append records, publish generations, resume after any interruption.

Order of a publication: slots are written and synced, then the catalogue transaction, then the manifest is replaced.
A crash before the last step leaves the previous generation; whatever it left behind is cut off when the builder
comes back.
"""

from __future__ import annotations

import errno
import fcntl
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from attmemo.db import format as fmt
from attmemo.db.catalogue import SPLIT_TRAIN, Catalogue, Record, extend_digest
from attmemo.db.format import KINDS, EmbedderRef, Manifest, ModelInfo, SlotClass, Source
from attmemo.db.forms import KIND_INPUT, KIND_MAP, STORAGE, TYPES, pack, type_of, unpack
from attmemo.errors import (
    DatabaseCorruptError,
    DatabaseError,
    DatabaseLockedError,
    ForkedHandleError,
    StorageFullError,
)
from attmemo.mmap import page_size

_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a record's text came from."""

    source: int
    row: int
    split: int = SPLIT_TRAIN


class DatabaseWriter:
    """The one writer of a database directory.

    Parameters
    ----------
    path : Path
        Database directory; created if absent.
    model : ModelInfo
        The model whose maps are stored. An existing database must have the same fingerprint.
    storage : str
        One of `attmemo.db.forms.STORAGE`.
    settings : mapping
        What the build was asked for, kept in the manifest; a resumed build must ask for the same.

    Raises
    ------
    DatabaseLockedError
        Another process is building it.
    DatabaseError
        The directory holds something else, or a database of another model or with other settings.
    """

    def __init__(self, path: Path, model: ModelInfo, storage: str, settings: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self._files: dict[str, int] = {}
        self._pending: list[Record] = []
        self._lock_fd = -1
        self._pid = os.getpid()
        self._entries: list[Record] = []  # published ones, read when somebody asks for one
        self._lost: OSError | None = None  # what the kernel said when it could not write something down
        if storage not in STORAGE:
            raise ValueError(f"storage must be one of {', '.join(STORAGE)}, got {storage!r}")
        try:
            if path.exists() and not path.is_dir():
                raise DatabaseError(f"{path} is a file; a database is a directory.", "choose another --output")
            if path.is_dir() and not (path / fmt.MANIFEST).exists() and not _is_begun(path):
                raise DatabaseError(f"{path} is not empty and is not a database.", "choose another --output")
            fresh = not path.exists()
            (path / fmt.ARENA).mkdir(parents=True, exist_ok=True)
            if fresh:
                fmt.sync_directory(path.parent)
            self._lock()
            if (path / fmt.MANIFEST).exists():
                self._manifest = self._resume(model, storage, dict(settings or {}))
            else:
                self._manifest = Manifest(
                    uuid=uuid.uuid4().hex,
                    generation=0,
                    page_size=page_size(),
                    model=model,
                    storage=storage,
                    records=0,
                    records_digest="",
                    settings=dict(settings or {}),
                )
                # Nothing was ever published: what a killed builder began may not even be whole.
                for name in ("data.mdb", "lock.mdb"):
                    (path / fmt.CATALOGUE / name).unlink(missing_ok=True)
            with self._catalogue(check=True) as catalogue:
                catalogue.truncate(self._manifest.records)
        except OSError as error:
            self._unlock()
            raise _named(error, path) from error
        except BaseException:
            self._unlock()
            raise
        self._classes = {c.name: c for c in self._manifest.classes}

    # -- ask

    @property
    def manifest(self) -> Manifest:
        """The last published manifest (generation 0: nothing published yet)."""
        return self._manifest

    @property
    def records(self) -> int:
        """Records stored, published or not."""
        return self._manifest.records + len(self._pending)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all arena files, unpublished slots included."""
        return sum(found.layout.file_bytes for found in self._classes.values())

    def stored_rows(self) -> dict[int, set[int]]:
        """Data rows already stored, by source number: what a resumed build skips."""
        rows: dict[int, set[int]] = {}
        with self._catalogue() as catalogue:
            for _, record in catalogue.entries(self._manifest.records, self._manifest.records_digest):
                rows.setdefault(record.source, set()).add(record.row)
        return rows

    def cost(self, length: int) -> int:
        """Bytes that one more record of this length will take."""
        total = 0
        for kind in KINDS:
            found = self._class(kind, length)
            header = 0 if found.name in self._classes else found.header
            total += found.stride * self._manifest.layers_kept(kind) + header
        return total

    def maps(self, record: int) -> list[Tensor]:
        """Maps ``[heads, n, n]`` of every layer of a record, published or not; copies."""
        return [unpack(stored) for stored in self._read(KIND_MAP, record)]

    def first_input(self, record: int) -> Tensor:
        """Hidden states ``[n, hidden]`` that entered the first layer, float32; a copy."""
        return next(self._read(KIND_INPUT, record)).float()

    # -- do

    def add_source(self, name: str, digest: str) -> int:
        """Number of a data file, the same one for the same content."""
        for number, source in enumerate(self._manifest.sources):
            if source.digest == digest:
                return number
        self._manifest = replace(self._manifest, sources=(*self._manifest.sources, Source(name, digest)))
        return len(self._manifest.sources) - 1

    def add(self, maps: Sequence[Tensor], inputs: Sequence[Tensor], provenance: Provenance) -> int:
        """Store one sequence: a map ``[heads, n, n]`` and the hidden states ``[n, hidden]`` of every layer.

        Returns
        -------
        int
            The record's id; it becomes visible with `publish`.

        Raises
        ------
        DatabaseCorruptError
            A map is not one: values outside [0, 1], not finite, or rows that do not sum to 1. Or a hidden state is
            not finite in the storage type. Nothing is stored.
        StorageFullError
            The disk is full; what was published stays.
        """
        self._check_process()
        model = self._manifest.model
        length = int(maps[0].shape[-1])
        if len(maps) != model.layers or len(inputs) != model.layers:
            raise ValueError(f"expected {model.layers} maps and inputs, got {len(maps)} and {len(inputs)}")
        causal = model.mask_kind == fmt.CAUSAL
        for layer, (apm, hidden) in enumerate(zip(maps, inputs, strict=True)):
            _check_map(apm, layer, provenance, causal)
            if layer < self._manifest.layers_kept(KIND_INPUT):
                _check_input(hidden, layer, provenance, self._manifest.storage)
        slots = np.zeros((len(KINDS), model.layers), np.uint64)
        checksums = np.zeros((len(KINDS), model.layers), np.uint64)
        grown: dict[str, SlotClass] = {}
        for k, (kind, tensors) in enumerate(zip(KINDS, (maps, inputs), strict=True)):
            expected = (model.heads, length, length) if kind == KIND_MAP else (length, model.hidden)
            found = self._class(kind, length)
            body = bytearray()
            kept = self._manifest.layers_kept(kind)
            for layer, tensor in enumerate(tensors[:kept]):
                if tuple(tensor.shape) != expected:
                    raise ValueError(f"{kind} of layer {layer} has shape {tuple(tensor.shape)}, expected {expected}")
                payload = _payload(pack(tensor, found.dtype, causal) if kind == KIND_MAP else tensor, found)
                slot = found.slots + layer
                slots[k, layer] = slot
                checksums[k, layer] = fmt.slot_checksum(self._manifest.uuid, found.name, slot, payload)
                body += payload
                body += bytes(found.stride - len(payload))
            self._write(found, bytes(body))
            grown[found.name] = replace(found, slots=found.slots + kept)
        record = Record(length, provenance.source, provenance.row, provenance.split, slots, checksums)
        # Only now, with every kind written: a full disk half-way leaves the counts as they were. And in one statement:
        # Ctrl-C falls before it or behind it, so no slot is ever counted without its record.
        self._classes, self._pending = self._classes | grown, [*self._pending, record]
        return self.records - 1

    def publish(self, **changes: Any) -> Manifest:
        """Make everything stored so far visible, as one generation.

        Parameters
        ----------
        **changes
            Manifest fields to replace (``embedder``, ``profile``, ``tuning``).
        """
        self._check_process()
        try:
            for fd in self._files.values():
                os.fdatasync(fd)
            fmt.sync_directory(self.path / fmt.ARENA)
            embedder = changes.get("embedder")
            if isinstance(embedder, EmbedderRef):
                for ref in (embedder.weights, *embedder.indexes.values()):
                    fmt.sync_file(self.path / ref.file)
            if self._pending:
                with self._catalogue() as catalogue:
                    catalogue.append(self._manifest.records, self._pending)
                fmt.sync_directory(self.path / fmt.CATALOGUE)
            # The manifest names files and directories: their names must not be lost by what it survives.
            fmt.sync_directory(self.path)
            digest = self._manifest.records_digest
            following = replace(
                self._manifest,
                records=self.records,
                records_digest=None if digest is None else extend_digest(digest, self._pending),
                classes=tuple(self._classes[name] for name in sorted(self._classes)),
                **changes,
            )
            # One statement again: after Ctrl-C a second publication must not append the same records twice.
            self._manifest, self._pending = fmt.write_manifest(self.path, following), []
        except OSError as error:
            if error.errno not in _FULL:
                self._lost = error
            raise _named(error, self.path) from error
        return self._manifest

    def close(self) -> None:
        """Release files and the builder's lock; what was not published is not visible."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()
        self._unlock()

    def __enter__(self) -> DatabaseWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside

    def _read(self, kind: str, record: int) -> Iterator[Tensor]:
        """Slots of a record as they are stored, layer by layer."""
        entry = self._entry(record)
        found = self._class(kind, entry.length)
        layout = found.layout
        with (self.path / found.file).open("rb", buffering=0) as stream:
            for slot in entry.slots[KINDS.index(kind), : self._manifest.layers_kept(kind)].tolist():
                raw = bytearray(os.pread(stream.fileno(), layout.nbytes, layout.offset(slot)))
                yield torch.frombuffer(raw, dtype=layout.dtype).view(layout.shape)

    def _entry(self, record: int) -> Record:
        published = self._manifest.records
        if record >= published:
            return self._pending[record - published]
        if record >= len(self._entries):  # since the last time, more were published
            with self._catalogue() as catalogue:
                self._entries = [e for _, e in catalogue.entries(published, self._manifest.records_digest)]
        return self._entries[record]

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedHandleError(
                f"{self.path} was opened for writing by process {self._pid}; this one ({os.getpid()}) is its fork.",
                "open a DatabaseWriter in the process that writes, when the other is done",
            )
        if self._lost is not None:
            # After a failed fsync the kernel may call pages clean that it never wrote: a second one would succeed.
            raise _named(self._lost, self.path)

    def _catalogue(self, check: bool = False) -> closing[Catalogue]:
        # Opened for each use: LMDB must not be open twice in a process, and a trainer reads what it holds the lock of.
        return closing(Catalogue(self.path, len(KINDS), self._manifest.model.layers, write=True, check=check))

    def _resume(self, model: ModelInfo, storage: str, settings: dict[str, Any]) -> Manifest:
        manifest = fmt.read_manifest(self.path)
        from_disk, asked = manifest.model, model
        if from_disk.fingerprint != asked.fingerprint:
            raise DatabaseError(
                f"{self.path} was built for another model ({from_disk.name}, {from_disk.fingerprint[:12]}…; "
                f"asked: {asked.name}, {asked.fingerprint[:12]}…).",
                "choose another --output, or the model it was built for",
            )
        old = {"storage": manifest.storage, "max_length": from_disk.max_length, **manifest.settings}
        new = {"storage": storage, "max_length": asked.max_length, **settings}
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                raise DatabaseError(
                    f"{self.path} was built with {key} = {old.get(key)!r}; asked: {new.get(key)!r}.",
                    "ask for the same, or choose another --output",
                )
        if manifest.page_size != page_size():
            raise DatabaseError(
                f"{self.path} was built for pages of {manifest.page_size} bytes, this machine has {page_size()}.",
                "append on a machine like the one that built it, or build a new database here",
            )
        for found in manifest.classes:  # appending to a short file would fill the gap with zeros, and hide it
            fmt.check_arena(self.path, manifest.uuid, found)
        if not (self.path / fmt.CATALOGUE / "data.mdb").exists():
            Catalogue(self.path, len(KINDS), manifest.model.layers).close()  # says that it is missing
        return manifest

    def _class(self, kind: str, length: int) -> SlotClass:
        name = f"{kind}-{length:05d}"
        found = self._classes.get(name)
        if found is None:
            model = self._manifest.model
            dtype = type_of(kind, self._manifest.storage)
            found = SlotClass.make(kind, length, fmt.slot_shape(kind, length, model), dtype)
        return found

    def _write(self, found: SlotClass, body: bytes) -> None:
        layout = found.layout
        try:
            fd = self._files.get(found.name)
            if fd is None:
                fd = os.open(self.path / found.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                try:
                    if found.slots == 0:
                        os.ftruncate(fd, 0)
                        _write_all(fd, fmt.arena_header(self._manifest.uuid, found), 0)
                    else:
                        os.ftruncate(fd, layout.file_bytes)  # slots that a killed builder never published
                except BaseException:
                    os.close(fd)  # the next attempt begins with the header again
                    raise
                self._files[found.name] = fd
            # pwrite, not a store through a mapping: a full disk is then an error code and not a signal.
            _write_all(fd, body, layout.file_bytes)
        except OSError as error:
            raise _named(error, self.path) from error

    def _lock(self) -> None:
        file = self.path / fmt.LOCK
        self._lock_fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._lock_fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock_fd)
            self._lock_fd = -1
            raise DatabaseLockedError(
                f"{self.path} is being written by another process (pid {holder}).", "wait for it to finish, or stop it"
            ) from error
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)  # flock goes with the descriptor
            self._lock_fd = -1


def _is_begun(path: Path) -> bool:
    """Whether a directory holds only what a builder makes before its first publication."""
    return {entry.name for entry in path.iterdir()} <= {fmt.ARENA, fmt.CATALOGUE, fmt.LOCK, fmt.MANIFEST + ".tmp"}


def _check_input(hidden: Tensor, layer: int, provenance: Provenance, storage: str) -> None:
    # Through float32: a type without infinity has its own way of saying so, and no isfinite.
    if bool(torch.isfinite(hidden.to(TYPES[type_of(KIND_INPUT, storage)]).float()).all()):
        return
    raise DatabaseCorruptError(
        f"row {provenance.row} of the data, layer {layer}: the hidden states are not finite in {storage}; "
        "nothing was stored.",
        "store in a type of wider range: --dtype bfloat16 or float32",
    )


def _payload(tensor: Tensor, found: SlotClass) -> bytes:
    return tensor.detach().to("cpu", TYPES[found.dtype]).contiguous().view(torch.uint8).numpy().tobytes()


def _check_map(apm: Tensor, layer: int, provenance: Provenance, causal: bool) -> None:
    if causal and bool(torch.triu(apm, 1).any()):
        raise DatabaseCorruptError(
            f"row {provenance.row} of the data, layer {layer}: the model is causal, but its attention looks ahead; "
            "nothing was stored.",
            "this is a fault of the adapter; leave the model unmemoized",
        )
    sums = apm.float().sum(-1)
    # A row of 512 bfloat16 probabilities sums to 1 within 2 %; a map that is none is far off.
    if bool(torch.isfinite(sums).all()) and bool((apm >= 0).all()) and float((sums - 1).abs().max()) < 0.05:
        return
    raise DatabaseCorruptError(
        f"row {provenance.row} of the data, layer {layer}: the model's attention is not a probability matrix "
        f"(row sums from {float(sums.min()):.3g} to {float(sums.max()):.3g}); nothing was stored.",
        "check the model in this precision; bfloat16 or float32 often cures an overflow",
    )


def _write_all(fd: int, body: bytes, offset: int) -> None:
    view = memoryview(body)
    while view:
        written = os.pwrite(fd, view, offset)  # may be short, above 2 GiB always is
        view, offset = view[written:], offset + written


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Files that others write for a database directory: what their writing fails with becomes an error of ours."""
    try:
        yield
    except SafetensorError as error:
        text = str(error)
        full = "No space left" in text or "os error 28" in text or "quota" in text
        raise _named(OSError(errno.ENOSPC if full else errno.EIO, text), path) from error
    except OSError as error:
        raise _named(error, path) from error


def _named(error: OSError, path: Path) -> DatabaseError:
    if error.errno in _FULL:
        try:
            room = os.statvfs(path)
            free = f"{room.f_bavail * room.f_frsize / 2**20:.0f} MiB free"
        except OSError:
            free = "no space left"
        return StorageFullError(
            f"{path}: the disk is full ({free}). What was published stays.",
            "free space and run the same command again, it resumes; or use --max-bytes or --limit",
        )
    return DatabaseError(
        f"{path}: {error.strerror or error}. What was published stays.",
        "see whether the disk is sound (dmesg) and run the same command again, it resumes",
    )
