"""Stored prefixes serve requests: the same bits as when every row is computed, whatever came before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from children import in_child
from packed_models import MODELS, NEAR, VOCABULARY, gap
from prefix_models import ARITHMETICS, CAUSAL, answer, batch_of, family_of, make, random_ids, rows_of, whole

from attmemo import UnsupportedModelError, memoize, unmemoize
from attmemo.errors import ArgumentError
from attmemo.packed import runner


def serving(name: str = "Qwen3", dtype: str = "bfloat16", linear: str = "exact", **more: Any) -> Any:
    return memoize(make(name, dtype), reuse="prefix", linear=linear, **more)


def texts_of(seed: int, count: int = 6, kept: int = 70) -> list[Any]:
    """Texts behind one policy."""
    rng = np.random.default_rng(seed)
    policy = random_ids(rng, kept)
    return [np.concatenate([policy, random_ids(rng, int(rng.integers(1, 40)))]) for _ in range(count)]


@pytest.mark.parametrize(("name", "place"), [(name, place) for place, name in enumerate(CAUSAL)])
def test_a_stream_of_requests_has_the_bits_of_rows_that_are_all_computed(name: str, place: int) -> None:
    """Every causal family, with room for few prefixes and for many."""
    for turn in (0, 1):
        dtype, linear = ARITHMETICS[(place + turn) % 2 + 2 * turn]
        plain, rng = whole(name, dtype, linear), np.random.default_rng(place)
        model = serving(name, dtype, linear, max_bytes=(1 << 18, 1 << 24)[turn])
        stream = family_of(rng, 48)
        while stream:
            count = min(int(rng.choice([1, 1, 2, 7])), len(stream))
            batch = [stream.pop() for _ in range(count)]
            inputs = batch_of(batch, left=bool(rng.random() < 0.5), more=int(rng.integers(3)))
            assert torch.equal(answer(model, inputs), answer(plain, inputs))
        found = model.attmemo.stats()["prefixes"]
        assert 0 < found["bytes"] <= found["max_bytes"] <= (1 << 18, 1 << 24)[turn]
        assert found["stored"] > 0
        rows_of(model)


@pytest.mark.parametrize("name", ["Qwen3", "Mistral", "Gemma 3"])
def test_by_layers_of_torch_a_stream_is_that_of_whole_rows_up_to_rounding(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "Chain", lambda *_, **__: None)
    plain, model, rng = whole(name, "float32"), serving(name, "float32"), np.random.default_rng(8)
    stream = family_of(rng, 24)
    while stream:
        batch = [stream.pop() for _ in range(min(3, len(stream)))]
        inputs = batch_of(batch, left=bool(rng.random() < 0.5), more=2)
        assert gap(answer(model, inputs), answer(plain, inputs)) <= NEAR
    assert model.attmemo.stats()["prefixes"]["stored"] > 0
    rows_of(model)


def test_the_second_request_behind_a_policy_computes_what_is_new() -> None:
    first, second, *_ = texts_of(1)
    model = serving()
    answer(model, batch_of([first]))
    assert rows_of(model) == len(first)
    with model.attmemo.observe() as seen:
        answer(model, batch_of([second]))
    assert rows_of(model) == len(second) - 64
    assert (seen.tokens, seen.rows) == ([len(second)], [len(second) - 64])


def test_a_text_that_is_stored_whole_is_not_computed() -> None:
    text = random_ids(np.random.default_rng(2), 64)
    model, plain = serving(), whole("Qwen3")
    inputs = batch_of([text])
    found = [answer(model, inputs) for _ in range(2)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], answer(plain, inputs))
    assert rows_of(model) == 64


def test_a_request_without_reuse_neither_reads_nor_stores() -> None:
    texts, model = texts_of(3), serving()
    for _ in range(2):
        with model.attmemo.observe(reuse=False):
            answer(model, batch_of(texts[:1]))
        assert rows_of(model) == len(texts[0])
    assert model.attmemo.stats()["prefixes"]["tokens"] == 0
    for _ in range(2):
        answer(model, batch_of(texts[:1]))
    with model.attmemo.observe(reuse=False):
        answer(model, batch_of(texts[:1]))
    assert rows_of(model) == 2 * len(texts[0]) + len(texts[0]) % 16


def test_a_new_weight_ends_what_is_stored() -> None:
    texts, model = texts_of(4), serving()
    answer(model, batch_of(texts[:1]))
    rows_of(model)
    with torch.no_grad():
        model.layers[0].mlp.down_proj.weight.mul_(1.5)
    inputs = batch_of(texts[1:2])
    seen = answer(model, inputs)
    assert model.attmemo.stats()["tokens"] == 0
    unmemoize(model)
    assert torch.equal(seen, answer(model, inputs))
    memoize(model, reuse="prefix")
    answer(model, inputs)
    assert rows_of(model) == len(texts[1])


def test_threads_share_a_small_store() -> None:
    model, plain = serving(max_bytes=1 << 17), whole("Qwen3")
    rng = np.random.default_rng(5)
    batches = [batch_of([texts[place]]) for texts in (texts_of(seed) for seed in range(4)) for place in range(4)]
    expected = [answer(plain, inputs) for inputs in batches]
    asked = [int(place) for place in rng.integers(len(batches), size=120)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda place: torch.equal(answer(model, batches[place]), expected[place]), asked))
    assert all(found)
    rows_of(model)
    store = model.attmemo.engine.reuse.store
    assert not store._held.any()
    assert int(store._taken.sum()) == len(store) // 16


def test_a_failed_forward_gives_its_pages_back(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, model = texts_of(6), serving()

    def broken(*_: Any, **__: Any) -> None:
        raise MemoryError("none left")

    inputs = batch_of(texts[:1])
    with monkeypatch.context() as patch:
        patch.setattr(runner.Packed, "run", broken)
        answer(model, inputs)
    assert sum(model.attmemo.stats()["failures"].values()) == 1
    store = model.attmemo.engine.reuse.store
    assert not store._held.any()
    assert not store._taken.any()
    model.attmemo.reset_stats()
    assert torch.equal(answer(model, inputs), answer(whole("Qwen3"), inputs))
    rows_of(model)


def test_a_forked_child_begins_anew_and_the_parent_goes_on() -> None:
    texts, model = texts_of(7), serving()
    answer(model, batch_of(texts[:1]))
    inputs, expected = batch_of(texts[1:2]), answer(whole("Qwen3"), batch_of(texts[1:2]))
    rows_of(model)

    def child() -> None:
        torch.set_num_threads(1)
        for rows in (len(texts[1]), len(texts[1]) % 16):
            assert torch.equal(answer(model, inputs), expected)
            assert rows_of(model) == rows

    assert in_child(child) == 0
    assert torch.equal(answer(model, inputs), expected)
    assert rows_of(model) == len(texts[1]) - 64


def test_a_model_whose_tokens_see_those_behind_is_refused_by_name() -> None:
    model: Any = MODELS["BERT"]()
    with pytest.raises(UnsupportedModelError, match="is not for BertModel: its tokens see those behind them"):
        memoize(model, reuse="prefix")
    assert "attmemo" not in model.__dict__


def test_room_for_no_page_is_refused() -> None:
    with pytest.raises(ArgumentError, match="max_bytes is less than the"):
        serving(max_bytes=100)


def test_the_handle_says_what_it_keeps() -> None:
    model = serving(database=":memory:", max_bytes="1MB", linear="int8")
    assert repr(model.attmemo) == "<attmemo on: prefixes in memory, int8 linear layers>"
    stats = model.attmemo.stats()
    assert (stats["reuse"], stats["prefixes"]["tokens"]) == ("prefix", 0)
    assert 0 < stats["prefixes"]["max_bytes"] <= 1_000_000
    answer(model, batch_of([np.arange(40) % VOCABULARY]))
    assert model.attmemo.stats()["prefixes"]["tokens"] == 32
    unmemoize(model)
