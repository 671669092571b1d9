"""Measure a memoized model against the exact one, on data that is not in the database.

Speed is a ratio against the best exact path, interleaved batch by batch in one run, with lookup, fetch and misses in
it. Quality stands beside it, with the controls that a search must beat and the ceiling that exhaustive search sets.
Everything but the sweep goes through the path that is deployed: with the gate, which drops layers and sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attmemo.db import Database
from attmemo.db.pools.shared_pool import SharedPool
from attmemo.embed.lookup import LookupName
from attmemo.errors import DataError
from attmemo.maps.handle import Threshold
from attmemo.memoization import unmemoize
from attmemo.mmap import FetcherName, Residency
from attmemo.profiler.answers import ask, prepare
from attmemo.profiler.map_trial import MapTrial
from attmemo.profiler.models import Answer, LoadedModel
from attmemo.profiler.open import Asked, model_of, open_database, open_model, open_texts
from attmemo.profiler.quality import Judge, read_labels, sweep_thresholds, time_paths, try_controls
from attmemo.profiler.row_trial import RowTrial
from attmemo.profiler.trial import Trial
from attmemo.profiler.turns import Progress, silent
from attmemo.system.machine import conditions


@dataclass(frozen=True)
class EvaluateOptions:
    """What `evaluate` was asked for."""

    text_column: str | None = None
    label_column: str | None = None
    limit: int | None = None
    batch_size: int = 32
    sort: bool = True
    threshold: Threshold = "auto"
    lookup: LookupName | None = None
    near: int | None = None
    most_moved: int | None = None
    budget: float = 0.01
    confidence: float = 0.95
    gate: bool = True
    fetch: FetcherName = "auto"
    residency: Residency = "page-cache"
    repeats: int = 3
    compile: bool = False
    controls: bool = True
    sweep: bool = True
    exhaustive: int = 200
    min_cosine: float = 0.98
    model: str | None = None
    pooling: str | None = None
    answer: Answer | None = None


def evaluate(
    path: Path, files: Sequence[str | Path], options: EvaluateOptions, tell: Progress = silent
) -> dict[str, Any]:
    """What is served, time and quality of a memoized model, on the texts that are not in the database.

    The result is JSON-able, ``"schema": "attmemo.evaluate/1"``; `report.write_report` draws it. Labels that the model
    does not know, or data that are all in the database, are a `DataError`; ``threshold="auto"`` on a database that was
    never tuned is a `DatabaseError`.
    """
    with closing(open_database(path)) as database:
        loaded = open_model(model_of(database), options.model, options.pooling, options.answer)
        asked = open_texts(loaded, database, files, options.text_column, options.label_column, options.limit)
        if not asked.tokens:
            raise DataError("there is no text to evaluate on.", "check the files and --text-column")
        labels = read_labels(loaded, asked, options.label_column)
        if isinstance(database, Database):
            database.reside(options.residency)  # only now: it may take minutes and gigabytes
        prepared = prepare(loaded, asked.tokens, options.batch_size, sort=options.sort)
        exact = ask(loaded, prepared, tell=tell, what="exact answers")
        judge = Judge(loaded, prepared, exact, labels, options.min_cosine)
        surprise, predicted = judge.perplexity()
        kind: Any = MapTrial if isinstance(database, Database) else RowTrial
        trial: Trial = kind(loaded, database, options)
        result = _describe(loaded, database, trial, asked, files, options)
        try:
            handle = trial.serve()
            given = ask(loaded, prepared, tell=tell, what="memoized answers")
            result |= trial.counts(handle)
            result["quality"] = judge.compare(given)
            if surprise is not None:
                found = {"perplexity_exact": surprise, "perplexity_memoized": judge.perplexity()[0]}
                result["quality"] |= found | {"perplexity_tokens": predicted}
            time, notes = time_paths(loaded, trial, handle, prepared, options.repeats, tell, options.compile)
            saved = time["exact_ms"][time["best_exact"]] - time["memoized_ms"]
            result["time"] = time | {"bytes_per_saved_ms": trial.bytes / saved if saved > 0.0 else None}
            result["notes"] += notes
            result |= trial.ceiling(handle, asked.tokens, result, tell)
            if options.controls:
                duplicates = asked.in_database / (asked.in_database + len(asked.tokens))
                result["controls"] = try_controls(judge, trial, handle, result, duplicates, tell)
            if options.sweep:
                result["sweep"] = sweep_thresholds(judge, trial, tell)
            result["guard"] = trial.live(asked.tokens, exact, tell)
        finally:
            unmemoize(loaded.model)
        result["verdict"] = trial.verdict(result)
        return result


def _describe(
    loaded: LoadedModel, database: Database | SharedPool, trial: Trial, asked: Asked, files: Sequence[str | Path],
    options: EvaluateOptions,
) -> dict[str, Any]:
    info = model_of(database)
    lengths = [len(item) for item in asked.tokens]
    notes = trial.notes(files)
    if asked.in_database:
        total = asked.in_database + len(asked.tokens)
        notes.insert(0, f"{asked.in_database:,} of the {total:,} texts are in the database; they were left out")
    return {
        "schema": "attmemo.evaluate/1",
        "reuse": trial.reuse,
        "notes": notes,
        "database": {"path": str(database.path), "records": len(database), "bytes": trial.bytes, "model": info.name}
        | {key: getattr(info, key) for key in ("family", "layers", "heads")},
        "data": {
            "files": [Path(f).name for f in files], "sequences": len(lengths), "in_database": asked.in_database,
            "tokens": sum(lengths), "mean_length": float(np.mean(lengths)),
            "length_stored": float(np.mean(np.isin(lengths, trial.lengths))),
        },
        "conditions": conditions()
        | {
            "dtype": loaded.dtype, "storage_dtype": trial.storage, "batch_size": options.batch_size,
            "batches": "sorted by length" if options.sort else "in the order of the data",
            "max_length": info.max_length, **trial.settings,
            "repeats": options.repeats, "gate": "on" if options.gate else "off", "pooling": loaded.pooling,
        },
    }  # fmt: skip
