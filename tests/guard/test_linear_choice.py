"""8-bit linear layers within a budget: exact answers until they are proven, exact ones again if too many change."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import FAMILIES
from guard_tools import gaps, word
from packed_models import MODELS, Inputs, batch, pair
from torch import Tensor, nn

from attmemo import memoize
from attmemo.guard import linear_choice
from attmemo.guard.linear_choice import AT_ONCE
from attmemo.guard.verdict import Verdict
from attmemo.kernels.plan import Evidence

SIZE = 32
"""Sequences of a batch."""


@pytest.fixture(name="faster")
def _faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """8-bit layers are taken to be twice as fast, whatever this machine says."""
    monkeypatch.setattr("attmemo.handle.stack.speed_of", lambda *_: 2.0)


@pytest.fixture(name="never_drawn")
def _never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_choice, "VERIFIED", 1 << 40)


def vectors(**options: Any) -> tuple[Any, Any]:
    """A bare encoder, and the same under a budget."""
    bare = MODELS["BERT"]()
    return bare, memoize(copy.deepcopy(bare), **{"budget": 0.05, "min_cosine": 0.5, "gate": False} | options)


def batches(count: int, start: int = 0) -> Iterator[Inputs]:
    """Batches of inputs that are all different."""
    for seed in range(start, start + count):
        yield batch([9 + (seed + n) % 7 for n in range(SIZE)], 1000 + seed)


def answers(model: Any, inputs: Inputs) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(**inputs)[0]
    return found


def choice(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = model.attmemo.stats()["linear_choice"]
    return found


def prove(model: Any, most: int = 40) -> int:
    """Ask until 8 bits serve; how many batches that took."""
    for number, inputs in enumerate(batches(most)):
        if choice(model)["state"] != "proving":
            return number
        answers(model, inputs)
    raise AssertionError(choice(model)["says"])


@pytest.mark.usefixtures("faster", "never_drawn")
class TestProof:
    def test_answers_are_exact_until_8_bits_are_proven_and_those_of_int8_afterwards(self) -> None:
        bare, model = vectors()
        exact = memoize(copy.deepcopy(bare), reuse="none")
        rounded = memoize(copy.deepcopy(bare), reuse="none", linear="int8")
        first = next(batches(1, 500))
        assert torch.equal(answers(model, first), answers(exact, first))
        assert (choice(model)["state"], model.attmemo.stats()["linear"]) == ("proving", "exact")
        prove(model)
        assert (choice(model)["state"], model.attmemo.stats()["linear"]) == ("int8", "int8")
        assert torch.equal(answers(model, first), answers(rounded, first))
        assert not torch.equal(answers(rounded, first), answers(exact, first))

    def test_a_proof_takes_the_samples_that_the_budget_asks_for(self) -> None:
        _, model = vectors(budget=0.05, confidence=0.95)
        prove(model)
        found = choice(model)
        assert 59 <= found["compared"] <= 59 + 2 * SIZE, "0.95 ** 59 is the first power below 5 %"
        assert found["changed"] == 0
        assert found["highest"] <= 0.05

    def test_an_input_that_is_asked_again_proves_nothing(self) -> None:
        _, model = vectors()
        same = next(batches(1))
        for _ in range(20):
            answers(model, same)
        assert AT_ONCE <= choice(model)["compared"] <= SIZE
        assert choice(model)["state"] == "proving"

    def test_requests_are_counted_once(self) -> None:
        _, model = vectors()
        answers(model, next(batches(1)))
        stats = model.attmemo.stats()
        assert stats["sequences"] == SIZE
        assert stats["tokens"] < stats["rows_computed"] < 2 * stats["tokens"], "those of some sequences, twice"
        assert not stats["failures"]

    def test_where_answers_change_the_model_stays_exact_and_8_bit_weights_go(self) -> None:
        bare, model = vectors(min_cosine=1.0)  # every rounded vector is another one
        packed = memoize(copy.deepcopy(bare), reuse="none")
        for inputs in batches(20):
            assert torch.equal(answers(model, inputs), answers(packed, inputs))
        stats = model.attmemo.stats()
        assert stats["linear_choice"]["state"] == "exact"
        assert "could not be proven" in stats["linear_choice"]["says"]
        assert stats["weight_bytes"] == packed.attmemo.stats()["weight_bytes"]

    def test_hooks_of_the_user_are_called_once_a_request(self) -> None:
        _, model = vectors()
        seen: list[Any] = []
        model.register_forward_hook(lambda *given: seen.append(given))
        for inputs in batches(3):
            answers(model, inputs)
        with torch.inference_mode():
            model(**next(batches(1)))
        assert len(seen) == 4
        assert choice(model)["compared"] == 0

    def test_a_request_without_reuse_is_exact_while_8_bits_serve(self) -> None:
        bare, model = vectors()
        exact = memoize(copy.deepcopy(bare), reuse="none")
        prove(model)
        inputs = next(batches(1, 700))
        with model.attmemo.observe(reuse=False):
            assert torch.equal(answers(model, inputs), answers(exact, inputs))

    def test_disabling_and_enabling_keeps_the_decision(self) -> None:
        bare, model = vectors()
        prove(model)
        model.attmemo.disable()
        inputs = next(batches(1, 800))
        assert torch.equal(answers(model, inputs), answers(bare, inputs))
        model.attmemo.enable()
        assert model.attmemo.stats()["linear"] == "int8"


@pytest.mark.usefixtures("faster")
def test_changed_answers_end_8_bits_that_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_choice, "VERIFIED", 1)
    bare, model = vectors()
    exact = memoize(copy.deepcopy(bare), reuse="none")
    prove(model)
    model.attmemo.choice._answers.min_cosine = 1.0  # from now on every rounded vector is another answer
    for inputs in batches(10, 100):
        answers(model, inputs)
    assert choice(model)["state"] == "exact"
    assert "too many answers changed" in choice(model)["says"]
    inputs = next(batches(1, 900))
    assert torch.equal(answers(model, inputs), answers(exact, inputs))


@pytest.mark.usefixtures("faster", "never_drawn")
def test_rows_have_the_budget_alone_until_8_bits_serve_and_half_of_it_then() -> None:
    bare = FAMILIES["BERT classifier"].make()
    model = memoize(copy.deepcopy(bare), budget=0.1, gate=False, max_bytes=1 << 24)
    assert model.attmemo.reuse == "rows"
    assert model.attmemo.stats()["guard"]["budget"] == 0.1
    guard = model.attmemo.guarded.guard
    guard.compared(Verdict.LEARN, gaps(word(1, 2, 3)), Evidence.UNKNOWN, None, False)
    answers(model, next(batches(1)))
    assert model.attmemo.flush()
    assert model.attmemo.stats()["records"] > 0
    model.attmemo.choice._serve()
    stats = model.attmemo.stats()
    assert (stats["linear"], stats["guard"]["budget"], stats["guard"]["requests"]) == ("int8", 0.05, 0)
    assert stats["guard"]["changes_known"] == 2, "what left an answer as it was is not forgotten"


@pytest.mark.usefixtures("faster", "never_drawn")
def test_records_of_8_bit_layers_serve_no_exact_ones() -> None:
    bare = FAMILIES["BERT classifier"].make()
    exact = memoize(copy.deepcopy(bare), reuse="none")
    model = memoize(copy.deepcopy(bare), budget=0.1, gate=False, max_bytes=1 << 24)
    inputs = next(batches(1))
    model.attmemo.choice._serve()
    answers(model, inputs)
    assert model.attmemo.flush()
    answers(model, inputs)
    repeated = model.attmemo.stats()["repeated"]
    assert repeated == SIZE, "the records serve while 8-bit layers do"
    model.attmemo.choice._end("a test")
    assert torch.equal(answers(model, inputs), answers(exact, inputs))
    assert model.attmemo.stats()["repeated"] == repeated


def test_where_8_bits_are_not_faster_nothing_is_compared_or_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attmemo.handle.stack.speed_of", lambda *_: 1.1)
    bare, model = vectors()
    assert model.attmemo.stats()["linear_choice"] is None
    assert model.attmemo.stats()["weight_bytes"] == pair("BERT")[1].attmemo.stats()["weight_bytes"]
    rows = memoize(FAMILIES["BERT classifier"].make(), budget=0.1)
    assert rows.attmemo.stats()["guard"]["budget"] == 0.1, "the whole budget is for rows"
    assert type(bare) is type(model)


@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize("options", [{}, {"budget": 0.01, "linear": "exact"}, {"budget": 0.01, "linear": "int8"}])
def test_nothing_is_chosen_without_a_budget_or_where_the_layers_are_named(options: dict[str, Any]) -> None:
    model = memoize(MODELS["BERT"](), reuse="none", **options)
    assert model.attmemo.stats()["linear_choice"] is None
    assert model.attmemo.stats()["linear"] == options.get("linear", "exact")


@pytest.mark.usefixtures("faster")
def test_a_folder_keeps_records_of_exact_layers(tmp_path: Any) -> None:
    model = memoize(FAMILIES["BERT classifier"].make(), budget=0.1, database=tmp_path / "own", max_bytes=1 << 24)
    assert model.attmemo.stats()["linear_choice"] is None


class Random(nn.Module):
    """A head whose answers cannot be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = MODELS["BERT"]()
        self.config = self.base_model.config

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> str:
        self.base_model(input_ids, attention_mask)
        return "no tensor"


@pytest.mark.usefixtures("faster")
def test_a_model_whose_answers_cannot_be_compared_stays_exact(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "attmemo")
    model = memoize(Random().eval(), budget=0.01)
    assert model.attmemo.stats()["linear_choice"] is None
    assert "nothing can be compared" in caplog.text
