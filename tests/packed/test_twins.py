"""Sequences of one batch that are the same are computed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_models import MODELS, NEAR, batch, changed, gap, has_types, last, longest, pair, rows_database, valid

from attmemo import memoize
from attmemo.packed.duplicates import Twins


@pytest.mark.parametrize("name", MODELS)
def test_the_same_sequence_is_computed_once_in_a_batch(name: str) -> None:
    bare, model = pair(name)
    most = longest(name)
    for lengths in ([5, 7, 5, 5], [most, most]):  # with padding, and without
        inputs = batch(lengths, 3)
        for place in range(2 if len(lengths) > 2 else 1, len(lengths)):
            for tensor in inputs.values():
                tensor[place] = tensor[0]
        model.attmemo.reset_stats()
        seen = last(model, inputs)
        assert gap(seen, last(bare, inputs), valid(inputs)) <= NEAR
        assert torch.equal(seen[0], seen[-1])
        stats = model.attmemo.stats()
        assert stats["tokens"] == sum(lengths)
        assert stats["rows_computed"] == sum(lengths[: -2 if len(lengths) > 2 else -1])
        assert not stats["failures"]


def test_the_same_ids_of_other_types_or_in_a_longer_sequence_are_computed_apart() -> None:
    bare, model = pair("BERT")
    assert has_types(bare)
    inputs = batch([6, 6, 8], 4)
    inputs["input_ids"][1, :6] = inputs["input_ids"][2, :6] = inputs["input_ids"][0, :6]
    inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    inputs["token_type_ids"][1, 3:6] = 1
    assert gap(last(model, inputs), last(bare, inputs), valid(inputs)) <= NEAR
    assert model.attmemo.stats()["rows_computed"] == 20


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(-1, 1)), min_size=1, max_size=12))
@settings(max_examples=200, deadline=None)
def test_twins_are_those_with_the_same_rows_the_same_length_and_the_same_record(
    asked: list[tuple[int, int, int]],
) -> None:
    contents = torch.randn(4, 6, 20, generator=torch.Generator().manual_seed(0))
    contents[2:] = contents[0]
    contents[3, 3, 18] += 1  # differs where no mark looks
    hidden = torch.stack([contents[content] for content, _, _ in asked])
    hidden += torch.randn(hidden.shape) * (torch.arange(6) >= torch.tensor([[n] for _, n, _ in asked]))[:, :, None]
    lengths, records = [n for _, n, _ in asked], np.array([record for *_, record in asked])
    found = Twins.of(hidden, lengths, records.tolist())
    for place, (_, n, record) in enumerate(asked):
        first = next(
            other for other, (_, m, their) in enumerate(asked)
            if m == n and their == record and torch.equal(hidden[other, :n], hidden[place, :n])
        )  # fmt: skip
        assert found.firsts[place] == first
        assert found.own[place] == (first == place)


@pytest.mark.parametrize("name", ["BERT", "ModernBERT"])
def test_twins_that_a_record_serves_are_computed_once_and_counted_as_served(name: str, tmp_path: Path) -> None:
    bare, _ = pair(name)
    stored = batch([24, 24, 20], 5)
    path = rows_database(bare, [stored], tmp_path / "records")
    asked = changed(stored, 6)
    order = torch.tensor([0, 1, 0, 2, 2, 0])
    model: Any = memoize(pair(name)[0], 0.3, path, gate=False, budget=None)
    alone = last(model, asked)
    rows = model.attmemo.stats()["rows_computed"]
    model.attmemo.reset_stats()
    together = {key: tensor[order] for key, tensor in asked.items()}
    seen = last(model, together)
    stats = model.attmemo.stats()
    assert rows < int(valid(asked).sum())
    assert stats["rows_computed"] == rows
    assert stats["reused"] == 6
    assert gap(seen, alone[order], valid(together)) <= NEAR
    for place, first in ((2, 0), (4, 3), (5, 0)):
        assert torch.equal(seen[place], seen[first])


def test_an_observer_does_not_see_which_sequences_were_computed_for_others() -> None:
    _, model = pair("BERT")
    inputs = batch([9, 9, 4], 8)
    inputs["input_ids"][1] = inputs["input_ids"][0]
    with model.attmemo.observe() as observed:
        last(model, inputs)
    assert observed.rows == [9, 9, 4]
    assert model.attmemo.stats()["rows_computed"] == 13


def test_of_the_same_requests_one_is_verified() -> None:
    model: Any = memoize(pair("BERT")[0], 0.3, ":memory:", reuse="rows", gate=False, budget=0.01)
    stored = batch([20], 7)
    asked = {key: tensor.repeat(8, 1) for key, tensor in changed(stored, 9).items()}
    with torch.inference_mode():
        model(**stored)
        assert model.attmemo.flush()
        model(**asked)
    done = model.attmemo.stats()["guard"]["done"]
    assert done["learned"] == 1
    assert done["whole"] == 8


def test_a_batch_of_one_text_makes_one_record() -> None:
    model: Any = memoize(pair("BERT")[0], database=":memory:", reuse="rows", budget=0.01, gate=False)
    inputs = {key: tensor.repeat(8, 1) for key, tensor in batch([20], 7).items()}
    with torch.inference_mode():
        model(**inputs)
    assert model.attmemo.flush()
    stats = model.attmemo.stats()
    assert stats["rows_computed"] == 20
    assert stats["records"] == 1
