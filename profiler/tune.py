"""Choose thresholds from a budget of changed answers, on data that is not in the database.

With one lookup per sequence each layer gets a threshold of its own: layers differ greatly in how much a foreign map
hurts. Layers are ordered by the harm that serving each alone does, and served in nested groups, from the most robust
to all of them; one forced pass per group says whose answer changes. Since a sequence's groups depend on its distance
alone, these few passes give the outcome of every policy exactly (`perfmodel.policy`).

With a lookup in every layer decisions depend on each other, so each candidate threshold has a pass of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attmemo.db import Database, DatabaseWriter
from attmemo.engine import Engine, Lookup
from attmemo.errors import StaleDatabaseError, TuningError
from attmemo.perfmodel import NEVER as NEVER_NEAR
from attmemo.perfmodel import choose_from_counts, choose_policy, choose_threshold, sequences_needed, split_halves
from attmemo.profiler.answers import Batch, ask, changed, harm, prepare, serving
from attmemo.profiler.data import digest
from attmemo.profiler.models import Answer, LoadedModel, Tokens
from attmemo.profiler.open import open_model, open_texts

Progress = Callable[[str, int, int], None]
MOST_GROUPS = 6
PROBE = 200  # sequences on which layers are ordered
RADII = tuple(round(0.01 * 1.1**step, 6) for step in range(48))  # 0.01 to 0.88: candidates when there is little data
NEVER = 1.0  # a threshold that only a prediction of perfect similarity reaches


@dataclass(frozen=True)
class TuneOptions:
    """What `tune` was asked for."""

    budget: float = 0.01
    confidence: float = 0.95
    text_column: str | None = None
    limit: int | None = None
    batch_size: int = 32
    lookup: Lookup = "sequence"
    min_cosine: float = 0.98
    allow_uncertified: bool = False
    seed: int = 0
    model: str | None = None
    pooling: str | None = None
    answer: Answer | None = None


def tune(
    path: Path, files: Sequence[str | Path], options: TuneOptions, progress: Progress | None = None
) -> dict[str, Any]:
    """Find the thresholds that serve most within the budget, and store them as the database's ``"auto"``.

    Returns
    -------
    dict
        JSON-able: ``thresholds`` (per layer), ``lookup``, ``budget``, ``confidence``, ``certified``, ``observed``
        and ``upper_bound`` (share of changed answers on the certifying half), ``served``, ``total``, ``needed``,
        ``sentence``, ``path``.

    Raises
    ------
    DataError
        The data cannot be read, or is what the database was built from.
    EmbedderMissingError
        The database was never trained.
    TuningError
        A budget or confidence outside (0, 1), or no data.
    """
    tell = progress or (lambda what, done, total: None)
    with Database(path) as database:
        database.embedder_ref()
        loaded = open_model(database.manifest.model, options.model, options.pooling, options.answer)
        asked = open_texts(loaded, database, files, options.text_column, None, options.limit)
        if not asked.tokens:
            raise TuningError("there is no text to tune on.", "check the files and --text-column")
        prepared = prepare(loaded, asked.tokens, options.batch_size)
        total = len(asked.tokens)
        exact = ask(loaded, prepared, progress=lambda done: tell("exact answers", done, total))
        choose = _tune_sequence if options.lookup == "sequence" else _tune_layer
        outcome = choose(loaded, database, prepared, exact, options, tell)
        manifest = database.manifest
    if outcome["reached"] is None:
        raise TuningError(outcome["sentence"], "give more texts, a larger --budget, or --allow-uncertified")
    outcome |= {
        "lookup": options.lookup,
        "budget": options.budget,
        "confidence": options.confidence,
        "min_cosine": options.min_cosine if loaded.kind == "encoder" else None,
        "pooling": loaded.pooling,
        "in_database": asked.in_database,
        "data": [Path(file).name for file in files],
        "digests": [digest(file) for file in files],
    }
    with DatabaseWriter(path, manifest.model, manifest.storage, manifest.settings) as writer:
        if writer.manifest.embedder != manifest.embedder:
            raise StaleDatabaseError(
                f"{path} was trained again while it was being tuned; the thresholds are for the embedder before.",
                "run tune again",
            )
        writer.publish(tuning=outcome)
    return outcome


def _tune_sequence(
    loaded: LoadedModel,
    database: Database,
    prepared: Sequence[Batch],
    exact: torch.Tensor,
    options: TuneOptions,
    tell: Progress,
) -> dict[str, Any]:
    layers = database.manifest.model.layers
    total = len(exact)
    few = total < 2 * sequences_needed(options.budget, options.confidence) - 1
    with serving(loaded, database, "sequence") as handle:
        engine = handle.engine
        distances = _distances(loaded, engine, prepared, total)
        # Beyond the calibrated distances a score is unknown: such a record is never served.
        reach = min(float(curve.distances[-1]) for curve in engine.curves)
        distances = np.where(distances <= reach, distances, np.inf)
        groups = [list(range(layers))]
        if not few:
            groups = _groups(loaded, engine, prepared, exact, distances, options.seed, tell)
        outcome = np.zeros((len(groups), total), bool)
        for k in range(len(groups)):
            _serve_only(engine, [layer for group in groups[: k + 1] for layer in group])
            given = ask(loaded, prepared, progress=partial(_tell_done, tell, f"layers {k + 1}/{len(groups)}", total))
            outcome[k] = changed(loaded.kind, exact, given, options.min_cosine).numpy()
        curves = engine.curves
    if few:
        kept, radii = _choose_one(distances, outcome[0], options)
    else:
        gains = _gains(database, groups, float(np.mean([len(item) for batch, _ in prepared for item in batch])))
        result = choose_policy(
            distances,
            outcome,
            [len(group) for group in groups],
            gains,
            options.budget,
            options.confidence,
            seed=options.seed,
            allow_uncertified=options.allow_uncertified,
        )
        kept = result.to_dict() | {"sentence": result.sentence()}
        radii = kept.pop("radii")
    thresholds = [NEVER] * layers
    for radius, group in zip(radii, groups, strict=True):
        for layer in group:
            if radius >= 0.0:
                thresholds[layer] = min(NEVER, float(curves[layer].predict(radius)) + 1e-9)
    return kept | {"thresholds": thresholds, "groups": groups}


def _choose_one(
    distances: npt.NDArray[np.float64], changed_by: npt.NDArray[np.bool_], options: TuneOptions
) -> tuple[dict[str, Any], Sequence[float]]:
    """One distance for all layers, where there is too little data to choose one for each and certify it on the rest.

    The candidates are fixed beforehand and tested from the strictest on, so no half has to be set aside for choosing.
    """
    result = choose_threshold(
        1.0 - distances,
        changed_by,
        options.budget,
        options.confidence,
        [1.0 - radius for radius in RADII],
        allow_uncertified=options.allow_uncertified,
    )
    kept = result.to_dict()
    found, curve = kept.pop("threshold"), kept.pop("curve")
    kept["path"] = [
        {"radii": [_radius(point)]} | {key: value for key, value in point.items() if key != "threshold"}
        for point in curve
    ]
    kept["sentence"] = result.sentence(lambda score: f"the distance {1.0 - score:.4g} for all layers")
    return kept, [NEVER_NEAR if found is None else 1.0 - found]


def _radius(point: dict[str, Any]) -> float:
    return round(1.0 - float(point["threshold"]), 6)


def _tune_layer(
    loaded: LoadedModel,
    database: Database,
    prepared: Sequence[Batch],
    exact: torch.Tensor,
    options: TuneOptions,
    tell: Progress,
) -> dict[str, Any]:
    layers = database.manifest.model.layers
    rows: list[tuple[float, int, int]] = []
    served: list[float] = []
    result = None
    with serving(loaded, database, "layer") as handle:
        grid = [round(1.0 - 0.025 * step, 3) for step in range(41)]
        for step, threshold in enumerate(grid):
            tell("thresholds", step, len(grid))
            handle.engine.set_thresholds([threshold] * layers)
            handle.reset_stats()
            given = ask(loaded, prepared)
            rows.append((threshold, int(changed(loaded.kind, exact, given, options.min_cosine).sum()), len(exact)))
            served.append(handle.stats()["hit_rate"])
            result = choose_from_counts(
                rows,
                options.budget,
                options.confidence,
                served=served,
                allow_uncertified=options.allow_uncertified,
            )
            if rows[-1][1] / len(exact) > 3 * options.budget:
                break  # looser ones only change more
        tell("thresholds", len(grid), len(grid))
    assert result is not None
    threshold = NEVER if result.threshold is None else result.threshold
    kept = result.to_dict()
    kept["path"] = kept.pop("curve", [])
    return kept | {"thresholds": [threshold] * layers, "sentence": result.sentence()}


def _serve_only(engine: Engine, layers: Sequence[int]) -> None:
    """Serve every sequence that has a record in these layers, and none in the others."""
    engine.set_radii([np.inf if layer in layers else -1.0 for layer in range(engine.layers)])


def _distances(loaded: LoadedModel, engine: Engine, prepared: Sequence[Batch], total: int) -> npt.NDArray[np.float64]:
    """Distance of every text's record; inf where there is none of its length."""
    distances = np.full(total, np.inf)

    def keep(batch: list[Tokens]) -> None:
        found = engine.last_found
        if found is not None:
            distances[[item.row for item in batch]] = found.distances

    _serve_only(engine, [])
    ask(loaded, prepared, after=keep)
    return distances


