"""A forward under a guard: serve, look at the answers, compute again what is too near to call, verify what was chosen.

    the model, with what its caller gave
      some sequences are served from records, the others computed whole
      the blocks ran twice     ─► all again, whole
    answers
      served, below the margin ─► again, whole; the last answers are given
      to be verified           ─► the blocks computed them from records too: the rest of the model runs on those, and
                                  the answers are compared, not given
      served, to be verified   ─► owed: computed exactly while no request runs
      exact, no record tried   ─► learned from: computed from records, or for records, while no request runs

The model is run again as it is, head and all, on some sequences of its own arguments: so any head can be guarded.
Answers that are pooled from what the blocks gave need no second run. A failed verification costs time, no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter, thread_time
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from attmemo.forward.batch_slices import has_loss, put, shallow, tokens_in
from attmemo.forward.context import NOTHING, Outcome
from attmemo.forward.engine import Engine
from attmemo.forward.row_usage import Observed
from attmemo.forward.stats import Skip
from attmemo.guard.answers import Answer, Answers, Read
from attmemo.guard.asking import Asking, worth_of
from attmemo.guard.change_log import Case, ChangeLog
from attmemo.guard.confidence import Sureness, known
from attmemo.guard.deferred import KEPT_FREE, LEARNED, Deferred, Inputs, Model, Owed, Part, teaches_nothing
from attmemo.guard.failures import Failures
from attmemo.guard.guard import Guard
from attmemo.guard.planner import GuardedPlanner
from attmemo.guard.pooled import Pooled
from attmemo.guard.replay import replay, run_again
from attmemo.guard.rest import Rest
from attmemo.guard.shadow import Shadow
from attmemo.guard.verdict import Verdict
from attmemo.kernels.align import Tokens
from attmemo.kernels.plan import Evidence
from attmemo.rows.candidate import Offer
from attmemo.rows.live_store import GrowingRows

STORED: Final = 1.0
"""Seconds that work for idle times waits for its records to be stored."""


class Guarded:
    """Runs the forwards of one model under a guard.

    Parameters
    ----------
    guard : Guard
    answers : Answers
    planner : GuardedPlanner
    engine : Engine
        Runs the blocks.
    store : GrowingRows or None
        Keeps what was computed exactly.
    sureness : Sureness
        That of the planner.
    deferred : Deferred
        What is compared while no request runs.
    shadow, log : Shadow, ChangeLog, optional
        Counts what would have been reused, for all are exact then; has verified answers that had changed.
    """

    def __init__(
        self, guard: Guard, answers: Answers, planner: GuardedPlanner, engine: Engine, store: GrowingRows | None,
        sureness: Sureness, deferred: Deferred, shadow: Shadow | None = None, log: ChangeLog | None = None,
    ) -> None:  # fmt: skip
        self.guard, self.answers, self.planner, self._pooled = guard, answers, planner, Pooled(answers)
        self._engine, self._store, self.sureness = engine, store, sureness
        self.deferred, self.shadow, self._log = deferred, shadow, log
        self._rest = Rest()
        self._failures = Failures(engine)
        self.rows_afterwards = 0  # computed to verify afterwards

    def __call__(self, forward: Model, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One forward of the model; `names` are those of its arguments."""
        given = dict(zip(names, args, strict=False)) | kwargs
        running = self._engine.current.running.get()
        again = running is not None and running.repeats  # a part of a request that was counted
        if again or given.get("labels") is not None:  # a loss is one number for a batch: none of its parts can be had
            return forward(*args, **kwargs)
        self.deferred.idle.began()
        try:
            if self._rest.left > 0.0 and self._rest.lasts and (running is None or running.is_plain):
                return self._rest.run(self._engine, forward, args, kwargs)
            if passed := self._rest.forwards:
                self.planner.rested(*self._rest.end())
            mask, worth, pays = self.answers.mask_in(given), None, False
            if self.shadow is not None:
                return self._in_shadow(self.shadow, forward, args, kwargs, mask, running is not None and running.whole)
            if mask is not None and mask.dim() == 2 and (running is None or running.is_plain):
                worth = self.planner.note_repeats(given, mask, self.deferred.idle)
                tokens, each = tokens_in(mask), self._engine.counters.done.seconds_per_row
                why = self.planner.why_left(tokens, len(mask), self.deferred, each)
                if why is not None:
                    takes = not self.guard.stands and self.deferred.takes(len(mask))
                    places = worth_of(worth, len(mask) if takes and self.guard.learns(1 + passed) else 0)
                    self._rest.begin(why, not (places or self.deferred.idle.works) and self.planner.rests(why))
                    return self._left(forward, args, kwargs, tokens, mask, places, why)
                pays = True
            return self._guarded(forward, args, kwargs, mask, Asking(worth=worth, pays=pays))
        finally:
            self.deferred.ended()

    def _in_shadow(
        self, shadow: Shadow, forward: Model, args: tuple[Any, ...], kwargs: dict[str, Any], mask: Tensor | None,
        whole: bool,
    ) -> Any:  # fmt: skip
        """The output of an exact forward; `whole`: it was asked for without reuse, and is tried never."""
        if mask is None or mask.dim() != 2:
            with self._engine.open(left=True):
                return forward(*args, **kwargs)
        room = self.deferred.spare if self.deferred.takes(1) else 0
        places = [] if whole else shadow.choose(len(mask), room)
        why: Skip | bool = "asked_without_reuse" if whole else True
        return self._left(forward, args, kwargs, tokens_in(mask), mask, places, why)

    def _left(
        self, forward: Model, args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int, mask: Tensor,
        places: Sequence[int], why: Skip | bool,
    ) -> Any:  # fmt: skip
        """The output of a forward that is looked up nowhere; at these places it is tried while no request runs."""
        start, worked, guard = perf_counter(), thread_time(), self.guard
        inputs = shallow((args, kwargs)) if places else ((), {})
        with self._engine.open(left=why):
            output = forward(*args, **kwargs)
        if places:
            self._learn_later(forward, inputs, output, mask, places, guard)
        self.planner.times.record(tokens, len(mask), thread_time() - worked, reused=False)
        if self._store is not None:
            self._store.took(perf_counter() - start)
        return output

    def _guarded(
        self, forward: Model, args: tuple[Any, ...], kwargs: dict[str, Any], mask: Tensor | None, asking: Asking
    ) -> Any:
        args, kwargs = args and shallow(args), shallow(kwargs)  # sentence-transformers writes into its argument
        inputs = args and shallow(args), shallow(kwargs)
        start, worked = perf_counter(), thread_time()
        asking.room = room = self.deferred.room
        asking.spare = max(room - KEPT_FREE, 0)
        with self._engine.open(asking=asking) as opened:
            try:
                output = forward(*args, **kwargs)
            except BaseException:
                asking.serve_only(set())
                self._settle(asking)
                raise
        done = opened.outcome
        if (outer := self._engine.current.running.get()) is not None:  # 8-bit layers ask which answers are exact
            outer.outcome = Outcome(served=done.served)
        hidden = self.answers.pooled_from(output) if done.beside else None
        gives_out = hidden is not None and done.last is not None and hidden.is_set_to(done.last)
        if asking.twice:  # no answer has a margin, and none can be verified
            output = self._whole(forward, inputs, output, asking)
            self._settle(asking)
            return output
        asking.serve_only(done.served)  # a record could not be read: an exact answer proves nothing
        try:
            return self._checked(forward, inputs, output, mask, done, gives_out, asking)
        finally:
            self._settle(asking)
            self._offer(done.offers, asking, perf_counter() - start)
            self.planner.took(asking, thread_time() - worked, len(done.offers))

    def _checked(
        self, forward: Model, inputs: tuple[Any, Any], output: Any, mask: Tensor | None, done: Outcome,
        gives_out: bool, asking: Asking,
    ) -> Any:  # fmt: skip
        """The output, with all that the guard does about it.

        `gives_out`: the hidden states that answers are pooled from are those of the blocks, where the blocks put them.
        """
        if asking.plan is None and not done.offers:
            return output
        if has_loss(output):
            return self._whole(forward, inputs, output, asking)
        try:
            seen = self.answers.read(output, mask)
            if len(seen.values) != asking.batch:
                raise ValueError(f"{len(seen.values)} answers to {asking.batch} sequences")
            if done.offers:
                self.sureness.note(seen, done.offers)
        except Exception as error:  # an output of another form than at memoize's check
            self._failures.note("an answer could not be read", error)
            return self._whole(forward, inputs, output, asking)
        try:
            output = self._raise_low(forward, inputs, output, mask, seen, asking)
        except Exception as error:
            self._failures.note("an answer below the margin could not be computed alone", error)
            return self._whole(forward, inputs, output, asking)
        try:
            if done.beside:
                self._verify(forward, inputs, gives_out, mask, seen, done.beside, asking)
            later = not self.planner.learns_at_once(asking) and self.deferred.takes(asking.batch)
            if mask is not None and later and self.guard.learns():
                self._learn_later(forward, inputs, output, mask, asking.left(done.offers), self.guard, seen)
        except Exception as error:
            self._failures.unverified(error, self.guard)
        return output

    def _raise_low(
        self, forward: Model, inputs: tuple[Any, Any], output: Any, mask: Tensor | None, seen: Read, asking: Asking
    ) -> Any:
        """The output, with answers below the margin computed again. Some of the others are owed."""
        served = asking.served
        if asking.plan is None or (asking.plan.evidence[served] == Evidence.SAME).all():  # none can be too near
            return output
        margins = self.sureness.margins(seen, asking.plan.record)
        low = self.guard.low(margins, asking.plan.evidence) & set(served)
        owed: dict[int, Owed] = {}
        for place in asking.owed:
            if place not in low:
                answer = Answer(seen, place, known(margins[place])).alone
                case = None if self._log is None else Case.of(asking, place, self.planner.index)
                owed[place] = Owed(answer, asking.changes(place), asking.evidence(place), case)
        # First all that can fail, then what is counted: after an error nothing is served, and all is taken back.
        if low:
            places = sorted(low)
            again, _ = run_again(self._engine, forward, inputs, asking.batch, places)
            exact = self.answers.read(again, None if mask is None else mask[places])
            changed = [self.answers.differ(seen, place, exact, number) for number, place in enumerate(places)]
            output = put(output, again, torch.tensor(places), asking.batch)
            for place, differs in zip(places, changed, strict=True):
                self.guard.compared(
                    Verdict.SERVE, asking.changes(place), asking.evidence(place), known(margins[place]), differs,
                    asking.epoch,
                )  # fmt: skip
            asking.low |= low
        if owed or asking.grown:
            self._put_off(forward, inputs, mask, owed, asking)
        return output

    def _put_off(
        self, forward: Model, inputs: Inputs, mask: Tensor | None, owed: Mapping[int, Owed], asking: Asking
    ) -> None:  # fmt: skip
        """Have answers compared, and records made of inputs that are grown, while no request runs."""
        grown = {place: asking.grown[place].copy() for place in asking.served if place in asking.grown}
        fresh = [place for place in grown if place not in owed][: max(asking.spare - len(owed), 0)]
        if owed:
            compare = partial(self._compare_owed, owed, grown, self.guard, asking.epoch)
            self._defer(forward, inputs, mask, list(owed), asking.batch, compare, "owed")
        if fresh:
            keep = partial(self._keep_grown, grown, self.guard)
            self._defer(forward, inputs, mask, fresh, asking.batch, keep, "grown")

    def _learn_later(
        self, forward: Model, inputs: Inputs, output: Any, mask: Tensor, places: Sequence[int],
        guard: Guard, seen: Read | None = None,
    ) -> None:  # fmt: skip
        """Have records tried, and made, of sequences that were answered exactly, `seen`, under the guard of then."""
        if teaches_nothing(output):
            return
        try:
            seen = seen or self.answers.read(output, mask)
        except Exception as error:
            self._failures.note("an answer could not be read", error)
            return
        self._defer(forward, inputs, mask, places, len(mask), partial(self._learn, seen, guard), LEARNED)

    def _defer(
        self, forward: Model, inputs: Inputs, mask: Tensor | None, places: Sequence[int], batch: int,
        compare: Callable[[Part], bool], kind: str,
    ) -> None:  # fmt: skip
        """Have these sequences compared while no request runs; what fails then is counted."""

        def afterwards(part: Part) -> bool:
            try:
                return compare(part)
            except Exception as error:
                self._failures.unverified(error, self.guard)
                return False

        self.deferred.add(forward, inputs, mask, places, batch, afterwards, kind)

    def _offer(self, offers: Mapping[int, Offer], asking: Asking, seconds: float) -> None:
        """Have sequences kept, those that a record could have served only while there is room for them.

        `seconds`: the forward took so long.
        """
        if self._store is None:
            return
        self._store.took(seconds)
        for place in offers.keys() - asking.changed:
            offers[place].spare |= asking.is_spare(place)
        self._store.offer(list(offers.values()))

    def _verify(
        self, forward: Model, inputs: tuple[Any, Any], gives_out: bool, mask: Tensor | None, seen: Read,
        beside: Mapping[int, Tensor], asking: Asking,
    ) -> None:  # fmt: skip
        """Compare exact answers with those from records; of these the blocks are computed, `beside`, by place."""
        places = sorted(beside)
        reused = self._from_records(forward, inputs, gives_out, mask, len(seen.values), beside)
        if reused is None:
            return
        assert asking.plan is not None
        margins = self.sureness.margins(reused, asking.plan.record[places])
        for number, place in enumerate(places):
            changed = self.answers.differ(reused, number, seen, place)
            if changed:
                asking.changed.add(place)
            verdict = asking.verdicts[place]
            assert verdict is not None
            self._compared(asking, place, verdict, known(margins[number]), changed, self.guard)
        self._failures.verified()

    def _settle(self, asking: Asking) -> None:
        """Count the answers that came from records, now that they are final.

        The guard counted them when it decided; those that were computed exactly after all it takes back.
        """
        for place in asking.exact:
            self.guard.take_back(asking.evidence(place), asking.epoch)
        if asking.plan is not None:
            given = np.array(sorted({*asking.served} - asking.low), np.int64)
            repeated = int(np.count_nonzero(asking.plan.evidence[given] == Evidence.SAME))
            self._engine.counters.answered(len(given) - repeated, repeated)

    def _compare_owed(
        self, owed: Mapping[int, Owed], grown: Mapping[int, Tokens], guard: Guard, epoch: int, part: Part
    ) -> bool:  # fmt: skip
        """Compare answers that were given from records with the exact ones; make records of inputs that are grown."""
        found, done = self._again(Asking(keeps=self.planner.lacking(grown, part.places)), guard, part)
        if found is None:
            return False
        for number, place in enumerate(part.places):
            one = owed[place]
            changed = self.answers.differ(one.answer.read, one.answer.number, found, number)
            if changed and self._log is not None and one.case is not None:
                blamed = guard.verified.blamed(one.changes)
                self._log.note(one.case, Verdict.OWE, one.answer.margin, blamed, epoch, given=True)
            if guard.compared(Verdict.OWE, one.changes, one.evidence, one.answer.margin, changed, epoch):
                self._failures.tell_alarm(self.guard)
        self._failures.verified()
        self._keep(found, done)
        return True

    def _learn(self, seen: Read, guard: Guard, part: Part) -> bool:
        """Compare answers from records with those that were given, `seen`, which are exact; make records of others."""
        asking = Asking(tries=True, decides=(shadow := self.shadow) is not None)
        found, done = self._again(asking, guard, part)
        if found is None or asking.plan is None:
            return False
        stood, margins = guard.stands, self.sureness.margins(found, asking.plan.record)
        low = guard.low(margins, asking.plan.evidence)
        for number in sorted(done.served):
            verdict, changed = asking.verdicts[number], self.answers.differ(found, number, seen, part.places[number])
            assert verdict is not None
            if shadow is not None:
                verdict = shadow.verdict(verdict, asking.evidence(number), number in low, changed)
            if verdict is not None:
                self._compared(asking, number, verdict, known(margins[number]), changed, guard)
        if shadow is not None:
            shadow.tried += asking.batch
            asking.serve_only(done.served)
            for number in asking.exact:
                guard.take_back(asking.evidence(number), asking.epoch)
        self._failures.verified()
        self.planner.note_learned(stood)
        self._keep(found, done)
        if asking.grown:  # in shadow mode: these would have been reused, and have become records now
            self._keep_grown({part.places[number]: own for number, own in asking.grown.items()}, guard, part)
        return True

    def _keep_grown(self, grown: Mapping[int, Tokens], guard: Guard, part: Part) -> bool:
        """Make records of inputs that are grown. Whatever fails says nothing of verifying."""
        try:
            keeps = self.planner.lacking(grown, part.places)
            found, done = self._again(Asking(keeps=keeps), guard, part) if keeps else (None, NOTHING)
            if found is not None:
                self._keep(found, done)
            return found is not None
        except Exception as error:
            self._failures.note("a grown text could not become a record", error)
        return False

    def _keep(self, seen: Read, done: Outcome) -> None:
        """Have the records kept that a replay offers, with its answers."""
        self.sureness.note(seen, done.offers)
        if self._store is not None:
            self._store.keep(list(done.offers.values()), STORED)

    def _compared(
        self, asking: Asking, place: int, verdict: Verdict, margin: float | None, changed: bool, guard: Guard
    ) -> None:
        """Have a guard learn from an answer of a record and the exact one, which was given."""
        changes, evidence = asking.changes(place), asking.evidence(place)
        if changed and self._log is not None:
            case = Case.of(asking, place, self.planner.index)
            self._log.note(case, verdict, margin, guard.verified.blamed(changes), asking.epoch)
        if guard.compared(verdict, changes, evidence, margin, changed, asking.epoch):
            self._failures.tell_alarm(self.guard)

    def _again(self, asking: Asking, guard: Guard, part: Part) -> tuple[Read | None, Outcome]:
        """Run a part of a forward again; None: that says nothing, for the model or the guard is another one by now."""
        if guard is not self.guard:
            return None, NOTHING
        observed, (args, kwargs) = Observed(), shallow(part.inputs)  # these rows are of other requests
        try:
            with torch.no_grad(), replay(self._engine, asking, observed=observed) as opened:
                output = part.forward(*args, **kwargs)
            if asking.twice or not (asking.planned and guard is self.guard and self.deferred.is_current(part)):
                return None, NOTHING
            return self.answers.read(output, part.mask), opened.outcome
        finally:
            self.rows_afterwards += observed.extra

    def begin_anew(self, guard: Guard) -> None:
        """Ask this guard from now on."""
        self.guard, self._rest = guard, Rest()

    def _from_records(
        self, forward: Model, inputs: tuple[Any, Any], gives_out: bool, mask: Tensor | None, batch: int,
        beside: Mapping[int, Tensor],
    ) -> Read | None:  # fmt: skip
        """Answers from last hidden states of records, `beside`, in the order of places; None: they cannot be had."""
        places = sorted(beside)
        last, mask = torch.stack([beside[place] for place in places]), None if mask is None else mask[places]

        def by_model() -> Read | None:
            again, done = run_again(self._engine, forward, inputs, batch, places, last)
            # Else the blocks were computed anew, and exactly: that proves nothing.
            return self.answers.read(again, mask) if done.served else None

        return self._pooled.read(last, mask, gives_out, by_model)

    def _whole(self, forward: Model, inputs: tuple[Any, Any], output: Any, asking: Asking) -> Any:
        """The output of a batch whose answers cannot be checked: nothing is served."""
        if not asking.served:
            return output
        asking.serve_only(set())
        args, kwargs = shallow(inputs)
        with replay(self._engine, Asking()):
            return forward(*args, **kwargs)

