"""The online engine: exact where nothing is served, right where something is, and nothing left over between calls."""

from __future__ import annotations

import copy
import functools
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from attmemo import Database, Memoization, memoize, unmemoize
from attmemo.db import KIND_MAP
from attmemo.embed.training import TrainOptions
from attmemo.errors import WindowError
from attmemo.forward.engine import Engine
from attmemo.forward.plan import Plan
from attmemo.models.base import Rows
from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.logs import generate_log
from attmemo.profiler.models import LoadedModel, Tokens, collate, load_model, tokenize
from attmemo.profiler.train import train_database

MAX_LENGTH = 48
LOOKUPS = ("layer", "sequence")
IMPLEMENTATIONS = ("eager", "sdpa")
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A family: its bare model, its database, and texts that are stored, new, or of a length that is not stored."""

    family: str
    bare: LoadedModel
    database: Database
    stored: list[Tokens]
    fresh: list[Tokens]
    short: list[Tokens]

    def model(self, implementation: str | None = None) -> nn.Module:
        """A bare model of one's own."""
        model = copy.deepcopy(self.bare.model)
        if implementation is not None:
            model.set_attn_implementation(implementation)  # type: ignore[operator]
        return model

    def serve(self, threshold: float | Sequence[float], *, model: nn.Module | None = None, **options: Any) -> Any:
        """A memoized model; always tried, so that nothing depends on this machine's speed."""
        options = {"database": self.database, "gate": False} | options
        return memoize(model or self.model(options.pop("implementation", None)), threshold, **options)

    def inputs(self, items: Sequence[Tokens], padded: int = 0) -> Inputs:
        """A batch in this order, padded to its longest text or to `padded`."""
        found = collate(self.bare, items)
        more = max(0, padded - found["input_ids"].shape[1])
        return {name: nn.functional.pad(value, (0, more)) for name, value in found.items()}


@contextmanager
def opened(request: pytest.FixtureRequest, folder: Path, family: str) -> Iterator[Case]:
    bare = load_model(request.getfixturevalue(f"tiny_{family}"))
    lines = request.getfixturevalue("log_lines")
    # Exact search: HNSW now and then misses the very record that is asked for, which is not what is tested here.
    path = shutil.copytree(request.getfixturevalue(f"{family}_database"), folder / "db")
    train_database(path, TrainOptions(steps=20, backend="flat"), profile=False)
    with Database(path) as database:
        stored = tokenize(bare, lines, MAX_LENGTH)
        known = {tuple(item.ids) for item in stored}
        fresh = [
            item
            for item in tokenize(bare, list(generate_log(150, seed=77)), MAX_LENGTH)
            if tuple(item.ids) not in known and len(item) in database.lengths
        ]
        cut = [(item, n) for item, n in zip(stored, (7, 19, 30, 19, 7, 23), strict=False)]
        short = [Tokens(i, [*item.ids[: n - 1], item.ids[-1]], None) for i, (item, n) in enumerate(cut)]
        assert len({len(item) for item in stored}) > 3
        assert len(fresh) > 20
        assert not {len(item) for item in short} & set(database.lengths)
        yield Case(family, bare, database, stored, fresh, short)


@pytest.fixture(scope="module", params=["bert", "deberta"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    with opened(request, tmp_path_factory.mktemp("case"), request.param) as found:
        yield found


@pytest.fixture(scope="module")
def bert(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """Where the other family has no such argument."""
    with opened(request, tmp_path_factory.mktemp("bert-case"), "bert") as found:
        yield found


def logits(model: Any, inputs: Inputs) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(**inputs).logits
    return found


def states(model: Any, inputs: Inputs) -> Tensor:
    """What leaves the last layer, ``[B, L, H]``: every token, where logits see the first one only."""
    with torch.inference_mode():
        found: Tensor = model.base_model(**inputs).last_hidden_state
    return found


def valid_states(model: Any, inputs: Inputs) -> list[Tensor]:
    """The same, each row cut to its valid tokens."""
    found = states(model, inputs)
    lengths = inputs["attention_mask"].sum(1).tolist()
    return [row[:n] for row, n in zip(found, lengths, strict=True)]


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    """Equal within a share of the range."""
    return bool((a - b).abs().max() <= tolerance * b.abs().max())


def handle_of(model: Any) -> Memoization:
    handle: Memoization = model.attmemo
    return handle


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
            other.join(30)
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
