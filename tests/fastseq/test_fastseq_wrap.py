"""What would make the fast path useless: other tokens than stock, a path that did not run, state that stays behind."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fastseq_models import CAUSAL, MAKERS, SEQ2SEQ, Pairs, both, inputs, make, pair_of
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import LogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteria

from attmemo import UnsupportedModelError, fastseq
from attmemo.models.cache_name import CACHE_NAME

# After four tokens the end becomes likelier at every step, so samples finish at different steps.
ENDING = {"exponential_decay_length_penalty": (4, 1.35)}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy that ends": {**ENDING},
    "beam 4": {"num_beams": 4},
    "beam 4, n-gram 3": {"num_beams": 4, "no_repeat_ngram_size": 3},
    "long is good": {"num_beams": 4, "length_penalty": 2.0, **ENDING},
    "short is good": {"num_beams": 4, "length_penalty": -1.0, **ENDING},
    "early": {"num_beams": 4, "early_stopping": True, **ENDING},
    "not early": {"num_beams": 3, "early_stopping": False, **ENDING},
    "never early": {"num_beams": 4, "early_stopping": "never", **ENDING},
    "several returned": {"num_beams": 4, "num_return_sequences": 3, **ENDING},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.7},
    "several samples": {"do_sample": True, "num_return_sequences": 3, **ENDING},
    "beam sampling": {"num_beams": 3, "do_sample": True, **ENDING},
    "beam 8, n-gram 2, penalties": {
        "num_beams": 8,
        "no_repeat_ngram_size": 2,
        "repetition_penalty": 1.2,
        "min_new_tokens": 5,
        **ENDING,
    },
}
# Others hold the same, and more.
SLOW = ("greedy", "short is good", "not early", "early", "sampling", "several returned")
PADDINGS = dict.fromkeys(SEQ2SEQ, ("right", "left")) | dict.fromkeys(CAUSAL, (None, "left"))


@pytest.fixture(scope="module")
def models() -> Pairs:
    return {}


def pair(models: Pairs, family: str) -> tuple[Any, Any]:
    return pair_of(models, family, fastseq.wrap)


@pytest.mark.parametrize(
    "setting", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in SETTINGS]
)
@pytest.mark.parametrize("family", [family for family in MAKERS if family != "whisper"])
def test_tokens_are_those_of_stock(models: Pairs, family: str, setting: str) -> None:
    model, fast = pair(models, family)
    before = fast.stats()
    for padding in PADDINGS[family]:
        expected, got = both(model, fast, inputs(family, padding), SETTINGS[setting])
        assert torch.equal(expected, got), (padding, expected, got)
        assert len({tuple(row) for row in got.tolist()}) > 1, "every row the same: the model proves nothing"
    after = fast.stats()
    assert after["calls"]["fast"] - before["calls"]["fast"] == 2, after["stock_reasons"]
    several = SETTINGS[setting].get("num_beams", 1) > 1 or SETTINGS[setting].get("num_return_sequences", 1) > 1
    if several or family in CAUSAL:
        kind, layers = "prefix" if family in CAUSAL else "shared", 1 if family == "distilbart" else 2
        ran = after["counts"][kind] - before["counts"].get(kind, 0)
        steps = after["counts"]["steps"] - before["counts"].get("steps", 0)
        assert ran == layers * (steps - 2), "not every layer shared at every step"


@pytest.mark.parametrize("setting", SETTINGS)
def test_whisper_through_its_own_generate(models: Pairs, setting: str) -> None:
    model, fast = pair(models, "whisper")
    before = fast.stats()["counts"].get("shared", 0)
    expected, got = both(model, fast, inputs("whisper"), SETTINGS[setting])
    assert torch.equal(expected, got)
    assert len({tuple(row) for row in got.tolist()}) > 1
    assert fast.stats()["calls"]["stock"] == 0, fast.stats()["stock_reasons"]
    beams = SETTINGS[setting].get("num_beams", 1) > 1  # several samples: it repeats its input itself
    assert (fast.stats()["counts"].get("shared", 0) > before) == beams


@pytest.mark.parametrize("attention", ["auto", "el"])
@pytest.mark.parametrize("beams", [1, 4])
def test_whisper_that_asks_its_encoder_for_the_language_and_for_speech(beams: int, attention: str) -> None:
    """It does so outside of the decoding loop, and needs the encoder's states at full size."""
    model = make("whisper")
    settings = model.generation_config
    settings.is_multilingual, settings.lang_to_id = True, {f"<|{code}|>": 40 + code for code in range(30)}
    settings.task_to_id, settings.no_timestamps_token_id = {"transcribe": 80, "translate": 81}, 90
    fast = fastseq.wrap(model, attention=attention)
    arguments = inputs("whisper", batch=6)
    for extra in ({}, {"no_speech_threshold": 0.6, "logprob_threshold": -9.0, "temperature": 0.0}):
        setting = {"num_beams": beams, "max_new_tokens": 8, "return_timestamps": False, **extra}
        expected, got = both(model, fast, arguments, setting)
        expected, got = (out if isinstance(out, Tensor) else out["sequences"] for out in (expected, got))
        assert torch.equal(expected, got)
        assert len({tuple(row) for row in got.tolist()}) > 1
    assert fast.stats()["calls"] == {"fast": 2, "stock": 0}, fast.stats()["stock_reasons"]


