"""Plans of rows under a guard: a record serves a sequence only if all that changed between them is known."""

from __future__ import annotations

from collections.abc import Set
from time import perf_counter
from typing import Protocol

import numpy as np

from attmemo.forward.context import Forward
from attmemo.forward.plan import Plan, Reused, RowShare
from attmemo.forward.planning import BY_HAND, Whole
from attmemo.guard.guard import AT_ONCE, Guard
from attmemo.guard.time_account import TimeAccount
from attmemo.guard.verdict import Verdict
from attmemo.kernels.align import Rule, Tokens
from attmemo.kernels.changes import Changes
from attmemo.kernels.kinds import Kinds
from attmemo.kernels.plan import Evidence, RowPlan
from attmemo.models import Call, Spans
from attmemo.rows.index import Candidates, TokenIndex
from attmemo.rows.planner import Asked, Flags, Ints, RowPlanner, plan_of


class Asking:
    """One guarded forward: what was decided in it.

    Parameters
    ----------
    room : int
        Answers of it that may be verified afterwards.

    Attributes
    ----------
    plan : RowPlan or None
        Records of its sequences; None: none was looked up.
    verdicts : list of Verdict or None
        What becomes of each sequence; None: it has no record.
    epoch : int
        Of the guard, when it decided.
    exact, low, changed : set of int
        Sequences that were to be served, and whose answers were computed exactly after all; of these those below the
        margin; and sequences whose answer a record changed.
    """

    def __init__(self, room: int = 0) -> None:
        self.room = room
        self.planned, self.batch = False, 0
        self.tokens = self.sequences = 0  # of the forward
        self.could = 0.0  # share of the rows that records with known changes could save
        self.twice = False  # the model called its blocks twice: it has no one answer for a sequence of the first call
        self.plan: RowPlan | None = None
        self.verdicts: list[Verdict | None] = []
        self.epoch = 0
        self.exact: set[int] = set()
        self.low: set[int] = set()
        self.changed: set[int] = set()

    def where(self, *verdicts: Verdict) -> list[int]:
        """Return the sequences with one of these verdicts."""
        return [sequence for sequence, verdict in enumerate(self.verdicts) if verdict in verdicts]

    @property
    def served(self) -> list[int]:
        """Sequences with answers from records."""
        return self.where(Verdict.SERVE, Verdict.OWE)

    def serve_only(self, sequences: Set[int]) -> None:
        """Note that of the sequences that were to be served only these were; the others were computed exactly."""
        for sequence in self.served:
            if sequence not in sequences:
                self.exact.add(sequence)
                self.verdicts[sequence] = None

    def evidence(self, sequence: int) -> Evidence:
        """Return how well the changes of a sequence are known."""
        return Evidence.NONE if self.plan is None else Evidence(self.plan.evidence[sequence])

    def changes(self, sequence: int) -> Changes:
        """Return what changed between a sequence and its record."""
        assert self.plan is not None
        return self.plan.changes.of(sequence)


class Store(Protocol):
    """Keeps sequences that were computed whole."""

    def admit(self, sequences: int) -> bool:
        """Return whether so many sequences of a batch may become records if they are computed whole."""

    def awaiting(self, tokens: Tokens, starts: Ints) -> Flags:
        """Return of which sequences ``[B]`` a record may be on its way."""


