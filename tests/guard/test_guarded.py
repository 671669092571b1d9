"""`reuse="rows"` with a budget: what was not verified is answered exactly, and no failure costs a request."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from families import FAMILIES
from guarded import (
    BASE,
    BOTH,
    FIRST,
    LENGTHS,
    NAMES,
    SECOND,
    Case,
    certify,
    done,
    field,
    guarded,
    rows_of,
    run,
    sure,
    taught,
    trusting,
    variant,
    worst,
)
from packed_models import NEAR, batch, gap, rows_database
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from attmemo import memoize
from attmemo.guard import pooled
from attmemo.guard.certificate import Counts
from attmemo.guard.guard import Guard
from attmemo.guard.time_account import TimeAccount

STRICT = 1 - 1e-10
"""A cosine that rounding reaches, and nothing that was taken from another input."""


FEW, MANY = 5, 9
"""Rows of one of its sequences: a token with a neighbour on each side, and the ends; with two neighbours more."""


def comparisons(guard: Any) -> list[tuple[int, bool]]:
    """What the guard compares from now on: how well changes were verified, and whether the answer was served."""
    found: list[tuple[int, bool]] = []
    own = guard.compared

    def noted(verdict: Any, gaps: Any, cover: int, *rest: Any) -> bool:
        found.append((cover, verdict.serves))
        return bool(own(verdict, gaps, cover, *rest))

    guard.compared = noted
    return found


@pytest.fixture(params=NAMES, scope="module", name="case")
def _case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


@pytest.fixture(scope="module", name="classifier")
def _classifier() -> Case:
    return Case("BERT classifier")


class TestExact:
    def test_an_unverified_request_gets_the_exact_answer(self, case: Case) -> None:
        model = guarded(case.bare)
        for inputs in (BASE, variant(FIRST), variant(FIRST, by=2), BOTH, variant(SECOND, by=7), batch([9, 12], 8)):
            assert worst(run(model, inputs), run(case.exact, inputs), inputs) <= NEAR
        assert done(model).keys() <= {"whole", "learned", "sampled"}
        assert done(model)["learned"] > 0
        assert not model.attmemo.stats()["failures"]

    def test_an_unverified_request_is_exact_once_the_guard_is_certified(self, case: Case) -> None:
        model = certify(guarded(case.bare))
        for inputs in (BASE, BOTH):
            assert worst(run(model, inputs), run(case.exact, inputs), inputs) <= NEAR
        assert done(model) == {"whole": 6, "learned": 6}

    def test_the_very_input_again_is_served_and_counted(self, case: Case) -> None:
        model = guarded(case.bare)
        run(model, BASE)
        before = done(model)
        computed = model.attmemo.stats()["rows_computed"]
        assert worst(run(model, BASE), run(case.exact, BASE), BASE) <= NEAR
        assert done(model) == before | {"repeated": 6}
        stats = model.attmemo.stats()
        assert stats["rows_computed"] == computed, "the record has all"
        assert (stats["reused"], stats["repeated"]) == (0, 6)
        assert stats["guard"]["verified"] == 0, "nothing was taken on trust"

    def test_the_very_input_is_exact_where_last_hidden_states_are_rounded(
        self, classifier: Case, tmp_path: Path
    ) -> None:
        path = rows_database(classifier.bare, [BASE], tmp_path / "db", "float16")
        model = guarded(classifier.bare, path)
        first = run(model, BASE)
        assert worst(first, run(classifier.exact, BASE), BASE) <= NEAR
        assert torch.equal(run(certify(model), BASE).logits, first.logits)
        assert done(model) == {"whole": 12}
        assert model.attmemo.stats()["offered"] == {}, "there is a record"

    def test_the_very_input_is_repeated_where_only_k_and_v_are_rounded(self, tmp_path: Path) -> None:
        bare = FAMILIES["BERT"].make().to(torch.bfloat16)
        model = guarded(bare, rows_database(bare, [BASE], tmp_path / "db", "int8"))
        exact = memoize(copy.deepcopy(bare), reuse="none")
        assert torch.equal(field(run(model, BASE)), field(run(exact, BASE)))
        assert done(model) == {"repeated": 6}

    def test_prepared_records_and_new_ones_serve_one_batch(self, case: Case, tmp_path: Path) -> None:
        model = guarded(case.bare, rows_database(case.bare, [rows_of(BASE, 0, 1, 2)], tmp_path / "db"))
        run(model, rows_of(BASE, 3, 4, 5))
        assert worst(run(model, BASE), run(case.exact, BASE), BASE) <= NEAR
        assert done(model) == {"whole": 3, "repeated": 6}


    def test_a_model_that_was_just_memoized_has_seen_no_request_and_keeps_no_record(self) -> None:
        stats = guarded(FAMILIES["BERT"].make()).attmemo.stats()
        assert stats["guard"]["requests"] == stats["records"] == 0


class TestServed:
    def test_a_verified_request_is_served_from_its_record(self, case: Case) -> None:
        model = taught(case.bare, min_cosine=-1.0)
        assert done(model) == {"whole": 6, "learned": 12}
        seen, expected = run(model, BOTH), run(case.exact, BOTH)
        assert done(model)["reused"] == 6
        assert worst(seen, expected, BOTH) > NEAR, "an approximation"
        near = torch.nn.functional.cosine_similarity(field(seen).flatten(), field(expected).flatten(), dim=0)
        assert float(near) > 0.5
        stats = model.attmemo.stats()["guard"]
        assert stats["state"] == "certified"
        assert json.loads(json.dumps(model.attmemo.stats())) == model.attmemo.stats()

    def test_what_is_drawn_while_too_many_answers_are_owed_is_answered_exactly(
        self, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("attmemo.guard.deferred.MOST", 0)
        model = taught(case.bare, min_cosine=-1.0)
        model.attmemo.guarded.guard.drawn = 1.0
        assert worst(run(model, BOTH), run(case.exact, BOTH), BOTH) <= NEAR
        assert done(model)["sampled"] == 6
        assert model.attmemo.stats()["guard"]["verified"] == 100_006


    def test_nothing_is_served_that_the_account_does_not_afford(self, case: Case) -> None:
        model = taught(case.bare, min_cosine=-1.0)
        model.attmemo.guarded.guard.certificate.adopt(Counts(same=100))  # which makes one cost .03
        first = rows_of(BOTH, 0)
        assert worst(run(model, first), run(case.exact, first), first) <= NEAR
        assert done(model)["sampled"] == 1

    def test_a_batch_mixes_what_is_served_what_is_learned_and_what_is_new(self, case: Case) -> None:
        model = taught(case.bare, min_cosine=-1.0)
        parts = [BASE, BOTH, variant(FIRST, by=40), batch(LENGTHS, 99), BOTH, variant(15 - 1, by=3)]
        mixed = {name: torch.stack([part[name][row] for row, part in enumerate(parts)]) for name in BASE}
        before = done(model)
        seen, expected = run(model, mixed), run(case.exact, mixed)
        assert done(model)["reused"] - before.get("reused", 0) == 2
        assert done(model)["repeated"] == 1
        assert done(model)["learned"] - before["learned"] == 2
        assert done(model)["whole"] - before["whole"] == 1
        for row, n in enumerate(LENGTHS):
            one = field(seen)[row], field(expected)[row]
            near = gap(one[0][:n], one[1][:n])
            assert (near > NEAR) == (row in (1, 4)), f"row {row}"

    @pytest.mark.parametrize("row", [0, 3])
    def test_a_batch_of_one(self, case: Case, row: int) -> None:
        model = guarded(case.bare, min_cosine=-1.0)
        one = [rows_of(inputs, row) for inputs in (BASE, variant(FIRST), variant(SECOND), BASE, BOTH)]
        for inputs in one[:4]:
            assert worst(run(model, inputs), run(case.exact, inputs), inputs) <= NEAR
        certify(model)
        assert worst(run(model, one[4]), run(case.exact, one[4]), one[4]) > NEAR
        assert done(model) == {"whole": 1, "learned": 2, "repeated": 1, "reused": 1}


@pytest.fixture(scope="module", name="torn")
def _torn(classifier: Case) -> Any:
    """A classifier that is sure of three of the answers it is served, and of three not; and which these are."""
    model = copy.deepcopy(classifier.bare)
    serving = trusting(taught(model))
    serving.attmemo.guarded.guard.margin.least = 0.0
    apart = run(serving, BOTH).logits.diff(dim=1).abs().flatten()
    with torch.no_grad():
        model.classifier.weight.mul_(float(2 * torch.atanh(torch.tensor(0.5)) / apart.sort().values[2:4].mean()))
    low = apart < apart.sort().values[2:4].mean()
    assert int(low.sum()) == 3
    return model, low


class TestMargin:
    def test_an_answer_below_the_margin_is_replaced_and_others_stay(self, torn: Any) -> None:
        bare, low = torn
        model, serving = trusting(taught(bare)), trusting(taught(bare))
        serving.attmemo.guarded.guard.margin.least = 0.0
        approximate, exact = run(serving, BOTH).logits, run(bare, BOTH).logits
        assert done(serving)["reused"] == 6
        seen = run(model, BOTH).logits
        assert done(model)["reused"] == 3
        assert done(model)["below the margin"] == 3
        assert torch.equal(seen[~low], approximate[~low])
        assert gap(seen[low], exact[low]) <= NEAR
        assert gap(approximate[low], exact[low]) > NEAR, "else nothing was replaced"
        assert not model.attmemo.stats()["failures"]

    @pytest.mark.parametrize("form", ["output", "dict", "tuple in output"])
    def test_every_field_is_replaced_and_the_type_stays(self, torn: Any, form: str) -> None:
        bare, low = torn
        bare.__class__, own = OutputOf[form], bare.__class__
        try:
            model, serving = trusting(taught(bare)), trusting(taught(bare))
            exact = run(bare, BOTH)
        finally:
            bare.__class__ = own
        serving.attmemo.guarded.guard.margin.least = 0.0
        approximate, seen = run(serving, BOTH), run(model, BOTH)
        assert done(model)["below the margin"] == 3
        assert type(seen) is type(exact)
        assert list(seen) == list(exact)
        assert seen["size"] == 6
        for one, served, right in zip(*map(tensors, (seen, approximate, exact)), strict=True):
            assert torch.equal(one[~low], served[~low])
            for row in torch.where(low)[0].tolist():
                n = LENGTHS[row] if one.dim() == 3 else None
                assert gap(one[row][:n], right[row][:n]) <= NEAR


    def test_a_record_whose_own_answer_is_below_every_margin_is_not_tried(self, torn: Any) -> None:
        model = taught(sure(copy.deepcopy(torn[0]), 1e-4))
        before = model.attmemo.stats()
        run(model, BOTH)
        assert done(model)["left"] == len(LENGTHS)
        assert model.attmemo.stats()["records"] - before["records"] == len(LENGTHS), "computed whole, they are kept"


    def test_the_very_input_is_served_below_the_margin(self, torn: Any) -> None:
        bare, low = torn
        model = guarded(bare)
        run(model, BOTH)
        run(model, BOTH)
        assert bool(low.any())
        assert done(model) == {"whole": 6, "repeated": 6}

    def test_an_answer_below_the_margin_is_replaced_in_a_named_tuple(self, torn: Any) -> None:
        bare, low = torn
        bare.__class__, own = Named, bare.__class__
        try:
            model, exact = trusting(taught(bare)), run(bare, BOTH)
        finally:
            bare.__class__ = own
        seen = run(model, BOTH)
        assert gap(seen.logits[low], exact.logits[low]) <= NEAR


def tensors(value: Any) -> list[Tensor]:
    """All tensors in an output, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [found for item in value for found in tensors(item)] if isinstance(value, list | tuple) else []


