"""What records of all that is asked could supply, seen by token ids alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from attmemo.guard.prospect import EACH, FIRST, MOST, Prospect
from attmemo.rows.index import TokenIndex
from attmemo.rows.planner import Asked

LENGTH = 20


def batch(first: int, sequences: int = 4) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Arguments and a mask: sequences of tokens that stand nowhere else."""
    ids = torch.arange(first * 10000, first * 10000 + sequences * LENGTH).view(sequences, LENGTH)
    mask = torch.ones_like(ids)
    return {"input_ids": ids, "attention_mask": mask}, mask


def repeated(asked: Asked, index: TokenIndex) -> float:
    """The share of inputs of which the index has a record."""
    starts = asked.starts.tolist()
    return float(np.mean([index.same(asked.tokens[a:b]) >= 0 for a, b in pairwise(starts)]))


def test_what_is_asked_again_could_all_be_supplied_from_the_second_forward_on() -> None:
    own = Prospect(repeated)
    own.look(*batch(1))
    assert own.share is None
    own.look(*batch(1))
    assert own.share == pytest.approx(1.0)


def test_what_never_comes_again_could_not() -> None:
    own = Prospect(repeated)
    for number in range(20):
        own.look(*batch(number))
    assert own.share == 0.0


def test_the_newest_forwards_count_most() -> None:
    own = Prospect(repeated)
    for number in (1, 1, 1, 2, 3):
        own.look(*batch(number))
    assert 0.0 < own.share < 0.5


@pytest.mark.parametrize("left", [False, True], ids=["on the right", "on the left"])
def test_padding_is_not_seen(left: bool) -> None:
    own, (given, mask) = Prospect(repeated), batch(1)
    own.look(given, mask)
    zeros = torch.zeros_like(mask)
    ids = torch.cat((zeros, given["input_ids"]) if left else (given["input_ids"], zeros), 1)
    own.look({"input_ids": ids}, torch.cat((zeros, mask) if left else (mask, zeros), 1))
    assert own.share == pytest.approx(1.0)


def test_of_many_inputs_some_are_looked_up_and_of_many_forwards_few() -> None:
    sizes = list[int]()
    own = Prospect(lambda asked, index: sizes.append(len(asked.lengths)) or 0.5)  # type: ignore[func-returns-value]
    for number in range(4 * FIRST):
        own.look(*batch(number, 32))
    assert set(sizes) == {EACH}
    assert len(sizes) == FIRST - 1 + 3


@pytest.mark.parametrize(("sequences", "expected"), [(1, 1.0), (EACH, 0.0)])
def test_a_request_of_few_inputs_may_be_like_the_one_just_before_it(sequences: int, expected: float) -> None:
    """As a conversation is, turn by turn. Inputs of a batch are like each other: those of one forward tell enough."""
    own = Prospect(repeated)
    for number in range(1, 40 * FIRST + 1):  # each is asked twice, one right behind the other
        own.look(*batch((number + 1) // 2, sequences))
    assert own.share == pytest.approx(expected, abs=0.01)


def test_memory_is_bounded() -> None:
    own, sizes = Prospect(lambda asked, index: sizes.append(len(index)) or 0.0), list[int]()  # type: ignore[func-returns-value]
    for number in range(40 * FIRST):
        own.look(*batch(number, 64))
    assert max(sizes) <= MOST


def test_forwards_without_tokens_are_passed_over() -> None:
    own, (given, mask) = Prospect(repeated), batch(1)
    own.look({}, mask)
    own.look({"input_ids": given["input_ids"]}, torch.zeros_like(mask))
    own.look({"input_ids": given["input_ids"][:, :5]}, mask)
    assert own.share is None


def test_an_empty_input_hides_none_of_the_others() -> None:
    own, (given, mask) = Prospect(repeated), batch(1)
    mask = mask.clone()
    mask[2] = 0
    for _ in range(2):
        own.look(given, mask)
    assert own.share == pytest.approx(1.0)
