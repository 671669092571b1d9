"""Cost model: a wrong prediction of milliseconds makes every decision of the gate wrong."""

from __future__ import annotations

import doctest
import json
import math
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attmemo.perfmodel.cost
from attmemo.errors import DatabaseCorruptError
from attmemo.perfmodel.cost import CostModel
from attmemo.system.json_fields import Field

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)
BATCHES = [[n] * rows for rows in (1, 8, 32) for n in (16, 64, 128, 256, 512)] + [[16, 512, 40], [100, 7, 300, 300]]

per_token = st.floats(1e-3, 1e-1)
per_square = st.one_of(st.just(0.0), st.floats(1e-5, 1e-3))
per_call = st.one_of(st.just(0.0), st.floats(0.05, 5.0))


def timed(model: CostModel) -> list[tuple[list[int], float]]:
    return [(lengths, model.estimate_lengths(lengths)) for lengths in BATCHES]


def test_docstring_examples_hold() -> None:
    assert doctest.testmod(attmemo.perfmodel.cost).failed == 0


@SETTINGS
@given(per_token, per_square, per_call)
def test_fit_recovers_planted_coefficients(a: float, b: float, c: float) -> None:
    fitted = CostModel.fit(timed(CostModel(a, b, c)))
    assert fitted.a == pytest.approx(a, rel=1e-4)
    assert fitted.b == pytest.approx(b, rel=1e-4, abs=1e-9)
    assert fitted.c == pytest.approx(c, rel=1e-4, abs=1e-5)


@SETTINGS
@given(per_token, per_square, per_call, st.integers(0, len(BATCHES) - 1), st.sampled_from([0.2, 3.0, 20.0]))
def test_one_interrupted_batch_does_not_decide(a: float, b: float, c: float, where: int, factor: float) -> None:
    planted = CostModel(a, b, c)
    samples = timed(planted)
    again = timed(planted)  # every batch is timed twice, one of the timings is ruined
    samples[where] = (samples[where][0], samples[where][1] * factor)
    fitted = CostModel.fit(samples + again)
    for lengths in BATCHES:
        assert fitted.estimate_lengths(lengths) == pytest.approx(planted.estimate_lengths(lengths), rel=0.01)


def test_noise_of_a_few_percent_does_not_spoil_short_batches() -> None:
    # With absolute errors the 500 ms batches would decide and the 1 ms batches could be off by any factor.
    planted = CostModel(0.02, 2e-5, 0.4)
    rng = np.random.default_rng(5)
    samples = [(n, ms * (1.0 + 0.03 * float(rng.standard_normal()))) for n, ms in timed(planted) * 4]
    fitted = CostModel.fit(samples)
    for lengths in BATCHES:
        assert fitted.estimate_lengths(lengths) == pytest.approx(planted.estimate_lengths(lengths), rel=0.05)


def test_linear_scaling_of_the_paper_would_miss_the_quadratic_term() -> None:
    planted = CostModel(0.01, 1e-4, 0.0)
    fitted = CostModel.fit(timed(planted))
    same_tokens = fitted.estimate_lengths([512]) / fitted.estimate_lengths([128] * 4)
    assert same_tokens == pytest.approx((0.01 + 1e-4 * 512) / (0.01 + 1e-4 * 128), rel=1e-4)


@SETTINGS
@given(st.integers(1, 2048), st.floats(0.01, 1e4))
def test_one_sample_is_reproduced_and_read_as_cost_per_token(length: int, milliseconds: float) -> None:
    fitted = CostModel.fit([([length] * 4, milliseconds)])
    assert fitted.estimate_lengths([length] * 4) == pytest.approx(milliseconds)
    assert (fitted.b, fitted.c) == (0.0, 0.0)


def test_one_length_in_several_batch_sizes_is_fitted() -> None:
    samples = [([128] * rows, 0.5 + 1.5 * rows) for rows in (1, 2, 8, 32)]
    fitted = CostModel.fit(samples)
    assert fitted.c == pytest.approx(0.5)
    assert fitted.a == pytest.approx(1.5 / 128)  # tokens and squares cannot be told apart: the simpler one
    assert fitted.b == 0.0


def test_times_that_fall_with_the_length_do_not_give_a_negative_coefficient() -> None:
    fitted = CostModel.fit([([64], 3.0), ([128], 2.0), ([256], 1.0)])
    assert min(fitted.a, fitted.b, fitted.c) >= 0.0
    assert fitted.estimate_lengths([4096]) > 0.0


@pytest.mark.parametrize("milliseconds", [0.0, -1.0, math.nan, math.inf])
def test_times_that_mean_nothing_are_refused(milliseconds: float) -> None:
    with pytest.raises(ValueError, match="sample 0"):
        CostModel.fit([([8], milliseconds)])


@SETTINGS
@given(per_token, per_square, per_call)
def test_json_round_trip_is_exact(a: float, b: float, c: float) -> None:
    model = CostModel(a, b, c)
    assert CostModel.read(Field(json.loads(json.dumps(asdict(model))), "profile", "")) == model


@pytest.mark.parametrize("value", [None, "1", True, -1, math.nan, math.inf, [1], 10**400])
def test_a_malformed_coefficient_is_named(value: object) -> None:
    with pytest.raises(DatabaseCorruptError, match=r"costs\[2\]\.exact\.b"):
        CostModel.read(Field({"a": 1, "b": value, "c": 0}, "profile", "", "costs[2].exact"))
