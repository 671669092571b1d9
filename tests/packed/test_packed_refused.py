"""Packed blocks where they do not fit, or go wrong: refused by name, or time lost and never a request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, VOCABULARY
from packed_models import EXACT, MODELS, NEAR, REFUSED, batch, gap, host_of, last, pair, valid
from packed_tools import KINDS, ran_packed
from torch import Tensor, nn

from attmemo import AttmemoError, UnsupportedModelError, memoize
from attmemo.errors import AdapterCheckError, DatabaseNotFoundError
from attmemo.forward.hooks import Hook
from attmemo.kernels import encoder_stack as chain_module
from attmemo.packed import runner as packed_module
from attmemo.packed import stack as stack_module


class TestRefused:
    @pytest.mark.parametrize("name", REFUSED)
    def test_a_family_without_blocks_is_refused_by_name(self, name: str) -> None:
        model: Any = FAMILIES[name].make()
        with pytest.raises(UnsupportedModelError, match=f"blocks of {type(model).__name__}.*(?s:.*)reuse='maps'"):
            memoize(model, reuse="none")
        assert not any("forward" in module.__dict__ for module in model.modules())

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
    def test_a_type_that_cannot_be_packed_is_refused_by_name(self, dtype: torch.dtype) -> None:
        with pytest.raises(UnsupportedModelError, match=f"its weights are {dtype}"):
            memoize(MODELS["BERT"]().to(dtype), reuse="none")

    def test_a_block_that_computes_something_else_is_refused(self) -> None:
        model: Any = MODELS["BERT"]()
        own = model.encoder.layer[1].forward
        model.encoder.layer[1].forward = lambda *args, **kwargs: own(*args, **kwargs) * 1.01
        with pytest.raises(AdapterCheckError, match="block 1"):
            memoize(model, reuse="none")
        assert "attmemo" not in model.__dict__

    def test_a_norm_of_another_kind_is_refused_by_name(self) -> None:
        model: Any = MODELS["BERT"]()
        model.encoder.layer[0].output.LayerNorm = nn.RMSNorm(32)
        with pytest.raises(UnsupportedModelError, match="RMSNorm in place of a layer norm"):
            memoize(model, reuse="none")

    def test_outputs_at_wrong_places_are_noticed_by_the_check(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def turned(*given: Any) -> Tensor | None:
            found = places(*given)
            return None if found is None else found.roll(1)

        places = stack_module.places_of
        monkeypatch.setattr(stack_module, "places_of", turned)
        for name in KINDS:
            with pytest.raises(AdapterCheckError):
                memoize(MODELS[name](), reuse="none")

    def test_a_stack_that_cannot_be_served_is_noticed_by_the_check(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The original code answers in its place, so the answers alone would not show it."""

        def broken(*args: Any) -> Any:
            raise RuntimeError("no memory")

        monkeypatch.setattr(stack_module, "put_back", broken)
        with pytest.raises(AdapterCheckError, match="no memory"):
            memoize(MODELS["BERT"](), reuse="none")


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("what", ["attend", "_norm"])
def test_a_broken_call_costs_time_and_never_a_request(
    name: str, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bare, model = pair(name)
    model.attmemo.engine.reuse.packed._chain = None  # a call for each layer
    inputs = batch([9, 2, 12], 60)
    expected = last(bare, inputs)
    own, calls = getattr(packed_module, what), []

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:  # not the first: work of the first block is lost too
            raise MemoryError("no memory for rows")
        return own(*args, **kwargs)

    monkeypatch.setattr(packed_module, what, sometimes)
    with caplog.at_level(logging.WARNING, "attmemo"):
        assert torch.equal(last(model, inputs), expected)
    stats = model.attmemo.stats()
    assert sum(stats["failures"].values()) == 3
    assert "no memory for rows" in next(iter(stats["failures"]))
    assert stats["sequences"] == 0
    assert "no memory for rows" in caplog.text
    model.attmemo.reset_stats()
    assert gap(last(model, inputs), expected, valid(inputs)) <= NEAR, "the next request is served again"
    assert ran_packed(model)


@pytest.mark.parametrize("name", ["BERT", "DeBERTa-v3", "ModernBERT", "Qwen3"])
def test_blocks_in_one_call_that_fail_cost_time_and_never_a_request(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bare, model = pair(name)
    inputs = batch([9, 2, 12], 60)
    expected = last(bare, inputs)

    def broken(*_: Any) -> None:
        raise MemoryError("no memory for rows")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "attmemo"):
        patch.setattr(chain_module.native, "run", broken)
        assert torch.equal(last(model, inputs), expected)
    assert sum(model.attmemo.stats()["failures"].values()) == 3
    assert "no memory for rows" in caplog.text
    model.attmemo.reset_stats()
    assert gap(last(model, inputs), expected, valid(inputs)) <= NEAR, "the next request is served again"
    assert ran_packed(model)


@pytest.mark.parametrize("asked", [{}, {"budget": 0}, {"fill": False}])
def test_without_a_budget_the_blocks_are_packed_and_nothing_is_written_or_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked: dict[str, Any]
) -> None:
    monkeypatch.setenv("ATTMEMO_CACHE", str(tmp_path))
    model = memoize(FAMILIES["BERT"].make(), **asked)
    assert model.attmemo.reuse == "none"
    assert not caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "asked",
    [
        {"reuse": "maps"}, {"threshold": 0.9}, {"database": "auto"}, {"reuse": "rows", "budget": None},
        {"database": "auto", "budget": None}, {"database": "auto", "budget": 0.01, "fill": False},
        {"database": "auto", "reuse": "rows", "budget": 0.01, "fill": False},
    ],
)  # fmt: skip
def test_a_database_that_was_asked_for_and_is_missing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    monkeypatch.setenv("ATTMEMO_CACHE", str(tmp_path))
    with pytest.raises(DatabaseNotFoundError, match=r"no database .*for this model"):
        memoize(FAMILIES["BERT"].make(), **asked)


