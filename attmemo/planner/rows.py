"""Plans of rows: records that share tokens with a sequence, and which of its rows they supply."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attmemo.adapters import Call, Rows, Spans
from attmemo.adapters.masks import consecutive, valid_places
from attmemo.counters import Counters
from attmemo.embed.lookup import Found
from attmemo.embed.tokens import TokenIndex
from attmemo.kernels.align import Rule
from attmemo.perfmodel.row_gate import RowGate
from attmemo.plan import Plan, RowShare
from attmemo.planner.base import BY_HAND, Given, Whole

THRESHOLD: Final = 0.5
"""Share of its tokens that a record must supply by default."""
TYPES_FROM: Final = 1 << 24
"""Token types are kept above the ids."""


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

    def __init__(self, index: TokenIndex, threshold: float, rule: Rule, *, relative: bool, gated: bool = True) -> None:
        self.index, self.threshold, self.rule = index, threshold, rule
        self.gate = RowGate(always=not gated)
        self._relative = relative

    def plan(self, layer: int, call: Call, spans: Spans, given: Given | None, counters: Counters) -> Plan:
        if given is None:
            return BY_HAND
        start = perf_counter()
        whole = super().plan(layer, call, spans, given, counters)
        batch = len(spans.lengths)
        tokens = self._tokens(given.arguments, spans, int(call.hidden.shape[1]))
        done = counters.done
        seconds_per_row = done.blocks_seconds / done.rows if done.rows else None
        if isinstance(tokens, str):
            counters.skip(tokens, batch)
            return whole
        if not len(self.index):
            counters.skip("there is no record yet", batch)
            return whole
        if not self.gate.ask(seconds_per_row):
            self.gate.leave()
            counters.skip("a lookup does not pay", batch)
            return whole
        lengths = np.asarray(spans.lengths, np.int64)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        candidates = self.index.candidates(tokens, starts)
        looked = perf_counter()
        found = self.index.align(tokens, starts, candidates, self.rule)
        served = (found.record >= 0) & (lengths - found.computed >= self.threshold * lengths)
        served &= found.computed < lengths
        sequences = np.flatnonzero(served)
        saved = int((lengths - found.computed)[sequences].sum())
        end = perf_counter()
        self.gate.record(len(tokens), saved, end - start, seconds_per_row)
        counters.planned(looked - start, end - looked)
        seen = Found(found.record, (found.computed / lengths).astype(np.float32))
        if not len(sequences):
            return Plan(spans=spans, found=seen, layers=whole.layers)
        source = np.where(np.repeat(served, lengths), found.source, np.int32(-1)).astype(np.int32)
        record = np.where(served, found.record, -1)
        predicted = float((1.0 - seen.distances[sequences]).sum())
        missed = Rows.without(batch, sequences)
        share = RowShare(sequences, record[sequences], missed, predicted, source, record)
        return Plan(spans=spans, found=seen, layers={layer: share})

    def _tokens(self, given: Mapping[str, Any], spans: Spans, padded: int) -> npt.NDArray[np.int32] | str:
        """Ids of all valid tokens, packed; or why they cannot be looked up."""
        if not self._relative and given.get("position_ids") is not None:
            return "positions given by the caller"
        if not consecutive(given.get("position_ids"), spans, padded):
            return "positions are not consecutive"
        found = packed_tokens(given.get("input_ids"), given.get("token_type_ids"), spans.lengths)
        return "no token ids are given" if found is None else found


def packed_tokens(ids: Any, types: Any, lengths: list[int]) -> npt.NDArray[np.int32] | None:
    """Ids and types ``[B, L]`` of valid tokens as one int32 each, ``[sum n]``; None if there are none to read."""
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        return None
    found = ids.numpy().astype(np.int64)
    if types is not None:
        if not isinstance(types, Tensor) or types.shape not in (ids.shape, (1, ids.shape[1])):
            return None
        found = found + TYPES_FROM * types.numpy()
    return found[valid_places(lengths, found.shape[1])].astype(np.int32)
