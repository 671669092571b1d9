"""Kinds of change whose answers are too far away at any margin."""

from __future__ import annotations

import pytest
from guard_tools import gaps, number

from attmemo.guard import futile
from attmemo.guard.futile import FEWEST, FORGETS, Futile


def test_nothing_is_expected_of_a_kind_before_enough_of_it_was_seen() -> None:
    found, own = Futile(), gaps(number(1, 2, 3))
    for _ in range(FEWEST):
        assert not found.expects(own)
        found.note(own, True)
    assert found.expects(own)


def test_a_kind_is_its_slots_whatever_stands_in_them() -> None:
    found = Futile()
    for value in range(FEWEST):
        found.note(gaps(number(1, 2, value), number(5, 0, value)), True)
    assert found.expects(gaps(number(5, 7, 8), number(1, 8, 9)))
    assert not found.expects(gaps(number(1, 2, 3)))


def test_answers_that_are_sometimes_far_are_tried() -> None:
    found, own = Futile(), gaps(number(1, 2, 3))
    for turn in range(100):
        found.note(own, turn % 2 == 1)
        assert not found.expects(own)


def test_what_was_long_ago_is_forgotten() -> None:
    found, own = Futile(), gaps(number(1, 2, 3))
    for _ in range(100 * FORGETS):
        found.note(own, True)
    turns = 0
    while found.expects(own):
        found.note(own, False)
        turns += 1
    assert turns < FORGETS


def test_so_many_kinds_are_remembered_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futile, "MOST", 10)
    found = Futile()
    for slot in range(20):
        for _ in range(FEWEST):
            found.note(gaps(number(slot, 2, 3)), True)
    assert [found.expects(gaps(number(slot, 2, 3))) for slot in range(20)] == [True] * 10 + [False] * 10
