"""Reused rows follow the computed ones of their own sequence, and nothing else moves."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from packed_tools import MODELS, last, rows_database
from packed_tools import batch as inputs_of
from torch import Tensor

from attmemo import memoize
from attmemo.kernels.rows import copy_rows
from attmemo.reuse import drift
from attmemo.reuse.drift import SHARE, steps_of

SIZE = 7
SOURCES = [
    [-2, 1, 2, -5, -1, -7, 6, -9],  # the record has all but one
    [0, 1, -1, 3],  # nothing to learn from
    [-1, -1, -2],  # nothing to move
    [-2, 1, 2, -2 - 3],
    [-2, 1, 2],  # one move is no mean
]


def batch(dtype: torch.dtype, stored: torch.dtype) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Rows of a batch with gaps between them, rows of the records, and the places of each sequence."""
    torch.manual_seed(0)
    output = torch.randn(40, SIZE).to(dtype)
    records = [(1.0 + torch.randn(12, SIZE)).to(stored) for _ in SOURCES]
    ends = np.cumsum([len(source) + 2 for source in SOURCES])
    places = [torch.arange(end - len(source) - 2, end - 2) for source, end in zip(SOURCES, ends, strict=True)]
    return output, records, places


def supplied(output: Tensor, records: list[Tensor], places: list[Tensor]) -> Tensor:
    """A batch with reused rows as they are in the records."""
    found = output.clone()
    for source, record, own in zip(SOURCES, records, places, strict=True):
        for row, place in zip(source, own, strict=True):
            if row >= 0:
                found[place] = record[row]
    return found


def moved(output: Tensor, records: list[Tensor], places: list[Tensor]) -> Tensor:
    """A batch with reused rows that follow, row by row."""
    found = supplied(output, records, places)
    for source, record, own in zip(SOURCES, records, places, strict=True):
        moves = [
            output[place].float() - record[-2 - row].to(output.dtype).float()
            for row, place in zip(source, own, strict=True) if row < -1
        ]  # fmt: skip
        if len(moves) < 2:
            continue
        mean = torch.stack(moves).mean(0)
        within = float(torch.stack(moves).var(0).sum())
        common = max(0.0, float(mean.square().sum()) - within / len(moves))
        for row, place in zip(source, own, strict=True):
            if row >= 0:
                found[place] = record[row].float() + SHARE * common / (common + within) * mean
    return found


def run(output: Tensor, records: list[Tensor], places: list[Tensor]) -> Tensor:
    found = output.clone()
    sequence = np.repeat(np.arange(len(SOURCES)), [len(source) for source in SOURCES])
    begins = np.array([record.data_ptr() for record in records], np.uint64)
    source = np.concatenate(SOURCES).astype(np.int32)
    there, dtype, reused = torch.cat(places).numpy(), records[0].dtype, source >= 0
    steps = steps_of(found, source, sequence, there, begins, dtype)
    assert steps is not None
    addresses = begins[sequence] + (source * SIZE * dtype.itemsize).astype(np.uint64)
    copy_rows(addresses[reused], dtype, there[reused], found, (steps, sequence[reused]))
    return found


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reused_rows_move_by_what_moves_of_computed_ones_have_in_common(
    dtype: torch.dtype, stored: torch.dtype
) -> None:
    output, records, places = batch(dtype, stored)
    found = run(output, records, places)
    close = {"rtol": 0.02, "atol": 0.01} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found, moved(output, records, places), **close)
    still, unmoved = torch.ones(len(output), dtype=torch.bool), supplied(output, records, places)
    for number in (0, 3):
        still[places[number][torch.tensor(SOURCES[number]) >= 0]] = False
    assert torch.equal(found[still], unmoved[still])
    assert not torch.equal(found[~still], unmoved[~still])


def test_moves_without_a_common_part_move_nothing() -> None:
    output, records, places = batch(torch.float32, torch.float32)
    for number in (0, 3):
        known = [(row, place) for row, place in zip(SOURCES[number], places[number], strict=True) if row < -1]
        for turn, (row, place) in enumerate(known):
            output[place] = records[number][-2 - row] + (1.0 if turn % 2 else -1.0)
    found = run(output, records, places)
    torch.testing.assert_close(found, supplied(output, records, places), rtol=0, atol=1e-6)


def test_rows_that_are_computed_as_before_move_nothing() -> None:
    output, records, places = batch(torch.float32, torch.float32)
    for source, record, own in zip(SOURCES, records, places, strict=True):
        for row, place in zip(source, own, strict=True):
            if row < -1:
                output[place] = record[-2 - row]
    assert torch.equal(run(output, records, places), supplied(output, records, places))


def test_a_model_serves_rows_that_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = MODELS["BERT"]()
    stored = inputs_of([30, 24], 3)
    own = {name: value.clone() for name, value in stored.items()}
    own["input_ids"][:, 9] = 5 + (own["input_ids"][:, 9] + 7) % 90
    path = rows_database(bare, [stored], tmp_path / "db")
    model = memoize(copy.deepcopy(bare), 0.5, path, gate=False, budget=None)
    records = last(memoize(copy.deepcopy(bare), reuse="none"), stored)
    seen = last(model, own)
    for number, n in enumerate((30, 24)):
        known, reused = [0, 8, 10, n - 1], [1, 7, 11, n - 2]
        moves = seen[number, known] - records[number, known]
        within = float(moves.var(0).sum())
        common = max(0.0, float(moves.mean(0).square().sum()) - within / 4)
        expected = SHARE * common / (common + within) * moves.mean(0)
        torch.testing.assert_close(
            seen[number, reused] - records[number, reused], expected.expand(4, -1), rtol=1e-3, atol=1e-5
        )
        assert float(expected.abs().max()) > 1e-3, "else nothing was seen"
    monkeypatch.setattr(drift, "SHARE", 0.0)
    assert torch.equal(last(model, own)[0, [1, 7]].round(decimals=4), records[0, [1, 7]].round(decimals=4))
