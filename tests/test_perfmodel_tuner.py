"""The tuner: a promise about changed answers that does not hold is worse than none."""

from __future__ import annotations

import doctest
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import attmemo.perfmodel.tuner
from attmemo.errors import TuningError
from attmemo.perfmodel import TuningResult, choose_from_counts, choose_threshold, sequences_needed, upper_bound
from attmemo.perfmodel.tuner import GRID

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)
shares = st.floats(0.005, 0.5)
confidences = st.floats(0.5, 0.999)


def test_docstring_examples_hold() -> None:
    assert doctest.testmod(attmemo.perfmodel.tuner).failed == 0


# -- the bound


@SETTINGS
@given(st.integers(0, 500), st.integers(1, 500), confidences)
def test_the_bound_is_clopper_pearson(changed: int, more: int, confidence: float) -> None:
    total = changed + more
    assert upper_bound(changed, total, confidence) == pytest.approx(
        stats.beta.ppf(confidence, changed + 1, total - changed), rel=1e-9
    )


@SETTINGS
@given(st.integers(1, 300), st.data(), confidences)
def test_the_bound_rises_with_changes_and_confidence_and_falls_with_data(
    total: int, data: st.DataObject, confidence: float
) -> None:
    changed = data.draw(st.integers(0, total - 1))
    bound = upper_bound(changed, total, confidence)
    assert changed / total < bound <= 1.0
    assert upper_bound(changed + 1, total, confidence) > bound
    assert upper_bound(changed, total + 1, confidence) < bound
    assert upper_bound(changed, total, (1.0 + confidence) / 2.0) > bound


@SETTINGS
@given(st.integers(1, 120), st.floats(0.001, 0.999), confidences)
def test_the_bound_covers_the_true_share_often_enough(total: int, share: float, confidence: float) -> None:
    # summed over every outcome rather than simulated, so that a shortfall of any size shows
    outcomes = np.arange(total + 1)
    covered = np.array([upper_bound(int(k), total, confidence) >= share for k in outcomes])
    assert float(stats.binom.pmf(outcomes, total, share)[covered].sum()) >= confidence - 1e-9


def test_the_bound_covers_in_simulation() -> None:
    draws = np.random.default_rng(11).binomial(400, 0.02, size=2000)
    covered = np.mean([upper_bound(int(k), 400) >= 0.02 for k in draws])
    assert covered >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 2000)


@SETTINGS
@given(shares, confidences)
def test_one_sequence_fewer_than_needed_is_not_enough(budget: float, confidence: float) -> None:
    needed = sequences_needed(budget, confidence)
    assert upper_bound(0, needed, confidence) <= budget
    assert needed == 1 or upper_bound(0, needed - 1, confidence) > budget


# -- the choice


def a_population(rng: np.random.Generator, n: int, steepness: float) -> tuple[np.ndarray, np.ndarray]:
    """Scores uniform in [0, 1]; a served answer changes with probability (1 - score)**steepness."""
    scores = rng.random(n)
    return scores, rng.random(n) < (1.0 - scores) ** steepness


def true_risk(threshold: float, steepness: float) -> float:
    """P(score >= t and changed) = the integral of (1 - s)**steepness from t to 1."""
    return float((1.0 - threshold) ** (steepness + 1.0) / (steepness + 1.0))


@pytest.mark.parametrize(("n", "budget", "steepness"), [(400, 0.01, 1.0), (400, 0.05, 2.0), (150, 0.05, 4.0)])
def test_a_certified_threshold_breaks_the_budget_in_no_more_draws_than_promised(
    n: int, budget: float, steepness: float
) -> None:
    rng = np.random.default_rng(2021)
    draws, broken, certified = 400, 0, 0
    for _ in range(draws):
        result = choose_threshold(*a_population(rng, n, steepness), budget)
        if result.threshold is not None:
            certified += result.served is not None and result.served > 0.0
            broken += true_risk(result.threshold, steepness) > budget
    assert broken <= 0.05 * draws
    assert certified >= 0.9 * draws  # and not by serving nothing