@pytest.mark.parametrize("family", [family for family in MAKERS if family != "whisper"])
@pytest.mark.parametrize("beams", [1, 4])
def test_scores_and_everything_else_in_the_output(models: Pairs, family: str, beams: int) -> None:
    model, fast = pair(models, family)
    setting = {
        "num_beams": beams,
        "num_return_sequences": min(2, beams),
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        **ENDING,
    }
    expected, got = both(model, fast, inputs(family, PADDINGS[family][1]), setting)
    assert type(expected) is type(got)
    assert torch.equal(expected.sequences, got.sequences)
    assert len(expected.scores) == len(got.scores)
    for one, other in zip(expected.scores + expected.logits, got.scores + got.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    if beams > 1:
        torch.testing.assert_close(expected.sequences_scores, got.sequences_scores, rtol=1e-5, atol=1e-5)
        assert torch.equal(expected.beam_indices, got.beam_indices)
    assert got.get(CACHE_NAME) is None


@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("family", ["bart", "t5", "gpt2", "llama"])
def test_rows_leave_and_nothing_changes(models: Pairs, family: str, early: bool | str) -> None:
    model, fast = pair(models, family)
    arguments = inputs(family, PADDINGS[family][1], batch=8)
    removed = fast.stats()["counts"].get("rows_removed", 0)
    for beams in (1, 4):
        setting = {
            "num_beams": beams,
            "early_stopping": early,
            "exponential_decay_length_penalty": (2, 1.12),
            "max_new_tokens": 40,
            "return_dict_in_generate": True,
        }
        if beams == 1:
            setting.pop("early_stopping")
        expected, got = both(model, fast, arguments, setting)
        assert torch.equal(expected.sequences, got.sequences)
        if beams > 1:
            assert torch.equal(expected.beam_indices, got.beam_indices)
        lengths = {int((row != model.generation_config.pad_token_id).sum()) for row in got.sequences}
        # The small T5 is so unsure of its words that with beams every sample ends at the same step.
        assert len(lengths) > 1 or (family == "t5" and beams > 1), "all samples ended together: nothing could leave"
    assert fast.stats()["counts"]["rows_removed"] > removed


def run_fast(models: Pairs, family: str, arguments: dict[str, Any], **setting: Any) -> Tensor:
    """What both paths give, which is the same; the fast one ran."""
    model, fast = pair(models, family)
    before = fast.stats()["calls"]["fast"]
    expected, got = both(model, fast, arguments, setting)
    assert torch.equal(expected, got)
    assert fast.stats()["calls"]["fast"] == before + 1, fast.stats()["stock_reasons"]
    return got


@pytest.mark.parametrize("beams", [1, 4])
class TestInputsOfAnotherForm:
    @pytest.mark.parametrize("family", [*SEQ2SEQ, *CAUSAL])
    def test_without_a_mask(self, models: Pairs, family: str, beams: int) -> None:
        for padding in (None, PADDINGS[family][-1]):
            run_fast(models, family, {"input_ids": inputs(family, padding)["input_ids"]}, num_beams=beams)

    @pytest.mark.parametrize("family", [*SEQ2SEQ, *CAUSAL])
    @pytest.mark.parametrize("length", [1, 17])
    def test_one_row(self, models: Pairs, family: str, length: int, beams: int) -> None:
        run_fast(models, family, inputs(family, batch=1, length=length), num_beams=beams, **ENDING)

    @pytest.mark.parametrize("family", CAUSAL)
    def test_a_prompt_of_one_token(self, models: Pairs, family: str, beams: int) -> None:
        run_fast(models, family, inputs(family, length=1), num_beams=beams)

    @pytest.mark.parametrize("family", CAUSAL)
    def test_a_prompt_padded_at_its_end(self, models: Pairs, family: str, beams: int) -> None:
        run_fast(models, family, inputs(family, "right"), num_beams=beams)

    @pytest.mark.parametrize("family", SEQ2SEQ)
    def test_words_to_go_on_with(self, models: Pairs, family: str, beams: int) -> None:
        start = torch.tensor([[2, 11, 12], [2, 13, 14], [2, 11, 15]])
        for given in (start, start[:, :1] + 20):
            got = run_fast(models, family, {**inputs(family, "right"), "decoder_input_ids": given}, num_beams=beams)
            assert torch.equal(got[:, -given.shape[1] :], given) is False
            assert got.shape[1] > given.shape[1]

    @pytest.mark.parametrize("family", ["bart", "gpt2", "llama"])
    def test_only_some_words_are_allowed(self, models: Pairs, family: str, beams: int) -> None:
        def allowed(row: int, tokens: Tensor) -> list[int]:
            return [2, *range(20 + row, 90, 3)]  # row: the sample, by its number in the input

        removed = pair(models, family)[1].stats()["counts"].get("rows_removed", 0)
        arguments = inputs(family, PADDINGS[family][1])
        got = run_fast(models, family, arguments, num_beams=beams, prefix_allowed_tokens_fn=allowed, **ENDING)
        start = 1 if family == "bart" else arguments["input_ids"].shape[1]
        for row, tokens in enumerate(got[:, start:].tolist()):
            assert {token for token in tokens if token not in (1, 2)} <= set(range(20 + row, 90, 3))
        assert pair(models, family)[1].stats()["counts"].get("rows_removed", 0) == removed, "rows left under it"


@pytest.mark.parametrize("family", ["bart", "t5", "marian"])
def test_the_encoder_leaves_out_the_padding(models: Pairs, family: str) -> None:
    fast = pair(models, family)[1]
    for padding, saved in ((None, 0), ("right", 3 + 3)):  # 17 alone, and 14 beside 11
        before = fast.stats()["counts"]
        run_fast(models, family, inputs(family, padding), num_beams=2)
        after = fast.stats()["counts"]
        read, padded = (after[name] - before.get(name, 0) for name in ("encoder_tokens", "encoder_tokens_padded"))
        assert padded == 3 * 17
        assert padded - read == saved


def test_the_users_own_encoder_is_never_changed() -> None:
    """A copy that kept it: no module of it holds a config."""
    from attmemo.fastseq.generate.call_state import CallState
    from attmemo.fastseq.generate.encoder import held_once
    from attmemo.fastseq.generate.refusal import Refusal

    model, copy = make("bart"), make("bart")
    copy.model.encoder = model.model.encoder
    with pytest.raises(Refusal, match="no encoder of its own"), held_once(copy, model, CallState(mode="shared")):
        pass
    assert "forward" not in vars(model.model.encoder)
    assert "_expand_inputs_for_generation" not in vars(copy)


@pytest.mark.parametrize("name", ["no_repeat_ngram_size", "encoder_no_repeat_ngram_size"])
@pytest.mark.parametrize("beams", [1, 4])
def test_ngrams_are_banned_by_our_kernel(
    models: Pairs, name: str, beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attmemo.fastseq.generate import ngram

    banned = []
    real = ngram.ban_ngrams
    monkeypatch.setattr(ngram, "ban_ngrams", lambda *arguments: banned.append(1) or real(*arguments))
    run_fast(models, "bart", inputs("bart", "right"), num_beams=beams, **{name: 2})
    assert len(banned) > 10, "our kernel was not asked at every step"


@pytest.mark.parametrize("family", ["bart", "t5", "gpt2", "llama"])
def test_half_precision_runs_on_the_fast_path(family: str) -> None:
    model = make(family).to(torch.bfloat16)
    fast = fastseq.wrap(model)
    setting: dict[str, Any] = {"num_beams": 4, "return_dict_in_generate": True, "output_scores": True}
    expected, got = both(model, fast, inputs(family, PADDINGS[family][1]), setting)
    assert fast.stats()["calls"] == {"fast": 1, "stock": 0}, fast.stats()["stock_reasons"]
    assert fast.stats()["counts"]["prefix" if family in CAUSAL else "shared"] > 0
    torch.testing.assert_close(expected.scores[0], got.scores[0], rtol=0.1, atol=0.2)


def test_a_streamer_gets_all_tokens() -> None:
    class Streamer:
        def __init__(self) -> None:
            self.seen: list[list[int]] = []

        def put(self, tokens: Tensor) -> None:
            self.seen.append(tokens.flatten().tolist())

        def end(self) -> None:
            self.seen.append([])

    model = make("gpt2")
    fast = fastseq.wrap(model)
    streams = [Streamer(), Streamer()]
    for path, streamer in zip((model, fast), streams, strict=True):
        path.generate(**inputs("gpt2", batch=1), max_new_tokens=5, streamer=streamer)
    assert streams[0].seen == streams[1].seen
    assert len(streams[1].seen) == 1 + 5 + 1
    assert fast.stats()["stock_reasons"] == {"a streamer": 1}


@pytest.mark.parametrize(
    "setting",
    [
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"num_beams": 4, "force_words_ids": [[5, 6]]},
        {"penalty_alpha": 0.6, "top_k": 4},
    ],
    ids=["groups", "constraints", "contrastive"],
)
def test_ways_to_search_that_are_not_transformers_own_any_more(setting: dict[str, Any]) -> None:
    """They come from the hub, if the caller trusts it: stock says so."""
    model = make("gpt2")
    fast = fastseq.wrap(model)
    said = []
    for path in (model, fast):
        with pytest.raises(ValueError, match="trust_remote_code") as caught:
            path.generate(**inputs("gpt2"), max_new_tokens=3, **setting)
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert fast.stats()["calls"] == {"fast": 0, "stock": 1}


class _Ban(LogitsProcessor):  # type: ignore[misc]
    """A processor of the user's that knows rows by their number: it bans another token in each."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[torch.arange(len(scores)), 5 + torch.arange(len(scores)) % 20] = float("-inf")
        return scores


class _StopAtFive(StoppingCriteria):  # type: ignore[misc]
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] % 5 == 0


def test_processors_and_criteria_of_the_user_see_what_stock_shows_them(models: Pairs) -> None:
    model, fast = pair(models, "bart")
    before = fast.stats()
    for beams in (1, 4):
        setting: dict[str, Any] = {"num_beams": beams, "logits_processor": LogitsProcessorList([_Ban()]), **ENDING}
        expected, got = both(model, fast, inputs("bart", "right"), setting)
        assert torch.equal(expected, got)
        setting = {"num_beams": beams, "stopping_criteria": StoppingCriteriaList([_StopAtFive()])}
        expected, got = both(model, fast, inputs("bart", "right"), setting)
        assert torch.equal(expected, got)
    after = fast.stats()
    assert after["calls"]["fast"] - before["calls"]["fast"] == 4
    assert after["counts"].get("rows_removed", 0) == before["counts"].get("rows_removed", 0), "rows left under them"


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"use_cache": False}, "use_cache=False"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "hidden states"),
        ({"return_dict_in_generate": True, "use_cache": True}, "the cache is to be returned"),
        ({"cache_implementation": "static", "num_beams": 1}, "cache_implementation"),
        ({"prompt_lookup_num_tokens": 3, "num_beams": 1}, "assisted"),
    ],
)
def test_what_is_not_covered_runs_on_the_stock_path_and_is_counted(setting: dict[str, Any], reason: str) -> None:
    model = make("gpt2")
    fast = fastseq.wrap(model, check=False)
    arguments = inputs("gpt2", batch=1)
    expected, got = both(model, fast, arguments, {"num_beams": 2, **setting})
    if setting.get("return_dict_in_generate"):
        expected, got = expected.sequences, got.sequences
    assert torch.equal(expected, got)
    stats = fast.stats()
    assert stats["calls"] == {"fast": 0, "stock": 1}
    assert any(reason in said for said in stats["stock_reasons"])


@pytest.mark.parametrize("by", ["is_deepspeed_zero3_enabled", "is_fsdp_managed_module"])
def test_weights_of_which_each_process_has_a_part(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes have to run as many forwards, or they wait for each other: stock's loop sees to that."""
    from attmemo.fastseq.generate import fastmodel

    fast = fastseq.wrap(make("gpt2"), check=False)
    monkeypatch.setattr(fastmodel, by, lambda *model: True)
    fast.generate(**inputs("gpt2"), max_new_tokens=2)
    assert fast.stats()["calls"] == {"fast": 0, "stock": 1}
    assert any("sharded" in reason for reason in fast.stats()["stock_reasons"])


def test_synced_gpus_reach_stocks_loop() -> None:
    fast = fastseq.wrap(make("gpt2"), check=False)
    with pytest.raises(ValueError, match="process group"):  # which this process does not have
        fast.generate(**inputs("gpt2"), max_new_tokens=2, synced_gpus=True)
    assert fast.stats()["stock_reasons"] == {"synced_gpus": 1}


def test_arguments_that_are_none_are_taken_as_not_given(models: Pairs) -> None:
    model, fast = pair(models, "bart")
    nothing = dict.fromkeys(("custom_generate", "streamer", "assistant_model", "synced_gpus", "negative_prompt_ids"))
    before = fast.stats()["calls"]["fast"]
    expected, got = both(model, fast, inputs("bart"), {"num_beams": 2, **nothing})
    assert torch.equal(expected, got)
    assert fast.stats()["calls"]["fast"] == before + 1


def test_encoder_outputs_of_the_caller(models: Pairs) -> None:
    model, fast = pair(models, "bart")
    arguments = inputs("bart", "right")
    with torch.no_grad():
        states = model.get_encoder()(**arguments)
    kept = states.last_hidden_state.clone()
    arguments = {"encoder_outputs": states, "attention_mask": arguments["attention_mask"]}
    got = fast.generate(**arguments, num_beams=4, max_new_tokens=12)
    assert torch.equal(states.last_hidden_state, kept), "the caller's encoder outputs were changed"
    assert torch.equal(model.generate(**arguments, num_beams=4, max_new_tokens=12), got)


def test_the_model_is_left_as_it_was() -> None:
    model = make("bart")
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    config = dict(vars(model.config))
    fast = fastseq.wrap(model)
    fast.generate(**inputs("bart", "right"), num_beams=4, max_new_tokens=8)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert dict(vars(model.config)) == config
    assert fast.close() is model
    assert type(model).generate is type(make("bart")).generate


def test_new_weights_modes_and_heads_are_seen_by_the_next_call() -> None:
    model = make("bart")
    fast = fastseq.wrap(model)
    other = make("bart", seed=5)
    first = fast.generate(**inputs("bart"), num_beams=4, max_new_tokens=8)
    model.load_state_dict(other.state_dict())
    second = fast.generate(**inputs("bart"), num_beams=4, max_new_tokens=8)
    assert not torch.equal(first, second)
    assert torch.equal(second, other.generate(**inputs("bart"), num_beams=4, max_new_tokens=8))
    model.model.decoder.layers[0].encoder_attn = other.model.decoder.layers[1].encoder_attn
    assert torch.equal(
        fast.generate(**inputs("bart"), num_beams=4, max_new_tokens=8),
        model.generate(**inputs("bart"), num_beams=4, max_new_tokens=8),
    )
    model.train()
    fast.generate(**inputs("bart"), num_beams=2, max_new_tokens=4)
    assert "the model is in training mode" in fast.stats()["stock_reasons"]


def test_threads_and_models_do_not_see_each_other() -> None:
    models = [make("bart"), make("gpt2"), make("t5", seed=4)]
    families = ["bart", "gpt2", "t5"]
    fasts = [fastseq.wrap(model) for model in models]
    arguments = [inputs(family, PADDINGS[family][1]) for family in families]
    expected = [m.generate(**a, num_beams=4, max_new_tokens=16) for m, a in zip(models, arguments, strict=True)]
    wrong: list[object] = []

    def work(number: int) -> None:
        for _ in range(3):
            try:
                for source in (fasts, models):  # a stock call beside the fast ones is not disturbed either
                    got = source[number].generate(**arguments[number], num_beams=4, max_new_tokens=16)
                    if not torch.equal(got, expected[number]):
                        wrong.append((number, got))
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 0, 1, 1, 2, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert all(fast.stats()["calls"] == {"fast": 6, "stock": 0} for fast in fasts)


class _StopsTheCall(Exception):
    pass


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("family", "attention"), [("bart", "shared"), ("bart", "el"), ("t5", "auto"), ("gpt2", "el"), ("llama", "shared")]
)
def test_what_a_call_made_goes_without_the_garbage_collector(family: str, attention: str, fails: bool) -> None:
    fast = fastseq.wrap(make(family), attention=attention)
    kinds = ("BeamArena", "CallState", "CrossLayer", "PrefixLayer", "SuffixLayer", "ELStates", "ELSelfLayer")
    made: list[weakref.ref[Any]] = []

    class Spy(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            if not made:
                made.extend(weakref.ref(found) for found in gc.get_objects() if type(found).__name__ in kinds)
            elif fails:
                raise _StopsTheCall
            return scores

    arguments: dict[str, Any] = {**inputs(family), "num_beams": 2, "max_new_tokens": 4}
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(_StopsTheCall) if fails else nullcontext():
            fast.generate(**arguments, logits_processor=LogitsProcessorList([Spy()]))
        assert len(made) >= 3
        assert [reference() for reference in made if reference() is not None] == []
    finally:
        gc.enable()


def test_a_rotary_module_that_grows_is_left_as_it_was() -> None:
    from transformers import LlamaForCausalLM

    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = make("llama").config
    config.max_position_embeddings, config.rope_parameters = 16, rope
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    fast = fastseq.wrap(model)
    ids = inputs("llama")["input_ids"]
    frequencies = model.model.rotary_emb.inv_freq
    with torch.no_grad():
        before = model(ids[:, :9]).logits
    long: dict[str, Any] = {"input_ids": ids, "num_beams": 2, "max_new_tokens": 12, "eos_token_id": None}
    got = fast.generate(**long)
    assert model.model.rotary_emb.inv_freq is frequencies
    with torch.no_grad():
        assert torch.equal(model(ids[:, :9]).logits, before)
    assert torch.equal(model.generate(**long), got), "the copy did not grow as stock does"
    assert fast.stats()["calls"] == {"fast": 1, "stock": 0}


def test_a_model_that_is_not_generative_is_refused_with_what_to_do() -> None:
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8))
    with pytest.raises(UnsupportedModelError, match="AutoModelForSeq2SeqLM"):
        fastseq.wrap(model)
    with pytest.raises(UnsupportedModelError):
        fastseq.wrap(object())
    with pytest.raises(ValueError, match="one of auto"):
        fastseq.wrap(make("bart"), attention="fast")


