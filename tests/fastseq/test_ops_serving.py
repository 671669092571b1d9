"""Continuous batching answers what transformers answers, whatever else is in the batch and however few the pages.

On a small random Llama with grouped heads always; on the real stories260K when it is there.
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_data import shared
from transformers import (
    AttentionInterface,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from attmemo.errors import ArgumentError, DoubleFreeError, OutOfPagesError, UnknownSequenceError, UnsupportedModelError
from attmemo.fastseq.serving.cached_model import CachedModel, make_cache
from attmemo.fastseq.serving.server import Request, Server

ROOT = Path(__file__).resolve().parents[2]
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # large enough that the answers wander
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("continuous_batching", ROOT / "examples" / "continuous_batching.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


example = load_example()


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Thousands of tiny steps: on a machine that is busy, threads that wait for each other take minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


@pytest.fixture(scope="module")
def arrivals() -> list[Any]:
    """Prompts of 1 to 40 tokens, some with a common beginning, at different steps."""
    draw = torch.Generator().manual_seed(3)
    common = torch.randint(1, 97, (21,), generator=draw).tolist()
    prompts = [torch.randint(1, 97, (length,), generator=draw).tolist() for length in (1, 40, 7, 2, 17)]
    prompts += [common + torch.randint(1, 97, (length,), generator=draw).tolist() for length in (1, 5, 12)]
    return list(example.make_arrivals(prompts, 20, seed=1))


@pytest.fixture(scope="module")
def alone(llama: Any, arrivals: list[Any]) -> list[list[int]]:
    """The answers of transformers, one request at a time."""
    return [example.generate_alone(llama, arrival, set()) for arrival in arrivals]


@pytest.fixture
def small(llama: Any) -> Iterator[CachedModel]:
    with CachedModel(llama, make_cache(llama, pages=24, page_size=8)) as model:
        yield model


@pytest.mark.parametrize(
    ("kind", "server", "shares", "preempts"),
    [
        ({"pages": 200, "page_size": 8}, {}, True, False),
        ({"pages": 2000, "page_size": 1}, {"max_tokens": 7}, True, False),
        ({"pages": 20, "page_size": 8}, {"max_tokens": 16}, True, True),  # too few pages for all
        ({"pages": 160, "page_size": 1, "cache_layout": 3}, {"max_tokens": 5}, True, True),
        ({"pages": 400, "page_size": 3, "cache_layout": 1}, {"max_sequences": 2}, True, False),
        ({"pages": 100, "page_size": 8, "cache_mode": 0, "cache_layout": 2}, {"max_tokens": 16}, True, False),
        ({"pages": 20, "page_size": 8, "cache_mode": 0, "cache_layout": 1}, {}, False, False),  # one waits for another
        ({"pages": 200, "page_size": 8}, {"share_prefixes": False}, False, False),
    ],
)
def test_each_answer_is_the_one_of_transformers(
    llama: Any,
    arrivals: list[Any],
    alone: list[list[int]],
    kind: dict[str, Any],
    server: dict[str, Any],
    shares: bool,
    preempts: bool,
) -> None:
    cache = make_cache(llama, **kind)
    with CachedModel(llama, cache) as model:
        serving = Server(model, **server)
        requests = example.serve(serving, arrivals, set())
    assert [request.tokens for request in requests] == alone
    assert {request.finish for request in requests} == {"length"}
    assert cache.stats().pages_used == 0
    stats = serving.stats
    assert stats.mixed > 0
    assert ((stats.shared > 0), (stats.preempted > 0)) == (shares, preempts)
    if not preempts:  # nothing was computed twice: prompts and answers but for each one's last token
        assert stats.tokens + stats.shared == sum(len(request.text) - 1 for request in requests)


@pytest.mark.parametrize(
    ("kind", "configuration", "more"),
    [(MistralForCausalLM, MistralConfig, {"sliding_window": None}), (Qwen2ForCausalLM, Qwen2Config, {})],
)
def test_other_families_answer_as_in_transformers(kind: Any, configuration: Any, more: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = kind(configuration(**{**SHAPE, **more})).eval()
    arrivals = example.make_arrivals([[5, 6, 7], [9], list(range(20, 50))], 6)
    alone = [example.generate_alone(model, arrival, set()) for arrival in arrivals]
    with CachedModel(model, make_cache(model, pages=60)) as cached:
        requests = example.serve(Server(cached, max_tokens=16), arrivals, set())
    assert [request.tokens for request in requests] == alone


def test_a_stop_token_ends_an_answer_as_in_transformers(llama: Any, arrivals: list[Any]) -> None:
    arrival = max(arrivals, key=lambda arrival: arrival.max_new_tokens)
    whole = example.generate_alone(llama, arrival, set())
    stop = {whole[len(whole) // 2]}
    expected = example.generate_alone(llama, arrival, stop)
    assert len(expected) < len(whole)
    with CachedModel(llama, make_cache(llama, pages=40)) as model:
        (request,) = example.serve(Server(model), [arrival], stop)
    assert (request.tokens, request.finish) == (expected, "stop")


def test_requests_that_arrive_together_share_what_one_of_them_computes(small: CachedModel) -> None:
    server = Server(small)
    prompt = list(range(1, 30))
    requests = [server.submit([*prompt, last], 4) for last in (40, 41, 42)]
    server.step()
    assert len(server.running) == 1  # the others wait one step for its prompt
    server.step()
    assert len(server.running) == 3
    assert small.cache.stats().pages_shared == 3  # of 29 tokens; the page where they part is each one's own
    server.run()
    assert [request.shared for request in requests] == [0, 29, 29]


def test_a_kept_prefix_is_there_when_no_sequence_runs(llama: Any, small: CachedModel) -> None:
    server = Server(small, max_tokens=6)
    prompt = list(range(1, 21))
    number = server.keep_prefix(prompt)
    computed = server.stats.tokens
    request = server.submit([*prompt, 33, 34], 3)
    server.run()
    assert request.shared == 20
    assert server.stats.tokens == computed + 2 + 2
    small.close()
    assert request.tokens == example.generate_alone(llama, example.Arrival(0, [*prompt, 33, 34], 3), set())
    server.drop_prefix(number)
    assert small.cache.stats().pages_used == 0
    with pytest.raises(DoubleFreeError):
        server.drop_prefix(number)


def test_a_cancelled_request_gives_its_pages_back_at_once(small: CachedModel) -> None:
    server = Server(small, max_sequences=1)
    first, second = server.submit(range(1, 20), 50), server.submit(range(1, 9), 2)
    server.step()
    server.cancel(first)
    assert small.cache.stats().pages_used == 0
    server.run()
    assert (first.finish, len(first.tokens), second.finish) == ("cancelled", 1, "length")
    server.cancel(second)
    assert second.finish == "length"
    third = server.submit([1], 1)
    server.cancel(third)
    assert (third.finish, server.waiting) == ("cancelled", ())


def test_a_pass_that_fails_can_be_repeated(
    llama: Any, small: CachedModel, arrivals: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(small)
    request = server.submit([5, 6, 7], 8)
    server.step()
    layer = llama.model.layers[1].mlp
    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("lost")))
        with pytest.raises(RuntimeError, match="lost"):
            server.step()
    assert small.cache.length(small.cache.sequences[0]) == 3
    with monkeypatch.context() as patch:
        patch.setattr(server, "_choose", lambda logits: logits.argmax(-1)[:0])
        with pytest.raises(ValueError, match="shorter"):
            server.step()
    assert small.cache.length(small.cache.sequences[0]) == 3
    server.run()
    small.close()
    assert request.tokens == example.generate_alone(llama, example.Arrival(0, [5, 6, 7], 8), set())


def test_what_can_never_be_answered_is_refused_when_it_arrives(small: CachedModel) -> None:
    server = Server(small)
    with pytest.raises(OutOfPagesError, match="25 pages of 24"):
        server.submit(range(1, 90), 105)
    with pytest.raises(ArgumentError, match="0 tokens of prompt"):
        server.submit([], 5)
    with pytest.raises(ArgumentError, match="max_new_tokens 0"):
        server.submit([1], 0)
    with pytest.raises(ArgumentError, match="submit: token 1 is 97, expected 0 to 96"):
        server.submit([96, 97], 5)
    with pytest.raises(ArgumentError, match="keep_prefix: token 0 is -1"):
        server.keep_prefix([-1])
    assert not server.waiting
    server.keep_prefix(range(1, 50))
    server.submit(range(50, 90), 105)  # fits the cache, but not beside what is kept
    with pytest.raises(OutOfPagesError):
        server.run()


def test_the_model_is_its_own_again_after_closing(llama: Any) -> None:
    tokens = torch.tensor([[3, 4, 5]])
    with torch.inference_mode():
        before = llama(tokens).logits
        model = CachedModel(llama, make_cache(llama, pages=2))
        with pytest.raises(UnsupportedModelError, match="without a cache step"):
            llama(tokens)
        with pytest.raises(UnsupportedModelError, match="already"):
            CachedModel(llama, make_cache(llama, pages=2))
        model.close()
        model.close()
        assert torch.equal(llama(tokens).logits, before)


def test_a_request_in_flight_is_no_prefix_to_drop(small: CachedModel) -> None:
    server = Server(small)
    request = server.submit([1, 2, 3], 4)
    server.step()
    (number,) = small.cache.sequences
    with pytest.raises(UnknownSequenceError, match="no kept prefix"):
        server.drop_prefix(number)
    server.run()
    assert len(request.tokens) == 4


def test_models_that_see_the_future_are_refused() -> None:
    """Served step by step, a bidirectional model would answer something else, without an error."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    bert = BertForMaskedLM(BertConfig(vocab_size=50, **sizes)).eval()
    with pytest.raises(UnsupportedModelError, match="not causal"):
        CachedModel(bert, make_cache(bert, pages=2))