@SETTINGS
@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.booleans()), min_size=1, max_size=80), st.floats(0.02, 0.6))
def test_the_choice_is_that_of_the_test_written_out(data: list[tuple[float, bool]], budget: float) -> None:
    result = choose_threshold([s for s, _ in data], [c for _, c in data], budget)
    certified = []
    for threshold in GRID:
        changed = sum(c for s, c in data if s >= threshold)
        if upper_bound(changed, len(data)) > budget:
            break
        certified.append((sum(s >= threshold for s, _ in data), threshold))
    assert result.certified is bool(certified)
    assert [point["certified"] for point in result.curve] == [t in {t for _, t in certified} for t in GRID]
    if certified:
        most = max(served for served, _ in certified)
        assert result.threshold == max(t for served, t in certified if served == most)
        assert result.served == most / len(data)
        assert result.upper_bound <= budget
        assert result.reached is not None
        assert result.reached >= 0.95 - 1e-9
    else:
        assert result.threshold is None


def test_testing_stops_at_the_first_failure_even_if_a_looser_candidate_would_pass() -> None:
    # runs of their own need not be monotone; going on after a failure would spend the confidence again
    rows = [(0.9, 0, 1000), (0.8, 30, 1000), (0.7, 0, 1000)]
    result = choose_from_counts(rows, 0.01)
    assert result.threshold == 0.9
    assert [point["certified"] for point in result.curve] == [True, False, False]


def test_the_order_of_the_rows_does_not_matter() -> None:
    rows = [(0.7, 12, 1000), (0.9, 0, 1000), (0.8, 2, 1000)]
    assert choose_from_counts(rows, 0.01) == choose_from_counts(rows[::-1], 0.01)
    assert choose_from_counts(rows, 0.01).threshold == 0.8


def test_between_runs_the_one_that_serves_most_is_taken() -> None:
    rows = [(0.9, 0, 1000), (0.8, 0, 1000), (0.7, 0, 1000)]
    assert choose_from_counts(rows, 0.01).threshold == 0.7
    assert choose_from_counts(rows, 0.01, served=[0.2, 0.6, 0.5]).threshold == 0.8
    assert choose_from_counts(rows, 0.01, served=[0.2, 0.6, 0.6]).threshold == 0.8


def test_a_looser_threshold_that_serves_nobody_more_is_not_taken() -> None:
    result = choose_threshold([0.9] * 500, [False] * 500, 0.01)
    assert (result.threshold, result.served) == (0.9, 1.0)


def test_a_score_equal_to_the_threshold_is_served() -> None:
    result = choose_threshold([0.5] * 500, [False] * 500, 0.01, candidates=[0.5])
    assert result.served == 1.0


def test_a_sequence_that_found_nothing_is_never_served() -> None:
    result = choose_threshold([-1.0, -math.inf] * 200 + [0.8] * 400, [False] * 800, 0.01)
    assert result.served == 0.5


def test_with_298_sequences_one_percent_is_not_certified_and_the_user_learns_how_many_it_takes() -> None:
    result = choose_threshold([0.9] * 298, [False] * 298, 0.01)
    assert (result.threshold, result.certified, result.needed) == (None, False, 299)
    assert "299" in result.sentence()
    assert "298" in result.sentence()
    assert choose_threshold([0.9] * 299, [False] * 299, 0.01).certified


def test_a_certificate_that_serves_nothing_says_so() -> None:
    result = choose_threshold([0.9] * 400, [True] * 400, 0.01)
    assert (result.threshold, result.served, result.certified) == (1.0, 0.0, True)
    assert "serves nothing" in result.sentence()


def test_enough_data_with_too_many_changes_is_not_blamed_on_the_data() -> None:
    result = choose_threshold([1.0] * 1000, [True] * 50 + [False] * 950, 0.01)
    assert result.threshold is None
    assert "50 of 1000" in result.sentence()
    assert "299" not in result.sentence()
    assert choose_threshold([1.0] * 1000, [True] * 50 + [False] * 950, 0.01, allow_uncertified=True).threshold is None


def test_the_fallback_says_loudly_what_confidence_it_reached() -> None:
    scores = np.linspace(0.999, 0.0, 100)
    changed = np.zeros(100, dtype=bool)
    changed[[60, 70]] = True
    assert choose_threshold(scores, changed, 0.01).threshold is None
    result = choose_threshold(scores, changed, 0.01, allow_uncertified=True)
    assert result.certified is False
    assert result.observed == 0.01
    assert result.threshold is not None
    assert scores[60] >= result.threshold > scores[70]
    assert result.reached is not None
    # the confidence at which one change in 100 would just keep the budget
    assert result.reached == pytest.approx(1.0 - stats.binom.cdf(1, 100, 0.01))
    assert upper_bound(1, 100, result.reached) == pytest.approx(0.01)
    sentence = result.sentence()
    assert sentence.startswith("NOT CERTIFIED")
    assert "26.4 %" in sentence
    assert "299" in sentence


