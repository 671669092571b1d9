"""Measure a memoized model against the exact one, on data that is not in the database.

Speed is a ratio against the best exact path, interleaved batch by batch in one run, with lookup, fetch and misses in
it. Quality stands beside it, with the controls that a search must beat and the ceiling that exhaustive search sets.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attmemo.adapters import adapter_for
from attmemo.db import KIND_MAP, SEQUENCE, Database
from attmemo.engine import Engine, Lookup
from attmemo.errors import DataError
from attmemo.machine import conditions
from attmemo.memoization import Memoization, Threshold, memoize, unmemoize
from attmemo.mmap import FetcherName, Residency
from attmemo.profiler.answers import Batch, ask, changed, cosine, perplexity, prepare, time_passes
from attmemo.profiler.capture import Capture
from attmemo.profiler.controls import CONTROLS, duplicate_share, serving_control
from attmemo.profiler.data import digest
from attmemo.profiler.models import LoadedModel, NextToken, Tokens, answers, collate
from attmemo.profiler.open import Asked, open_model, open_texts
from attmemo.similarity import similarity_matrix, similarity_score

Progress = Callable[[str, int, int], None]
SWEEP = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
SWEEP_SEQUENCES = 400


@dataclass(frozen=True)
class EvaluateOptions:
    """What `evaluate` was asked for."""

    text_column: str | None = None
    label_column: str | None = None
    limit: int | None = None
    batch_size: int = 32
    threshold: Threshold = "auto"
    lookup: Lookup | None = None
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


def evaluate(
    path: Path, files: Sequence[str | Path], options: EvaluateOptions, progress: Progress | None = None
) -> dict[str, Any]:
    """Hit rates, similarity, time and quality of a memoized model.

    Returns
    -------
    dict
        JSON-able, ``"schema": "attmemo.evaluate/1"``; what `report.write_report` draws.

    Raises
    ------
    DataError
        The data cannot be read, is what the database was built from, or has labels that the model does not know.
    DatabaseError
        The database is not usable, or ``threshold="auto"`` and it was never tuned.
    """
    tell = progress or (lambda what, done, total: None)
    with Database(path, options.residency) as database:
        info = database.manifest.model
        loaded = open_model(info, options.model)
        asked = open_texts(loaded, database, files, options.text_column, options.label_column, options.limit)
        if not asked.tokens:
            raise DataError("there is no text to evaluate on.", "check the files and --text-column")
        labels = _labels(loaded, asked, options.label_column)
        prepared = prepare(loaded, asked.tokens, options.batch_size)
        total = len(asked.tokens)
        exact = ask(loaded, prepared, progress=lambda done: tell("exact answers", done, total))
        surprise, predicted = _perplexity(loaded, prepared)
        result = _describe(loaded, database, asked, files, options)
        memoize(
            loaded.model, options.threshold, database, lookup=options.lookup, gate=options.gate, fetch=options.fetch
        )
        try:
            handle: Memoization = loaded.model.attmemo  # type: ignore[assignment]
            result["threshold"] = handle.threshold[0] if len(set(handle.threshold)) == 1 else list(handle.threshold)
            result["threshold_source"] = handle.threshold_source
            result["lookup"] = handle.lookup
            given = ask(loaded, prepared, progress=lambda done: tell("memoized answers", done, total))
            stats = handle.stats()
            result["hit_rate"], result["ineligible"] = stats["hit_rate"], sum(stats["ineligible"].values())
            result["quality"] = _quality(loaded, exact, given, labels, options)
            if surprise is not None:
                result["quality"] |= {
                    "perplexity_exact": surprise,
                    "perplexity_memoized": _perplexity(loaded, prepared)[0],
                    "perplexity_tokens": predicted,
                }
            result["layers"] = [_layer_row(row) for row in stats["layers"]]
            result["time"] = _time(loaded, handle, prepared, options, tell, total, result["notes"])
            saved = result["time"]["exact_ms"][result["time"]["best_exact"]] - result["time"]["memoized_ms"]
            result["time"]["bytes_per_saved_ms"] = database.bytes / saved if saved > 0.0 else None
            _similarities(loaded, handle.engine, asked, options, result, tell)
            if options.controls:
                result["controls"] = _controls(loaded, handle, prepared, exact, labels, result, options, tell)
                result["controls"].append(_duplicates(loaded, database, asked, options))
            if options.sweep:
                result["sweep"] = _sweep(loaded, handle, prepared, exact, options, tell)
        finally:
            unmemoize(loaded.model)
        result["verdict"] = _verdict(result)
        return result


# -- parts


def _describe(
    loaded: LoadedModel, database: Database, asked: Asked, files: Sequence[str | Path], options: EvaluateOptions
) -> dict[str, Any]:
    info = database.manifest.model
    lengths = [len(item) for item in asked.tokens]
    arena = database.arena(KIND_MAP, int(database.records.lengths[0]))
    notes = [arena.notice] if arena.notice else []
    tuned_on = (database.manifest.tuning or {}).get("digests", [])
    seen = [Path(file).name for file in files if options.threshold == "auto" and digest(file) in tuned_on]
    if seen:
        notes.append(f"the thresholds were tuned on {', '.join(seen)}: what is measured on it flatters")
    return {
        "schema": "attmemo.evaluate/1",
        "notes": notes,
        "database": {
            "path": str(database.path),
            "records": len(database),
            "bytes": database.bytes,
            "model": info.name,
            "family": info.family,
            "layers": info.layers,
            "heads": info.heads,
        },
        "data": {
            "files": [Path(f).name for f in files],
            "sequences": len(lengths),
            "tokens": sum(lengths),
            "mean_length": float(np.mean(lengths)),
            "length_stored": float(np.mean(np.isin(lengths, database.records.lengths))),
        },
        "conditions": conditions()
        | {
            "dtype": loaded.dtype,
            "storage_dtype": database.manifest.storage,
            "batch_size": options.batch_size,
            "max_length": info.max_length,
            "fetch": options.fetch,
            "page_bytes": arena.page_bytes,
            "repeats": options.repeats,
        },
    }


def _labels(loaded: LoadedModel, asked: Asked, column: str | None) -> Tensor | None:
    """Class numbers of the labels, -1 where the model does not know one; None without labels or a classifier."""
    if column is None:
        return None
    if loaded.kind != "classifier":
        gives = "next tokens" if loaded.kind == "language-model" else "embeddings"
        raise DataError(
            f"the model gives {gives}, not classes, so there is nothing to compare column {column!r} with.",
            "leave --label-column out; answers are compared with the exact model's in any case",
        )
    known = loaded.labels
    classes = int(loaded.model.config.num_labels)  # type: ignore[union-attr,arg-type]
    numbers = []
    for row in asked.rows:
        label = row.label
        if str(label) in known:
            numbers.append(known[str(label)])
        elif isinstance(label, int) and 0 <= label < classes:
            numbers.append(label)
        else:
            numbers.append(-1)
    if all(n < 0 for n in numbers):
        raise DataError(
            f"no label of column {column!r} is one of the model's; seen {asked.rows[0].label!r}, "
            f"expected one of {', '.join(list(known)[:5])}…",
            "check --label-column",
        )
    return torch.tensor(numbers)


def _accuracy(given: Tensor, labels: Tensor | None) -> float | None:
    """Share of right answers among the texts whose label the model knows."""
    if labels is None:
        return None
    known = labels >= 0
    return float((given.argmax(1) == labels)[known].float().mean())


def _perplexity(loaded: LoadedModel, prepared: Sequence[Batch]) -> tuple[float | None, int]:
    """Of a language model; None of one that is none."""
    return perplexity(loaded, prepared) if loaded.kind == "language-model" else (None, 0)


def _quality(
    loaded: LoadedModel, exact: Tensor, given: Tensor, labels: Tensor | None, options: EvaluateOptions
) -> dict[str, Any]:
    different = changed(loaded.kind, exact, given, options.min_cosine)
    means = {"classifier": "another class", "language-model": "another first token"}
    values: dict[str, Any] = {
        "agreement": 1.0 - float(different.float().mean()),
        "changed": float(different.float().mean()),
        "changed_means": means.get(loaded.kind, f"cosine below {options.min_cosine:g}"),
        "accuracy_exact": _accuracy(exact, labels),
        "accuracy_memoized": _accuracy(given, labels),
    }
    if loaded.kind != "encoder":
        distance = (exact - given).norm(dim=1)
        values |= {
            "logit_distance_mean": float(distance.mean()),
            "logit_distance_p99": float(distance.quantile(0.99)),
        }
    near = cosine(exact, given)
    values |= {
        "cosine_mean": float(near.mean()),
        "cosine_p1": float(near.quantile(0.01)),
        "cosine_min": float(near.min()),
    }
    return values


def _layer_row(row: dict[str, Any]) -> dict[str, Any]:
    keys = ("layer", "threshold", "rows", "queries", "hits", "hit_rate", "mean_predicted_similarity", "gate", "why")
    return {key: row[key] for key in keys} | {"ms_spent": row["ms_spent"], "ms_saved": row["ms_saved"] or 0.0}


def _time(
    loaded: LoadedModel,
    handle: Memoization,
    prepared: Sequence[Batch],
    options: EvaluateOptions,
    tell: Progress,
    total: int,
    notes: list[str],
) -> dict[str, Any]:
    """End-to-end time per sequence of every path, and where the memoized one spends it."""

    def exact_path() -> nn.Module | None:
        handle.disable()
        return None

    def memoized() -> nn.Module | None:
        handle.enable()
        return None

    paths: dict[str, Callable[[], nn.Module | None]] = {"stock": exact_path, "memoized": memoized}
    if options.compile:
        handle.disable()
        try:
            compiled = _compile(loaded, prepared, tell)
        except (RuntimeError, OSError) as error:  # no C++ compiler, or a model that cannot be traced
            notes.append(f"torch.compile could not be timed: {str(error).splitlines()[0][:200]}")
        else:
            paths["compile"] = lambda: compiled
        handle.enable()
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        tell("timing", done, options.repeats)

    tell("timing", 0, options.repeats)
    spent = time_passes(loaded, prepared, paths, options.repeats, tick, handle.reset_stats)
    handle.enable()
    exact_ms = {name: 1e3 * median(spent[name]) / total for name in paths if name != "memoized"}
    best = min(exact_ms, key=lambda name: exact_ms[name])
    ratios = sorted(a / b for a, b in zip(spent[best], spent["memoized"], strict=True))
    rows = handle.stats()["layers"]
    runs = total * options.repeats
    memoized_ms = 1e3 * median(spent["memoized"]) / total
    parts = {
        "lookup": sum(r["ms_lookup"] for r in rows) / runs,
        "fetch_and_av": sum(r["ms_serve"] for r in rows) / runs,
        "misses_in_mixed_batches": sum(r["ms_misses"] for r in rows) / runs,
    }
    mean_ms = 1e3 * sum(spent["memoized"]) / runs  # parts are sums over all passes: their whole is the mean
    parts["other"] = max(0.0, mean_ms - sum(parts.values()))
    return {
        "exact_ms": exact_ms,
        "best_exact": best,
        "memoized_ms": memoized_ms,
        "speedup": median(ratios),
        "speedup_low": ratios[0],
        "speedup_high": ratios[-1],
        "per": "sequence",
        "parts_ms": parts,
    }


def _compile(loaded: LoadedModel, prepared: Sequence[Batch], tell: Progress) -> nn.Module:
    """The exact model under torch.compile, warmed up on every shape that will be asked."""
    plain = copy.deepcopy(loaded.model)
    asked = NextToken(plain) if loaded.kind == "language-model" else plain
    compiled: nn.Module = torch.compile(asked)  # type: ignore[assignment]
    shapes = {tuple(inputs["input_ids"].shape): inputs for _, inputs in prepared}
    with torch.inference_mode():
        for step, inputs in enumerate(shapes.values()):
            tell("compiling", step, len(shapes))
            for _ in range(2):
                answers(loaded, inputs, compiled)
    tell("compiling", len(shapes), len(shapes))
    return compiled


def _similarities(
    loaded: LoadedModel,
    engine: Engine,
    asked: Asked,
    options: EvaluateOptions,
    result: dict[str, Any],
    tell: Progress,
) -> None:
    """True similarity of what is served, beside the best that exhaustive search finds, on a sample of the texts.

    The keys are the exact model's hidden states (off-policy); hit rates elsewhere are the memoized model's own.
    """
    database, layers = engine.database, engine.layers
    count = min(options.exhaustive, len(asked.tokens))
    if count <= 0:
        return
    places = np.linspace(0, len(asked.tokens) - 1, count).round().astype(int)
    sample = [asked.tokens[place] for place in places]
    adapter, sites = adapter_for(loaded.model)
    where = {n: np.flatnonzero(database.records.lengths == n) for n in {len(item) for item in sample}}
    best = np.full((layers, count), np.nan)
    true: list[list[float]] = [[] for _ in range(layers)]
    served = np.zeros(layers)
    unmemoized = loaded.model.attmemo
    unmemoized.disable()  # type: ignore[union-attr,operator]
    done = 0
    try:
        with Capture(loaded.model, adapter, sites) as capture:
            for length in sorted(where):
                group = [(place, item) for place, item in enumerate(sample) if len(item) == length]
                there = where[length]
                for start in range(0, len(group), 16):
                    part = group[start : start + 16]
                    done += len(part)
                    tell("exhaustive search", done, count)
                    if not len(there):
                        continue
                    captured = capture.run(collate(loaded, [item for _, item in part]))
                    found = None
                    for layer in range(layers):
                        owner = SEQUENCE if engine.lookup == "sequence" else layer
                        if found is None or engine.lookup == "layer":
                            found = engine.index.find(owner, captured.inputs[layer], captured.spans.lengths)
                        maps = captured.maps[layer][:, :, :length, :length]
                        for row, (place, _) in enumerate(part):
                            best[layer, place] = _best(database, layer, maps[row : row + 1], there)
                            if found.records[row] >= 0 and found.distances[row] <= engine.threshold.radii[layer]:
                                served[layer] += 1
                                record = database.map(layer, int(found.records[row]))
                                true[layer].append(float(similarity_score(maps[row], record)))
    finally:
        unmemoized.enable()  # type: ignore[union-attr,operator]
    hits = []
    for layer, row in enumerate(result["layers"]):
        row["mean_true_similarity"] = float(np.mean(true[layer])) if true[layer] else None
        row["exhaustive_hit_rate"] = float((best[layer] >= engine.threshold.scores[layer]).mean())  # NaN: no
        row["exhaustive_mean_similarity"] = float(np.nanmean(best[layer])) if np.isfinite(best[layer]).any() else None
        row["sample_hit_rate"] = float(served[layer] / count)
        hits.append(row["exhaustive_hit_rate"])
    result["exhaustive_hit_rate"] = float(np.mean(hits))
    result["exhaustive_sample"] = count


def _best(database: Database, layer: int, apm: Tensor, records: np.ndarray[Any, Any]) -> float:
    """The greatest similarity of one map ``[1, h, n, n]`` to any stored record of its length."""
    best = 0.0
    for part in np.array_split(records, max(1, len(records) * apm[0].numel() // (1 << 24))):
        if len(part):
            stored = torch.stack([database.map(layer, int(r)) for r in part])
            best = max(best, float(similarity_matrix(apm, stored).max()))
    return best


def _controls(
    loaded: LoadedModel,
    handle: Memoization,
    prepared: Sequence[Batch],
    exact: Tensor,
    labels: Tensor | None,
    result: dict[str, Any],
    options: EvaluateOptions,
    tell: Progress,
) -> list[dict[str, Any]]:
    rows = [_control_row("memoized", result["hit_rate"], result["quality"])]
    for step, name in enumerate(CONTROLS):
        tell("controls", step, len(CONTROLS))
        handle.reset_stats()
        with serving_control(handle.engine, name):
            given = ask(loaded, prepared)
            hit_rate, quality = handle.stats()["hit_rate"], _quality(loaded, exact, given, labels, options)
            quality["perplexity_memoized"] = _perplexity(loaded, prepared)[0]
        rows.append(_control_row(name, hit_rate, quality))
    tell("controls", len(CONTROLS), len(CONTROLS))
    return rows


def _control_row(name: str, hit_rate: float, quality: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "hit_rate": hit_rate,
        "agreement": quality["agreement"],
        "accuracy": quality["accuracy_memoized"],
        "cosine_mean": quality["cosine_mean"],
        "logit_distance_mean": quality.get("logit_distance_mean"),
        "perplexity": quality.get("perplexity_memoized"),
    }


def _duplicates(loaded: LoadedModel, database: Database, asked: Asked, options: EvaluateOptions) -> dict[str, Any]:
    """An exact-duplicate cache: it changes nothing, and serves only what was seen before."""
    _, sites = adapter_for(loaded.model)
    sample = [asked.tokens[p] for p in np.linspace(0, len(asked.tokens) - 1, min(200, len(asked.tokens))).astype(int)]

    def inputs() -> Any:
        for item in sample:
            keep: list[Tensor] = []
            hook = sites[0].module.register_forward_pre_hook(
                lambda _m, args, kwargs, keep=keep: keep.append(args[0] if args else kwargs["hidden_states"]),
                with_kwargs=True,
            )
            try:
                with torch.inference_mode():
                    loaded.model(**collate(loaded, [Tokens(0, item.ids, item.segments)]))
            finally:
                hook.remove()
            yield keep[0][0]

    handle = loaded.model.attmemo
    handle.disable()  # type: ignore[union-attr,operator]
    try:
        share = duplicate_share(database, inputs())
    finally:
        handle.enable()  # type: ignore[union-attr,operator]
    return {"name": "duplicate cache", "hit_rate": share, "agreement": 1.0, "accuracy": None, "cosine_mean": 1.0}


def _sweep(
    loaded: LoadedModel,
    handle: Memoization,
    prepared: Sequence[Batch],
    exact: Tensor,
    options: EvaluateOptions,
    tell: Progress,
) -> list[dict[str, Any]]:
    """One threshold for all layers, tried without a gate: what speed and quality would be at each."""
    step = max(1, sum(len(b) for b, _ in prepared) // SWEEP_SEQUENCES)
    some = list(prepared[::step])
    rows = [item.row for batch, _ in some for item in batch]
    where = {row: place for place, row in enumerate(rows)}
    renumbered = [([Tokens(where[t.row], t.ids, t.segments) for t in batch], inputs) for batch, inputs in some]
    reference = exact[rows]
    database, lookup = handle.database, handle.lookup
    found = []
    before = list(handle.threshold)
    memoize(loaded.model, 0.0, database, lookup=lookup, gate=False, fetch=options.fetch)
    other: Memoization = loaded.model.attmemo  # type: ignore[assignment]
    for number, threshold in enumerate(SWEEP):
        tell("threshold sweep", number, len(SWEEP))
        other.engine.set_thresholds([threshold] * other.engine.layers)
        other.enable()  # the timing of the threshold before may have ended with the exact path
        other.reset_stats()
        given = ask(loaded, renumbered)
        hit_rate = other.stats()["hit_rate"]
        surprise = _perplexity(loaded, renumbered)[0]
        spent = time_passes(
            loaded,
            renumbered,
            {"exact": other.disable, "memoized": other.enable},
            1,
        )
        different = changed(loaded.kind, reference, given, options.min_cosine)
        found.append(
            {
                "threshold": threshold,
                "hit_rate": hit_rate,
                "speedup": spent["exact"][0] / spent["memoized"][0],
                "agreement": 1.0 - float(different.float().mean()),
                "changed": float(different.float().mean()),
                "cosine_mean": float(cosine(reference, given).mean()),
                "perplexity": surprise,
            }
        )
    tell("threshold sweep", len(SWEEP), len(SWEEP))
    memoize(loaded.model, before, database, lookup=lookup, gate=options.gate, fetch=options.fetch)
    return found


def _verdict(result: dict[str, Any]) -> str:
    """One honest sentence."""
    rate, speed, quality = result["hit_rate"], result["time"]["speedup"], result["quality"]
    off = sum(row["gate"] == "off" for row in result["layers"])
    what = "first tokens" if "perplexity_exact" in quality else "answers"
    same = f"{100 * quality['agreement']:.1f} % of the {what} are those of the exact model"
    if "perplexity_exact" in quality:
        same += f", perplexity {quality['perplexity_memoized']:.4g} (exact {quality['perplexity_exact']:.4g})"
    if rate < 0.05:
        why = (
            f"the gate is off in {off} of {len(result['layers'])} layers" if off else "few records are similar enough"
        )
        return (
            f"Memoization does not pay here: {100 * (1 - rate):.1f} % of the attention calls are left to the "
            f"exact path ({why}), at {speed:.2f}x its speed."
        )
    return (
        f"{100 * rate:.0f} % of the attention calls are served from memory; end to end {speed:.2f}x the speed of "
        f"{_compared_with(result['time'])}; {same}."
    )


def _compared_with(time: dict[str, Any]) -> str:
    """What the speed is a ratio to."""
    if "compile" in time["exact_ms"]:
        return f"the best exact path ({time['best_exact']})"
    return "the exact model (torch.compile was not tried)"
