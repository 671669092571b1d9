"""How much is asked again, seen by the tokens that stand together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attmemo.guard import repeats
from attmemo.guard.repeats import LATELY, TOGETHER, Repeats

LENGTH = 40


def batch(first: int, sequences: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of tokens that stand nowhere else."""
    numbers = torch.arange(first * 1000, first * 1000 + sequences * LENGTH)
    return numbers.view(sequences, LENGTH), torch.ones(sequences, LENGTH, dtype=torch.int64)


def test_tokens_that_never_come_again_are_no_repeats() -> None:
    found = Repeats()
    for number in range(20):
        found.look(*batch(number))
    assert found.share < 0.02, "some share a place of the table"


def test_what_is_asked_again_and_again_is_all_repeated() -> None:
    found = Repeats()
    for _ in range(20):
        found.look(*batch(1))
    assert found.share == pytest.approx(1.0 - (1.0 - LATELY) ** 19)


def test_a_changed_token_takes_those_that_stand_with_it() -> None:
    found, (ids, mask) = Repeats(), batch(1, 1)
    found.look(ids, mask)
    changed = ids.clone()
    changed[0, LENGTH // 2] = 7
    found.look(changed, mask)
    assert found.share == pytest.approx(LATELY * (1.0 - TOGETHER / (LENGTH - TOGETHER + 1)))


@pytest.mark.parametrize("left", [False, True], ids=["on the right", "on the left"])
def test_padding_is_not_seen(left: bool) -> None:
    found, (ids, mask) = Repeats(), batch(1)
    padding = torch.zeros_like(ids)
    order = (padding, ids) if left else (ids, padding)
    valid = (padding, mask) if left else (mask, padding)
    for number in range(3):
        found.look(*batch(number + 2))
        found.look(torch.cat(order, 1), torch.cat(valid, 1))
    alone = Repeats()
    for number in range(3):
        alone.look(*batch(number + 2))
        alone.look(ids, mask)
    assert found.share == alone.share > 0.0


def test_a_table_that_fills_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "PLACES", 1 << 12)
    found = Repeats()
    for number in range(50):
        found.look(*batch(number))
    assert found.share < 0.2, "a full table would take all for repeated"
    known = found.look(*batch(49))
    assert known is not None
    assert known.tolist() == [1.0] * 4, "the former one still counts"


def test_the_known_share_of_each_sequence_is_told() -> None:
    found, (ids, mask) = Repeats(), batch(1)
    found.look(ids[:1], mask[:1])
    mask[2, TOGETHER - 1 :] = 0
    known = found.look(ids, mask)
    assert known is not None
    assert known[0] == 1.0
    assert known[1] < 0.1
    assert known[2] == 1.0, "it has too few tokens to say"


def test_known_tokens_are_those_of_an_earlier_forward() -> None:
    found, seen, random = Repeats(), set[tuple[int, ...]](), np.random.default_rng(0)
    for _ in range(30):
        ids, mask = random.integers(0, 4, (5, 12)), np.arange(12) < random.integers(0, 13, (5, 1))
        windows = [
            [tuple(row[at : at + TOGETHER].tolist()) for at in range(int(valid.sum()) - TOGETHER + 1)]
            for row, valid in zip(ids, mask, strict=True)
        ]
        known = found.look(torch.from_numpy(ids), torch.from_numpy(mask))
        assert known is not None
        expected = [np.mean([window in seen for window in row]) if row else 1.0 for row in windows]
        assert known == pytest.approx(np.array(expected))
        seen.update(window for row in windows for window in row)


@pytest.mark.parametrize("ids", [None, torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 9, 4)])
def test_inputs_without_ids_and_short_ones_are_left_out(ids: torch.Tensor | None) -> None:
    found = Repeats()
    found.look(ids, torch.ones(2, 3, dtype=torch.int64))
    assert found.share == 0.0
