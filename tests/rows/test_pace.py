"""How fast a thread works beside requests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from attmemo.rows import throttle as pace
from attmemo.rows.throttle import EACH, FREE, PAID, SHARE, Pace


class Clock:
    """Time, and processor time of the process, as a test has them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.used = 0.0
        # Not those of the module `time`: a thread of another store would read them, and sleep for days.
        own = SimpleNamespace(monotonic=lambda: self.now, process_time=lambda: self.used)
        monkeypatch.setattr(pace, "time", own)
        monkeypatch.setattr(pace, "cores", lambda: 2)
        monkeypatch.setattr(pace, "EACH", EACH)  # tests of stores have no such bound

    def go_on(self, seconds: float, used: float) -> None:
        self.now, self.used = self.now + seconds, self.used + used


class Account:
    """So many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @property
    def learns(self) -> bool:
        return self.seconds > 0.0

    def spend(self, seconds: float) -> None:
        self.seconds -= seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def paid(seconds: float) -> tuple[Pace, Account]:
    own, account = Pace(), Account(seconds)
    own.account = account
    return own, account


def share_of(pace: Pace, worked: float = 0.001) -> float:
    """Share of one core that this work and the rest behind it come to."""
    return worked / (worked + pace.rest(worked))


def test_a_busy_process_gives_a_share_of_one_core(clock: Clock) -> None:
    own = Pace()
    clock.go_on(1.0, 1.9)
    own.look()
    assert own.is_slow
    assert share_of(own) == pytest.approx(SHARE)


def test_a_process_that_leaves_cores_idle_gives_more(clock: Clock) -> None:
    own = Pace()
    clock.go_on(1.0, 0.9)
    own.look()
    assert share_of(own) == pytest.approx(FREE)
    assert not own.is_slow
    clock.go_on(1.0, 1.9)
    own.look()
    assert share_of(own) == pytest.approx(SHARE)


def test_two_looks_shortly_one_behind_the_other_are_one(clock: Clock) -> None:
    own = Pace()
    clock.go_on(1.0, 1.9)
    own.look()
    clock.go_on(0.001, 0.0)
    own.look()
    assert share_of(own) == pytest.approx(SHARE)


def test_an_account_pays_for_fast_work_until_it_is_empty(clock: Clock) -> None:
    own, account = paid(0.002)
    assert share_of(own, 0.001) == pytest.approx(PAID)
    assert account.seconds == pytest.approx(0.001)
    assert share_of(own, 0.001) == pytest.approx(PAID)
    assert own.is_slow
    assert share_of(own, 0.001) == pytest.approx(SHARE)
    assert account.seconds == pytest.approx(-0.001), "slow work costs requests, too"


def test_work_of_idle_cores_costs_nothing(clock: Clock) -> None:
    own, account = paid(0.002)
    clock.go_on(1.0, 0.9)
    own.look()
    own.rest(0.001)
    assert account.seconds == 0.002


def test_work_is_slow_where_something_has_to_go_for_a_new_record(clock: Clock) -> None:
    own, _ = paid(1.0)
    own.has_room = False
    assert own.is_slow
    assert share_of(own) == pytest.approx(SHARE)


def test_work_that_cannot_wait_is_rested_for_later(clock: Clock) -> None:
    own = Pace()
    assert own.rest(0.01, least=0.1) == pytest.approx(0.09)
    assert own.owed == pytest.approx(0.01 * (1 / SHARE - 1) - 0.09)
    assert own.rest(0.01) == pytest.approx(0.02 * (1 / SHARE - 1) - 0.09)
    assert not own.owed


def test_a_least_share_makes_no_rest_longer(clock: Clock) -> None:
    own = Pace()
    assert own.rest(0.01, least=SHARE / 10) == pytest.approx(0.01 * (1 / SHARE - 1))
    assert not own.owed


def test_what_is_owed_is_forgiven_once_an_account_pays(clock: Clock) -> None:
    own = Pace()
    own.rest(0.01, least=0.1)
    own.account = Account(1.0)
    assert own.rest(0.01) == pytest.approx(0.01 * (1 / PAID - 1))
    assert not own.owed


def test_beside_one_forward_only_so_much_work_is_done_fast(clock: Clock) -> None:
    own, _ = paid(1.0)
    for _ in range(100):
        own.forward(EACH)
    assert own.share == PAID
    for _ in range(100):
        own.forward(0.1)
    assert own.share == pytest.approx(EACH / 0.1, rel=0.01)
    for _ in range(100):
        own.forward(1e6)
    assert own.share == SHARE
