"""What reuse of rows would leave to compute, played on token ids alone: no model is asked.

The stream begins with nothing stored. What is computed becomes a record at once, without a bound of bytes. The guard
is the library's own. It is told that no answer changes: so its price is the least that it can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import numpy.typing as npt

from attmemo.guard.guard import Guard
from attmemo.guard.verdict import Verdict
from attmemo.kernels.align import Rule, with_long
from attmemo.kernels.kinds import NO_KINDS, Kinds
from attmemo.kernels.plan import Demand
from attmemo.profiler.models import Tokens
from attmemo.rows.index import TokenIndex

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Played:
    """A stream of texts, in order; arrays have a number for each text."""

    lengths: Ints
    rows: Ints  # computed for the answer
    verified: Ints  # computed once more to verify the guard: from a record, or whole
    records: int  # records, tokens: that are stored at the end
    tokens: int
    known: npt.NDArray[np.bool_]  # whether the very tokens came before
    seconds: float  # of lookups and plans, a text

    def share(self, part: slice = slice(None)) -> float:
        """Share of the rows of these texts that is computed, verifications included."""
        return float((self.rows[part].sum() + self.verified[part].sum()) / self.lengths[part].sum())


def play_tokens(
    texts: Sequence[Tokens], batch: int, threshold: float, rule: Rule, guard: Guard | None, kinds: Kinds
) -> Played:
    """Play a stream in batches; texts of one batch do not serve each other. Without a guard every record serves."""
    index, seen, spent = TokenIndex(), set[bytes](), 0.0
    lengths = np.array([len(text) for text in texts], np.int64)
    rows, verified, known = lengths.copy(), np.zeros_like(lengths), np.zeros(len(texts), np.bool_)
    stored = 0
    for start in range(0, len(texts), batch):
        own = [np.array(text.ids, np.int32) for text in texts[start : start + batch]]
        begun = perf_counter()
        places, verdicts, computed = _plan(index, own, threshold, rule, guard, kinds)
        spent += perf_counter() - begun
        for place, tokens in enumerate(own):
            known[start + place] = tokens.tobytes() in seen
            verdict = verdicts[place]
            if verdict is not None and verdict.serves:
                rows[start + place] = computed[place]
                verified[start + place] = len(tokens) if verdict is Verdict.OWE else 0
            elif verdict in (Verdict.SAMPLE, Verdict.LEARN):
                verified[start + place] = computed[place]
        seen.update(tokens.tobytes() for tokens in own)
        new = {own[place].tobytes(): own[place] for place in places}
        for tokens in new.values():
            index.add(tokens)
            stored += len(tokens)
    return Played(lengths, rows, verified, len(index), stored, known, spent / max(len(texts), 1))


def _plan(
    index: TokenIndex, own: Sequence[npt.NDArray[np.int32]], threshold: float, rule: Rule, guard: Guard | None,
    kinds: Kinds,
) -> tuple[list[int], list[Verdict | None], Ints]:  # fmt: skip
    """For one batch: places of what becomes a record, what becomes of each text, and rows that its record leaves.

    The one place of a simulation that finds records and asks the guard, as the library's planner does.
    """
    tokens, lengths = np.concatenate(own), np.array([len(one) for one in own], np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    near = index.candidates(tokens, starts)
    if guard is None:
        found = index.plan(tokens, starts, near, rule, NO_KINDS, Demand(share=threshold))
        found = with_long(found, starts) if rule.before_long else found
        verdicts: list[Verdict | None] = [Verdict.SERVE if record >= 0 else None for record in found.record]
    else:
        found = index.plan(tokens, starts, near, rule, kinds, guard.demand(threshold), guard.verified.table)
        evidence = found.evidence.tolist()
        verdicts = guard.decide(evidence, room=len(own))
        for place, verdict in enumerate(verdicts):
            if verdict in (Verdict.OWE, Verdict.SAMPLE, Verdict.LEARN):
                guard.compared(verdict, found.changes.of(place), evidence[place], None, False)
    whole = [place for place, verdict in enumerate(verdicts) if verdict is None or not verdict.serves]
    exact = found.computed == 0  # the very tokens are stored
    return [place for place in whole if not exact[place]], verdicts, found.computed
