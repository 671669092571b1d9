"""What an evaluation asks of stored rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from attmemo.db import KIND_ROWS, Database
from attmemo.errors import AttmemoError
from attmemo.forward.planning import Whole
from attmemo.forward.stats import Counters
from attmemo.guard.guard import Guard
from attmemo.handle.rows import UNGUARDED
from attmemo.handle.stack import StackMemoization
from attmemo.kernels.align import Rule
from attmemo.memoization import memoize, unmemoize
from attmemo.profiler.answers import ANSWERS, ask, changed, prepare
from attmemo.profiler.models import LoadedModel, Tokens
from attmemo.profiler.row_controls import CONTROLS, serving_rows
from attmemo.profiler.trial import Path, Trial, same_answers
from attmemo.profiler.turns import Progress
from attmemo.rows.gate import RowGate
from attmemo.rows.planner import RowPlanner


class RowTrial(Trial):
    """Rows under measurement, beside the original code and the same blocks without records (path ``"packed"``)."""

    reuse = "rows"
    kind = KIND_ROWS
    sweep = (0.3, 0.5, 0.7, 0.9)
    controls = tuple(CONTROLS)

    def __init__(self, loaded: LoadedModel, database: Database, options: Any) -> None:
        if options.lookup == "layer":
            raise AttmemoError("rows are looked up once per sequence.", "leave --lookup out")
        super().__init__(loaded, database, options)

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

    def control(self, handle: StackMemoization, name: str) -> AbstractContextManager[None]:
        return serving_rows(handle.engine, self._database, name)

    def live(self, tokens: Sequence[Tokens], exact: Tensor, tell: Progress) -> dict[str, Any] | None:
        return _play(self._loaded, self._database, tokens, exact, self._options, tell)

    def verdict(self, result: dict[str, Any]) -> str:
        share, time = result["share_computed"], result["time"]
        ratios = time["speedups"]
        speed = f"{ratios['stock']:.2f}x the exact model's speed, {ratios['packed']:.2f}x reuse='none'"
        if share > 0.95:
            return f"Reuse of rows does not pay here: {100 * share:.1f} % of the rows are computed, {speed}."
        return f"{speed}; {100 * share:.0f} % of the rows computed; {same_answers(result['quality'])}."


def _planner(handle: StackMemoization) -> RowPlanner:
    assert isinstance(handle.planner, RowPlanner)
    return handle.planner


def _is_no_advice(record: logging.LogRecord) -> bool:
    return UNGUARDED not in record.getMessage()


def _play(
    loaded: LoadedModel, database: Database, tokens: Sequence[Tokens], exact: Tensor, options: Any, tell: Progress
) -> dict[str, Any] | None:
    """What the guard would have done with texts, had they come one after the other, live, to this database.

    Shares of the texts served and changed, and of the rows computed; None if the answer cannot be guarded. The guard
    begins with nothing, and the texts are asked in the order of the data, through the path that a user gets. Nothing
    of it is stored: neither records nor what the guard learns.
    """
    answer = ANSWERS.get("class" if loaded.kind == "classifier" else str(loaded.pooling))
    if loaded.answer is not None or answer is None:
        return None
    total = len(tokens)
    memoize(
        loaded.model, options.threshold, database, reuse="rows", budget=options.budget, confidence=options.confidence,
        answer=answer, min_cosine=options.min_cosine, tokenizer=loaded.tokenizer, near=options.near,
        most_moved=options.most_moved, gate=options.gate,
    )  # fmt: skip
    try:
        handle: Any = loaded.model.attmemo
        assert isinstance(handle, StackMemoization)
        handle.guard_anew(Guard(options.budget, options.confidence, seed=0))  # the tokenizer is always known here
        in_order = sorted(tokens, key=lambda item: item.row)
        prepared = prepare(loaded, in_order, options.batch_size, sort=False)
        given = ask(loaded, prepared, progress=lambda done: tell("guarded answers", done, total))
        planner = handle.planner
        assert isinstance(planner, RowPlanner)
        stats, rule = handle.stats(), planner.rule
    finally:
        unmemoize(loaded.model)
    guard = stats["guard"]
    differ = changed(loaded.kind, exact, given, options.min_cosine)
    valid = sum(map(len, tokens))
    late = torch.arange(total) >= total // 2
    return {
        "budget": options.budget, "confidence": options.confidence, "reused": stats["reused"] / total,
        "repeated": stats["repeated"] / total,
        "changed": float(differ.float().mean()), "changed_late": float(differ[late].float().mean()),
        "share_computed": stats["rows_computed"] / valid, "verified": guard["verified"], "margin": guard["margin"],
        "state": guard["state"], "done": guard["done"], "says": guard["says"],
        "near": rule.near, "near_numbers": rule.near_where(words=False),
    }  # fmt: skip
