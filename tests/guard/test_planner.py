"""What a guarded forward learns from: which sequences become records, and how many are verified."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from attmemo.guard.guard import ALL
from attmemo.guard.planner import AROUND, UNKNOWN, GuardedPlanner
from attmemo.kernels.plan import Evidence
from attmemo.rows.planner import Asked

KINDS = [Evidence.FULLY, Evidence.UNKNOWN, Evidence.NONE, Evidence.UNSURE, Evidence.ROUNDED, Evidence.FREELY]


def planner(
    *, always: bool = False, requests: float = math.inf, equal_only: bool = False
) -> Any:
    """As much of a planner as decides what is learned."""
    times = SimpleNamespace(always=always, afford=lambda owed: max(requests - owed, 0.0))
    store, guard = SimpleNamespace(waits=lambda: 0.5), SimpleNamespace(equal_only=equal_only)
    return SimpleNamespace(times=times, _store=store, guard=guard)


def new_of(evidence: list[Evidence], served: list[int], tried: dict[int, Any], **options: Any) -> list[int]:
    flags = np.isin(np.arange(len(evidence)), served)
    return GuardedPlanner._new(planner(**options), np.array(evidence), flags, tried).tolist()


def asked_of(*lengths: int) -> Asked:
    return Asked.of(np.zeros(sum(lengths), np.int32), np.array(lengths, np.int64))


def plan_of(evidence: list[Evidence], computed: list[int]) -> Any:
    return SimpleNamespace(evidence=np.array(evidence), computed=np.array(computed, np.int64))


def test_what_a_record_may_serve_makes_no_other_one() -> None:
    assert new_of(KINDS, served=[0], tried={}) == [2, 1, 3]


def test_of_sequences_with_unknown_changes_few_become_records_and_none_that_is_tried() -> None:
    found = new_of([Evidence.UNKNOWN] * 8, served=[], tried={0: None, 2: None})
    assert found == [1, 3, 4, 5, 6, 7][:UNKNOWN]


def test_without_an_account_all_but_what_is_served_becomes_a_record_those_with_nothing_alike_first() -> None:
    assert new_of(KINDS, served=[0], tried={}, always=True) == [2, 1, 3, 5]


@pytest.mark.parametrize("computed", [1, 10])
def test_where_few_rows_are_computed_more_is_verified(computed: int) -> None:
    found = plan_of([Evidence.FULLY] * 40, [computed] * 40)
    most = GuardedPlanner._most(planner(requests=4.5), asked_of(*[10] * 40), found)
    assert most == int(4.0 / (computed / 10 + AROUND)), "half a request is owed for what waits to be stored"


def test_no_more_is_verified_than_there_is() -> None:
    found = plan_of([Evidence.NONE] * 3, [10] * 3)
    assert GuardedPlanner._most(planner(), asked_of(10, 10, 10), found) == 3


def test_records_could_supply_what_is_not_known_to_be_harmful_and_supply_what_is_known() -> None:
    kinds = [Evidence.FULLY, Evidence.UNKNOWN, Evidence.NONE, Evidence.SAME]
    asked, found = asked_of(10, 20, 30, 40), plan_of(kinds, [5, 15, 30, 0])
    assert GuardedPlanner._saved(planner(), asked, found) == pytest.approx((5 + 5 + 40) / 100)
    assert GuardedPlanner._saved(planner(), asked, found, Evidence.FREELY) == pytest.approx((5 + 40) / 100)


def test_where_only_equal_inputs_are_reused_others_supply_nothing() -> None:
    found = plan_of([Evidence.FULLY, Evidence.SAME], [5, 0])
    assert GuardedPlanner._saved(planner(equal_only=True), asked_of(10, 30), found) == pytest.approx(30 / 40)


def test_without_an_account_all_may_be_verified() -> None:
    found = plan_of([Evidence.UNKNOWN] * 40, [10] * 40)
    assert GuardedPlanner._most(planner(always=True), asked_of(*[10] * 40), found) == ALL
