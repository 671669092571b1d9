"""`handle.observe()` tells what a request computed, `handle.rows_to_compute()` what one would."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import FAMILIES
from guarded import BASE, LENGTHS, certify, run, variant
from packed_models import NEAR, Inputs, batch, gap

from attmemo import memoize


@pytest.fixture(scope="module", name="bare")
def _bare() -> Any:
    return FAMILIES["BERT"].make()


@pytest.fixture(name="model")
def _model(bare: Any) -> Iterator[Any]:
    """It has verified a change at one place."""
    found = memoize(copy.deepcopy(bare), database=":memory:", reuse="rows", gate=False, budget=0.01)
    run(found, BASE)
    run(found, variant(4))
    yield certify(found)
    found.attmemo.undo()


def ids(inputs: Inputs) -> list[list[int]]:
    return [row[:n].tolist() for row, n in zip(inputs["input_ids"], LENGTHS, strict=True)]


def test_what_is_asked_before_is_what_is_computed(model: Any) -> None:
    for inputs in (BASE, variant(4, by=1), variant(10, by=3), batch(LENGTHS, 77)):
        done = model.attmemo.stats()["guard"]["done"]
        asked = model.attmemo.rows_to_compute(ids(inputs))
        assert model.attmemo.stats()["guard"]["done"] == done, "asking decides nothing"
        with model.attmemo.observe() as seen:
            run(model, inputs)
        assert seen.rows == asked
        assert seen.tokens == LENGTHS
    assert sum(model.attmemo.rows_to_compute(ids(variant(4, by=1)))) < sum(LENGTHS)


def test_verification_is_counted_apart(model: Any) -> None:
    with model.attmemo.observe() as seen:
        run(model, variant(10, by=3))
    assert seen.rows == LENGTHS
    assert 0 < seen.extra < sum(LENGTHS)
    with model.attmemo.observe() as seen:
        run(model, variant(4, by=1))
    assert seen.extra == 0


def test_a_request_without_reuse_is_exact_and_leaves_nothing(model: Any, bare: Any) -> None:
    records = model.attmemo.stats()["records"]
    for inputs in (variant(4, by=1), batch(LENGTHS, 78)):
        with model.attmemo.observe(reuse=False) as seen:
            found = run(model, inputs)
        assert seen.rows == LENGTHS
        assert gap(found[0], run(bare, inputs)[0], inputs["attention_mask"].bool()) <= NEAR
    assert model.attmemo.stats()["records"] == records
    assert model.attmemo.stats()["not_looked_up"]["asked_without_reuse"] == 2 * len(LENGTHS)
    with model.attmemo.observe() as seen:
        run(model, variant(4, by=1))
    assert sum(seen.rows) < sum(LENGTHS)


def test_without_a_database_every_row_is_computed(bare: Any) -> None:
    model = memoize(copy.deepcopy(bare), reuse="none")
    assert model.attmemo.rows_to_compute(ids(BASE)) == LENGTHS
    with model.attmemo.observe() as seen:
        run(model, BASE)
        run(model, BASE)
    assert seen.rows == seen.tokens == LENGTHS * 2
    assert seen.extra == 0


def test_token_types_are_part_of_the_question(model: Any) -> None:
    types = [[1] * n for n in LENGTHS]
    same = model.attmemo.rows_to_compute(ids(BASE))
    assert model.attmemo.rows_to_compute(ids(BASE), [[0] * n for n in LENGTHS]) == same
    assert model.attmemo.rows_to_compute(ids(BASE), types) == LENGTHS
    assert sum(same) < sum(LENGTHS)


def test_nothing_is_asked_of_an_empty_sequence(model: Any) -> None:
    assert model.attmemo.rows_to_compute([]) == []
    assert model.attmemo.rows_to_compute([[], [7, 8]]) == [0, 2]
    with torch.inference_mode(), model.attmemo.observe() as seen:
        pass
    assert seen.rows == []


def test_an_estimate_that_fails_costs_no_request(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(model.attmemo.planner.index, "candidates", fail)
    assert model.attmemo.rows_to_compute(ids(BASE)) == LENGTHS
    assert sum(model.attmemo.stats()["failures"].values()) == len(LENGTHS)


def test_nothing_is_looked_up_where_a_forward_would_not_look_up(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(model.attmemo.rows_to_compute(ids(BASE))) < sum(LENGTHS)
    monkeypatch.setattr(model.attmemo.planner.gate, "ask", lambda seconds_per_row: False)
    assert model.attmemo.rows_to_compute(ids(BASE)) == LENGTHS
