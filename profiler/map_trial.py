"""What an evaluation asks of stored maps: their controls, and the best that an exhaustive search finds beside them.

Controls are what a similarity search has to beat: the mean map of the length, a random map of the length. They are
served to the very sequences and layers that memoization serves, so that only the map differs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attmemo.db import KIND_MAP, SEQUENCE, Database
from attmemo.embed.similarity import similarity_matrix, similarity_score
from attmemo.forward.engine import Engine
from attmemo.maps.handle import MapMemoization
from attmemo.maps.serve import Maps
from attmemo.maps.source import Ints, MapSource, StoredMaps
from attmemo.memoization import memoize
from attmemo.mmap import Batch
from attmemo.models import adapter_for
from attmemo.profiler.data import digest
from attmemo.profiler.map_recorder import Capture, Captured
from attmemo.profiler.models import LoadedModel, Tokens, collate
from attmemo.profiler.trial import Path, Trial, same_answers
from attmemo.profiler.turns import Progress

MEAN_OF = 64  # records that a mean map averages
_BATCH = 16  # texts of an exhaustive search


class MeanMaps(MapSource):
    """For every record the mean map of its length."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._means: dict[tuple[int, int], Tensor] = {}

    def fetch(self, layer: int, length: int, records: Ints) -> AbstractContextManager[Batch]:
        if (layer, length) not in self._means:
            there = np.flatnonzero(self._database.records.lengths == length)
            some = there[np.linspace(0, len(there) - 1, min(MEAN_OF, len(there))).round().astype(int)]
            maps = [self._database.map(layer, int(record)).float() for record in some]
            self._means[layer, length] = torch.stack(maps).mean(0)
        return Batch(None, [self._means[layer, length]] * len(records))

    def close(self) -> None:
        self._means.clear()


class RandomMaps(MapSource):
    """For every record the maps of another one of its length; the same stranger in every layer."""

    def __init__(self, database: Database) -> None:
        self._database, self._stored = database, StoredMaps(database)

    def fetch(self, layer: int, length: int, records: Ints) -> AbstractContextManager[Batch]:
        there = np.flatnonzero(self._database.records.lengths == length)
        # A multiplicative hash of the record instead of a generator: all layers must draw the same.
        places = (records * 2654435761 + 12345) % len(there)
        places[there[places] == records] += 1
        return self._stored.fetch(layer, length, there[places % len(there)])

    def close(self) -> None:
        self._stored.close()


CONTROLS: dict[str, Callable[[Database], MapSource]] = {"mean map": MeanMaps, "random map": RandomMaps}


@contextmanager
def serving_control(engine: Engine, name: str) -> Iterator[None]:
    """Serve a control's maps instead of the records' while inside; lookups stay real."""
    maps = engine.reuse
    assert isinstance(maps, Maps)
    before, maps.source = maps.source, CONTROLS[name](maps.database)
    try:
        yield
    finally:
        maps.source.close()
        maps.source = before


