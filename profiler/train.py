"""Train the embedders of a database, index its records, measure its profile, and publish all three.

The costs of a profile are milliseconds of exact attention, of a hit and of a lookup, in each layer. The user's model
runs through the engine on this machine, at batch sizes and lengths of the database. Hit rates come from held-out
sequences, which never find themselves. A decoder is measured in a prefill with a key-value cache: a hit without a
cache costs less, so the gate leaves some calls exact that would have paid.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attmemo.db import KIND_INPUT, Database, DatabaseWriter, read_manifest
from attmemo.db.pools.filling import is_sealed
from attmemo.embed.indexing import build_indexes, remove_stale
from attmemo.embed.training import Trained, TrainOptions, train
from attmemo.errors import DatabaseError, DataError
from attmemo.maps.handle import MapMemoization
from attmemo.models import adapter_for
from attmemo.perfmodel.cost import CostModel
from attmemo.perfmodel.profile import Conditions, HitRates, LayerCosts, Profile
from attmemo.profiler.answers import serving
from attmemo.profiler.map_recorder import attention_seconds
from attmemo.profiler.models import LoadedModel
from attmemo.profiler.open import open_model
from attmemo.profiler.turns import Progress, silent
from attmemo.system.machine import conditions

_Sample = tuple[list[int], float]  # lengths of the batch, milliseconds
BATCHES = (1, 4, 16, 32)
MOST_TOKENS = 4096  # per measured batch: enough to see the quadratic term, little enough to end soon
REPEATS = 3


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
    if is_sealed(path):
        what = f"{path} keeps rows, which are found by their tokens: there is no embedder to train."
        raise DatabaseError(what, f"attmemo evaluate {path} --data FILE")
    manifest = read_manifest(path)
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


def measure(
    loaded: LoadedModel, database: Database, trained: Trained, tell: Progress = silent, seconds: float = 60.0
) -> Profile:
    """The profile of a database on this machine.

    Small batches are measured first; those that do not fit in `seconds` are left out.
    """
    layers = database.manifest.model.layers
    own = database.manifest.layers_kept(KIND_INPUT) == layers  # whether layers can look up for themselves
    longest = trained.longest
    sizes = _sizes(database, longest)
    exact, hit, lookup, miss = ([list[_Sample]() for _ in range(layers)] for _ in range(4))
    sequence: list[_Sample] = []
    start, done = time.monotonic(), 0
    with serving(loaded, database, "sequence") as handle:
        for batch, length in sizes:
            if done >= 3 and time.monotonic() - start > seconds:
                break
            tell("costs", done, len(sizes))
            inputs, lengths = _texts(loaded, batch, length), [length] * batch
            handle.disable()
            for layer, ms in enumerate(_time_exact(loaded, inputs)):
                exact[layer].append((lengths, ms))
            handle.enable()
            times = _time_served(loaded, handle, inputs)
            sequence.append((lengths, times["ms_lookup"][0]))
            for layer, ms in enumerate(times["ms_serve"]):
                hit[layer].append((lengths, ms))
            if batch > 1:
                for layer, ms in enumerate(_time_served(loaded, handle, inputs, half=True)["ms_misses"]):
                    miss[layer].append(([length] * (batch // 2), ms))
            done += 1
    if own:
        with serving(loaded, database, "layer") as handle:
            for batch, length in sizes[:done]:
                for layer, ms in enumerate(_time_served(loaded, handle, _texts(loaded, batch, length))["ms_lookup"]):
                    lookup[layer].append(([length] * batch, ms))
    tell("costs", len(sizes), len(sizes))
    fit, free = CostModel.fit, CostModel(0.0, 0.0, 0.0)
    costs = [
        LayerCosts(fit(e), fit(h), fit(found) if own else free, fit(missed) if missed else None)
        for e, h, found, missed in zip(exact, hit, lookup, miss, strict=True)
    ]
    stored = [length for length in database.lengths if length <= longest]
    machine = conditions()
    rates = {way: HitRates(trained.held_out_scores(way), stored) for way in ("layer", "sequence")}
    return Profile(
        costs=costs, rates=rates["layer"], rates_sequence=rates["sequence"], lookup_sequence=fit(sequence),
        threads=torch.get_num_threads(), dtype=loaded.dtype,
        conditions=Conditions(machine["cpu"], tuple(machine["features"]), machine["cores"]),
    )  # fmt: skip


def _sizes(database: Database, longest: int) -> list[tuple[int, int]]:
    """Batches and lengths to measure: lengths spread over the records', small work first."""
    lengths = np.sort(database.records.lengths[database.records.lengths <= longest])
    chosen = sorted({int(np.quantile(lengths, q, method="nearest")) for q in (0.05, 0.5, 0.95, 1.0)})
    sizes = [(b, n) for b in BATCHES for n in chosen if b * n <= MOST_TOKENS]
    return sorted(sizes, key=lambda size: size[0] * size[1] ** 2) or [(1, chosen[0])]


def _texts(loaded: LoadedModel, batch: int, length: int) -> list[dict[str, Tensor]]:
    """Other texts in every repeat, or a hit would be timed on maps that are in the cache from the time before."""
    vocabulary = int(loaded.model.config.vocab_size)  # type: ignore[union-attr,arg-type]
    generator = torch.Generator().manual_seed(batch * 100003 + length)
    ids = torch.randint(vocabulary // 10, vocabulary, (1 + REPEATS, batch, length), generator=generator)
    return [{"input_ids": turn, "attention_mask": torch.ones_like(turn)} for turn in ids]


def _run(loaded: LoadedModel, inputs: dict[str, Tensor]) -> None:
    host = adapter_for(loaded.model)[0].host(loaded.model)
    with torch.inference_mode():
        host(**inputs)


def _time_exact(loaded: LoadedModel, inputs: list[dict[str, Tensor]]) -> list[float]:
    samples = []
    for turn in inputs:
        with attention_seconds(loaded.model) as spent:
            _run(loaded, turn)
        samples.append([1e3 * s for s in spent])
    return [median(column) for column in zip(*samples[1:], strict=True)]


def _time_served(
    loaded: LoadedModel, handle: MapMemoization, inputs: list[dict[str, Tensor]], *, half: bool = False
) -> dict[str, list[float]]:
    """Milliseconds per layer, ``ms_serve``, ``ms_lookup`` and ``ms_misses``, on records of this length.

    Every sequence is served. With `half` every second sequence is served, and the others miss.
    """
    names = ("ms_serve", "ms_lookup", "ms_misses")
    index = handle.planner.index
    find = index.find

    def find_half(*args: Any) -> Any:
        found = find(*args)
        found.records[1::2], found.distances[1::2] = -1, np.inf
        return found

    samples = []
    index.find = find_half if half else find  # type: ignore[assignment,method-assign]
    try:
        for turn in inputs:
            handle.reset_stats()
            _run(loaded, turn)
            samples.append([[row[name] for name in names] for row in handle.stats()["layers"]])
    finally:
        index.find = find  # type: ignore[method-assign]
    medians = np.median(samples[1:], axis=0)  # [layers, names]
    return {name: medians[:, column].tolist() for column, name in enumerate(names)}
