"""Plans of rows under a guard: a record serves a sequence only if all that changed between them is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attmemo.forward.batch_slices import ids_in
from attmemo.forward.context import Forward, Given
from attmemo.forward.plan import Plan, Reused, RowShare
from attmemo.forward.planning import BY_HAND, Whole
from attmemo.forward.stats import Skip
from attmemo.guard.asking import Asking
from attmemo.guard.deferred import Deferred
from attmemo.guard.guard import ALL, Guard
from attmemo.guard.idle import Idle
from attmemo.guard.prospect import Prospect
from attmemo.guard.repeats import Repeats
from attmemo.guard.time_account import TimeAccount
from attmemo.guard.verdict import Verdict
from attmemo.kernels.align import Rule, Tokens
from attmemo.kernels.changes import LONG_TEXT
from attmemo.kernels.kinds import Kinds
from attmemo.kernels.plan import Evidence, RowPlan
from attmemo.models import Call, Spans
from attmemo.rows.index import Candidates, TokenIndex
from attmemo.rows.live_store import GrowingRows
from attmemo.rows.planner import Asked, Flags, Ints, RowPlanner, plan_of

REMEMBERED: Final = 1 << 14
"""Inputs that count once, if they are tried while no request runs."""
NEW: Final = 16
"""Sequences of a forward that may become records, beside requests: about as many as are stored until the next one."""
WAITS: Final = 0.004
"""Seconds: while it takes longer to store what was offered, no sequence becomes a record."""
UNKNOWN: Final = 2
"""Sequences of a forward with unknown changes that may become records."""
SEEN: Final = 16
"""First forwards that are all compared with those before, to see how much is asked again; later one of `LOOKS`."""
LOOKS: Final = 2
AGAIN: Final = 0.15
"""Share of what is asked that was asked before from which on it is seen what records could supply."""
GROWN: Final = 0.25
"""A long text becomes a record once it is longer than its record by more than this share of that."""
KNOWN: Final = 0.3
"""Share of an input that was asked before from which on it becomes a record where each new record costs an old one."""
AROUND: Final = 0.15
"""Requests without reuse that a verification costs, about, beside the rows that it computes."""
FALLS: Final = 0.7
"""Where the bound of changed answers has fallen to so much of what it was, it is tried anew what records save."""
MOSTLY: Final = 2.0
"""The same while there is no certificate, for what was learned in pauses: where so many times the budget may change,
half of the answers are served."""


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
    store : GrowingRows or None
        Keeps sequences that are computed whole; None: none is kept.

    The other parameters are those of `RowPlanner`.
    """

    grows = True

    def __init__(
        self, index: TokenIndex, threshold: float, rule: Rule, *, relative: bool, gated: bool = True, guard: Guard,
        kinds: Kinds, store: GrowingRows | None, rounds: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(index, threshold, rule, relative=relative, gated=False)  # the account says what pays
        self.guard, self.kinds, self._rounds, self._store = guard, kinds, rounds, store
        self._tried_before: set[int] = set()  # hashes of inputs whose records were tried while no request ran
        self.times = TimeAccount(always=not gated)
        self.repeats, self.prospect, self._forwards = Repeats(), Prospect(self._supplied), 0
        self._tried_at = 1.0  # the bound of changed answers, when it was tried last what records save
        if store is not None:
            store.pay_from(self.times)

    def plan(self, layer: int, call: Call, spans: Spans, forward: Forward) -> Plan:
        asking: Asking | None = forward.asking
        given, counters, batch = forward.given, forward.counters, len(spans.lengths)
        if given is None:
            return BY_HAND
        if forward.left:
            if isinstance(forward.left, str):
                counters.skip(forward.left, batch)
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
            if asking.tries:
                return self._tried(layer, call, spans, forward, given, asking)
            if asking.keeps:
                return self._kept(layer, spans, asking.keeps)
            return Whole.plan(self, layer, call, spans, forward)
        start = perf_counter()
        asked = self._ask(given, spans, call.shape[1], counters, asking.pays)
        if asked is None:
            return Whole.plan(self, layer, call, spans, forward)
        found, looked = self._look_up(asked, asking)
        evidence, firsts = found.evidence, firsts_of(asked)
        grown = self._grown(asked, found, firsts, asking.worth) if asked.lengths.max() >= LONG_TEXT else []
        if not self.times.always:
            self._expect(asked, found)
        at_once = self.learns_at_once(asking)
        most = self._most(asked, found) if at_once else 0
        keeps = self._keeps(most) if most else 0
        now = self._record_now(asked, grown[:keeps]) if grown else []
        if now:  # computed whole, as if there were nothing alike
            evidence = evidence.copy()
            evidence[now] = Evidence.NONE
        left = most if self.times.always else most - len(now)
        asking.note(self.guard.decide(evidence.tolist(), firsts, asking.room, left))
        if grown and not at_once:
            asking.grown = _rows_of(asked, grown)
        self._count(asked, found, evidence >= Evidence.UNKNOWN, (start, looked), counters)
        served = np.zeros(len(evidence), np.bool_)
        served[asking.served] = True
        beside = {place: asking.reused(place) for place in asking.tried} if asking.tried else {}
        admitted: dict[int, Tokens] = {}
        if keeps and self._store is not None and not served.all():
            places = self._new(evidence, served, beside)
            places = places if asking.worth is None else places[asking.worth[places]]
            if grown:  # those of now come first
                first = [place for place in grown if not served[place]]
                places = np.array([*first, *(place for place in places.tolist() if place not in first)], np.int64)
            places = places[:keeps]
            admitted = _rows_of(asked, places[: self._store.admit(asked.lengths[places])].tolist())
        return plan_of(layer, spans, asked, found, served, admitted, beside)

    def _keeps(self, most: int) -> int:
        """Return how many sequences of a request may become records, where so many may be learned from."""
        if self._store is None or self.times.always:
            return most
        return min(most, NEW) if self._store.waits() <= WAITS else 0

    def _new(self, evidence: npt.NDArray[Any], served: Flags, tried: Mapping[int, Reused]) -> Ints:
        """Return the sequences of a batch that are worth a record, those with nothing alike in the store first.

        What a record may serve makes no other one, where that is to pay: a third of the records then saves more in the
        first thousand requests. Of those with unknown changes a few do: if the changes are harmful, they stay unknown.
        """
        order: Ints = np.argsort(evidence, kind="stable")
        if self.times.always:
            order = order[~served[order] & (evidence[order] != Evidence.ROUNDED)]
            return order
        kinds = [order[evidence[order] == kind] for kind in (Evidence.NONE, Evidence.UNKNOWN, Evidence.UNSURE)]
        kinds[1] = np.array([place for place in kinds[1].tolist() if place not in tried][:UNKNOWN], np.int64)
        return np.concatenate(kinds)

    def _grown(self, asked: Asked, found: RowPlan, firsts: Sequence[int], worth: Flags | None) -> list[int]:
        """Return the inputs that are to become records, although others may serve them: long texts that go on.

        What is asked next has grown from these inputs, not from their records. A window that moves over lines has not
        grown: the next window shares no more with this one than this one with its record.
        """
        known = (found.evidence >= Evidence.FREELY) & (found.evidence < Evidence.SAME) & (asked.lengths >= LONG_TEXT)
        if self._store is None or not known.any():
            return []
        before = self.index.lengths_of(found.record)
        known &= (before > 0) & ((1.0 + GROWN) * before < asked.lengths) & self._store.fits(asked.lengths)
        known &= np.asarray(firsts) == np.arange(len(known))
        return np.flatnonzero(known if worth is None else known & worth).tolist()

    def lacking(self, grown: Mapping[int, Tokens], places: Sequence[int]) -> dict[int, Tokens]:
        """Return grown inputs at these places that have no record of their own by now, by number in `places`."""
        return {number: grown[place] for number, place in enumerate(places)
                if place in grown and self.index.same(grown[place]) < 0}  # fmt: skip

    def _record_now(self, asked: Asked, grown: list[int]) -> list[int]:
        """Return which grown inputs are computed whole, to become records in this request."""
        if self._store is None or not self.guard.affords():
            return []
        return grown[: self._store.admit(asked.lengths[grown])]

    def _expect(self, asked: Asked, found: RowPlan) -> None:
        """Note how much could be reused."""
        known = self._saved(asked, found, Evidence.FREELY)
        self.times.expect(self._saved(asked, found), known, len(asked.lengths))

    def _supplied(self, asked: Asked, index: TokenIndex) -> float:
        """The share of the rows of these inputs that records with the tokens of this index could supply."""
        return self._saved(asked, self.planned(asked, index.candidates(asked.tokens, asked.starts), index))

    def _saved(self, asked: Asked, found: RowPlan, least: Evidence = Evidence.UNKNOWN) -> float:
        """The share of the rows that a plan saves, once all changes that are not known to be harmful are verified."""
        alike = found.evidence >= (Evidence.SAME if self.guard.equal_only else least)
        return int((asked.lengths - found.computed)[alike].sum()) / len(asked.tokens)

    def why_left(self, tokens: int, batch: int, later: Deferred, seconds_per_row: float | None) -> Skip | None:
        """Return why a forward is left to the blocks, None: it is looked up; `later`: what is learned in pauses."""
        # Until there are records, a forward is looked up to make some: where that is paid for, and no pause does it.
        always = self.times.always or len(self.index)
        if not (always or (self.times.learns and (self.times.lends or later.spare < batch))):
            return "no_records"
        return self.reason_to_leave(tokens, seconds_per_row)

    def rests(self, why: Skip) -> bool:
        """Whether, behind a forward that was left, some are not looked at: there is nothing to serve or to learn."""
        return self._forwards > SEEN and (why == "no_records" or self.times.rests)

    def rested(self, seconds: float, inputs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Note forwards that were not looked at: their time, and the ids and masks ``[B, L]`` of some."""
        self.times.rested(seconds)
        for ids, mask in inputs:
            self.repeats.look(ids, mask)

    def note_repeats(self, given: Mapping[str, Any], mask: Tensor, idle: Idle) -> Flags | None:
        """See how much of the arguments, with this mask ``[B, L]``, was asked before, and what records could supply.

        Return which sequences are worth a record, None: all. Where each new record costs an old one, those are whose
        like was asked before: a flood of texts that never come again takes no place.

        Where there are pauses to learn in nothing is lent.
        """
        if not mask.numel():
            return None
        self._forwards += 1
        full = self._store is not None and not self._store.has_room
        if not full and (self.times.always or (self._forwards > SEEN and self._forwards % LOOKS)):
            return None
        self.times.lends = idle.is_busy
        shares = self.repeats.look(ids_in(given), mask)
        if not self.times.lends:
            self.times.hope(None)  # learning waits for pauses, and asks for nothing
        elif shares is not None:
            # Where all is known, or too short to tell, records may supply much, too.
            if alike := self.repeats.share >= AGAIN or shares.min() == 1.0:
                self.prospect.look(given, mask)
            self.times.hope(self.prospect.share if alike else 0.0)
        return None if shares is None or not full else shares >= KNOWN

    def _most(self, asked: Asked, found: RowPlan) -> int:
        """How many of these inputs may be verified at once: those pay that take few rows, more of them."""
        if self.times.always:
            return ALL
        tried = (found.evidence >= Evidence.UNKNOWN) & (found.evidence < Evidence.SAME)
        each = float((found.computed[tried] / asked.lengths[tried]).mean()) + AROUND if tried.any() else 1.0
        owed = 0.0 if self._store is None else self._store.waits()
        return int(min(self.times.afford(owed) / each, len(tried)))

    def learns_at_once(self, asking: Asking) -> bool:
        """Whether answers are verified in the forward itself: while there are idle times, all is learned in those."""
        return self.times.always or self.times.lends or asking.spare < asking.batch

    def _tried(
        self, layer: int, call: Call, spans: Spans, forward: Forward, given: Given, asking: Asking
    ) -> Plan:
        """The plan of a replay in which all records are tried, and inputs with nothing alike become records."""
        tokens = self._tokens(given.arguments, spans, call.shape[1])
        if isinstance(tokens, str):
            return Whole.plan(self, layer, call, spans, forward)
        start, asked = perf_counter(), Asked.of(tokens, np.asarray(spans.lengths, np.int64))
        found, looked = self._look_up(asked, asking)
        evidence = found.evidence.tolist()
        if asking.decides:
            firsts = firsts_of(asked)
            asking.note(self.guard.decide(evidence, firsts, room=len(evidence)))
            reused, grown = set(asking.served), self._grown(asked, found, firsts, None)
            asking.grown = _rows_of(asked, [place for place in grown if place in reused])
        else:
            asking.note(self._without_known(asked, self.guard.try_all(evidence)))
        served = np.array([verdict not in (None, Verdict.LEAVE) for verdict in asking.verdicts])
        self._count(asked, found, served, (start, looked), forward.counters)
        fresh = np.flatnonzero(found.evidence == Evidence.NONE) if self._store is not None else served[:0]
        return plan_of(layer, spans, asked, found, served, _rows_of(asked, fresh.tolist()))

    @staticmethod
    def _kept(layer: int, spans: Spans, admitted: Mapping[int, Tokens]) -> Plan:
        """The plan of a replay that computes all exactly, and makes records of some, by place with their tokens."""
        lengths, none = np.asarray(spans.lengths, np.int64), np.full(len(spans.lengths), -1, np.int64)
        share = RowShare.of(lengths, none, np.full(lengths.sum(), -1, np.int32), admitted=admitted)
        return Plan(spans=spans, layers={layer: share})

    def _look_up(self, asked: Asked, asking: Asking) -> tuple[RowPlan, float]:
        """Note what records there are; return them, and the time between lookup and plan."""
        candidates = self._candidates(asked)
        looked = perf_counter()
        asking.plan = found = self.planned(asked, candidates)
        asking.starts, asking.tokens_asked, asking.epoch = asked.starts, asked.tokens, self.guard.epoch
        return found, looked

    def _without_known(self, asked: Asked, verdicts: list[Verdict | None]) -> list[Verdict | None]:
        """Leave out inputs that were tried before: they would say the same again, and are no samples."""
        starts = asked.starts.tolist()
        for place in (place for place, verdict in enumerate(verdicts) if verdict is not None):
            key = hash(asked.tokens[starts[place] : starts[place + 1]].tobytes())
            if key in self._tried_before:
                verdicts[place] = None
                continue
            if len(self._tried_before) >= REMEMBERED:
                self._tried_before.clear()
            self._tried_before.add(key)
        return verdicts

    def _pays(self, tokens: int) -> bool:
        return self.times.ask(tokens)

    def _may_pay(self, seconds_per_row: float | None) -> bool:
        return super()._may_pay(seconds_per_row) and not self.times.rests

    def took(self, asking: Asking, seconds: float, kept: int = 0) -> None:
        """Note that a forward took so long, with all that the guard did about it; so many sequences were kept."""
        verified, found = asking.tried, asking.plan
        again = 0 if found is None else int(found.computed[verified].sum())
        self.times.record(asking.tokens, asking.sequences, seconds, found is not None, len(verified) + kept, again)
        if verified:
            self._see_rate(1.0)

    def note_learned(self, stood: bool) -> None:
        """Note that a guard learned while no request ran; `stood`: it had a certificate before."""
        if self.guard.stands and not stood:
            self.times.try_again()
        else:
            self._see_rate(MOSTLY * self.guard.budget)

    def _see_rate(self, most: float) -> None:
        """Try anew what records save, where fewer answers may change than when it was tried last, so many at most."""
        if (highest := self.guard.rate()) <= min(FALLS * self._tried_at, most):
            self._tried_at = highest
            self.times.try_again()

    def begin_anew(self, guard: Guard) -> None:
        """Ask this guard from now on, and time forwards anew."""
        self.guard = guard
        self._tried_before.clear()
        self._tried_at = 1.0
        self.times, self.prospect = TimeAccount(self.times.always), Prospect(self._supplied)
        if self._store is not None:
            self._store.pay_from(self.times)

    def _needs(self, asked: Asked) -> Ints:
        found = self.planned(asked, self._candidates(asked))
        least = Evidence.FREELY if self.guard.affords() else Evidence.SAME
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

    def planned(self, asked: Asked, candidates: Candidates, index: TokenIndex | None = None) -> RowPlan:
        guard, index = self.guard, self.index if index is None else index
        demand = guard.demand(self.threshold, self._rounds)
        return index.plan(asked.tokens, asked.starts, candidates, self.rule, self.kinds, demand, guard.verified.table)


def _rows_of(asked: Asked, places: Sequence[int]) -> dict[int, Tokens]:
    """Return the tokens of some sequences, by place in the batch."""
    starts = asked.starts.tolist()
    return {place: asked.tokens[starts[place] : starts[place + 1]] for place in places}


def firsts_of(asked: Asked) -> list[int]:
    """Return for each sequence of a batch the first one with the same tokens: often itself."""
    tokens, starts, first = asked.tokens, asked.starts.tolist(), dict[bytes, int]()
    firsts = list[int]()
    for place, (begin, end) in enumerate(pairwise(starts)):
        firsts.append(first.setdefault(tokens[begin:end].tobytes(), place))
    return firsts
