"""Between two forwards that a guard looks at, the others are exact, cost next to nothing, and are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from guarded import BASE, Case, guarded, run
from whole_calls import assert_same

from attmemo.guard import rest
from attmemo.guard.rest import BETWEEN, Rest


class Clock:
    """The thread's time: each forward takes a tenth of the time between two looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(rest, "thread_time", lambda: self.now)

    def forward(self, seconds: float = BETWEEN / 10) -> float:
        self.now += seconds
        return seconds


@pytest.fixture(scope="module", name="case")
def _case() -> Case:
    return Case("BERT classifier")


@pytest.fixture(name="served")
def _served(case: Case) -> Any:
    """A guarded model without idle times."""
    model = guarded(case.bare, gate=True)
    model.attmemo.deferred.idle.close()
    return model


def left(model: Any) -> int:
    return sum(model.attmemo.stats()["not_looked_up"].values())


def test_it_lasts_as_long_as_forwards_take_between_two_looks(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, own, engine = Clock(monkeypatch), Rest(), served.attmemo.engine
    assert not own.lasts
    own.begin("not_paying", True)
    taken = [own.run(engine, clock.forward, (), {}) for _ in range(30) if own.lasts]
    assert len(taken) == pytest.approx(10, abs=1)
    assert own.end() == pytest.approx(sum(taken))
    assert own.end() == 0.0, "each second is told once"


def test_none_follows_a_forward_that_taught_something() -> None:
    own = Rest()
    own.begin("not_paying", False)
    assert not own.lasts


def test_forwards_that_are_not_looked_at_are_exact_and_counted(
    case: Case, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, looked, forwards = run(case.exact, BASE), [], 300
    note = served.attmemo.planner.note_repeats
    monkeypatch.setattr(served.attmemo.planner, "note_repeats", lambda *given: looked.append(1) or note(*given))
    with torch.inference_mode():
        for _ in range(forwards):
            assert_same(served(**BASE), expected)
    assert 0 < len(looked) < forwards / 2
    assert left(served) >= (forwards - len(looked)) * len(BASE["input_ids"])
    assert served.attmemo.stats()["sequences"] == forwards * len(BASE["input_ids"])
