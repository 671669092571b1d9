"""What would make packed decoding useless: other tokens than stock in float32, other rounding than documented in 8
bits, a path that did not run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fastseq_models import SEQ2SEQ, Pairs, both, inputs, make, pair_of
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList

from attmemo import UnsupportedModelError, fastseq
from attmemo.fastseq.generate import decoders, vocabulary
from attmemo.fastseq.generate.decoders import why_not_packed
from attmemo.kernels.linear8 import linear8_in_torch

FAMILIES = ("bart", "mbart", "marian", "pegasus", "t5", "mt5", "gpt2", "llama", "qwen2", "qwen3")
ENDING = {"exponential_decay_length_penalty": (4, 1.35)}  # samples finish at different steps
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy that ends": {**ENDING},
    "beam 4, n-gram 3": {"num_beams": 4, "no_repeat_ngram_size": 3},
    "early": {"num_beams": 4, "early_stopping": True, "length_penalty": -1.0, **ENDING},
    "several returned": {"num_beams": 4, "num_return_sequences": 3, **ENDING},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.7},
    "beam sampling": {"num_beams": 3, "do_sample": True, **ENDING},
    "penalties": {"num_beams": 5, "repetition_penalty": 1.2, "min_new_tokens": 5, "bad_words_ids": [[7], [8, 9]]},
}
needs_kernels = pytest.mark.skipif(
    why_not_packed(torch.float32, None) is not None, reason="the processor has no instructions for packed layers"
)
needs_bfloat16 = pytest.mark.skipif(
    why_not_packed(torch.bfloat16, None) is not None, reason="the processor has no products of bfloat16"
)


@pytest.fixture(scope="module")
def models() -> Pairs:
    return {}


def pair(models: Pairs, family: str) -> tuple[Any, Any]:
    return pair_of(models, family, fastseq.accelerate)


@needs_kernels
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_tokens_are_those_of_stock(models: Pairs, family: str, setting: str) -> None:
    model, fast = pair(models, family)
    for padding in ("right", "left") if family in SEQ2SEQ else (None, "left"):
        before = fast.stats()["counts"]
        expected, got = both(model, fast, inputs(family, padding), SETTINGS[setting])
        assert torch.equal(expected, got), (padding, expected, got)
        assert len({tuple(row) for row in got.tolist()}) > 1, "every row the same: the model proves nothing"
        after = fast.stats()["counts"]
        steps, packed, encoders = (
            after.get(name, 0) - before.get(name, 0) for name in ("steps", "packed_steps", "packed_encoders")
        )
        assert packed == steps, "a step ran elsewhere"
        assert encoders == (family in SEQ2SEQ), "an encoder ran elsewhere"


@needs_kernels
@pytest.mark.parametrize("family", ["bart", "t5", "gpt2", "qwen3"])
@pytest.mark.parametrize("beams", [1, 4])
def test_scores_are_those_of_stock(models: Pairs, family: str, beams: int) -> None:
    model, fast = pair(models, family)
    setting = {"num_beams": beams, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected, got = both(model, fast, inputs(family, "left"), setting)
    assert torch.equal(expected.sequences, got.sequences)
    for one, other in zip(expected.scores + expected.logits, got.scores + got.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("family", ["bart", "gpt2"])
@pytest.mark.parametrize("beams", [1, 4])
def test_odd_processors_of_the_callers_see_what_stock_shows_them(
    models: Pairs, family: str, beams: int
) -> None:
    class Remembers(LogitsProcessor):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            self.seen.append(input_ids.clone())
            return scores + torch.arange(scores.shape[0])[:, None] * 0.01  # knows rows by their number

    model, fast = pair(models, family)
    ran = []
    for engine in (model, fast):
        odd = Remembers()
        ids = engine.generate(
            **inputs(family, "left"), max_new_tokens=12, num_beams=beams, logits_processor=LogitsProcessorList([odd])
        )
        ran.append((ids, odd.seen))
    assert torch.equal(ran[0][0], ran[1][0])
    assert len(ran[0][1]) == len(ran[1][1]) > 3
    assert all(torch.equal(one, other) for one, other in zip(ran[0][1], ran[1][1], strict=True))


@needs_kernels
@pytest.mark.parametrize("family", ["bart", "llama"])
def test_more_tokens_than_one_chunk_of_the_cache_holds(family: str) -> None:
    model = make(family)
    if family == "bart":
        model.model.decoder.embed_positions = type(model.model.decoder.embed_positions)(200, 32)
    fast = fastseq.accelerate(model)
    expected, got = both(
        model, fast, inputs(family, "left"), {"num_beams": 3, "max_new_tokens": 90, "min_new_tokens": 90}
    )
    assert torch.equal(expected, got)
    assert got.shape[1] > 90


@needs_kernels
def test_a_row_is_the_same_alone_and_in_a_batch_and_with_any_threads(models: Pairs) -> None:
    _, fast = pair(models, "bart")
    given = inputs("bart")
    setting = {"max_new_tokens": 8, "return_dict_in_generate": True, "output_logits": True}
    whole = fast.generate(**given, **setting)
    threads = torch.get_num_threads()
    torch.set_num_threads(3 if threads != 3 else 2)
    try:
        other = fast.generate(**given, **setting)
    finally:
        torch.set_num_threads(threads)
    for one, two in zip(whole.logits, other.logits, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)  # the encoder is torch's
    alone = fast.generate(**{name: value[:1] for name, value in given.items()}, **setting)
    assert torch.equal(alone.sequences[0], whole.sequences[0, : alone.sequences.shape[1]])


class _Oracle8(nn.Module):
    """A linear layer in 8 bits as `attmemo.kernels.linear8` documents it, in plain torch."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        own = linear.weight.detach()
        self.matrix = own.t() if type(linear).__name__ == "Conv1D" else own
        self.bias = linear.bias
        self.weight = torch.empty(0, dtype=own.dtype)

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, input.shape[-1])
        return linear8_in_torch(rows, [self.matrix], [self.bias]).view(*input.shape[:-1], -1)


