"""Whether reuse pays, by the times of forwards with and without it."""

from __future__ import annotations

from attmemo.perfmodel.forward_times import KNOWN, LAST, OFTEN, PERIOD, SELDOM, TRIED, ForwardTimes

TOKENS = 700


def run(times: ForwardTimes, forwards: int, reused: float, whole: float, tokens: int = TOKENS) -> int:
    """Forwards that take so many seconds with reuse and without; how many of them reused."""
    count = 0
    for _ in range(forwards):
        asked = times.ask(tokens)
        times.record(tokens, reused if asked else whole, asked)
        count += asked
    return count


def test_nothing_is_judged_before_both_are_known() -> None:
    times = ForwardTimes()
    assert run(times, KNOWN, 2.0, 1.0) == KNOWN
    assert times.pays is None
    seen = run(times, OFTEN * (KNOWN - 1), 2.0, 1.0)
    assert OFTEN * (KNOWN - 1) - seen == KNOWN - 1, "one of so many runs without"
    assert times.pays is None


def test_where_reuse_takes_longer_it_ends_but_for_a_few_tries() -> None:
    times = ForwardTimes()
    run(times, KNOWN + OFTEN * KNOWN, 1.1, 1.0)
    assert times.pays is False
    assert run(times, 4 * PERIOD, 1.1, 1.0) == 4 * TRIED


def test_where_reuse_pays_a_forward_now_and_then_runs_without() -> None:
    times = ForwardTimes()
    run(times, KNOWN + OFTEN * KNOWN, 0.6, 1.0)
    assert times.pays is True
    assert run(times, 4 * SELDOM, 0.6, 1.0) == 4 * (SELDOM - 1)


def test_reuse_begins_again_once_it_pays() -> None:
    times = ForwardTimes()
    run(times, KNOWN + OFTEN * KNOWN, 2.0, 1.0)
    assert times.pays is False
    run(times, PERIOD * (LAST // TRIED + 1), 0.5, 1.0)
    assert times.pays is True


def test_about_the_same_time_changes_nothing() -> None:
    times = ForwardTimes()
    run(times, KNOWN + OFTEN * KNOWN, 1.01, 1.0)
    assert times.pays is True


def test_one_forward_that_took_very_long_changes_nothing() -> None:
    times = ForwardTimes()
    run(times, KNOWN + OFTEN * KNOWN, 0.8, 1.0)
    times.record(TOKENS, 1000.0, True)
    assert times.pays is True


def test_sizes_are_judged_apart() -> None:
    times = ForwardTimes()
    run(times, KNOWN + OFTEN * KNOWN, 2.0, 1.0)
    assert all(times.ask(20) for _ in range(100)), "of short forwards nothing is known"
    run(times, 2 * (KNOWN + OFTEN * KNOWN), 0.01, 0.02, tokens=20)
    assert sum(times.ask(20) for _ in range(10)) == 10
    assert run(times, PERIOD, 2.0, 1.0) == TRIED


def test_without_a_gate_every_forward_reuses() -> None:
    times = ForwardTimes(always=True)
    assert run(times, 1000, 2.0, 1.0) == 1000


def test_asking_changes_nothing() -> None:
    times = ForwardTimes()
    run(times, KNOWN + OFTEN * KNOWN, 1.1, 1.0)
    before = [times.ask(TOKENS) for _ in range(2 * PERIOD)]
    assert len(set(before)) == 1