def test_the_fallback_stops_at_the_first_candidate_over_the_budget_and_reports_the_weakest_it_passed() -> None:
    stopped = choose_from_counts([(0.9, 0, 50), (0.8, 5, 50), (0.7, 0, 50)], 0.05, allow_uncertified=True)
    assert (stopped.threshold, stopped.certified) == (0.9, False)
    passed = choose_from_counts([(0.9, 1, 50), (0.8, 0, 50)], 0.05, allow_uncertified=True)
    assert passed.threshold == 0.8
    assert passed.reached == pytest.approx(1.0 - stats.binom.cdf(1, 50, 0.05))  # that of 0.9, not of 0.8


def test_the_fallback_is_not_used_when_something_is_certified() -> None:
    scores, changed = a_population(np.random.default_rng(3), 500, 2.0)
    assert choose_threshold(scores, changed, 0.05) == choose_threshold(scores, changed, 0.05, allow_uncertified=True)


def test_a_certified_sentence_names_counts_bound_and_share_served() -> None:
    result = choose_threshold([0.9] * 600 + [0.2] * 400, [True] * 3 + [False] * 597 + [True] * 400, 0.01)
    assert result.threshold == 0.9
    sentence = result.sentence()
    for part in ("Threshold 0.9", "3 of 1000", "95 %", "0.774 %", "budget 1 %", "60 %"):
        assert part in sentence


@SETTINGS
@given(st.integers(0, 20), st.integers(300, 3000), st.floats(0.01, 0.2))
def test_no_sentence_prints_a_bound_smaller_than_it_is(changed: int, total: int, budget: float) -> None:
    result = choose_from_counts([(0.5, changed, total)], budget)
    text = result.sentence()
    if result.certified:
        printed = float(text.split("at most ")[1].split(" %")[0]) / 100.0
        assert printed >= result.upper_bound * (1.0 - 1e-9)


def test_the_grid_does_not_depend_on_the_data() -> None:
    assert len(GRID) == 101
    assert GRID[0] == 1.0
    assert GRID[-1] == 0.0
    assert list(GRID) == sorted(GRID, reverse=True)
    result = choose_threshold([0.123456] * 400, [False] * 400, 0.01)
    assert [point["threshold"] for point in result.curve] == list(GRID)


def test_the_result_is_json_able() -> None:
    result = choose_threshold([0.9] * 400, [False] * 400, 0.01)
    again = TuningResult(**json.loads(json.dumps(result.to_dict(), allow_nan=False)))
    assert again == result
    assert again.sentence() == result.sentence()


@pytest.mark.parametrize(
    ("scores", "changed", "budget", "extra"),
    [
        ([], [], 0.01, {}),
        ([0.5], [True, False], 0.01, {}),
        ([[0.5]], [[True]], 0.01, {}),
        ([math.nan], [True], 0.01, {}),
        ([0.5], [2], 0.01, {}),
        ([0.5], [True], 0.0, {}),
        ([0.5], [True], 1.0, {}),
        ([0.5], [True], math.nan, {}),
        ([0.5], [True], 0.01, {"confidence": 1.0}),
        ([0.5], [True], 0.01, {"confidence": 0.0}),
        ([0.5], [True], 0.01, {"candidates": []}),
        ([0.5], [True], 0.01, {"candidates": [0.5, math.nan]}),
        ([0.5], [True], 0.01, {"candidates": [0.5, 0.5]}),
    ],
)
def test_input_that_means_nothing_is_refused(scores: Any, changed: Any, budget: float, extra: dict[str, Any]) -> None:
    with pytest.raises(TuningError):
        choose_threshold(scores, changed, budget, **extra)


@pytest.mark.parametrize(
    ("rows", "served"),
    [
        ([], None),
        ([(0.5, 3, 2)], None),
        ([(0.5, -1, 2)], None),
        ([(0.5, 0, 0)], None),
        ([(0.5, 0, 10), (0.5, 1, 10)], None),
        ([(0.5, 0, 10)], [0.1, 0.2]),
        ([(0.5, 0, 10)], [1.5]),
    ],
)
def test_counts_that_mean_nothing_are_refused(rows: Any, served: Any) -> None:
    with pytest.raises(TuningError):
        choose_from_counts(rows, 0.01, served=served)
