"""What an evaluation asks of stored rows, and their controls.

Controls are what reuse of rows has to beat: zeros, mean rows, and the rows of any other record. They are served to the
very sequences that a record serves, through the same plans: only the numbers differ.
"""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attmemo.db.pools.prepared import in_order
from attmemo.db.pools.shared_pool import SharedPool
from attmemo.errors import AttmemoError
from attmemo.forward.engine import Engine
from attmemo.forward.planning import Whole
from attmemo.forward.stats import Counters
from attmemo.guard.guard import Guard
from attmemo.handle.rows import UNGUARDED
from attmemo.handle.stack import StackMemoization
from attmemo.kernels.align import Rule
from attmemo.memoization import memoize, unmemoize
from attmemo.profiler.answers import ANSWERS, ask, changed, prepare
from attmemo.profiler.models import LoadedModel, Tokens
from attmemo.profiler.trial import Path, Trial, same_answers
from attmemo.profiler.turns import Progress
from attmemo.rows.gate import RowGate
from attmemo.rows.layout import Placed, RowLayout
from attmemo.rows.planner import RowPlanner
from attmemo.rows.serve import Rows
from attmemo.rows.store import Record, RowStore

MEAN_OF = 64  # records that mean rows average


class StandIn(RowStore):
    """Records of a database with the numbers of other ones. Nothing is held, so there is nothing to close."""

    def __init__(self, database: SharedPool) -> None:
        self.kept, self.layout = in_order(database), RowLayout.of(database.filling.model, database.filling.storage)

    def record(self, number: int) -> Record:
        """A record as it is."""
        return self.layout.record_of(self.kept[number])

    def fetch(self, records: npt.NDArray[np.int64]) -> Placed:
        chosen = [None if record < 0 else self.instead(record) for record in records.tolist()]
        return Placed.copied(self.layout, chosen)

    @abstractmethod
    def instead(self, record: int) -> Record:
        """What is served for a record, with as many tokens."""


class ZeroedRows(StandIn):
    """Zeros."""

    def instead(self, record: int) -> Record:
        found = self.record(record)
        return replace(found, rows=torch.zeros_like(found.rows), last=torch.zeros_like(found.last))


class MeanRows(StandIn):
    """For every token the mean over tokens and records, of each layer."""

    def __init__(self, database: SharedPool) -> None:
        super().__init__(database)
        numbers = np.linspace(0, len(self.kept) - 1, min(MEAN_OF, len(self.kept))).round().astype(int)
        found = [self.record(int(number)) for number in numbers]
        self._rows = torch.cat([_numbers(record) for record in found], 2).mean(2, keepdim=True)  # [layers, 2, 1, H]
        self._last = torch.cat([record.last.float() for record in found]).mean(0, keepdim=True)  # [1, H]

    def instead(self, record: int) -> Record:
        own = self.record(record)
        n, storage = len(own.tokens), (own.rows.dtype, own.last.dtype)
        rows, last = self._rows.expand(-1, -1, n, -1).contiguous(), self._last.expand(n, -1).contiguous()
        return Record.pack(own.tokens, rows, last, storage, self.layout.heads)


class RandomRecord(StandIn):
    """The rows of another record; it begins again where it is shorter."""

    def instead(self, record: int) -> Record:
        count, n = len(self.kept), len(self.kept[record].tokens)
        stranger = (record * 2654435761 + 12345) % count  # a multiplicative hash in place of a generator
        found = self.record(stranger if stranger != record else (record + 1) % count)
        places = torch.arange(n) % len(found.tokens)
        return Record(
            found.tokens[places.numpy()], found.rows.index_select(2, places),
            None if found.scales is None else found.scales.index_select(2, places), found.last.index_select(0, places),
        )  # fmt: skip


CONTROLS: dict[str, Callable[[SharedPool], StandIn]] = {
    "zeroed rows": ZeroedRows, "mean rows": MeanRows, "random record": RandomRecord,
}  # fmt: skip


def _numbers(record: Record) -> Tensor:
    """K and V ``[layers, 2, n, H]`` of a record, float32."""
    if record.scales is None:
        return record.rows.float()
    parts = record.rows.float().unflatten(-1, (record.scales.shape[-1], -1))  # type: ignore[no-untyped-call]
    return (parts * record.scales[..., None]).flatten(-2)  # type: ignore[no-any-return]


@contextmanager
def serving_rows(engine: Engine, database: SharedPool, name: str) -> Iterator[None]:
    """Serve a control's rows instead of the records' while inside."""
    rows = engine.reuse
    assert isinstance(rows, Rows)
    before, rows.store = rows.store, CONTROLS[name](database)
    try:
        yield
    finally:
        rows.store = before


class RowTrial(Trial):
    """Rows under measurement, beside the original code and the same blocks without records (path ``"packed"``)."""

    reuse = "rows"
    sweep = (0.3, 0.5, 0.7, 0.9)
    controls = tuple(CONTROLS)

    def __init__(self, loaded: LoadedModel, database: SharedPool, options: Any) -> None:
        if options.lookup == "layer":
            raise AttmemoError("rows are looked up once per sequence.", "leave --lookup out")
        super().__init__(loaded, options)
        self._database, self.storage, self.bytes = database, database.filling.storage, database.nbytes
        self.lengths = [len(kept.tokens) for kept in database.records.values()]

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
                self._loaded.model, options.threshold, self._database.path, reuse="rows", budget=None,
                near=options.near, most_moved=options.most_moved, gate=options.gate,
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
        return _play(self._loaded, self._database.path, tokens, exact, self._options, tell)

    def verdict(self, result: dict[str, Any]) -> str:
        share, time = result["share_computed"], result["time"]
        ratios = time["speedups"]
        speed = f"{ratios['stock']:.2f}x the exact model's speed, {ratios['packed']:.2f}x reuse='none'"
        if share > 0.95:
            return f"Reuse does not pay here: {100 * share:.1f} % of the tokens are recomputed, {speed}."
        return f"{speed}; {100 * share:.0f} % of the tokens recomputed; {same_answers(result['quality'])}."


def _planner(handle: StackMemoization) -> RowPlanner:
    assert isinstance(handle.planner, RowPlanner)
    return handle.planner


def _is_no_advice(record: logging.LogRecord) -> bool:
    return UNGUARDED not in record.getMessage()


def _play(
    loaded: LoadedModel, database: os.PathLike[str], tokens: Sequence[Tokens], exact: Tensor, options: Any,
    tell: Progress,
) -> dict[str, Any] | None:  # fmt: skip
    """What the guard would have done with texts, had they come one after the other, live, to this database.

    Shares of the texts served and changed, and of the rows computed; None if the answer cannot be guarded. The guard
    begins with nothing, and the texts are asked in the order of the data, through the path that a user gets. Nothing
    of it is stored: neither records nor what the guard learns.
    """
    head = "score" if exact.shape[1:] == (1,) else "class"
    answer = ANSWERS.get(head if loaded.kind == "classifier" else str(loaded.pooling or loaded.kind))
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
        given = ask(loaded, prepared, tell=tell, what="guarded answers")
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
