"""EL-attention: its algebra in float64, where it is refused, what it saves, and when it is chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fastseq_models import SEQ2SEQ, inputs, make
from torch import Tensor

from attmemo import UnsupportedModelError, fastseq
from attmemo.fastseq.generate.beam_attention import prefix_attention, shared_attention
from attmemo.fastseq.generate.costmodel import Call, Machine, choose, measured
from attmemo.fastseq.generate.el_attention import Projections, el_cross_attention
from attmemo.fastseq.generate.shape import ModelShape
from attmemo.models.cache_name import CACHE_NAME

B, M, H, D_HEAD, D, N = 3, 4, 5, 6, 21, 11  # h·d is not D


def reference(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention in its usual form, every beam with its own copy: `[R, h, T, d]` → `[R, T, h, d]`."""
    scores = query @ key.transpose(-1, -2) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return (torch.softmax(scores, dim=-1) @ value).transpose(1, 2)


def problem(new: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    mask = torch.ones(B, 1, 1, N, dtype=torch.bool)
    mask[1, ..., 7:] = False
    mask[2, ..., :4] = False
    return {
        "query": draw(B * M, H, new, D_HEAD),
        "hidden": draw(B, N, D),
        "key_weight": draw(H, D_HEAD, D),
        "key_bias": draw(H, D_HEAD),
        "value_weight": draw(H, D_HEAD, D),
        "value_bias": draw(H, 1, D_HEAD),
        "mask": mask,
    }


@pytest.mark.parametrize("kind", ["none", "bool", "additive"])
@pytest.mark.parametrize("new", [1, 3])
def test_el_is_attention_and_the_key_bias_changes_nothing(kind: str, new: int) -> None:
    p = problem(new)
    key = torch.einsum("bnD,hdD->bhnd", p["hidden"], p["key_weight"]) + p["key_bias"][:, None]
    value = torch.einsum("bnD,hdD->bhnd", p["hidden"], p["value_weight"]) + p["value_bias"]
    mask: Tensor | None = p["mask"].repeat_interleave(M, dim=0)
    if kind == "none":
        mask = None
    elif kind == "additive":
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e30)
    expected = reference(
        p["query"], key.repeat_interleave(M, dim=0), value.repeat_interleave(M, dim=0), mask, D_HEAD**-0.5
    )
    projections = Projections(None, None, p["key_weight"], p["value_weight"], p["value_bias"])
    got = el_cross_attention(p["query"], p["hidden"], projections, mask, None)
    assert (got - expected).abs().max() < 1e-10
    shared = shared_attention(p["query"], key, value, mask, None)
    assert (shared - expected).abs().max() < 1e-10


def test_prefix_and_suffix_are_one_softmax_with_groups_of_heads() -> None:
    torch.manual_seed(1)
    groups, key_heads, own = 3, 2, 5
    query = torch.randn(B * M, groups * key_heads, 1, D_HEAD, dtype=torch.float64)
    prefix = torch.randn(2, B, key_heads, N, D_HEAD, dtype=torch.float64)
    suffix = torch.randn(2, B * M, key_heads, own, D_HEAD, dtype=torch.float64)
    whole = torch.cat([prefix.repeat_interleave(M, dim=1), suffix], dim=-2).repeat_interleave(groups, dim=2)
    mask = torch.ones(B * M, 1, 1, N + own, dtype=torch.bool)
    mask[: 2 * M, ..., :3] = False
    expected = reference(query, whole[0], whole[1], mask, D_HEAD**-0.5)
    got = prefix_attention(query, prefix[0], prefix[1], suffix[0], suffix[1], mask, None)
    assert (got - expected).abs().max() < 1e-10


