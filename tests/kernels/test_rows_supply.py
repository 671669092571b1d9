"""Computed rows and rows of records, put where a batch wants them: the kernel and its oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from attmemo.kernels.rows import Supply, instruction_sets, supply_rows, supply_rows_in_torch

TYPES = (torch.float32, torch.float16, torch.bfloat16)
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SOURCES = [
    [-2, 1, 2, -5, -1, -7, 6, -9],  # the record has all but one
    [0, 1, -1, 3],  # nothing to learn from
    [-1, -1, -2],  # nothing to move
    [-1, -1],  # no record
    [-2, 1, 2, -5],
    [-2, 1, 2],  # one move is no mean
]
sets = pytest.mark.parametrize("isa", instruction_sets())
stored_types = pytest.mark.parametrize("stored", TYPES, ids=str)
types = pytest.mark.parametrize("dtype", TYPES, ids=str)


class Batch:
    """Computed rows of a batch, and rows of their records. The result has a gap behind each second sequence."""

    padded = 10

    def __init__(self, dtype: torch.dtype, stored: torch.dtype, width: int = 37) -> None:
        random = torch.Generator().manual_seed(0)
        computed = [sum(row < 0 for row in source) for source in SOURCES]
        self.fresh = torch.randn(sum(computed), width, generator=random).to(dtype)
        self.records = [(1.0 + torch.randn(12, width, generator=random)).to(stored) for _ in SOURCES]
        begins = np.array([record.data_ptr() for record in self.records], np.uint64)
        begins[3] = 0
        starts = np.concatenate([[0], np.cumsum([len(source) for source in SOURCES])]).astype(np.int64)
        firsts = np.concatenate([[0], np.cumsum(computed)]).astype(np.int64)
        self.places = np.array([0, 10, 25, 35, 50, 60])
        source = np.concatenate(SOURCES).astype(np.int32)
        self.supply = Supply(source, starts, firsts, self.places, begins, stored)

    def empty(self) -> Tensor:
        return torch.full((75, self.fresh.shape[1]), 9.0, dtype=self.fresh.dtype)

    def run(self, share: float = 1.0, **asked: object) -> Tensor:
        found = self.empty()
        supply_rows(found, self.fresh, self.supply, self.padded, share, **asked)  # type: ignore[arg-type]
        return found

    def oracle(self, share: float = 1.0) -> Tensor:
        found = self.empty()
        supply_rows_in_torch(found, self.fresh, self.supply, self.padded, share)
        return found

    def anew(self, number: int) -> Tensor:
        """Which of the computed rows the record of a sequence has too, `bool [M]`."""
        found = torch.zeros(len(self.fresh), dtype=torch.bool)
        own = [row for row in SOURCES[number] if row < 0]
        found[self.supply.firsts[number] : self.supply.firsts[number + 1]] = torch.tensor(own) < -1
        return found

    def reused(self, number: int) -> npt.NDArray[np.int64]:
        """Rows of the result that the record of a sequence supplies."""
        found: npt.NDArray[np.int64] = self.places[number] + np.flatnonzero(np.array(SOURCES[number]) >= 0)
        return found


@sets
@types
@stored_types
@pytest.mark.parametrize("width", [1, 16, 37, 768])
@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_reused_rows_are_those_of_the_oracle(
    isa: str, dtype: torch.dtype, stored: torch.dtype, width: int, share: float
) -> None:
    batch = Batch(dtype, stored, width)
    for threads in (1, 2, 9):
        found = batch.run(share, isa=isa, threads=threads)
        torch.testing.assert_close(found, batch.oracle(share), rtol=CLOSE[dtype], atol=CLOSE[dtype])


@sets
@types
@stored_types
def test_computed_rows_are_copied_and_zeros_stand_behind(isa: str, dtype: torch.dtype, stored: torch.dtype) -> None:
    batch = Batch(dtype, stored)
    found, gaps, computed = batch.run(isa=isa), torch.ones(75, dtype=torch.bool), iter(batch.fresh)
    for source, place in zip(SOURCES, batch.places.tolist(), strict=True):
        gaps[place : place + batch.padded] = False
        assert not found[place + len(source) : place + batch.padded].any()
        assert all(torch.equal(found[place + i], next(computed)) for i, row in enumerate(source) if row < 0)
    assert bool((found[gaps] == 9.0).all()), "what belongs to no sequence stays"


@sets
@types
@stored_types
def test_rows_with_nothing_to_follow_are_the_record_s_rounded_once(
    isa: str, dtype: torch.dtype, stored: torch.dtype
) -> None:
    batch = Batch(dtype, stored)
    found = batch.run(isa=isa)
    for number in (1, 5):
        rows = [row for row in SOURCES[number] if row >= 0]
        assert torch.equal(found[batch.reused(number)], batch.records[number][rows].to(dtype))


@sets
def test_moves_without_a_common_part_move_nothing(isa: str) -> None:
    batch = Batch(torch.float32, torch.float32)
    for number in (0, 4):
        rows = [-2 - row for row in SOURCES[number] if row < -1]
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0])[: len(rows), None]
        batch.fresh[batch.anew(number)] = batch.records[number][rows] + signs
    torch.testing.assert_close(batch.run(isa=isa), batch.run(0.0, isa=isa), rtol=0, atol=1e-6)


@sets
@types
def test_rows_that_are_computed_as_before_move_nothing(isa: str, dtype: torch.dtype) -> None:
    batch = Batch(dtype, dtype)
    for number in range(len(SOURCES)):
        rows = [-2 - row for row in SOURCES[number] if row < -1]
        batch.fresh[batch.anew(number)] = batch.records[number][rows]
    assert torch.equal(batch.run(isa=isa), batch.run(0.0, isa=isa))


@sets
def test_moves_that_are_equal_are_taken_over_whole(isa: str) -> None:
    batch = Batch(torch.float32, torch.float32)
    rows = [-2 - row for row in SOURCES[0] if row < -1]
    batch.fresh[batch.anew(0)] = batch.records[0][rows] + 0.25
    kept = [row for row in SOURCES[0] if row >= 0]
    torch.testing.assert_close(batch.run(isa=isa)[batch.reused(0)], batch.records[0][kept] + 0.25)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("starts", [0, 8, 12, 15, 17, 21, 25], "starts must rise"),
        ("starts", [1, 8, 12, 15, 17, 21, 24], "starts must rise"),
        ("starts", [0, 12, 8, 15, 17, 21, 24], "starts must rise"),
        ("starts", [0, 8, 12], "each sequence must have"),
        ("firsts", [0, 5, 6, 9, 11, 13, 15], "computed rows must be"),
        ("firsts", [1, 6, 7, 10, 12, 14, 15], "starts of computed rows"),
        ("firsts", [0, 5, 6], "each sequence must have"),
        ("places", [0, 10, 25, 35, 50, 66], "beyond the result"),
        ("places", [-1, 10, 25, 35, 50, 60], "beyond the result"),
        ("places", [0, 10, 25, 35, 50], "each sequence must have"),
        ("begins", [0] * 6, "has no record"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(name: str, value: list[int], message: str) -> None:
    batch = Batch(torch.float32, torch.float32)
    batch.supply = replace(batch.supply, **{name: np.array(value, getattr(batch.supply, name).dtype)})
    found = batch.empty()
    with pytest.raises(ValueError, match=message):
        supply_rows(found, batch.fresh, batch.supply, batch.padded)
    assert bool((found == 9.0).all())


def test_other_types_shapes_and_arrays_are_refused() -> None:
    batch = Batch(torch.float32, torch.float32)
    out, fresh, supply = batch.empty(), batch.fresh, batch.supply
    with pytest.raises(ValueError, match="int8"):
        supply_rows(out, fresh, replace(supply, dtype=torch.int8), batch.padded)
    with pytest.raises(ValueError, match="out must be contiguous"):
        supply_rows(out.T, fresh, supply, batch.padded)
    with pytest.raises(ValueError, match="fresh must be contiguous"):
        supply_rows(out, fresh[:, ::2], supply, batch.padded)
    with pytest.raises(ValueError, match="must fit"):
        supply_rows(out, fresh.bfloat16(), supply, batch.padded)
    with pytest.raises(ValueError, match="more tokens than rows"):
        supply_rows(out, fresh, supply, 7)
    with pytest.raises(ValueError, match="starts of computed rows"):
        supply_rows(out, fresh[:-1], supply, batch.padded)
    with pytest.raises(ValueError, match="int32"):
        supply_rows(out, fresh, replace(supply, source=supply.source.astype(np.int64)), batch.padded)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="instructions"):
        supply_rows(out, fresh, supply, batch.padded, isa="abacus")


def test_an_empty_batch_is_nothing_to_do() -> None:
    none, start = np.empty(0, np.int64), np.zeros(1, np.int64)
    supply = Supply(none.astype(np.int32), start, start, none, none.astype(np.uint64), TYPES[0])
    supply_rows(torch.empty(0, 5), torch.empty(0, 5), supply, 4)