def held_inside(model: Any, ask: Callable[[], None]) -> tuple[Any, threading.Thread, threading.Event]:
    """A thread whose forward waits behind its first block for the event, and what served before."""
    inside, go = threading.Event(), threading.Event()
    serve = model.attmemo.engine.reuse.serve

    def slow(*given: Any) -> Any:
        served = serve(*given)
        inside.set()
        assert go.wait(30)
        return served

    model.attmemo.engine.reuse.serve = slow
    asker = threading.Thread(target=ask)
    asker.start()
    assert inside.wait(30)
    return serve, asker, go


class TestBlocksThatTheModelCalls:
    """The first block does the work of all: what holds for one of them must hold for the whole stack."""

    def test_gradients_reach_the_blocks_behind_a_frozen_first_one(self) -> None:
        bare, model = pair("ModernBERT")
        for one in (bare, model):
            host = host_of(one)
            for part in (host.embeddings, host.layers[0]):
                part.requires_grad_(False)
            host(**batch([7, 5]))[0].sum().backward()
        for mine, own in zip(model.parameters(), bare.parameters(), strict=True):
            assert (mine.grad is None) == (own.grad is None)
        assert host_of(model).layers[1].attn.Wo.weight.grad is not None
        assert "gradients" in next(iter(model.attmemo.stats()["ineligible"]))

    def test_disabling_waits_for_a_forward_of_another_thread(self) -> None:
        bare, model = pair("ModernBERT")
        inputs, found = batch([9, 4]), list[Any]()
        _, asker, go = held_inside(model, lambda: found.append(last(model, inputs)))
        switch = threading.Thread(target=model.attmemo.disable)
        switch.start()
        switch.join(0.2)
        assert switch.is_alive(), "the first block has done the work of those behind it"
        go.set()
        asker.join(30)
        switch.join(30)
        assert gap(found[0], last(bare, inputs), valid(inputs)) <= NEAR
        assert not model.attmemo.enabled

    def test_a_forward_that_does_not_end_keeps_the_model_served(self) -> None:
        bare, model = pair("ModernBERT")
        inputs, found = batch([9, 4]), list[Any]()
        serve, asker, go = held_inside(model, lambda: found.append(last(model, inputs)))
        with pytest.raises(AttmemoError, match=r"another thread has been in a forward of ModernBertModel for more"):
            model.attmemo.disable(seconds=0.01)
        assert model.attmemo.enabled
        go.set()
        asker.join(30)
        model.attmemo.engine.reuse.serve = serve
        model.attmemo.reset_stats()
        assert gap(found[0], last(bare, inputs), valid(inputs)) <= NEAR
        assert gap(last(model, inputs), last(bare, inputs), valid(inputs)) <= NEAR
        assert ran_packed(model)
        model.attmemo.disable()
        assert torch.equal(last(model, inputs), last(bare, inputs))
        assert not any(isinstance(module.__dict__.get("forward"), Hook) for module in model.modules())

    @pytest.mark.parametrize("number", [0, 1])
    def test_a_forward_put_around_a_block_sees_what_the_original_would(self, number: int) -> None:
        bare, model = pair("ModernBERT")
        seen: dict[int, Any] = {}
        for one in (bare, model):
            block = host_of(one).layers[number]

            def around(hidden: Tensor, *args: Any, own: Any = block.forward, key: int = id(one), **more: Any) -> Any:
                seen[key] = hidden
                return own(hidden, *args, **more)

            block.forward = around
        inputs = batch([8, 3])
        assert torch.equal(last(model, inputs), last(bare, inputs))
        assert torch.equal(seen[id(model)], seen[id(bare)])
        assert "a forward of its own" in next(iter(model.attmemo.stats()["ineligible"]))


