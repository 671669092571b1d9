"""A radius for each group of layers: many more policies than thresholds, so many more ways to fool oneself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attmemo.perfmodel.policy import NEVER, propose, split
from attmemo.perfmodel.tuner import (
    JUDGED,
    Candidate,
    Choice,
    Outcome,
    changes_allowed,
    choose,
    sequences_judged,
    upper_bound,
)

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)
MANY = 10_000  # so many policies that none is left out


def a_population(
    rng: np.random.Generator, n: int, hurts: list[float], *, coupled: bool = True, unknown: float = 0.1
) -> tuple[np.ndarray, np.ndarray]:
    """Distances uniform in [0, 1], `unknown` of them inf; each group adds `hurts` * d**2 to the chance of a change."""
    distances = rng.random(n)
    chance = np.cumsum(hurts)[:, None] * distances**2
    # coupled: an answer once changed stays changed; otherwise more groups may put it right again
    changed = rng.random(n if coupled else (len(hurts), n)) < chance
    return np.where(rng.random(n) < unknown, np.inf, distances), changed


def true_risk(radii: tuple[float, ...], hurts: list[float], unknown: float = 0.1) -> float:
    """The integral of the chance above over the distances that each group serves."""
    return (1.0 - unknown) * sum(h * max(r, 0.0) ** 3 / 3.0 for h, r in zip(hurts, radii, strict=True))


def groups_served(distances: np.ndarray, radii: tuple[float, ...]) -> np.ndarray:
    """Number of groups that serve each sequence: the definition of a policy."""
    served: np.ndarray = (distances[:, None] <= np.array(radii)).sum(axis=1)
    return served


def groups_gain(distances: np.ndarray, radii: tuple[float, ...]) -> np.ndarray:
    """Number of sequences that each group serves."""
    served: np.ndarray = (distances[:, None] <= np.array(radii)).sum(axis=0)
    return served


def count_changed(distances: np.ndarray, changed: np.ndarray, radii: tuple[float, ...]) -> int:
    """Changed answers, by the definition."""
    exact = np.zeros((1, len(distances)), bool)
    return int(np.concatenate((exact, changed))[groups_served(distances, radii), np.arange(len(distances))].sum())


def tuned(distances: np.ndarray, changed: np.ndarray, sizes: list[int], budget: float, seed: int = 0) -> Choice:
    """Policies from one part, tested on the other."""
    select, certify = split(len(distances), sequences_judged(len(distances), budget), seed)
    allowed = changes_allowed(len(certify), budget) * len(select) / len(certify)
    policies = propose(distances[select], changed[:, select], [float(size) for size in sizes], allowed)

    def run(candidate: Candidate) -> Outcome:
        layers = np.cumsum([0, *sizes])[groups_served(distances[certify], candidate.radii)]
        share = float(layers.mean() / sum(sizes))
        return Outcome(count_changed(distances[certify], changed[:, certify], candidate.radii), len(certify), share)

    return choose([Candidate("a policy", (), radii) for radii in policies], run, budget)


def radii_of(choice: Choice) -> tuple[float, ...]:
    assert choice.candidate is not None
    return choice.candidate.radii


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Small problems of any kind: ties, inf, answers that change back, groups of different weight."""
    groups, n = draw(st.integers(1, 4)), draw(st.integers(1, 60))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    distances = rng.random(n) if draw(st.booleans()) else rng.integers(0, 5, n).astype(float)
    distances[rng.random(n) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = np.inf
    return {
        "distances": distances,
        "changed": rng.random((groups, n)) < draw(st.sampled_from([0.0, 0.05, 0.3, 1.0])),
        "gains": draw(st.lists(st.floats(0.01, 100.0), min_size=groups, max_size=groups)),
    }


# -- the promise


@pytest.mark.parametrize(
    ("n", "budget", "hurts", "coupled"),
    [
        (1000, 0.02, [0.01, 0.05, 0.5], True),
        (1000, 0.02, [0.01, 0.05, 0.5], False),
        (300, 0.05, [0.3], True),
    ],
)
def test_a_certified_policy_breaks_the_budget_in_no_more_draws_than_promised(
    n: int, budget: float, hurts: list[float], coupled: bool
) -> None:
    rng = np.random.default_rng(2021)
    draws, broken, serving = 200, 0, 0
    for seed in range(draws):
        distances, changed = a_population(rng, n, hurts, coupled=coupled)
        choice = tuned(distances, changed, [1] * len(hurts), budget, seed)
        assert choice.certified
        broken += true_risk(radii_of(choice), hurts) > budget
        serving += choice.served > 0.1
    assert broken <= draws * (0.05 + 2.0 * math.sqrt(0.05 * 0.95 / draws))
    assert serving >= 0.95 * draws  # and not by serving nothing


def test_a_lucky_certification_part_does_not_overrule_the_other() -> None:
    # no answer of the certifying part changes, every tenth of the selecting one does
    select, _ = split(2000, sequences_judged(2000, 0.01), 0)
    distances = np.random.default_rng(0).random(2000)
    changed = np.zeros((1, 2000), bool)
    changed[0, select[::10]] = True
    served = distances <= radii_of(tuned(distances, changed, [1], 0.01))[0]
    assert (changed[0] & served).mean() <= 0.01


@pytest.mark.parametrize("total", [59, 400, 700, 1000, 2400])
def test_most_judge_and_not_one_more_than_their_changes_take(total: int) -> None:
    for budget in (0.01, 0.05):
        judged, most = sequences_judged(total, budget), int(JUDGED * total)
        allowed = changes_allowed(most, budget)
        assert (judged > 0) == (allowed >= 0)
        if judged:
            assert judged <= most
            assert changes_allowed(judged, budget) == allowed > changes_allowed(judged - 1, budget)


def test_neighbours_go_to_the_same_part() -> None:
    select, certify = split(4000, 2990, 3)
    assert len(certify) == 2990
    assert sorted([*select, *certify]) == list(range(4000))
    first = set(select.tolist())
    changes = sum((i in first) != (i + 1 in first) for i in range(3999))
    assert changes <= 4000 / 20


@SETTINGS
@given(problems())
def test_every_policy_contains_the_one_before(problem: dict[str, Any]) -> None:
    distances, groups = problem["distances"], len(problem["gains"])
    policies = propose(**problem, allowed=len(distances), most=MANY)
    before = (NEVER,) * groups
    assert policies[0] == before
    for radii in policies:
        assert list(radii) == sorted(radii, reverse=True)
        assert all(old <= new for old, new in zip(before, radii, strict=True))
        assert all(r == NEVER or r in distances for r in radii)
        before = radii
    farthest = max(distances[np.isfinite(distances)], default=NEVER)
    assert before == (farthest,) * groups  # in the end everything is served


@SETTINGS
@given(problems(), st.integers(0, 20), st.integers(2, 12))
def test_policies_are_few_and_begin_with_nothing_and_leave_out_the_hopeless(
    problem: dict[str, Any], allowed: int, most: int
) -> None:
    policies = propose(**problem, allowed=allowed, most=most)
    assert len(policies) <= most
    assert policies == sorted(set(policies))
    assert policies[0] == (NEVER,) * len(problem["gains"])
    counts = [count_changed(problem["distances"], problem["changed"], radii) for radii in policies]
    assert max(counts) <= allowed + allowed // 2 + 1


def test_one_group_is_tested_from_the_strictest_radius_on() -> None:
    distances, changed = a_population(np.random.default_rng(8), 1501, [0.5])
    seen = np.sort(distances[np.isfinite(distances)])
    grid = [float(seen[math.ceil(i * len(seen) / 40) - 1]) for i in range(1, 41)]
    assert propose(distances, changed, [3.0], 1501, MANY) == [(NEVER,), *((radius,) for radius in grid)]


# -- what it is for


def test_layers_of_different_sensitivity_are_served_more_than_by_the_best_single_radius() -> None:
    # four layers that hardly mind and two that do, as measured on a DeBERTa
    distances, changed = a_population(np.random.default_rng(4), 6000, [0.004, 0.2])
    single = tuned(distances, changed[-1:], [6], 0.01)
    policy = tuned(distances, changed, [4, 2], 0.01)
    assert policy.certified
    assert single.certified
    assert radii_of(policy)[0] > 0.9
    assert 0.0 < radii_of(policy)[1] < radii_of(single)[0] + 0.05
    assert policy.served > single.served + 0.2


def test_a_group_that_saves_more_is_served_before_one_that_hurts_as_little() -> None:
    # by itself the second group is ten times dearer; it takes the first along, for it saves a hundred times more
    distances, changed = a_population(np.random.default_rng(9), 4000, [0.02, 0.2])
    light, heavy = (propose(distances, changed, [1.0, gain], 30)[-1] for gain in (1.0, 100.0))
    assert heavy[1] > light[1]
    assert heavy[0] < light[0]


def test_only_the_ratio_of_gains_matters() -> None:
    distances, changed = a_population(np.random.default_rng(9), 1000, [0.02, 0.2])
    assert propose(distances, changed, [2.0, 1.0], 20) == propose(distances, changed, [1024.0, 512.0], 20)


def test_a_group_that_hurts_only_without_the_next_one_does_not_stand_in_the_way() -> None:
    rng = np.random.default_rng(0)
    changed = np.stack([rng.random(2000) < 0.2, np.zeros(2000, bool)])  # all put right by the second group
    choice = tuned(rng.random(2000), changed, [1, 1], 0.01)
    assert radii_of(choice)[0] == radii_of(choice)[1]
    assert choice.served > 0.99
    assert choice.observed == 0.0


def test_changes_that_fall_along_the_path_are_taken() -> None:
    # near records: only both groups together are harmless; far ones: only the first group is
    rng = np.random.default_rng(0)
    distances = rng.random(4000)
    far = distances > 0.5
    changed = np.stack([~far & (rng.random(4000) < 0.05), far & (rng.random(4000) < 0.5)])
    radii = radii_of(tuned(distances, changed, [1, 1], 0.01))
    assert radii[0] > 0.99
    assert 0.45 < radii[1] < 0.55


def test_changes_that_fall_on_the_way_are_not_approached_through_worse_policies() -> None:
    # by distance: group 2 hurts 4 of the nearest 100, and puts right 5 that group 1 hurts among the next 100; beyond,
    # group 2 hurts every sequence, so that group 1 is served everywhere first
    distances = np.repeat(np.arange(1, 11), 100) / 10
    changed = np.zeros((2, 1000), bool)
    changed[0, 150:155] = True
    changed[1, 40:44] = True
    changed[1, 200:] = True
    policies = propose(distances, changed, [100.0, 1.0], 1000, MANY)
    assert policies[10:13] == [(1.0, NEVER), (1.0, 0.2), (1.0, 0.3)]  # not through the nearest 100 alone


def test_a_few_sequences_that_did_not_change_do_not_make_a_sensitive_group_free() -> None:
    # group 1 changed one answer of 1000; group 2 changed all but the nearest 50, of which too few were looked at
    distances = np.repeat(np.arange(1, 21), 50) / 20
    changed = np.zeros((2, 1000), bool)
    changed[:, 500] = True
    changed[1, 50:] = True
    assert propose(distances, changed, [1.0, 1.0], 1000, MANY)[20:22] == [(1.0, NEVER), (1.0, 0.05)]


def test_where_changes_begin_to_count_steps_are_small() -> None:
    # without a change up to 0.5, then one in twenty: where the budget ends has to be found beyond 0.5
    distances = np.arange(1, 2001) / 2000
    changed = np.zeros((1, 2000), bool)
    changed[0, 1000::20] = True
    assert sum(radius > 0.5 for (radius,) in propose(distances, changed, [1.0], 20)) >= 5


# -- sequences without a record


def test_a_sequence_without_a_record_is_never_served() -> None:
    distances = np.where(np.arange(1000) % 4 == 0, np.inf, 0.5)
    changed = np.tile(np.isinf(distances), (2, 1))  # they would all change if they were served
    assert propose(distances, changed, [1.0, 1.0], 5)[-1] == (0.5, 0.5)


def test_no_record_at_all_leaves_nothing_to_test_but_serving_nothing() -> None:
    assert propose([math.inf] * 1000, np.zeros((2, 1000), bool), [1.0, 1.0], 5) == [(NEVER, NEVER)]


@SETTINGS
@given(problems())
def test_no_two_policies_lie_far_apart_where_one_fits_between_them(problem: dict[str, Any]) -> None:
    distances, weights = problem["distances"], np.array(problem["gains"])
    policies = propose(**problem, allowed=len(distances), most=MANY)
    gains = [float(groups_gain(distances, radii) @ weights) for radii in policies]
    seen = np.unique(distances[np.isfinite(distances)])
    for before, after, low, high in zip(policies, policies[1:], gains, gains[1:], strict=False):
        steps = sum(int(((seen > a) & (seen <= b)).sum()) for a, b in zip(before, after, strict=True))
        assert steps <= 1 or high - low <= 0.05 * gains[-1] + 1e-9


def test_no_policy_with_many_changes_stands_in_the_way_of_one_without() -> None:
    """Every tenth answer changes when the first layer is served, and changes back when the second one is, too."""
    changed = np.zeros((2, 1000), bool)
    changed[0, ::10] = True
    assert propose(np.full(1000, 0.1), changed, [1.0, 1.0], 2) == [(NEVER, NEVER), (0.1, 0.1)]


@pytest.mark.parametrize("edge", [0.31, 0.43, 0.54, 0.65, 0.76])
def test_what_is_served_ends_near_where_answers_begin_to_change(edge: float) -> None:
    """The selecting sequences saw no change, so steps are by gain alone."""
    distances = np.random.default_rng(4).random(2000)
    select, _ = split(2000, sequences_judged(2000, 0.01), 0)
    changed = np.stack([distances > edge] * 2)
    changed[:, select] = False
    assert edge - 0.06 < tuned(distances, changed, [1, 1], 0.01).served < edge + 0.03


def test_nothing_is_served_beyond_the_greatest_distance_that_chose() -> None:
    policies = propose([0.1, 0.5], np.zeros((1, 2), bool), [1.0], 5)
    assert policies[-1] == (0.5,)


def test_the_same_seed_gives_the_same_parts_and_another_one_others() -> None:
    (first, _), (again, _), (other, _) = (split(900, 600, seed) for seed in (7, 7, 8))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_what_certifies_does_not_see_what_was_chosen_by() -> None:
    distances, changed = a_population(np.random.default_rng(1), 1200, [0.05, 0.5])
    _, certify = split(1200, sequences_judged(1200, 0.05), 0)
    other = changed.copy()
    other[:, certify] = ~other[:, certify]
    first, second = (tuned(distances, c, [1, 1], 0.05) for c in (changed, other))
    shorter = min(len(first.path), len(second.path))
    assert [point["radii"] for point in first.path[:shorter]] == [point["radii"] for point in second.path[:shorter]]
    assert first.served > second.served
    assert first.upper_bound == upper_bound(round(first.observed * len(certify)), len(certify))
