"""Plans of rows under a guard: a record serves a sequence only if all that changed between them is verified."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Final, Protocol

import numpy as np
from torch import Tensor

from attmemo.adapters import Call, Spans
from attmemo.counters import Counters
from attmemo.embed.tokens import Candidates, TokenIndex
from attmemo.guard import Cover, Guard, Verdict
from attmemo.kernels.align import Alignment, Rule, widened
from attmemo.kernels.changes import Changes, Tokens
from attmemo.kernels.kinds import Kinds
from attmemo.perfmodel.forward_times import ForwardTimes
from attmemo.plan import Plan, Reused, RowShare
from attmemo.planner.base import BY_HAND, Given, Whole
from attmemo.planner.rows import ASKED_WHOLE, Asked, Flags, Ints, RowPlanner, plan_of

TRIED: Final = 4
"""Records of a sequence that are asked for, the one with the fewest rows to compute first, until all that changed is
verified. Of the log lines of docs/guard.md 4 serve as many as 16 do, and 1 serves .02 of the lines less."""

MORE_NEAR: Final = 2
"""So many more neighbours of a token without a partner are computed, where a class is unsure."""
MORE_NEAR_OF_VECTORS: Final = 3
"""The same of vectors. With 2 more, twice as many of these answers were changed (docs/guard.md)."""
MOST_ROWS: Final = 0.9
"""Most of the rows that are computed so: beyond, the sequence is computed whole."""

_UNGUARDED = "not called through the model whose answers are guarded"


@dataclass(frozen=True, slots=True)
class Chosen:
    """One sequence with a record."""

    verdict: Verdict
    reused: Reused
    gaps: Changes
    cover: Cover
    epoch: int  # of the guard, when it decided

    def wider(self, near: int) -> Chosen | None:
        """The same with more rows computed; None: there are none, or nearly all would be."""
        source = wider_or_none(self.reused.source, near)
        if source is None:
            return None
        return replace(self, reused=Reused(self.reused.record, source), cover=Cover.UNSURE)


class Asking:
    """One guarded forward: what was decided in it.

    Parameters
    ----------
    again : bool
        Whether it repeats a part of another forward: nothing is looked up.
    last : Tensor, optional
        Last hidden states ``[B, L, H]`` that its blocks give. None: all is computed.
    reused : sequence of Reused, optional
        Which record serves each of its sequences. None: none does.
    room : int
        Answers of it that may be verified afterwards.
    """

    def __init__(
        self, *, again: bool = False, last: Tensor | None = None, reused: Sequence[Reused] | None = None, room: int = 0
    ) -> None:
        self.again, self.last, self.reused, self.room = again, last, reused, room
        self.planned, self.batch = False, 0
        self.tokens = self.sequences = 0  # of the forward
        self.looked = False  # whether records were looked up
        self.twice = False  # the model called its blocks twice: it has no one answer for a sequence of the first call
        self.chosen: dict[int, Chosen] = {}  # by sequence
        self.decided: dict[int, Chosen] = {}  # those that were to be served
        self.exact: set[int] = set()  # of these, those whose answers were computed exactly after all
        self.low: set[int] = set()  # the same, of those below the margin
        self.changed: set[int] = set()  # sequences whose answer a record changed

    def where(self, *verdicts: Verdict) -> list[int]:
        """Sequences with one of these verdicts."""
        return [sequence for sequence, chosen in self.chosen.items() if chosen.verdict in verdicts]

    @property
    def served(self) -> list[int]:
        """Sequences with answers from records."""
        return [sequence for sequence, chosen in self.chosen.items() if chosen.verdict.serves]

    def serve_only(self, sequences: Set[int]) -> None:
        """Of the sequences that were to be served, forget all but these: the others were computed exactly."""
        self.exact |= set(self.served) - sequences
        self.chosen = {
            sequence: chosen for sequence, chosen in self.chosen.items()
            if not chosen.verdict.serves or sequence in sequences
        }  # fmt: skip


class Sureness(Protocol):
    """Knows how sure answers of records are."""

    def of_record(self, record: int) -> float | None:
        """How far the best class of a record's own answer is ahead of the second best; None: not known."""


class Store(Protocol):
    """Keeps sequences that were computed whole."""

    def admit(self, sequences: int) -> bool:
        """Whether so many sequences of a batch may become records if they are computed whole."""

    def awaits(self, tokens: Tokens) -> bool:
        """Whether a record of just these tokens may be on its way."""


class _Thread(threading.local):
    asking: Asking | None = None


