"""Fixed texts between other traffic: while a text's own record lives, its answer keeps its bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import FAMILIES
from guarded import BASE, FIRST, SECOND, certify, flush, rows_of, sure, variant
from packed_models import Inputs

from attmemo import memoize

TEXTS, ROUNDS = len(BASE["input_ids"]), 24


def alone(place: int) -> Inputs:
    """One of the texts, without padding."""
    own = rows_of(BASE, place)
    return {name: value[:, : int(own["attention_mask"].sum())] for name, value in own.items()}


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("name", ["BERT classifier", "BERT", "DeBERTa-v3"])
def test_a_text_with_a_record_gets_the_same_bits_each_time(name: str, gate: bool) -> None:
    """Between them are texts like it, of which some are reused; with the gate some forwards are left to the blocks."""
    bare: Any = FAMILIES[name].make()
    bare = sure(bare) if name == "BERT classifier" else bare
    model = memoize(
        copy.deepcopy(bare), budget=0.05, reuse="rows", linear="exact", gate=gate, min_cosine=-1.0, answer="auto"
    )
    seen: list[set[bytes]] = [set() for _ in range(TEXTS)]
    recorded = 0
    for turn in range(ROUNDS):
        with torch.inference_mode():
            if turn:  # at first the texts themselves: what is like a record seldom becomes one
                model(**variant(FIRST, by=1 + turn))
            for place in range(TEXTS):
                asked = alone(place)
                tokens = asked["input_ids"][0].numpy().astype("int32")
                lives = model.attmemo.planner.index.same(tokens) >= 0
                found = model(**asked)[0].numpy().tobytes()
                if lives:
                    recorded += 1
                    seen[place].add(found)
            if turn:
                model(**variant(FIRST, SECOND, by=1 + turn))
        flush(model)
        if turn == ROUNDS // 2:
            certify(model)
    assert recorded > TEXTS * ROUNDS // 4
    assert [len(bits) for bits in seen if bits] == [1] * sum(map(bool, seen))
    with model.attmemo.observe(reuse=False), torch.inference_mode():
        for place in range(TEXTS):
            if seen[place]:
                assert seen[place] == {model(**alone(place))[0].numpy().tobytes()}, "as without reuse"
