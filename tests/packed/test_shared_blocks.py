"""Blocks that run several times (ALBERT), and a projection whose heads lie one behind the other (DeBERTa v1)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES
from packed_models import MODELS, NEAR, batch, gap, last, pair, valid
from packed_tools import left_alone, ran_packed
from torch import nn

from attmemo import AttmemoError, UnsupportedModelError, memoize
from attmemo.kernels.norms import norm_of
from attmemo.kernels.packed_weights import Panels


@pytest.mark.parametrize(("name", "modules"), [("ALBERT", 1), ("ALBERT, groups", 4)])
def test_a_block_that_runs_several_times_is_made_ready_once(name: str, modules: int) -> None:
    _, model = pair(name)
    packed = model.attmemo.packed
    assert len(packed.blocks.blocks) > modules or name != "ALBERT"
    layers = [layer for _, layer, _ in packed.linears]
    assert len(layers) == len(set(layers)) == 4 * modules
    assert packed.nbytes == packed.blocks.nbytes + sum(layer.nbytes for layer in layers)


@pytest.mark.parametrize("kind", ["AlbertForMaskedLM", "AlbertForTokenClassification", "DebertaForMaskedLM"])
def test_a_head_is_the_models_own(kind: str) -> None:
    torch.manual_seed(3)
    family = "ALBERT" if "Albert" in kind else "DeBERTa"
    bare = getattr(transformers, kind)(FAMILIES[family].make().config).eval()  # type: ignore[arg-type]
    model: Any = memoize(copy.deepcopy(bare), reuse="none")
    inputs = batch([9, 2, 17])
    with torch.inference_mode():
        assert gap(model(**inputs).logits, bare(**inputs).logits, valid(inputs)) <= NEAR
    assert ran_packed(model)


def test_gradients_to_embedded_rows_are_the_original_codes() -> None:
    _, model = pair("ALBERT")
    for weight in model.parameters():
        weight.requires_grad_(False)
    embedded = torch.randn(2, 5, 16, requires_grad=True)
    model(inputs_embeds=embedded).last_hidden_state.sum().backward()
    assert embedded.grad is not None
    assert left_alone(model) == {"gradients are recorded (use torch.inference_mode)": 2}


def test_embedded_rows_are_widened_by_our_kernel_where_it_serves_that_type() -> None:
    bare, model = pair("ALBERT")
    blocks = model.attmemo.packed.blocks
    ours = all(isinstance(layer, Panels) for _, layer, _ in model.attmemo.packed.linears)
    assert (blocks._layer is not None) == ours
    rows = torch.randn(2, 5, 16)
    wide = bare.encoder.embedding_hidden_mapping_in(rows)
    assert gap(blocks._widened(rows).detach(), wide.detach()) <= NEAR


def test_a_norm_of_its_own_class_is_known_by_what_it_computes() -> None:
    norm: Any = MODELS["DeBERTa v1"]().encoder.layer[0].output.LayerNorm  # type: ignore[union-attr, operator]
    assert type(norm) is not nn.LayerNorm
    found = norm_of(norm)
    assert found is not None
    rows = torch.randn(7, 32)
    assert gap(found(rows).detach(), norm(rows).detach()) <= NEAR
    norm.forward = lambda rows: rows
    assert norm_of(norm) is None


def test_heads_that_are_mixed_are_refused_by_name() -> None:
    config: Any = FAMILIES["DeBERTa"].make().config
    config.talking_head = True
    with pytest.raises(UnsupportedModelError, match="talking_head"):
        memoize(transformers.DebertaModel(config).eval(), reuse="none")


def test_changed_projections_are_noticed() -> None:
    bare, model = pair("DeBERTa v1")
    inputs = batch([9, 2])
    with torch.no_grad():
        for one in (bare, model):
            one.encoder.layer[1].attention.self.q_bias.add_(0.5)
    assert torch.equal(last(model, inputs), last(bare, inputs))
    assert sum(left_alone(model).values()) == 2


def test_a_block_that_is_called_too_often_is_refused() -> None:
    model: Any = MODELS["ALBERT"]()
    group = model.encoder.albert_layer_groups[0]
    own = group.forward
    group.forward = lambda hidden, *given, **more: own(own(hidden, *given, **more), *given, **more)
    with pytest.raises(AttmemoError, match="more often"):
        memoize(model, reuse="none")