def test_models_whose_attention_is_another_are_refused(llama: Any) -> None:
    mistral = MistralForCausalLM(MistralConfig(**{**SHAPE, "sliding_window": 16, "head_dim": 8})).eval()
    with pytest.raises(UnsupportedModelError, match="only a part of the text"):
        CachedModel(mistral, make_cache(mistral, pages=2))
    with pytest.raises(UnsupportedModelError, match="not a decoder"):
        CachedModel(torch.nn.Module(), make_cache(llama, pages=2))
    llama.train()
    try:
        with pytest.raises(UnsupportedModelError, match="training mode"):
            CachedModel(llama, make_cache(llama, pages=2))
    finally:
        llama.eval()


def test_another_scale_of_the_scores_is_kept(llama: Any) -> None:
    """Some models divide by something else than the root of the head's width."""
    before = [layer.self_attn.scaling for layer in llama.model.layers]
    try:
        for layer in llama.model.layers:
            layer.self_attn.scaling = 0.11
        text = list(range(1, 40))
        expected = example.exact_perplexity(llama, [text])
        (given,) = example.measure_quality(llama, [text], {"exact": {}})
    finally:
        for layer, scaling in zip(llama.model.layers, before, strict=True):
            layer.self_attn.scaling = scaling
    assert given.perplexity == pytest.approx(expected, rel=1e-5)
    assert example.exact_perplexity(llama, [text]) != pytest.approx(expected, rel=1e-3)