def rounded(model: Any) -> Any:
    """A copy of the model whose linear layers are the oracle's."""
    twin = copy.deepcopy(model)
    for parent in list(twin.modules()):
        for name, child in list(parent._modules.items()):
            if type(child).__name__ in ("Linear", "Conv1D"):
                parent._modules[name] = _Oracle8(child)
    return twin


class _Given(LogitsProcessor):  # type: ignore[misc]
    """Words in an order of their own, whatever the scores are: both sides decode the same text."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        given = torch.full_like(scores, -float("inf"))
        rows = torch.arange(len(scores))
        given[rows, 10 + (7 * rows + 5 * input_ids.shape[1]) % 60] = 0
        return given


def logits_of(engine: Any, family: str, new: int = 8) -> Tensor:
    found = engine.generate(
        **inputs(family, "left"), max_new_tokens=new, return_dict_in_generate=True, output_logits=True,
        logits_processor=LogitsProcessorList([_Given()]),
    )  # fmt: skip
    return torch.stack(found.logits).float()


@pytest.mark.parametrize("family", FAMILIES)
def test_8_bits_round_as_documented(family: str) -> None:
    model = make(family)
    fast = fastseq.accelerate(model, weights="int8")
    got, expected, exact = (logits_of(engine, family) for engine in (fast, rounded(model), model))
    # Where the order of a sum tips a code over, a number differs by a step; so means are compared.
    apart, moved = (got - expected).abs().mean(), (expected - exact).abs().mean()
    assert moved > 0, "nothing was rounded"
    assert apart < moved / 4
    assert fast.stats()["counts"]["packed_steps"] >= 7


@needs_bfloat16
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_no_farther_from_the_exact_scores_than_stock(family: str) -> None:
    model = make(family)
    exact = logits_of(model, family)
    stock = copy.deepcopy(model).to(torch.bfloat16)
    fast = fastseq.accelerate(model, dtype="bfloat16")
    own, theirs = ((logits_of(engine, family) - exact).abs().mean() for engine in (fast, stock))
    assert 0 < own < 1.2 * theirs, (own, theirs)
    assert model.dtype == torch.float32, "the caller's model was changed"
    assert fast.stats()["counts"]["packed_steps"] >= 7


@needs_bfloat16
def test_bfloat16_and_8_bits_together() -> None:
    model = make("bart")
    fast = fastseq.accelerate(model, dtype="bfloat16", weights="int8")
    exact, got = logits_of(model, "bart"), logits_of(fast, "bart")
    assert torch.corrcoef(torch.stack((exact.flatten(), got.flatten())))[0, 1] > 0.98
    expected, own = both(model, fast, inputs("bart"), {"num_beams": 4})
    assert own.dtype == expected.dtype


def test_el_attention_is_not_chosen_in_8_bits_however_short_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from attmemo.fastseq.generate import stepper

    model = make("bart")
    exact, rounded = fastseq.wrap(model), fastseq.accelerate(model, weights="int8")
    monkeypatch.setattr(stepper, "choose", lambda *_: "el")
    exact.generate(**inputs("bart"), num_beams=2, max_new_tokens=5)
    assert exact.stats()["counts"]["el"] > 0, "memory is not short: the test proves nothing"
    rounded.generate(**inputs("bart"), num_beams=2, max_new_tokens=5)
    assert rounded.stats()["counts"]["packed_steps"] > 0


@needs_kernels
def test_what_has_no_packed_layers_runs_as_before() -> None:
    model = make("prophetnet")
    fast = fastseq.accelerate(model)
    expected, got = both(model, fast, inputs("prophetnet", "right"), {"num_beams": 3})
    assert torch.equal(expected, got)
    assert fast.stats()["calls"] == {"fast": 1, "stock": 0}
    assert "packed_steps" not in fast.stats()["counts"]
    with pytest.raises(UnsupportedModelError, match="8 bits"):
        fastseq.accelerate(model, weights="int8")


@needs_kernels
def test_a_prompt_of_the_decoders_with_a_mask_runs_by_the_models_own_code(
    models: Pairs,
) -> None:
    model, fast = pair(models, "bart")
    before = fast.stats()["counts"].get("packed_steps", 0)
    prompt = {"decoder_input_ids": torch.tensor([[2, 5, 6]] * 3), "decoder_attention_mask": torch.ones(3, 3).long()}
    expected, got = both(model, fast, inputs("bart") | prompt, {"num_beams": 2})
    assert torch.equal(expected, got)
    assert fast.stats()["counts"].get("packed_steps", 0) == before
    del prompt["decoder_attention_mask"]
    expected, got = both(model, fast, inputs("bart") | prompt, {"num_beams": 2})
    assert torch.equal(expected, got)
    assert fast.stats()["counts"]["packed_steps"] > before


ALONE: dict[str, dict[str, Any]] = {
    "greedy": {}, "n-gram 2": {"no_repeat_ngram_size": 2}, "sampling": {"do_sample": True, "top_k": 5},
    "penalty": {"repetition_penalty": 1.3}, "to the end of the room": {"max_new_tokens": 40, "min_new_tokens": 40},
}  # fmt: skip


def with_a_draft(monkeypatch: pytest.MonkeyPatch, model: Any) -> Any:
    monkeypatch.setattr(decoders, "_WORTH", 0)
    monkeypatch.setattr(vocabulary, "_LEAST", 0)
    fast = fastseq.accelerate(model)
    assert fast._packed.draft is not None
    return fast


def alone(family: str) -> dict[str, Tensor]:
    return {name: value[:1] for name, value in inputs(family).items()}


@needs_kernels
@pytest.mark.parametrize("setting", ALONE)
@pytest.mark.parametrize("family", ["bart", "t5", "gpt2", "qwen3"])
def test_words_that_8_bits_foresee_change_no_text(
    monkeypatch: pytest.MonkeyPatch, family: str, setting: str
) -> None:
    model = make(family)
    fast = with_a_draft(monkeypatch, model)
    expected, got = both(model, fast, alone(family), {"min_new_tokens": 12, **ALONE[setting]})
    assert torch.equal(expected, got)
    counts = fast.stats()["counts"]
    assert 0 < counts["foreseen"] <= counts["drafts"], "no word was foreseen: the test proves nothing"


@needs_kernels
@pytest.mark.parametrize("family", ["bart", "llama"])
def test_a_draft_that_foresees_nothing_changes_no_text_and_is_given_up(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    model = make(family)
    fast, other = with_a_draft(monkeypatch, model), with_a_draft(monkeypatch, make(family, seed=5))
    fast._packed.draft = other._packed.draft
    setting = {"max_new_tokens": 45, "min_new_tokens": 45, "no_repeat_ngram_size": 2}
    expected, got = both(model, fast, alone(family), setting)
    assert torch.equal(expected, got)
    counts = fast.stats()["counts"]
    assert counts["drafts"] < counts["steps"], "drafts were not given up"


@needs_kernels
def test_scores_and_processors_see_what_stock_shows_them_beside_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("gpt2")
    fast = with_a_draft(monkeypatch, model)
    setting = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "bad_words_ids": [[7]]}
    expected, got = both(model, fast, alone("gpt2"), setting)
    assert torch.equal(expected.sequences, got.sequences)
    for one, two in zip(expected.scores + expected.logits, got.scores + got.logits, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("family", ["marian", "pegasus"])
def test_embeddings_are_scaled_where_the_model_scales_them(family: str) -> None:
    model = make(family)
    for part in (model.model.encoder, model.model.decoder):
        part.embed_scale = 3.0
    fast = fastseq.accelerate(model)
    expected, got = both(model, fast, inputs(family, "right"), {"num_beams": 2})
    assert torch.equal(expected, got)
    assert fast.stats()["counts"]["packed_steps"] > 0


@needs_kernels
def test_prompts_that_end_in_padding_run_by_the_models_own_code(models: Pairs) -> None:
    model, fast = pair(models, "gpt2")
    before = fast.stats()["counts"].get("packed_steps", 0)
    expected, got = both(model, fast, inputs("gpt2", "right"), {"num_beams": 2})
    assert torch.equal(expected, got)
    assert fast.stats()["counts"].get("packed_steps", 0) == before


@needs_kernels
def test_the_cache_holds_what_the_formula_says(models: Pairs) -> None:
    from attmemo.fastseq.generate.shape import ModelShape

    model, fast = pair(models, "bart")
    fast.generate(**inputs("bart"), num_beams=4, max_new_tokens=10, min_new_tokens=10)
    held = fast.stats()["cache_bytes"]
    assert sum(held.values()) == ModelShape.of(model.config).cache_bytes(3, 4, 17, 10, "shared")


@pytest.mark.parametrize("wrong", [{"dtype": "float16"}, {"weights": "int4"}, {"attention": "other"}])
def test_what_is_not_known_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong.values())) if "attention" in wrong else " not "):
        fastseq.accelerate(make("gpt2"), **wrong)
