"""Jobs that take turns: every one as often, in every order, and only the turns after the first count."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from attmemo.profiler.turns import alternate, interleave


@pytest.mark.parametrize("names", ["ab", "abc", "abcd"])
def test_each_way_stands_at_each_place_equally_often_and_before_and_behind_each_neighbour(names: str) -> None:
    turns = ["".join(alternate(names, turn)) for turn in range(2 * len(names))]
    assert all(sorted(turn) == list(names) for turn in turns)
    for place in range(len(names)):
        assert Counter(turn[place] for turn in turns) == dict.fromkeys(names, 2)
    first = Counter(turn.index("a") < turn.index("b") for turn in turns)
    assert first[True] == first[False]


def test_the_first_turn_is_not_counted_and_jobs_are_told_the_turn() -> None:
    seen: list[tuple[str, int]] = []
    told: list[tuple[str, int, int]] = []
    jobs = {name: lambda turn, name=name: seen.append((name, turn)) for name in "ab"}
    times = interleave(jobs, 3, tell=lambda *step: told.append(step))
    assert sorted(seen) == [(name, turn) for name in "ab" for turn in range(4)]
    assert all(len(one.milliseconds) == 3 for one in times.values())
    assert told[-1] == ("measure", 4, 4)


def test_more_turns_are_taken_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 0.02, 0.04, 0.06])  # at the beginning, and after one, two and three turns
    monkeypatch.setattr("attmemo.profiler.turns.time", SimpleNamespace(monotonic=lambda: next(moments)))
    assert len(interleave({"a": lambda _: None}, 1, seconds=0.05)["a"].milliseconds) == 3


def test_what_is_called_around_a_job_is_called_in_its_order() -> None:
    steps: list[str] = []
    interleave(
        {"a": lambda turn: steps.append(f"job {turn}")}, 1,
        before=lambda turn: steps.append(f"turn {turn}"), ready=lambda name: steps.append(f"ready {name}"),
        after=lambda name, turn: steps.append(f"after {name} {turn}"),
    )  # fmt: skip
    one = "turn 0", "ready a", "job 0", "after a 0"
    assert steps == [*one, *(step.replace("0", "1") for step in one)]
