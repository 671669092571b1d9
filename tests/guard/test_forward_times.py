"""Whether reuse pays, by the times of forwards with and without it."""

from __future__ import annotations

import itertools

import pytest

from attmemo.guard.forward_times import INVESTED, KNOWN, OFTEN, PERIOD, SELDOM, SOONEST, ForwardTimes

TOKENS = 700


def run(
    times: ForwardTimes, forwards: int, reused: float, whole: float, tokens: int = TOKENS, learns: bool = False
) -> int:
    """Forwards of two sequences that take so many seconds with reuse and without; how many of them reused."""
    count = 0
    for _ in range(forwards):
        asked = times.ask(tokens, learns=learns)
        times.record(tokens, 2, reused if asked else whole, asked, learns=learns)
        count += asked
    return count


def test_nothing_is_judged_before_both_are_known() -> None:
    times = ForwardTimes()
    assert run(times, KNOWN, 2.0, 1.0) == KNOWN
    assert times.pays is None
    seen = run(times, OFTEN * (KNOWN - 1), 2.0, 1.0)
    assert OFTEN * (KNOWN - 1) - seen == KNOWN - 1, "one of so many runs without"
    assert times.pays is None


def test_where_reuse_takes_longer_it_ends_and_tries_become_seldom() -> None:
    times = ForwardTimes()
    run(times, KNOWN + OFTEN * KNOWN, 1.1, 1.0)
    assert times.pays is False
    tried: list[int] = []
    for forward in range(20 * PERIOD):
        tried += [forward] * run(times, 1, 1.1, 1.0)
    waits = [after - before - 1 for before, after in itertools.pairwise(tried[KNOWN - 1 :]) if after > before + 1]
    assert waits[:6] == [2 * SOONEST, 4 * SOONEST, 8 * SOONEST, 16 * SOONEST, PERIOD, PERIOD]
    assert tried[:KNOWN] == list(range(tried[0], tried[0] + KNOWN)), "a try is some forwards, one behind the other"
    assert tried[0] <= SOONEST


def test_forwards_of_other_threads_that_began_before_the_judgement_are_no_try() -> None:
    times, asked, count = ForwardTimes(), [], 0
    for _ in range(2000):
        asked.append(times.ask(TOKENS))
        if len(asked) == 4:  # as many run at once
            reused = asked.pop(0)
            times.record(TOKENS, 2, 1.5 if reused else 1.0, reused)
            count += reused
    assert times.pays is False
    assert count < 200


def test_where_reuse_pays_a_forward_now_and_then_runs_without() -> None:
    times = ForwardTimes()
    run(times, KNOWN + OFTEN * KNOWN, 0.6, 1.0)
    assert times.pays is True
    assert run(times, 4 * SELDOM, 0.6, 1.0) == 4 * (SELDOM - 1)


def test_reuse_begins_again_once_it_pays() -> None:
    times = ForwardTimes()
    run(times, KNOWN + OFTEN * KNOWN, 2.0, 1.0)
    assert times.pays is False
    run(times, SOONEST + KNOWN, 0.5, 1.0)
    assert times.pays is True, "a try is judged by itself, not with what earlier ones took"


def test_about_the_same_time_changes_nothing() -> None:
    times = ForwardTimes()
    run(times, KNOWN + OFTEN * KNOWN, 1.01, 1.0)
    assert times.pays is True


def test_one_forward_that_took_very_long_changes_nothing() -> None:
    times = ForwardTimes()
    run(times, KNOWN + OFTEN * KNOWN, 0.8, 1.0)
    times.record(TOKENS, 2, 1000.0, True)
    assert times.pays is True


def test_sizes_are_judged_apart() -> None:
    times = ForwardTimes()
    run(times, KNOWN + OFTEN * KNOWN, 2.0, 1.0)
    assert all(times.ask(20) for _ in range(100)), "of short forwards nothing is known"
    run(times, 2 * (KNOWN + OFTEN * KNOWN), 0.01, 0.02, tokens=20)
    assert sum(times.ask(20) for _ in range(10)) == 10
    assert run(times, 2 * SOONEST, 2.0, 1.0) == KNOWN


@pytest.mark.parametrize("tokens", [31, 32, 1000, 2047, 2048])
def test_batches_of_a_stream_are_of_one_size_wherever_their_tokens_lie(tokens: int) -> None:
    """A few tokens more or fewer make no other size, of which all would have to be learned again."""
    times = ForwardTimes()
    whole = 0
    for turn in range(KNOWN + OFTEN * KNOWN):
        some = tokens + (turn % 3 - 1) * tokens // 10
        asked = times.ask(some)
        times.record(some, 2, some * (0.5 if asked else 1.0), asked)
        whole += not asked
    assert whole == KNOWN
    assert times.pays is True


def test_without_a_gate_every_forward_reuses() -> None:
    times = ForwardTimes(always=True)
    assert run(times, 1000, 2.0, 1.0) == 1000


def test_asking_changes_nothing() -> None:
    times = ForwardTimes()
    run(times, KNOWN + OFTEN * KNOWN, 1.1, 1.0)
    before = [times.ask(TOKENS) for _ in range(2 * PERIOD)]
    assert len(set(before)) == 1


def test_learning_is_not_judged_until_it_has_cost_its_share() -> None:
    times = ForwardTimes()
    begun = run(times, OFTEN * KNOWN, 3.0, 1.0, learns=True)
    assert begun == (OFTEN - 1) * KNOWN, "one of so many runs without: what learning costs is to be known"
    left = int(INVESTED * 0.5 / 2.0)  # a sequence takes half a second, and learning costs two for a forward
    assert run(times, left, 3.0, 1.0, learns=True) > 0.97 * left
    assert times.pays is None
    run(times, left, 3.0, 1.0, learns=True)
    assert times.pays is False
    assert run(times, PERIOD, 3.0, 1.0, learns=True) <= 5 * KNOWN


def test_learning_that_costs_nothing_goes_on() -> None:
    times = ForwardTimes()
    assert run(times, 4000, 0.9, 1.0, learns=True) > 0.97 * 4000


def test_one_long_stop_is_no_cost_of_learning_and_an_alarm_pays_anew() -> None:
    times = ForwardTimes()
    run(times, OFTEN * KNOWN, 1.1, 1.0, learns=True)
    times.record(TOKENS, 2, 1e6, True, learns=True)
    assert run(times, 100, 1.1, 1.0, learns=True) > 90
    run(times, 8000, 2.0, 1.0, learns=True)
    assert times.pays is False
    assert times.ended
    times.invest()
    assert run(times, 50, 2.0, 1.0, learns=True) > 45