class GuardedPlanner(RowPlanner):
    """Finds records whose changes are verified; of the others, those to verify.

    Outside of `asking` no sequence is served from a record: an answer that the guard cannot read is computed exactly.

    Parameters
    ----------
    guard : Guard
    kinds : uint8 [V]
        Kinds of token ids, as in `attmemo.kernels.changes.changes`.
    rounds : bool
        Whether last hidden states of records are stored in fewer bits than the model computes with.
    store : Store or None
        Keeps sequences that are computed whole; None: none is kept.
    sureness : Sureness
        Knows how sure the own answers of records are.

    The other parameters are those of `RowPlanner`.
    """

    grows = True

    def __init__(
        self, index: TokenIndex, threshold: float, rule: Rule, *, relative: bool, gated: bool = True, guard: Guard,
        kinds: Kinds, store: Store | None, sureness: Sureness, rounds: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(index, threshold, rule, relative=relative, gated=gated)
        self.guard, self.kinds, self._rounds, self._store = guard, kinds, rounds, store
        self.times, self._epoch = ForwardTimes(always=not gated), guard.epoch
        self._sureness = sureness
        self._thread = _Thread()

    @contextmanager
    def asking(
        self, *, again: bool = False, last: Tensor | None = None, reused: Sequence[Reused] | None = None, room: int = 0
    ) -> Iterator[Asking]:
        """While inside, this thread's forwards are guarded. The parameters are those of `Asking`."""
        self._thread.asking = asking = Asking(again=again, last=last, reused=reused, room=room)
        try:
            yield asking
        finally:
            self._thread.asking = None

    def plan(self, layer: int, call: Call, spans: Spans, given: Given | None, counters: Counters) -> Plan:
        asking, batch = self._thread.asking, len(spans.lengths)
        if given is None:
            return BY_HAND
        if asking is not None:
            asking.tokens, asking.sequences = sum(spans.lengths), batch
        if self._wishes.whole:
            counters.skip(ASKED_WHOLE, batch)
            return Whole.plan(self, layer, call, spans, given, counters)
        if asking is not None and asking.planned:
            asking.twice = True
        if asking is None or asking.twice:
            counters.skip(_UNGUARDED, batch)
            return Whole.plan(self, layer, call, spans, given, counters)
        asking.planned, asking.batch = True, batch
        if asking.again:
            return self._again(layer, call, spans, given, counters, asking)
        start = perf_counter()
        asked = self._ask(given, spans, int(call.hidden.shape[1]), counters)
        asking.looked = asked is not None
        if asked is None:
            return Whole.plan(self, layer, call, spans, given, counters)
        candidates, stored = self._candidates(asked)
        looked = perf_counter()
        found, gaps, covers = self._find(asked, candidates)
        own = np.split(asked.tokens, asked.starts[1:-1])
        epoch = self.guard.epoch
        verdicts = self._decide(own, covers, asking.room)
        self._note_rows(asked, found, covers)
        parts = np.split(found.source, asked.starts[1:-1])
        asking.chosen = {
            number: Chosen(verdict, Reused(int(found.record[number]), parts[number]), gap, cover, epoch)
            for number, (verdict, gap, cover) in enumerate(zip(verdicts, gaps, covers, strict=True))
            if verdict is not None and gap is not None and cover is not None
        }
        asking.decided = {number: chosen for number, chosen in asking.chosen.items() if chosen.verdict.serves}
        served = np.array([verdict is not None and verdict.serves for verdict in verdicts])
        whole = np.flatnonzero(~served & ~stored).tolist()
        admits = whole and self._store is not None and self._store.admit(len(whole))
        admitted = {number: own[number] for number in whole} if admits else {}
        # The gate looks at records, not at trust.
        could = np.array([cover is not None and cover is not Cover.FUTILE for cover in covers])
        self._count(asked, found, could, (start, looked), counters)
        verified = asking.where(Verdict.SAMPLE, Verdict.LEARN)
        beside = {number: asking.chosen[number].reused for number in verified}
        return plan_of(layer, spans, asked, found, served, admitted, beside)

    def _again(
        self, layer: int, call: Call, spans: Spans, given: Given, counters: Counters, asking: Asking
    ) -> Plan:
        """The plan of a forward that repeats a part of another one."""
        if asking.last is not None:
            return Plan(spans=spans, layers={layer: RowShare.computed(asking.last)})
        if asking.reused is None:
            return Whole.plan(self, layer, call, spans, given, counters)
        records = np.array([one.record for one in asking.reused], np.int64)
        source = np.concatenate([one.source for one in asking.reused])
        return Plan(spans=spans, layers={layer: RowShare.of(np.asarray(spans.lengths), records, source)})

    @property
    def more_near(self) -> int:
        """So many more neighbours of a token without a partner are computed, where an answer is unsure."""
        return MORE_NEAR_OF_VECTORS if self.guard.compares_vectors else MORE_NEAR

    def wider(self, chosen: Chosen) -> Chosen | None:
        """A sequence with more rows computed; None: it is not to be served so."""
        own = self._sureness.of_record(chosen.reused.record)
        may = self.guard.may_widen(chosen.gaps, own, chosen.cover)
        return chosen.wider(self.rule.near + self.more_near) if may else None

    def _decide(self, tokens: Sequence[Tokens], covers: Sequence[Cover | None], room: int) -> list[Verdict | None]:
        """What becomes of each sequence. Equal ones get one answer, and one of them at most is verified."""
        first: dict[bytes, int] = {}
        firsts = [first.setdefault(one.tobytes(), place) for place, one in enumerate(tokens)]
        times = Counter(firsts)
        decided = self.guard.decide([covers[place] for place in times], room, list(times.values()))
        verdicts: list[Verdict | None] = [None] * len(tokens)
        for place, verdict in zip(times, decided, strict=True):
            verdicts[place] = verdict
        for place, other in enumerate(firsts):
            verdict = verdicts[other]
            if other != place and verdict is not None and verdict.serves:
                verdicts[place] = Verdict.SERVE
        return verdicts

    def _note_rows(self, asked: Asked, found: Alignment, covers: Sequence[Cover | None]) -> None:
        """Tell the guard what this batch takes if all is served that may be, and what could be drawn of it."""
        may = np.array([cover is not None and cover.may_serve for cover in covers])
        same = np.array([cover is Cover.SAME for cover in covers])
        rows = np.where(may, found.computed, asked.lengths)
        self.guard.note_rows(int(rows.sum()), int(asked.lengths[may & ~same].sum()), int(asked.lengths.sum()))

    @property
    def asked_whole(self) -> bool:
        """Whether this thread's forwards are to be served from no record."""
        return self._wishes.whole

    def _pays(self, tokens: int) -> bool:
        return self.times.ask(tokens, learns=self.guard.learns)

    def _may_pay(self, seconds_per_row: float | None) -> bool:
        return super()._may_pay(seconds_per_row) and not self.times.ended

    def took(self, asking: Asking, seconds: float) -> None:
        """A forward took so long, with all that the guard did about it."""
        if self.guard.epoch != self._epoch:
            self._epoch = self.guard.epoch
            self.times.invest()
        self.times.record(asking.tokens, asking.sequences, seconds, asking.looked, learns=self.guard.learns)

    def begin_anew(self, guard: Guard) -> None:
        """Ask this guard from now on, and time forwards anew."""
        self.guard, self._epoch = guard, guard.epoch
        self.times = ForwardTimes(self.times.always)

    def _needs(self, asked: Asked) -> Ints:
        found, _, covers = self._find(asked, self._candidates(asked)[0])
        served = np.array([cover is not None and self.guard.serves(cover) for cover in covers])
        return np.where(served, found.computed, asked.lengths)

    def _candidates(self, asked: Asked) -> tuple[Candidates, Flags]:
        """Records near the inputs, and which inputs have one of their own.

        Some inputs get no record: they are computed whole, and have the same bits each time. Their own record is
        stored in fewer bits than the model computes with, or it is on its way.
        """
        parts, store = np.split(asked.tokens, asked.starts[1:-1]), self._store
        waits = np.array([store is not None and store.awaits(one) for one in parts])
        found = self.index.candidates(asked.tokens, asked.starts)  # behind: what waited may be there now
        stored = found.same >= 0
        exact = np.where(stored, self._rounds, waits)
        return (found.without(exact) if exact.any() else found), stored

    def _find(
        self, asked: Asked, candidates: Candidates
    ) -> tuple[Alignment, list[Changes | None], list[Cover | None]]:
        """The best verified record of each sequence, or else the best; what changed; and how well this is verified.

        None: no record supplies enough.
        """
        best: Alignment | None = None
        gaps: list[Changes | None] = [None] * len(asked.lengths)
        covers: list[Cover | None] = [None] * len(asked.lengths)
        rows = candidates.rows
        for _ in range(TRIED):
            found = self.index.align(
                asked.tokens, asked.starts, replace(candidates, rows=rows), self.rule, self.kinds
            )
            best = best or found
            enough = self._suffices(found, asked.lengths)
            if not enough.any():
                break
            records = np.where(enough, found.record, -1)
            changes, there = self.index.changes(
                asked.tokens, asked.starts, candidates, records, self.rule, self.kinds
            )  # fmt: skip
            for number in np.flatnonzero(enough & there).tolist():
                own = changes.of(number)
                record, former = int(found.record[number]), covers[number]
                cover = self.guard.ask(own, self._sureness.of_record(record)) if len(own) else Cover.SAME
                part = slice(int(asked.starts[number]), int(asked.starts[number + 1]))
                source: Tokens | None = found.source[part]
                if cover is Cover.UNSURE:
                    source = wider_or_none(found.source[part], self.rule.near + self.more_near)
                    cover = Cover.FUTILE if source is None else cover
                if former is None or (cover.may_serve and cover > former):
                    covers[number], gaps[number], best.record[number] = cover, own, record
                    best.source[part] = found.source[part] if source is None else source
                    best.computed[number] = np.count_nonzero(best.source[part] < 0)
            # Another record may be surer.
            left = enough & np.array([cover is None or cover <= Cover.UNSURE for cover in covers])
            if not left.any():
                break
            tried = candidates.shelf.rows_of(found.record)
            rows = np.where(left[:, None] & (rows != tried[:, None]), rows, -1)
        assert best is not None
        return best, gaps, covers


def wider_or_none(source: Tokens, near: int) -> Tokens | None:
    """`source` with so many neighbours of each token without a partner computed.

    None: no more rows are computed than before (tokens were only removed), or nearly all would be.
    """
    found = widened(source, near)
    computed = np.count_nonzero(found < 0)
    return found if np.count_nonzero(source < 0) < computed <= MOST_ROWS * len(found) else None
