"""A radius for each group of layers: many more policies than thresholds, so many more ways to fool oneself."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attmemo.errors import TuningError
from attmemo.perfmodel import NEVER, PolicyResult, choose_policy, sequences_needed, split_halves, upper_bound

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)


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


def halves(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Which sequences choose, and which certify."""
    return split_halves(n, seed)


def groups_served(distances: np.ndarray, radii: list[float] | tuple[float, ...]) -> np.ndarray:
    """Number of groups that serve each sequence: the definition of a policy."""
    return np.array([sum(d <= r for r in radii) for d in distances])


def share_changed(distances: np.ndarray, changed: np.ndarray, radii: list[float] | tuple[float, ...]) -> float:
    """Share of answers that change, by the definition."""
    served = groups_served(distances, radii)
    return float(np.mean([m > 0 and bool(changed[m - 1, q]) for q, m in enumerate(served)]))


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
        "sizes": draw(st.lists(st.integers(1, 6), min_size=groups, max_size=groups)),
        "gains": draw(st.lists(st.floats(0.01, 100.0), min_size=groups, max_size=groups)),
        "budget": draw(st.floats(0.02, 0.6)),
        "seed": draw(st.integers(0, 1000)),
        "allow_uncertified": draw(st.booleans()),
    }


# -- the promise


@pytest.mark.parametrize(
    ("n", "budget", "hurts", "coupled"),
    [
        (1000, 0.02, [0.01, 0.05, 0.5], True),
        (1000, 0.02, [0.01, 0.05, 0.5], False),
        (2000, 0.02, [0.02, 0.02, 0.3, 0.4], True),
        (300, 0.05, [0.3], True),
    ],
)
def test_a_certified_policy_breaks_the_budget_in_no_more_draws_than_promised(
    n: int, budget: float, hurts: list[float], coupled: bool
) -> None:
    rng = np.random.default_rng(2021)
    draws, broken, serving = 400, 0, 0
    for seed in range(draws):
        distances, changed = a_population(rng, n, hurts, coupled=coupled)
        result = choose_policy(distances, changed, [1] * len(hurts), [1.0] * len(hurts), budget, seed=seed)
        assert result.certified
        broken += true_risk(result.radii, hurts) > budget
        serving += result.served > 0.1
    assert broken <= draws * (0.05 + 2.0 * math.sqrt(0.05 * 0.95 / draws))
    assert serving >= 0.95 * draws  # and not by serving nothing


def test_what_chooses_the_path_does_not_certify_it_and_the_other_way_round() -> None:
    distances, changed = a_population(np.random.default_rng(1), 1200, [0.05, 0.5])
    distances = np.ceil(20 * distances) / 20  # few steps, so that the path is shown whole
    _, certify = halves(1200, 0)
    other = changed.copy()
    other[:, certify] = ~other[:, certify]
    first, second = (choose_policy(distances, c, [1, 1], [1.0, 1.0], 0.05) for c in (changed, other))
    assert [point["radii"] for point in first.path] == [point["radii"] for point in second.path]
    assert first.served > second.served


def test_testing_stops_at_the_first_failure_even_if_a_later_policy_would_pass() -> None:
    # the half that chooses says: the first group is harmless, the second nearly; the other half says it is the first
    # that hurts, and only until the second is served as well
    select, certify = halves(2000, 0)
    distances = np.random.default_rng(0).random(2000)
    changed = np.zeros((2, 2000), bool)
    changed[1, select[np.argsort(distances[select])[:2]]] = True
    changed[0, certify[::10]] = True
    result = choose_policy(distances, changed, [1, 1], [1.0, 1.0], 0.01)
    assert result.path[-1]["upper_bound"] <= 0.01  # everything served would pass
    assert not result.path[-1]["certified"]
    assert result.radii[1] == NEVER
    assert result.served < 0.1


def test_a_lucky_certification_half_does_not_overrule_the_other() -> None:
    # no answer of the certifying half changes, every tenth of the selecting one does
    select, _ = halves(2000, 0)
    distances = np.random.default_rng(0).random(2000)
    changed = np.zeros((1, 2000), bool)
    changed[0, select[::10]] = True
    result = choose_policy(distances, changed, [1], [1.0], 0.01)
    served = distances <= result.radii[0]
    assert (changed[0] & served).mean() <= 0.01


