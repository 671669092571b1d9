"""What an evaluation asks of stored rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from attmemo.counters import Counters
from attmemo.db import KIND_ROWS, Database
from attmemo.errors import AttmemoError
from attmemo.handles.rows import UNGUARDED
from attmemo.handles.stack import StackMemoization
from attmemo.kernels.align import Rule
from attmemo.memoization import memoize
from attmemo.perfmodel.row_gate import RowGate
from attmemo.planner import Whole
from attmemo.planner.rows import RowPlanner
from attmemo.profiler.map_trial import same_answers
from attmemo.profiler.models import LoadedModel, Progress, Tokens
from attmemo.profiler.row_controls import CONTROLS, serving_rows
from attmemo.profiler.row_live import play
from attmemo.profiler.timing import Path


class RowTrial:
    """Rows under measurement, beside the original code and the same blocks without records (path ``"packed"``)."""

    reuse = "rows"
    kind = KIND_ROWS
    sweep = (0.3, 0.5, 0.7, 0.9)
    controls = tuple(CONTROLS)

    def __init__(self, loaded: LoadedModel, database: Database, options: Any) -> None:
        if options.lookup == "layer":
            raise AttmemoError("rows are looked up once per sequence.", "leave --lookup out")
        self._loaded, self._database, self._options = loaded, database, options

    @property
    def settings(self) -> dict[str, Any]:
        moved = self._options.most_moved
        near = Rule.of(self._options.near).near
        return {"near": near, "most_moved": "any distance" if moved is None else moved}

    def serve(self) -> StackMemoization:
        options, log = self._options, logging.getLogger("attmemo")
        log.addFilter(_is_no_advice)  # to do what is being done
        try:
            memoize(
                self._loaded.model, options.threshold, self._database, reuse="rows", budget=None, near=options.near,
                most_moved=options.most_moved, gate=options.gate,
            )  # fmt: skip
        finally:
            log.removeFilter(_is_no_advice)
        return self._loaded.model.attmemo  # type: ignore[return-value]

    def serve_at_will(self) -> StackMemoization:
        handle = self.serve()
        _planner(handle).gate = RowGate(always=True)
        return handle

    def set_threshold(self, handle: StackMemoization, threshold: float) -> None:
        _planner(handle).threshold = threshold

    def paths(self, handle: StackMemoization) -> dict[str, Path]:
        engine, planner, own = handle.engine, handle.planner, Counters(1)

        def switch(chosen: Any) -> None:
            nonlocal own
            if engine.planner is not chosen:  # what is done without records is counted apart
                engine.planner, engine.counters, own = chosen, own, engine.counters
            handle.enable()

        whole = Whole()
        return {"stock": handle.disable, "packed": lambda: switch(whole), "memoized": lambda: switch(planner)}

    def parts_ms(self, handle: StackMemoization) -> dict[str, float]:
        stats = handle.stats()
        return {part: stats[f"ms_{part}"] for part in ("lookup", "plan", "fetch", "blocks")}

    def rates(self, handle: StackMemoization) -> dict[str, float]:
        stats = handle.stats()
        calls = stats["sequences"] + sum(stats["ineligible"].values())
        share = 1.0 if stats["share_computed"] is None else stats["share_computed"]
        answered = stats["reused"] + stats["repeated"]
        return {"hit_rate": answered / calls if calls else 0.0, "share_computed": share}

    def counts(self, handle: StackMemoization) -> dict[str, Any]:
        stats = handle.stats()
        given = "default" if self._options.threshold == "auto" else "given"
        return self.rates(handle) | {
            "threshold": handle.threshold, "threshold_source": f"{given}: share of tokens that a record must supply",
            "tokens": stats["tokens"], "rows_computed": stats["rows_computed"],
            "ineligible": sum(stats["ineligible"].values()), "not_looked_up": stats["not_looked_up"],
            "weight_bytes": stats["weight_bytes"],
        }  # fmt: skip

    def ceiling(
        self, handle: StackMemoization, tokens: Sequence[Tokens], sample: int, result: dict[str, Any], tell: Progress
    ) -> None:
        """Nothing: the records nearest by their tokens are aligned one by one, so the best is nearly always found."""

    def control(self, handle: StackMemoization, name: str) -> AbstractContextManager[None]:
        return serving_rows(handle.engine, self._database, name)

    def live(self, tokens: Sequence[Tokens], exact: Tensor, tell: Progress) -> dict[str, Any] | None:
        return play(self._loaded, self._database, tokens, exact, self._options, tell)

    def verdict(self, result: dict[str, Any]) -> str:
        share, time = result["share_computed"], result["time"]
        ratios = time["speedups"]
        speed = f"{ratios['stock']:.2f}x the speed of the exact model, {ratios['packed']:.2f}x that of reuse='none'"
        if share > 0.95:
            return f"Reuse of rows does not pay here: {100 * share:.1f} % of the rows are computed, at {speed}."
        return (
            f"{100 * share:.0f} % of the rows are computed, {100 * result['hit_rate']:.0f} % of the sequences use a "
            f"record; end to end {speed}; {same_answers(result['quality'])}."
        )


def _planner(handle: StackMemoization) -> RowPlanner:
    assert isinstance(handle.planner, RowPlanner)
    return handle.planner


def _is_no_advice(record: logging.LogRecord) -> bool:
    return UNGUARDED not in record.getMessage()
