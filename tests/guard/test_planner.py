"""What a guarded forward learns from: which sequences become records, and how many are verified."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attmemo.guard.guard import ALL
from attmemo.guard.planner import AROUND, SEEN, UNKNOWN, GuardedPlanner
from attmemo.guard.repeats import Repeats
from attmemo.kernels.changes import LONG_TEXT
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


def grown_of(evidence: list[Evidence], lengths: list[int], records: list[int], fills: bool = True) -> list[bool]:
    """Which inputs of these lengths are to become records, beside others of these lengths."""
    own = planner()
    own._store.fits = lambda lengths: np.full(len(lengths), fills)
    own.index = SimpleNamespace(lengths_of=lambda numbers: np.array(records)[numbers])
    found = SimpleNamespace(evidence=np.array(evidence), record=np.arange(len(records)))
    grown = GuardedPlanner._grown(own, asked_of(*lengths), found, range(len(lengths)), None)
    return [place in grown for place in range(len(lengths))]


def test_a_long_text_that_has_grown_by_a_quarter_becomes_a_record_beside_the_one_that_serves_it() -> None:
    record = 4 * LONG_TEXT
    kinds, lengths = [Evidence.FREELY] * 3, [5 * LONG_TEXT + 1, 5 * LONG_TEXT, 5 * LONG_TEXT + 1]
    assert grown_of(kinds, lengths, [record, record, 0]) == [True, False, False], "the last one's record is gone"
    assert not any(grown_of(kinds, lengths, [record, record, record], fills=False))


def test_what_only_changed_is_short_or_is_not_known_makes_no_record_beside_another() -> None:
    kinds = [Evidence.FULLY, Evidence.FREELY, Evidence.UNKNOWN, Evidence.UNSURE, Evidence.SAME, Evidence.NONE]
    lengths = [2 * LONG_TEXT, LONG_TEXT - 1, *[2 * LONG_TEXT] * 4]
    assert not any(grown_of(kinds, lengths, [2 * LONG_TEXT, *[LONG_TEXT // 2] * 5]))


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


def hopes(texts: list[list[int]], *, busy: bool = True, padding: int = 0) -> list[float | None]:
    """What an account hears of the prospects of forwards of one text each; what records could supply is .7."""
    told = list[float | None]()
    times = SimpleNamespace(always=False, lends=False, hope=lambda share, stores=0.0: told.append(share))
    own = SimpleNamespace(
        times=times, repeats=Repeats(), _forwards=0, _store=SimpleNamespace(has_room=True, takes=lambda n: 0.0),
        prospect=SimpleNamespace(share=0.7, look=lambda given, mask: None),
    )  # fmt: skip
    for text in texts:
        ids, mask = torch.tensor([[*text, *[0] * padding]]), torch.tensor([[1] * len(text) + [0] * padding])
        given = {"input_ids": ids}
        GuardedPlanner.note_repeats(own, given, mask, SimpleNamespace(is_busy=busy))  # type: ignore[arg-type]
    return told


def test_where_texts_repeat_it_is_seen_what_records_could_supply() -> None:
    assert hopes([list(range(40))] * 9)[-1] == 0.7


def test_where_none_repeats_records_could_supply_nothing() -> None:
    assert set(hopes([list(range(40 * k, 40 * k + 40)) for k in range(9)])) == {0.0}


def test_texts_too_short_to_tell_whether_they_repeat_are_looked_up() -> None:
    assert set(hopes([[k, k + 1, k + 2] for k in range(9)], padding=5)) == {0.7}


def test_a_forward_of_nothing_is_not_seen() -> None:
    assert hopes([[]] * 3) == []


def test_where_learning_has_pauses_no_prospect_is_needed() -> None:
    assert set(hopes([list(range(40))] * 9, busy=False)) == {None}


def test_after_the_first_forwards_every_second_one_is_seen() -> None:
    assert len(hopes([list(range(40))] * (SEEN + 20))) == SEEN + 10


@pytest.mark.parametrize(
    ("forwards", "why", "rests", "expected"),
    [(SEEN, "no_records", True, False), (SEEN + 1, "no_records", False, True),
     (SEEN + 1, "records_do_not_pay", False, False), (SEEN + 1, "records_do_not_pay", True, True)],
)  # fmt: skip
def test_forwards_are_passed_over_once_it_is_seen_that_there_is_nothing_to_do(
    forwards: int, why: Any, rests: bool, expected: bool
) -> None:
    own: Any = SimpleNamespace(_forwards=forwards, times=SimpleNamespace(rests=rests))
    assert GuardedPlanner.rests(own, why) is expected


@pytest.mark.parametrize(("lends", "expected"), [(True, True), (False, False)])
def test_without_pauses_one_input_is_learned_from_at_once(lends: bool, expected: bool) -> None:
    own: Any = SimpleNamespace(times=SimpleNamespace(always=False, lends=lends))
    assert GuardedPlanner.learns_at_once(own, SimpleNamespace(spare=100, batch=1)) is expected  # type: ignore[arg-type]


def test_what_records_save_is_tried_anew_once_what_was_learned_in_pauses_lets_half_be_served() -> None:
    own: Any = object.__new__(GuardedPlanner)
    rates, tries = [0.05, 0.021, 0.019, 0.015, 0.013, 0.3, 0.3], list[int]()
    own.guard = SimpleNamespace(stands=False, budget=0.01, rate=iter(rates).__next__)
    own.times, own._tried_at = SimpleNamespace(try_again=lambda: tries.append(1)), 1.0
    for expected in (0, 0, 1, 1, 2, 2):
        own.note_learned(False)
        assert len(tries) == expected
    own.guard.stands = True
    own.note_learned(True)
    assert len(tries) == 2
    own.note_learned(False)
    assert len(tries) == 3, "a certificate came"