def test_neighbours_go_to_the_same_half() -> None:
    select, certify = split_halves(4000, 3)
    assert sorted([*select, *certify]) == list(range(4000))
    first = set(select.tolist())
    changes = sum((i in first) != (i + 1 in first) for i in range(3999))
    assert changes <= 4000 / 20


@SETTINGS
@given(problems())
def test_every_policy_of_the_path_contains_the_one_before(problem: dict[str, Any]) -> None:
    result = choose_policy(**problem)
    select, _ = halves(len(problem["distances"]), problem["seed"])
    seen = problem["distances"][select]
    before = [NEVER] * len(problem["sizes"])
    assert result.path[0]["radii"] == before
    for radii in [point["radii"] for point in result.path]:
        assert radii == sorted(radii, reverse=True)
        assert all(old <= new for old, new in zip(before, radii, strict=True))
        assert all(r == NEVER or r in seen for r in radii)
        before = radii
    farthest = max(seen[np.isfinite(seen)], default=NEVER)
    assert before == [farthest] * len(before)  # in the end everything is served
    assert list(result.radii) == sorted(result.radii, reverse=True)


@SETTINGS
@given(problems())
def test_every_number_is_that_of_the_definition(problem: dict[str, Any]) -> None:
    result = choose_policy(**problem)
    distances, changed, budget = problem["distances"], problem["changed"], problem["budget"]
    sizes, gains = np.array(problem["sizes"], float), np.array(problem["gains"])

    def share(where: np.ndarray, radii: Any, weights: np.ndarray) -> float:
        served = groups_served(distances[where], radii)
        return float(sum(weights[:m].sum() for m in served) / (len(where) * weights.sum()))

    n = len(distances)
    _, certify = halves(n, problem["seed"])
    passing = True
    for point in result.path:
        seen = share_changed(distances[certify], changed[:, certify], point["radii"])
        assert point["changed"] == pytest.approx(seen)
        assert point["served"] == pytest.approx(share(certify, point["radii"], sizes))
        assert point["upper_bound"] == upper_bound(round(seen * len(certify)), len(certify))
        if point["certified"]:  # of a thinned path it cannot be seen where it ends
            assert passing
            assert point["upper_bound"] <= budget
        passing = passing and point["certified"]
    assert result.certified is result.path[0]["certified"] is (n >= result.needed)

    judged = certify if result.certified or result.reached is None else np.arange(n)
    assert result.judged == len(judged)
    assert result.observed == pytest.approx(share_changed(distances[judged], changed[:, judged], result.radii))
    assert result.served == pytest.approx(share(judged, result.radii, sizes))
    assert result.gain_share == pytest.approx(share(judged, result.radii, gains))
    # the half that chose would flatter the bound
    seen = share_changed(distances[certify], changed[:, certify], result.radii)
    assert result.upper_bound == upper_bound(round(seen * len(certify)), len(certify))
    if result.certified:
        assert result.upper_bound <= budget
        assert result.reached is not None
        assert result.reached >= 0.95 - 1e-9
        assert any(p["radii"] == list(result.radii) and p["certified"] for p in result.path)
    elif problem["allow_uncertified"]:
        assert result.observed <= budget
        assert result.reached is not None
        assert result.reached < 0.95
    else:
        assert result.radii == (NEVER,) * len(sizes)
        assert result.reached is None


def test_one_group_is_a_single_threshold_scanned_from_the_strictest() -> None:
    distances, changed = a_population(np.random.default_rng(8), 1501, [0.5])
    result = choose_policy(distances, changed, [12], [3.0], 0.03, seed=5)
    select, certify = halves(1501, 5)
    seen = np.sort(distances[select][np.isfinite(distances[select])])
    grid = [float(seen[math.ceil(i * len(seen) / 40) - 1]) for i in range(1, 41)]
    best = NEVER
    for radius in grid:
        count = int((changed[0, certify] & (distances[certify] <= radius)).sum())
        everywhere = int((changed[0] & (distances <= radius)).sum())
        if max(upper_bound(count, len(certify)), upper_bound(everywhere, 1501)) > 0.03:
            break
        best = radius
    assert NEVER < best < grid[-1]
    assert result.radii == (best,)
    assert [point["radii"] for point in result.path] == [[NEVER], *([radius] for radius in grid)]


# -- what it is for


