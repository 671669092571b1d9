"""Reused rows follow the computed ones of their own sequence, and nothing else moves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from attmemo.reuse.drift import SHARE, follow

SIZE = 7
SOURCES = [
    [-2, 1, 2, -5, -1, -7, 6, -9],  # the record has all but one
    [0, 1, -1, 3],  # nothing to learn from
    [-1, -1, -2],  # nothing to move
    [-2, 1, 2, -2 - 3],
]


def batch(dtype: torch.dtype, stored: torch.dtype) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Rows of a batch with gaps between them, rows of the records, and the places of each sequence."""
    torch.manual_seed(0)
    output = torch.randn(40, SIZE).to(dtype)
    records = [torch.randn(12, SIZE).to(stored) for _ in SOURCES]
    ends = np.cumsum([len(source) + 2 for source in SOURCES])
    places = [torch.arange(end - len(source) - 2, end - 2) for source, end in zip(SOURCES, ends, strict=True)]
    return output, records, places


def moved(output: Tensor, records: list[Tensor], places: list[Tensor]) -> Tensor:
    """What `follow` leaves, row by row."""
    found = output.clone()
    for source, record, own in zip(SOURCES, records, places, strict=True):
        moves = [
            output[place].float() - record[-2 - row].to(output.dtype).float()
            for row, place in zip(source, own, strict=True) if row < -1
        ]  # fmt: skip
        for row, place in zip(source, own, strict=True):
            if row >= 0 and moves:
                found[place] += (SHARE * torch.stack(moves).mean(0)).to(output.dtype)
    return found


def run(output: Tensor, records: list[Tensor], places: list[Tensor]) -> Tensor:
    found = output.clone()
    sequence = np.repeat(np.arange(len(SOURCES)), [len(source) for source in SOURCES])
    begins = np.array([record.data_ptr() for record in records], np.uint64)
    source = np.concatenate(SOURCES).astype(np.int32)
    follow(found, source, sequence, torch.cat(places).numpy(), begins, records[0].dtype)
    return found


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reused_rows_move_by_half_of_the_mean_move_of_those_computed(dtype: torch.dtype, stored: torch.dtype) -> None:
    output, records, places = batch(dtype, stored)
    found = run(output, records, places)
    torch.testing.assert_close(found, moved(output, records, places))
    still = torch.ones(len(output), dtype=torch.bool)
    for number in (0, 3):
        still[places[number][torch.tensor(SOURCES[number]) >= 0]] = False
    assert torch.equal(found[still], output[still])
    assert not torch.equal(found[~still], output[~still])


def test_rows_that_are_computed_as_before_move_nothing() -> None:
    output, records, places = batch(torch.float32, torch.float32)
    for source, record, own in zip(SOURCES, records, places, strict=True):
        for row, place in zip(source, own, strict=True):
            if row < -1:
                output[place] = record[-2 - row]
    assert torch.equal(run(output, records, places), output)
