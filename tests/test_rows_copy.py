"""Rows that lie anywhere, copied to places of a tensor: the kernel and its oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attmemo.kernels.rows import copy_rows, copy_rows_in_torch

TYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("to", TYPES)
@pytest.mark.parametrize("stored", TYPES)
def test_rows_go_to_their_places_rounded_once(stored: torch.dtype, to: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = torch.randn(9, 37).to(stored)
    order = np.array([4, 0, 8, 3], np.int64)
    addresses = (rows.data_ptr() + order * rows.stride(0) * rows.itemsize).astype(np.uint64)
    places = np.array([2, 5, 0, 6], np.int64)
    seen, expected = torch.zeros(7, 37, dtype=to), torch.zeros(7, 37, dtype=to)
    copy_rows(addresses, stored, places, seen)
    copy_rows_in_torch(addresses, stored, places, expected)
    assert torch.equal(seen, expected)
    assert torch.equal(seen[[2, 5, 0, 6]], rows[[4, 0, 8, 3]].to(to))
    assert not seen[[1, 3, 4]].any()


@pytest.mark.parametrize("to", TYPES)
@pytest.mark.parametrize("stored", TYPES)
def test_a_step_is_added_before_a_row_is_rounded(stored: torch.dtype, to: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, steps = torch.randn(9, 37).to(stored), np.zeros((3, 37), np.float32)
    steps[0], steps[2] = 0.37, -1.2
    addresses = (rows.data_ptr() + np.array([4, 0, 8]) * rows.stride(0) * rows.itemsize).astype(np.uint64)
    places, which = np.array([2, 5, 0], np.int64), np.array([2, 1, 0], np.int64)
    seen, expected = torch.zeros(7, 37, dtype=to), torch.zeros(7, 37, dtype=to)
    copy_rows(addresses, stored, places, seen, (steps, which))
    copy_rows_in_torch(addresses, stored, places, expected, (steps, which))
    assert torch.equal(seen, expected)
    assert torch.equal(seen[[2, 5, 0]], (rows[[4, 0, 8]].float() + torch.from_numpy(steps[which])).to(to))


@pytest.mark.parametrize("which", [[0, 2], [0, -1]])
def test_a_step_that_is_not_there_is_refused_before_anything_is_written(which: list[int]) -> None:
    rows, out = torch.ones(2, 5), torch.zeros(7, 5)
    addresses = np.full(2, rows.data_ptr(), np.uint64)
    with pytest.raises(ValueError, match="no such step"):
        copy_rows(addresses, rows.dtype, np.array([0, 1]), out, (np.ones((2, 5), np.float32), np.array(which)))
    for steps in ((np.ones((2, 4), np.float32), np.array([0, 1])), (np.ones((2, 5), np.float32), np.array([0]))):
        with pytest.raises(ValueError, match=r"steps must be \[B, 5\]"):
            copy_rows(addresses, rows.dtype, np.array([0, 1]), out, steps)
    assert not out.any()


@pytest.mark.parametrize("places", [[7], [-1]])
def test_a_place_beyond_the_result_is_refused_before_anything_is_written(places: list[int]) -> None:
    rows, out = torch.ones(2, 5), torch.zeros(7, 5)
    addresses = np.full(2, rows.data_ptr(), np.uint64)
    with pytest.raises(ValueError, match="place"):
        copy_rows(addresses, rows.dtype, np.array([0, *places]), out)
    assert not out.any()


def test_a_missing_address_is_refused() -> None:
    with pytest.raises(ValueError, match="address"):
        copy_rows(np.zeros(1, np.uint64), torch.float32, np.zeros(1, np.int64), torch.zeros(1, 5))


def test_types_that_are_no_numbers_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="int8"):
        copy_rows(np.ones(1, np.uint64), torch.int8, np.zeros(1, np.int64), torch.zeros(1, 5))