def test_layers_of_different_sensitivity_are_served_more_than_by_the_best_single_radius() -> None:
    # four layers that hardly mind and two that do, as measured on a DeBERTa
    distances, changed = a_population(np.random.default_rng(4), 6000, [0.004, 0.2])
    single = choose_policy(distances, changed[-1:], [6], [6.0], 0.01)
    policy = choose_policy(distances, changed, [4, 2], [4.0, 2.0], 0.01)
    assert policy.certified
    assert single.certified
    assert policy.radii[0] > 0.9
    assert 0.0 < policy.radii[1] < single.radii[0] + 0.05
    assert policy.served > single.served + 0.2


def test_groups_that_hurt_alike_are_served_as_by_a_single_radius() -> None:
    distances, changed = a_population(np.random.default_rng(4), 6000, [0.15])
    both = np.concatenate((changed, changed))  # the second group changes nothing that the first has not
    single = choose_policy(distances, changed, [6], [6.0], 0.01)
    policy = choose_policy(distances, both, [3, 3], [3.0, 3.0], 0.01)
    assert policy.radii == single.radii * 2


def test_a_group_that_saves_more_is_served_before_one_that_hurts_as_little() -> None:
    # by itself the second group is ten times dearer; it takes the first along, for it saves a hundred times more
    distances, changed = a_population(np.random.default_rng(9), 4000, [0.02, 0.2])
    light, heavy = (choose_policy(distances, changed, [1, 1], [1.0, gain], 0.01) for gain in (1.0, 100.0))
    assert heavy.radii[1] > light.radii[1]
    assert heavy.radii[0] < light.radii[0]


def test_only_the_ratio_of_gains_matters() -> None:
    distances, changed = a_population(np.random.default_rng(9), 1000, [0.02, 0.2])
    assert choose_policy(distances, changed, [2, 1], [2.0, 1.0], 0.05) == choose_policy(
        distances, changed, [2, 1], [1024.0, 512.0], 0.05
    )


def test_a_group_that_hurts_only_without_the_next_one_does_not_stand_in_the_way() -> None:
    rng = np.random.default_rng(0)
    changed = np.stack([rng.random(2000) < 0.2, np.zeros(2000, bool)])  # all put right by the second group
    result = choose_policy(rng.random(2000), changed, [1, 1], [1.0, 1.0], 0.01)
    assert result.radii[0] == result.radii[1]
    assert result.served > 0.99
    assert result.observed == 0.0


def test_changes_that_fall_along_the_path_are_taken() -> None:
    # near records: only both groups together are harmless; far ones: only the first group is
    rng = np.random.default_rng(0)
    distances = rng.random(4000)
    far = distances > 0.5
    changed = np.stack([~far & (rng.random(4000) < 0.05), far & (rng.random(4000) < 0.5)])
    result = choose_policy(distances, changed, [1, 1], [1.0, 1.0], 0.01)
    assert result.radii[0] > 0.99
    assert 0.45 < result.radii[1] < 0.55


def test_changes_that_fall_on_the_way_are_not_approached_through_worse_policies() -> None:
    # by distance, of 1000 that choose: group 2 hurts 4 of the nearest 100, and puts right 5 that group 1 hurts among
    # the next 100; beyond, it hurts everybody, so that group 1 is served everywhere first
    near, certify = halves(2000, 0)
    distances = np.empty(2000)
    distances[near] = distances[certify] = np.repeat(np.arange(1, 11), 100) / 10
    changed = np.zeros((2, 2000), bool)
    changed[0, near[150:155]] = True
    changed[1, near[40:44]] = True
    changed[1, near[200:]] = True
    path = choose_policy(distances, changed, [1, 1], [100.0, 1.0], 0.01).path
    radii = [point["radii"] for point in path]
    assert radii[10:13] == [[1.0, NEVER], [1.0, 0.2], [1.0, 0.3]]  # not through the nearest 100 alone


def test_a_few_sequences_that_did_not_change_do_not_make_a_sensitive_group_free() -> None:
    # group 1 changed one answer of 1000; group 2 changed all but the nearest 50, of which too few were looked at
    near, certify = halves(2000, 0)
    distances = np.empty(2000)
    distances[near] = distances[certify] = np.repeat(np.arange(1, 21), 50) / 20
    changed = np.zeros((2, 2000), bool)
    changed[:, near[500]] = True
    changed[1, near[50:]] = True
    path = choose_policy(distances, changed, [1, 1], [1.0, 1.0], 0.05).path
    assert [point["radii"] for point in path][20:22] == [[1.0, NEVER], [1.0, 0.05]]


