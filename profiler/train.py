"""Train the embedders of a database, index its records, measure its profile, and publish all three."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attmemo.db import Database, DatabaseWriter
from attmemo.embed.train import TrainOptions, build_indexes, remove_stale, train
from attmemo.errors import AttmemoError
from attmemo.profiler.measure import measure
from attmemo.profiler.open import open_model

Progress = Callable[[str, int, int], None]


def train_database(
    path: Path,
    options: TrainOptions | None = None,
    *,
    model: str | None = None,
    profile: bool = True,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train, calibrate, index and profile a database.

    Parameters
    ----------
    path : Path
        Database directory.
    model : str, optional
        Where the model is now; default: where it was at the build. Only needed for the profile.
    profile : bool
        Measure costs on this machine with the model. Without a profile the gate always tries.

    Returns
    -------
    dict
        JSON-able report: ``records``, ``lengths``, ``seconds``, ``backend``, ``layers`` (quality on held-out
        sequences), ``profile`` (None if not measured), ``notes``.

    Raises
    ------
    DatabaseError
        Too few records, another writer, or a full disk. What was published stays.
    """
    start = time.monotonic()
    notes: list[str] = []
    with Database(path) as database:
        manifest = database.manifest
        with DatabaseWriter(path, manifest.model, manifest.storage, manifest.settings) as writer:
            trained = train(database, options, progress)
            embedder = build_indexes(database, trained, progress)
            # A threshold tuned for other embeddings means nothing; a profile measured with them neither.
            writer.publish(embedder=embedder, profile=None, tuning=None)
            remove_stale(path, embedder)
            measured = None
            if profile:
                try:
                    loaded = open_model(manifest.model, model)
                except AttmemoError as error:
                    notes.append(f"not profiled, so the gate will always try: {error.what}")
                else:
                    with Database(path) as fresh:
                        measured = measure(loaded, fresh, trained, progress).to_dict()
                    writer.publish(profile=measured)
        return {
            "records": len(database),
            "lengths": len(database.lengths),
            "seconds": time.monotonic() - start,
            "backend": embedder.backend,
            "layers": embedder.report["layers"],
            "profile": None
            if measured is None
            else {k: measured[k] for k in ("costs", "lookup_sequence", "threads", "dtype")},
            "notes": notes,
        }
