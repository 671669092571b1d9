"""Train the embedders of a database, index its records, measure its profile, and publish all three."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from attmemo.db import Database, DatabaseWriter, kept_in, read_manifest
from attmemo.embed.indexing import build_indexes, remove_stale
from attmemo.embed.training import TrainOptions, train
from attmemo.errors import DatabaseError, DataError
from attmemo.profiler.measure import measure
from attmemo.profiler.open import open_model
from attmemo.profiler.turns import Progress, silent


def train_database(
    path: Path, options: TrainOptions | None = None, *, model: str | None = None, profile: bool = True,
    progress: Progress = silent,
) -> dict[str, Any]:  # fmt: skip
    """Train, calibrate, index and profile a database.

    Parameters
    ----------
    model : str, optional
        Directory or name of the model; default: the one at the build. Only the profile needs a model.
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
        The database keeps rows; too few records, another writer, or a full disk. What was published stays.
    StaleDatabaseError, DataError
        The model is another one than the database was built for, or `model` names no model.
    """
    start, notes = time.monotonic(), list[str]()
    manifest = read_manifest(path)
    if kept_in(manifest) == "rows":
        what = f"{path} keeps rows, which are found by their tokens: there is no embedder to train."
        raise DatabaseError(what, f"attmemo evaluate {path} --data FILE")
    # A named model must be the right one. If the model of the build has moved, only the profile is lost.
    loaded = open_model(manifest.model, model, answers=False) if profile and model is not None else None
    with DatabaseWriter.reopen(path) as writer, Database(path) as database:
        before = writer.manifest.embedder
        trained = train(database, options, progress)
        embedder = build_indexes(database, trained, progress)
        # Thresholds and profile belong to the embedder before.
        writer.publish(embedder=embedder, profile=None, tuning=None)
        remove_stale(path, embedder, before)
        if any(report["held_out"] == 0 for report in embedder.report["layers"].values()):
            notes.append("fewer than 20 held-out records: calibrated on training records, which flatters; store more")
        measured = None
        if profile and loaded is None:
            try:
                loaded = open_model(manifest.model, answers=False)
            except DataError as error:
                notes.append(f"not profiled, so the gate will always try: {error.what}")
        if loaded is not None:
            with Database(path) as fresh:
                measured = measure(loaded, fresh, trained, progress).to_dict()
            writer.publish(profile=measured)
        return {
            "records": len(database), "lengths": len(database.lengths), "seconds": time.monotonic() - start,
            "backend": embedder.backend, "layers": embedder.report["layers"],
            "profile": measured and {k: measured[k] for k in ("costs", "lookup_sequence", "threads", "dtype")},
            "notes": notes,
        }  # fmt: skip
