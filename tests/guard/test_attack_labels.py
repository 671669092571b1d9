"""Classifiers that look for attacks: an answer comes from an equal input or from the model."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from guarded import BASE, FIRST, SECOND, certify, field, flush, run, sure, variant
from packed_models import MODELS

from attmemo import memoize
from attmemo.guard.attack_labels import attack_labels


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        (["SAFE", "INJECTION"], ["INJECTION"]),
        (["benign", "jailbreak_attempt"], ["jailbreak_attempt"]),
        (["toxic", "severe_toxic", "obscene", "threat", "insult", "identity_hate"], 6),
        (["ham", "spam"], ["spam"]),
        (["notPhishing", "Phishing"], 2),
        (["POSITIVE", "NEGATIVE"], []),
        (["LABEL_0", "LABEL_1"], []),
        (["OpenSSH:E13", "HDFS:E5"], []),
        (["whatever", "chateau", "despatch"], []),
    ],
)
def test_labels_about_attacks_are_known_by_their_words(labels: list[str], found: list[str] | int) -> None:
    config = SimpleNamespace(id2label=dict(enumerate(labels)))
    assert attack_labels(config) == (found if isinstance(found, list) else labels[-found:])


def test_a_configuration_without_labels_is_about_nothing() -> None:
    assert attack_labels(None) == []
    assert attack_labels(SimpleNamespace(id2label=None)) == []


@pytest.fixture(name="filter_", scope="module")
def _filter() -> Any:
    """A classifier that looks for injections."""
    model = sure(MODELS["BERT classifier"]())
    model.config.id2label = {0: "SAFE", 1: "INJECTION"}
    return model


def memoized(bare: Any, **options: Any) -> Any:
    """A guard that would let all serve whose changes are known."""
    model = memoize(copy.deepcopy(bare), budget=0.05, gate=False, **{"linear": "exact"} | options)
    for inputs in (BASE, variant(FIRST), variant(SECOND)):
        run(model, inputs)
    return certify(model)


def test_an_attack_inside_of_a_known_template_gets_the_models_own_answer(filter_: Any) -> None:
    model, exact = memoized(filter_), memoize(copy.deepcopy(filter_), reuse="none")
    for by in range(2, 86):  # as many texts as 84 batches hold: 504
        attack = variant(FIRST, SECOND, by=by)
        assert torch.equal(field(run(model, attack)).argmax(1), field(run(exact, attack)).argmax(1))
    stats = model.attmemo.stats()
    assert stats["reused"] == 0
    assert stats["guard"]["verified"] == 100_000, "as many as the test began with: nothing was tried"
    assert "only equal inputs are reused" in stats["guard"]["says"]


def test_equal_inputs_are_answered_by_their_own_records(filter_: Any) -> None:
    model = memoized(filter_)
    flush(model)
    before = model.attmemo.stats()["repeated"]
    run(model, BASE)
    assert model.attmemo.stats()["repeated"] == before + len(BASE["input_ids"])


def test_who_names_rows_reuses_similar_inputs_all_the_same(filter_: Any) -> None:
    model = memoized(filter_, reuse="rows")
    run(model, variant(FIRST, SECOND))
    assert model.attmemo.stats()["reused"] > 0
    assert "only equal" not in model.attmemo.stats()["guard"]["says"]


def test_other_classifiers_reuse_similar_inputs(filter_: Any) -> None:
    bare = copy.deepcopy(filter_)
    bare.config.id2label = {0: "NEGATIVE", 1: "POSITIVE"}
    model = memoized(bare)
    run(model, variant(FIRST, SECOND))
    assert model.attmemo.stats()["reused"] > 0


def test_the_log_names_the_labels_and_the_way_out(filter_: Any, caplog: pytest.LogCaptureFixture) -> None:
    memoize(copy.deepcopy(filter_), budget=0.05, linear="exact")
    assert "labels are about attacks (INJECTION)" in caplog.text
    assert "reuse='rows'" in caplog.text


def test_once_8_bits_serve_similar_inputs_are_still_not_reused(filter_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attmemo.handle.stack.speed_of", lambda *_: 2.0)
    model = memoized(filter_, linear="auto")
    model.attmemo.choice._serve()
    certify(model)
    run(model, variant(FIRST, SECOND))
    assert model.attmemo.guarded.guard.equal_only
    assert model.attmemo.stats()["reused"] == 0
