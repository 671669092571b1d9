"""The files that training leaves beside the arena: weights, and an index for each lookup over all records.

Records that are stored later are found once the indexes are made anew: by another training, or with the embedder that
there is (`extend_indexes`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from attmemo.db import SEQUENCE, Backend, Database, EmbedderRef, FileRef, LayerIndex, file_digest, storing
from attmemo.embed.calibration import COVERAGE
from attmemo.embed.siamese import DIMENSION, SiameseEmbedder, load_embedders, save_embedders
from attmemo.embed.stored import embed_records
from attmemo.embed.training import Progress, Trained

TRAINED: Final = "trained_below"
"""Name in an embedder's report: records with ids from this one on were not there at the training."""


def build_indexes(database: Database, trained: Trained, progress: Progress | None = None) -> EmbedderRef:
    """Embed all records, build the indexes and write weights and indexes beside the arena.

    The files belong to no generation until the manifest names them. `progress` is called with (what, done, total).
    StorageFullError, DatabaseError: the files cannot be written. None of them is left.
    """
    weights = database.path / f"embedder-{database.manifest.generation + 1:06d}.safetensors"
    with _all_or_nothing(database, weights) as folder:
        owner, embedders = _owner(database), {layer: found.embedder for layer, found in trained.layers.items()}
        save_embedders(embedders, weights, owner)
        indexes = _write_indexes(database, embedders, trained.options.backend, folder, progress)
        return EmbedderRef(
            weights=FileRef(weights.name, file_digest(weights)),
            backend=trained.options.backend,
            next_id=len(database),
            indexes=indexes,
            calibration={
                str(layer): {str(key): curve.to_dict() for key, curve in found.calibrations.items()}
                for layer, found in trained.layers.items()
            },
            report={
                "dimension": DIMENSION,
                "coverage": COVERAGE,
                "layers": {str(layer): found.report for layer, found in trained.layers.items()},
                TRAINED: len(database),
            },
        )


def extend_indexes(database: Database, progress: Progress | None = None) -> EmbedderRef:
    """The embedder there is, with indexes of all records: those that were stored after its training, too.

    For files and `progress` see `build_indexes`. EmbedderMissingError: there is no embedder.
    StorageFullError, DatabaseError: the files cannot be written. None of them is left.
    """
    ref = database.embedder_ref()
    embedders = load_embedders(database.derived(ref.weights), database.manifest.model.hidden)
    with _all_or_nothing(database) as folder:
        backend: Backend = ref.backend  # type: ignore[assignment]  # an index with it was opened before
        indexes = _write_indexes(database, embedders, backend, folder, progress)
    report = ref.report | {TRAINED: learned_below(ref)}
    return replace(ref, next_id=len(database), indexes=indexes, report=report)


def learned_below(ref: EmbedderRef) -> int:
    """Records with ids from this one on were stored after the embedder's training."""
    return int(ref.report.get(TRAINED, ref.next_id))


def remove_stale(path: Path, *keep: EmbedderRef | None) -> None:
    """Delete embedders and indexes that none of the generations to keep names. DatabaseError: a file stays.

    Keep the new generation and the one before: a reader may have opened that one and load its files only now.
    """
    kept = {ref.file.split("/")[0] for found in keep if found for ref in (found.weights, *found.indexes.values())}
    with storing(path):
        for entry in path.iterdir():
            if entry.name.startswith(("embedder-", "index-")) and entry.name not in kept:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


@contextmanager
def _all_or_nothing(database: Database, weights: Path | None = None) -> Iterator[Path]:
    """A new folder for indexes. After an error neither the folder nor `weights` is left.

    The manifest will not name the files, and on a full disk they would be in the way.
    """
    folder = database.path / f"index-{database.manifest.generation + 1:06d}"
    try:
        with storing(database.path):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if weights is not None:
            weights.unlink(missing_ok=True)
        raise


def _owner(database: Database) -> dict[str, str]:
    """Whose a file is, for messages."""
    return {"database": database.manifest.uuid, "generation": str(database.manifest.generation + 1)}


def _write_indexes(
    database: Database, embedders: Mapping[int, SiameseEmbedder], backend: Backend, folder: Path,
    progress: Progress | None,
) -> dict[str, FileRef]:  # fmt: skip
    tell = progress or (lambda what, done, total: None)
    # Held-out records may be longer than any that trained: their last positions have no weights, so they cannot serve.
    longest, lengths = min(found.longest for found in embedders.values()), database.records.lengths
    reached = np.flatnonzero(lengths <= longest).astype(np.int64)
    indexes = {}
    for step, (layer, embedder) in enumerate(sorted(embedders.items())):
        tell("indexes", step, len(embedders))
        vectors = np.zeros((len(database), embedder.dimension), np.float32)
        vectors[reached] = embed_records(database, layer, reached, [embedder])[0]
        file = folder / f"{'sequence' if layer == SEQUENCE else f'layer-{layer:03d}'}.safetensors"
        index = LayerIndex.build(vectors, lengths, backend, longest)
        index.save(file, _owner(database))
        indexes[str(layer)] = FileRef(str(file.relative_to(database.path)), file_digest(file))
    tell("indexes", len(embedders), len(embedders))
    return indexes
