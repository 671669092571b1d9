"""Between two forwards that a guard looks at, the others are exact, cost next to nothing, and are counted."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from guarded import BASE, Case, certify, guarded, run, taught
from whole_calls import assert_same

from attmemo.guard import rest
from attmemo.guard.rest import BETWEEN, LONGEST, Rest
from attmemo.guard.time_account import TimeAccount


class Clock:
    """The thread's time: each forward takes a tenth of the time between two looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(rest, "thread_time", lambda: self.now)
        monkeypatch.setattr(rest, "monotonic", lambda: 0.0)

    def forward(self, **inputs: Any) -> float:
        self.now += BETWEEN / 10
        return BETWEEN / 10


@pytest.fixture(scope="module", name="case")
def _case() -> Case:
    return Case("BERT classifier")


@pytest.fixture(name="served")
def _served(case: Case) -> Any:
    """A guarded model without idle times."""
    model = guarded(case.bare, gate=True)
    model.attmemo.deferred.idle.close()
    return model


def looks(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each forward that is looked at."""
    found, note = list[int](), model.attmemo.planner.note_repeats
    monkeypatch.setattr(model.attmemo.planner, "note_repeats", lambda *given: found.append(1) or note(*given))
    return found


def left(model: Any) -> int:
    return sum(model.attmemo.stats()["not_looked_up"].values())


def test_it_lasts_as_long_as_forwards_take_between_two_looks(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, own, engine = Clock(monkeypatch), Rest(), served.attmemo.engine
    assert not own.lasts
    own.begin("records_do_not_pay", True)
    taken = [own.run(engine, clock.forward, (), BASE) for _ in range(30) if own.lasts]
    assert len(taken) == pytest.approx(10, abs=1)
    seconds, inputs = own.end()
    assert seconds == pytest.approx(sum(taken))
    assert len(inputs) == len(taken)
    assert own.end() == (0.0, []), "each forward is told once"


def test_it_ends_with_time_where_little_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    own, now = Rest(), [0.0]
    monkeypatch.setattr(rest, "monotonic", lambda: now[0])
    own.begin("records_do_not_pay", True)
    assert own.lasts
    now[0] = LONGEST + 0.1
    assert not own.lasts


def test_all_are_looked_at_behind_a_forward_that_is_left_for_its_time(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = certify(taught(case.bare))
    planner = served.attmemo.planner
    planner.times.always = False
    monkeypatch.setattr(planner.times, "ask", lambda tokens: False)
    looked = looks(served, monkeypatch)
    with torch.inference_mode():
        for _ in range(10):
            served(**BASE)
    assert len(looked) == 10


def test_what_is_asked_again_meanwhile_is_seen(served: Any) -> None:
    planner = served.attmemo.planner
    ids, mask = BASE["input_ids"], BASE["attention_mask"]
    for _ in range(4):
        planner.rested(0.001, [(ids, mask)] * 2)
    assert planner.repeats.share > 0.8


def test_forwards_that_are_not_looked_at_are_exact_and_counted(
    case: Case, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, looked, forwards = run(case.exact, BASE), looks(served, monkeypatch), 300
    monkeypatch.setattr(TimeAccount, "rests", True)
    monkeypatch.setattr(TimeAccount, "ask", lambda own, tokens: False)
    ticks = count()
    monkeypatch.setattr(rest, "thread_time", lambda: next(ticks) * BETWEEN / 20)  # one for each forward
    monkeypatch.setattr(rest, "monotonic", lambda: 0.0)
    with torch.inference_mode():
        for _ in range(forwards):
            assert_same(served(**BASE), expected)
    assert 0 < len(looked) < forwards / 2
    assert left(served) >= (forwards - len(looked)) * len(BASE["input_ids"])
    assert served.attmemo.stats()["sequences"] == forwards * len(BASE["input_ids"])
