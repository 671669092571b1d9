"""What an evaluation asks of stored attention maps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from torch import Tensor

from attmemo.db import KIND_MAP, Database
from attmemo.handles.maps import MapMemoization
from attmemo.memoization import memoize
from attmemo.profiler.ceiling import search_all
from attmemo.profiler.controls import CONTROLS, serving_control
from attmemo.profiler.models import LoadedModel, Tokens
from attmemo.profiler.timing import Path
from attmemo.profiler.turns import Progress


class MapTrial:
    """Maps under measurement."""

    reuse = "maps"
    kind = KIND_MAP
    sweep = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
    controls = tuple(CONTROLS)

    def __init__(self, loaded: LoadedModel, database: Database, options: Any) -> None:
        self._loaded, self._database, self._options = loaded, database, options
        self._lookup = options.lookup

    @property
    def settings(self) -> dict[str, Any]:
        return {"fetch": self._options.fetch}

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
        self, handle: MapMemoization, tokens: Sequence[Tokens], sample: int, result: dict[str, Any], tell: Progress
    ) -> None:
        layers, count = search_all(self._loaded, handle, tokens, sample, tell)
        if layers:
            result["layers"] = [row | more for row, more in zip(result["layers"], layers, strict=True)]
            result["exhaustive_hit_rate"] = float(np.mean([row["exhaustive_hit_rate"] for row in layers]))
            result["exhaustive_sample"] = count

    def control(self, handle: MapMemoization, name: str) -> AbstractContextManager[None]:
        return serving_control(handle.engine, name)

    def live(self, tokens: Sequence[Tokens], exact: Tensor, tell: Progress) -> dict[str, Any] | None:
        """Nothing: of maps the threshold is the whole guard."""
        return None

    def verdict(self, result: dict[str, Any]) -> str:
        rate, time, quality = result["hit_rate"], result["time"], result["quality"]
        speed = f"{time['speedup']:.2f}x"
        if rate < 0.05:
            off = sum(row["gate"] == "off" for row in result["layers"])
            why = f"the gate is off in {off} of {len(result['layers'])} layers"
            return (
                f"Memoization does not pay here: {100 * (1 - rate):.1f} % of the attention calls are left to the "
                f"exact path ({why if off else 'few records are similar enough'}), at {speed} its speed."
            )
        best = f"the best exact path ({time['best_exact']})"
        return (
            f"{100 * rate:.0f} % of the attention calls are served from memory; end to end {speed} the speed of "
            f"{best if 'compile' in time['exact_ms'] else 'the exact model (torch.compile was not tried)'}; "
            f"{same_answers(quality)}."
        )

    def _memoize(self, threshold: Any, gate: bool) -> MapMemoization:
        options = self._options
        memoize(self._loaded.model, threshold, self._database, lookup=self._lookup, gate=gate, fetch=options.fetch)
        return self._loaded.model.attmemo  # type: ignore[return-value]


def same_answers(quality: dict[str, Any]) -> str:
    """How many answers are those of the exact model, in words."""
    language = "perplexity_exact" in quality
    same = f"{100 * quality['agreement']:.1f} % of the {'first tokens' if language else 'answers'} are those of the "
    same += "exact model"
    if language:
        same += f", perplexity {quality['perplexity_memoized']:.4g} (exact {quality['perplexity_exact']:.4g})"
    return same