# -- sequences without a record


def test_a_sequence_without_a_record_is_never_served() -> None:
    distances = np.where(np.arange(1000) % 4 == 0, np.inf, 0.5)
    changed = np.tile(np.isinf(distances), (2, 1))  # they would all change if they were served
    result = choose_policy(distances, changed, [1, 1], [1.0, 1.0], 0.01)
    assert result.radii == (0.5, 0.5)
    assert result.observed == 0.0
    assert result.served == pytest.approx(0.75, abs=0.05)


def test_no_record_at_all_serves_nothing_and_says_so() -> None:
    result = choose_policy([math.inf] * 1000, np.zeros((2, 1000), bool), [1, 1], [1.0, 1.0], 0.01)
    assert (result.radii, result.served, result.certified) == ((NEVER, NEVER), 0.0, True)
    assert "serves nothing" in result.sentence()
    assert len(result.path) == 1


def test_nothing_is_served_beyond_the_greatest_distance_that_chose() -> None:
    select, certify = halves(1000, 0)
    distances = np.full(1000, 0.5)
    distances[certify[0]] = 0.7
    result = choose_policy(distances, np.zeros((1, 1000), bool), [1], [1.0], 0.01)
    assert result.radii == (float(distances[select].max()),) == (0.5,)
    assert result.served == 499 / 500


def test_a_radius_that_serves_nobody_more_is_not_taken() -> None:
    select, _ = halves(1000, 0)
    distances = np.full(1000, 0.5)
    distances[select[0]] = 0.9
    result = choose_policy(distances, np.zeros((2, 1000), bool), [1, 1], [1.0, 1.0], 0.01)
    assert result.path[-1]["radii"] == [0.9, 0.9]
    assert result.radii == (0.5, 0.5)


# -- too little data


def test_one_sequence_fewer_than_needed_is_not_enough_and_the_user_learns_how_many_it_takes() -> None:
    needed = 2 * sequences_needed(0.01) - 1
    few = choose_policy([0.1] * (needed - 1), np.zeros((2, needed - 1), bool), [1, 1], [1.0, 1.0], 0.01)
    assert (few.radii, few.certified, few.served, few.needed) == ((NEVER, NEVER), False, 0.0, needed)
    assert str(needed) in few.sentence()
    assert str(needed - 1) in few.sentence()
    enough = choose_policy([0.1] * needed, np.zeros((2, needed), bool), [1, 1], [1.0, 1.0], 0.01)
    assert (enough.radii, enough.certified, enough.served) == ((0.1, 0.1), True, 1.0)


def test_the_fallback_says_loudly_what_confidence_it_reached() -> None:
    distances = np.linspace(0.0, 1.0, 200)
    changed = np.stack([distances > 0.9, distances > 0.5])
    assert choose_policy(distances, changed, [4, 2], [4.0, 2.0], 0.01).radii == (NEVER, NEVER)
    result = choose_policy(distances, changed, [4, 2], [4.0, 2.0], 0.01, allow_uncertified=True)
    assert result.certified is False
    assert 0.7 < result.radii[0] < 0.92
    assert 0.3 < result.radii[1] < 0.52
    assert result.judged == result.total == 200
    assert result.observed <= 0.01
    assert result.reached is not None
    changes = round(result.observed * 200)
    _, certify = halves(200, 0)
    held_out = round(100 * share_changed(distances[certify], changed[:, certify], result.radii))
    assert upper_bound(held_out, 100, result.reached) == pytest.approx(0.01)
    sentence = result.sentence()
    assert sentence.startswith("NOT CERTIFIED")
    for part in (f"{changes} of 200", "95 %", f"{math.floor(1e3 * result.reached) / 10:g} %", str(result.needed)):
        assert part in sentence


def test_the_fallback_is_not_used_when_something_is_certified() -> None:
    arguments: Any = (*a_population(np.random.default_rng(3), 700, [0.1, 0.3]), [1, 1], [1.0, 1.0], 0.05)
    assert choose_policy(*arguments) == choose_policy(*arguments, allow_uncertified=True)