@pytest.mark.parametrize("family", [*SEQ2SEQ, "whisper", "gpt2", "opt"])
def test_tokens_are_those_of_stock(family: str) -> None:
    model = make(family)
    fast = fastseq.wrap(model, attention="el")
    for padding in ("right", "left") if family in SEQ2SEQ else ("left",):
        for setting in ({}, {"num_beams": 4}, {"num_beams": 4, "exponential_decay_length_penalty": (2, 1.12)}):
            arguments = inputs(family, padding)
            expected = model.generate(**arguments, max_new_tokens=14, **setting)
            assert torch.equal(expected, fast.generate(**arguments, max_new_tokens=14, **setting))
    stats = fast.stats()
    assert stats["calls"]["stock"] == 0, stats["stock_reasons"]
    kind = "el_self" if family in ("gpt2", "opt") else "el"
    assert stats["counts"][kind] > 0
    assert not stats["counts"].get("shared"), "keys were shared where hidden states were asked for"


@pytest.mark.parametrize("family", ["bart", "t5", "gpt2"])
def test_a_sample_that_is_padding_only_gives_stocks_scores(family: str) -> None:
    model = make(family)
    fast = fastseq.wrap(model, attention="el")
    arguments = inputs(family)
    arguments["attention_mask"][1] = 0
    setting: dict[str, Any] = {
        "num_beams": 3, "max_new_tokens": 6, "return_dict_in_generate": True, "output_scores": True,
    }  # fmt: skip
    expected, got = (path.generate(**arguments, **setting) for path in (model, fast))
    assert torch.equal(expected.sequences, got.sequences)
    assert torch.equal(expected.sequences_scores, got.sequences_scores)
    assert fast.stats()["stock_reasons"] == {"a sample that is padding only": 1}


