"""What would make faster bookkeeping useless: other continuations than those of transformers' own methods."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fastseq_models import make
from transformers import LogitsProcessorList
from transformers.generation.logits_process import MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor

from attmemo.fastseq.generate.leading import NoEndYet, continuations, leading, swap_length_processors


@pytest.mark.parametrize("size", [12_800, 12_801, 201_060])
@pytest.mark.parametrize("place", ["anywhere", "at the end", "side by side"])
def test_the_largest_are_those_of_topk(size: int, place: str) -> None:
    scores = torch.randn(3, size, generator=torch.Generator().manual_seed(size))
    if place == "at the end":
        scores[:, -3:] += 20
    elif place == "side by side":  # all in one span, but one
        scores[:, 512:520] += 20
    found = leading(scores, 8)
    assert found is not None
    values, places = scores.topk(8)
    assert torch.equal(found[0], values)
    assert torch.equal(found[1], places)


@pytest.mark.parametrize("odd", ["tie", "tie at the edge", "NaN", "few", "banned"])
def test_what_topk_alone_can_decide_is_left_to_it(odd: str) -> None:
    scores = torch.randn(2, 20_000, generator=torch.Generator().manual_seed(1))
    if odd == "tie":
        scores[1, 7] = scores[1, 9000] = 30.0
    elif odd == "tie at the edge":
        order = scores[0].sort(descending=True).indices
        scores[0, order[8]] = scores[0, order[7]]
    elif odd == "NaN":
        scores[1, 5] = torch.nan
    elif odd == "few":
        scores = scores[:, :2000]
    else:
        scores[:, 5:] = -torch.inf
    assert leading(scores, 8) is None


@pytest.mark.parametrize("ties", [False, True])
def test_continuations_are_those_of_transformers(ties: bool) -> None:
    model = make("gpt2")
    generator = torch.Generator().manual_seed(2)
    scores = torch.randn(3, 4 * 5000, generator=generator)
    if ties:
        scores = scores.round()
    given: dict[str, Any] = {
        "accumulated_log_probs": scores,
        "running_sequences": torch.randint(0, 5000, (3, 4, 12), generator=generator),
        "running_beam_indices": torch.randint(0, 12, (3, 4, 8), generator=generator).int(),
        "cur_len": 7, "decoder_prompt_len": 4, "do_sample": False, "beams_to_keep": 8, "num_beams": 4, "batch_size": 3,
    }  # fmt: skip
    expected = model._get_top_k_continuations(**given)
    got = continuations(model, **given)
    for one, other in zip(expected, got, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_the_end_is_taken_as_stock_takes_it() -> None:
    ends = torch.tensor([3, 7, 50])  # one beyond the vocabulary
    stock = [MinLengthLogitsProcessor(6, ends), MinNewTokensLengthLogitsProcessor(4, 3, ends)]
    swapped = LogitsProcessorList(list(stock))
    swap_length_processors(swapped)
    assert all(type(processor) is NoEndYet for processor in swapped)
    seen = set()
    for length in range(4, 9):
        for one, other in zip(stock, swapped, strict=True):
            ids, scores = torch.zeros(2, length, dtype=torch.int64), torch.arange(40.0).repeat(2, 1)
            expected = one(ids, scores.clone())
            assert torch.equal(expected, other(ids, scores.clone()))
            seen.add(bool(expected.isinf().any()))
    assert seen == {True, False}
