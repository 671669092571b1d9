"""The profile: hit rates by layer and length, and a file that may hold anything."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attmemo.errors import DatabaseCorruptError
from attmemo.perfmodel.cost import CostModel
from attmemo.perfmodel.profile import MIN_SAMPLES, Conditions, HitRates, LayerCosts, Profile

HERE = Conditions("A 1", ("avx2", "amx_bf16"), 4)
NOW = {"cpu": "A 1", "features": ["amx_bf16", "avx2"], "cores": 64, "threads": 2, "load": 3.0}
SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)

score = st.floats(-1.0, 1.0)
score_tables = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(1, 40)), st.lists(score, max_size=12), max_size=12
)


def a_profile(rates: HitRates | None = None, rates_sequence: HitRates | None = None, layers: int = 4) -> Profile:
    costs = [
        LayerCosts(CostModel(0.02, 3e-5, 0.1 * i), CostModel(0.01, 1e-5, 0.2), CostModel(0.0, 0.0, 0.3))
        for i in range(layers)
    ]
    if rates is None:
        rates = HitRates({(0, 16): [0.9, 0.5], (3, 20): [0.1]}, stored=[16, 20, 33])
    if rates_sequence is None:
        rates_sequence = HitRates({(0, 16): [-1.0, 0.7], (2, 16): [0.2]})
    return Profile(costs, rates, rates_sequence, CostModel(0.001, 0.0, 0.4), threads=2, dtype="bfloat16")


@SETTINGS
@given(score_tables, st.lists(st.floats(0.0, 1.0), min_size=2, max_size=8), st.integers(0, 3))
def test_alpha_never_rises_with_the_threshold(
    scores: dict[tuple[int, int], list[float]], thresholds: list[float], layer: int
) -> None:
    rates = HitRates(scores)
    for length in range(1, 41):
        alphas = [rates.alpha(threshold, layer, length) for threshold in sorted(thresholds)]
        assert alphas == sorted(alphas, reverse=True)
        assert all(0.0 <= alpha <= 1.0 for alpha in alphas)


def test_a_score_equal_to_the_threshold_hits() -> None:
    rates = HitRates({(0, 16): [0.5] * MIN_SAMPLES})
    assert rates.alpha(0.5, 0, 16) == 1.0
    assert rates.alpha(math.nextafter(0.5, 1.0), 0, 16) == 0.0


def test_a_length_without_a_record_has_rate_zero_although_its_neighbours_hit() -> None:
    rates = HitRates({(0, 16): [0.9] * 20, (0, 18): [0.9] * 20})
    assert rates.alpha(0.5, 0, 17) == 0.0


def test_a_stored_length_without_scores_borrows_from_both_sides_at_once() -> None:
    scores = {(0, 15): [0.9] * 8, (0, 17): [0.1] * 8, (0, 40): [0.1] * 100}
    assert HitRates(scores, stored=[15, 16, 17, 40]).alpha(0.5, 0, 16) == 0.5


def test_few_own_scores_are_pooled_with_the_nearest_and_no_further_than_needed() -> None:
    scores = {(0, 16): [0.9, 0.9], (0, 18): [0.1] * 6, (0, 19): [0.9] * 50}
    assert HitRates(scores).alpha(0.5, 0, 16) == pytest.approx(2 / 8)


def test_enough_own_scores_borrow_nothing() -> None:
    scores = {(0, 16): [0.9] * MIN_SAMPLES, (0, 17): [0.1] * 100}
    assert HitRates(scores).alpha(0.5, 0, 16) == 1.0


def test_layers_do_not_borrow_from_each_other() -> None:
    rates = HitRates({(0, 16): [0.9] * 8, (2, 16): [0.1] * 8}, stored=[16])
    assert [rates.alpha(0.5, layer, 16) for layer in range(3)] == [1.0, 0.0, 0.0]


def test_a_query_that_found_nothing_lowers_the_rate_even_at_threshold_zero() -> None:
    assert HitRates({(0, 16): [0.0] * 4 + [-1.0] * 4}).alpha(0.0, 0, 16) == 0.5


@SETTINGS
@given(score_tables, score_tables, st.sets(st.integers(1, 60), max_size=5))
def test_json_round_trip_keeps_the_profile(
    scores: dict[tuple[int, int], list[float]], others: dict[tuple[int, int], list[float]], more: set[int]
) -> None:
    profile = a_profile(HitRates(scores, stored=more | {length for _, length in scores}), HitRates(others))
    again = Profile.from_dict(json.loads(json.dumps(profile.to_dict(), allow_nan=False)))
    assert again.to_dict() == profile.to_dict()
    assert again.costs == profile.costs
    for read, written in ((again.rates, profile.rates), (again.rates_sequence, profile.rates_sequence)):
        assert read.stored == written.stored
        assert all(
            read.alpha(0.5, layer, length) == written.alpha(0.5, layer, length)
            for layer in range(4)
            for length in range(1, 41)
        )


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (["costs"], {}, "costs"),
        (["costs"], [], "costs"),
        (["costs", 2], 7, r"costs\[2\]"),
        (["costs", 1, "hit", "a"], "fast", r"costs\[1\]\.hit\.a"),
        (["costs", 1, "lookup", "c"], -0.5, r"costs\[1\]\.lookup\.c"),
        (["rates"], None, "rates"),
        (["rates", "stored"], "16", r"rates\.stored"),
        (["rates", "stored"], [16, 20, 0], r"rates\.stored\[2\]"),
        (["rates", "stored"], [20], r"rates\.scores\.0\.16"),
        (["rates", "scores"], [], r"rates\.scores"),
        (["rates", "scores", "0"], [], r"rates\.scores\.0"),
        (["rates", "scores", "zero"], {}, r"rates\.scores"),
        (["rates", "scores", "-1"], {}, r"rates\.scores"),
        (["rates", "scores", "00"], {}, r"rates\.scores"),
        (["rates", "scores", "4"], {"16": [0.5]}, r"rates\.scores"),
        (["rates", "scores", "0", "16"], [0.5, math.nan], r"rates\.scores\.0\.16\[1\]"),
        (["rates", "scores", "0", "16"], 0.5, r"rates\.scores\.0\.16"),
        (["rates_sequence"], [], "rates_sequence"),
        (["rates_sequence", "scores", "4"], {"16": [0.5]}, r"rates_sequence\.scores"),
        (["rates_sequence", "scores", "2", "16"], [None], r"rates_sequence\.scores\.2\.16\[0\]"),
        (["lookup_sequence"], None, "lookup_sequence"),
        (["lookup_sequence", "b"], True, r"lookup_sequence\.b"),
        (["threads"], 0, "threads"),
        (["threads"], 2.0, "threads"),
        (["threads"], True, "threads"),
        (["dtype"], 32, "dtype"),
        (["dtype"], "", "dtype"),
        (["conditions"], [1], "conditions"),
        (["conditions", "cpu"], 7, r"conditions\.cpu"),
        (["conditions", "features"], "avx2", r"conditions\.features"),
        (["conditions", "features"], [2], r"conditions\.features\[0\]"),
        (["conditions", "cores"], 0, r"conditions\.cores"),
    ],
)
def test_a_malformed_field_is_named(path: list[Any], value: object, field: str) -> None:
    data: Any = json.loads(json.dumps(replace(a_profile(), conditions=HERE).to_dict()))
    target = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(DatabaseCorruptError, match=f"'{field}'"):
        Profile.from_dict(data)


@pytest.mark.parametrize("path", [["costs"], ["costs", 0, "exact"], ["costs", 0, "exact", "c"], ["rates"],
                                  ["rates", "stored"], ["rates", "scores"], ["rates_sequence"],
                                  ["rates_sequence", "stored"], ["lookup_sequence"], ["threads"],
                                  ["dtype"]])  # fmt: skip
def test_a_missing_field_is_named(path: list[Any]) -> None:
    data: Any = a_profile().to_dict()
    target = data
    for key in path[:-1]:
        target = target[key]
    del target[path[-1]]
    with pytest.raises(DatabaseCorruptError, match=rf"{path[-1]}'.*missing"):
        Profile.from_dict(data)


def test_a_file_that_is_no_object_is_refused_and_shown_in_part_only() -> None:
    with pytest.raises(DatabaseCorruptError) as error:
        Profile.from_dict(["x" * 100_000])
    assert len(str(error.value)) < 500


def test_scores_of_the_two_ways_of_looking_up_are_not_mixed_up() -> None:
    own, shared = HitRates({(0, 16): [0.9]}), HitRates({(0, 16): [0.1]})
    again = Profile.from_dict(a_profile(own, shared).to_dict())
    assert (again.rates.to_dict(), again.rates_sequence.to_dict()) == (own.to_dict(), shared.to_dict())


def test_the_machine_that_costs_were_measured_on_is_kept_and_may_be_missing() -> None:
    noted = replace(a_profile(), conditions=Conditions("a processor", ("avx2",), 4))
    data = json.loads(json.dumps(noted.to_dict()))
    assert Profile.from_dict(data).conditions == noted.conditions
    del data["conditions"]
    assert Profile.from_dict(data).conditions is None
    with pytest.raises(DatabaseCorruptError, match=r"'conditions\.cores'"):
        Profile.from_dict(data | {"conditions": {"cpu": "a processor", "features": [], "cores": 0}})


# -- milliseconds


def test_a_saving_is_exact_attention_of_the_batch_less_the_hits_and_the_misses() -> None:
    exact, hit, miss = CostModel(0.01, 1e-4, 1.0), CostModel(0.001, 0.0, 0.2), CostModel(0.011, 1e-4, 1.5)
    profile = replace(a_profile(), costs=[LayerCosts(exact, hit, CostModel(0, 0, 0), miss)] * 4)
    assert profile.exact_ms(1, 3, 20) == pytest.approx(exact.estimate_lengths([20] * 3))
    whole = exact.estimate_lengths([20] * 3)
    assert profile.saving_ms(1, [20, 7, 9], 20) == pytest.approx(whole - hit.estimate_lengths([20, 7, 9]))
    mixed = whole - hit.estimate_lengths([7]) - miss.estimate_lengths([20] * 2)
    assert profile.saving_ms(1, [7], 20, 3) == pytest.approx(mixed)


def test_where_the_cost_of_misses_is_unknown_only_the_hits_count() -> None:
    profile = a_profile()
    assert profile.costs[1].miss is None
    assert profile.saving_ms(1, [7], 20, 3) == profile.saving_ms(1, [7], 20)


# -- another machine


def test_costs_of_this_machine_are_not_foreign() -> None:
    profile = replace(a_profile(), conditions=HERE)
    assert profile.foreign(NOW) is None


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"cpu": "B 2"}, "cpu A 1, here B 2"),
        ({"features": ["avx2"]}, "features amx_bf16, avx2, here avx2"),
        ({"threads": 8}, "threads 2, here 8"),
    ],
)
def test_costs_of_another_machine_or_number_of_threads_are_foreign_and_the_difference_is_named(
    now: dict[str, Any], said: str
) -> None:
    sentence = replace(a_profile(), conditions=HERE).foreign(NOW | now)
    assert sentence is not None
    assert said in sentence
    assert sentence.count("here") == 1


def test_without_conditions_only_threads_are_compared() -> None:
    assert a_profile().foreign(NOW | {"cpu": "B 2"}) is None
    assert a_profile().foreign(NOW | {"threads": 3}) is not None
