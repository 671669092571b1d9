"""A forward under a guard: serve, look at the answers, compute again what is too near to call, verify what was chosen.

    answers that are owed, if they are many ─► computed whole and compared with those that were given
    the model, with what its caller gave
      some sequences are served from records, the others computed whole
      the blocks ran twice     ─► all again, whole
    answers
      served, below the margin ─► the same sequences again, with more rows computed where that may do (vectors: only
                                  once there is a certificate)
      below the margin of such answers, or no more rows may do ─► again, whole; the last answers are given
      to be verified           ─► the blocks computed them from records too: the rest of the model runs on those, and
                                  the answers are compared, not given
      served, to be verified   ─► owed: verified while no request runs, or before a later one

The model is run again as it is, head and all, on some sequences of its own arguments: so any head can be guarded, and
what is verified is what would be served. Answers that are pooled from what the blocks gave need no second run. A
verification that fails costs time, never an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor, nn

from attmemo.counters import Counters
from attmemo.debts import Batch, Debt, Debts, Forward, batches, stamp_of
from attmemo.guard import Answers, Cover, Guard, Verdict
from attmemo.guard.answers import Answer, Read
from attmemo.idle import Idle
from attmemo.locking import ThreadLock
from attmemo.observed import Observed
from attmemo.parts import has_loss, mask_in, put, shallow, take
from attmemo.planner.guarded import Asking, Chosen, GuardedPlanner
from attmemo.reuse.growing import GrowingRows
from attmemo.reuse.offer import Offer
from attmemo.reuse.rows import Rows
from attmemo.sureness import Sureness

_LOG = logging.getLogger("attmemo")

BOTH_WAYS: Final = 32
"""Batches whose pooled answers are verified by a run of the model too: so many at first, one in so many later."""
OWED: Final = 8
"""Answers that may be owed when a request begins: if they are more, it pays first, and has room for its own."""
AT_ONCE: Final = 4
"""Answers that are verified at once while no request runs: one that comes meanwhile waits for no more."""
MOVES: Final = 0.5
"""Of vectors: an answer counts as changed if more rows move it by this share of the distance, for both may err alike.
Somewhat more are moved so than differ from the exact answer (docs/guard.md). To count by the exact answers that exist
would count too few: only what more rows moved far is computed exactly."""


class Guarded:
    """Runs the forwards of one model under a guard.

    Parameters
    ----------
    guard : Guard
    answers : Answers
    planner : GuardedPlanner
    rows : Rows
        Says whether records could be read.
    store : GrowingRows or None
        Keeps what was computed exactly.
    sureness : Sureness
        That of the planner.
    """

    def __init__(
        self, guard: Guard, answers: Answers, planner: GuardedPlanner, rows: Rows, store: GrowingRows | None,
        sureness: Sureness,
    ) -> None:  # fmt: skip
        self.guard, self.answers, self.planner = guard, answers, planner
        self._rows, self._store, self.sureness = rows, store, sureness
        self._pools, self._pooled = True, 0  # whether answers are pooled here, as the model would; how often they were
        self.debts, self.idle = Debts(), Idle(self._pay_some)
        self.rows_afterwards = 0  # computed to verify answers afterwards
        self._paying, self._paid = ThreadLock(), 0.0  # seconds that requests paid, and no forward was charged for
        self._counters: Counters | None = None  # of the last forward
        self._model: nn.Module | None = None
        self._pad: int | None = None
        self._hooks: list[Any] = []

    def watch(self, model: nn.Module, pad: int | None) -> None:
        """Owe answers of this model from now on. Without it none is owed.

        Parameters
        ----------
        model : nn.Module
            Whose forward is called, head and all.
        pad : int or None
            The id of padding; None: there is none.
        """
        self._model = model
        self._pad = None if callable(self.answers.rule) else pad  # a rule of the caller's own may read padding
        self._hooks = [hooks for one in model.modules() for hooks in (one._forward_hooks, one._forward_pre_hooks)]

    @property
    def _room(self) -> int:
        """Answers that may be owed. Hooks of the user must not be called at other times, with other inputs."""
        return 0 if self._model is None or any(self._hooks) else self.debts.room

    def __call__(
        self, forward: Forward, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], counters: Counters
    ) -> Any:
        """One forward of the model; `names` are those of its arguments."""
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.get("labels") is not None:  # a loss is one number for a batch: no part of it can be computed again
            return forward(*args, **kwargs)
        self._counters = counters
        self.idle.began()
        try:
            return self._guarded(forward, given, args, kwargs, counters)
        finally:
            self.idle.ended()
            if self.debts:
                self.idle.wake()

    def _guarded(
        self, forward: Forward, given: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        counters: Counters,
    ) -> Any:  # fmt: skip
        args, kwargs = shallow((args, kwargs))  # sentence-transformers writes into its argument
        inputs = shallow((args, kwargs))
        thread, start = self._rows.thread, perf_counter()
        owes_much = len(self.debts) > OWED or (self.debts and not self.guard.certificate.affords())
        if owes_much and not self.planner.asked_whole:  # samples make the next answer cheaper
            self.pay(wait=False)
            self._paid += perf_counter() - start
            start = perf_counter()
        thread.forget()
        with self.planner.asking(room=self._room) as asking:
            try:
                output = forward(*args, **kwargs)
            except BaseException:
                asking.serve_only(set())
                self._settle(asking, counters)
                raise
        offers, beside = thread.admitted, thread.beside
        hidden = self.answers.pooled_from(output) if beside else None
        gives_out = hidden is not None and thread.last is not None and hidden.is_set_to(thread.last)
        thread.admitted, thread.beside, thread.last = {}, {}, None
        if asking.twice:  # no answer has a margin, and none can be verified
            output = self._whole(forward, inputs, output, asking)
            self._settle(asking, counters)
            return output
        asking.serve_only(thread.served)  # a record could not be read: an exact answer proves nothing
        try:
            return self._checked(forward, inputs, output, mask_in(given), offers, beside, gives_out, asking, counters)
        finally:
            self._settle(asking, counters)
            self._offer(offers, asking, perf_counter() - start)
            paid = 0.0
            if asking.looked:  # verifying is what reuse costs
                paid, self._paid = self._paid, 0.0
            self.planner.took(asking, perf_counter() - start + paid)

    def _checked(
        self, forward: Forward, inputs: tuple[Any, Any], output: Any, mask: Tensor | None, offers: Mapping[int, Offer],
        beside: Mapping[int, Tensor], gives_out: bool, asking: Asking, counters: Counters,
    ) -> Any:  # fmt: skip
        """The output, with all that the guard does about it.

        `gives_out`: the hidden states that answers are pooled from are those of the blocks, where the blocks put them.
        """
        if not asking.chosen and not offers:
            return output
        if has_loss(output):
            return self._whole(forward, inputs, output, asking)
        try:
            seen = self.answers.read(output, mask)
            if len(seen.values) != asking.batch:
                raise ValueError(f"{len(seen.values)} answers to {asking.batch} sequences")
            self.sureness.note(seen, offers)
        except Exception as error:  # the check at memoize has seen an answer; this output is of another form
            self._failed(counters, "an answer could not be read", error)
            return self._whole(forward, inputs, output, asking)
        try:
            output = self._raise_low(forward, inputs, output, mask, seen, asking)
        except Exception as error:
            self._failed(counters, "an answer below the margin could not be computed alone", error)
            return self._whole(forward, inputs, output, asking)
        try:
            self._verify(forward, inputs, gives_out, mask, seen, beside, asking)
        except Exception as error:
            self._failed(counters, "an answer could not be verified", error)
        return output

    def _raise_low(
        self, forward: Forward, inputs: tuple[Any, Any], output: Any, mask: Tensor | None, seen: Read, asking: Asking
    ) -> Any:
        """The output, with answers below the margin computed again: with more rows where that may do, or else whole.

        Some of the answers that stay from records are owed.
        """
        margins = self.sureness.margins(seen, {place: asking.chosen[place] for place in asking.served})
        first = {place: Answer(seen, place, margin) for place, margin in margins.items()}
        low, last = self._low(first, asking.chosen), dict(first)
        chosen = {place: asking.chosen[place] for place in low}
        again, wider = self._wider(forward, inputs, asking.batch, mask, chosen, first)
        if wider:
            output = put(output, again, torch.tensor(list(wider)), asking.batch)
            asking.chosen |= {place: one for place, (one, _) in wider.items()}
            last |= {place: answer for place, (_, answer) in wider.items()}
            left = self._low({place: answer for place, (_, answer) in wider.items()}, asking.chosen)
            for place in wider.keys() if self.answers.are_vectors else wider.keys() - set(left):
                self._computed_again(asking.chosen[place], first[place], last[place], MOVES)
            low = [place for place in low if place not in wider or place in left]
        self._owe(forward, inputs, mask, last, asking, set(low))
        if not low:
            return output
        again = self._run(forward, inputs, asking.batch, low)
        exact = self.answers.read(again, None if mask is None else mask[low])
        for number, place in enumerate(low):
            one, true = asking.chosen[place], Answer(exact, number, None)
            if place in wider and not self.answers.are_vectors:
                self._computed_again(one, first[place], true)
            changed = self._differ(last[place], true)
            self.guard.compared(Verdict.SERVE, one.gaps, one.cover, last[place].margin, changed, one.epoch)
            asking.low.add(place)
        return put(output, again, torch.tensor(low), asking.batch)

    def _low(self, answers: Mapping[int, Answer], chosen: Mapping[int, Chosen]) -> list[int]:
        """Which of these answers from records are below the margin; the guard is told of all."""
        for place, answer in answers.items():
            self.guard.served(chosen[place].gaps, chosen[place].cover, answer.margin)
        return [place for place, answer in answers.items() if self.guard.is_low(answer.margin, chosen[place].cover)]

    def _differ(self, one: Answer, other: Answer, share: float = 1.0) -> bool:
        return self.answers.differ(one.read, one.number, other.read, other.number, share)

    def _computed_again(self, one: Chosen, first: Answer, other: Answer, share: float = 1.0) -> None:
        """Tell the guard of an answer below the margin, and of another one with more rows computed, or of all."""
        self.guard.computed_again(first.margin, self._differ(first, other, share), one.epoch)

    def _wider(
        self, forward: Forward, inputs: tuple[Any, Any], batch: int, mask: Tensor | None, low: Mapping[int, Chosen],
        first: Mapping[int, Answer],
    ) -> tuple[Any, dict[int, tuple[Chosen, Answer]]]:  # fmt: skip
        """The output for some of these sequences with more rows computed, and the answers there, by place."""
        wider = {place: one for place, former in low.items() if (one := self.planner.wider(former)) is not None}
        if not wider:
            return None, {}
        places = list(wider)
        self._rows.thread.forget()
        again = self._run(forward, inputs, batch, places, chosen=list(wider.values()))
        if len(self._rows.thread.served) < len(wider):  # a record went: an exact answer proves nothing
            return None, {}
        read = self.answers.read(again, None if mask is None else mask[places])
        margins = self.sureness.margins(read, dict(enumerate(wider.values())), [first[place] for place in places])
        answers = {place: Answer(read, number, margins[number]) for number, place in enumerate(places)}
        return again, {place: (one, answers[place]) for place, one in wider.items()}

    def _owe(
        self, forward: Forward, inputs: tuple[Any, Any], mask: Tensor | None, given: Mapping[int, Answer],
        asking: Asking, low: set[int],
    ) -> None:  # fmt: skip
        """Have answers from records verified afterwards; those in `low` are computed exactly after all."""
        places = asking.where(Verdict.OWE)
        stamp = self._stamp() if places else None
        for place in places:
            if stamp is None or place in low:
                self.guard.give_back()
                continue
            one = torch.tensor([place])
            self.debts.add(Debt(
                forward, take(inputs, one, asking.batch), None if mask is None else mask[one],
                given[place].alone, asking.chosen[place], self.guard, stamp,
            ))  # fmt: skip

    def _stamp(self) -> object:
        """That of the model; None: nothing can be owed."""
        return None if self._model is None else stamp_of(self._model)

    def _offer(self, offers: Mapping[int, Offer], asking: Asking, seconds: float) -> None:
        """Have sequences kept, those that a record could have served only while there is room for them.

        `seconds`: the forward took so long.
        """
        if self._store is None:
            return
        self._store.took(seconds)
        futile = {place for place, one in asking.chosen.items() if one.cover is Cover.FUTILE}
        for place in (futile | set(asking.served) | set(asking.where(Verdict.SAMPLE))) - asking.changed:
            if place in offers:
                offers[place].spare = True
        self._store.offer(list(offers.values()))

    def _verify(
        self, forward: Forward, inputs: tuple[Any, Any], gives_out: bool, mask: Tensor | None, seen: Read,
        beside: Mapping[int, Tensor], asking: Asking,
    ) -> None:  # fmt: skip
        """Compare exact answers with those from records; of these the blocks are computed, `beside`, by place."""
        places = sorted(beside)
        if not places:
            return
        reused = self._from_records(forward, inputs, gives_out, mask, len(seen.values), beside)
        if reused is None:
            return
        margins = self.sureness.margins(reused, {number: asking.chosen[place] for number, place in enumerate(places)})
        found = {place: Answer(reused, number, margins[number]) for number, place in enumerate(places)}
        low = {
            place: one for place, answer in found.items() if (one := asking.chosen[place]).verdict is Verdict.SAMPLE
            and self.guard.is_low(answer.margin, one.cover)
        }  # fmt: skip
        _, wider = self._wider(forward, inputs, asking.batch, mask, low, found)  # what would have been served
        for place, answer in found.items():
            one, true = asking.chosen[place], Answer(seen, place, None)
            if place in wider:
                self.guard.served(one.gaps, one.cover, answer.margin)  # as if it were: `_raise_low`
                self._computed_again(one, answer, true)
                one, answer = wider[place]
            changed = self._differ(answer, true)
            if changed:
                asking.changed.add(place)
            if self.guard.compared(one.verdict, one.gaps, one.cover, answer.margin, changed, one.epoch):
                self._tell_alarm()

    def _settle(self, asking: Asking, counters: Counters) -> None:
        """Count the answers that came from records, now that they are final.

        The guard counted them when it decided; those that were computed exactly after all it takes back.
        """
        decided, exact = asking.decided, asking.exact | asking.low
        for place in exact - asking.low:
            self.guard.take_back(decided[place].cover, decided[place].epoch)
        given = [one.cover for place, one in decided.items() if place not in exact]
        repeated = given.count(Cover.SAME)
        counters.answered(len(given) - repeated, repeated)

    def pay(self, most: int | None = None, *, wait: bool = True) -> None:
        """Verify answers that are owed. One that cannot be verified any more is forgotten.

        Parameters
        ----------
        most : int, optional
            So many at most; by default all.
        wait : bool
            Whether to wait for another thread that verifies some. If not, nothing is done meanwhile.
        """
        with self._paying.held(wait) as mine:
            if not mine:
                return
            thread = self._rows.thread
            observed, thread.observed = thread.observed, Observed()  # these rows are of other requests
            try:
                for batch in batches(self.debts.take(len(self.debts) if most is None else most), self._pad):
                    self._pay(batch)
            except Exception as error:
                self._failed(self._counters, "an answer could not be verified", error)
            finally:
                self.rows_afterwards += thread.observed.extra
                thread.observed = observed

    def _pay(self, batch: Batch) -> None:
        """Compare answers that were given with the exact ones, if the model is the same as it was."""
        debts, stamp = batch.debts, self._stamp()
        if any(debt.guard is not self.guard or debt.stamp != stamp for debt in debts):
            return
        args, kwargs = shallow(batch.inputs)
        with torch.no_grad(), self.planner.asking(again=True) as asking, self._rows.thread.repeating():
            output = debts[0].forward(*args, **kwargs)
        if not asking.planned or asking.twice or stamp != self._stamp():
            return
        exact = self.answers.read(output, batch.mask)
        for number, debt in enumerate(debts):
            one, true = debt.chosen, Answer(exact, number, None)
            changed = self._differ(debt.answer, true)
            if debt.guard.compared(one.verdict, one.gaps, one.cover, debt.answer.margin, changed, one.epoch):
                self._tell_alarm()

    def _pay_some(self) -> bool:
        """Verify some of the answers that are owed, in the thread for idle times; whether there are more."""
        self.pay(AT_ONCE)
        return bool(self.debts)

    def begin_anew(self, guard: Guard) -> None:
        """Ask this guard from now on."""
        self.guard = guard
        self.debts.forget()

    def close(self) -> None:
        """Owe nothing, and end the thread for idle times."""
        self.debts.forget()
        self.idle.close()

    def _tell_alarm(self) -> None:
        _LOG.warning("attmemo: %s", self.guard.state().sentence(self.guard.confidence))

    def _from_records(
        self, forward: Forward, inputs: tuple[Any, Any], gives_out: bool, mask: Tensor | None, batch: int,
        beside: Mapping[int, Tensor],
    ) -> Read | None:  # fmt: skip
        """Answers from last hidden states of records, `beside`, in the order of places; None: they cannot be had.

        Where a model gives out the hidden states of its blocks as they are, and answers are pooled from those, they
        are pooled here: to run the model for that takes longer than all else that the guard does. The first batches
        that are verified so, and one in so many later, run the model too. If that gives other answers, all later do.
        """
        places, thread = sorted(beside), self._rows.thread
        last, mask = torch.stack([beside[place] for place in places]), None if mask is None else mask[places]
        pooled = None
        if self._pools and gives_out:
            pooled = self.answers.read({"last_hidden_state": last}, mask)
            self._pooled += 1
            if self._pooled > BOTH_WAYS and self._pooled % BOTH_WAYS:
                return pooled
        thread.forget()
        again = self._run(forward, inputs, batch, places, last)
        if not thread.served:  # the blocks were computed anew, and exactly: that proves nothing
            return None
        found = self.answers.read(again, mask)
        if pooled is not None and not torch.equal(pooled.values, found.values):
            self._pools = False
        return found

    def _whole(self, forward: Forward, inputs: tuple[Any, Any], output: Any, asking: Asking) -> Any:
        """The output of a batch whose answers cannot be checked: nothing is served."""
        served = set(asking.served)
        asking.exact |= served
        if not served:
            return output
        args, kwargs = shallow(inputs)
        with self.planner.asking(again=True), self._rows.thread.repeating():
            return forward(*args, **kwargs)

    def _run(
        self, forward: Forward, inputs: tuple[Any, Any], batch: int, places: list[int], last: Tensor | None = None,
        chosen: Sequence[Chosen] = (),
    ) -> Any:  # fmt: skip
        """The output for some sequences, computed whole, from these last hidden states or from these records."""
        args, kwargs = take(inputs, torch.tensor(places), batch)
        reused = [one.reused for one in chosen] or None
        with self.planner.asking(again=True, last=last, reused=reused), self._rows.thread.repeating():
            return forward(*args, **kwargs)

    def _failed(self, counters: Counters | None, what: str, error: Exception) -> None:
        if counters is not None and (count := counters.failure(what, error, 1)):
            debug = _LOG.isEnabledFor(logging.DEBUG)
            _LOG.warning("attmemo: %s: %s (%d so far)", what, error, count, exc_info=debug)