class _Fields(hf.BertForSequenceClassification):  # type: ignore[misc]
    def fields(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
        found = self.bert(input_ids, attention_mask=attention_mask)
        pooled = found.pooler_output
        logits = self.classifier(pooled)
        return {"logits": logits, "pooled": pooled, "hidden": found.last_hidden_state, "size": len(logits)}


class _Output(_Fields):
    def forward(self, input_ids: Any = None, attention_mask: Any = None) -> Any:
        return hf.utils.ModelOutput(**self.fields(input_ids, attention_mask))


class _Dict(_Fields):
    def forward(self, input_ids: Any = None, attention_mask: Any = None) -> Any:
        return self.fields(input_ids, attention_mask)


class _Nested(_Fields):
    def forward(self, input_ids: Any = None, attention_mask: Any = None) -> Any:
        found = self.fields(input_ids, attention_mask)
        inner = (found.pop("pooled"), [found.pop("hidden"), None])
        return hf.utils.ModelOutput(**found, inner=inner)


class Named(_Fields):
    def forward(self, input_ids: Any = None, attention_mask: Any = None) -> Any:
        from collections import namedtuple

        found = self.fields(input_ids, attention_mask)
        return namedtuple("Found", list(found))(**found)


OutputOf = {"output": _Output, "dict": _Dict, "tuple in output": _Nested}


class Shifted(hf.BertModel):  # type: ignore[misc]
    """Alters its output where it lies."""

    def forward(self, *given: Any, **more: Any) -> Any:
        found = super().forward(*given, **more)
        found.last_hidden_state.add_(0.5)
        return found


class TestVerification:
    def head(self, case: Case, database: Path, harmful: bool) -> Any:
        """A classifier that gives other classes to what is exact and what is served, or the same to everything."""
        serving = memoize(copy.deepcopy(case.bare), database=database, budget=None, gate=False)
        of_served, of_exact = (run(one.bert, variant(FIRST)).pooler_output[0] for one in (serving, case.bare))
        bare = copy.deepcopy(case.bare)
        with torch.no_grad():
            apart = of_served - of_exact
            middle = apart @ (of_served + of_exact) / 2
            bare.classifier.weight.zero_()
            bare.classifier.bias.zero_()
            bare.classifier.bias[0] = 20.0
            if harmful:
                scale = 20.0 / float(apart @ apart)
                bare.classifier.weight[1] = scale * apart
                bare.classifier.bias[0] = scale * middle
        return bare

    def test_the_models_own_head_says_what_changed(self, classifier: Case, tmp_path: Path) -> None:
        path = rows_database(classifier.bare, [rows_of(BASE, 0)], tmp_path / "db")
        asked = rows_of(variant(FIRST), 0)
        for harmful in (True, False):
            bare = self.head(classifier, path, harmful)
            model = guarded(bare)
            run(model, rows_of(BASE, 0))
            guard = model.attmemo.guarded.guard
            seen: list[bool] = []

            def compared(*given: Any, seen: list[Any] = seen, own: Any = guard.compared) -> bool:
                seen.append(given[4])
                return bool(own(*given))

            guard.compared = compared
            answer = run(model, asked).logits
            assert gap(answer, run(bare, asked).logits) <= 1e-3, "a head that amplifies its rounding"
            assert answer.argmax() == 0
            assert seen == [harmful]

    def test_the_blocks_run_once_for_what_is_verified(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        model = guarded(case.bare)
        run(model, BASE)
        packed = model.attmemo.engine.reuse.packed
        rows: list[int] = []

        def counted(hidden: Tensor, *given: Any, own: Any = packed.run) -> Tensor:
            rows.append(len(hidden))
            found: Tensor = own(hidden, *given)
            return found

        monkeypatch.setattr(packed, "run", counted)
        run(model, variant(FIRST))
        assert done(model)["learned"] == len(LENGTHS)
        assert len(rows) == 1
        assert sum(LENGTHS) < rows[0] < 2 * sum(LENGTHS), "whole, and the changed rows"

    def forwards(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """How often the model runs in each of some requests that are verified; a verification in two runs it too."""
        monkeypatch.setattr(pooled, "BOTH_WAYS", 2)
        run(model, BASE)
        calls: list[int] = []
        model.embeddings.register_forward_hook(lambda *_: calls.append(1))
        counts = []
        for by in range(1, 6):
            calls.clear()
            run(model, variant(FIRST, by=by))
            counts.append(len(calls))
        assert done(model)["learned"] == 5 * len(LENGTHS)
        return counts

    def test_answers_pooled_from_the_blocks_are_verified_without_running_the_model_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bare = FAMILIES["BERT"].make()
        seen: dict[str, list[Any]] = {}
        mask = BASE["attention_mask"][:, :, None]

        def mean(output: Any) -> Tensor:
            hidden = output.last_hidden_state
            own = mask if hidden.shape[:2] == mask.shape[:2] else torch.ones(*hidden.shape[:2], 1)  # of the check
            found: Tensor = (hidden * own).sum(1) / own.sum(1)
            return found

        for rule in ("mean", "cls", mean):
            model = guarded(bare, answer=rule)
            guard = model.attmemo.guarded.guard

            def compared(*given: Any, rule: Any = rule, own: Any = guard.compared) -> bool:
                seen.setdefault(rule if isinstance(rule, str) else "function", []).append(given[3:5])
                return bool(own(*given))

            monkeypatch.setattr(guard, "compared", compared)
            expected = [2, 2, 2, 2, 2] if callable(rule) else [2, 2, 1, 2, 1]
            assert self.forwards(model, monkeypatch) == expected
        assert len(seen["mean"]) == len(seen["function"]) == 5 * len(LENGTHS)
        for (margin, changed), (expected_margin, expected_change) in zip(seen["mean"], seen["function"], strict=True):
            assert margin == pytest.approx(expected_margin, abs=1e-6)
            assert changed == expected_change

    def test_a_model_that_alters_what_its_blocks_gave_is_run_for_each_verification(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = guarded(Shifted(FAMILIES["BERT"].make().config).eval(), answer="mean")
        assert self.forwards(model, monkeypatch) == [2] * 5

    def test_a_change_that_alters_the_answer_is_never_served(self, case: Case) -> None:
        kind = (lambda output: field(output).flatten(1)) if case.bare.__class__.__name__ != "BertModel" else "mean"
        model = taught(case.bare, answer=kind, min_cosine=STRICT)
        state = model.attmemo.guarded.guard.verified.state()
        assert len(state["harm"])
        assert not len(state["values"])
        for inputs in (BOTH, variant(FIRST, by=2), variant(FIRST, SECOND, by=3)):
            assert worst(run(model, inputs), run(case.exact, inputs), inputs) <= NEAR
        assert "reused" not in done(model)
        assert done(model)["learned"] == 30

    def test_samples_are_counted_as_they_were(self, case: Case) -> None:
        for least, changed in ((-1.0, 0), (STRICT, 6)):
            model = taught(case.bare, answer=lambda output: field(output).flatten(1), min_cosine=-1.0)
            guard = model.attmemo.guarded.guard
            guard.certificate.restart()
            guard.margin.least = -1.0  # or an answer far from its record's is no sample
            model.attmemo.guarded.answers.min_cosine = least
            run(model, BOTH)
            counts = guard.certificate.counts
            assert done(model)["sampled"] == 6
            assert (counts.changed, counts.same) == (changed, 6 - changed)


def test_vectors_that_a_classifier_judges_are_reused_as_its_classes() -> None:
    case = Case("BERT")
    with torch.inference_mode():
        seen = field(case.exact(**batch([20] * 64, 11))).mean(1).numpy()
    judge = LogisticRegression(C=1e4, max_iter=1000).fit(seen, seen[:, 0] > np.median(seen[:, 0]))
    model = taught(case.bare, answer=judge)
    model.attmemo.guarded.guard.margin.least = -1.0
    found = run(model, BOTH)
    assert done(model)["reused"] == len(BOTH["input_ids"])
    assert worst(found, run(case.exact, BOTH), BOTH) > NEAR, "answers of records"
    assert not model.attmemo.guarded.answers.are_vectors
    by_itself = memoize(copy.deepcopy(case.bare), budget=0.01, answer=judge)
    assert by_itself.attmemo.reuse == "rows", "classes are reused by default, vectors are not"


class Times(TimeAccount):
    """Times that a test has decided."""

    def __init__(self, reuse: bool) -> None:
        super().__init__()
        self.reuse = reuse
        self.recorded: list[tuple[int, int, bool]] = []

    def ask(self, tokens: int) -> bool:
        return self.reuse

    def record(
        self, tokens: int, sequences: int, seconds: float, reused: bool, verified: int = 0, could: float = 0.0
    ) -> None:
        assert seconds > 0.0
        self.recorded.append((tokens, sequences, reused))


class TestWhetherForwardsTakeLonger:
    def test_where_they_do_nothing_is_looked_up_verified_or_kept(self, classifier: Case) -> None:
        model, exact = taught(classifier.bare), memoize(copy.deepcopy(classifier.bare), reuse="none")
        records, before = model.attmemo.stats()["records"], done(model)
        model.attmemo.planner.times = times = Times(reuse=False)
        seen = run(model, variant(FIRST))
        assert worst(seen, run(exact, variant(FIRST)), BASE) <= NEAR
        stats = model.attmemo.stats()
        assert done(model) == before
        assert stats["records"] == records
        assert stats["not_looked_up"]["records_do_not_pay"] == len(BASE["input_ids"])
        assert [reused for _, _, reused in times.recorded] == [False]

    def test_where_they_do_not_records_serve(self, classifier: Case) -> None:
        model = taught(classifier.bare)
        model.attmemo.planner.times = times = Times(reuse=True)
        run(model, variant(FIRST))
        assert done(model).get("repeated", 0) > 0
        tokens = int(BASE["attention_mask"].sum())
        assert times.recorded == [(tokens, len(BASE["input_ids"]), True)]

    def test_a_forward_that_is_asked_for_without_reuse_is_timed_too(self, classifier: Case) -> None:
        model = taught(classifier.bare)
        model.attmemo.planner.times = times = Times(reuse=True)
        with model.attmemo.observe(reuse=False):
            run(model, variant(FIRST))
        assert [reused for _, _, reused in times.recorded] == [False]

    def test_a_guard_that_begins_anew_times_anew(self, classifier: Case) -> None:
        model = taught(classifier.bare, gate=True)
        before = model.attmemo.planner.times
        model.attmemo.guard_anew(Guard(0.01, 0.95))
        assert model.attmemo.planner.times is not before
        assert model.attmemo.stats()["pays"] is None