@pytest.mark.parametrize("name", ["RobertaPreLayerNorm", "XLMRobertaXL"])
def test_a_relative_of_a_family_is_refused_with_the_form_that_is_unknown(name: str) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = getattr(transformers, f"{name}Config")(**sizes, vocab_size=VOCABULARY)
    model = getattr(transformers, f"{name}Model")(config).eval()
    with pytest.raises(UnsupportedModelError, match="unknown form"):
        memoize(model, reuse="none")


@pytest.mark.parametrize("asked", [{}, {"budget": 0.01}, {"budget": 0.01, "database": "auto"}])
def test_a_model_that_cannot_be_packed_is_told_so_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked: dict[str, Any]
) -> None:
    monkeypatch.setenv("ATTMEMO_CACHE", str(tmp_path))
    model = FAMILIES["BERT"].make().to(torch.float16)
    with pytest.raises(UnsupportedModelError, match="cannot run the blocks of"):
        memoize(model, **asked)
    assert "attmemo" not in model.__dict__
    assert not caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "asked",
    [
        {"reuse": "none", "database": "somewhere"}, {"reuse": "none", "threshold": 0.5}, {"reuse": "none", "near": 2},
        {"reuse": "maps", "most_moved": 3}, {"reuse": "rows", "lookup": "layer", "budget": 0.01},
        {"reuse": "rows", "fetch": "copy", "budget": 0.01},
        {"near": 1.5}, {"near": "1"}, {"most_moved": 10**30}, {"near": True},
    ],
)  # fmt: skip
def test_a_setting_of_another_kind_of_reuse_or_of_a_wrong_type_is_refused(asked: dict[str, Any]) -> None:
    model = FAMILIES["BERT"].make()
    with pytest.raises(ValueError, match=r"near|most_moved|settings of maps|reuses nothing"):
        memoize(model, **asked)
    assert not hasattr(model, "attmemo")


def test_keys_are_turned_without_being_scaled_again() -> None:
    model = MODELS["NomicBERT"]()
    rotary = host_of(model).rotary_emb
    rotary.attention_scaling = 1.139  # as YaRN has it: stored keys hold the factor already
    packed = memoize(model, reuse="none").attmemo.packed
    turn = packed.positions(32).turn("")
    assert turn is not None
    assert torch.allclose(turn.cos**2 + turn.sin**2, torch.ones_like(turn.cos), atol=1e-5)