def _groups(
    loaded: LoadedModel,
    engine: Engine,
    prepared: Sequence[Batch],
    exact: torch.Tensor,
    distances: npt.NDArray[np.float64],
    seed: int,
    tell: Progress,
) -> list[list[int]]:
    """Layers in groups, from the most robust to the most sensitive, by the harm that serving each alone does.

    Judged on sequences of the selection half only: what orders the layers must not certify them.
    """
    chosen_on, _ = split_halves(len(distances), seed)
    rows = chosen_on[np.linspace(0, len(chosen_on) - 1, min(PROBE, len(chosen_on))).round().astype(int)].tolist()
    by_row = {item.row: item for batch, _ in prepared for item in batch}
    # `ask` gives answers by row, so the probed texts are numbered anew.
    probed = [Tokens(place, by_row[row].ids, by_row[row].segments) for place, row in enumerate(rows)]
    renumbered = prepare(loaded, probed, len(prepared[0][0]))
    known = np.isfinite(distances[rows])
    harms = []
    for layer in range(engine.layers):
        tell("sensitivity", layer, engine.layers)
        _serve_only(engine, [layer])
        given = ask(loaded, renumbered)
        each = harm(loaded.kind, exact[rows], given).numpy()
        harms.append(float(each[known].mean()) if known.any() else 0.0)
    tell("sensitivity", engine.layers, engine.layers)
    order = [int(layer) for layer in np.argsort(harms, kind="stable")]
    return [part.tolist() for part in np.array_split(order, min(MOST_GROUPS, engine.layers))]


def _tell_done(tell: Progress, what: str, total: int, done: int) -> None:
    tell(what, done, total)


def _gains(database: Database, groups: Sequence[Sequence[int]], mean_length: float) -> list[float]:
    """Milliseconds that serving a group saves, by the profile; without one, its number of layers."""
    profile = database.manifest.profile
    if profile is None:
        return [float(len(group)) for group in groups]
    from attmemo.perfmodel import Profile

    costs = Profile.from_dict(profile).costs
    n, rows = mean_length, 32.0
    each = [c.exact.estimate(rows * n, rows * n * n) - c.hit.estimate(rows * n, rows * n * n) for c in costs]
    return [max(1e-6, sum(each[layer] for layer in group)) for group in groups]
