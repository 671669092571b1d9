"""Plans of rows: records that share tokens with a sequence, and which of its rows they supply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attmemo.embed.lookup import Found
from attmemo.forward.context import Forward, Given
from attmemo.forward.plan import Plan, Reused, RowShare
from attmemo.forward.planning import BY_HAND, Whole
from attmemo.forward.stats import Counters, Skip
from attmemo.kernels.align import Rule, with_long
from attmemo.kernels.kinds import NO_KINDS
from attmemo.kernels.plan import Demand, RowPlan
from attmemo.models import Call, Spans
from attmemo.models.masks import consecutive, valid_places
from attmemo.rows.gate import RowGate
from attmemo.rows.index import Candidates, TokenIndex

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

THRESHOLD: Final = 0.5
"""Share of its tokens that a record must supply by default."""
TYPES_FROM: Final = 1 << 24
"""Token types are kept above the ids."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What one forward looks up."""

    tokens: npt.NDArray[np.int32]  # [sum n]
    starts: Ints  # [B + 1]
    lengths: Ints  # [B]
    seconds_per_row: float | None = None  # that blocks take; None: not known yet

    @classmethod
    def of(cls, tokens: npt.NDArray[np.int32], lengths: Ints, seconds_per_row: float | None = None) -> Asked:
        """Sequences of these lengths, one behind the other."""
        return cls(tokens, np.concatenate([[0], np.cumsum(lengths)]), lengths, seconds_per_row)


