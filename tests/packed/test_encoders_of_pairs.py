"""Encoders of models with a decoder: the encoder runs packed, and the decoder is the original's."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, VOCABULARY, _make
from packed_models import NEAR, OF_PAIRS, batch, gap, last, valid
from packed_tools import ran_packed

from attmemo import UnsupportedModelError, memoize

PAIRS = ["BART", "mBART", "Marian", "Pegasus", "M2M-100", "T5", "Flan-T5", "mT5"]


def pair(bare: Any) -> tuple[Any, Any]:
    return bare, memoize(copy.deepcopy(bare), reuse="none")


@pytest.mark.parametrize("name", PAIRS)
def test_generation_gives_the_same_tokens_over_a_packed_encoder(name: str) -> None:
    bare, model = pair(FAMILIES[name].make())
    inputs = batch([17, 4, 9], 1)
    for beams in (1, 2):
        asked = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams}
        assert torch.equal(model.generate(**inputs, **asked), bare.generate(**inputs, **asked))
        assert ran_packed(model)


@pytest.mark.parametrize("name", PAIRS)
def test_the_decoder_is_not_touched(name: str) -> None:
    _, model = pair(FAMILIES[name].make())
    assert not any("forward" in vars(module) for module in model.get_decoder().modules())
    assert any("forward" in vars(module) for module in model.get_encoder().modules())


@pytest.mark.parametrize(
    ("kind", "family"),
    [("BartForSequenceClassification", "BART"), ("MBartForSequenceClassification", "mBART"),
     ("BartForQuestionAnswering", "BART"), ("T5ForSequenceClassification", "T5"),
     ("T5ForTokenClassification", "Flan-T5"), ("MT5ForQuestionAnswering", "mT5")],
)  # fmt: skip
def test_a_head_is_the_models_own(kind: str, family: str) -> None:
    torch.manual_seed(3)
    config = FAMILIES[family].make().config
    config.update({"num_labels": 2 if kind.endswith("QuestionAnswering") else 3})
    bare, model = pair(getattr(transformers, kind)(config).eval())
    inputs = batch([9, 2, 17])
    for row, n in enumerate([9, 2, 17]):
        inputs["input_ids"][row, n - 1] = 2  # its end is what a classifier reads
    with torch.inference_mode():
        seen, expected = model(**inputs)[0], bare(**inputs)[0]
    where = valid(inputs) if expected.shape[:2] == inputs["input_ids"].shape else None
    assert gap(seen, expected, where) <= NEAR
    assert ran_packed(model)


def test_distances_are_those_of_long_texts() -> None:
    """Beyond 128 tokens all distances are one."""
    bare, model = pair(
        _make("T5EncoderModel", "T5Config", vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2,
              num_heads=4, initializer_factor=1.5)()
    )  # fmt: skip
    for left in (False, True):
        inputs = batch([700, 127, 128, 129, 1, 256], 3, left=left)
        assert gap(last(model, inputs), last(bare, inputs), valid(inputs)) <= NEAR
        assert ran_packed(model)


@pytest.mark.parametrize("name", ["BART encoder", "T5 encoder"])
def test_rows_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="rows of this family"):
        memoize(OF_PAIRS[name](), reuse="rows", database=":memory:", budget=0.01)


def test_layers_of_several_types_are_refused_by_name() -> None:
    """Checkpoints of T5 keep a part of their layers in float32 when they are loaded in half precision."""
    model: Any = OF_PAIRS["T5 encoder"]().to(torch.bfloat16)
    for block in model.block:
        block.layer[1].DenseReluDense.wo.float()
    with pytest.raises(UnsupportedModelError, match=r"of several types \(bfloat16, float32\)"):
        memoize(model, reuse="none")


@pytest.mark.parametrize(("kind", "family"), [("BartForSequenceClassification", "BART"),
                                              ("T5ForSequenceClassification", "T5")])  # fmt: skip
def test_with_a_budget_answers_can_be_compared(
    kind: str, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Their heads look for the end of a text, so the small batch must have one."""
    config = FAMILIES[family].make().config
    config.update({"num_labels": 3})
    with caplog.at_level(logging.INFO, "attmemo"):
        model: Any = memoize(getattr(transformers, kind)(config).eval(), budget=0.01)
    assert model.attmemo.reuse == "none"
    assert "rows of this family" in caplog.text
    assert "nothing can be compared" not in caplog.text


def test_without_a_mask_all_tokens_are_valid() -> None:
    bare, model = pair(FAMILIES["BART"].make())
    inputs = {"input_ids": batch([11, 11], 2)["input_ids"]}
    with torch.inference_mode():
        assert gap(model(**inputs).logits, bare(**inputs).logits) <= NEAR
    assert ran_packed(model)
