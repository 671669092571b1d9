"""Answers that are owed: served from records first, and verified afterwards."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from guarded import BOTH, LENGTHS, Case, done, field, rows_of, run, taught, until, worst
from packed_models import NEAR, Inputs, gap
from torch import Tensor

from attmemo.guard import deferred as debts_module
from attmemo.guard.certificate import Counts
from attmemo.guard.deferred import Debt, batches
from attmemo.guard.forward import FAILS
from attmemo.guard.guard import Guard
from attmemo.guard.idle import Idle
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
        assert len(model.attmemo.guarded.debts) == len(LENGTHS)
        computed = model.attmemo.stats()["rows_computed"]
        assert model.attmemo.flush()
        found = guard_of(model)
        assert found["verified"] == before + len(LENGTHS)
        assert found["verified_afterwards"] == len(LENGTHS)
        assert found["changed"] == changed_classes(seen, exact)
        assert model.attmemo.stats()["rows_computed"] - computed == sum(LENGTHS), "what that took is counted"
        assert model.attmemo.stats()["rows_afterwards"] == sum(LENGTHS)
        assert not model.attmemo.guarded.debts
        assert not model.attmemo.stats()["failures"]

    def test_before_there_is_a_certificate_every_served_answer_is_owed_and_counts(self, case: Case) -> None:
        model = taught(case.bare, min_cosine=-1.0)
        guard = model.attmemo.guarded.guard
        guard.drawn = 0.0
        guard.certificate.adopt(Counts(same=200, requests=300))
        assert not guard.certified
        assert guard.certificate.affords()
        ask(model, BOTH)
        assert len(model.attmemo.guarded.debts) == len(LENGTHS)

    def test_of_certified_answers_a_share_is_owed(self, case: Case) -> None:
        model = taught(case.bare, min_cosine=-1.0)
        guard = model.attmemo.guarded.guard
        ask(model, BOTH)
        assert not model.attmemo.guarded.debts, "nothing is drawn"
        guard.drawn = 1.0
        ask(model, BOTH)
        assert len(model.attmemo.guarded.debts) == len(LENGTHS)

    def test_of_equal_sequences_of_a_batch_one_is_owed(self, case: Case) -> None:
        model = owing(case, rows_of(BOTH, 0, 0, 1, 0))
        assert len(model.attmemo.guarded.debts) == 2
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
        assert not model.attmemo.guarded.debts

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
        assert len(model.attmemo.guarded.debts) == 5 * len(LENGTHS)
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
        return guard_of(model)["verified"], len(model.attmemo.guarded.debts)

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
        assert not model.attmemo.guarded.debts
        assert done(model)["sampled"] == len(LENGTHS)
        hook.remove()

    def test_by_a_guard_that_begins_anew(self, case: Case) -> None:
        model = owing(case)
        handle, debts = model.attmemo, model.attmemo.guarded.debts
        (kept, *_) = debts.take(1)
        handle.guard_anew(Guard(0.01, 0.95))
        assert not debts
        debts.add(kept)
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
        before, debts = guard_of(model)["verified"], model.attmemo.guarded.debts

        def fail(*_: Any, **__: Any) -> Any:
            raise RuntimeError("no memory is left")

        for debt in debts.take(len(debts)):
            debts.add(replace(debt, forward=fail))
        assert self.verified(model) == (before, 0)
        assert any("no memory is left" in text for text in model.attmemo.stats()["failures"])

    def test_where_verifying_fails_again_and_again_nothing_is_reused_any_more(
        self, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = owing(case)

        def fail(*_: Any) -> Any:
            raise RuntimeError("answers cannot be compared")

        monkeypatch.setattr(model.attmemo.guarded.answers, "differ", fail)
        for _ in range(FAILS):
            assert guard_of(model)["state"] == "certified"
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
        assert not model.attmemo.guarded.debts

    def test_in_a_forked_child(self, case: Case) -> None:
        model = owing(case)
        child = os.fork()
        if child == 0:
            os._exit(len(model.attmemo.guarded.debts.take(100)))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert len(model.attmemo.guarded.debts) == len(LENGTHS)

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


class TestBatches:
    def debts(self, case: Case, *inputs: Inputs) -> list[Debt]:
        """What a model owes that was asked these batches."""
        model = owing(case, inputs[0])
        for more in inputs[1:]:
            ask(model, more)
        debts = model.attmemo.guarded.debts
        return debts.take(len(debts))

    def test_answers_of_different_lengths_are_computed_in_one_batch(self, case: Case) -> None:
        short = {name: value[:, :26] for name, value in rows_of(BOTH, 4, 5).items()}
        debts = self.debts(case, rows_of(BOTH, 0), short)
        assert sorted({int(debt.mask.shape[1]) for debt in debts if debt.mask is not None}) == [26, 33]
        (batch,) = batches(debts, 0)
        kwargs, mask = batch.inputs[1], batch.mask
        assert [id(debt) for debt in batch.debts] == [id(debt) for debt in debts]
        assert isinstance(mask, Tensor)
        assert mask.shape == (3, 33)
        assert mask.sum(1).tolist() == [30, 25, 20]
        seen = field(ask(case.exact, kwargs))
        for row, one in enumerate(debts):
            alone = field(ask(case.exact, one.inputs[1]))[0]
            at = slice(int(mask[row].sum())) if seen.dim() == 3 else slice(None)
            assert gap(seen[row][at], alone[at]) <= NEAR

    def test_arguments_that_make_no_batch_are_computed_one_by_one(self, case: Case) -> None:
        debts = self.debts(case, rows_of(BOTH, 0, 1))
        kinds = torch.zeros(1, 33, dtype=torch.int64)
        odd: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"more": kinds.float()}, {"more": kinds.float()}), ({"more": kinds[:, :3]}, {"more": kinds[:, :3]}),
            ({"more": kinds}, {"more": kinds.bool()}), ({"more": kinds}, {"more": None}), ({"more": kinds}, {}),
            ({"more": 1}, {"more": 2}), ({"more": [1]}, {"more": [1, 2]}), ({"more": [1]}, {"more": (1,)}),
        ]  # fmt: skip
        for parts in odd:
            made = [
                replace(debt, inputs=((), debt.inputs[1] | more)) for debt, more in zip(debts, parts, strict=True)
            ]
            apart = zip(batches(made, 0), made, strict=True)
            assert all(one.debts[0] is debt and one.inputs[1] is debt.inputs[1] for one, debt in apart), parts
        assert len(batches([replace(debt, mask=None) for debt in debts], 0)) == 2
        assert len(batches([debts[0], replace(debts[1], forward=print)], 0)) == 2

    def test_settings_that_all_share_stay_as_they_are(self, case: Case) -> None:
        debts = self.debts(case, rows_of(BOTH, 0, 1))
        more = {"return_dict": True, "extra": ("a", None)}
        told = [replace(debt, inputs=((), debt.inputs[1] | more)) for debt in debts]
        (batch,) = batches(told, 0)
        kwargs = batch.inputs[1]
        assert (kwargs["return_dict"], kwargs["extra"]) == (True, ("a", None))
        other = replace(told[1], inputs=((), told[1].inputs[1] | {"return_dict": False}))
        assert len(batches([told[0], other], 0)) == 2

    def test_one_that_fits_no_other_leaves_the_others_together(self, case: Case) -> None:
        first, second, third = self.debts(case, rows_of(BOTH, 0, 1, 2))
        odd = replace(second, inputs=((), second.inputs[1] | {"return_dict": False}))
        assert [len(batch.debts) for batch in batches([first, odd, third], 0)] == [2, 1]

    def test_ids_get_the_id_of_padding_and_positional_arguments_none(self, case: Case) -> None:
        short = {name: value[:, :26] for name, value in rows_of(BOTH, 4).items()}
        one, other = self.debts(case, rows_of(BOTH, 0), short)
        (batch,) = batches([one, other], 7)
        assert batch.inputs[1]["input_ids"][1, 26:].tolist() == [7] * 7
        assert batch.inputs[1]["attention_mask"][1, 26:].tolist() == [0] * 7
        assert len(batches([one, other], None)) == 2, "there is no padding"
        placed = [replace(debt, inputs=((debt.inputs[1]["input_ids"],), {})) for debt in (one, other)]
        assert len(batches(placed, 7)) == 2, "it is not known what these numbers are"


def test_only_so_many_answers_are_owed(case_one: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debts_module, "MOST", 2)
    model = owing(case_one)
    assert len(model.attmemo.guarded.debts) == 2
    assert done(model)["sampled"] == len(LENGTHS) - 2


@pytest.fixture(scope="module", name="case_one")
def _case_one() -> Case:
    return Case("BERT classifier")


def test_a_verdict_says_whether_the_answer_is_one_of_a_record() -> None:
    assert [verdict.name for verdict in Verdict if verdict.serves] == ["SERVE", "OWE"]


def test_the_thread_for_idle_times_ends_with_the_memoization(case_one: Case) -> None:
    model = owing(case_one)
    idle: Idle = model.attmemo.guarded.idle
    thread = idle._thread
    assert thread is not None
    assert thread.is_alive()
    model.attmemo.undo()
    assert not thread.is_alive()