class RowPlanner(Whole):
    """Finds the records that supply most of a sequence.

    A sequence without such a record is computed whole, in the same packed batch.

    Parameters
    ----------
    index : TokenIndex
        Tokens of all records.
    threshold : float
        Share of its tokens, in [0, 1], that a record must supply.
    rule : Rule
        Which rows are computed beside those without a partner.
    relative : bool
        Whether the model sees distances between tokens alone. Else positions must be the usual ones: they are inside
        the rows.
    gated : bool
        Stop looking up where it does not pay.
    """

    grows: ClassVar[bool] = False
    """Whether records come while the model serves."""

    def __init__(self, index: TokenIndex, threshold: float, rule: Rule, *, relative: bool, gated: bool = True) -> None:
        self.index, self.threshold, self.rule = index, threshold, rule
        self.gate = RowGate(always=not gated)
        self._relative = relative

    def rows_to_compute(
        self, sequences: Sequence[npt.NDArray[np.int32]], seconds_per_row: float | None = None
    ) -> list[int]:
        """Rows that each of these sequences of tokens would need now, verifications left out. Only asks."""
        lengths = np.array([len(tokens) for tokens in sequences], np.int64)
        if not lengths.all() or not len(self.index) or not self._may_pay(seconds_per_row):
            return [int(n) for n in lengths]
        return self._needs(Asked.of(np.concatenate(sequences), lengths)).tolist()  # type: ignore[no-any-return]

    def _needs(self, asked: Asked) -> Ints:
        """Rows to compute, ``[B]``."""
        return self.planned(asked, self.index.candidates(asked.tokens, asked.starts)).computed

    def planned(self, asked: Asked, candidates: Candidates) -> RowPlan:
        """Return the plan of a batch. It only asks: nothing is drawn, counted or kept."""
        demand = Demand(share=self.threshold)
        found = self.index.plan(asked.tokens, asked.starts, candidates, self.rule, NO_KINDS, demand)
        return with_long(found, asked.starts) if self.rule.before_long else found

    def plan(self, layer: int, call: Call, spans: Spans, forward: Forward) -> Plan:
        given, counters = forward.given, forward.counters
        if given is None:
            return BY_HAND
        if forward.whole:
            counters.skip("asked_without_reuse", len(spans.lengths))
            return super().plan(layer, call, spans, forward)
        start = perf_counter()
        asked = self._ask(given, spans, call.shape[1], counters)
        if asked is None:
            return super().plan(layer, call, spans, forward)
        candidates = self.index.candidates(asked.tokens, asked.starts)
        looked = perf_counter()
        found = self.planned(asked, candidates)
        served = found.record >= 0
        self._count(asked, found, served, (start, looked), counters)
        return plan_of(layer, spans, asked, found, served)

    def _ask(
        self, given: Given, spans: Spans, padded: int, counters: Counters, pays: bool = False
    ) -> Asked | None:  # fmt: skip
        """What is to be looked up; None, and counted, if nothing is. `pays`: it was asked whether that pays."""
        batch = len(spans.lengths)
        tokens = self._tokens(given.arguments, spans, padded)
        if isinstance(tokens, str):
            counters.skip(tokens, batch)
            return None
        if not self.grows and not len(self.index):
            counters.skip("no_records", batch)
            return None
        seconds_per_row = counters.done.seconds_per_row
        why = None if pays else self.reason_to_leave(sum(spans.lengths), seconds_per_row)
        if why is not None:
            counters.skip(why, batch)
            return None
        lengths = np.asarray(spans.lengths, np.int64)
        return Asked.of(tokens, lengths, seconds_per_row)

    def reason_to_leave(self, tokens: int, seconds_per_row: float | None) -> Skip | None:
        """Return why a forward of so many tokens is left to the blocks, and note it; None: it is looked up."""
        if not (self.gate.always or self.gate.ask(seconds_per_row)):
            self.gate.leave()
            return "lookup_does_not_pay"
        return None if self._pays(tokens) else "records_do_not_pay"

    def _pays(self, tokens: int) -> bool:
        """Whether forwards of so many tokens take no longer with records than without. Changes nothing."""
        return True

    def _may_pay(self, seconds_per_row: float | None) -> bool:
        """Whether forwards of any size are looked up, if blocks take so long for a row. Changes nothing."""
        return self.gate.ask(seconds_per_row)

    def _count(
        self, asked: Asked, found: RowPlan, useful: Flags, times: tuple[float, float], counters: Counters
    ) -> None:
        """Time since (the start, the end of the lookup), and what useful records save the batch."""
        start, looked = times
        end = perf_counter()
        saved = int((asked.lengths - found.computed)[useful].sum())
        if not self.gate.always:
            self.gate.record(len(asked.tokens), saved, end - start, asked.seconds_per_row)
        counters.planned(looked - start, end - looked)

    def _tokens(self, given: Mapping[str, Any], spans: Spans, padded: int) -> npt.NDArray[np.int32] | Skip:
        """Ids of all valid tokens, packed; or why they cannot be looked up."""
        positions = given.get("position_ids")
        if positions is not None and not self._relative:
            return "positions_given"
        if positions is not None and not consecutive(positions, spans, padded):
            return "positions_with_gaps"
        found = packed_tokens(given.get("input_ids"), given.get("token_type_ids"), spans.lengths)
        return "no_token_ids" if found is None else found


def plan_of(
    layer: int, spans: Spans, asked: Asked, found: RowPlan, served: Flags,
    admitted: Mapping[int, npt.NDArray[np.int32]] | None = None, beside: Mapping[int, Reused] | None = None,
) -> Plan:  # fmt: skip
    """The plan that serves some sequences from the records found, makes records of others, and tries some beside."""
    seen = Found(found.record, (found.computed / asked.lengths).astype(np.float32))
    predicted = float((1.0 - seen.distances[served]).sum())
    records = np.where(served, found.record, -1)
    share = RowShare.of(asked.lengths, records, found.source, predicted, admitted, beside)
    return Plan(spans=spans, found=seen, layers={layer: share})


def packed_tokens(ids: Any, types: Any, lengths: list[int]) -> npt.NDArray[np.int32] | None:
    """Ids and types ``[B, L]`` of valid tokens as one int32 each, ``[sum n]``; None if there are none to read."""
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or len(ids) != len(lengths):
        return None
    found = ids.numpy().astype(np.int64)
    if types is not None:
        if not isinstance(types, Tensor) or types.shape not in (ids.shape, (1, ids.shape[1])):
            return None
        found = found + TYPES_FROM * types.numpy()
    padded = min(lengths) < found.shape[1]
    return (found[valid_places(lengths, found.shape[1])] if padded else found.ravel()).astype(np.int32)
