"""Stored rows of models whose layers are all local: the same bits as when every row is computed, behind any edit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from families import GEMMA, SIZES, _make
from packed_models import GATED, MODELS, NEAR, gap
from prefix_models import ARITHMETICS, Ids, answer, batch_of, random_ids, rows_of

from attmemo import UnsupportedModelError, memoize
from attmemo.errors import ArgumentError
from attmemo.packed import runner

LOCAL: dict[str, Callable[[], Any]] = {
    "ModernBERT": _make(
        "ModernBertModel", "ModernBertConfig", **SIZES | {"max_position_embeddings": 512}, local_attention=16,
        layer_types=["sliding_attention"] * 3, cls_token_id=1, sep_token_id=2,
    ),
    "Gemma 3, bidirectional": _make(
        "Gemma3TextModel", "Gemma3TextConfig", use_bidirectional_attention=True,
        **GEMMA | {"layer_types": ["sliding_attention"] * 3, "sliding_window": 17, "max_position_embeddings": 512},
    ),
    "Privacy Filter": GATED["Privacy Filter"],
}  # fmt: skip
REACH = 24
"""Of each: three layers, of which a token sees eight to each side."""


def make(name: str, dtype: str = "float32") -> Any:
    return LOCAL[name]().to(getattr(torch, dtype))


def serving(name: str = "ModernBERT", dtype: str = "float32", linear: str = "exact", **more: Any) -> Any:
    return memoize(make(name, dtype), reuse="local", linear=linear, **more)


def whole(name: str = "ModernBERT", dtype: str = "float32", linear: str = "exact") -> Any:
    """The same, packed, and every row is computed."""
    return memoize(make(name, dtype), reuse="none", linear=linear)


def edited(rng: np.random.Generator, text: Ids) -> Ids:
    """A text with other tokens somewhere, more of them or fewer; or cut; or longer at an end."""
    at, count = int(rng.integers(len(text))), int(rng.integers(1, 20))
    new = random_ids(rng, count)
    kinds = (
        lambda: np.concatenate([text[:at], new, text[at + count :]]),
        lambda: np.concatenate([text[:at], new, text[at:]]),
        lambda: np.concatenate([text[:at], text[at + count :]]),
        lambda: text[: at + 1],
        lambda: np.concatenate([text, new]),
        lambda: np.concatenate([new, text]),
        lambda: text,
    )
    found: Ids = kinds[rng.integers(len(kinds))]()[:400]
    return found if len(found) else new


@pytest.mark.parametrize(("name", "place"), [(name, place) for place, name in enumerate(LOCAL)])
@pytest.mark.parametrize("turn", [0, 1])
def test_a_stream_of_edits_has_the_bits_of_rows_that_are_all_computed(name: str, place: int, turn: int) -> None:
    """Long texts and short ones, alone and in batches, padded on either side, with room for few pages and for many."""
    dtype, linear = ARITHMETICS[(place + turn) % 2 + 2 * turn]
    plain, rng = whole(name, dtype, linear), np.random.default_rng(place)
    model = serving(name, dtype, linear, max_bytes=(1 << 18, 1 << 24)[turn])
    texts = [random_ids(rng, n) for n in (5, 60, 200, 330)]
    for _ in range(40):
        count = int(rng.choice([1, 1, 2, 5]))
        places = rng.integers(len(texts), size=count)
        batch = [edited(rng, texts[at]) for at in places]
        for at, text in zip(places, batch, strict=True):
            texts[at] = text if len(text) > 40 else texts[at]
        inputs = batch_of(batch, left=bool(rng.random() < 0.5), more=int(rng.integers(3)))
        assert torch.equal(answer(model, inputs), answer(plain, inputs))
    found = model.attmemo.stats()["local"]
    assert 0 < found["bytes"] <= found["max_bytes"] <= (1 << 18, 1 << 24)[turn]
    assert found["stored"] > 0
    rows_of(model)


@pytest.mark.parametrize("name", LOCAL)
def test_an_edited_text_is_the_originals(name: str) -> None:
    bare, model, rng = make(name), serving(name), np.random.default_rng(3)
    text = random_ids(rng, 300)
    for _ in range(6):
        inputs = batch_of([text])
        assert gap(answer(model, inputs), answer(bare, inputs)) <= NEAR
        text = edited(rng, text)
    assert model.attmemo.stats()["local"]["stored"] > 0
    rows_of(model)


@pytest.mark.parametrize("name", LOCAL)
def test_behind_an_edit_only_pages_within_reach_are_computed(name: str) -> None:
    model, rng = serving(name), np.random.default_rng(1)
    text = random_ids(rng, 320)
    answer(model, batch_of([text]))
    assert rows_of(model) == 320
    other = text.copy()
    other[150:160] = random_ids(rng, 10)
    other[[150, 159]] = 5 + (text[[150, 159]] - 4) % 100
    with model.attmemo.observe() as seen:
        answer(model, batch_of([other]))
    first, behind = (150 - REACH) // 16 * 16, -(-(160 + REACH) // 16) * 16
    assert rows_of(model) == behind - first
    assert (seen.tokens, seen.rows) == ([320], [behind - first])


def test_what_moved_is_computed_and_what_stands_before_is_not() -> None:
    model, rng = serving(), np.random.default_rng(2)
    text = random_ids(rng, 320)
    answer(model, batch_of([text]))
    rows_of(model)
    answer(model, batch_of([np.concatenate([text[:160], [5], text[160:]])]))
    assert rows_of(model) == 321 - (160 - REACH) // 16 * 16
    answer(model, batch_of([text[:200]]))  # the end is nearer now
    assert rows_of(model) == 200 - (200 - REACH) // 16 * 16


def test_a_text_that_is_stored_is_not_computed_wherever_its_padding_is() -> None:
    text = random_ids(np.random.default_rng(4), 96)
    model = serving()
    paddings = (False, 0), (True, 5), (False, 9)
    found = [answer(model, batch_of([text], left=left, more=more)) for left, more in paddings]
    assert rows_of(model) == 96
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_by_layers_of_torch_a_stream_is_that_of_whole_rows_up_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "Chain", lambda *_, **__: None)
    plain, model, rng = whole(), serving(), np.random.default_rng(8)
    text = random_ids(rng, 300)
    for _ in range(8):
        inputs = batch_of([text])
        assert gap(answer(model, inputs), answer(plain, inputs)) <= NEAR
        text = edited(rng, text)
    assert model.attmemo.stats()["local"]["stored"] > 0
    rows_of(model)


def test_a_request_without_reuse_neither_reads_nor_stores() -> None:
    text, model = random_ids(np.random.default_rng(5), 100), serving()
    for _ in range(2):
        with model.attmemo.observe(reuse=False):
            answer(model, batch_of([text, text[:50]]))
        assert rows_of(model) == 150
    assert model.attmemo.stats()["local"]["tokens"] == 0


def test_threads_share_a_small_store() -> None:
    model, plain, rng = serving(max_bytes=1 << 17), whole(), np.random.default_rng(6)
    batches, text = [], random_ids(rng, 250)
    for _ in range(16):
        batches.append(batch_of([text]))
        text = edited(rng, text)
    expected = [answer(plain, inputs) for inputs in batches]
    asked = [int(place) for place in rng.integers(len(batches), size=120)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda place: torch.equal(answer(model, batches[place]), expected[place]), asked))
    assert all(found)
    rows_of(model)
    store = model.attmemo.engine.reuse.store
    assert not store._held.any()
    assert int(store._taken.sum()) == len(store) // 16


def test_namespaces_share_no_rows() -> None:
    model, inputs = serving(), batch_of([random_ids(np.random.default_rng(7), 96)])
    for name, stored in (("a", 0), ("a", 96), ("b", 0)):
        before = model.attmemo.namespaces().get(name, {}).get("local", {}).get("stored", 0)
        with model.attmemo.namespace(name):
            answer(model, inputs)
        assert model.attmemo.namespaces()[name]["local"]["stored"] - before == stored


def test_a_model_with_a_layer_that_sees_all_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="ModernBertModel: some of its layers are not local"):
        memoize(MODELS["ModernBERT"](), reuse="local")
    with pytest.raises(UnsupportedModelError, match="Qwen3Model: its tokens see all tokens before them"):
        memoize(GATED["Qwen3"](), reuse="local")
    with pytest.raises(UnsupportedModelError, match="is not for ModernBertModel: its tokens see those behind"):
        memoize(make("ModernBERT"), reuse="prefix")


def test_room_for_no_page_is_refused() -> None:
    with pytest.raises(ArgumentError, match="max_bytes is less than the"):
        serving(max_bytes=100)


def test_the_handle_says_what_it_keeps() -> None:
    model = serving(database=":memory:", max_bytes="1MB", linear="int8")
    assert repr(model.attmemo) == "<attmemo on: local rows in memory, int8 linear layers>"
    stats = model.attmemo.stats()
    assert (stats["reuse"], stats["local"]["tokens"], stats["prefixes"]) == ("local", 0, None)
    answer(model, batch_of([np.arange(40) % 100 + 5]))
    assert model.attmemo.stats()["local"]["tokens"] == 32
