"""Embedded rows of a batch of token ids: the kernel and its oracle in torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attmemo.kernels import _embed as native
from attmemo.kernels.embeddings import (
    Batch,
    Tables,
    embed,
    embed_in_torch,
    read_batch,
    read_batch_plain,
    spread,
    spread_in_torch,
)

WORDS, KINDS, POSITIONS = 7, 2, 12


def tables(dtype: torch.dtype, types: bool, padding: int, width: int = 37, placed: bool = True) -> Tables:
    random = torch.Generator().manual_seed(0)
    words, kinds, positions = (
        torch.randn(rows, width, generator=random).to(dtype) for rows in (WORDS, KINDS, POSITIONS)
    )
    return Tables(words, kinds if types else None, positions if placed else None, padding)


def arrays(rows: list[list[int]], padded: int, types: bool, masked: bool) -> Any:
    """Ids, types and mask; few words, so that twins are among them."""
    ids, mask = np.zeros((2, len(rows), padded), np.int64)
    for row, own in enumerate(rows):
        ids[row, : len(own)], mask[row, : len(own)] = own, 1
    kinds = ids % 2 if types else None
    return ids, kinds, mask if masked else None


def assert_same(seen: Batch | None, expected: Batch | None) -> None:
    assert (seen is None) == (expected is None)
    if seen is not None and expected is not None:
        for name in ("starts", "lengths", "firsts"):
            assert np.array_equal(getattr(seen, name), getattr(expected, name)), name
        assert (seen.longest, seen.tokens, seen.distinct) == (expected.longest, expected.tokens, expected.distinct)


sequences = st.lists(st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=9), min_size=1, max_size=6)


@settings(deadline=None)
@given(sequences, st.integers(0, 3), st.booleans(), st.booleans(), st.sampled_from([-1, 1]), st.booleans())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_numbers_are_those_of_torch_bit_by_bit(
    dtype: torch.dtype, rows: list[list[int]], more: int, types: bool, masked: bool, padding: int, placed: bool
) -> None:
    own = tables(dtype, types, padding, placed=placed)
    batch = arrays(rows, max(map(len, rows)) + more, types, masked)
    seen = read_batch(batch, own)
    assert_same(seen, read_batch_plain(batch, own))
    if seen is not None:
        found = torch.empty(seen.rows, own.width, dtype=dtype)
        embed(seen, own, found)
        assert torch.equal(found.view(torch.uint8), embed_in_torch(seen, own).view(torch.uint8))
        assert torch.equal(spread(found, seen), spread_in_torch(found, seen))


@settings(deadline=None)
@given(sequences, st.integers(0, 3), st.booleans(), st.sampled_from([-1, 1]), st.integers(0, 2**31))
def test_tokens_at_some_places_are_embedded_as_with_all_others(
    rows: list[list[int]], more: int, types: bool, padding: int, seed: int
) -> None:
    own, padded = tables(torch.bfloat16, types, padding), max(map(len, rows)) + more
    seen = read_batch(arrays(rows, padded, types, True), own)
    if seen is None:
        return
    flat = spread_in_torch(embed_in_torch(seen, own), seen).flatten(0, 1)
    places = np.flatnonzero((np.arange(padded) < seen.lengths[:, None]).ravel())
    # In any order, some of them twice, and more of them than a thread takes at once.
    for some in (np.random.default_rng(seed).choice(places, 200), np.tile(places, 100 // len(places) + 1)):
        found = torch.empty(len(some), own.width, dtype=torch.bfloat16)
        embed(seen, own, found, some)
        assert torch.equal(found, flat[torch.from_numpy(some)])


@pytest.mark.parametrize("place", [-1, 4, 1 << 40])
def test_a_place_outside_of_the_batch_is_refused(place: int) -> None:
    own = tables(torch.float32, True, -1)
    batch = read_batch((np.array([[1, 2], [3, 4]]), None, None), own)
    assert batch is not None
    with pytest.raises(ValueError, match="batch"):
        embed(batch, own, torch.empty(2, 37), np.array([0, place]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_rows_are_shared_among_threads_and_have_the_same_bits(dtype: torch.dtype) -> None:
    own = tables(dtype, True, 1, width=600)
    batch = read_batch(arrays([[i % 7, i // 7 % 7, i // 49] * 3 for i in range(100)], 9, True, True), own)
    assert batch is not None
    out = torch.empty(batch.rows, 600, dtype=dtype)
    assert out.numel() > 1 << 17
    embed(batch, own, out)
    assert torch.equal(out.view(torch.uint8), embed_in_torch(batch, own).view(torch.uint8))


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=4, max_size=4), min_size=1, max_size=3))
def test_masks_that_are_not_plain_padding_are_not_read(mask: list[list[int]]) -> None:
    ids = np.arange(4 * len(mask)).reshape(-1, 4) % WORDS
    batch = ids, None, np.array(mask)
    own = tables(torch.float32, False, -1)
    assert_same(read_batch(batch, own), read_batch_plain(batch, own))


@pytest.mark.parametrize(
    "batch",
    [
        (np.array([[1, WORDS]]), None, None),
        (np.array([[1, -1]]), None, None),
        (np.array([[1, WORDS]]), None, np.array([[1, 0]])),  # padding is looked up too
        (np.array([[1, 1]]), np.array([[0, KINDS]]), None),
        (np.array([[1, 1]]), None, np.array([[1, 2]])),
        (np.array([[1, 1]]), None, np.array([[1]])),
        (np.array([1, 1]), None, None),
        (np.array([[1, 1]], np.int32), None, None),
        (np.zeros((1, POSITIONS + 1), np.int64), None, None),
        (np.zeros((0, 3), np.int64), None, None),
        (np.zeros((3, 0), np.int64), None, None),
    ],
    ids=["word", "negative", "padding", "type", "mask", "shape", "dimensions", "bits", "position", "batch", "length"],
)
def test_a_batch_of_another_kind_is_not_read(batch: Any) -> None:
    own = tables(torch.float32, True, -1)
    assert read_batch(batch, own) is None
    assert read_batch_plain(batch, own) is None


def test_another_batch_than_was_read_is_refused() -> None:
    own, out = tables(torch.float32, True, -1), torch.empty(4, 37)
    ids, starts = np.array([[1, 2], [3, WORDS]]), np.array([0, 2, 4])
    for other in (starts, np.array([0, 2]), np.array([0, 3, 4]), np.array([0, 2, 3])):
        with pytest.raises(ValueError, match=r"starts|batch"):
            native.add((ids, None, None), own.rows, -1, other, None, own.native, (out.data_ptr(), 4), 1)


def test_rows_of_others_are_refused() -> None:
    out, rows = torch.empty(2, 2, 3), torch.ones(2, 3)
    good = np.array([0, 2, 2]), np.array([2, 2]), np.array([0, 0])
    native.spread((rows.data_ptr(), 12), *good, (out.data_ptr(), 2))
    assert torch.equal(out, torch.ones(2, 2, 3))
    for wrong in (
        (good[0], good[1], np.array([0, 1])), (good[0], np.array([2, 1]), good[2]),
        (good[0], good[1], np.array([-1, 0])), (good[0][:2], good[1], good[2]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"starts|sequence"):
            native.spread((rows.data_ptr(), 12), *wrong, (out.data_ptr(), 2))


def test_a_result_of_another_size_is_refused() -> None:
    own = tables(torch.float32, True, -1)
    batch = read_batch((np.array([[1, 2]]), None, None), own)
    assert batch is not None
    for out in (torch.empty(1, 37), torch.empty(2, 36), torch.empty(2, 37).double(), torch.empty(37, 2).T):
        with pytest.raises(ValueError, match=r"out is|the batch"):
            embed(batch, own, out)


def test_tables_that_do_not_fit_are_refused() -> None:
    rows = torch.ones(3, 4)
    for other in (torch.ones(3, 5), torch.ones(3, 4).half(), torch.ones(4, 3).T, torch.ones(3)):
        with pytest.raises(ValueError, match="tables"):
            Tables(rows, None, other)
