"""Answers that are owed: served from records first, and verified afterwards."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from children import in_child
from guarded import BOTH, LENGTHS, Case, done, field, rows_of, run, taught, until, worst
from packed_models import NEAR, Inputs, gap
from packed_models import batch as batch_of
from torch import nn

from attmemo.guard import deferred
from attmemo.guard.certificate import Counts
from attmemo.guard.deferred import AT_ONCE, IN_A_PAUSE, Deferred, Part
from attmemo.guard.failures import FAILS
from attmemo.guard.guard import Guard
from attmemo.guard.idle import GAPS, Idle
from attmemo.guard.linear_choice import KIND
from attmemo.guard.time_account import TimeAccount
from attmemo.guard.verdict import Verdict


@pytest.fixture(params=["BERT", "BERT classifier"], scope="module", name="case")
def _case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def ask(model: Any, inputs: Inputs) -> Any:
    """The output; nothing is waited for."""
    with torch.inference_mode():
        return model(**inputs)


def owing(case: Case, inputs: Inputs = BOTH, **options: Any) -> Any:
    """A model that owes the answers to these inputs."""
    model = taught(case.bare, min_cosine=options.pop("min_cosine", -1.0), **options)
    model.attmemo.guarded.guard.drawn = 1.0
    ask(model, inputs)
    return model


def changed_classes(seen: Any, exact: Any) -> int:
    """How many answers of a classifier changed; of vectors none does here, whatever they are."""
    if field(seen).dim() == 3:
        return 0
    return int((field(seen).argmax(1) != field(exact).argmax(1)).sum())


def guard_of(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = model.attmemo.stats()["guard"]
    return found


class TestOwed:
    def test_an_answer_is_served_first_and_verified_afterwards(self, case: Case) -> None:
        model = taught(case.bare, min_cosine=-1.0)
        model.attmemo.guarded.guard.drawn = 1.0
        before = guard_of(model)["verified"]
        seen, exact = ask(model, BOTH), run(case.exact, BOTH)
        assert worst(seen, exact, BOTH) > NEAR, "answers of records"
        assert done(model)["reused"] == len(LENGTHS)
        assert guard_of(model)["verified"] == before
        assert len(model.attmemo.deferred) == len(LENGTHS)
        computed = model.attmemo.stats()["rows_computed"]
        assert model.attmemo.flush()
        found = guard_of(model)
        assert found["verified"] == before + len(LENGTHS)
        assert found["verified_afterwards"] == len(LENGTHS)
        assert found["changed"] == changed_classes(seen, exact)
        assert model.attmemo.stats()["rows_computed"] - computed == sum(LENGTHS), "what that took is counted"
        assert model.attmemo.stats()["rows_afterwards"] == sum(LENGTHS)
        assert not model.attmemo.deferred
        assert not model.attmemo.stats()["failures"]

    def test_before_there_is_a_certificate_every_served_answer_is_owed_and_counts(self, case: Case) -> None:
        model = taught(case.bare, min_cosine=-1.0)
        guard = model.attmemo.guarded.guard
        guard.drawn = 0.0
        guard.certificate.adopt(Counts(same=200, requests=300))
        assert not guard.certified
        assert guard.certificate.affords()
        ask(model, BOTH)
        assert len(model.attmemo.deferred) == len(LENGTHS)

    def test_of_certified_answers_a_share_is_owed(self, case: Case) -> None:
        model = taught(case.bare, min_cosine=-1.0)
        guard = model.attmemo.guarded.guard
        ask(model, BOTH)
        assert not model.attmemo.deferred, "nothing is drawn"
        guard.drawn = 1.0
        ask(model, BOTH)
        assert len(model.attmemo.deferred) == len(LENGTHS)

    def test_of_equal_sequences_of_a_batch_one_is_owed(self, case: Case) -> None:
        model = owing(case, rows_of(BOTH, 0, 0, 1, 0))
        assert len(model.attmemo.deferred) == 2
        assert done(model)["reused"] == 4

    def test_equal_sequences_get_one_answer_and_are_one_sample_however_little_the_budget_affords(
        self, case: Case
    ) -> None:
        model = taught(case.bare, min_cosine=-1.0)
        guard = model.attmemo.guarded.guard
        guard.certificate.adopt(Counts(same=150, requests=2))  # which affords one, and not another at once
        before = guard_of(model)["verified"]
        seen = run(model, rows_of(BOTH, 0, 0, 0, 0, 0, 0))[0]
        assert guard_of(model)["verified"] == before + 1
        assert gap(seen, seen[:1].expand_as(seen)) <= NEAR, "a head of torch rounds rows differently"
        assert "reused" not in done(model), "for all of them it does not suffice"
        run(model, rows_of(BOTH, 1))
        assert done(model)["reused"] == 1, "for one it does"

    def test_an_answer_below_the_margin_is_exact_and_not_owed(self, case: Case) -> None:
        model = taught(case.bare, min_cosine=-1.0)
        guard = model.attmemo.guarded.guard
        guard.drawn = 1.0
        guard.margin.least = 2.0  # no answer is as sure
        assert worst(ask(model, BOTH), run(case.exact, BOTH), BOTH) <= NEAR
        assert not model.attmemo.deferred

    def test_an_answer_that_changed_is_held_against_its_slot(
        self, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = owing(case)
        known = guard_of(model)["changes_known"]
        monkeypatch.setattr(model.attmemo.guarded.answers, "differ", lambda *_: True)
        model.attmemo.flush()
        assert guard_of(model)["changed"] == len(LENGTHS)
        assert guard_of(model)["changes_known"] < known

    def test_a_request_pays_nothing_however_much_is_owed(self, case: Case) -> None:
        model = owing(case)
        verified = guard_of(model)["verified"]
        for _ in range(4):
            ask(model, BOTH)
        assert len(model.attmemo.deferred) == 5 * len(LENGTHS)
        assert guard_of(model)["verified"] == verified

    def test_answers_are_verified_while_no_request_runs(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("attmemo.guard.idle.QUIET", 0.01)
        model = taught(case.bare, min_cosine=-1.0)
        model.attmemo.guarded.guard.drawn = 1.0
        before = guard_of(model)["verified"]
        ask(model, BOTH)
        assert until(lambda: guard_of(model)["verified"] == before + len(LENGTHS))
        model.attmemo.undo()


class TestForgotten:
    """What cannot be verified any more is no sample."""

    def verified(self, model: Any) -> tuple[int, int]:
        """Verified answers, and those owed after all is paid."""
        assert model.attmemo.flush()
        return guard_of(model)["verified"], len(model.attmemo.deferred)

    def test_after_an_alarm(self, case: Case) -> None:
        model = owing(case)
        guard = model.attmemo.guarded.guard
        guard._alarm()
        assert self.verified(model) == (0, 0)

    def test_once_the_weights_are_others(self, case: Case) -> None:
        model = owing(case)
        before = guard_of(model)["verified"]
        with torch.no_grad():
            next(model.parameters()).add_(0.1)
        assert self.verified(model) == (before, 0)

    def test_once_the_head_is_another(self, case: Case) -> None:
        model = owing(case)
        before = guard_of(model)["verified"]
        with torch.no_grad():
            (model.classifier if hasattr(model, "classifier") else model.pooler.dense).weight.mul_(-1.0)
        assert self.verified(model) == (before, 0)
        assert guard_of(model)["changed"] == 0

    def test_nothing_is_owed_while_a_module_has_a_hook(self, case: Case) -> None:
        model = taught(case.bare, min_cosine=-1.0)
        model.attmemo.guarded.guard.drawn = 1.0
        seen: list[int] = []
        hook = model.get_input_embeddings().register_forward_hook(lambda *given: seen.append(1))
        ask(model, BOTH)
        assert not model.attmemo.deferred
        assert done(model)["sampled"] == len(LENGTHS)
        hook.remove()

    def test_by_a_guard_that_begins_anew(self, case: Case) -> None:
        model = owing(case)
        model.attmemo.guard_anew(Guard(0.01, 0.95))
        assert self.verified(model) == (0, 0)

    def test_in_training(self, case: Case) -> None:
        model = owing(case)
        before = guard_of(model)["verified"]
        model.train()
        drawn = torch.get_rng_state()
        assert self.verified(model) == (before, 0)
        assert torch.equal(torch.get_rng_state(), drawn), "nothing was run"

    def test_if_the_model_fails(self, case: Case) -> None:
        model = owing(case)
        before, waiting = guard_of(model)["verified"], model.attmemo.deferred._parts

        def fail(*_: Any, **__: Any) -> Any:
            raise RuntimeError("no memory is left")

        waiting[0] = replace(waiting[0], forward=fail)
        assert self.verified(model) == (before, 0)
        assert any("no memory is left" in text for text in model.attmemo.stats()["failures"])

    def test_where_verifying_fails_again_and_again_nothing_is_reused_any_more(
        self, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = owing(case)

        def fail(*_: Any) -> Any:
            raise RuntimeError("answers cannot be compared")

        monkeypatch.setattr(model.attmemo.guarded.answers, "differ", fail)
        assert guard_of(model)["state"] == "certified"
        for _ in range(FAILS):
            ask(model, BOTH)
            assert model.attmemo.flush()
        assert guard_of(model)["state"] == "alarm"
        before = guard_of(model)["done"]["reused"]
        for _ in range(FAILS):
            assert worst(ask(model, BOTH), run(case.exact, BOTH), BOTH) <= NEAR
        assert guard_of(model)["done"]["reused"] == before

    def test_once_the_model_is_disabled(self, case: Case) -> None:
        model = owing(case)
        model.attmemo.disable()
        assert not model.attmemo.deferred

    def test_in_a_forked_child(self, case: Case) -> None:
        model = owing(case)

        def take() -> None:
            assert model.attmemo.deferred._take(AT_ONCE) is None

        assert in_child(take) == 0
        assert len(model.attmemo.deferred) == len(LENGTHS)

    def test_nothing_is_forgotten_while_threads_ask(self, case: Case) -> None:
        model = taught(case.bare, min_cosine=-1.0)
        guard = model.attmemo.guarded.guard
        guard.drawn = 1.0
        before = guard_of(model)["verified"]
        threads = [threading.Thread(target=lambda: [ask(model, BOTH) for _ in range(4)]) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert model.attmemo.flush()
        found = done(model)
        assert found["reused"] + found.get("sampled", 0) == 12 * len(LENGTHS)
        assert guard_of(model)["verified"] == before + 12 * len(LENGTHS), "each was verified once"
        assert not model.attmemo.stats()["failures"]


def test_only_so_many_answers_are_owed(case_one: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "MOST", 2)
    model = owing(case_one)
    assert len(model.attmemo.deferred) == 2
    assert done(model)["sampled"] == len(LENGTHS) - 2


@pytest.fixture(scope="module", name="case_one")
def _case_one() -> Case:
    return Case("BERT classifier")


def test_a_verdict_says_whether_the_answer_is_one_of_a_record() -> None:
    assert [verdict.name for verdict in Verdict if verdict.serves] == ["SERVE", "OWE"]


def test_the_thread_for_idle_times_ends_with_the_memoization(case_one: Case) -> None:
    model = owing(case_one)
    idle: Idle = model.attmemo.deferred.idle
    thread = idle._thread
    assert thread is not None
    assert thread.is_alive()
    model.attmemo.undo()
    assert not thread.is_alive()


class TestDeferred:
    """What waits, on a model of one layer."""

    def made(self, rows: int = 0) -> tuple[nn.Linear, Deferred, list[Part]]:
        """A model, what waits of its forwards, and the parts that were taken."""
        model, seen = nn.Linear(4, 2), list[Part]()
        model.eval()
        own = Deferred(model)
        if rows:
            given = torch.arange(4.0 * rows).view(rows, 4)
            own.add(model, ((given,), {}), None, range(rows), rows, seen.append, "owed")
        return model, own, seen

    def test_a_forward_is_taken_some_sequences_at_a_time_and_each_once(self) -> None:
        _, own, seen = self.made(2 * AT_ONCE + 1)
        assert len(own) == 2 * AT_ONCE + 1
        own.compare_all()
        assert [len(part.places) for part in seen] == [AT_ONCE, AT_ONCE, 1]
        assert [place for part in seen for place in part.places] == list(range(2 * AT_ONCE + 1))
        given = torch.cat([part.inputs[0][0] for part in seen])
        assert torch.equal(given, torch.arange(4.0 * len(given)).view(-1, 4)), "each with its own arguments"
        assert len(own) == 0

    def in_a_pause(
        self, monkeypatch: pytest.MonkeyPatch, each: float, seconds: float, request: Sequence[str] = ()
    ) -> list[int]:
        """The sequences of each piece of a part, where a sequence is thought to take 1 ms.

        `each`: what a sequence does take, in seconds; `request`: what a request does in the second piece.
        """
        model, own, _ = self.made()
        now, pieces = 0.0, list[int]()

        def compare(part: Part) -> bool:
            nonlocal now
            now += each * len(part.places)
            pieces.append(len(part.places))
            for does in request if len(pieces) == 2 else ():
                getattr(own.idle, does)()
            return True

        monkeypatch.setattr(deferred, "perf_counter", lambda: now)
        given, count = torch.ones(deferred.MOST, 4), deferred.MOST
        own.add(model, ((given,), {}), None, range(count), count, compare, "owed")
        own._each["owed"] = deque([0.001])
        own.idle._since = 0  # as where a part begins
        assert own.do_part(seconds)
        return pieces

    @pytest.mark.parametrize(
        ("seconds", "pieces"), [(0.0101, [2, 2, 2, 2]), (1.0, [IN_A_PAUSE // 4] * 4), (0.001, [1]), (0.0, [AT_ONCE])]
    )
    def test_in_a_pause_of_known_length_as_many_are_taken_as_fit(
        self, monkeypatch: pytest.MonkeyPatch, seconds: float, pieces: list[int]
    ) -> None:
        assert self.in_a_pause(monkeypatch, 0.001, seconds) == pieces

    @pytest.mark.parametrize("request_does", [["began"], ["began", "ended"], ["close"]])
    def test_where_a_request_comes_early_the_rest_of_a_part_waits(
        self, monkeypatch: pytest.MonkeyPatch, request_does: list[str]
    ) -> None:
        assert self.in_a_pause(monkeypatch, 0.001, 0.0101, request_does) == [2, 2]

    def test_what_takes_an_unknown_time_is_not_begun_in_the_midst_of_a_pause(self) -> None:
        model, own, _ = self.made()
        seen = list[str]()
        for kind in ("owed", "grown"):
            own.add(
                model, ((torch.ones(1, 4),), {}), None, [0], 1, lambda part: bool(seen.append(part.kind)) or True, kind
            )  # fmt: skip
        own._each["owed"] = deque([0.001])
        assert own.do_part(1.0)
        assert seen == ["owed"]
        assert not own.do_part(1.0)
        assert seen == ["owed", "grown"]

    def test_a_part_that_takes_longer_than_it_was_thought_to_ends_earlier(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:  # fmt: skip
        assert self.in_a_pause(monkeypatch, 0.0025, 0.0101) == [2]

    def test_a_part_that_says_nothing_any_more_tells_no_time(self) -> None:
        model, own, _ = self.made()
        for found in (True, False):
            given = torch.ones(1, 4)
            own.add(model, ((given,), {}), None, [0], 1, lambda _, found=found: found, "owed")
            own.do_part(0.0)
            assert len(own._each["owed"]) == 1

    def test_who_compares_all_waits_for_what_another_thread_compares(self) -> None:
        model, own, _ = self.made()
        begun, may_end = threading.Event(), threading.Event()

        def compare(part: Part) -> bool:
            begun.set()
            return may_end.wait(60.0)

        own.add(model, ((torch.ones(1, 4),), {}), None, [0], 1, compare, "owed")
        other = threading.Thread(target=own.do_part, args=(0.0,))
        other.start()
        assert begun.wait(60.0)
        waits = threading.Thread(target=own.compare_all)
        waits.start()
        waits.join(0.1)
        assert waits.is_alive()
        may_end.set()
        for thread in (other, waits):
            thread.join(60.0)
            assert not thread.is_alive()

    def test_what_all_sequences_share_is_copied_too(self) -> None:
        model, own, seen = self.made()
        shared = torch.ones(1, 4)
        own.add(model, ((torch.ones(2, 4),), {"position_ids": shared}), None, [0, 1], 2, seen.append, "owed")
        shared.zero_()
        own.compare_all()
        assert seen[0].inputs[1]["position_ids"].sum() == 4

    def test_what_the_caller_writes_into_its_arguments_afterwards_is_not_seen(self) -> None:
        model, own, seen = self.made()
        given = torch.ones(2, 4)
        own.add(model, ((given,), {"attention_mask": given}), given, [0, 1], 2, seen.append, "owed")
        given.zero_()
        own.compare_all()
        (part,) = seen
        assert part.inputs[0][0].sum() == 8
        assert part.inputs[1]["attention_mask"].sum() == 8
        assert part.mask is not None
        assert part.mask.sum() == 8

    @pytest.mark.parametrize("change", ["written", "replaced", "trains"])
    def test_a_part_is_left_out_once_the_model_is_another(self, change: str) -> None:
        model, own, seen = self.made(2)
        if change == "written":
            with torch.no_grad():
                model.weight.mul_(2.0)
        elif change == "replaced":
            model.weight = nn.Parameter(model.weight.detach().clone())
        else:
            model.train()
        own.compare_all()
        assert not seen
        model.eval()
        own.add(model, ((torch.ones(1, 4),), {}), None, [0], 1, seen.append, "owed")
        own.compare_all()
        assert len(seen) == 1, "what came later is of this model"

    def test_to_learn_from_wait_half_as_many_as_may_wait(self) -> None:
        _, own, _ = self.made(deferred.MOST // 2)
        assert own.spare == 0
        assert own.room == deferred.MOST // 2

    def test_while_pauses_are_used_few_wait_to_be_learned_from(self) -> None:
        model, own, seen = self.made()

        def add(kind: str, count: int) -> None:
            own.add(model, ((torch.ones(count, 4),), {}), None, range(count), count, seen.append, kind)

        add("owed", deferred.BEHIND)
        add(deferred.LEARNED, deferred.BEHIND)
        assert own.takes(1), "no pause was used: requests may have come all at once"
        assert own.idle.part()
        assert not own.takes(1), "the part was owed, and what there is to learn from gets old"
        while len(own) >= deferred.BEHIND:
            own.do_part(0.0)
        assert own.takes(1)
        add(deferred.LEARNED, 1 + deferred.AT_ONCE)
        assert not own.takes(1)
        for _ in range(GAPS):
            own.idle.began()
            own.idle.ended()
        assert own.takes(own.spare), "no pause was used for a while"
        assert not own.takes(own.spare + 1)

    def test_what_is_compared_in_8_bits_leaves_pauses_to_what_is_learned_from(self) -> None:
        model, own, seen = self.made()
        own.idle.part()
        for kind, other in ((KIND, deferred.LEARNED), (deferred.LEARNED, f"{KIND} and exact")):
            own.add(model, ((torch.ones(16, 4),), {}), None, range(16), 16, seen.append, kind)
            assert not own.takes(1, kind)
            assert own.takes(1, other)

    def test_without_a_model_nothing_may_wait(self) -> None:
        own = Deferred()
        assert own.room == own.spare == 0


class TestLearned:
    """A guard that may verify nothing beside requests learns while no request runs."""

    def learning(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> Any:
        model = taught(case.bare, min_cosine=-1.0)
        guard = model.attmemo.guarded.guard
        guard.certificate.adopt(Counts())
        guard._stands = False
        model.attmemo.planner.times = TimeAccount()
        monkeypatch.setattr(model.attmemo.planner.times, "ask", lambda *_: False)
        return model

    def test_answers_are_exact_meanwhile_and_their_records_are_tried(
        self, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = self.learning(case, monkeypatch)
        before = model.attmemo.stats()
        assert worst(ask(model, BOTH), run(case.exact, BOTH), BOTH) <= NEAR
        assert len(model.attmemo.deferred) == len(LENGTHS)
        assert guard_of(model)["verified"] == 0
        guard = model.attmemo.guarded.guard
        compared, own = list[Verdict](), guard.compared
        monkeypatch.setattr(guard, "compared", lambda one, *more: compared.append(one) or own(one, *more))
        assert model.attmemo.flush()
        found, after = guard_of(model), model.attmemo.stats()
        assert compared == [Verdict.SAMPLE] * len(LENGTHS)
        assert found["verified"] >= len(LENGTHS) - 1, "an answer below the margin is no sample"
        assert found["done"].get("reused", 0) == before["guard"]["done"].get("reused", 0)
        assert after["sequences"] == before["sequences"] + len(LENGTHS), "a request is counted once"
        assert 0 < after["rows_afterwards"] < sum(LENGTHS), "what changed was computed again, and nothing else"
        assert not after["failures"]

    def test_an_input_that_is_asked_again_is_no_second_sample(
        self, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = self.learning(case, monkeypatch)
        for inputs in (BOTH, BOTH, rows_of(BOTH, 0, 0, 1)):
            ask(model, inputs)
            assert model.attmemo.flush()
        assert guard_of(model)["verified"] <= len(LENGTHS)

    def test_nothing_is_learned_under_autocast(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        """There the original code computes in another type."""
        model = self.learning(case, monkeypatch)
        with torch.autocast("cpu", torch.bfloat16):
            ask(model, BOTH)
        assert not model.attmemo.deferred

    def test_a_hook_that_came_since_sees_no_other_requests(
        self, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, seen = self.learning(case, monkeypatch), list[int]()
        ask(model, BOTH)
        hook = model.get_input_embeddings().register_forward_hook(lambda *given: seen.append(1))
        assert model.attmemo.flush()
        assert not seen
        assert guard_of(model)["verified"] == 0
        hook.remove()

    def test_inputs_with_nothing_alike_become_records(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        model = self.learning(case, monkeypatch)
        records = model.attmemo.stats()["records"]
        strange = batch_of(LENGTHS, 4321)
        ask(model, strange)
        assert model.attmemo.flush()
        assert model.attmemo.stats()["records"] == records + len(LENGTHS)
        assert not model.attmemo.stats()["failures"]

    def test_an_answer_that_changes_is_no_evidence_and_counts(
        self, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = self.learning(case, monkeypatch)
        known = guard_of(model)["changes_known"]
        ask(model, BOTH)
        monkeypatch.setattr(model.attmemo.guarded.answers, "differ", lambda *_: True)
        assert model.attmemo.flush()
        assert guard_of(model)["changes_known"] < known

    def test_as_more_may_be_served_records_are_tried_for_requests_again(
        self, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = self.learning(case, monkeypatch)
        guard, again = model.attmemo.guarded.guard, list[int]()
        assert not guard.stands
        monkeypatch.setattr(model.attmemo.guarded.planner.times, "try_again", lambda: again.append(1))
        monkeypatch.setattr(model.attmemo.guarded.answers, "differ", lambda *_: False)
        turns = before = 0
        while not guard.stands and turns < 100:
            before = len(again)
            model.attmemo.planner._tried_before.clear()  # else an input counts once
            ask(model, BOTH)
            assert model.attmemo.flush()
            turns += 1
        assert 1 < turns < 100
        assert before == 2, "as its bound falls"
        assert again == [1, 1, 1], "and with the certificate"
