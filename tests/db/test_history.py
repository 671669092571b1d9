"""What requests cost over time is kept with a database, in few bytes, and adds up."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import entry, opened

from attmemo.db.pools.history import MOST, SECONDS, History, Work
from attmemo.errors import DatabaseError

MOMENTS = st.lists(st.tuples(st.floats(0, 4e9), st.integers(1, 100), st.integers(1, 9)), min_size=1, max_size=600)


@given(MOMENTS)
def test_nothing_is_lost_and_there_are_never_too_many_periods(notes: list[tuple[float, int, int]]) -> None:
    history = History()
    for moment, requests, rows in notes:
        history.add(moment, Work(requests, 10 * requests, rows))
        assert len(history.periods) <= MOST
    total = Work()
    for period in history.periods:
        total = total.plus(period.work)
    assert total == Work(sum(n for _, n, _ in notes), sum(10 * n for _, n, _ in notes), sum(r for *_, r in notes))
    begins = [period.begin for period in history.periods]
    assert begins == sorted(set(begins))
    for moment, *_ in notes:
        assert any(period.begin <= moment < period.begin + period.seconds for period in history.periods)
    assert History.of(history.state()).periods == history.periods


def test_few_requests_keep_short_periods() -> None:
    history = History()
    for number in range(MOST):
        history.add(1e9 + SECONDS * number, Work(1, 1, 1))
    assert history.seconds == SECONDS
    history.add(0.0, Work(1, 1, 1))
    assert history.seconds > SECONDS


def test_a_reset_of_counters_is_no_loss() -> None:
    assert Work(5, 50, 20).since(Work(2, 30, 10)) == Work(3, 20, 10)
    assert Work(5, 50, 20).since(Work(9, 90, 30)) == Work(5, 50, 20)


def test_notes_of_all_processes_are_added_and_survive(tmp_path: Path) -> None:
    with opened(tmp_path / "pool", 1 << 22) as first, opened(tmp_path / "pool", 1 << 22) as second:
        first.note(Work(3, 30, 20))
        second.note(Work(4, 40, 10))
        first.add([entry(1)])
        first.note(Work(1, 10, 10))
    with opened(tmp_path / "pool", fills=False) as pool:
        total = Work()
        for period in pool.history().periods:
            total = total.plus(period.work)
        assert total == Work(8, 80, 40)
        assert len(pool) == 1
        with pytest.raises(DatabaseError, match="to be read only"):
            pool.note(Work(1, 1, 1))


def test_a_history_of_another_version_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "pool", 1 << 22) as pool:
        with monkeypatch.context() as patched:
            patched.setattr(History, "state", lambda own: {"hours": 3})
            pool.note(Work(3, 30, 20))
        pool.note(Work(4, 40, 10))
        assert [period.work for period in pool.history().periods] == [Work(4, 40, 10)]
