"""What reuse of rows would leave to compute, played on token ids alone: no model is asked.

The stream begins with nothing stored. What is computed becomes a record at once, without a bound of bytes. Planner and
guard are the library's own. The guard is told that no answer changes: so its price is the least that it can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import numpy.typing as npt

from attmemo.guard.guard import Guard
from attmemo.guard.planner import GuardedPlanner, firsts_of
from attmemo.guard.verdict import Verdict
from attmemo.kernels.align import Rule
from attmemo.kernels.kinds import Kinds
from attmemo.profiler.models import Tokens
from attmemo.rows.index import TokenIndex
from attmemo.rows.planner import Asked, RowPlanner

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
    index, seen, spent, stored = TokenIndex(), set[bytes](), 0.0, 0
    planner = RowPlanner(index, threshold, rule, relative=True)
    if guard is not None:
        planner = GuardedPlanner(index, threshold, rule, relative=True, guard=guard, kinds=kinds, store=None)
    lengths = np.array([len(text) for text in texts], np.int64)
    rows, verified, known = lengths.copy(), np.zeros_like(lengths), np.zeros(len(texts), np.bool_)
    for start in range(0, len(texts), batch):
        own = [np.array(text.ids, np.int32) for text in texts[start : start + batch]]
        begun = perf_counter()
        asked = Asked.of(np.concatenate(own), lengths[start : start + batch])
        found = planner.planned(asked, index.candidates(asked.tokens, asked.starts))
        if guard is None:
            verdicts: list[Verdict | None] = [Verdict.SERVE if record >= 0 else None for record in found.record]
        else:
            evidence = found.evidence.tolist()
            verdicts = guard.decide(evidence, firsts_of(asked), room=len(own))
            for place, verdict in enumerate(verdicts):
                if verdict in (Verdict.OWE, Verdict.SAMPLE, Verdict.LEARN):
                    guard.compared(verdict, found.changes.of(place), evidence[place], None, False)
        spent += perf_counter() - begun
        new = dict[bytes, npt.NDArray[np.int32]]()
        for place, (tokens, verdict) in enumerate(zip(own, verdicts, strict=True), start):
            computed, name = found.computed[place - start], tokens.tobytes()
            known[place] = name in seen
            if verdict is not None and verdict.serves:
                rows[place], verified[place] = computed, len(tokens) if verdict is Verdict.OWE else 0
                continue
            if verdict in (Verdict.SAMPLE, Verdict.LEARN):
                verified[place] = computed
            if computed:  # else the very tokens are stored
                new[name] = tokens
        seen.update(tokens.tobytes() for tokens in own)
        for tokens in new.values():
            index.add(tokens)
            stored += len(tokens)
    return Played(lengths, rows, verified, len(index), stored, known, spent / max(len(texts), 1))