@pytest.mark.parametrize("allow", [False, True])
def test_a_single_sequence_is_answered_and_not_a_crash(allow: bool) -> None:
    result = choose_policy([0.5], [[True]], [1], [1.0], 0.01, allow_uncertified=allow)
    assert (result.radii, result.certified, result.served) == ((NEVER,), False, 0.0)
    assert "certif" in result.sentence().lower()


# -- the result


def test_a_certified_sentence_names_radii_counts_bound_and_share_served() -> None:
    distances = np.repeat([0.25, 0.75], 500)
    changed = np.stack([distances > 0.5, distances > 0.5, distances > 0.0])
    result = choose_policy(distances, changed, [1, 1, 2], [1.0, 1.0, 2.0], 0.01)
    assert result.radii == (0.25, 0.25, NEVER)
    for part in ("0.25, 0.25, never", "0 of 500", "95 %", "0.598 %", "budget 1 %", "attention calls"):
        assert part in result.sentence()


def test_a_certificate_that_serves_nothing_says_so() -> None:
    result = choose_policy([0.5] * 1000, np.ones((2, 1000), bool), [1, 1], [1.0, 1.0], 0.01)
    assert (result.radii, result.certified) == ((NEVER, NEVER), True)
    assert "serves nothing" in result.sentence()


def test_the_path_is_short_enough_to_store_and_keeps_its_ends_and_the_chosen_policy() -> None:
    distances, changed = a_population(np.random.default_rng(6), 3000, [0.01] * 12)
    result = choose_policy(distances, changed, [1] * 12, [1.0] * 12, 0.02)
    radii = [point["radii"] for point in result.path]
    assert len(radii) <= 60
    assert radii[0] == [NEVER] * 12
    assert radii[-1] == [max(radii[-1])] * 12
    assert list(result.radii) in radii


def test_the_same_seed_gives_the_same_policy_and_another_one_another_split() -> None:
    arguments: Any = (*a_population(np.random.default_rng(3), 900, [0.1, 0.3]), [1, 1], [1.0, 1.0], 0.05)
    assert choose_policy(*arguments, seed=7) == choose_policy(*arguments, seed=7)
    assert choose_policy(*arguments, seed=7) != choose_policy(*arguments, seed=8)


def test_the_result_is_json_able() -> None:
    for n in (50, 900):
        arguments: Any = (*a_population(np.random.default_rng(3), n, [0.1, 0.3]), [1, 1], [1.0, 1.0], 0.05)
        result = choose_policy(*arguments)
        data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
        again = PolicyResult(**{**data, "radii": tuple(data["radii"])})
        assert again == result
        assert again.sentence() == result.sentence()


# -- misuse


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"distances": [], "changed": np.zeros((2, 0), bool)}, "no held-out sequences"),
        ({"distances": [[0.1, 0.2]]}, "one list"),
        ({"distances": [0.1, math.nan]}, "1 of 2 distances are NaN"),
        ({"distances": [0.1, -0.5]}, "-0.5"),
        ({"changed": [True, False]}, "shape"),
        ({"changed": [[True], [False]]}, "shape"),
        ({"changed": np.zeros((0, 2), bool)}, "shape"),
        ({"changed": [[0, 1], [2, 1]]}, "true or false"),
        ({"sizes": [1]}, "2 groups"),
        ({"gains": [1.0, 1.0, 1.0]}, "2 groups"),
        ({"sizes": [1, 0]}, "number of layers"),
        ({"sizes": [1, 1.5]}, "number of layers"),
        ({"sizes": [1, math.nan]}, "number of layers"),
        ({"gains": [1.0, 0.0]}, "gain"),
        ({"gains": [1.0, math.nan]}, "gain"),
        ({"gains": [1.0, math.inf]}, "gain"),
        ({"budget": 0.0}, "budget"),
        ({"budget": 1.0}, "budget"),
        ({"budget": math.nan}, "budget"),
        ({"confidence": 1.0}, "confidence"),
        ({"seed": -1}, "seed"),
    ],
)
def test_input_that_means_nothing_is_refused(given: dict[str, Any], message: str) -> None:
    good = {"distances": [0.1, 0.2], "changed": [[False, True], [True, True]], "sizes": [1, 1], "gains": [1.0, 1.0]}
    choose_policy(**{**good, "budget": 0.1})  # type: ignore[arg-type]
    with pytest.raises(TuningError, match=message):
        choose_policy(**{**good, "budget": 0.1, **given})