@pytest.mark.parametrize(("family", "reason"), [("llama", "RoPE"), ("qwen2", "RoPE"), ("qwen3", "RoPE")])
def test_it_is_refused_by_name_where_it_does_not_hold(family: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        fastseq.wrap(make(family), attention="el")


def test_normed_keys_and_adapted_projections_are_refused_by_name() -> None:
    model = make("bart")
    model.model.decoder.layers[1].encoder_attn.k_norm = torch.nn.LayerNorm(8)
    with pytest.raises(UnsupportedModelError, match="norms its keys"):
        fastseq.wrap(model, attention="el")

    class Adapted(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    model = make("bart")
    model.model.decoder.layers[0].encoder_attn.v_proj = Adapted(32, 32)
    with pytest.raises(UnsupportedModelError, match="Adapted, not Linear"):
        fastseq.wrap(model, attention="el")


def test_the_callers_encoder_outputs_are_not_written_to() -> None:
    model = make("bart")
    fast = fastseq.wrap(model, attention="el")
    arguments = inputs("bart", "right")
    with torch.no_grad():
        states = model.get_encoder()(**arguments)
    kept = states.last_hidden_state.clone()
    fast.generate(
        encoder_outputs=states,
        attention_mask=arguments["attention_mask"],
        num_beams=4,
        max_new_tokens=20,
        exponential_decay_length_penalty=(2, 1.12),
    )
    assert fast.stats()["counts"]["rows_removed"] > 0
    assert torch.equal(states.last_hidden_state, kept)


@pytest.mark.parametrize("family", ["bart", "t5", "gpt2"])
@pytest.mark.parametrize("mode", ["shared", "el"])
def test_bytes_held_are_those_of_the_formula(family: str, mode: Any) -> None:
    batch, beams, length, new = 3, 4, 17, 9
    model = make(family)
    fast = fastseq.wrap(model, attention=mode)
    fast.generate(**inputs(family), num_beams=beams, max_new_tokens=new, min_new_tokens=new)
    held = fast.stats()["cache_bytes"]
    cached = new - 1 if family == "gpt2" else new
    assert sum(held.values()) == ModelShape.of(model.config).cache_bytes(batch, beams, length, cached, mode)
    layers, width = 2, 48 if family == "t5" else 32
    pair = 2 * layers * width * 4
    if mode == "shared":
        assert held["shared"] == pair * batch * length  # 2·L·D·s·B·N: no beams in it
    elif family == "gpt2":
        assert held["shared"] == pair // 2 * batch * length  # half: one hidden state for a key and a value
    else:
        assert held["shared"] == batch * length * 32 * 4  # B·N·D·s: no layers in it either
    suffix = pair * batch * beams * (new - 1 if family == "gpt2" else new)
    assert held["suffix"] == (suffix // 2 if mode == "el" and family == "gpt2" else suffix)
    stock = model.generate(
        **inputs(family), num_beams=beams, max_new_tokens=new, min_new_tokens=new, return_dict_in_generate=True
    )[CACHE_NAME]
    parts = [stock] if family == "gpt2" else [stock.self_attention_cache, stock.cross_attention_cache]
    used = [layer for part in parts for layer in part.layers if layer.keys is not None]
    tensors = [tensor for layer in used for tensor in (layer.keys, layer.values)]
    stock_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert stock_bytes == pair * batch * beams * length + suffix  # 2·L·D·s·(B·M·N + B·M·t)


def bart_large(batch: int, new: int, size: int = 2, length: int = 1024) -> Call:
    return Call(ModelShape(12, 1024, 1024, 4096, 16, 50265, item=size), batch, 4, length, new)


def test_the_formulas_give_the_papers_numbers() -> None:
    # FastSeq Table 2: BART-large, beam 4, source 1024, output 50, half precision: 6.3, 1.8 and (batch 128) 7.2 GB.
    assert bart_large(32, 50).bytes("stock") / 2**30 == pytest.approx(6.293, abs=1e-3)
    assert bart_large(32, 50).bytes("shared") / 2**30 == pytest.approx(1.793, abs=1e-3)
    assert bart_large(128, 50).bytes("shared") / 2**30 == pytest.approx(7.172, abs=1e-3)
    assert bart_large(32, 50).bytes("stock") / bart_large(32, 50).bytes("shared") == pytest.approx(3.5, abs=0.02)
    # EL-attention Table 4: 96 times less than one set of keys and values a beam and layer.
    assert bart_large(32, 0).bytes("stock") == 96 * bart_large(32, 0).bytes("el")


def test_the_cost_model_prefers_what_fits_and_then_what_is_clearly_faster() -> None:
    slow = Machine(bandwidth=15e9, flops=200e9)  # two cores
    wide = Machine(bandwidth=4e12, flops=800e12)  # a data-centre GPU in half precision
    narrow = Machine(bandwidth=4e12, flops=50e12)  # the same in single precision
    assert choose(bart_large(4, 100, size=4), slow, free=2**34) == "shared"
    assert choose(bart_large(4, 100, size=4), slow, free=2**28) == "el"
    assert choose(bart_large(4, 100, size=4), slow, free=None) == "shared"
    assert choose(bart_large(32, 1), slow, free=None) == "el", "one token: building keys and values does not pay"
    assert choose(bart_large(32, 1), None, free=None) == "shared"
    assert choose(bart_large(32, 140, size=4), narrow, free=None) == "shared"
    assert bart_large(32, 50).el_seconds(wide) < bart_large(32, 50).shared_seconds(narrow)


def test_the_machine_is_measured_once() -> None:
    device = torch.device("cpu")
    machine = measured(device, torch.float32)
    assert machine is measured(device, torch.float32)
    assert machine.bandwidth > 1e8
    assert machine.flops > 1e8


def test_auto_takes_el_when_shared_states_do_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from attmemo.system import memory

    model: Any = make("bart")
    fast = fastseq.wrap(model)
    arguments = inputs("bart", "right")
    expected = model.generate(**arguments, num_beams=4, max_new_tokens=10)
    assert torch.equal(fast.generate(**arguments, num_beams=4, max_new_tokens=10), expected)
    assert "el" not in fast.stats()["counts"]
    # A machine with memory, and a container without.
    files = {"proc/meminfo": "MemAvailable: 8388608 kB\n", "proc/self/cgroup": "0::/box\n"}
    files |= {"cgroup/box/memory.max": "9000", "cgroup/box/memory.current": "8000"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "cgroup")
    assert torch.equal(fast.generate(**arguments, num_beams=4, max_new_tokens=10), expected)
    assert fast.stats()["counts"]["el"] > 0
    llama = make("llama")
    fast = fastseq.wrap(llama)
    fast.generate(**inputs("llama"), num_beams=4, max_new_tokens=10)
    assert fast.stats()["counts"]["prefix"] > 0, "where EL-attention does not hold, keys are shared all the same"
