"""The choice: a promise about changed answers that does not hold is worse than none."""

from __future__ import annotations

import doctest
import json
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import attmemo.perfmodel.tuner
from attmemo.errors import TuningError
from attmemo.perfmodel.tuner import Candidate, Choice, Outcome, changes_allowed, choose, sequences_needed, upper_bound

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)
shares = st.floats(0.005, 0.5)
confidences = st.floats(0.5, 0.999)
RADII = tuple(i / 100 for i in range(101))


def candidates(radii: Sequence[float] = RADII) -> list[Candidate]:
    return [Candidate(f"the distance {radius:g}", (1.0 - radius,), (radius,)) for radius in radii]


def runs_of(outcomes: Sequence[tuple[int, int, float]]) -> tuple[list[Candidate], Callable[[Candidate], Outcome]]:
    """Candidates with these outcomes (changed, total, served), and the run that gives them."""
    some = candidates([float(step) for step in range(len(outcomes))])
    return some, lambda candidate: Outcome(*outcomes[int(candidate.radii[0])])


def chosen(choice: Choice) -> float | None:
    return None if choice.candidate is None else choice.candidate.radii[0]


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


@SETTINGS
@given(shares, confidences)
def test_one_sequence_fewer_than_needed_is_not_enough(budget: float, confidence: float) -> None:
    needed = sequences_needed(budget, confidence)
    assert upper_bound(0, needed, confidence) <= budget
    assert needed == 1 or upper_bound(0, needed - 1, confidence) > budget


@SETTINGS
@given(st.integers(1, 400), shares, confidences)
def test_one_change_more_than_allowed_breaks_the_budget(total: int, budget: float, confidence: float) -> None:
    allowed = changes_allowed(total, budget, confidence)
    assert allowed == -1 or upper_bound(allowed, total, confidence) <= budget
    assert upper_bound(allowed + 1, total, confidence) > budget
    assert (allowed == -1) is (total < sequences_needed(budget, confidence))


# -- the choice


@pytest.mark.parametrize(("n", "budget", "steepness"), [(400, 0.01, 1.0), (400, 0.05, 2.0), (150, 0.05, 4.0)])
def test_a_certified_candidate_breaks_the_budget_in_no_more_draws_than_promised(
    n: int, budget: float, steepness: float
) -> None:
    # distances uniform in [0, 1]; a served answer changes with probability distance**steepness
    rng = np.random.default_rng(2021)
    draws, broken, serving = 400, 0, 0
    for _ in range(draws):
        distances = rng.random(n)
        changed = rng.random(n) < distances**steepness

        def run(candidate: Candidate, distances: np.ndarray = distances, changed: np.ndarray = changed) -> Outcome:
            near = distances <= candidate.radii[0]
            return Outcome(int((near & changed).sum()), n, float(near.mean()))

        choice = choose(candidates(), run, budget)
        radius = chosen(choice)
        if radius is not None:
            serving += choice.served > 0.0
            broken += radius ** (steepness + 1.0) / (steepness + 1.0) > budget
    assert broken <= 0.05 * draws
    assert serving >= 0.9 * draws  # and not by serving nothing


@SETTINGS
@given(
    st.lists(st.tuples(st.integers(0, 60), st.floats(0.0, 1.0)), min_size=1, max_size=12),
    st.integers(60, 600),
    shares,
)
def test_the_choice_is_that_of_the_rule_written_out(
    outcomes: list[tuple[int, float]], total: int, budget: float
) -> None:
    choice = choose(*runs_of([(changed, total, served) for changed, served in outcomes]), budget)
    certified = []
    for step, (changed, served) in enumerate(outcomes):
        if upper_bound(changed, total) > budget:
            break
        certified.append((served, -step))
    assert choice.certified is bool(certified)
    assert sum(point["certified"] for point in choice.path) == len(certified)
    if certified:
        served, step = max(certified)
        assert (chosen(choice), choice.served) == (-step, served)
        assert choice.observed == outcomes[-step][0] / total
        assert choice.upper_bound == upper_bound(outcomes[-step][0], total) <= budget
        assert choice.reached is not None
        assert choice.reached >= 0.95 - 1e-9
    else:
        assert choice.candidate is None


def test_no_run_is_made_after_the_first_failure() -> None:
    # runs need not be monotone; going on after a failure would spend the confidence again
    some, run = runs_of([(0, 1000, 0.0), (0, 1000, 0.4), (30, 1000, 0.5), (0, 1000, 0.9)])
    asked: list[Candidate] = []

    def watched(candidate: Candidate) -> Outcome:
        asked.append(candidate)
        return run(candidate)

    choice = choose(some, watched, 0.01)
    assert asked == some[:3]
    assert chosen(choice) == 1.0
    assert [point["certified"] for point in choice.path] == [True, True, False]


def test_the_candidate_that_serves_most_is_taken_and_of_equals_the_strictest() -> None:
    assert chosen(choose(*runs_of([(0, 1000, 0.2), (0, 1000, 0.6), (0, 1000, 0.5)]), 0.01)) == 1.0
    assert chosen(choose(*runs_of([(0, 1000, 0.2), (0, 1000, 0.6), (0, 1000, 0.6)]), 0.01)) == 1.0


def test_with_298_sequences_one_percent_is_not_certified_and_the_user_learns_how_many_it_takes() -> None:
    choice = choose(*runs_of([(0, 298, 0.9)]), 0.01)
    assert (choice.candidate, choice.certified, choice.needed) == (None, False, 299)
    assert "299" in choice.sentence()
    assert "298" in choice.sentence()
    assert choose(*runs_of([(0, 299, 0.9)]), 0.01).certified


