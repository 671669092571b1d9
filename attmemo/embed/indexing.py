"""The files that training leaves beside the arena: weights, and an index for each lookup over all records."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from attmemo.db import SEQUENCE, Database, EmbedderRef, FileRef, LayerIndex, file_digest, storing
from attmemo.embed.siamese import save_embedders
from attmemo.embed.stored import embed_records
from attmemo.embed.training import Progress, Trained


def build_indexes(database: Database, trained: Trained, progress: Progress | None = None) -> EmbedderRef:
    """Embed all records, build the indexes and write weights and indexes beside the arena.

    The files belong to no generation until the manifest names them. `progress` is called with (what, done, total).
    StorageFullError, DatabaseError: the files cannot be written. None of them is left.
    """
    tell = progress or (lambda what, done, total: None)
    generation = database.manifest.generation + 1
    weights = database.path / f"embedder-{generation:06d}.safetensors"
    folder = database.path / f"index-{generation:06d}"
    try:
        with storing(database.path):
            return _build_indexes(database, trained, weights, folder, tell)
    except BaseException:  # the manifest will not name them, and on a full disk they would be in the way
        shutil.rmtree(folder, ignore_errors=True)
        weights.unlink(missing_ok=True)
        raise


def remove_stale(path: Path, *keep: EmbedderRef | None) -> None:
    """Delete embedders and indexes that none of the generations to keep names. DatabaseError: a file stays.

    Keep the new generation and the one before: a reader may have opened that one and load its files only now.
    """
    kept = {ref.file.split("/")[0] for found in keep if found for ref in (found.weights, *found.indexes.values())}
    with storing(path):
        for entry in path.iterdir():
            if entry.name.startswith(("embedder-", "index-")) and entry.name not in kept:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _build_indexes(database: Database, trained: Trained, weights: Path, folder: Path, tell: Progress) -> EmbedderRef:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    owner = {"database": database.manifest.uuid, "generation": str(database.manifest.generation + 1)}
    save_embedders({layer: found.embedder for layer, found in trained.layers.items()}, weights, owner)
    # Held-out records may be longer than any that trained: their last positions have no weights, so they cannot serve.
    longest, lengths = trained.longest, database.records.lengths
    reached = np.flatnonzero(lengths <= longest).astype(np.int64)
    indexes = {}
    for step, (layer, found) in enumerate(sorted(trained.layers.items())):
        tell("indexes", step, len(trained.layers))
        vectors = np.zeros((len(database), found.embedder.dimension), np.float32)
        vectors[reached] = embed_records(database, layer, reached, [found.embedder])[0]
        file = folder / f"{'sequence' if layer == SEQUENCE else f'layer-{layer:03d}'}.safetensors"
        index = LayerIndex.build(vectors, lengths, trained.options.backend, longest)
        index.save(file, database.records.ids, owner)
        indexes[str(layer)] = FileRef(str(file.relative_to(database.path)), file_digest(file))
    tell("indexes", len(trained.layers), len(trained.layers))
    return EmbedderRef(
        weights=FileRef(weights.name, file_digest(weights)),
        backend=trained.options.backend,
        next_id=database.manifest.next_id,
        indexes=indexes,
        calibration={
            str(layer): {str(key): curve.to_dict() for key, curve in found.calibrations.items()}
            for layer, found in trained.layers.items()
        },
        report={
            "dimension": trained.options.dimension,
            "coverage": trained.options.coverage,
            "layers": {str(layer): found.report for layer, found in trained.layers.items()},
        },
    )