class MapTrial(Trial):
    """Maps under measurement."""

    reuse = "maps"
    sweep = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
    controls = tuple(CONTROLS)

    def __init__(self, loaded: LoadedModel, database: Database, options: Any) -> None:
        super().__init__(loaded, options)
        self._database, self._lookup = database, options.lookup
        self.storage, self.bytes, self.lengths = database.manifest.storage, database.bytes, list(database.lengths)
        self._arena = database.arena(KIND_MAP, int(database.records.lengths[0]))

    @property
    def settings(self) -> dict[str, Any]:
        return {"fetch": self._options.fetch, "page_bytes": self._arena.page_bytes}

    def notes(self, files: Sequence[Any]) -> list[str]:
        found = [self._arena.notice] if self._arena.notice else []
        automatic = self._options.threshold == "auto"
        tuned_on = (self._database.manifest.tuning or {}).get("digests", [])
        seen = [os.path.basename(file) for file in files if automatic and digest(file) in tuned_on]
        if seen:
            found.append(f"the thresholds were tuned on {', '.join(seen)}: what is measured on it flatters")
        return found

    def serve(self) -> MapMemoization:
        handle = self._memoize(self._options.threshold, self._options.gate)
        self._lookup = handle.lookup
        return handle

    def serve_at_will(self) -> MapMemoization:
        return self._memoize(0.0, False)

    def set_threshold(self, handle: MapMemoization, threshold: float) -> None:
        handle.planner.set_thresholds([threshold] * handle.engine.layers)

    def paths(self, handle: MapMemoization) -> dict[str, Path]:
        return {"stock": handle.disable, "memoized": handle.enable}

    def parts_ms(self, handle: MapMemoization) -> dict[str, float]:
        rows = handle.stats()["layers"]
        names = {"lookup": "ms_lookup", "fetch_and_av": "ms_serve", "misses_in_mixed_batches": "ms_misses"}
        return {part: sum(row[key] for row in rows) for part, key in names.items()}

    def rates(self, handle: MapMemoization) -> dict[str, float]:
        return {"hit_rate": handle.stats()["hit_rate"]}

    def counts(self, handle: MapMemoization) -> dict[str, Any]:
        keys = (
            "layer", "threshold", "sequences", "queries", "hits", "hit_rate", "mean_predicted_similarity", "gate",
            "why",
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

    def ceiling(
        self, handle: MapMemoization, tokens: Sequence[Tokens], counts: dict[str, Any], tell: Progress
    ) -> dict[str, Any]:
        """As `Trial.ceiling`, on a sample of so many texts as were asked for.

        The keys are the exact model's hidden states (off-policy), and no gate is asked: hit rates elsewhere are the
        memoized model's own.
        """
        count = min(self._options.exhaustive, len(tokens))
        if count <= 0:
            return {}
        places = np.linspace(0, len(tokens) - 1, count).round().astype(int)
        best, true = _search_all(self._loaded, handle, sorted((tokens[place] for place in places), key=len), tell)
        layers = []
        for layer, counted in enumerate(counts["layers"]):
            hits = sum(score >= handle.threshold[layer] for score in best[layer])
            layers.append(counted | {
                "mean_true_similarity": _mean(true[layer]), "sample_hit_rate": len(true[layer]) / count,
                "exhaustive_hit_rate": hits / count, "exhaustive_mean_similarity": _mean(best[layer]),
            })  # fmt: skip
        rate = float(np.mean([row["exhaustive_hit_rate"] for row in layers]))
        return {"layers": layers, "exhaustive_hit_rate": rate, "exhaustive_sample": count}

    def control(self, handle: MapMemoization, name: str) -> AbstractContextManager[None]:
        return serving_control(handle.engine, name)

    def verdict(self, result: dict[str, Any]) -> str:
        rate, time, quality = result["hit_rate"], result["time"], result["quality"]
        speed = f"{time['speedup']:.2f}x"
        if rate < 0.05:
            off = sum(row["gate"] == "off" for row in result["layers"])
            why = f"the gate is off in {off} of {len(result['layers'])} layers"
            return (
                f"Memoization does not pay here: {100 * (1 - rate):.1f} % of the attention calls stay exact "
                f"({why if off else 'few records are similar enough'}), {speed} the speed."
            )
        best = f"exact ({time['best_exact']})" if "compile" in time["exact_ms"] else "the exact model"
        return f"{speed} {best}; {100 * rate:.0f} % of maps reused; {same_answers(quality)}."

    def _memoize(self, threshold: Any, gate: bool) -> MapMemoization:
        options = self._options
        memoize(self._loaded.model, threshold, self._database, lookup=self._lookup, gate=gate, fetch=options.fetch)
        return self._loaded.model.attmemo  # type: ignore[return-value]


def _mean(scores: list[float]) -> float | None:
    return float(np.mean(scores)) if scores else None


def _search_all(
    loaded: LoadedModel, handle: MapMemoization, sample: Sequence[Tokens], tell: Progress
) -> tuple[list[list[float]], list[list[float]]]:
    """By layer: the similarity of the best record there is to each text, and of the record that serves, if any."""
    database, done = handle.store, 0
    best, true = ([list[float]() for _ in range(handle.engine.layers)] for _ in range(2))
    handle.disable()
    try:
        with Capture(loaded.model, *adapter_for(loaded.model)) as capture:
            while done < len(sample):
                length = len(sample[done])
                part = [item for item in sample[done : done + _BATCH] if len(item) == length]
                done += len(part)
                tell("exhaustive search", done, len(sample))
                there = np.flatnonzero(database.records.lengths == length)
                if not len(there):
                    continue
                captured = capture.run(collate(loaded, part))
                for layer, known in enumerate(best):
                    known += [_best(database, layer, maps, there) for maps in captured.maps[layer]]
                for layer, score in _served(handle, captured):
                    true[layer].append(score)
    finally:
        handle.enable()
    return best, true


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