class GuardedPlanner(RowPlanner):
    """Finds records whose changes are known; of the others, those to verify.

    Outside of a guarded forward no sequence is served from a record: an answer that the guard cannot read is computed
    exactly.

    Parameters
    ----------
    guard : Guard
    kinds : uint8 [V]
        Kinds of token ids, as in `attmemo.kernels.changes.changes`.
    rounds : bool
        Whether last hidden states of records are stored in fewer bits than the model computes with.
    store : Store or None
        Keeps sequences that are computed whole; None: none is kept.

    The other parameters are those of `RowPlanner`.
    """

    grows = True

    def __init__(
        self, index: TokenIndex, threshold: float, rule: Rule, *, relative: bool, gated: bool = True, guard: Guard,
        kinds: Kinds, store: Store | None, rounds: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(index, threshold, rule, relative=relative, gated=gated)
        self.guard, self.kinds, self._rounds, self._store = guard, kinds, rounds, store
        self.times = TimeAccount(always=not gated)

    def plan(self, layer: int, call: Call, spans: Spans, forward: Forward) -> Plan:
        asking: Asking | None = forward.asking
        given, counters, batch = forward.given, forward.counters, len(spans.lengths)
        if given is None:
            return BY_HAND
        if forward.left:
            return Whole.plan(self, layer, call, spans, forward)
        if asking is not None:
            asking.tokens, asking.sequences = sum(spans.lengths), batch
        if forward.whole:
            counters.skip("asked_without_reuse", batch)
            return Whole.plan(self, layer, call, spans, forward)
        if asking is not None and asking.planned:
            asking.twice = True
        if asking is None or asking.twice:
            counters.skip("not_through_the_model", batch)
            return Whole.plan(self, layer, call, spans, forward)
        asking.planned, asking.batch = True, batch
        if forward.repeats:
            if forward.last is not None:
                return Plan(spans=spans, layers={layer: RowShare.computed(forward.last)})
            return Whole.plan(self, layer, call, spans, forward)
        start = perf_counter()
        asked = self._ask(given, spans, int(call.hidden.shape[1]), counters)
        if asked is None:
            return Whole.plan(self, layer, call, spans, forward)
        candidates = self._candidates(asked)
        looked = perf_counter()
        asking.plan = found = self.planned(asked, candidates)
        asking.epoch, evidence = self.guard.epoch, found.evidence
        most = batch if self.times.always else AT_ONCE if self.times.learns else 0
        asking.verdicts = verdicts = self.guard.decide(evidence.tolist(), firsts_of(asked), asking.room, most)
        known = evidence >= Evidence.FREELY
        asking.could = float((asked.lengths - found.computed)[known].sum() / asked.lengths.sum())
        self._count(asked, found, evidence >= Evidence.UNKNOWN, (start, looked), counters)
        served = np.array([verdict in (Verdict.SERVE, Verdict.OWE) for verdict in verdicts])
        whole = np.flatnonzero(~served & (evidence != Evidence.ROUNDED)).tolist()
        tokens, starts = asked.tokens, asked.starts.tolist()
        admitted = {place: tokens[starts[place] : starts[place + 1]] for place in whole}
        beside = {
            place: Reused(int(found.record[place]), found.source[starts[place] : starts[place + 1]])
            for place in asking.where(Verdict.SAMPLE, Verdict.LEARN)
        }
        admits = whole and self._store is not None and self._store.admit(len(whole))
        return plan_of(layer, spans, asked, found, served, admitted if admits else {}, beside)

    def _pays(self, tokens: int) -> bool:
        return self.times.ask(tokens)

    def _may_pay(self, seconds_per_row: float | None) -> bool:
        return super()._may_pay(seconds_per_row) and not self.times.rests

    def took(self, asking: Asking, seconds: float) -> None:
        """Note that a forward took so long, with all that the guard did about it."""
        verified = len(asking.where(Verdict.SAMPLE, Verdict.LEARN))
        self.times.record(asking.tokens, asking.sequences, seconds, asking.plan is not None, verified, asking.could)

    def begin_anew(self, guard: Guard) -> None:
        """Ask this guard from now on, and time forwards anew."""
        self.guard = guard
        self.times = TimeAccount(self.times.always)

    def _needs(self, asked: Asked) -> Ints:
        found = self.planned(asked, self._candidates(asked))
        least = Evidence.FREELY if self.guard.certificate.affords() else Evidence.SAME
        return np.where(found.evidence >= least, found.computed, asked.lengths)

    def _candidates(self, asked: Asked) -> Candidates:
        """Return records near the inputs; none for inputs whose own record is on its way.

        These are computed whole, whatever is near: they get the same bits each time.
        """
        waits = None if self._store is None else self._store.awaiting(asked.tokens, asked.starts)
        found = self.index.candidates(asked.tokens, asked.starts)  # behind: what waited may be there now
        if waits is None or not waits.any():
            return found
        return found.without(waits & (found.rows[:, 0] < 0))

    def planned(self, asked: Asked, candidates: Candidates) -> RowPlan:
        guard = self.guard
        demand = guard.demand(self.threshold, self._rounds)
        return self.index.plan(
            asked.tokens, asked.starts, candidates, self.rule, self.kinds, demand, guard.verified.table
        )


def firsts_of(asked: Asked) -> list[int]:
    """Return for each sequence of a batch the first one with the same tokens: often itself."""
    tokens, starts, first = asked.tokens, asked.starts.tolist(), dict[bytes, int]()
    return [
        first.setdefault(tokens[starts[place] : starts[place + 1]].tobytes(), place)
        for place in range(len(starts) - 1)
    ]  # fmt: skip
