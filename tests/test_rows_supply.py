"""Rows of records, put where a batch wants them: the kernel and its oracle."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from attmemo.kernels.rows import instruction_sets, supply_rows, supply_rows_in_torch

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
    """Rows of a batch with gaps between sequences, and rows of their records."""

    def __init__(self, dtype: torch.dtype, stored: torch.dtype, width: int = 37) -> None:
        random = torch.Generator().manual_seed(0)
        lengths = [len(source) for source in SOURCES]
        self.out = torch.randn(sum(lengths) + 2 * len(lengths), width, generator=random).to(dtype)
        self.records = [(1.0 + torch.randn(12, width, generator=random)).to(stored) for _ in SOURCES]
        self.source = np.concatenate(SOURCES).astype(np.int32)
        self.starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.places = self.starts[:-1] + 2 * np.arange(len(lengths))
        self.begins = np.array([record.data_ptr() for record in self.records], np.uint64)
        self.begins[3] = 0

    def run(self, share: float = 1.0, **asked: object) -> Tensor:
        found = self.out.clone()
        supply_rows(found, *self.arguments, share, **asked)  # type: ignore[arg-type]
        return found

    def oracle(self, share: float = 1.0) -> Tensor:
        found = self.out.clone()
        supply_rows_in_torch(found, *self.arguments, share)
        return found

    @property
    def arguments(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64],
                                 npt.NDArray[np.uint64], torch.dtype]:  # fmt: skip
        return self.source, self.starts, self.places, self.begins, self.records[0].dtype

    def places_of(self, number: int, reused: bool = True) -> npt.NDArray[np.int64]:
        """Rows of the result of one sequence: those that its record supplies, or those that are computed anew."""
        own = np.array(SOURCES[number])
        return self.places[number] + np.flatnonzero(own >= 0 if reused else own < -1)


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
def test_only_reused_rows_are_written(isa: str, dtype: torch.dtype, stored: torch.dtype) -> None:
    batch = Batch(dtype, stored)
    found, still = batch.run(isa=isa), torch.ones(len(batch.out), dtype=torch.bool)
    for number in range(len(SOURCES)):
        still[batch.places_of(number)] = False
    assert torch.equal(found[still], batch.out[still])


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
        assert torch.equal(found[batch.places_of(number)], batch.records[number][rows].to(dtype))


@sets
def test_moves_without_a_common_part_move_nothing(isa: str) -> None:
    batch = Batch(torch.float32, torch.float32)
    for number in (0, 4):
        rows = [-2 - row for row in SOURCES[number] if row < -1]
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0])[: len(rows), None]
        batch.out[batch.places_of(number, reused=False)] = batch.records[number][rows] + signs
    torch.testing.assert_close(batch.run(isa=isa), batch.run(0.0, isa=isa), rtol=0, atol=1e-6)


@sets
@types
def test_rows_that_are_computed_as_before_move_nothing(isa: str, dtype: torch.dtype) -> None:
    batch = Batch(dtype, dtype)
    for number in range(len(SOURCES)):
        rows = [-2 - row for row in SOURCES[number] if row < -1]
        batch.out[batch.places_of(number, reused=False)] = batch.records[number][rows]
    assert torch.equal(batch.run(isa=isa), batch.run(0.0, isa=isa))


@sets
def test_moves_that_are_equal_are_taken_over_whole(isa: str) -> None:
    batch = Batch(torch.float32, torch.float32)
    rows = [-2 - row for row in SOURCES[0] if row < -1]
    batch.out[batch.places_of(0, reused=False)] = batch.records[0][rows] + 0.25
    kept = [row for row in SOURCES[0] if row >= 0]
    torch.testing.assert_close(batch.run(isa=isa)[batch.places_of(0)], batch.records[0][kept] + 0.25)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("starts", [0, 8, 12, 15, 17, 21, 25], "starts must rise"),
        ("starts", [1, 8, 12, 15, 17, 21, 24], "starts must rise"),
        ("starts", [0, 12, 8, 15, 17, 21, 24], "starts must rise"),
        ("starts", [0, 8, 12], "each sequence must have"),
        ("places", [0, 8, 12, 15, 17, 34], "beyond the result"),
        ("places", [-1, 8, 12, 15, 17, 21], "beyond the result"),
        ("places", [0, 8, 12, 15, 17], "each sequence must have"),
        ("begins", [0] * 6, "has no record"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(name: str, value: list[int], message: str) -> None:
    batch = Batch(torch.float32, torch.float32)
    setattr(batch, name, np.array(value, getattr(batch, name).dtype))
    found = batch.out.clone()
    with pytest.raises(ValueError, match=message):
        supply_rows(found, *batch.arguments)
    assert torch.equal(found, batch.out)


def test_other_types_shapes_and_arrays_are_refused() -> None:
    batch = Batch(torch.float32, torch.float32)
    source, starts, places, begins, dtype = batch.arguments
    with pytest.raises(ValueError, match="int8"):
        supply_rows(batch.out, source, starts, places, begins, torch.int8)
    with pytest.raises(ValueError, match="contiguous"):
        supply_rows(batch.out.T, source, starts, places, begins, dtype)
    with pytest.raises(ValueError, match="int32"):
        supply_rows(batch.out, source.astype(np.int64), starts, places, begins, dtype)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="instructions"):
        supply_rows(batch.out, source, starts, places, begins, dtype, isa="abacus")


def test_an_empty_batch_is_nothing_to_do() -> None:
    none = np.empty(0, np.int64)
    begins, source = none.astype(np.uint64), none.astype(np.int32)
    supply_rows(torch.empty(0, 5), source, np.zeros(1, np.int64), none, begins, TYPES[0])
