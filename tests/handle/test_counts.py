"""Answers that came from records are counted once they are final, and under the same names everywhere."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from guarded import (  # fmt: skip
    BASE,
    BOTH,
    FIRST,
    LENGTHS,
    SECOND,
    Case,
    Pairs,
    done,
    field,
    guarded,
    rows_of,
    run,
    taught,
    trusting,
    variant,
)
from packed_models import Inputs, batch, rows_database

from attmemo import memoize
from attmemo.errors import DatabaseError


@pytest.fixture(params=["BERT", "BERT classifier"], scope="module", name="case")
def _case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


@pytest.fixture(scope="module", name="classifier")
def _classifier() -> Case:
    return Case("BERT classifier")


def reused_and_repeated(model: Any) -> tuple[int, int]:
    """Both counts, which all who tell them agree on."""
    stats = model.attmemo.stats()
    own, guard, became = (stats["reused"], stats["repeated"]), stats["guard"], done(model)
    said = re.search(r"of (\d+) requests (\d+)(?: \(\d+ %\))? reused and (\d+)(?: \(\d+ %\))? repeated", guard["says"])
    assert said is not None
    assert (int(said[2]), int(said[3])) == (guard["reused"], guard["repeated"]) == own
    assert (became.get("reused", 0), became.get("repeated", 0)) == own
    return own


def differ(model: Any, case: Case, inputs: Inputs) -> int:
    """Asks; how many answers are not the exact ones, to the last bit."""
    seen, exact = field(run(model, inputs)), field(run(case.exact, inputs))
    return sum(not torch.equal(*pair) for pair in zip(seen, exact, strict=True))


def test_reused_are_the_answers_that_are_not_the_exact_ones() -> None:
    case = Case("BERT")
    model, rng = taught(case.bare, min_cosine=-1.0), np.random.default_rng(7)
    guard = model.attmemo.guarded.guard
    guard.drawn = 0.2
    found = repeated = 0
    for turn in range(30):
        parts = [variant(*places, by=int(rng.integers(1, 4))) for places in ((FIRST,), (SECOND,), (FIRST, SECOND))]
        rows = [[int(row) for row in rng.integers(0, len(LENGTHS), 2)] for _ in parts]
        inputs = {
            name: torch.cat([rows_of(part, *own)[name] for part, own in zip(parts, rows, strict=True)])
            for name in BASE
        }
        guard.margin.least = (0.0, 2.0)[turn % 3 == 2]  # below the margin, answers are computed exactly after all
        index = model.attmemo.engine.reuse.store.index
        known = {index.tokens_of(number).tobytes() for number in index.numbers()}
        asked = [ids[:n].numpy().astype(np.int32).tobytes() for ids, n in
                 zip(inputs["input_ids"], inputs["attention_mask"].sum(1).tolist(), strict=True)]  # fmt: skip
        found += differ(model, case, inputs)
        repeated += sum(one in known for one in asked)
        assert reused_and_repeated(model) == (found, repeated)
    assert found > 20
    assert repeated > 0
    assert done(model)["below the margin"] > 0


def unreadable(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: Any) -> None:
        raise DatabaseError("a record was dropped.", "a test")

    monkeypatch.setattr(model.attmemo.engine.reuse.store, "fetch", gone)


def broken_kernel(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(model.attmemo.engine.reuse.packed, "run", broken)


def unreadable_answers(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("an answer of another form")

    monkeypatch.setattr(model.attmemo.guarded.answers, "read", broken)


def not_alone(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.attmemo.guarded.guard.margin.least = 2.0
    trusting(model)

    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("no part of it can be computed")

    monkeypatch.setattr("attmemo.guard.forward.run_again", broken)


FAILURES = [unreadable, broken_kernel, unreadable_answers, not_alone]


@pytest.mark.parametrize("fail", FAILURES, ids=lambda fail: fail.__name__)
def test_answers_that_were_computed_exactly_after_all_count_for_nothing(
    classifier: Case, fail: Callable[[Any, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = taught(classifier.bare)
    certificate = model.attmemo.guarded.guard.certificate
    before = certificate.counts.served, certificate.counts.charged
    with monkeypatch.context() as patched:
        fail(model, patched)
        run(model, BOTH)
    assert reused_and_repeated(model) == (0, 0)
    assert done(model)["whole after all"] == len(LENGTHS)
    assert (certificate.counts.served, certificate.counts.charged) == before, "and they cost nothing"
    assert model.attmemo.stats()["failures"]


def test_a_repeat_that_was_computed_exactly_after_all_counts_for_nothing(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = guarded(case.bare)
    run(model, BASE)
    with monkeypatch.context() as patched:
        unreadable(model, patched)
        run(model, BASE)
    assert reused_and_repeated(model) == (0, 0)
    run(model, BASE)
    assert reused_and_repeated(model) == (0, 6)


def test_blocks_that_ran_twice_count_for_nothing(classifier: Case) -> None:
    bare = Pairs(classifier.bare.config).eval()
    bare.load_state_dict(classifier.bare.state_dict())
    model, other = taught(bare), variant(FIRST, by=7)["input_ids"]
    for inputs in (BASE, BOTH):
        run(model, inputs, other_ids=other)
    assert reused_and_repeated(model) == (0, 0)


def test_a_forward_that_raises_gave_no_answer(classifier: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    model = taught(classifier.bare)

    def broken(*_: Any) -> None:
        raise ArithmeticError("the head")

    with monkeypatch.context() as patched:
        patched.setattr(model.classifier, "forward", broken)
        with pytest.raises(ArithmeticError):
            run(model, BOTH)
    assert reused_and_repeated(model) == (0, 0)
    run(model, BOTH)
    assert reused_and_repeated(model) == (6, 0)


def test_an_alarm_begins_the_guards_count_and_no_other_anew(case: Case) -> None:
    model = taught(case.bare, min_cosine=-1.0)
    run(model, BOTH)
    guard = model.attmemo.guarded.guard
    guard._alarm()
    run(model, BASE)
    stats = model.attmemo.stats()
    assert (stats["reused"], stats["repeated"], stats["served"]) == (6, 6, 12)
    assert (stats["guard"]["reused"], stats["guard"]["repeated"]) == (0, 6)
    assert (done(model)["reused"], done(model)["repeated"]) == (6, 6)


def test_without_a_guard_the_names_are_the_same(case: Case, tmp_path: Path) -> None:
    path = rows_database(case.bare, [BASE], tmp_path / "db")
    model = memoize(copy.deepcopy(case.bare), 0.5, path, gate=False, budget=None)
    mixed = {name: torch.cat([BASE[name][:4], BOTH[name][:2], batch(LENGTHS, 99)[name][:1]]) for name in BASE}
    run(model, mixed)
    stats = model.attmemo.stats()
    assert (stats["sequences"], stats["reused"], stats["repeated"]) == (7, 2, 4)
