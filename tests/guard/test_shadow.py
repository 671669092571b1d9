"""Shadow mode: every answer is exact, and what would have been reused is found afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from guarded import (
    BASE,
    BOTH,
    FIRST,
    LENGTHS,
    SECOND,
    Case,
    certify,
    done,
    field,
    flush,
    guarded,
    rows_of,
    run,
    variant,
)
from packed_models import Inputs

from attmemo import memoize
from attmemo.errors import ArgumentError
from attmemo.guard.deferred import MOST
from attmemo.guard.guard import Guard
from attmemo.guard.shadow import Shadow
from attmemo.guard.verdict import Verdict
from attmemo.kernels.plan import Evidence

COUNT = len(LENGTHS)


@pytest.fixture(params=["BERT", "BERT classifier"], scope="module", name="case")
def _case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def shadowed(case: Case, **options: Any) -> Any:
    """A model in shadow mode that has verified a change at each of two places."""
    model = guarded(case.bare, shadow=True, min_cosine=-1.0, **options)
    for inputs in (BASE, variant(FIRST), variant(SECOND)):
        run(model, inputs)
    return certify(model)


def shadow_of(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = model.attmemo.stats()["shadow"]
    return found


def ask(model: Any, inputs: Inputs) -> Any:
    with torch.inference_mode():
        return model(**inputs)


def test_every_answer_is_exact_and_those_that_would_be_reused_are_counted(case: Case) -> None:
    model = shadowed(case)
    before = shadow_of(model)
    seen, exact = run(model, BOTH), run(case.exact, BOTH)
    assert torch.equal(field(seen), field(exact)), "the same bits"
    found, stats = shadow_of(model), model.attmemo.stats()
    assert found["seen"] - before["seen"] == found["tried"] - before["tried"] == COUNT
    assert 0 < found["reused"] - before["reused"] <= COUNT
    assert found["reused"] == done(model)["reused"], "as the guard counts them"
    assert stats["reused"] == stats["repeated"] == 0
    assert stats["rows_computed"] >= stats["tokens"]
    assert not stats["failures"]


def test_an_input_that_was_there_would_be_repeated_and_never_changes(case: Case) -> None:
    model = shadowed(case)
    before = shadow_of(model)
    run(model, BASE)
    found = shadow_of(model)
    assert found["repeated"] - before["repeated"] == COUNT
    assert found["changed"] == before["changed"]


def test_answers_that_would_have_changed_are_counted_and_the_guard_learns_of_each(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shadowed(case)
    monkeypatch.setattr(model.attmemo.guarded.answers, "differ", lambda *_: True)
    before, guard = shadow_of(model), model.attmemo.stats()["guard"]
    one = rows_of(BOTH, 0)
    seen = run(model, one)
    assert torch.equal(field(seen), field(run(case.exact, one)))
    assert shadow_of(model)["changed"] - before["changed"] == 1
    assert model.attmemo.stats()["guard"]["changed"] - guard["changed"] == 1


def test_after_an_alarm_nothing_would_be_reused(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shadowed(case)
    model.attmemo.guarded.guard.alarm()
    before = shadow_of(model)
    run(model, BOTH)
    found = shadow_of(model)
    assert found["tried"] - before["tried"] == COUNT
    assert found["reused"] == before["reused"]


def test_requests_without_reuse_are_not_tried(case: Case) -> None:
    model = shadowed(case)
    before = shadow_of(model)
    with model.attmemo.observe(reuse=False) as seen:
        run(model, BOTH)
    assert shadow_of(model) == before
    assert seen.rows == seen.tokens == LENGTHS


def test_answers_are_counted_while_no_more_of_them_may_wait(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shadowed(case)
    before = shadow_of(model)
    monkeypatch.setattr(model.attmemo.deferred, "takes", lambda batch: False)
    run(model, BOTH)
    found = shadow_of(model)
    assert found["seen"] - before["seen"] == COUNT
    assert found["tried"] == before["tried"]


def test_rows_to_compute_are_all(case: Case) -> None:
    model = shadowed(case)
    assert model.attmemo.rows_to_compute([BASE["input_ids"][0].tolist()]) == [len(BASE["input_ids"][0])]


def test_what_idle_times_cannot_try_is_seen_and_not_tried() -> None:
    shadow = Shadow()
    assert shadow.choose(5, 0) == []
    assert len(shadow.choose(300, MOST // 2)) == MOST // 2
    assert shadow.seen == 305
    assert shadow.tried == 0


@pytest.mark.parametrize("verdict", [Verdict.LEARN, Verdict.SAMPLE])
def test_what_would_have_been_computed_is_told_to_the_guard_as_it_is(verdict: Verdict) -> None:
    shadow = Shadow()
    assert shadow.verdict(verdict, Evidence.FULLY, True, True) is verdict
    assert shadow == Shadow()


def test_an_answer_below_the_margin_would_have_been_exact() -> None:
    shadow = Shadow()
    assert shadow.verdict(Verdict.OWE, Evidence.FULLY, True, True) is Verdict.SERVE
    assert shadow == Shadow()


def test_the_sentence_says_that_answers_were_exact(case: Case) -> None:
    model = shadowed(case)
    flush(model)
    assert model.attmemo.stats()["guard"]["says"].startswith("shadow mode: all ")
    assert guarded(case.bare).attmemo.stats()["shadow"] is None


@pytest.mark.parametrize("options", [{}, {"budget": 0.01, "reuse": "none"}, {"budget": None, "reuse": "rows"}])
def test_shadow_mode_needs_a_budget(case: Case, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="shadow mode"):
        memoize(case.bare, shadow=True, **options)


def test_the_guard_earns_its_certificate_in_shadow_mode(case: Case) -> None:
    model = guarded(case.bare, shadow=True, min_cosine=-1.0, budget=0.2)
    guard: Guard = model.attmemo.guarded.guard
    run(model, BASE)
    for _ in range(40):
        run(model, variant(FIRST))
        if guard.certified:
            break
    assert guard.certified
    assert shadow_of(model)["reused"]
    assert model.attmemo.stats()["reused"] == 0
