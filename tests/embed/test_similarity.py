"""Eq. 1 (arXiv 2301.09262): the score equals a loop that follows the formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attmemo import similarity_score
from attmemo.embed.similarity import similarity_matrix

EXACT = settings(derandomize=True, deadline=None, max_examples=60)


def random_maps(count: int, heads: int, n: int, seed: int, sharpness: float = 1.0) -> Tensor:
    """Attention maps ``[count, heads, n, n]``; the sharper, the closer to one-hot rows."""
    scores = torch.randn(count, heads, n, n, generator=torch.Generator().manual_seed(seed))
    return (scores * sharpness).softmax(-1)


def one_hot(columns: list[int]) -> Tensor:
    """A map ``[1, n, n]`` whose row i attends to ``columns[i]`` alone."""
    apm = torch.zeros(1, len(columns), len(columns))
    apm[0, range(len(columns)), columns] = 1.0
    return apm


def naive(a: Tensor, b: Tensor) -> float:
    """Eq. 1 as a loop: the mean over rows of one minus the total variation distance."""
    heads, n, _ = a.shape
    total = 0.0
    for head in range(heads):
        for row in range(n):
            distance = sum(abs(float(a[head, row, k]) - float(b[head, row, k])) for k in range(n))
            total += 1.0 - 0.5 * distance
    return total / (heads * n)


shapes = st.tuples(st.integers(1, 3), st.integers(1, 6))
seeds = st.integers(0, 2**20)
sharpness = st.sampled_from([0.1, 1.0, 10.0, 1000.0])


class TestScore:
    @EXACT
    @given(shapes, seeds, sharpness)
    def test_equals_the_formula(self, shape: tuple[int, int], seed: int, sharp: float) -> None:
        a, b = random_maps(2, *shape, seed, sharp)
        assert float(similarity_score(a, b)) == pytest.approx(naive(a, b), abs=1e-6)

    @EXACT
    @given(shapes, seeds, sharpness)
    def test_is_symmetric_and_between_zero_and_one(
        self, shape: tuple[int, int], seed: int, sharp: float
    ) -> None:
        a, b = random_maps(2, *shape, seed, sharp)
        score = similarity_score(a, b)
        assert torch.equal(score, similarity_score(b, a))
        assert 0.0 <= float(score) <= 1.0

    @EXACT
    @given(shapes, seeds, sharpness)
    def test_of_equal_maps_is_one(self, shape: tuple[int, int], seed: int, sharp: float) -> None:
        (a,) = random_maps(1, *shape, seed, sharp)
        assert float(similarity_score(a, a.clone())) == 1.0

    def test_of_disjoint_maps_is_zero_although_rows_sum_to_more_than_one(self) -> None:
        a, b = one_hot([0, 0, 0]) * (1 + 1e-6), one_hot([1, 2, 1]) * (1 + 1e-6)
        assert float(similarity_score(a, b)) == 0.0
        assert float(similarity_matrix(a[None], b[None])) == 0.0

    def test_of_maps_that_share_half_their_rows_is_a_half(self) -> None:
        assert float(similarity_score(one_hot([0, 1, 0, 1]), one_hot([0, 1, 2, 3]))) == 0.5

    def test_counts_every_head_the_same(self) -> None:
        a = torch.cat([one_hot([0, 1]), one_hot([0, 1])])
        b = torch.cat([one_hot([0, 1]), one_hot([1, 0])])
        assert float(similarity_score(a, b)) == 0.5

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_is_computed_in_float32_for_half_precision_maps(self, dtype: torch.dtype) -> None:
        a, b = random_maps(2, 2, 40, seed=3)
        score = similarity_score(a.to(dtype), b)
        assert score.dtype == torch.float32
        assert float(score) == pytest.approx(naive(a.to(dtype).float(), b), abs=1e-5)

    def test_broadcasts_leading_dimensions(self) -> None:
        a = random_maps(4, 2, 5, seed=1)
        scores = similarity_score(a, a[:1])
        assert scores.shape == (4,)
        assert float(scores[0]) == 1.0

    @pytest.mark.parametrize(
        ("a", "b"),
        [
            ((2, 3, 3), (2, 4, 4)),  # other length
            ((2, 3, 3), (3, 3, 3)),  # other heads
            ((2, 3, 4), (2, 3, 4)),  # not square: padded keys
            ((3, 3), (3, 3)),  # no heads
        ],
    )
    def test_of_maps_that_cannot_be_compared_is_refused(self, a: tuple[int, ...], b: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match="maps must share"):
            similarity_score(torch.zeros(a), torch.zeros(b))


class TestMatrix:
    @EXACT
    @given(st.integers(1, 4), st.integers(1, 4), shapes, seeds, sharpness)
    def test_equals_every_pair(self, q: int, r: int, shape: tuple[int, int], seed: int, sharp: float) -> None:
        queries = random_maps(q, *shape, seed, sharp)
        records = torch.cat([random_maps(r, *shape, seed + 1, sharp), queries[:1]])
        matrix = similarity_matrix(queries, records)
        assert matrix.shape == (q, r + 1)
        for i, a in enumerate(queries):
            for j, b in enumerate(records):
                assert float(matrix[i, j]) == pytest.approx(float(similarity_score(a, b)), abs=2e-6)

    def test_of_other_lengths_is_refused(self) -> None:
        with pytest.raises(ValueError, match="maps must share"):
            similarity_matrix(torch.zeros(1, 2, 3, 3), torch.zeros(1, 2, 4, 4))
