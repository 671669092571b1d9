"""8-bit linear layers within a budget: exact answers until they are proven, exact ones again if too many change."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import FAMILIES
from guard_tools import gaps, word
from packed_models import MODELS, Inputs, batch, pair
from torch import Tensor, nn

from attmemo import memoize
from attmemo.forward.batch_slices import ids_in
from attmemo.guard import linear_choice
from attmemo.guard.certificate import Certificate, highest_rate
from attmemo.guard.linear_choice import AT_ONCE, MOST, keys_of
from attmemo.guard.margin import ROUNDED, Margin
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


def with_rows(bare: Any, **options: Any) -> Any:
    """A copy under a budget, with records in memory."""
    return memoize(copy.deepcopy(bare), budget=0.1, gate=False, max_bytes=1 << 24, **options)


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


def classifier(**options: Any) -> tuple[Any, Any]:
    """A bare classifier of random weights whose classes are near each other, and the same under a budget."""
    bare = FAMILIES["BERT classifier"].make()
    with torch.no_grad():
        bare.classifier.weight.mul_(3.0)
    return bare, memoize(copy.deepcopy(bare), **{"budget": 0.02, "reuse": "none", "gate": False} | options)


def serve(model: Any, margin: float = 0.0) -> None:
    """Have 8 bits serve with this margin, whatever is proven."""
    model.attmemo.choice.least = margin
    model.attmemo.choice._serve()


def margins_of(logits: Tensor) -> Tensor:
    best = logits.softmax(-1).topk(2, -1).values
    return best[:, 0] - best[:, 1]


def count(model: Any, samples: list[tuple[bool, float | None]]) -> dict[str, Any]:
    """Compared answers of inputs that are all different: what became of the choice."""
    model.attmemo.choice._count(samples, [None] * len(samples))
    return choice(model)


@pytest.mark.usefixtures("faster", "never_drawn")
class TestMargin:
    def test_answers_below_the_margin_are_exact_and_the_others_in_8_bits(self) -> None:
        bare, model = classifier()
        exact, rounded = (memoize(copy.deepcopy(bare), reuse="none", linear=linear) for linear in ("exact", "int8"))
        inputs = next(batches(1))
        expected, given = answers(exact, inputs), answers(rounded, inputs)
        middle = float(margins_of(given).median())
        serve(model, middle)
        low = margins_of(given) < middle
        assert 0 < int(low.sum()) < SIZE
        found = answers(model, inputs)
        assert torch.allclose(found[low], expected[low], atol=1e-5)
        assert torch.equal(found[~low], given[~low])
        assert not torch.allclose(given[low], expected[low], atol=1e-5)
        stats = model.attmemo.stats()
        assert (stats["sequences"], stats["failures"]) == (SIZE, {})
        assert stats["rows_computed"] > stats["tokens"], "those below the margin count twice"

    def test_changes_near_another_class_cost_a_margin_and_no_proof(self) -> None:
        """1.6 % of the answers change, all of them below .04: that is too near to 2 % without a margin."""
        near = [(number % 2 == 0, 0.03) for number in range(8)]
        samples = [*near, *[(False, 0.8)] * 242]
        _, model = classifier()
        for _ in range(4):
            found = count(model, samples)
        assert (found["state"], found["margin"]) == ("int8", 0.05)
        assert found["share_below"] == pytest.approx(0.032)
        assert found["changed"] == 0
        assert "margin below 0.05 are exact" in found["says"]
        _, plain = classifier()
        for _ in range(2 * MOST // len(samples)):
            found = count(plain, [(changed, None) for changed, _ in samples])
        assert found["state"] == "exact"

    def test_where_nothing_changes_nothing_is_computed_twice(self) -> None:
        _, model = classifier()
        for _ in range(20):
            found = count(model, [(False, 0.001), *[(False, 0.5)] * 15])
            if found["state"] != "proving":
                break
        assert (found["state"], found["margin"], found["share_below"]) == ("int8", 0.0, 0.0)
        assert found["compared"] <= 176, "0.98 ** 149 is the first power below 5 %, and stakes are spread"

    def test_a_margin_below_which_too_much_lies_does_not_serve(self) -> None:
        """At a speed of 2, 8 bits and a third of all computed twice are 1.2 times as fast."""
        _, model = classifier()
        samples = [(True, 0.005), *[(False, 0.005)] * 9, *[(False, 0.5)] * 10]
        while choice(model)["state"] == "proving":
            found = count(model, samples)
        assert found["state"] == "exact"
        assert found["compared"] >= MOST

    def test_a_margin_that_is_too_low_by_now_ends_8_bits(self) -> None:
        _, model = classifier()
        count(model, [(False, 0.5)] * 320)
        assert choice(model)["state"] == "int8"
        for _ in range(20):
            found = count(model, [(True, 0.9)])
        assert found["state"] == "exact"
        assert "too many answers changed" in found["says"]

    def test_what_cannot_be_computed_again_ends_8_bits_and_is_exact(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bare, model = classifier()
        exact = memoize(copy.deepcopy(bare), reuse="none")
        serve(model, 0.5)
        monkeypatch.setattr(model.attmemo.choice._answers, "read", broken)
        inputs = next(batches(1))
        assert torch.equal(answers(model, inputs), answers(exact, inputs))
        assert choice(model)["state"] == "exact"
        assert model.attmemo.stats()["failed"] == 1


def broken(*_: Any) -> Any:
    raise ValueError("no answer")


@pytest.mark.parametrize("seed", range(3))
def test_the_margin_is_the_lowest_one_that_is_proven_with_all_above_it(seed: int) -> None:
    chance, budget = random.Random(seed), 0.02
    margin = Margin(budget, ROUNDED, Certificate(budget, 0.95).rules_out)
    seen = list[tuple[float, bool]]()
    for number in range(600):
        own = chance.random() ** 3
        seen.append((own, chance.random() < 0.2 * (own < 0.03)))
        margin.request(1.0, 1.0)
        margin.sample(*seen[-1])
        if number % 40 == 39:
            proven = math.inf
            for step in reversed(ROUNDED.steps[:-1]):
                changed = sum(one for at, one in seen if at >= step)
                if highest_rate(changed, len(seen) - changed, 0.95) > budget:
                    break
                proven = step
            assert margin.least == proven


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
    model = with_rows(bare)
    assert model.attmemo.reuse == "rows"
    assert model.attmemo.stats()["guard"]["budget"] == 0.1
    guard = model.attmemo.guarded.guard
    guard.compared(Verdict.LEARN, gaps(word(1, 2, 3)), Evidence.UNKNOWN, None, False)
    answers(model, next(batches(1)))
    assert model.attmemo.flush()
    assert model.attmemo.stats()["records"] > 0
    serve(model)
    stats = model.attmemo.stats()
    assert (stats["linear"], stats["guard"]["budget"], stats["guard"]["requests"]) == ("int8", 0.05, 0)
    assert stats["guard"]["changes_known"] == 2, "what left an answer as it was is not forgotten"


@pytest.mark.usefixtures("faster")
def test_a_proof_computes_exact_answers_again_only_where_records_gave_some(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_rows(FAMILIES["BERT classifier"].make())
    own = model.attmemo.choice
    again, beside = list[bool](), own._beside
    monkeypatch.setattr(own, "_beside", lambda part, packed: again.append(packed is own.exact) or beside(part, packed))
    inputs = next(batches(1))
    answers(model, inputs)
    assert again == [False]
    assert model.attmemo.flush()
    own._seen.clear()
    answers(model, inputs)
    assert model.attmemo.stats()["repeated"] == SIZE
    assert again == [False, True, False]


@pytest.mark.usefixtures("faster", "never_drawn")
def test_once_8_bits_serve_a_text_has_the_same_bits_with_a_record_and_without() -> None:
    bare = FAMILIES["BERT classifier"].make()
    rounded = memoize(copy.deepcopy(bare), linear="int8")
    model = with_rows(bare)
    inputs = next(batches(1))
    answers(model, inputs)
    assert model.attmemo.flush()
    assert model.attmemo.stats()["records"] == SIZE
    serve(model)
    assert model.attmemo.stats()["records"] == 0, "exact layers made them"
    for _ in range(2):
        assert torch.equal(answers(model, inputs), answers(rounded, inputs))
        assert model.attmemo.flush()
    assert model.attmemo.stats()["repeated"] == SIZE


@pytest.mark.usefixtures("faster", "never_drawn")
def test_once_8_bits_serve_namespaces_have_their_bits_too_also_one_that_is_open() -> None:
    bare = FAMILIES["BERT classifier"].make()
    rounded = memoize(copy.deepcopy(bare), linear="int8")
    model = with_rows(bare, namespaces=2)
    inputs = next(batches(1))
    with model.attmemo.namespace("a"):
        answers(model, inputs)
        assert model.attmemo.flush()
        serve(model)
        assert torch.equal(answers(model, inputs), answers(rounded, inputs))
        assert model.attmemo.flush()
        assert torch.equal(answers(model, inputs), answers(rounded, inputs))
    with model.attmemo.namespace("a"):
        assert torch.equal(answers(model, inputs), answers(rounded, inputs))


@pytest.mark.usefixtures("faster", "never_drawn")
def test_what_a_forward_offers_that_began_before_8_bits_served_is_not_kept() -> None:
    model = with_rows(FAMILIES["BERT classifier"].make())
    guarded, inputs = model.attmemo.guarded, next(batches(1))
    own = guarded._offer

    def late(*given: Any) -> None:
        serve(model)
        own(*given)

    guarded._offer = late
    answers(model, inputs)
    assert model.attmemo.flush()
    stats = model.attmemo.stats()
    assert (stats["linear"], stats["records"], stats["offered"]) == ("int8", 0, {"other_layers": SIZE})


@pytest.mark.usefixtures("faster", "never_drawn")
@pytest.mark.parametrize("autocast", [False, True])
def test_what_no_blocks_computed_proves_nothing(autocast: bool) -> None:
    model = memoize(FAMILIES["BERT classifier"].make(), budget=0.1, linear="auto", reuse="none", gate=False)
    for inputs in batches(3):
        with torch.inference_mode(), torch.autocast("cpu", enabled=autocast):
            model(**inputs, output_hidden_states=not autocast)
    assert choice(model)["compared"] == 0
    answers(model, next(batches(1, 50)))
    assert choice(model)["compared"] > 0


@pytest.mark.usefixtures("faster", "never_drawn")
def test_where_records_of_exact_layers_do_not_go_8_bits_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = FAMILIES["BERT classifier"].make()
    exact = memoize(copy.deepcopy(bare))
    model = with_rows(bare)
    store = model.attmemo.engine.reuse.store
    monkeypatch.setattr(store, "flush", lambda *_: False)
    serve(model)
    assert choice(model)["state"] == "exact"
    assert model.attmemo.stats()["guard"]["budget"] == 0.1, "rows have all of it"
    inputs = next(batches(1))
    assert torch.equal(answers(model, inputs), answers(exact, inputs))


@pytest.mark.usefixtures("faster", "never_drawn")
def test_records_of_8_bit_layers_serve_no_exact_ones() -> None:
    bare = FAMILIES["BERT classifier"].make()
    exact = memoize(copy.deepcopy(bare), reuse="none")
    model = with_rows(bare)
    inputs = next(batches(1))
    serve(model)
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


def test_inputs_that_differ_behind_padding_have_keys_of_their_own() -> None:
    ids = torch.tensor([[0, 0, 0, 5, 6], [0, 0, 0, 5, 7], [5, 6, 0, 0, 0]])
    keys = keys_of(ids, (ids != 0).long(), range(3))
    assert keys[0] != keys[1], "the padding is on the left"
    assert keys[0] == keys[2]


def test_token_ids_are_found_inside_of_features_too() -> None:
    ids = torch.ones(2, 3, dtype=torch.int64)
    assert ids_in({"features": {"input_ids": ids}}) is ids
    assert ids_in({"input_ids": ids}) is ids
    assert ids_in({"pixel_values": ids}) is None
