"""True similarity of what is served, beside the best that an exhaustive search finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attmemo.adapters import adapter_for
from attmemo.db import SEQUENCE, Database
from attmemo.handles.maps import MapMemoization
from attmemo.profiler.capture import Capture, Captured
from attmemo.profiler.models import LoadedModel, Tokens, collate
from attmemo.profiler.turns import Progress
from attmemo.similarity import similarity_matrix, similarity_score

_BATCH = 16


def search_all(
    loaded: LoadedModel, handle: MapMemoization, tokens: Sequence[Tokens], most: int, tell: Progress
) -> tuple[list[dict[str, Any]], int]:
    """What is found and what could be, by layer, on a sample of at most so many texts; and how many these are.

    The keys are the exact model's hidden states (off-policy), and no gate is asked: hit rates elsewhere are the
    memoized model's own. Rows have ``mean_true_similarity`` of the records that serve, ``sample_hit_rate``,
    ``exhaustive_hit_rate`` and ``exhaustive_mean_similarity`` of the best records there are. No text, no rows.
    """
    engine, database = handle.engine, handle.store
    count = min(most, len(tokens))
    if count <= 0:
        return [], 0
    places = np.linspace(0, len(tokens) - 1, count).round().astype(int)
    sample = sorted((tokens[place] for place in places), key=len)
    adapter, sites = adapter_for(loaded.model)
    best, true = ([list[float]() for _ in range(engine.layers)] for _ in range(2))
    done = 0
    handle.disable()
    try:
        with Capture(loaded.model, adapter, sites) as capture:
            while done < count:
                length = len(sample[done])
                part = [item for item in sample[done : done + _BATCH] if len(item) == length]
                done += len(part)
                tell("exhaustive search", done, count)
                there = np.flatnonzero(database.records.lengths == length)
                if not len(there):
                    continue
                captured = capture.run(collate(loaded, part))
                for layer in range(engine.layers):
                    best[layer] += [_best(database, layer, maps, there) for maps in captured.maps[layer]]
                for layer, score in _served(handle, captured):
                    true[layer].append(score)
    finally:
        handle.enable()
    return [
        {
            "mean_true_similarity": float(np.mean(true[layer])) if true[layer] else None,
            "sample_hit_rate": len(true[layer]) / count,
            "exhaustive_hit_rate": sum(score >= handle.threshold[layer] for score in best[layer]) / count,
            "exhaustive_mean_similarity": float(np.mean(best[layer])) if best[layer] else None,
        }
        for layer in range(engine.layers)
    ], count


def _served(handle: MapMemoization, captured: Captured) -> list[tuple[int, float]]:
    """Layer and true similarity of every map that would be served."""
    scores, found = [], None
    for layer in range(handle.engine.layers):
        if found is None or handle.planner.lookup == "layer":
            owner = SEQUENCE if handle.planner.lookup == "sequence" else layer
            found = handle.planner.index.find(owner, captured.inputs[layer], captured.spans.lengths)
        for row, maps in enumerate(captured.maps[layer]):
            if found.records[row] >= 0 and found.distances[row] <= handle.planner.threshold.radii[layer]:
                record = handle.store.map(layer, int(found.records[row]))
                scores.append((layer, float(similarity_score(maps, record))))
    return scores


def _best(database: Database, layer: int, apm: Tensor, records: np.ndarray[Any, Any]) -> float:
    """The greatest similarity of one map ``[h, n, n]`` to any of these records."""
    best = 0.0
    for part in np.array_split(records, max(1, len(records) * apm.numel() // (1 << 24))):
        if len(part):
            stored = torch.stack([database.map(layer, int(r)) for r in part])
            best = max(best, float(similarity_matrix(apm.unsqueeze(0), stored).max()))
    return best