def test_with_300_sequences_one_percent_is_certified_only_without_a_change() -> None:
    choice = choose(*runs_of([(0, 300, 0.0), (0, 300, 0.5), (1, 300, 0.9)]), 0.01)
    assert (choice.certified, choice.served, choice.observed) == (True, 0.5, 0.0)


def test_a_certificate_that_serves_nothing_says_so() -> None:
    choice = choose(*runs_of([(0, 400, 0.0), (400, 400, 1.0)]), 0.01)
    assert (chosen(choice), choice.served, choice.certified) == (0.0, 0.0, True)
    assert "reuses nothing" in choice.sentence()


def test_enough_data_with_too_many_changes_is_not_blamed_on_the_data() -> None:
    some, run = runs_of([(50, 1000, 1.0)])
    choice = choose(some, run, 0.01)
    assert choice.candidate is None
    assert "50 of 1000" in choice.sentence()
    assert "299" not in choice.sentence()
    assert choose(some, run, 0.01, allow_uncertified=True).candidate is None


def test_without_a_certificate_the_confidence_that_was_reached_is_said_loudly() -> None:
    some, run = runs_of([(0, 100, 0.0), (1, 100, 0.6), (2, 100, 0.7), (0, 100, 0.9)])
    assert choose(some, run, 0.01).candidate is None
    choice = choose(some, run, 0.01, allow_uncertified=True)
    assert (chosen(choice), choice.certified, choice.observed) == (1.0, False, 0.01)
    # the confidence at which one change in 100 would just keep the budget
    assert choice.reached == pytest.approx(1.0 - stats.binom.cdf(1, 100, 0.01))
    assert choice.reached is not None
    assert upper_bound(1, 100, choice.reached) == pytest.approx(0.01)
    sentence = choice.sentence()
    assert sentence.startswith("NOT CERTIFIED")
    assert "26.4 %" in sentence
    assert "299" in sentence


def test_the_weakest_candidate_on_the_way_counts() -> None:
    choice = choose(*runs_of([(1, 50, 0.2), (0, 50, 0.3)]), 0.05, allow_uncertified=True)
    assert chosen(choice) == 1.0
    assert choice.reached == pytest.approx(1.0 - stats.binom.cdf(1, 50, 0.05))  # that of the first


def test_a_certificate_that_can_be_had_is_preferred_to_going_by_what_was_observed() -> None:
    some, run = runs_of([(0, 500, 0.1), (4, 500, 0.5), (4, 500, 0.9)])
    assert choose(some, run, 0.01) == choose(some, run, 0.01, allow_uncertified=True)


def test_a_certified_sentence_names_counts_bound_and_share_served() -> None:
    sentence = choose(*runs_of([(3, 1000, 0.6)]), 0.01).sentence()
    for part in ("The distance 0", "3 of 1000", "95 %", "0.774 %", "budget 1 %", "60 % of the attention calls"):
        assert part in sentence


@SETTINGS
@given(st.integers(0, 20), st.integers(300, 3000), st.floats(0.01, 0.2))
def test_no_sentence_prints_a_bound_smaller_than_it_is(changed: int, total: int, budget: float) -> None:
    choice = choose(*runs_of([(changed, total, 0.5)]), budget)
    if choice.certified:
        printed = float(choice.sentence().split("at most ")[1].split(" %")[0]) / 100.0
        assert printed >= choice.upper_bound * (1.0 - 1e-9)


def test_the_result_is_json_able_and_complete() -> None:
    choice = choose(*runs_of([(0, 400, 0.0), (1, 400, 0.5)]), 0.05)
    data = json.loads(json.dumps(choice.to_dict(), allow_nan=False))
    assert data.keys() >= {
        "budget", "certified", "confidence", "judged", "needed", "observed", "path", "reached", "sentence", "served",
        "upper_bound",
    }  # fmt: skip
    assert data["path"][1] == {
        "radii": [1.0], "served": 0.5, "changed": 1 / 400, "upper_bound": upper_bound(1, 400), "certified": True
    }  # fmt: skip


@pytest.mark.parametrize(
    ("outcomes", "budget", "confidence"),
    [
        ([(0, 400, 0.0)], 0.0, 0.95),
        ([(0, 400, 0.0)], 1.0, 0.95),
        ([(0, 400, 0.0)], math.nan, 0.95),
        ([(0, 400, 0.0)], 0.01, 1.0),
        ([(0, 400, 0.0)], 0.01, 0.0),
    ],
)
def test_input_that_means_nothing_is_refused(
    outcomes: list[tuple[int, int, float]], budget: float, confidence: float
) -> None:
    with pytest.raises(TuningError):
        choose(*runs_of(outcomes), budget, confidence)


def test_the_bound_grows_with_what_the_database_serves_by_now() -> None:
    """Two of 700 certify 1 %, and do not if a fifth more is served later."""
    plain, grown = Outcome(2, 700, 0.9), Outcome(2, 700, 0.9, 1.2)
    assert plain.bound(0.95) == upper_bound(2, 700)
    assert grown.bound(0.95) == pytest.approx(1.2 * upper_bound(2, 700))
    some = candidates([0.0, 1.0, 2.0])
    for last, chosen in ((plain, 2.0), (grown, 1.0)):
        outcomes = [Outcome(0, 700, 0.0), Outcome(1, 700, 0.8, 1.1), last]
        choice = choose(some, lambda one, outcomes=outcomes: outcomes[int(one.radii[0])], 0.01)  # type: ignore[misc]
        assert choice.candidate is some[int(chosen)]
        assert ("while the database grew" in choice.sentence()) == (choice.growth > 1.0)
    assert Outcome(700, 700, 1.0, 3.0).bound(0.95) == 1.0
