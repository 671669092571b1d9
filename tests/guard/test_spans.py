"""Spans: a number stands for the list of them, whatever the padding; special tokens say nothing."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attmemo.errors import AnswerError
from attmemo.guard.answers import Answers
from attmemo.guard.spans import Spans, spans_in

BIO = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
BIOES = ["O", *(f"{letter}-{name}" for name in ("PER", "LOC") for letter in "BIES")]
PLAIN = ["NOUN", "VERB", "O"]


def listed(labels: list[str]) -> list[tuple[str, int, int]]:
    """The plain way: spans ``(type, first, stop)`` of the labels of one text."""
    found: list[tuple[str, int, int]] = []
    fresh = True
    for place, label in enumerate(labels):
        letter, name = label.split("-") if "-" in label else ("I", label)
        if name == "O":
            fresh = True
            continue
        if fresh or letter in "BS" or found[-1][0] != name:
            found.append((name, place, place + 1))
        else:
            found[-1] = (name, found[-1][1], place + 1)
        fresh = letter in "ES"
    return found


def logits_of(rows: list[list[int]], count: int) -> Tensor:
    """Logits whose best classes these are."""
    return 4.0 * torch.nn.functional.one_hot(torch.tensor(rows), count).float()


def number(labels: list[str], row: list[int], mask: list[int] | None = None) -> int:
    values, _ = Spans(labels).read(logits_of([row], len(labels)), None if mask is None else torch.tensor([mask]))
    return int(values[0])


@pytest.mark.parametrize("labels", [BIO, BIOES, PLAIN], ids=["BIO", "BIOES", "plain"])
def test_spans_of_labels_are_listed_and_special_tokens_end_them(labels: list[str]) -> None:
    rng, spans = np.random.default_rng(3), Spans(labels, special=[1])
    for _ in range(200):
        row, ids = rng.integers(0, len(labels), 9), rng.integers(0, 12, 9).clip(1)
        plain = ["O" if number == 1 else labels[label] for label, number in zip(row, ids, strict=True)]
        assert spans.of_labels(row, ids.tolist()) == listed(plain)


@pytest.mark.parametrize("labels", [BIO, BIOES, PLAIN], ids=["BIO", "BIOES", "plain"])
def test_two_numbers_are_equal_where_the_plain_lists_are(labels: list[str]) -> None:
    chance = np.random.default_rng(0)
    rows = chance.integers(len(labels), size=(300, 4)).tolist()
    lists = [listed([labels[one] for one in row]) for row in rows]
    numbers = [number(labels, row) for row in rows]
    assert len({tuple(one) for one in lists}) > 30
    for (a, one), (b, other) in itertools.combinations(zip(lists, numbers, strict=True), 2):
        assert (a == b) == (one == other)


def test_where_a_span_lies_is_part_of_it() -> None:
    assert number(BIO, [1, 0, 0]) != number(BIO, [0, 1, 0])
    assert number(BIO, [1, 2, 0]) != number(BIO, [1, 1, 0])
    assert number(BIO, [1, 2, 0]) == number(BIO, [2, 2, 0])  # it begins where the first of its tokens is


def test_padding_on_either_side_says_nothing() -> None:
    alone = number(BIO, [0, 1, 2])
    for row, mask in (([0, 1, 2, 3], [1, 1, 1, 0]), ([3, 4, 0, 1, 2], [0, 0, 1, 1, 1])):
        assert number(BIO, row, mask) == alone


def test_special_tokens_say_nothing_and_part_spans() -> None:
    spans = Spans(BIO, {101, 102})
    ids, mask = torch.tensor([[101, 7, 102, 8, 102, 0]]), torch.tensor([[1, 1, 1, 1, 1, 0]])
    own = spans.of_text(mask, ids)
    assert own.tolist() == [[-1, 1, -1, 1, -1, 0]]
    assert int(own.count_nonzero()) == int(mask.sum())
    first, margins = spans.read(logits_of([[3, 1, 4, 2, 2, 1]], 5), own)
    second, _ = spans.read(logits_of([[0, 1, 0, 1, 0, 0]], 5), own)
    assert torch.equal(first, second)
    unsure = logits_of([[0, 1, 0, 1, 0, 0]], 5)
    unsure[0, [0, 2, 4, 5]] = 0.0  # all classes alike where nothing counts
    assert torch.equal(spans.read(unsure, own)[1], margins)


def test_the_margin_of_a_text_is_that_of_its_least_sure_token() -> None:
    odds = torch.tensor([[[0.7, 0.2, 0.1], [0.45, 0.35, 0.2]], [[0.9, 0.05, 0.05], [0.2, 0.2, 0.6]]])
    _, margins = Spans(PLAIN).read(odds.log(), torch.tensor([[1, 1], [1, 0]]))
    assert margins.tolist() == pytest.approx([0.1, 0.85], abs=1e-6)
    _, margins = Spans(PLAIN).read(torch.full((1, 2, 3), float("nan")), None)
    assert not bool((margins >= 0.0).any())


@pytest.mark.parametrize("shape", [(2, 5), (2, 4, 4), (2, 4, 1)])
def test_logits_that_are_no_tags_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(AnswerError, match="are no tags of tokens with 5 labels"):
        Spans(BIO).read(torch.zeros(shape), None)
    with pytest.raises(AnswerError, match="those of other tokens"):
        Spans(BIO).read(torch.zeros(2, 4, 5), torch.ones(2, 3))


def test_special_tokens_are_those_of_the_tokenizer_else_of_the_configuration() -> None:
    config = SimpleNamespace(id2label={"1": "B-X", "0": "O"}, pad_token_id=9, bos_token_id=None)
    assert spans_in(config, None)._special.tolist() == [9]
    assert spans_in(config, SimpleNamespace(cls_token_id=3, sep_token_id=2))._special.tolist() == [2, 3]


class ThingForTokenClassification:
    config = SimpleNamespace(id2label=dict(enumerate(BIO)), num_labels=5)


def test_a_model_that_tags_tokens_is_known_by_its_class() -> None:
    output = {"logits": logits_of([[0, 1, 2]], 5)}
    another: Any = SimpleNamespace(config=ThingForTokenClassification.config)
    for rule, model in (("auto", ThingForTokenClassification()), ("spans", another)):
        answers = Answers(rule, 0.98)  # type: ignore[arg-type]
        answers.meet(model)
        read = answers.read(output, torch.ones(1, 3))
        assert read.values.tolist() == [number(BIO, [0, 1, 2])]
        assert not read.are_vectors
        assert torch.equal(answers.read((output["logits"],), torch.ones(1, 3)).values, read.values)
        assert answers.pooled_from((output["logits"],)) is None
    other = Answers("auto", 0.98)
    other.meet(another)
    with pytest.raises(AnswerError, match="no classes of sequences"):
        other.read(output, None)