def test_an_unknown_model_generates_on_the_stock_path_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)).eval()
    with caplog.at_level(logging.WARNING, "attmemo.fastseq"):
        fast = fastseq.wrap(model)
    assert sum("original path" in record.message for record in caplog.records) == 1
    arguments = inputs("gpt2")
    expected, got = both(model, fast, arguments, {"num_beams": 3})
    assert torch.equal(expected, got)
    assert fast.stats()["calls"] == {"fast": 0, "stock": 1}


@pytest.mark.parametrize("attention", ["auto", "shared", "el"])
def test_a_model_wrapped_in_training_mode_is_tested_later(
    attention: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attmemo.fastseq.generate import beam_attention as functions

    wrong = "el_cross_attention" if attention == "el" else "shared_attention"
    real = getattr(functions, wrong)
    monkeypatch.setattr(functions, wrong, lambda *arguments: -real(*arguments))
    model = make("bart").train()
    fast = fastseq.wrap(model, attention=attention)
    fast.generate(**inputs("bart"), num_beams=2, max_new_tokens=2)
    assert "original path" not in caplog.text, "nothing is known yet"
    model.eval()
    for _ in range(2):
        expected, got = both(model, fast, inputs("bart"), {"num_beams": 3})
        assert torch.equal(expected, got)
    assert caplog.text.count("its scores differ") == 1
    assert fast.stats()["calls"] == {"fast": 0, "stock": 3}
    assert fast.cache_mode == "stock"


@pytest.mark.parametrize("attention", ["auto", "el"])
def test_a_model_wrapped_in_training_mode_is_fast_afterwards(attention: str) -> None:
    model = make("bart").train()
    fast = fastseq.wrap(model, attention=attention)
    model.eval()
    expected, got = both(model, fast, inputs("bart"), {"num_beams": 3})
    assert torch.equal(expected, got)
    assert fast.stats()["calls"] == {"fast": 1, "stock": 0}
    with pytest.raises(UnsupportedModelError, match="RoPE"):
        fastseq.wrap(make("llama").train(), attention="el")


def test_a_refusal_on_the_way_uses_up_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    from attmemo.fastseq.generate import fastmodel
    from attmemo.fastseq.generate.refusal import Refusal

    model = make("gpt2")
    fast = fastseq.wrap(model)

    def refused(*arguments: Any) -> Any:
        torch.rand(7)
        raise Refusal("late")

    monkeypatch.setattr(fastmodel, "decode", refused)
    expected, got = both(model, fast, inputs("gpt2"), {"do_sample": True})
    assert torch.equal(expected, got)
    assert fast.stats()["stock_reasons"] == {"late": 1}


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps", "cpu"])
def test_the_generator_of_a_device_is_put_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from attmemo.fastseq.generate import random_state

    states = {"now": 5}

    class Device:
        """torch.mps has one generator, and takes no device; the others have one each."""

        def get_rng_state(self, *device: torch.device) -> int:
            assert len(device) == (kind != "mps")
            return states["now"]

        def set_rng_state(self, state: int, *device: torch.device) -> None:
            assert len(device) == (kind != "mps")
            states["now"] = state

    if kind != "cpu":
        monkeypatch.setattr(torch, kind, Device())
    before = torch.get_rng_state()
    rewind = random_state.remember(torch.device(kind))
    torch.rand(3)
    states["now"] = 6
    rewind()
    assert torch.equal(torch.get_rng_state(), before)
    assert states["now"] == (6 if kind == "cpu" else 5)


@pytest.mark.parametrize(
    ("family", "kind"),
    [("bart", torch.float32), ("gpt2", torch.float32), ("gpt2", torch.bfloat16), ("llama", torch.bfloat16)],
)
def test_beams_that_are_not_followed_fail_the_self_test(
    family: str, kind: torch.dtype, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attmemo.fastseq.generate.beam_cache import BeamArena

    model = make(family).to(kind)
    fastseq.wrap(model)
    assert "original path" not in caplog.text
    monkeypatch.setattr(BeamArena, "move", lambda self, source: None)
    fastseq.wrap(model)
    assert "its scores differ" in caplog.text


def test_a_replaced_forward_is_not_bypassed() -> None:
    model = make("bart")
    fast = fastseq.wrap(model)
    layer, called = model.model.decoder.layers[0], []
    inner = layer.forward
    layer.forward = lambda *args, **kwargs: called.append(1) or inner(*args, **kwargs)
    fast.generate(**inputs("bart"), num_beams=2, max_new_tokens=4)
    assert called
    assert fast.stats()["calls"]["stock"] == 1


@pytest.mark.parametrize("family", ["bart", "t5", "llama"])
def test_large_linear_layers_are_read_the_other_way_round(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from attmemo.fastseq.generate import streamed_linear

    monkeypatch.setattr(streamed_linear, "FEWEST_WEIGHTS", 0)
    monkeypatch.setattr(streamed_linear, "MOST_ROWS", 12)
    called = []
    forward = streamed_linear.StreamedLinear.forward
    monkeypatch.setattr(
        streamed_linear.StreamedLinear, "forward", lambda self, rows: called.append(rows.shape) or forward(self, rows)
    )
    model = make(family)
    kinds = [type(module) for module in model.modules()]
    fast = fastseq.wrap(model)
    for setting in ({}, {"num_beams": 4, **ENDING}):
        expected, got = both(model, fast, inputs(family, PADDINGS[family][1]), setting)
        assert torch.equal(expected, got)
    assert called
    assert [type(module) for module in model.modules()] == kinds


def test_sliding_windows_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        sliding_window=8,
    )
    model = MistralForCausalLM(config).eval()
    fast = fastseq.wrap(model)
    assert "sliding_window" in caplog.text
    expected, got = both(model, fast, inputs("llama"), {"num_beams": 3})
    assert torch.equal(expected, got)


def test_encoder_ngrams_follow_the_samples_that_stay_and_the_callers_processor_stays_whole() -> None:
    model = make("bart")
    fast = fastseq.wrap(model)
    arguments = inputs("bart", "right", batch=8)
    setting: dict[str, Any] = {"num_beams": 4, "max_new_tokens": 40, "exponential_decay_length_penalty": (2, 1.12)}
    expected, got = both(model, fast, arguments, {**setting, "encoder_no_repeat_ngram_size": 2})
    assert torch.equal(expected, got)
    mine = fastseq.EncoderNoRepeatNGram(2, arguments["input_ids"])
    for _ in range(2):
        again = fast.generate(**arguments, **setting, logits_processor=LogitsProcessorList([mine]))
        assert torch.equal(again, expected)
    assert mine.batch_size == 8
    assert fast.stats()["counts"]["rows_removed"] > 0


def test_the_planner_is_told_what_is_held() -> None:
    assert fastseq.wrap(make("bart")).cache_mode == "shared"
    assert fastseq.wrap(make("bart"), attention="el").cache_mode == "el"
    assert fastseq.wrap(make("bart"), attention="stock").cache_mode == "stock"
    fast = fastseq.wrap(make("bart"))
    assert fast.cache_mode_for({"num_beams": 4}) == "shared"
    assert fast.cache_mode_for({"num_beams": 4, "use_cache": False}) == "stock"


@pytest.mark.parametrize("beams", [1, 2, 4])
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_sample_of_padding_only_gives_stocks_tokens(family: str, beams: int) -> None:
    """Every key of such a sample is masked. Attention then gives what its kernel happens to compute."""
    model = make(family)
    fast = fastseq.wrap(model)
    arguments = inputs(family, "right")
    arguments["attention_mask"][1] = 0
    setting = {"num_beams": beams, "max_new_tokens": 8}
    assert torch.equal(fast.generate(**arguments, **setting), model.generate(**arguments, **setting))


@pytest.mark.parametrize("family", ["t5", "bart", "gpt2"])
def test_an_empty_batch_raises_stocks_error(family: str) -> None:
    model = make(family)
    nothing = {"input_ids": inputs(family)["input_ids"][:0], "max_new_tokens": 4}
    with pytest.raises(RuntimeError) as expected:
        model.generate(**nothing)
    with pytest.raises(RuntimeError) as seen:
        fastseq.wrap(model).generate(**nothing)
    assert str(seen.value) == str(expected.value)
