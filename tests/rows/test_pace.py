"""How fast a thread works beside requests."""

from __future__ import annotations

import time

import pytest

from attmemo.rows import throttle as pace
from attmemo.rows.throttle import EACH, EARNED, ENOUGH, FAST_SHARE, FIRST, FIRST_SHARE, FREE, GIVEN, MOST, SHARE, Pace


class Clock:
    """Time, and processor time of the process, as a test has them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.used = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "process_time", lambda: self.used)
        monkeypatch.setattr(pace, "cores", lambda: 2)

    def go_on(self, seconds: float, used: float) -> None:
        self.now, self.used = self.now + seconds, self.used + used


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def begun() -> Pace:
    """A pace that has done the very first work of an empty database, which is paid for."""
    own = Pace()
    own.rest(GIVEN)
    return own


def share_of(pace: Pace, worked: float = 0.001) -> float:
    """Share of one core that this work and the rest behind it come to."""
    return worked / (worked + pace.rest(worked))


def test_a_busy_process_gives_a_share_of_one_core(clock: Clock) -> None:
    own = begun()
    own.rest(FIRST)
    clock.go_on(1.0, 1.9)
    own.look()
    assert share_of(own) == pytest.approx(SHARE)


def test_the_very_first_records_of_an_empty_database_are_stored_fast(clock: Clock) -> None:
    own = Pace()
    assert share_of(own, GIVEN / 2) == pytest.approx(FAST_SHARE)
    own.rest(GIVEN / 2)
    assert own.share == FIRST_SHARE
    assert Pace(ENOUGH).share == SHARE


def test_the_first_work_is_done_a_little_faster(clock: Clock) -> None:
    own = begun()
    assert not own.is_slow
    assert share_of(own, FIRST / 2) == pytest.approx(FIRST_SHARE)
    assert share_of(own, FIRST / 2) == pytest.approx(SHARE)
    assert own.is_slow


def test_records_that_are_there_already_leave_less_first_work(clock: Clock) -> None:
    own = Pace(ENOUGH // 2)
    own.rest(GIVEN / 2)
    assert share_of(own, FIRST / 4) == pytest.approx(FIRST_SHARE)
    assert share_of(own, FIRST / 4) == pytest.approx(SHARE)
    for records in (ENOUGH, 100 * ENOUGH):
        assert share_of(Pace(records)) == pytest.approx(SHARE)


def test_a_process_that_leaves_cores_idle_gives_more(clock: Clock) -> None:
    own = begun()
    own.rest(FIRST)
    assert own.is_slow
    clock.go_on(1.0, 0.9)
    own.look()
    assert share_of(own) == pytest.approx(FREE)
    assert not own.is_slow
    clock.go_on(1.0, 1.9)
    own.look()
    assert share_of(own) == pytest.approx(SHARE)


def test_two_looks_shortly_one_behind_the_other_are_one(clock: Clock) -> None:
    own = begun()
    own.rest(FIRST)
    clock.go_on(1.0, 1.9)
    own.look()
    clock.go_on(0.001, 0.0)
    own.look()
    assert share_of(own) == pytest.approx(SHARE)


def test_records_that_are_found_pay_for_work_but_not_without_end(clock: Clock) -> None:
    own = Pace(ENOUGH)
    own.earn(1.0)
    assert not own.is_slow
    assert share_of(own, EARNED / 2) == pytest.approx(FAST_SHARE)
    assert share_of(own, EARNED / 2) == pytest.approx(SHARE)
    own.earn(1e9)
    own.rest(MOST)
    assert share_of(own) == pytest.approx(SHARE)


def test_the_first_work_waits_while_found_records_pay(clock: Clock) -> None:
    own = begun()
    own.earn(1.0)
    assert share_of(own, EARNED / 2) == pytest.approx(FAST_SHARE)
    own.rest(EARNED / 2)
    assert share_of(own, FIRST / 2) == pytest.approx(FIRST_SHARE)


def test_found_records_do_not_pay_where_something_has_to_go_for_a_new_one(clock: Clock) -> None:
    own = Pace(ENOUGH)
    own.earn(1.0)
    own.has_room = False
    assert own.is_slow
    assert share_of(own) == pytest.approx(SHARE)
    own.rest(EARNED)
    own.earn(1e9)
    own.has_room = True
    assert not own.is_slow
    assert share_of(own, EARNED / 2) == pytest.approx(FAST_SHARE), "what was earned before is still there"
    assert share_of(own, EARNED / 2) == pytest.approx(SHARE), "and no more"


def test_there_is_no_first_work_where_something_has_to_go(clock: Clock) -> None:
    own = Pace()
    own.has_room = False
    assert own.is_slow
    assert share_of(own, FIRST) == pytest.approx(SHARE)


def test_work_that_cannot_wait_is_rested_for_later(clock: Clock) -> None:
    own = Pace(ENOUGH)
    assert own.rest(0.01, least=0.1) == pytest.approx(0.09)
    assert own.owed == pytest.approx(0.01 * (1 / SHARE - 1) - 0.09)
    assert own.rest(0.01) == pytest.approx(0.02 * (1 / SHARE - 1) - 0.09)
    assert not own.owed


def test_a_least_share_makes_no_rest_longer(clock: Clock) -> None:
    own = Pace(ENOUGH)
    assert own.rest(0.01, least=SHARE / 10) == pytest.approx(0.01 * (1 / SHARE - 1))
    assert not own.owed


def test_what_is_owed_is_forgiven_once_records_that_are_found_pay(clock: Clock) -> None:
    own = Pace(ENOUGH)
    own.rest(0.01, least=0.1)
    own.earn(1.0)
    assert own.rest(0.01) == pytest.approx(0.01 * (1 / FAST_SHARE - 1))
    assert not own.owed


def test_where_something_has_to_go_nothing_is_forgiven(clock: Clock) -> None:
    own = Pace(ENOUGH)
    own.earn(1.0)
    own.has_room = False
    own.rest(0.01, least=0.1)
    assert own.rest(0.01) == pytest.approx(0.02 * (1 / SHARE - 1) - 0.09)


def test_beside_one_forward_only_so_much_work_is_done_fast(clock: Clock) -> None:
    own = Pace(ENOUGH)
    own.earn(1.0)
    for _ in range(100):
        own.forward(EACH)
    assert own.share == FAST_SHARE
    for _ in range(100):
        own.forward(0.1)
    assert own.share == pytest.approx(EACH / 0.1, rel=0.01)
    for _ in range(100):
        own.forward(1e6)
    assert own.share == SHARE
