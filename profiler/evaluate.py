"""Measure a memoized model against the exact one, on data that is not in the database.

Speed is a ratio against the best exact path, interleaved batch by batch in one run, with lookup, fetch and misses in
it. Quality stands beside it, with the controls that a search must beat and the ceiling that exhaustive search sets.
Everything but the sweep goes through the path that is deployed: with the gate, which drops layers and sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attmemo.db import KIND_MAP, Database
from attmemo.embed.lookup import LookupName
from attmemo.errors import DataError
from attmemo.machine import conditions
from attmemo.memoization import Memoization, Threshold, memoize, unmemoize
from attmemo.mmap import FetcherName, Residency
from attmemo.profiler.answers import ask, prepare
from attmemo.profiler.ceiling import search_all
from attmemo.profiler.data import digest
from attmemo.profiler.models import Answer, LoadedModel, Progress
from attmemo.profiler.open import Asked, open_model, open_texts
from attmemo.profiler.quality import Judge, read_labels, sweep_thresholds, try_controls
from attmemo.profiler.timing import time_paths


@dataclass(frozen=True)
class EvaluateOptions:
    """What `evaluate` was asked for."""

    text_column: str | None = None
    label_column: str | None = None
    limit: int | None = None
    batch_size: int = 32
    threshold: Threshold = "auto"
    lookup: LookupName | None = None
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
    path: Path, files: Sequence[str | Path], options: EvaluateOptions, progress: Progress | None = None
) -> dict[str, Any]:
    """Hit rates, similarity, time and quality of a memoized model, on the texts that are not in the database.

    The result is JSON-able, ``"schema": "attmemo.evaluate/1"``; `report.write_report` draws it. Labels that the model
    does not know, or data that are all in the database, are a `DataError`; ``threshold="auto"`` on a database that was
    never tuned is a `DatabaseError`.
    """
    tell = progress or (lambda what, done, total: None)
    with Database(path) as database:
        loaded = open_model(database.manifest.model, options.model, options.pooling, options.answer)
        asked = open_texts(loaded, database, files, options.text_column, options.label_column, options.limit)
        if not asked.tokens:
            raise DataError("there is no text to evaluate on.", "check the files and --text-column")
        labels = read_labels(loaded, asked, options.label_column)
        database.reside(options.residency)  # only now: it may take minutes and gigabytes
        prepared = prepare(loaded, asked.tokens, options.batch_size)
        total = len(asked.tokens)
        exact = ask(loaded, prepared, progress=lambda done: tell("exact answers", done, total))
        judge = Judge(loaded, prepared, exact, labels, options.min_cosine)
        surprise, predicted = judge.perplexity()
        result = _describe(loaded, database, asked, files, options)

        def serve(threshold: Threshold, gate: bool, lookup: LookupName | None) -> Memoization:
            memoize(loaded.model, threshold, database, lookup=lookup, gate=gate, fetch=options.fetch)
            return loaded.model.attmemo  # type: ignore[return-value]

        try:
            handle = serve(options.threshold, options.gate, options.lookup)
            given = ask(loaded, prepared, progress=lambda done: tell("memoized answers", done, total))
            result |= _served(handle)
            result["quality"] = judge.compare(given)
            if surprise is not None:
                found = {"perplexity_exact": surprise, "perplexity_memoized": judge.perplexity()[0]}
                result["quality"] |= found | {"perplexity_tokens": predicted}
            time, notes = time_paths(loaded, handle, prepared, options.repeats, tell, options.compile)
            saved = time["exact_ms"][time["best_exact"]] - time["memoized_ms"]
            result["time"] = time | {"bytes_per_saved_ms": database.bytes / saved if saved > 0.0 else None}
            result["notes"] += notes
            layers, count = search_all(loaded, handle, asked.tokens, options.exhaustive, tell)
            if layers:
                result["layers"] = [row | more for row, more in zip(result["layers"], layers, strict=True)]
                result["exhaustive_hit_rate"] = float(np.mean([row["exhaustive_hit_rate"] for row in layers]))
                result["exhaustive_sample"] = count
            if options.controls:
                duplicates = asked.in_database / (asked.in_database + total)
                result["controls"] = try_controls(judge, handle, result, duplicates, tell)
            if options.sweep:
                result["sweep"] = sweep_thresholds(judge, serve(0.0, False, handle.lookup), tell)
        finally:
            unmemoize(loaded.model)
        result["verdict"] = _verdict(result)
        return result


def _served(handle: Memoization) -> dict[str, Any]:
    """What the memoized model did: its thresholds, and the counters by layer."""
    keys = (
        "layer", "threshold", "sequences", "queries", "hits", "hit_rate", "mean_predicted_similarity", "gate", "why"
    )  # fmt: skip
    stats = handle.stats()
    scores = list(handle.threshold)
    return {
        "threshold": scores[0] if len(set(scores)) == 1 else scores, "threshold_source": handle.threshold_source,
        "lookup": handle.lookup, "hit_rate": stats["hit_rate"], "ineligible": sum(stats["ineligible"].values()),
        "layers": [
            {key: row[key] for key in [*keys, "ms_spent"]} | {"ms_saved": row["ms_saved"] or 0.0}
            for row in stats["layers"]
        ],
    }  # fmt: skip


def _describe(
    loaded: LoadedModel, database: Database, asked: Asked, files: Sequence[str | Path], options: EvaluateOptions
) -> dict[str, Any]:
    info = database.manifest.model
    lengths = [len(item) for item in asked.tokens]
    arena = database.arena(KIND_MAP, int(database.records.lengths[0]))
    notes = [arena.notice] if arena.notice else []
    if asked.in_database:
        total = asked.in_database + len(asked.tokens)
        notes.insert(0, f"{asked.in_database:,} of the {total:,} texts are in the database; they were left out")
    tuned_on = (database.manifest.tuning or {}).get("digests", [])
    seen = [Path(file).name for file in files if options.threshold == "auto" and digest(file) in tuned_on]
    if seen:
        notes.append(f"the thresholds were tuned on {', '.join(seen)}: what is measured on it flatters")
    return {
        "schema": "attmemo.evaluate/1",
        "notes": notes,
        "database": {"path": str(database.path), "records": len(database), "bytes": database.bytes, "model": info.name}
        | {key: getattr(info, key) for key in ("family", "layers", "heads")},
        "data": {
            "files": [Path(f).name for f in files], "sequences": len(lengths), "in_database": asked.in_database,
            "tokens": sum(lengths), "mean_length": float(np.mean(lengths)),
            "length_stored": float(np.mean(np.isin(lengths, database.records.lengths))),
        },
        "conditions": conditions()
        | {
            "dtype": loaded.dtype, "storage_dtype": database.manifest.storage, "batch_size": options.batch_size,
            "max_length": info.max_length, "fetch": options.fetch, "page_bytes": arena.page_bytes,
            "repeats": options.repeats, "gate": "on" if options.gate else "off", "pooling": loaded.pooling,
        },
    }  # fmt: skip


def _verdict(result: dict[str, Any]) -> str:
    """One honest sentence."""
    rate, time, quality = result["hit_rate"], result["time"], result["quality"]
    speed = f"{time['speedup']:.2f}x"
    if rate < 0.05:
        off = sum(row["gate"] == "off" for row in result["layers"])
        why = f"the gate is off in {off} of {len(result['layers'])} layers"
        return (
            f"Memoization does not pay here: {100 * (1 - rate):.1f} % of the attention calls are left to the exact "
            f"path ({why if off else 'few records are similar enough'}), at {speed} its speed."
        )
    language = "perplexity_exact" in quality
    same = f"{100 * quality['agreement']:.1f} % of the {'first tokens' if language else 'answers'} are those of the "
    same += "exact model"
    if language:
        same += f", perplexity {quality['perplexity_memoized']:.4g} (exact {quality['perplexity_exact']:.4g})"
    best = f"the best exact path ({time['best_exact']})"
    return (
        f"{100 * rate:.0f} % of the attention calls are served from memory; end to end {speed} the speed of "
        f"{best if 'compile' in time['exact_ms'] else 'the exact model (torch.compile was not tried)'}; {same}."
    )
