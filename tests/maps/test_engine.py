"""The online engine with maps: exact where nothing is served, and right where something is."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from maps_tools import LOOKUPS, MAX_LENGTH, Case, close, handle_of, logits, opened, states, valid_states
from torch import Tensor

from attmemo import Database, unmemoize
from attmemo.db import KIND_MAP
from attmemo.embed.training import TrainOptions
from attmemo.models.base import Rows
from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.models import load_model
from attmemo.profiler.train import train_database

IMPLEMENTATIONS = ("eager", "sdpa")


@pytest.fixture(scope="module")
def bert(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """Where the other family has no such argument."""
    with opened(request, tmp_path_factory.mktemp("bert-case"), "bert") as found:
        yield found


def implementations(case: Case) -> tuple[str, ...]:
    return IMPLEMENTATIONS if case.family == "bert" else ("eager",)


class TestExactness:
    @pytest.mark.parametrize("lookup", LOOKUPS)
    @pytest.mark.parametrize("padded", [False, True])
    def test_without_hits_the_output_is_bit_for_bit_the_bare_models(
        self, case: Case, lookup: str, padded: bool
    ) -> None:
        items = [case.fresh[0], case.short[0], case.stored[3]] if padded else case.stored[:1] * 3
        inputs = case.inputs(items, MAX_LENGTH + 5 if padded else 0)
        for implementation in implementations(case):
            model = case.serve(1.0, lookup=lookup, implementation=implementation)
            exact = case.model(implementation)
            assert torch.equal(logits(model, inputs), logits(exact, inputs))
            assert torch.equal(states(model, inputs), states(exact, inputs))
            assert handle_of(model).stats()["hits"] == 0
            assert handle_of(model).stats()["ineligible"] == {}

    @pytest.mark.parametrize("lookup", LOOKUPS)
    def test_disabled_and_undone_it_is_the_bare_model(self, case: Case, lookup: str) -> None:
        inputs = case.inputs(case.stored[:4])
        exact = logits(case.bare.model, inputs)
        model = case.serve(0.0, lookup=lookup)
        served = logits(model, inputs)
        handle_of(model).disable()
        assert torch.equal(logits(model, inputs), exact)
        handle_of(model).enable()
        assert torch.equal(logits(model, inputs), served)
        unmemoize(model)
        assert torch.equal(logits(model, inputs), exact)

    @pytest.mark.parametrize("lookup", LOOKUPS)
    @pytest.mark.parametrize(
        "wanted", [{"output_attentions": True}, {"output_hidden_states": True}], ids=lambda wanted: next(iter(wanted))
    )
    def test_outputs_that_only_the_exact_path_has_are_exact(
        self, case: Case, lookup: str, wanted: dict[str, bool]
    ) -> None:
        inputs = case.inputs([*case.stored[:3], case.short[0]])
        (name,) = wanted
        model, exact = case.serve(0.0, lookup=lookup, implementation="eager"), case.model("eager")
        with torch.inference_mode():
            a, b = model(**inputs, **wanted), exact(**inputs, **wanted)
            # `forward` called directly runs no hooks: sentence-transformers does it.
            c = model.base_model.forward(**inputs, **wanted)
        assert torch.equal(a.logits, b.logits)
        for ours, alone, theirs in zip(a[name[7:]], c[name[7:]], b[name[7:]], strict=True):
            assert torch.equal(ours, theirs)
            assert torch.equal(alone, theirs)
        stats = handle_of(model).stats()
        assert stats["ineligible"] == {name: 2 * 4 * 2}  # two forwards of four rows in two layers
        assert (stats["hits"], stats["hit_rate"], stats["calls"]) == (0, 0.0, 16)

    def test_hidden_states_asked_for_in_the_configuration_are_exact(self, case: Case) -> None:
        inputs = case.inputs(case.stored[:2])
        model, exact = case.serve(0.0), case.model()
        for one in (model, exact):
            one.config.output_hidden_states = True
        with torch.inference_mode():
            a, b = model(**inputs), exact(**inputs)
        assert all(torch.equal(x, y) for x, y in zip(a.hidden_states, b.hidden_states, strict=True))
        model.config.output_hidden_states = False
        logits(model, inputs)
        assert handle_of(model).stats()["hits"] == 4, "an exact forward made the next one exact"

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_a_boolean_mask_is_what_the_original_makes_of_it(self, bert: Case, implementation: str) -> None:
        """Eager attention adds it to its scores, as the numbers 0 and 1; fused attention leaves out what is False."""
        model, exact = bert.serve(0.0, implementation=implementation), bert.model(implementation)
        plain = bert.inputs(bert.stored[:2])
        valid = plain["attention_mask"].bool()
        inputs = plain | {"attention_mask": valid[:, None, None, :].expand(-1, 1, valid.shape[1], -1)}
        seen = states(model, inputs)
        if implementation == "eager":
            assert torch.equal(seen, states(exact, inputs))
            assert set(handle_of(model).stats()["ineligible"]) == {"the mask is not plain padding on one side"}
        else:
            assert torch.equal(seen, states(model, plain))
            assert handle_of(model).stats()["hits"] == 8

    def test_sequences_of_no_tokens_raise_what_the_original_raises(self, bert: Case) -> None:
        model, exact = bert.serve(0.0), bert.model()
        inputs = {"input_ids": torch.zeros(3, 0, dtype=torch.long)}
        with pytest.raises(RuntimeError) as expected:
            logits(exact, inputs)
        with pytest.raises(RuntimeError, match=re.escape(str(expected.value))):
            logits(model, inputs)
        assert handle_of(model).stats()["failures"] == {}

    @pytest.mark.parametrize("lookup", LOOKUPS)
    def test_training_mode_stays_exact_and_says_so(self, case: Case, lookup: str) -> None:
        inputs = case.inputs(case.stored[:3])
        model, exact = case.serve(0.0, lookup=lookup).train(), case.model().train()
        torch.manual_seed(7)
        a = logits(model, inputs)
        torch.manual_seed(7)
        assert torch.equal(a, logits(exact, inputs))
        assert handle_of(model).stats()["ineligible"] == {"training mode": 6}
        model.eval()
        logits(model, inputs)
        assert handle_of(model).stats()["hits"] == 6

    @pytest.mark.parametrize("frozen", [False, True])
    def test_gradients_are_those_of_the_bare_model(self, case: Case, frozen: bool) -> None:
        inputs = case.inputs(case.stored[:3])
        model, exact = case.serve(0.0), case.model()
        found = []
        for one in (model, exact):
            if frozen:  # then what enters the first layer asks for no gradient, but its weights do
                for parameter in one.base_model.embeddings.parameters():
                    parameter.requires_grad_(False)
            output = one(**inputs).logits
            output.sum().backward()
            found.append([output, *(p.grad for p in one.parameters() if p.grad is not None)])
        assert len(found[0]) == len(found[1]) > 10
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        (reason,) = handle_of(model).stats()["ineligible"]
        assert "gradients" in reason

    def test_a_model_without_parameters_to_train_is_served_also_where_gradients_are_on(self, case: Case) -> None:
        model = case.serve(0.0)
        model.requires_grad_(False)
        model(**case.inputs(case.stored[:3]))
        assert handle_of(model).stats()["hits"] == 6

    def test_both_kinds_of_inference_are_served(self, case: Case) -> None:
        model, inputs = case.serve(0.0), case.inputs(case.stored[:2])
        for mode in (torch.inference_mode, torch.no_grad):
            handle_of(model).reset_stats()
            with mode():
                model(**inputs)
            assert handle_of(model).stats()["hit_rate"] == 1.0


class TestMasks:
    @pytest.mark.parametrize("lookup", LOOKUPS)
    @pytest.mark.parametrize("kind", ["left padding", "hole", "empty row"])
    def test_padding_that_is_not_at_the_end_stays_exact(self, case: Case, lookup: str, kind: str) -> None:
        inputs = case.inputs(case.stored[:3], MAX_LENGTH + 4)
        mask = inputs["attention_mask"]
        if kind == "left padding":
            inputs = {name: value.flip(1) for name, value in inputs.items()}
        elif kind == "hole":
            mask[1, 5] = 0
        else:
            mask[2] = 0
        model = case.serve(0.0, lookup=lookup)
        assert torch.equal(logits(model, inputs), logits(case.bare.model, inputs))
        (reason,) = handle_of(model).stats()["ineligible"]
        assert "padding" in reason

    def test_a_mask_of_ones_no_mask_and_a_padded_mask_are_all_served(self, case: Case) -> None:
        whole = [item for item in case.stored if len(item) == MAX_LENGTH][:3]
        inputs = case.inputs(whole)
        for implementation in implementations(case):
            model = case.serve(0.0, implementation=implementation)
            want = states(case.model(implementation), inputs)
            without = {name: value for name, value in inputs.items() if name != "attention_mask"}
            assert close(states(model, inputs), want)
            assert close(states(model, without), want)
            assert close(states(model, case.inputs(whole, MAX_LENGTH + 7))[:, :MAX_LENGTH], want)
            assert handle_of(model).stats()["hit_rate"] == 1.0

    @pytest.mark.parametrize(
        ("kind", "implementation"),
        [
            *[(kind, implementation) for kind in ("causal", "bias", "blocks") for implementation in IMPLEMENTATIONS],
            ("integers", "eager"),
        ],
    )
    def test_masks_of_the_users_own_making_stay_exact(self, bert: Case, kind: str, implementation: str) -> None:
        inputs = bert.inputs([item for item in bert.stored if len(item) == MAX_LENGTH][:2])
        n = MAX_LENGTH
        allowed = torch.ones(n, n, dtype=torch.bool)
        if kind == "causal":
            allowed = allowed.tril()
        elif kind == "blocks":
            allowed = torch.block_diag(torch.ones(20, 20), torch.ones(n - 20, n - 20)).bool()
        mask: Tensor = allowed.expand(2, 1, n, n)
        if kind == "bias":
            mask = torch.linspace(-3, 0, n).expand(2, 1, n, n)
        elif kind == "integers":
            mask = mask.long()
        elif implementation == "eager":
            mask = torch.zeros(2, 1, n, n).masked_fill(~mask, torch.finfo(torch.float32).min)
        model = bert.serve(0.0, implementation=implementation)
        inputs["attention_mask"] = mask
        assert torch.equal(logits(model, inputs), logits(bert.model(implementation), inputs))
        assert handle_of(model).stats()["hits"] == 0

    def test_a_causal_flag_beside_the_mask_stays_exact(self, bert: Case) -> None:
        inputs: dict[str, Any] = bert.inputs([item for item in bert.stored if len(item) == MAX_LENGTH][:2])
        model, exact = bert.serve(0.0, implementation="sdpa"), bert.model("sdpa")
        flagged = logits(exact, inputs | {"is_causal": True})
        assert not torch.allclose(flagged, logits(exact, inputs), atol=1e-2)
        assert torch.equal(logits(model, inputs | {"is_causal": True}), flagged)
        assert handle_of(model).stats()["ineligible"] == {"the argument is_causal": 4}

    def test_an_empty_batch_does_what_the_bare_model_does(self, case: Case) -> None:
        inputs = {name: value[:0] for name, value in case.inputs(case.stored[:1]).items()}
        model = case.serve(0.0)
        try:
            want = logits(case.bare.model, inputs)
        except Exception as error:  # DeBERTa cannot
            with pytest.raises(type(error)):
                logits(model, inputs)
        else:
            assert torch.equal(logits(model, inputs), want)
        logits(model, case.inputs(case.stored[:1]))
        assert handle_of(model).stats()["hits"] == 2


@pytest.fixture(scope="module")
def small_databases(case: Case, tmp_path_factory: pytest.TempPathFactory, service_log: Path) -> Callable[[str], Path]:
    """Databases of the first 120 lines in a storage type."""
    folder = tmp_path_factory.mktemp("storage")

    def make(storage: str) -> Path:
        path = folder / storage
        if not path.exists():
            options = BuildOptions(max_length=MAX_LENGTH, storage=storage, limit=120)
            build_database(load_model(case.bare.name), [service_log], path, options)
            train_database(path, TrainOptions(steps=0, backend="flat"), profile=False)
        return path

    return make


class TestHits:
    @pytest.mark.parametrize("lookup", LOOKUPS)
    @pytest.mark.parametrize("fetch", ["auto", "direct", "map", "view", "copy"])
    def test_a_stored_text_asked_again_gives_the_exact_output(self, case: Case, lookup: str, fetch: str) -> None:
        items = case.stored[:40]
        inputs = case.inputs(items, MAX_LENGTH + 3)
        for implementation in implementations(case):
            model = case.serve(0.0, lookup=lookup, fetch=fetch, implementation=implementation)
            exact = case.model(implementation)
            assert close(logits(model, inputs), logits(exact, inputs))
            for ours, theirs in zip(valid_states(model, inputs), valid_states(exact, inputs), strict=True):
                assert close(ours, theirs)
            stats = handle_of(model).stats()
            assert stats["hit_rate"] == 1.0
            assert stats["hits"] == 2 * 2 * len(items)

    @pytest.mark.parametrize("lookup", LOOKUPS)
    def test_every_way_to_fetch_gives_the_same_output(self, case: Case, lookup: str) -> None:
        for items in ([*case.fresh[:9], *case.short[:2]], [i for i in case.stored if len(i) == MAX_LENGTH][:8]):
            inputs = case.inputs(items)
            served = {
                fetch: states(case.serve(0.0, lookup=lookup, fetch=fetch), inputs)
                for fetch in ("direct", "map", "view", "copy")
            }
            assert close(served["direct"], served["copy"], 1e-6)
            assert close(served["map"], served["copy"], 1e-6)
            assert close(served["view"], served["copy"], 1e-6)
            for fetch, found in served.items():
                assert torch.equal(found, states(case.serve(0.0, lookup=lookup, fetch=fetch), inputs)), fetch

    @pytest.mark.parametrize("lookup", LOOKUPS)
    @pytest.mark.parametrize(("storage", "tolerance"), [("float16", 2e-3), ("bfloat16", 2e-2)])
    def test_half_precision_storage_costs_no_more_than_its_rounding(
        self, case: Case, small_databases: Callable[[str], Path], lookup: str, storage: str, tolerance: float
    ) -> None:
        inputs = case.inputs(case.stored[:32])
        with Database(small_databases(storage)) as database:
            for fetch in ("map", "view", "copy"):
                model = case.serve(0.0, lookup=lookup, database=database, fetch=fetch)
                assert close(logits(model, inputs), logits(case.bare.model, inputs), tolerance)
                assert handle_of(model).stats()["hit_rate"] == 1.0

    def test_a_model_in_bfloat16_is_served_in_its_own_precision(
        self, case: Case, tmp_path: Path, service_log: Path
    ) -> None:
        loaded = load_model(case.bare.name, "bfloat16")
        bare = copy.deepcopy(loaded.model)
        build_database(loaded, [service_log], tmp_path / "db", BuildOptions(max_length=MAX_LENGTH, limit=40))
        train_database(tmp_path / "db", TrainOptions(steps=0, backend="flat"), profile=False)
        inputs = case.inputs([*case.stored[:6], case.short[0]])
        with Database(tmp_path / "db") as database:
            for fetch in ("map", "view"):
                model = case.serve(0.0, model=loaded.model, database=database, fetch=fetch)
                found = logits(model, inputs)
                assert found.dtype == torch.bfloat16
                assert close(found.float(), logits(bare, inputs).float(), 5e-2)
                assert handle_of(model).stats()["hits"] == 2 * 6
            case.serve(1.0, model=loaded.model, database=database)
            assert torch.equal(logits(loaded.model, inputs), logits(bare, inputs))

    @pytest.mark.parametrize("lookup", LOOKUPS)
    def test_what_is_served_is_the_map_of_the_record_that_was_found(self, case: Case, lookup: str) -> None:
        """The first layer by hand: V of the text, times the map of the record."""
        item = next(item for item in case.fresh if len(item) == MAX_LENGTH)
        model = case.serve([0.0, 1.0], lookup=lookup)
        engine, module = handle_of(model).engine, model.base_model.encoder.layer[0].attention.self
        seen: list[tuple[Tensor, Tensor]] = []
        hook = module.register_forward_hook(
            lambda _m, args, output: seen.append((args[0].clone(), output[0].clone())), always_call=False
        )
        logits(model, case.inputs([item]))
        hook.remove()
        hidden, context = seen[0]
        record = int(engine.planner.index.find(-1 if lookup == "sequence" else 0, hidden, [len(item)]).records[0])
        apm = case.database.slot(KIND_MAP, 0, record)
        with torch.no_grad():
            value = engine.adapter.value(module, hidden[0]).view(len(item), 4, 8).transpose(0, 1)
        assert close(context[0], (apm @ value).transpose(0, 1).reshape(len(item), 32), 1e-6)
        assert handle_of(model).stats()["hits"] == 1

    @pytest.mark.parametrize("lookup", LOOKUPS)
    def test_a_batch_of_hits_and_misses_gives_each_row_what_it_gets_alone(self, case: Case, lookup: str) -> None:
        items = [case.stored[0], case.short[0], case.fresh[7], case.short[1], case.short[3], case.fresh[0]]
        inputs = case.inputs(items)
        model = case.serve(0.0, lookup=lookup)
        for implementation in implementations(case):
            model.config._attn_implementation = implementation
            exact = case.model(implementation)
            mixed = valid_states(model, inputs)
            for row, item in enumerate(items):
                one = case.inputs([item])
                assert close(mixed[row], states(model, one)[0])
                if item in case.short:
                    assert close(mixed[row], states(exact, one)[0])
            missed = [row for row, item in enumerate(items) if item in case.short]
            compacted = {name: value[missed] for name, value in inputs.items()}
            for row, alone in zip(missed, valid_states(exact, compacted), strict=True):
                assert close(mixed[row], alone)

    @pytest.mark.parametrize("lookup", LOOKUPS)
    def test_misses_of_a_layer_are_bit_for_bit_what_the_bare_layer_computes_for_them(
        self, case: Case, lookup: str
    ) -> None:
        items = [case.stored[0], case.short[0], case.stored[7], case.short[1], case.short[3]]
        inputs = case.inputs(items)
        missed = torch.tensor([1, 3, 4])
        for implementation in implementations(case):
            model = case.serve(0.0, lookup=lookup, implementation=implementation)
            handle, module = handle_of(model), model.base_model.encoder.layer[0].attention.self
            seen: list[tuple[Any, Any, Any]] = []
            hook = module.register_forward_hook(
                lambda _m, args, kwargs, output, seen=seen: seen.append((args, kwargs, output)), with_kwargs=True
            )
            logits(model, inputs)
            hook.remove()
            assert handle.stats()["layers"][0]["hits"] == 2
            handle.disable()
            args, kwargs, output = seen[0]
            rows = Rows(len(output[0]), np.asarray(missed))
            args, kwargs = handle.engine.adapter.take_rows(args, kwargs, rows)
            with torch.inference_mode():
                assert torch.equal(output[0][missed], module(*args, **kwargs)[0])

    @pytest.mark.parametrize("lookup", LOOKUPS)
    def test_padding_behind_a_hit_is_zero_where_it_leaves_the_layer(self, case: Case, lookup: str) -> None:
        model = case.serve(0.0, lookup=lookup)
        seen: list[Tensor] = []
        module = model.base_model.encoder.layer[1].attention.self
        module.register_forward_hook(lambda _m, _a, output: seen.append(output[0]))
        inputs = case.inputs(case.stored[:6], MAX_LENGTH + 9)
        logits(model, inputs)
        padding = inputs["attention_mask"] == 0
        assert int(padding.sum()) > 50
        assert bool((seen[0][padding] == 0).all())

    def test_a_layer_with_a_threshold_of_its_own_is_served_alone(self, case: Case) -> None:
        inputs = case.inputs(case.stored[:5])
        for lookup in LOOKUPS:
            for layer in (0, 1):
                thresholds = [1.0, 1.0]
                thresholds[layer] = 0.0
                model = case.serve(thresholds, lookup=lookup)
                assert close(logits(model, inputs), logits(case.bare.model, inputs))
                assert [row["hits"] for row in handle_of(model).stats()["layers"]] == [
                    5 if at == layer else 0 for at in (0, 1)
                ]

    def test_maps_of_another_precision_than_the_model_are_converted(self, case: Case) -> None:
        inputs = case.inputs(case.stored[:6])
        for fetch in ("map", "view"):
            model = case.serve(0.0, fetch=fetch)
            with torch.autocast("cpu", torch.bfloat16):
                served, exact = logits(model, inputs), logits(case.bare.model, inputs)
            assert close(served.float(), exact.float(), 6e-2)
            assert handle_of(model).stats()["hits"] > 0
