"""What would make rough logits useless: a bound that does not hold, another word than the greatest, a step that reads
all weights nevertheless."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fastseq_models import both, inputs, make
from torch import Tensor, nn

from attmemo import fastseq
from attmemo.fastseq.generate import vocabulary
from attmemo.fastseq.generate.decoders import why_not_packed
from attmemo.fastseq.generate.vocabulary import Linears, Vocabulary
from attmemo.kernels.linear8 import Linear8

WORDS, WIDTH = 3000, 80
pytestmark = pytest.mark.skipif(
    why_not_packed(torch.float32, None) is not None or Linear8.instruction_sets()[0] == "generic",
    reason="the processor has no instructions for packed layers",
)


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "_LEAST", 0)


def head(*, biased: bool = False, scale: float = 1.0) -> Vocabulary:
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(WIDTH, WORDS, bias=False)
    linear.weight.data = torch.randn(WORDS, WIDTH, generator=generator)
    linear.weight.data[:, 3] *= 5
    bias = torch.randn(WORDS, generator=generator) if biased else None
    return Vocabulary(Linears.of(linear), torch.float32, None, scale=scale, bias=bias)


def rows(count: int = 4) -> Tensor:
    """Usual, with a number that is far from the others, small, and with numbers half between two codes."""
    generator = torch.Generator().manual_seed(1)
    found = torch.randn(count, WIDTH, generator=generator)
    if count > 1:
        found[1, 5] = 80
    if count > 3:
        found[2] *= 1e-4
        found[3] = torch.arange(WIDTH) % 256 + 0.5
        found[3, 0], found[3, 1] = 0, 255
    return found


@pytest.mark.parametrize("biased", [False, True])
def test_no_rough_logit_is_farther_off_than_it_says(biased: bool) -> None:
    words = head(biased=biased, scale=0.5)
    hidden = rows()
    rough = words.rough(hidden)
    assert rough is not None
    off = (rough.logits - words.logits(hidden)).abs()
    assert bool((off <= rough.distances).all()), float((off / rough.distances).max())
    spread = words.logits(hidden).std(1)
    assert bool((rough.distances.mean(1) < spread).all()), "a bound that excludes no word"


@pytest.mark.parametrize("biased", [False, True])
def test_the_greatest_word_is_that_of_all_logits(biased: bool) -> None:
    words = head(biased=biased)
    for count in (1, 2, 4):
        hidden = rows(count)
        exact, rough = words.logits(hidden), words.rough(hidden)
        assert rough is not None
        banned = torch.zeros_like(exact, dtype=torch.bool)
        for _ in range(4):  # the greatest are taken away again and again, so that others have to be found
            found = words.greatest(rough, rough.logits.masked_fill(banned, -torch.inf))
            assert found is not None
            assert torch.equal(found, exact.masked_fill(banned, -torch.inf).argmax(1))
            banned[torch.arange(count), found] = True


def test_logits_of_some_words_have_the_bits_of_all_logits() -> None:
    words = head()
    hidden = rows()
    some = torch.tensor([0, 7, 64, 65, 1000, WORDS - 1])
    assert torch.equal(words._through(words._of_words(some), None, hidden), words.logits(hidden)[:, some])


def test_words_that_tie_and_numbers_that_are_not_finite_take_all_logits() -> None:
    words = head()
    hidden = rows()
    hidden[1] = 0  # every word is as good
    rough = words.rough(hidden)
    assert rough is not None
    assert words.greatest(rough, rough.logits) is None
    hidden[1, 0] = torch.nan
    rough = words.rough(hidden)
    assert rough is not None
    assert words.greatest(rough, rough.logits) is None


GREEDY: dict[str, dict[str, Any]] = {
    "plain": {},
    "no end, no n-gram twice": {"min_new_tokens": 12, "no_repeat_ngram_size": 2},
    "banned words": {"bad_words_ids": [[7], [8, 9]], "suppress_tokens": [5, 6], "forced_eos_token_id": 2},
}


@pytest.mark.parametrize("setting", GREEDY)
@pytest.mark.parametrize("family", ["bart", "t5", "gpt2", "qwen3"])
def test_greedy_tokens_are_those_of_stock(monkeypatch: pytest.MonkeyPatch, family: str, setting: str) -> None:
    monkeypatch.setattr(vocabulary, "_SHARE", 1)  # of 97 words a few are many
    model = make(family)
    fast = fastseq.accelerate(model)
    expected, got = both(model, fast, inputs(family, "left"), GREEDY[setting])
    assert torch.equal(expected, got)
    counts = fast.stats()["counts"]
    assert counts.get("rough_steps", 0) >= counts["packed_steps"] - 1 > 3


@pytest.mark.parametrize(
    "setting",
    [{"repetition_penalty": 1.3}, {"num_beams": 3}, {"do_sample": True}, {"output_logits": True}],
    ids=["scores change", "beams", "sampling", "logits returned"],
)
def test_who_reads_the_scores_gets_all_logits(setting: dict[str, Any]) -> None:
    model = make("bart")
    fast = fastseq.accelerate(model)
    expected, got = both(model, fast, inputs("bart"), {"return_dict_in_generate": True} | setting)
    assert torch.equal(expected.sequences, got.sequences)
    counts = fast.stats()["counts"]
    assert counts["packed_steps"] > 3
    assert "rough_steps" not in counts


def test_steps_that_take_all_logits_after_all_find_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "_SHARE", 10**6)
    model = make("gpt2")
    fast = fastseq.accelerate(model)
    expected, got = both(model, fast, inputs("gpt2", "left"), {"min_new_tokens": 8})
    assert torch.equal(expected, got)
    assert "rough_steps" not in fast.stats()["counts"]
