"""Guarded forwards of a whole model in few calls: numbers, counts and decisions are those of the hooked way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from guarded import BASE, BOTH, FIRST, NAMES, SECOND, Case, done, guarded, rows_of, run, taught, variant
from packed_models import batch
from whole_calls import assert_same, hook_of, noted

from attmemo.rows.serve import Rows

STREAM = [
    BASE, variant(FIRST), variant(SECOND), BOTH, variant(FIRST, by=2), rows_of(BOTH, 1, 1, 4), batch([9, 40, 12], 8),
    rows_of(BASE, 0), variant(FIRST),
]  # fmt: skip
"""Inputs that are new, known, changed in known and in unknown places, the same twice, and alone."""


@pytest.fixture(params=NAMES, scope="module", name="case")
def _case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def hooked(model: Any) -> Any:
    """The model; its forwards go through its modules."""
    hook_of(model).whole = None
    return model


def test_numbers_counts_and_decisions_are_those_of_the_hooked_way(case: Case) -> None:
    few, through = guarded(case.bare, min_cosine=-1.0), hooked(guarded(case.bare, min_cosine=-1.0))
    with noted(few) as notes:
        for inputs in STREAM:
            assert_same(run(few, inputs), run(through, inputs))
    assert len(notes) >= len(STREAM)
    assert all(notes)
    assert done(few) == done(through)
    counts = ("sequences", "tokens", "rows_computed", "served", "repeated", "ineligible", "not_looked_up", "failed")
    seen, expected = few.attmemo.stats(), through.attmemo.stats()
    assert {name: seen[name] for name in counts} == {name: expected[name] for name in counts}


def test_answers_from_records_are_those_of_the_hooked_way(case: Case) -> None:
    few, through = taught(case.bare, min_cosine=-1.0), hooked(taught(case.bare, min_cosine=-1.0))
    with noted(few) as notes:
        for inputs in (BOTH, BASE, rows_of(BOTH, 2, 5, 2)):
            assert_same(run(few, inputs), run(through, inputs))
    assert all(notes)
    assert few.attmemo.stats()["served"] == through.attmemo.stats()["served"] > 0


@pytest.mark.parametrize("reuse", [True, False])
def test_observed_requests_are_few_calls_and_seen_alike(case: Case, reuse: bool) -> None:
    few, through = taught(case.bare, min_cosine=-1.0), hooked(taught(case.bare, min_cosine=-1.0))
    with few.attmemo.observe(reuse=reuse) as seen, noted(few) as notes:
        output = run(few, BOTH)
    with through.attmemo.observe(reuse=reuse) as expected:
        assert_same(output, run(through, BOTH))
    assert notes == [True]
    assert (seen.tokens, seen.rows, seen.extra) == (expected.tokens, expected.rows, expected.extra)
    assert (sum(seen.rows) < sum(seen.tokens)) == reuse


def test_a_forward_that_is_left_to_the_blocks_is_few_calls(case: Case) -> None:
    model = guarded(case.bare, min_cosine=-1.0, gate=True)
    with noted(model) as notes, model.attmemo.engine.open(left=True), torch.inference_mode():
        assert_same(model(**BASE), run(case.exact, BASE))
    assert notes == [True]


def test_an_error_while_records_serve_leaves_all_of_the_forward_exact(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = taught(case.bare, min_cosine=-1.0)
    before = model.attmemo.stats()["served"]

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("no memory for rows")

    monkeypatch.setattr(Rows, "serve", broken)
    assert_same(run(model, BOTH), run(case.bare, BOTH))
    stats = model.attmemo.stats()
    assert stats["served"] == before
    assert stats["failed"] > 0
