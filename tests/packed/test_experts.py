"""Blocks with experts: each row goes through those that its router chooses, beside any other rows."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import VOCABULARY
from packed_models import NEAR, batch, gap, last, valid
from packed_tools import ran_packed
from transformers import OpenAIPrivacyFilterConfig, OpenAIPrivacyFilterForTokenClassification

from attmemo import memoize
from attmemo.errors import AdapterCheckError, UnsupportedModelError
from attmemo.kernels.packed_weights import Panels
from attmemo.models.blocks import Blocks
from attmemo.models.privacy_filter import PrivacyFilterAdapter
from attmemo.packed import runner


def tagger(dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """Many experts, as in the model that is served, of which some rows use the same, and none uses all."""
    torch.manual_seed(5)
    config = OpenAIPrivacyFilterConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=14,
        num_key_value_heads=2, head_dim=16, sliding_window=12, num_local_experts=32, pad_token_id=0,
        initializer_range=0.2, **more,
    )  # fmt: skip
    return OpenAIPrivacyFilterForTokenClassification(config).eval().to(dtype)


def test_tags_are_the_originals() -> None:
    bare = tagger()
    model = memoize(copy.deepcopy(bare))
    for lengths in ([1], [7, 1, 60], [33] * 9):
        inputs = batch(lengths, len(lengths))
        with torch.inference_mode():
            assert gap(model(**inputs).logits, bare(**inputs).logits, valid(inputs)) <= NEAR
        assert ran_packed(model)


def test_numbers_beyond_the_limits_of_the_gate_are_clipped_as_in_the_original() -> None:
    bare = tagger()
    with torch.no_grad():
        for layer in bare.model.layers:
            layer.mlp.experts.gate_up_proj.mul_(20)
    model, inputs = memoize(copy.deepcopy(bare)), batch([40, 9])
    assert gap(last(model, inputs), last(bare, inputs), valid(inputs)) <= NEAR
    assert ran_packed(model)


def test_without_kernels_for_experts_the_models_own_code_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_experts", lambda *_: None)
    bare = tagger()
    model, inputs = memoize(copy.deepcopy(bare)), batch([40, 1, 9])
    assert not all(isinstance(layer, Panels) for _, layer, _ in model.attmemo.packed.linears)
    assert gap(last(model, inputs), last(bare, inputs), valid(inputs)) <= NEAR
    assert ran_packed(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_in_another_order_are_noticed(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that may choose otherwise by rounding are left out of the check; these are most rows."""
    own = PrivacyFilterAdapter.blocks

    def turned(self: PrivacyFilterAdapter, model: Any) -> Any:
        found = own(self, model)
        assert isinstance(found, Blocks)
        found.blocks = tuple(
            replace(block, routed=replace(block.routed, parts=block.routed.parts[::-1]))  # type: ignore[type-var, union-attr]
            for block in found.blocks
        )
        return found

    monkeypatch.setattr(PrivacyFilterAdapter, "blocks", turned)
    with pytest.raises(AdapterCheckError, match="block 0 over packed rows differs"):
        memoize(tagger(dtype))


def test_another_gate_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="a gate of another form"):
        memoize(tagger(swiglu_limit=5.0))