def rounded(numbers: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """What quantising and reading back makes of numbers: on its own, without the operator's code."""
    groups = numbers.unflatten(-1, (-1, group))
    most = {8: 127, 4: 7}[bits]
    step = (groups.abs().amax(-1, keepdim=True) / most).clamp_min(1e-5)
    return ((groups / step).round().clamp(-most, most) * step).flatten(-2)


def rounded_perplexity(model: Any, texts: list[list[int]], bits: int, group: int, keys: bool = True) -> float:
    """Perplexity by transformers with keys and values, or values alone, rounded as the cache rounds them."""

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        options["is_causal"] = True
        key, value = rounded(key, bits, group) if keys else key, rounded(value, bits, group)
        return sdpa_attention_forward(module, query, key, value, None, **options)

    AttentionInterface.register("rounded", attend)
    before = model.config._attn_implementation
    model.set_attn_implementation("rounded")
    try:
        return float(example.exact_perplexity(model, texts))
    finally:
        model.set_attn_implementation(before)


@pytest.mark.parametrize(("bits", "group"), [(8, 8), (4, 8), (4, 2)])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_quantised_cache_costs_what_rounding_keys_and_values_costs(
    llama: Any, bits: int, group: int, chunk: int
) -> None:
    text = torch.randint(1, 97, (50,), generator=torch.Generator().manual_seed(5)).tolist()
    caches = {"it": {"quant_bit": bits, "quant_group": group}}
    (given,) = example.measure_quality(llama, [text], caches, chunk)
    expected = rounded_perplexity(llama, [text], bits, group)
    assert given.perplexity == pytest.approx(expected, rel=1e-3)
    if bits == 4:
        assert expected != pytest.approx(example.exact_perplexity(llama, [text]), rel=1e-3)


def test_a_score_is_one_log_probability_for_each_token_but_the_first(llama: Any, small: CachedModel) -> None:
    text = list(range(1, 30))
    scores = {chunk: small.score(text, chunk) for chunk in (1, 10, 28, 29, 64)}
    assert small.score([4]).shape == (0,)
    assert small.cache.stats().pages_used == 0
    small.close()
    expected = example.exact_perplexity(llama, [text])
    for score in scores.values():
        assert score.shape == (28,)
        assert math.exp(-score.mean()) == pytest.approx(expected, rel=1e-5)


def test_a_request_can_be_read_in_parts() -> None:
    request = Request((1, 2, 3), 9, tokens=[4, 5, 6])
    for begin in range(7):
        for end in range(begin, 7):
            assert request.part(begin, end) == list(request.text[begin:end])


def test_the_code_in_the_document_runs(llama: Any, arrivals: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "serving.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    prompts = [*(arrival.prompt for arrival in arrivals[:8] if 20 < len(arrival.prompt) < 40), [7], [3, 4]]
    names: dict[str, Any] = {"model": llama, "prompts": prompts}
    for block in blocks:
        exec(block, names)
    assert len(prompts) == 5
    assert sorted(map(len, names["answers"])) == [40] * 5
    assert all(any(answer[: len(prompt)] == prompt for answer in names["answers"]) for prompt in prompts)
    assert all(request.finish in ("length", "stop") for request in names["requests"])
    assert len(capsys.readouterr().out.splitlines()) == 5


@pytest.fixture(scope="module")
def stories() -> tuple[Any, Any]:
    model, tokenizer = example.load(shared("data/weights_stories260K"))
    return model, tokenizer


@pytest.mark.parametrize("pages", [40, 400])
def test_stories260k_tells_the_stories_it_tells_alone(stories: tuple[Any, Any], pages: int) -> None:
    model, tokenizer = stories
    arrivals = example.make_arrivals([tokenizer(prompt).input_ids for prompt in example.PROMPTS], 24)
    with CachedModel(model, make_cache(model, pages=pages)) as cached:
        server = Server(cached, max_tokens=24)
        requests = example.serve(server, arrivals, {tokenizer.eos_token_id})
    alone = [example.generate_alone(model, arrival, {tokenizer.eos_token_id}) for arrival in arrivals]
    assert [request.tokens for request in requests] == alone
    assert server.stats.mixed > 0
    assert server.stats.shared > 0
    assert (server.stats.preempted > 0) == (pages == 40)


def test_int8_costs_stories260k_next_to_nothing_and_int4_what_rounding_costs(stories: tuple[Any, Any]) -> None:
    model, tokenizer = stories
    texts = [tokenizer(line).input_ids for line in (ROOT / "examples" / "stories.txt").read_text().splitlines()]
    exact = example.exact_perplexity(model, texts)
    found = {row.cache: row.perplexity / exact for row in example.measure_quality(model, texts, example.CACHES)}
    assert exact < 5
    assert found["float32"] == pytest.approx(1, abs=1e-5)
    assert found["int8, groups of 8"] == pytest.approx(1, abs=0.005)
    assert found["int8, groups of 8, float16 scales"] == pytest.approx(1, abs=0.005)
    # The keys of this model's heads of 8 elements reach 29: four bits are too few for them, and not by a mistake.
    expected = rounded_perplexity(model, texts, 4, 4) / exact
    assert found["int4, groups of 4, float16 scales"] == pytest.approx(expected, rel=0.02)


def test_the_example_says_what_it_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shared("data/weights_stories260K")
    monkeypatch.setattr(sys, "argv", ["continuous_batching.py", str(folder), "--requests", "5", "--pages", "12"])
    monkeypatch.setattr(example, "CACHES", {name: example.CACHES[name] for name in ("float32", "int8, groups of 8")})
    example.main()
    said = capsys.readouterr().out
    assert "5 of 5 answers are those of transformers, token for token" in said
    assert said.count("done (") == 5
    assert re.search(r"\| float32 \| 1280 \| 4\.147\d \| [+-]0\.000% \|", said)
