"""The online engine with maps: decisions do not depend on the batch, and nothing is left over between calls."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from maps_tools import LOOKUPS, MAX_LENGTH, Case, Inputs, close, handle_of, logits, states, valid_states
from torch import Tensor

from attmemo.errors import WindowError
from attmemo.forward.engine import Engine
from attmemo.forward.plan import Plan
from attmemo.profiler.models import Tokens


def hit_rows(model: Any, inputs: Inputs) -> list[list[bool]]:
    """Which rows hit, for every layer: seen where the engine counts."""
    engine = handle_of(model).engine
    count, seen = engine.counters.call, {}

    def watched(layer: int, plan: Any, sequences: int, *rest: float) -> None:
        share = plan.layers.get(layer)
        seen[layer] = [share is not None and place in share.sequences for place in range(sequences)]
        count(layer, plan, sequences, *rest)

    engine.counters.call = watched  # type: ignore[method-assign]
    try:
        logits(model, inputs)
    finally:
        del engine.counters.call
    nothing = [False] * len(inputs["input_ids"])
    return [seen.get(layer, nothing) for layer in range(engine.layers)]


def split_radius(distances: Sequence[float]) -> float:
    """A radius in the widest gap around the middle: no rounding carries a distance across."""
    near = np.sort(np.asarray(distances, np.float64))
    near = near[len(near) // 4 : 3 * len(near) // 4 + 1]
    widest = int(np.argmax(np.diff(near)))
    return float(near[widest : widest + 2].mean())


def serve_half(case: Case, lookup: str, items: Sequence[Tokens]) -> Any:
    """A model that serves about half of these texts in each layer."""
    model = case.serve(0.0, lookup=lookup)
    engine = handle_of(model).engine
    found: dict[int, list[float]] = {}
    find = engine.planner.index.find

    def watched(layer: int, hidden: Tensor, lengths: Sequence[int]) -> Any:
        outcome = find(layer, hidden, lengths)
        found.setdefault(layer, []).extend(outcome.distances[np.isfinite(outcome.distances)].tolist())
        return outcome

    engine.planner.index.find = watched  # type: ignore[method-assign]
    for item in items:
        logits(model, case.inputs([item]))
    del engine.planner.index.find
    if lookup == "sequence":
        engine.planner.set_radii([split_radius(found[-1])] * engine.layers)
    else:
        engine.planner.set_radii([split_radius(found[layer]) for layer in range(engine.layers)])
    return model


@pytest.fixture(scope="module")
def half_served(case: Case) -> Callable[[str], Any]:
    """A model that serves about half of `pool`, made once for each kind of lookup."""
    return functools.cache(lambda lookup: serve_half(case, lookup, pool(case)))


def pool(case: Case) -> list[Tokens]:
    return [*case.fresh[:6], *case.short[:4], *case.stored[:4]]


@pytest.mark.parametrize("lookup", LOOKUPS)
class TestDecisions:
    """A hit is decided from the row alone."""

    def test_do_not_depend_on_the_batch(self, case: Case, lookup: str) -> None:
        items = [*case.fresh[:14], *case.short[:3], *case.stored[:3]]
        model = serve_half(case, lookup, items)
        alone = [[rows[0] for rows in hit_rows(model, case.inputs([item]))] for item in items]
        assert 4 < sum(hits[0] for hits in alone) < len(items) - 4, "this test needs hits and misses"
        generator = np.random.default_rng(0)
        for size in (2, 3, 7, len(items)):
            order = generator.permutation(len(items))
            for start in range(0, len(order), size):
                part = [int(place) for place in order[start : start + size]]
                found = hit_rows(model, case.inputs([items[place] for place in part]))
                for row, place in enumerate(part):
                    assert [layer[row] for layer in found] == alone[place]

    def test_do_not_depend_on_the_padding(self, case: Case, lookup: str) -> None:
        items = case.fresh[:12]
        model = serve_half(case, lookup, items)
        found = [hit_rows(model, case.inputs(items, padded)) for padded in (0, MAX_LENGTH + 1, 64, 96)]
        assert 0 < sum(found[0][0]) < len(items)
        assert all(other == found[0] for other in found[1:])

    def test_do_not_depend_on_the_number_of_threads(self, case: Case, lookup: str) -> None:
        items = case.fresh[:16]
        model, inputs = serve_half(case, lookup, items), case.inputs(items)
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            one, first = hit_rows(model, inputs), logits(model, inputs)
            torch.set_num_threads(2)
            two, second = hit_rows(model, inputs), logits(model, inputs)
        finally:
            torch.set_num_threads(before)
        assert one == two
        assert close(first, second)
        assert 0 < sum(one[0]) < len(items)

    @settings(derandomize=True, deadline=None, max_examples=15)
    @given(data=st.data())
    def test_and_outputs_are_those_of_the_row_alone_in_any_batch(
        self, case: Case, half_served: Callable[[str], Any], lookup: str, data: Any
    ) -> None:
        model, texts = half_served(lookup), pool(case)
        places = data.draw(st.lists(st.integers(0, len(texts) - 1), min_size=1, max_size=9))
        padded = data.draw(st.sampled_from([0, MAX_LENGTH, 70]))
        items = [texts[place] for place in places]
        handle_of(model).reset_stats()
        inputs = case.inputs(items, padded)
        together = valid_states(model, inputs)
        hits = handle_of(model).stats()["hits"]
        handle_of(model).reset_stats()
        for row, item in enumerate(items):
            assert close(together[row], states(model, case.inputs([item]))[0], 2e-5)
        assert handle_of(model).stats()["hits"] == hits


class Boom(Exception):
    """A forward that ends in the middle."""


@pytest.mark.parametrize("lookup", LOOKUPS)
class TestNothingIsStale:
    def test_a_forward_of_another_shape_is_served_as_if_it_were_the_first(self, case: Case, lookup: str) -> None:
        batches = [
            case.inputs(case.fresh[:3]),
            case.inputs(case.fresh[3:8], 60),
            case.inputs(case.stored[:1]),
            case.inputs([*case.short[:2], *case.fresh[8:11]]),
        ]
        alone = [logits(case.serve(0.0, lookup=lookup), inputs) for inputs in batches]
        model = case.serve(0.0, lookup=lookup)
        for _ in range(2):
            for inputs, want in zip(batches, alone, strict=True):
                assert torch.equal(logits(model, inputs), want)

    def test_a_mask_that_is_changed_in_place_is_read_again(self, case: Case, lookup: str) -> None:
        item = next(item for item in case.stored if len(item) == MAX_LENGTH)
        model, inputs = case.serve(0.0, lookup=lookup), case.inputs([item])
        logits(model, inputs)
        inputs["attention_mask"][0, 20:] = 0  # now a text of 20 tokens, of which there is none
        # A copy, as the served model is one: a library may round by where the weights lie.
        assert torch.equal(logits(model, inputs), logits(case.model(), inputs))

    def test_a_mask_of_a_layer_called_by_hand_is_read_anew(self, case: Case, lookup: str) -> None:
        model, exact = case.serve(0.0, lookup=lookup), case.model()
        hidden = torch.randn(1, MAX_LENGTH, 32, generator=torch.Generator().manual_seed(4))
        logits(model, case.inputs(case.stored[:1]))
        mask = torch.ones(1, 1, MAX_LENGTH, MAX_LENGTH, dtype=torch.bool)
        with torch.inference_mode():
            self._layer(model, 1, hidden, mask)
            changed = mask.clone()
            for part in (mask, changed):  # the same mask with other values, and another one of the same shape
                part[..., 20:] = False
                if case.family == "deberta":
                    part[..., 20:, :] = False
                ours, theirs = self._layer(model, 1, hidden, part), self._layer(exact, 1, hidden, part)
                assert torch.equal(ours, theirs), "there is no record of 20 tokens"

    def test_an_error_in_the_middle_does_not_reach_the_next_forward(self, case: Case, lookup: str) -> None:
        model, want = case.serve(0.0, lookup=lookup), case.serve(0.0, lookup=lookup)
        first, second = case.inputs(case.stored[:3]), case.inputs(case.fresh[:3])

        def boom(*_: Any) -> None:
            raise Boom

        for layer in (0, 1):
            hook = model.base_model.encoder.layer[layer].attention.output.register_forward_pre_hook(boom)
            with pytest.raises(Boom):
                logits(model, first)
            with pytest.raises(Boom), torch.inference_mode():
                model(**first, output_hidden_states=True)
            hook.remove()
            assert torch.equal(logits(model, second), logits(want, second))
            assert handle_of(model).stats()["hits"] > 0

    def test_a_layer_called_by_hand_after_a_forward_computes_what_it_is_given(self, case: Case, lookup: str) -> None:
        """What a forward found once per sequence must not serve whatever a later layer is called with next."""
        whole = [item for item in case.stored if len(item) == MAX_LENGTH][:2]
        model, exact = case.serve([0.0, 0.0], lookup=lookup), case.model()
        handle = handle_of(model)
        inputs = case.inputs(whole)
        for batch in (2, 3):
            torch.manual_seed(batch)
            hidden = torch.randn(batch, MAX_LENGTH, 32)
            for aborted in (False, True):
                if aborted:
                    with pytest.raises(Boom):
                        self._abort(model, inputs)
                else:
                    logits(model, inputs)
                if lookup == "layer":
                    handle.engine.planner.set_thresholds([1.0, 1.0])  # nothing is near random numbers but by chance
                with torch.inference_mode():
                    ours = self._layer(model, 1, hidden)
                    theirs = self._layer(exact, 1, hidden)
                handle.engine.planner.set_thresholds([0.0, 0.0])
                assert torch.equal(ours, theirs)

    def test_layers_driven_by_hand_may_be_interleaved(self, case: Case, lookup: str) -> None:
        model, exact = case.serve(0.0, lookup=lookup), case.model()
        torch.manual_seed(3)
        pair = [
            model.base_model.embeddings(input_ids=case.inputs([item])["input_ids"]).detach()
            for item in [item for item in case.stored if len(item) == MAX_LENGTH][:2]
        ]
        found: dict[str, list[Tensor]] = {}
        logits(model, case.inputs(case.fresh[:1]))
        with torch.inference_mode():
            for name, one in (("memoized", model), ("exact", exact)):
                first = [self._layer(one, 0, hidden) for hidden in pair]
                found[name] = [self._layer(one, 1, hidden) for hidden in first]
        for ours, theirs in zip(found["memoized"], found["exact"], strict=True):
            assert close(ours, theirs, 1e-4)

    def test_two_threads_do_not_see_each_others_texts(self, case: Case, lookup: str) -> None:
        model = case.serve(0.0, lookup=lookup)
        work = [
            case.inputs(case.fresh[:4]),
            case.inputs([*case.stored[:5], case.short[1]], 64),
            case.inputs(case.fresh[5:6]),
        ]
        alone = [logits(model, inputs) for inputs in work]
        wrong: list[str] = []
        start = threading.Barrier(len(work))

        def ask(number: int) -> None:
            try:
                start.wait()
                for _ in range(15):
                    if not close(logits(model, work[number]), alone[number], 1e-6):
                        wrong.append(f"thread {number}: another output than alone")
            except Exception as error:
                wrong.append(repr(error))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(work))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_a_plan_that_is_set_holds_for_its_thread_alone(self, case: Case, lookup: str) -> None:
        model, exact = case.serve(0.0, lookup=lookup), case.model()
        inputs, found = case.inputs(case.fresh[:1]), list[Tensor]()
        served = logits(model, inputs)
        assert not torch.equal(served, logits(exact, inputs))
        with handle_of(model).engine.planned(Plan("nothing is looked up")):
            other = threading.Thread(target=lambda: found.append(logits(model, inputs)))
            other.start()
            other.join(600)
            assert torch.equal(logits(model, inputs), logits(exact, inputs))
        assert torch.equal(found[0], served)
        assert torch.equal(logits(model, inputs), served)

    @staticmethod
    def _layer(model: Any, layer: int, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """One layer, called as a user's own loop would."""
        encoder = model.base_model.encoder
        if hasattr(encoder, "get_rel_pos"):
            mask = torch.ones(hidden.shape[0], 1, hidden.shape[1], hidden.shape[1]) if mask is None else mask
            output = encoder.layer[layer](
                hidden,
                mask,
                relative_pos=encoder.get_rel_pos(hidden),
                rel_embeddings=encoder.get_rel_embedding(),
            )
        else:
            output = encoder.layer[layer](hidden, mask)
        found: Tensor = output[0] if isinstance(output, tuple) else output
        return found

    @staticmethod
    def _abort(model: Any, inputs: Inputs) -> None:
        def boom(*_: Any) -> None:
            raise Boom

        hook = model.base_model.encoder.layer[0].register_forward_hook(boom)
        try:
            logits(model, inputs)
        finally:
            hook.remove()


