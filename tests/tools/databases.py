"""Synthetic records, a small whole database of them, and what a reader sees of one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attmemo.db import (
    KIND_INPUT,
    KIND_MAP,
    SEQUENCE,
    Database,
    DatabaseWriter,
    EmbedderRef,
    FileRef,
    LayerIndex,
    ModelInfo,
    Provenance,
    file_digest,
)
from attmemo.embed.siamese import SiameseEmbedder, save_embedders


def add_maps(writer: DatabaseWriter, maps: Sequence[Tensor], inputs: Sequence[Tensor], provenance: Provenance) -> int:
    """Store a map ``[heads, n, n]`` and hidden states ``[n, hidden]`` of every layer."""
    return writer.add({KIND_MAP: maps, KIND_INPUT: inputs}, int(maps[0].shape[-1]), provenance)


MODEL = ModelInfo(
    name="synthetic",
    family="bert",
    mask_kind="padding",
    layers=2,
    heads=2,
    hidden=8,
    dtype="float32",
    max_length=64,
    fingerprint="f" * 64,
    fields={"config": '{"hidden_size": 8}', "dtype": "float32", "weights": "0" * 64},
    tokenizer=None,
)
LENGTHS = (3, 5, 3, 8, 5, 3, 8, 4)
Contents = dict[tuple[int, int], tuple[int, int, bytes]]


def sequence(number: int, length: int, model: ModelInfo = MODEL) -> tuple[list[Tensor], list[Tensor]]:
    """Maps and inputs of a record: the same for the same number, different for another."""
    generator = torch.Generator().manual_seed(number)
    maps = [
        (3 * torch.randn((model.heads, length, length), generator=generator)).softmax(-1) for _ in range(model.layers)
    ]
    return maps, [torch.randn((length, model.hidden), generator=generator) for _ in range(model.layers)]


def fill(path: Path, lengths: Sequence[int] = LENGTHS, every: int = 2, storage: str = "float32") -> Path:
    """Build, or resume, a database of the records 0, 1, … of these lengths; a generation every so many rows."""
    with DatabaseWriter(path, MODEL, storage) as writer:
        source = writer.add_source("synthetic.log", "d" * 32)
        known = writer.stored_rows().get(source, set())
        for row, length in enumerate(lengths):
            if row not in known:
                add_maps(writer, *sequence(row, length), Provenance(source, row, row % 2))
            if row % every == every - 1 and writer.records > writer.manifest.records:
                writer.publish()
        if writer.records > writer.manifest.records:
            writer.publish()
    return path


def train_by_hand(path: Path, seed: int = 0) -> Path:
    """Give a database random embedders and real indexes: everything a reader can open, in milliseconds."""
    generator = torch.Generator().manual_seed(seed)
    with Database(path) as database, DatabaseWriter(path, database.manifest.model, "float32") as writer:
        model, generation = database.manifest.model, database.manifest.generation + 1
        layers = [SEQUENCE, *range(model.layers)]
        embedders = {
            layer: SiameseEmbedder(
                torch.randn((model.hidden, 2), generator=generator),
                torch.zeros(2),
                torch.randn((model.max_length * 2, 4), generator=generator),
                torch.eye(4),
            )
            for layer in layers
        }
        weights = path / f"embedder-{generation:06d}.safetensors"
        save_embedders(embedders, weights)
        folder = path / f"index-{generation:06d}"
        folder.mkdir()
        indexes = {}
        for layer in layers:
            vectors = torch.randn((len(database), 4), generator=generator).numpy()
            file = folder / ("sequence.safetensors" if layer == SEQUENCE else f"layer-{layer:03d}.safetensors")
            LayerIndex.build(vectors, database.records.lengths, "faiss").save(file)
            indexes[str(layer)] = FileRef(str(file.relative_to(path)), file_digest(file))
        curve = {"distances": [0.0, 1.0], "scores": [1.0, 0.5]}
        writer.publish(
            embedder=EmbedderRef(
                weights=FileRef(weights.name, file_digest(weights)),
                backend="faiss",
                next_id=len(database),
                indexes=indexes,
                calibration={str(layer): {str(layer): curve} for layer in layers},
                report={"dimension": 4, "layers": {}},
            )
        )
    return path


def contents(path: Path) -> Contents:
    """What a reader sees: by source and row the length, the split and the bytes of every slot. No row twice."""
    found: Contents = {}
    with Database(path) as database:
        for record in range(len(database)):
            length = int(database.records.lengths[record])
            body = b"".join(
                bytes(database.arena(kind.name, length).slot_bytes(int(slot)))
                for kind in database.manifest.kinds
                for layer in range(kind.layers)
                for slot in database.slots_of(kind.name, layer, np.array([record]))
            )
            key = int(database.records.sources[record]), int(database.records.rows[record])
            assert key not in found, f"row {key} is stored twice"
            found[key] = length, int(database.records.splits[record]), body
    return found


def findings(path: Path) -> list[str]:
    """Everything `check` finds."""
    with Database(path) as database:
        return [f"{finding.where}: {finding.what}" for finding in database.check()]


@contextmanager
def changed(file: Path, at: int, new: bytes) -> Iterator[None]:
    """Bytes of a file replaced, and put back afterwards."""
    with file.open("r+b") as stream:
        stream.seek(at)
        old = stream.read(len(new))
        stream.seek(at)
        stream.write(new)
    try:
        yield
    finally:
        with file.open("r+b") as stream:
            stream.seek(at)
            stream.write(old)


@contextmanager
def memory_directory() -> Iterator[Path]:
    """A directory in memory where there is one: a killed process loses nothing there either, and syncs are free."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="attmemo-test-", dir=parent)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


