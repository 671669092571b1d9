"""Changes that were verified: nothing that was not seen is covered, and what changed an answer is no more."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from guard_tools import Gap, gaps, number, word
from hypothesis import given, settings
from hypothesis import strategies as st

from attmemo.guard import known_changes as verified_module
from attmemo.guard.known_changes import NUMBERS, PENALTY, PLENTY, WORDS, Verified
from attmemo.kernels.changes import Changes
from attmemo.kernels.plan import Demand, Evidence, evidence_in_python

VALUES = st.integers(1, 9)
GAPS = st.lists(st.tuples(st.integers(0, 2), VALUES, VALUES, st.booleans()), min_size=1, max_size=3)
STEPS_OF_LEARNING = st.lists(st.tuples(st.booleans(), GAPS), max_size=25)


def learned(steps: Sequence[tuple[bool, list[Gap]]]) -> Verified:
    found = Verified()
    for changed, these in steps:
        (found.changed if changed else found.stayed)(gaps(*these))
    return found


def content(verified: Verified) -> dict[str, Any]:
    """All that is known, in any order, without groups: which those are depends on the order of learning."""
    state = verified.state()
    state["values"] = state["values"][:, :2]
    return {name: sorted(map(tuple, np.atleast_2d(array.T).T.tolist())) for name, array in state.items()}


class TestVerified:
    @given(STEPS_OF_LEARNING, GAPS)
    @settings(max_examples=300, deadline=None)
    def test_nothing_that_was_not_seen_is_covered(
        self, steps: list[tuple[bool, list[Gap]]], asked: list[Gap]
    ) -> None:
        seen = [gap for changed, these in steps if not changed for gap in these]
        cover = learned(steps).ask(gaps(*asked))
        if cover is Evidence.UNKNOWN:
            return
        assert cover in (Evidence.FREELY, Evidence.FULLY)
        for slot, value, former, is_word in asked:
            values = {v for place, *pair, kind in seen if (place, kind) == (slot, is_word) for v in pair}
            known = {value, former} <= values
            assert known or len(values) >= (WORDS if is_word else NUMBERS)
            pairs = {frozenset((new, old)) for place, new, old, kind in seen if (place, kind) == (slot, True)}
            if is_word and cover is Evidence.FULLY:
                assert frozenset((value, former)) in pairs
            elif is_word and len(values) < WORDS:
                reached = {value}
                for _ in pairs:
                    reached |= {other for pair in pairs if pair & reached for other in pair}
                assert former in reached

    @given(STEPS_OF_LEARNING, GAPS)
    @settings(max_examples=200, deadline=None)
    def test_gaps_together_are_covered_as_the_least_of_them(
        self, steps: list[tuple[bool, list[Gap]]], asked: list[Gap]
    ) -> None:
        found = learned(steps)
        assert found.ask(gaps(*asked)) == min(found.ask(gaps(gap)) for gap in asked)

    @given(STEPS_OF_LEARNING)
    @settings(max_examples=100, deadline=None)
    def test_its_length_is_the_number_of_harmless_values(self, steps: list[tuple[bool, list[Gap]]]) -> None:
        found = learned(steps)
        assert len(found) == len(found.state()["values"])

    def test_no_change_is_fully_covered(self) -> None:
        assert Verified().ask(gaps()) is Evidence.FULLY

    def test_nothing_is_covered_at_first(self) -> None:
        assert Verified().ask(gaps(number(1, 2, 3))) is Evidence.UNKNOWN

    def test_a_change_is_covered_once_seen_in_both_directions(self) -> None:
        found = learned([(False, [word(1, 2, 3)])])
        assert found.ask(gaps(word(1, 2, 3))) is Evidence.FULLY
        assert found.ask(gaps(word(1, 3, 2))) is Evidence.FULLY
        assert found.ask(gaps(word(1, 2, 4))) is Evidence.UNKNOWN
        assert found.ask(gaps(word(2, 2, 3))) is Evidence.UNKNOWN

    def test_a_word_may_replace_another_only_if_harmless_changes_lead_there_and_then_not_fully(self) -> None:
        found = learned([(False, [word(1, 2, 3)]), (False, [word(1, 4, 5)])])
        assert found.ask(gaps(word(1, 2, 5))) is Evidence.UNKNOWN
        found.stayed(gaps(word(1, 3, 4)))
        assert found.ask(gaps(word(1, 2, 5))) is Evidence.FREELY
        found.stayed(gaps(word(1, 2, 5)))
        assert found.ask(gaps(word(1, 5, 2))) is Evidence.FULLY

    def test_two_numbers_that_were_harmless_may_replace_each_other(self) -> None:
        found = learned([(True, [number(1, 90, 91)]), (False, [number(1, 2, 3)]), (False, [number(1, 4, 5)])])
        assert found.ask(gaps(number(1, 2, 5))) is Evidence.FULLY
        assert found.ask(gaps(number(1, 2, 9))) is Evidence.UNKNOWN

    def test_a_number_slot_is_free_after_two_harmless_values(self) -> None:
        found = learned([(False, [number(1, 2, 3)])])
        assert found.ask(gaps(number(1, 7, 8))) is Evidence.FULLY
        alone = Verified()
        alone.stayed(gaps(number(1, 2, 2)))
        assert alone.ask(gaps(number(1, 7, 8))) is Evidence.UNKNOWN

    def test_a_word_slot_is_free_only_after_six_harmless_words_and_never_fully(self) -> None:
        found = Verified()
        for known in range(1, WORDS):
            found.stayed(gaps(word(1, known, known + 1)))
            wanted = Evidence.FREELY if known + 1 >= WORDS else Evidence.UNKNOWN
            assert found.ask(gaps(word(1, 90, 91))) is wanted
            assert found.ask(gaps(word(1, 1, 90))) is wanted
        assert found.ask(gaps(word(1, 1, WORDS))) is Evidence.FREELY
        assert found.ask(gaps(word(1, 1, 2))) is Evidence.FULLY

    def test_a_change_that_changed_an_answer_is_no_longer_covered(self) -> None:
        for kind in (number, word):
            found = learned([(False, [kind(1, 2, 3)]), (False, [kind(1, 3, 4)]), (True, [kind(1, 2, 3)])])
            assert found.ask(gaps(kind(1, 2, 3))) is Evidence.UNKNOWN
            assert found.ask(gaps(kind(1, 3, 4))) is Evidence.FULLY

    def test_a_slot_with_a_changed_answer_needs_many_times_more_values(self) -> None:
        found = learned([(True, [number(1, 90, 91)])])
        for value in range(1, NUMBERS * (1 + PENALTY)):
            assert found.ask(gaps(number(1, 80, 81))) is Evidence.UNKNOWN
            found.stayed(gaps(number(1, value, value + 1)))
        assert found.ask(gaps(number(1, 80, 81))) is Evidence.FULLY
        found.changed(gaps(number(1, 70, 71)))
        assert found.ask(gaps(number(1, 80, 81))) is Evidence.UNKNOWN

    def test_a_slot_is_blamed_once_for_an_answer_however_many_changes_lie_in_it(self) -> None:
        found = learned([(True, [number(1, 90, 91), number(1, 80, 81), number(1, 70, 71)])])
        assert content(found)["harm"] == [(1 * 2, 1)]

    def test_words_are_to_blame_before_numbers(self) -> None:
        found = learned([(False, [number(1, 2, 3)]), (True, [number(1, 4, 5), word(2, 6, 7)])])
        assert found.ask(gaps(number(1, 4, 5))) is Evidence.FULLY
        assert content(found)["harm"] == [(2 * 2 + 1, 1)]

    def test_slots_that_are_known_best_are_not_to_blame(self) -> None:
        found = learned([(False, [word(1, k, k + 1)]) for k in range(1, 8)])
        found.changed(gaps(word(1, 20, 21), word(2, 6, 7)))
        assert found.ask(gaps(word(1, 20, 21))) is Evidence.FREELY
        assert found.ask(gaps(word(2, 6, 7))) is Evidence.UNKNOWN

    def test_a_free_slot_stays_closed_for_the_very_change_that_changed_an_answer(self) -> None:
        found = learned([(False, [number(1, k, k + 1)]) for k in range(1, NUMBERS * (1 + PENALTY) + 4)])
        found.changed(gaps(number(1, 90, 1)))
        assert found.ask(gaps(number(1, 90, 1))) is Evidence.UNKNOWN

    @given(STEPS_OF_LEARNING, STEPS_OF_LEARNING)
    @settings(max_examples=150, deadline=None)
    def test_merging_takes_the_union_and_keeps_what_is_harmful_out(
        self, first: list[tuple[bool, list[Gap]]], second: list[tuple[bool, list[Gap]]]
    ) -> None:
        one, other = learned(first), learned(second)
        one.merge(learned(second).state())
        other.merge(learned(first).state())
        assert content(one) == content(other)
        assert len(one) == len(other) == len(one.state()["values"])
        parts = content(learned(first)), content(learned(second))
        harmful = set(parts[0]["harmful"]) | set(parts[1]["harmful"])
        assert set(content(one)["harmful"]) == harmful
        union = set(parts[0]["changes"]) | set(parts[1]["changes"])
        assert set(content(one)["changes"]) == union - harmful
        union = set(parts[0]["values"]) | set(parts[1]["values"])
        assert set(content(one)["values"]) == {pair for pair in union if (pair[1],) not in harmful}
        harm = [dict(part["harm"]) for part in parts]
        assert dict(content(one)["harm"]) == {
            slot: max(each.get(slot, 0) for each in harm) for slot in {**harm[0], **harm[1]}
        }
        before = content(one)
        one.merge(one.state())
        assert content(one) == before

    def test_a_state_of_nothing_can_be_merged(self) -> None:
        found = Verified()
        found.merge(Verified().state())
        assert len(found) == 0
        assert found.state()["values"].shape == (0, 3)
        assert found.state()["harm"].shape == (0, 2)

    def test_an_older_state_does_not_bring_back_what_changed_an_answer(self) -> None:
        """As a process does that shares what it learns with a file, now and then."""
        found = learned([(False, [word(1, 2, 3)])])
        older = found.state()
        found.changed(gaps(word(1, 2, 3)))
        assert found.ask(gaps(word(1, 2, 3))) is Evidence.UNKNOWN
        found.merge(older)
        assert found.ask(gaps(word(1, 2, 3))) is Evidence.UNKNOWN

    def test_memory_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verified_module, "MOST", 10)
        found = Verified()
        for slot in range(30):
            found.stayed(gaps(number(slot, 1, 2)))
        assert 10 <= len(found) <= 11
        assert len(found.state()["changes"]) <= 6

    def test_slots_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verified_module, "MOST", 10)
        found = learned([(False, [number(slot, 1, 2)]) for slot in range(30)])
        assert len(found._harmless) <= 10

    def test_changes_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verified_module, "MOST", 10)
        pairs = itertools.combinations(range(9), 2)
        found = learned([(False, [number(1, *pair)]) for pair in pairs])
        assert len(found.state()["changes"]) <= 11

    def test_merged_values_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verified_module, "MOST", 10)
        found = Verified()
        for slot in range(0, 30, 5):
            found.merge(learned([(False, [number(slot + k, 1, 2)]) for k in range(5)]).state())
        assert len(found) <= 20


@given(STEPS_OF_LEARNING, STEPS_OF_LEARNING, st.lists(GAPS, min_size=1, max_size=8))
@settings(max_examples=300, deadline=None)
def test_the_table_says_what_is_known(
    steps: list[tuple[bool, list[Gap]]], others: list[tuple[bool, list[Gap]]], asked: list[list[Gap]]
) -> None:
    def apart(gap: Gap) -> Gap:  # hashes of slots and of values are never the same number
        slot, value, former, is_word = gap
        return slot + 100, 10 * slot + value + 1000, 10 * slot + former + 1000, is_word

    known = learned([(changed, list(map(apart, these))) for changed, these in steps])
    known.merge(learned([(changed, list(map(apart, these))) for changed, these in others]).state())
    demand = Demand(numbers=NUMBERS, words=WORDS, penalty=PENALTY)
    for one in asked:
        found = gaps(*map(apart, one))
        hashes = found.slot, found.value, found.former, found.change, found.word
        changes = Changes(np.zeros(len(one), np.int64), *hashes)
        assert evidence_in_python(changes, np.nan, demand, known.table) is known.ask(found)


class TestPassages:
    """Gaps whose value and former value are one: what an answer says of them counts once for a slot."""

    @staticmethod
    def passages(*values: int) -> Changes:
        found = gaps(*(word(1, value, value) for value in values))
        found.change[:] = [100 * value for value in values]
        return found

    def test_one_answer_is_one_value_however_many_passages_changed(self) -> None:
        verified = Verified()
        verified.stayed(self.passages(*range(WORDS)))
        assert len(verified) == 1
        for value in range(20, 20 + WORDS - 1):
            assert verified.ask(self.passages(99)) == Evidence.UNKNOWN
            verified.stayed(self.passages(value))
        assert verified.ask(self.passages(99)) == Evidence.FREELY

    def test_of_passages_that_never_come_again_so_many_are_remembered(self) -> None:
        verified = Verified()
        for value in range(PLENTY + 10):
            verified.stayed(self.passages(value))
        assert len(verified) == PLENTY

    def test_a_passage_that_changed_an_answer_is_refused_and_others_are_not(self) -> None:
        verified = Verified()
        for value in range(6 * WORDS):
            verified.stayed(self.passages(value))
        verified.changed(self.passages(77))
        assert verified.ask(self.passages(77)) == Evidence.UNKNOWN
        assert verified.ask(self.passages(78)) == Evidence.FREELY
