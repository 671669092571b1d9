"""The gate: trying where it cannot pay makes a model slower than the bare one."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attmemo.perfmodel.cost import CostModel
from attmemo.perfmodel.gate import Gate
from attmemo.perfmodel.profile import SEQUENCE, HitRates, LayerCosts, Profile

SETTINGS = settings(max_examples=80, deadline=None, derandomize=True)
FREE = CostModel(0.0, 0.0, 0.0)

costs = st.builds(CostModel, st.floats(0.0, 0.1), st.floats(0.0, 1e-3), st.floats(0.0, 2.0))
batches = st.lists(st.integers(1, 64), min_size=1, max_size=32)
score_lists = st.lists(st.floats(0.0, 1.0), min_size=8, max_size=20)


def a_profile(
    *, exact: float = 10.0, hit: float = 2.0, lookup: float = 0.8, rate: float = 0.5, layers: int = 2
) -> Profile:
    """Costs per call whatever the lengths, break-even = lookup / (exact - hit) = 10 %, rate at threshold 0.5."""
    served = round(100 * rate)
    scores = [0.9] * served + [0.1] * (100 - served)
    rates = HitRates({(layer, 16): scores for layer in range(layers)})
    return Profile(
        [LayerCosts(CostModel(0, 0, exact), CostModel(0, 0, hit), CostModel(0, 0, lookup))] * layers,
        rates,
        rates,
        CostModel(0, 0, lookup),
        threads=2,
        dtype="float32",
    )


def a_gate(lookup: Any = "layer", *, layers: int = 2) -> Gate:
    return Gate(a_profile(layers=layers), [0.5] * layers, lookup, layers)


def serve(gate: Gate, rate: float, batches: int, *, rows: int = 32, layer: int = 0) -> list[bool]:
    """Serve batches of which `rate` of the sequences hit; the answers of the gate."""
    answers = []
    for _ in range(batches):
        verdict = gate.ask(layer, [16] * rows, 16)
        answers.append(verdict.tries)
        if verdict.tries:
            gate.record(verdict, round(rate * rows))
        else:
            gate.leave(verdict)
    return answers


def serve_misses_until_off(gate: Gate, *, layer: int = 0) -> None:
    """Serve misses until a batch is left alone; that batch is the first of the wait."""
    for _ in range(100):
        if not serve(gate, 0.0, 1, layer=layer)[0]:
            return
    pytest.fail("3,200 misses in a row did not switch the lookup off")


# -- the prediction


@SETTINGS
@given(costs, costs, costs, score_lists, score_lists, batches, st.integers(0, 64), st.floats(0.0, 1.0))
def test_the_answer_is_that_of_the_formula(
    exact: CostModel,
    hit: CostModel,
    lookup: CostModel,
    short: list[float],
    long: list[float],
    lengths: list[int],
    padding: int,
    threshold: float,
) -> None:
    # lengths 1..32 and 33..63 have rates of their own, 64 has no record
    scores = {(0, n): short if n <= 32 else long for n in range(1, 64)}
    # scores of the other kind of lookup, which must not matter
    profile = Profile(
        [LayerCosts(exact, hit, lookup)], HitRates(scores), HitRates({(0, 64): [1.0]}), FREE, 1, "float32"
    )
    padded = max(lengths) + padding
    alpha = 0.0
    for n in lengths:
        own = short if n <= 32 else long
        alpha += 0.0 if n == 64 else sum(s >= threshold for s in own) / len(own)
    alpha /= len(lengths)
    saving = exact.estimate_lengths([padded] * len(lengths)) - hit.estimate_lengths(lengths)
    benefit = alpha * saving - lookup.estimate_lengths(lengths) if saving > 0 else -1.0
    assume(abs(benefit) > 1e-9)  # at exactly 0 the order of additions would decide
    gate = Gate(profile, [threshold], "layer", 1)
    verdict = gate.ask(0, lengths, padded)
    assert verdict.tries is (benefit > 0.0)
    assert verdict.pays(0, lengths) is (saving > 0.0)


@SETTINGS
@given(
    st.lists(st.tuples(costs, costs, score_lists, st.floats(0.0, 1.0)), min_size=1, max_size=6),
    costs,
    batches,
    st.integers(0, 64),
)
def test_one_lookup_for_all_layers_sums_what_each_gains_at_its_own_rate_and_pays_once(
    layers: list[tuple[CostModel, CostModel, list[float], float]], lookup: CostModel, lengths: list[int], padding: int
) -> None:
    dear = CostModel(1.0, 1.0, 1e6)  # lookups by layer are not made, so their cost must not matter
    profile = Profile(
        [LayerCosts(exact, hit, dear) for exact, hit, _, _ in layers],
        HitRates({(0, 64): [1.0]}),  # nor what they would find
        HitRates({(i, n): layer[2] for i, layer in enumerate(layers) for n in range(1, 49)}),
        lookup,
        threads=1,
        dtype="float32",
    )
    padded = max(lengths) + padding
    known = sum(n < 49 for n in lengths) / len(lengths)  # sequences with a record
    alphas = [known * sum(s >= threshold for s in scores) / len(scores) for _, _, scores, threshold in layers]
    savings = [
        exact.estimate_lengths([padded] * len(lengths)) - hit.estimate_lengths(lengths) for exact, hit, _, _ in layers
    ]
    benefit = sum(alpha * saving for alpha, saving in zip(alphas, savings, strict=True) if saving > 0.0)
    benefit -= lookup.estimate_lengths(lengths)
    assume(abs(benefit) > 1e-9 and all(abs(saving) > 1e-9 for saving in savings))
    gate = Gate(profile, [threshold for _, _, _, threshold in layers], "sequence", len(layers))
    verdict = gate.ask(SEQUENCE, lengths, padded)
    assert verdict.tries is (benefit > 0.0)
    gate.leave(verdict)
    state = gate.state()
    assert state[0]["predicted_benefit_ms"] == pytest.approx(benefit)
    assert state[0]["predicted_hit_rate"] == pytest.approx(sum(alphas) / len(alphas))
    assert [row["predicted_hit_rate"] for row in state[1:]] == pytest.approx(alphas)
    assert [verdict.pays(i, lengths) for i in range(len(layers))] == [saving > 0.0 for saving in savings]


def test_exact_attention_is_charged_at_the_padded_length_and_a_hit_at_the_valid_ones() -> None:
    linear = CostModel(1.0, 0.0, 0.0)
    rates = HitRates({(0, 16): [0.9] * 8})
    profile = Profile([LayerCosts(linear, linear, CostModel(0, 0, 1.0))], rates, rates, FREE, 1, "float32")
    gate = Gate(profile, [0.5], "layer", 1)
    assert not gate.ask(0, [16, 16], 16).tries  # nothing saved, one lookup paid
    assert gate.ask(0, [16, 16], 512).tries


def test_each_layer_has_its_own_threshold() -> None:
    profile = a_profile(rate=0.5)
    assert [Gate(profile, [0.5, 0.95], "layer", 2).ask(i, [16], 16).tries for i in (0, 1)] == [True, False]


def test_a_length_without_records_is_left_alone() -> None:
    assert not a_gate().ask(0, [17, 17], 17).tries
    assert not a_gate("sequence").ask(SEQUENCE, [17, 17], 17).tries


def test_asking_changes_nothing() -> None:
    gate = a_gate()
    serve(gate, 0.0, 1)  # switched off, 16 batches to wait
    before = gate.state()
    for _ in range(100):
        assert not gate.ask(0, [16] * 32, 16).tries
    assert gate.state() == before


def test_an_empty_batch_is_not_worth_a_lookup() -> None:
    assert not a_gate().ask(0, [], 0).tries
    assert not a_gate("sequence").ask(SEQUENCE, [], 0).tries


@pytest.mark.parametrize("lookup", ["layer", "sequence"])
def test_without_a_profile_or_when_asked_to_every_batch_is_tried(lookup: Any) -> None:
    layer = SEQUENCE if lookup == "sequence" else 0
    hopeless = a_profile(rate=0.0)
    for gate in (Gate(None, [0.5] * 2, lookup, 2), Gate(hopeless, [0.5] * 2, lookup, 2, always=True)):
        for _ in range(100):
            verdict = gate.ask(layer, [16] * 32, 16)
            assert verdict.tries
            assert verdict.pays(1, [16])
            gate.record(verdict, 0)
        state = gate.state()[0]
        assert state["on"]
        assert state["hit_rate"] == 0.0
        assert state["queries"] == 3200
    assert "no profile" in Gate(None, [0.5] * 2, lookup, 2).state()[0]["why"]
    assert "request" in Gate(hopeless, [0.5] * 2, lookup, 2, always=True).state()[0]["why"]


# -- drift


@pytest.mark.parametrize(("lookup", "layer"), [("layer", 0), ("sequence", SEQUENCE)])
def test_a_live_rate_below_break_even_switches_off_and_a_probe_switches_on_again(lookup: Any, layer: int) -> None:
    gate = a_gate(lookup)
    assert serve(gate, 0.5, 3, layer=layer) == [True] * 3
    serve_misses_until_off(gate, layer=layer)
    off = gate.state()[0]
    assert not off["on"]
    assert "below break-even" in off["why"]
    assert 0.0 < off["hit_rate"] < off["break_even"]
    # one batch was left alone above; the rest of the 16, then a probe that finds the hits back
    assert serve(gate, 0.5, 15, layer=layer) == [False] * 15
    assert serve(gate, 0.5, 5, layer=layer) == [True] * 5
    assert gate.state()[0]["on"]


def test_break_even_is_the_lookup_over_the_saving() -> None:
    gate = Gate(a_profile(layers=2), [0.5] * 2, "sequence", 2)
    serve(gate, 0.5, 2, layer=SEQUENCE)
    assert gate.state()[0]["break_even"] == pytest.approx(0.8 / (2 * (10.0 - 2.0)))


def test_a_few_queries_do_not_switch_anything_off() -> None:
    gate = a_gate()
    assert serve(gate, 0.0, 31, rows=1) == [True] * 31
    assert serve(gate, 0.0, 2, rows=1) == [True, False]


def test_failed_probes_double_the_wait_up_to_the_limit() -> None:
    gate = a_gate()
    assert serve(gate, 0.0, 1) == [True]
    for wait in (16, 32, 64, 128, 256, 512, 1024, 1024, 1024):
        assert serve(gate, 0.0, wait + 1) == [False] * wait + [True]


def test_a_probe_of_single_requests_is_judged_on_several_of_them() -> None:
    gate = a_gate()
    serve(gate, 0.0, 1)
    assert serve(gate, 0.0, 16 + 16 + 1, rows=1) == [False] * 16 + [True] * 16 + [False]
    assert "probing" not in gate.state()[0]["why"]


def test_a_probe_barely_above_break_even_does_not_switch_on() -> None:
    gate = a_gate()  # break-even 10 %, so a probe needs 12.5 %
    serve(gate, 0.0, 1, rows=100)
    assert serve(gate, 0.11, 18, rows=100) == [False] * 16 + [True, False]
    gate = a_gate()
    serve(gate, 0.0, 1, rows=100)
    assert serve(gate, 0.13, 18, rows=100) == [False] * 16 + [True, True]


def test_a_break_even_near_one_can_still_be_probed_on() -> None:
    gate = Gate(a_profile(lookup=7.2, rate=1.0), [0.5] * 2, "layer", 2)  # 90 %: 1.25 times that is out of reach
    serve(gate, 0.0, 1)
    assert serve(gate, 1.0, 19) == [False] * 16 + [True] * 3


def test_a_layer_that_flaps_is_probed_ever_more_rarely() -> None:
    gate = a_gate()
    serve(gate, 0.0, 1, rows=100)
    for wait in (16, 32, 64):
        assert serve(gate, 0.13, wait + 1, rows=100) == [False] * wait + [True]  # the probe succeeds ...
        assert gate.state()[0]["on"]
        assert serve(gate, 0.0, 1, rows=100) == [True]  # ... and at once nothing hits any more
        assert not gate.state()[0]["on"]


def test_a_layer_that_has_held_starts_with_the_short_wait_again() -> None:
    gate = a_gate()
    for _ in range(2):
        serve_misses_until_off(gate)
        assert serve(gate, 0.9, 15) == [False] * 15
        assert all(serve(gate, 0.9, 50))


def test_batches_that_the_prediction_leaves_alone_do_not_bring_the_probe_nearer() -> None:
    gate = a_gate()
    serve(gate, 0.0, 1)
    for _ in range(100):
        verdict = gate.ask(0, [17], 17)
        assert not verdict.tries
        gate.leave(verdict)
    assert serve(gate, 0.0, 17) == [False] * 16 + [True]


def test_layers_drift_apart() -> None:
    gate = a_gate()
    serve(gate, 0.0, 1, layer=0)
    serve(gate, 0.9, 1, layer=1)
    assert [row["on"] for row in gate.state()] == [False, True]


def test_a_late_report_from_another_thread_does_not_count_as_a_probe() -> None:
    gate = a_gate()
    verdict = gate.ask(0, [16] * 32, 16)
    assert verdict.tries
    serve(gate, 0.0, 1)
    gate.record(verdict, 32)  # begun before the switch
    assert not gate.state()[0]["on"]
    assert gate.state()[0]["queries"] == 64
    assert serve(gate, 0.0, 17) == [False] * 16 + [True]


def test_threads_lose_no_counts() -> None:
    gate = a_gate()

    def work() -> None:
        for _ in range(200):
            gate.record(gate.ask(0, [16] * 4, 16), 2)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (gate.state()[0]["queries"], gate.state()[0]["hits"]) == (3200, 1600)


# -- words


def test_the_state_says_why_in_json() -> None:
    gate = Gate(a_profile(lookup=5.0, rate=0.5), [0.5] * 2, "layer", 2)
    assert "no batch" in gate.state()[0]["why"]
    gate.leave(gate.ask(0, [16], 16))
    row = json.loads(json.dumps(gate.state(), allow_nan=False))[0]
    assert row["why"] == "predicted benefit -1 ms"
    assert row["predicted_benefit_ms"] == pytest.approx(0.5 * 8.0 - 5.0)
    assert not row["on"]
    assert "threshold" in Gate(a_profile(rate=0.0), [0.5] * 2, "layer", 2).state()[0]["why"]


def test_a_layer_that_loses_by_hits_is_reported_off_although_the_lookup_is_on() -> None:
    good = LayerCosts(CostModel(0, 0, 10.0), CostModel(0, 0, 2.0), FREE)
    bad = LayerCosts(CostModel(0, 0, 1.0), CostModel(0, 0, 1.5), FREE)
    rates = HitRates({(layer, 16): [0.9] * 8 for layer in (0, 1)})
    profile = Profile([good, bad], HitRates({}), rates, FREE, 1, "float32")
    gate = Gate(profile, [0.5] * 2, "sequence", 2)
    verdict = gate.ask(SEQUENCE, [16], 16)
    assert verdict.tries
    assert [verdict.pays(layer, [16]) for layer in (0, 1)] == [True, False]
    gate.record(verdict, 0.5)
    rows = gate.state()
    assert [(row["layer"], row["on"]) for row in rows] == [(SEQUENCE, True), (0, True), (1, False)]
    assert rows[2]["why"] == "a hit costs 0.5 ms more than exact attention"


def test_a_profile_of_other_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="2 layers, the model has 3"):
        Gate(a_profile(), [0.5] * 3, "layer", 3)


# -- one lookup, thresholds that differ


def test_one_lookup_may_pay_for_the_layers_with_a_low_threshold_alone() -> None:
    # lookup 0.8 ms, 8 ms saved by a hit; half of the scores are 0.9, the others 0.1
    def benefit(thresholds: list[float]) -> float:
        gate = Gate(a_profile(), thresholds, "sequence", 2)
        verdict = gate.ask(SEQUENCE, [16], 16)
        assert verdict.tries
        return verdict.benefit

    assert benefit([0.05, 0.5]) == pytest.approx(1.0 * 8.0 + 0.5 * 8.0 - 0.8)
    assert benefit([0.95, 0.5]) == pytest.approx(0.0 * 8.0 + 0.5 * 8.0 - 0.8)
    assert not Gate(a_profile(), [0.95, 0.95], "sequence", 2).ask(SEQUENCE, [16], 16).tries


def test_thresholds_that_no_layer_reaches_are_reported_before_the_first_batch() -> None:
    assert Gate(a_profile(), [0.95, 0.5], "sequence", 2).state()[0]["on"]
    row = Gate(a_profile(), [0.95, 0.95], "sequence", 2).state()[0]
    assert not row["on"]
    assert "threshold" in row["why"]


def test_the_mean_over_layers_of_the_sequences_served_is_compared_with_break_even() -> None:
    gate = Gate(a_profile(lookup=4.8, layers=3), [0.5] * 3, "sequence", 3)  # break-even 4.8 / (3 * 8) = 20 %
    for _ in range(20):
        gate.record(gate.ask(SEQUENCE, [16] * 32, 16), (20 + 1 + 0) / 3)  # 22 %
    state = gate.state()[0]
    assert state["hit_rate"] == pytest.approx(7 / 32)
    assert state["hits"] == pytest.approx(20 * 7)
    assert state["break_even"] == pytest.approx(0.2)
    assert serve_mean(gate, (15 + 1 + 0) / 3)  # 17 %: switched off in the end


def serve_mean(gate: Gate, hits: float) -> bool:
    """Whether batches of 32 sequences with this mean of hits get the lookup switched off."""
    for _ in range(50):
        verdict = gate.ask(SEQUENCE, [16] * 32, 16)
        if not verdict.tries:
            return True
        gate.record(verdict, hits)
    return False


def test_the_state_does_not_pass_the_mean_off_as_the_rate_of_a_layer() -> None:
    gate = Gate(a_profile(), [0.05, 0.5], "sequence", 2)
    gate.record(gate.ask(SEQUENCE, [16] * 4, 16), 2.5)
    shared, *layers = json.loads(json.dumps(gate.state(), allow_nan=False))
    assert (shared["queries"], shared["hits"], shared["hit_rate"]) == (4, 2.5, 0.625)
    assert [row["predicted_hit_rate"] for row in layers] == [1.0, 0.5]
    assert [(row["queries"], row["hits"], row["hit_rate"]) for row in layers] == [(4, None, None)] * 2


class TestMixedBatches:
    """A few hits in a large batch: serving them would cost more than it saves."""

    def gate(self, miss: CostModel | None, **options: Any) -> Gate:
        profile = a_profile()
        exact, hit = CostModel(0.01, 0.0, 1.0), CostModel(0.001, 0.0, 0.2)
        costs = [LayerCosts(exact, hit, CostModel(0, 0, 0.1), miss)] * 2
        return Gate(
            Profile(costs, profile.rates, profile.rates_sequence, profile.lookup_sequence, 2, "float32"),
            [0.5, 0.5],
            "layer",
            2,
            **options,
        )

    def test_are_served_from_the_number_of_hits_on_that_pays(self) -> None:
        # The whole: 1 + 0.01 * 320 = 4.2 ms. Two parts: 0.2 + 0.001 * 10 h, and 1.5 + 0.011 * 10 (32 - h).
        gate = self.gate(CostModel(0.011, 0.0, 1.5))
        verdict = gate.ask(0, [10] * 32, 10)
        pays = [verdict.pays(0, [10] * hits) for hits in range(1, 33)]
        expected = [0.2 + 0.01 * h + (1.5 + 0.11 * (32 - h) if h < 32 else 0.0) < 4.2 for h in range(1, 33)]
        assert pays == expected
        assert not pays[0]
        assert pays[-1]

    def test_are_always_served_where_the_cost_of_misses_is_unknown_or_by_request(self) -> None:
        dear = CostModel(1.0, 0.0, 100.0)
        assert not self.gate(dear).ask(0, [10] * 32, 10).pays(0, [10])
        assert self.gate(None).ask(0, [10] * 32, 10).pays(0, [10])
        assert self.gate(dear, always=True).ask(0, [10] * 32, 10).pays(0, [10])
        assert Gate(None, [0.5] * 2, "layer", 2).ask(0, [10] * 32, 10).pays(0, [10])

    def test_the_cost_of_misses_survives_being_stored(self) -> None:
        profile = self.gate(CostModel(0.011, 0.0, 1.5))._profile
        assert profile is not None
        assert Profile.from_dict(json.loads(json.dumps(profile.to_dict()))).costs == profile.costs
        assert Profile.from_dict(a_profile().to_dict()).costs[0].miss is None


class TestHopeless:
    def test_only_if_no_held_out_score_reaches_a_threshold(self) -> None:
        for lookup in ("layer", "sequence"):
            assert Gate(a_profile(), [0.95] * 2, lookup, 2).hopeless
            assert not Gate(a_profile(), [0.9] * 2, lookup, 2).hopeless
            assert not Gate(a_profile(), [0.95, 0.9], lookup, 2).hopeless
            assert not Gate(a_profile(), [0.95] * 2, lookup, 2, always=True).hopeless
            assert not Gate(None, [0.95] * 2, lookup, 2).hopeless