class TestWhereNothingCanHit:
    def test_not_even_the_mask_is_read_and_every_call_is_counted(
        self, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inputs = case.inputs([*case.stored[:3], case.short[0]])
        model, exact = case.serve(0.0), case.model()
        handle = handle_of(model)
        monkeypatch.setattr(handle.engine.planner.gate, "hopeless", True)

        def read(*_: Any) -> None:
            raise AssertionError("the call was read")

        monkeypatch.setattr(handle.engine, "_read", read)
        assert torch.equal(logits(model, inputs), logits(exact, inputs))
        stats = handle.stats()
        assert stats["calls"] == 2 * 4
        assert stats["hits"] == 0
        assert stats["layers"][0]["queries"] == 0

    def test_a_gate_is_hopeless_only_if_no_score_of_any_length_reaches_a_threshold(self, case: Case) -> None:
        assert not handle_of(case.serve(0.0)).engine.planner.gate.hopeless  # without a profile everything is tried


class TestMapsThatCannotBeRead:
    def test_leave_their_rows_exact_and_are_counted_as_what_they_became(self, case: Case) -> None:
        inputs = case.inputs([*case.stored[:3], case.short[0]])
        model = case.serve(0.0)
        maps = handle_of(model).engine.reuse.source
        multiply, broken = maps.multiply, iter([True, False])

        def sometimes(layer: int, *arguments: Any) -> None:
            if layer == 0 and next(broken, False):
                raise WindowError("no room")
            multiply(layer, *arguments)

        maps.multiply = sometimes  # type: ignore[method-assign]
        logits(model, inputs)
        stats = handle_of(model).stats()
        assert [row["hits"] for row in stats["layers"]] == [0, 3]
        assert stats["layers"][0]["mean_predicted_similarity"] is None
        assert stats["hit_rate"] == stats["hits"] / stats["calls"] == 3 / 8
        assert sum(stats["failures"].values()) == 3
        logits(model, inputs)
        first = handle_of(model).stats()["layers"][0]
        assert first["hits"] == 3
        assert first["mean_predicted_similarity"] <= 1.0, "predictions of hits that were none are still in the sum"


class TestFinding:
    def test_lengths_beyond_what_the_embedder_knows_are_not_looked_up(self, case: Case) -> None:
        """A held-out text may be longer than any text the embedder was trained on: its end would not count."""
        engine: Engine = handle_of(case.serve(0.0)).engine
        embedder = engine.planner.index._embedders[-1]
        hidden = torch.randn(2, MAX_LENGTH, 32)
        assert (engine.planner.index.find(-1, hidden, [MAX_LENGTH, MAX_LENGTH - 1]).records >= 0).all()
        keep = (MAX_LENGTH - 1) * embedder.channels
        engine.planner.index._embedders[-1] = type(embedder)(
            embedder.token, embedder.bias, embedder.position[:keep], embedder.output
        )
        found = engine.planner.index.find(-1, hidden, [MAX_LENGTH, MAX_LENGTH - 1])
        assert found.records[0] == -1
        assert np.isinf(found.distances[0])
        assert found.records[1] >= 0

    def test_only_records_of_the_same_length_are_found(self, case: Case) -> None:
        engine: Engine = handle_of(case.serve(0.0)).engine
        hidden = torch.randn(60, 60, 32)
        lengths = [*range(1, 61)]
        found = engine.planner.index.find(-1, hidden, lengths)
        for n, record, distance in zip(lengths, found.records.tolist(), found.distances.tolist(), strict=True):
            if n in case.database.lengths:
                assert case.database.records.lengths[record] == n
            else:
                assert (record, distance) == (-1, float("inf"))

    def test_hidden_states_that_are_not_numbers_are_a_miss(self, case: Case) -> None:
        model = case.serve(0.5)
        inputs = case.inputs(case.stored[:2])
        for one in (model, case.model()):
            hook = one.base_model.embeddings.register_forward_hook(lambda _m, _a, output: output * float("nan"))
            assert bool(logits(one, inputs).isnan().all())
            hook.remove()
        assert handle_of(model).stats()["hits"] == 0

    def test_what_the_last_forward_found_can_be_asked_for(self, case: Case) -> None:
        model = case.serve(0.0, lookup="sequence")
        engine = handle_of(model).engine
        assert engine.last_found is None
        logits(model, case.inputs([case.stored[0], case.short[0]]))
        found = engine.last_found
        assert found is not None
        assert found.records[0] >= 0
        assert found.records[1] == -1
        with torch.inference_mode():
            model(**case.inputs(case.stored[:1]), output_hidden_states=True)
        assert engine.last_found is None, "an exact forward left the finding of the one before"
