"""What sequences of a batch begin with alike is computed once, and nothing changes by it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from prefix_models import ARITHMETICS, CAUSAL, answer, batch_of, family_of, make, random_ids, whole

from attmemo import memoize
from attmemo.errors import AdapterCheckError
from attmemo.packed import prefix_check
from attmemo.packed.prefixes import CUT, Embedded, Folded, Prefixes, cut

Texts = list[list[int]]


def embedded_of(texts: Texts, left: bool, table: torch.Tensor) -> Embedded:
    inputs = batch_of([np.array(text, np.int64) for text in texts], left=left, more=3)
    return Embedded(table[inputs["input_ids"]], [len(text) for text in texts], left)


def tree_rows(texts: Texts) -> int:
    """Rows of the trie of all texts, cut: pieces of `CUT` tokens, and what is left behind the last cut of each."""
    pieces = {tuple(text[:end]) for text in texts for end in range(CUT, len(text) + 1, CUT)}
    return CUT * len(pieces) + sum(len(text) % CUT for text in texts)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(
    some.lists(some.tuples(some.integers(0, 70), some.integers(0, 3), some.integers(1, 40)), min_size=1, max_size=9),
    some.booleans(),
    some.booleans(),
)
def test_every_row_is_read_where_the_same_tokens_stand_in_front_of_it(
    parts: list[tuple[int, int, int]], left: bool, coarse: bool
) -> None:
    """Texts follow a few common ones up to any place. `coarse`: all words look alike at first."""
    rng = np.random.default_rng(len(parts))
    common = rng.integers(0, 50, (4, 70)).tolist()
    texts: Texts = [common[of][:n] + rng.integers(0, 50, more).tolist() for n, of, more in parts]
    table = torch.randn(50, 12)
    if coarse:
        table[:, :2] = 0
    embedded = embedded_of(texts, left, table)
    prefixes = Prefixes.of(embedded, np.arange(len(texts)))
    folded = Folded.of(prefixes, embedded)
    layout, padded = folded.layout, embedded.padded
    offsets = [padded - len(text) if left else 0 for text in texts]
    rows = {number: divmod(place, padded) for number, place in enumerate(folded.places.tolist())}
    assert sorted(folded.every.tolist()) == [
        b * padded + offsets[b] + p for b, t in enumerate(texts) for p in range(len(t))
    ]
    for place, source in zip(folded.every.tolist(), folded.sources.tolist(), strict=True):
        b, at = divmod(place, padded)
        other, its = rows[source]
        position = at - offsets[b]
        assert position == its - offsets[other]
        assert texts[b][: position + 1] == texts[other][: position + 1]
    own = [p for b, t in enumerate(texts) for p in range(int(prefixes.begins[b]), len(t))]
    assert layout.positions is not None
    assert layout.positions.tolist() == own
    if not coarse:
        assert layout.starts[-1] == tree_rows(texts)


def test_stored_rows_are_read_where_they_lie_and_computed_ones_from_the_longer_of_both() -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(0, 50, 80).tolist()
    texts: Texts = [base[:70], [*base[:50], 1], [*base[:33], 2]]
    embedded = embedded_of(texts, False, torch.randn(50, 12))
    slots = {0: np.arange(100, 116, dtype=np.int32), 2: np.arange(200, 232, dtype=np.int32)}
    prefixes = Prefixes.of(embedded, np.arange(3), np.array([16, 0, 32]))
    folded = Folded.of(prefixes, embedded, slots)
    parts = dict(zip(range(3), np.split(folded.sources, np.cumsum([70, 51])), strict=True))
    assert sum(len(t) for t in texts) - folded.layout.starts[-1] == sum(prefixes.begins)
    for b in range(3):
        begin, before = int(prefixes.begins[b]), int(prefixes.before[b])
        given_by = parts[before][:begin] if before >= 0 else -1 - slots.get(b, np.zeros(0, np.int32))[:begin]
        assert parts[b][:begin].tolist() == given_by.tolist()
        assert (parts[b][begin:] >= 0).all()


def sharing(name: str, dtype: str, linear: str) -> Any:
    return memoize(make(name, dtype), linear=linear)


@pytest.mark.parametrize(("name", "place"), [(name, place) for place, name in enumerate(CAUSAL)])
def test_a_batch_that_begins_alike_has_the_bits_of_whole_sequences(name: str, place: int) -> None:
    """Every causal family, with both types, both arithmetics and both paddings."""
    for turn in (0, 1):
        dtype, linear = ARITHMETICS[(place + turn) % 2 + 2 * turn]
        model, plain = sharing(name, dtype, linear), whole(name, dtype, linear)
        for seed, left in ((1, False), (2, True)):
            texts = family_of(np.random.default_rng(seed), 12)
            inputs = batch_of(texts, left=left, more=seed)
            model.attmemo.reset_stats()
            assert torch.equal(answer(model, inputs), answer(plain, inputs))
            stats = model.attmemo.stats()
            assert stats["rows_computed"] == tree_rows(list({tuple(t.tolist()): t.tolist() for t in texts}.values()))
            assert not stats["failures"]
            assert not stats["ineligible"]


def test_a_text_has_one_state_whatever_it_begins_alike_with() -> None:
    rng = np.random.default_rng(3)
    for name in ("Qwen3", "Mistral"):
        model = sharing(name, "bfloat16", "exact")
        texts = family_of(rng, 10)
        every = answer(model, batch_of(texts)).split([len(text) for text in texts])
        for text, seen in zip(texts, every, strict=True):
            assert torch.equal(answer(model, batch_of([text])), seen)


def test_an_observer_does_not_see_what_others_share_with_it() -> None:
    model = sharing("Qwen3", "bfloat16", "exact")
    rng = np.random.default_rng(4)
    common = random_ids(rng, 40)
    texts = [np.concatenate([common, random_ids(rng, n)]) for n in (3, 9)]
    with model.attmemo.observe() as seen:
        answer(model, batch_of(texts))
    assert seen.rows == seen.tokens == [43, 49]
    stats = model.attmemo.stats()
    assert stats["rows_computed"] == 43 + 49 - cut(40)
    assert stats["prefixes"] == {"shared": cut(40), "stored": 0, "tokens": 0, "common": 0, "bytes": 0, "max_bytes": 0}


def test_blocks_that_see_everything_share_no_prefix() -> None:
    from packed_models import MODELS

    model: Any = memoize(MODELS["BERT"]())
    text = random_ids(np.random.default_rng(5), 40)
    answer(model, batch_of([text[:40], text[:33]]))
    assert model.attmemo.stats()["rows_computed"] == 73
    assert model.attmemo.stats()["prefixes"] is None


def test_a_wrong_row_of_a_prefix_is_noticed_by_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Prefixes.sources

    def wrong(self: Prefixes, *given_: Any) -> Any:
        found = own(self, *given_)
        for b, sources in found.items():
            if self.begins[b]:
                sources[0] = sources[1]
        return found

    monkeypatch.setattr(Prefixes, "sources", wrong)
    with pytest.raises(AdapterCheckError, match="behind equal prefixes"):
        memoize(make("Qwen3"))
    assert prefix_check._ALIKE > CUT
