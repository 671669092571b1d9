"""`reuse="rows"`: what a record supplies is taken from it, all else is computed, and no failure costs a request."""

from __future__ import annotations

import copy
import logging
import os
import shutil
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, _bias
from packed_models import (
    MODELS,
    NEAR,
    REFUSED,
    Inputs,
    batch,
    changed,
    gap,
    last,
    pair,
    root_mean_square,
    rows_database,
    shares,
    valid,
)
from torch import Tensor

from attmemo import Database, DatabaseError, StaleDatabaseError, UnsupportedModelError, memoize, unmemoize
from attmemo.forward.plan import Plan, Reused, RowShare
from attmemo.handle.rows import UNGUARDED
from attmemo.handle.stack import blocks_of
from attmemo.kernels import encoder_stack as chain_module
from attmemo.kernels.align import Rule
from attmemo.models import Rows, Spans, adapter_for
from attmemo.packed import runner as packed_module
from attmemo.profiler.models import load_model
from attmemo.rows import serve as rows_module
from attmemo.rows.gate import LEARNED, RARELY, RowGate

STORED = [30, 20, 33, 11, 25, 20]
STATS = {
    "enabled", "reuse", "database", "folder", "threshold", "sequences", "reused", "repeated", "served", "tokens",
    "rows_computed", "share_computed", "ms_lookup", "ms_plan", "ms_fetch", "ms_blocks", "not_looked_up", "ineligible",
    "failures", "failed", "weight_bytes", "first_row", "records", "record_bytes", "offered", "guard", "linear", "pays",
    "rows_afterwards",
}  # fmt: skip

HALF_STEP = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-9, "int8": 1 / 254}
"""Of the largest number of a row: what rounding to a type changes at most."""


class Case:
    """A bare model, the same with packed blocks, a batch, and a database of its rows."""

    def __init__(self, name: str, folder: Path, storage: str = "float32", dtype: torch.dtype = torch.float32) -> None:
        self.name, self.storage = name, storage
        self.bare, self.packed = pair(name, dtype)
        self.stored = batch(STORED, 3)
        self.path = rows_database(self.bare, [self.stored], folder / "db", storage)

    def serve(self, threshold: Any = 0.5, path: Any = None, **options: Any) -> Any:
        """A model of one's own that is served; always looked up, so that nothing depends on this machine's speed."""
        options = {"gate": False, "budget": None} | options
        return memoize(copy.deepcopy(self.bare), threshold, path or self.path, **options)


@pytest.fixture(params=MODELS, scope="module", name="family")
def _family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module", name="case")
def _case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("BERT", tmp_path_factory.mktemp("bert-rows"))


@pytest.fixture(params=["BERT", "ModernBERT"], scope="module", name="both")
def _both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("both-rows"))


def supplied(inputs: Inputs, record: list[int], source: list[list[int]]) -> Plan:
    """A plan: for each sequence its record, or -1, and the row of it for each token, or -1."""
    lengths = inputs["attention_mask"].sum(1).tolist()
    served = np.flatnonzero(np.array(record) >= 0)
    numbers = np.array(record, np.int64)
    share = RowShare(
        served, numbers[served], Rows.without(len(lengths), served), 0.0,
        np.concatenate([np.array(part, np.int32) for part in source]), numbers,
    )  # fmt: skip
    return Plan(spans=Spans(lengths), layers={0: share})


class TestExact:
    def test_all_rows_computed_equals_packed(self, family: Case) -> None:
        inputs = changed(family.stored, 1)
        expected = last(family.packed, inputs)
        model = family.serve(1.0)
        assert torch.equal(last(model, inputs), expected)
        stats = model.attmemo.stats()
        assert stats["reused"] == 0
        assert stats["rows_computed"] == stats["tokens"] == sum(STORED)
        nothing = supplied(inputs, [*range(len(STORED))], [[-1] * n for n in STORED])
        with model.attmemo.engine.planned(nothing):
            assert gap(last(model, inputs), expected, valid(inputs)) <= NEAR
        assert model.attmemo.stats()["reused"] == len(STORED)

    def test_a_record_of_the_very_input_equals_packed(self, family: Case) -> None:
        model = family.serve()
        assert gap(last(model, family.stored), last(family.packed, family.stored), valid(family.stored)) <= NEAR
        stats = model.attmemo.stats()
        assert stats["repeated"] == len(STORED)
        assert stats["rows_computed"] == 0, "the record has all"
        assert not stats["failures"]

    def test_a_record_that_supplies_every_row_equals_packed(self, family: Case) -> None:
        model = family.serve()
        whole = supplied(family.stored, [*range(len(STORED))], [[*range(n)] for n in STORED])
        with model.attmemo.engine.planned(whole):
            seen = last(model, family.stored)
        assert gap(seen, last(family.packed, family.stored), valid(family.stored)) <= NEAR
        stats = model.attmemo.stats()
        assert not stats["failures"]
        assert stats["rows_computed"] == 0

    def test_outputs_of_padding_are_zero(self, family: Case) -> None:
        model = family.serve()
        assert not last(model, family.stored)[~valid(family.stored)].any()
        assert model.attmemo.stats()["repeated"] == len(STORED)

    @pytest.mark.parametrize("storage", ["float16", "bfloat16", "int8"])
    @pytest.mark.parametrize("name", ["BERT", "MPNet", "DeBERTa-v3", "ModernBERT"])
    def test_a_record_of_the_very_input_equals_packed_up_to_rounding(
        self, name: str, storage: str, tmp_path: Path
    ) -> None:
        case = Case(name, tmp_path, storage)
        model = case.serve()
        worst = gap(last(model, case.stored), last(case.packed, case.stored), valid(case.stored))
        assert 0 < worst <= 8 * HALF_STEP[storage], "K and V of three or four layers, and the last rows, are rounded"
        assert model.attmemo.stats()["repeated"] == len(STORED)

    @pytest.mark.parametrize("name", ["BERT", "DeBERTa-v2", "ModernBERT"])
    def test_a_model_in_bfloat16_is_served_in_its_own_precision(self, name: str, tmp_path: Path) -> None:
        case = Case(name, tmp_path, "bfloat16", torch.bfloat16)
        model = case.serve()
        exact = last(copy.deepcopy(case.bare).double(), case.stored)
        seen = last(model, case.stored)
        assert seen.dtype == torch.bfloat16
        theirs, ours = (
            root_mean_square(found, exact, valid(case.stored)) for found in (last(case.bare, case.stored), seen)
        )
        assert 0 < ours <= 1.2 * theirs
        assert model.attmemo.stats()["repeated"] == len(STORED)


def with_rows_of(bare: Any, record: Tensor, own: Tensor, source: Tensor) -> Tensor:
    """What the original code gives, ``[n, H]``, if K and V of tokens are those of a record in every block.

    `source` has the row of the record for each token, or -1. K is taken before it is rotated.
    """
    blocks, kept = blocks_of(bare, adapter_for(bare)[0], "rows").blocks, source >= 0
    planes = [(module, plane) for block in blocks for plane, module in enumerate(block.qkv)]
    seen: dict[int, Tensor] = {}

    def keep(module: Any, args: Any, output: Tensor) -> None:
        seen.setdefault(id(module), output)  # DeBERTa calls it again, for distances

    def replace(module: Any, args: Any, output: Tensor) -> None:
        rows = seen.pop(id(module), None)
        if rows is not None:
            first = output.shape[-1] // 3 if output.shape[-1] > args[0].shape[-1] else 0  # Q stays
            output[0, kept, first:] = rows[0, source[kept], first:]

    for hook in (keep, replace):
        handles = [
            module.register_forward_hook(hook) for module, plane in planes
            if plane > 0 or module.out_features > module.in_features
        ]  # fmt: skip
        found = last(bare, {"input_ids": record if hook is keep else own})
        for handle in handles:
            handle.remove()
    return found[0]


def edited(record: Tensor, seed: int) -> Tensor:
    """A sequence with a token replaced, some taken out, and some put in."""
    rng = np.random.default_rng(seed)
    own = record[0].tolist()
    for _ in range(2):
        place = int(rng.integers(1, len(own) - 4))
        new = (5 + rng.integers(0, 50, int(rng.integers(0, 3)))).tolist()
        own[place : place + int(rng.integers(0, 4))] = new
    return torch.tensor([own])


@pytest.fixture(name="still")
def _still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reused rows are the record's own: `test_drift` has how they move."""
    monkeypatch.setattr(rows_module, "DRIFT", 0.0)


@pytest.mark.usefixtures("still")
class TestTheOriginalWithRowsOfARecord:
    def test_rows_computed_are_those_of_the_original_code_with_k_and_v_of_the_record(self, family: Case) -> None:
        model = family.serve(0.1)
        served = moved = 0
        for number, n in ((0, 30), (2, 33), (4, 25)):
            record = family.stored["input_ids"][number : number + 1, :n]
            of_record = last(family.packed, {"input_ids": record})[0]
            for seed in range(4):
                own = edited(record, 10 * number + seed)
                with shares(model) as found:
                    seen = last(model, {"input_ids": own})[0]
                if not len(found[0].records):
                    continue
                assert found[0].records.tolist() == [number]
                source = torch.from_numpy(found[0].source).long()  # type: ignore[attr-defined]
                fresh = source < 0
                expected = with_rows_of(family.bare, record, own, source)
                assert gap(seen[fresh], expected[fresh]) <= NEAR
                assert gap(seen[~fresh], of_record[source[~fresh]]) <= NEAR
                served += 1
                moved += int((source != torch.arange(len(source)))[~fresh].any())
        assert served >= 6
        assert moved >= 3
        assert not model.attmemo.stats()["failures"]


def one_layer(name: str, kind: str | None = None) -> Any:
    """A model of a single block, of this kind."""
    config = copy.deepcopy(MODELS[name]().config)
    if name == "ModernBERT":
        kind = kind or "full_attention"
    config.num_hidden_layers, config.max_position_embeddings = 1, 512
    if kind is not None:
        config.layer_types = [kind]
    torch.manual_seed(4)
    return _bias(type(MODELS[name]())(config))


class TestBeside:
    """Sequences that are computed whole, and from a record beside: how a guard compares the two."""

    def test_both_are_what_each_alone_is(self, family: Case) -> None:
        model, inputs = family.serve(), changed(family.stored, 1)
        served = last(model, inputs)
        share = model.attmemo.engine.planner.plan  # what the planner chose is served once more, beside
        chosen: list[RowShare] = []

        def seen(*given: Any) -> Plan:
            plan = share(*given)
            chosen.append(plan.layers[0])
            return plan

        model.attmemo.engine.planner.plan = seen
        last(model, inputs)
        parts = np.split(chosen[0].source, np.cumsum(STORED)[:-1])
        some = {place: Reused(int(chosen[0].record[place]), parts[place]) for place in (4, 1, 2)}
        whole = RowShare.of(
            np.array(STORED), np.full(len(STORED), -1), np.full(sum(STORED), -1, np.int32), beside=some
        )  # fmt: skip
        before = model.attmemo.stats()
        with model.attmemo.engine.planned(Plan(spans=Spans(STORED), layers={0: whole})) as forward:
            assert gap(last(model, inputs), last(family.packed, inputs), valid(inputs)) <= NEAR
        beside = forward.outcome.beside
        assert set(beside) == {1, 2, 4}
        assert not forward.outcome.served
        after = model.attmemo.stats()
        places = sorted(beside)
        computed = RowShare.computed(torch.stack([beside[place] for place in places]))
        asked = {name: value[places] for name, value in inputs.items()}
        spans = Spans([STORED[place] for place in places])
        with model.attmemo.engine.planned(Plan(spans=spans, layers={0: computed})):
            assert gap(last(model, asked), served[places], valid(asked)) <= NEAR
        rows = sum(int((parts[place] < 0).sum()) for place in some)
        assert after["rows_computed"] - before["rows_computed"] == sum(STORED) + rows
        assert (after["reused"], after["repeated"]) == (before["reused"], before["repeated"])

    def test_a_record_that_went_away_leaves_only_the_exact_sequence(
        self, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, inputs = case.serve(), changed(case.stored, 1)

        def gone(_: Any) -> None:
            raise DatabaseError("a record was dropped.", "a test")

        monkeypatch.setattr(model.attmemo.engine.reuse.store, "fetch", gone)
        whole = RowShare.of(
            np.array(STORED), np.full(len(STORED), -1), np.full(sum(STORED), -1, np.int32),
            beside={0: Reused(0, np.arange(STORED[0], dtype=np.int32))},
        )  # fmt: skip
        with model.attmemo.engine.planned(Plan(spans=Spans(STORED), layers={0: whole})) as forward:
            assert gap(last(model, inputs), last(case.packed, inputs), valid(inputs)) <= NEAR
        assert not forward.outcome.beside

    def test_hidden_states_of_another_shape_are_computed_anew(self, case: Case) -> None:
        model = case.serve()
        given = RowShare.computed(torch.zeros(2, 3, 4))
        with model.attmemo.engine.planned(Plan(spans=Spans(STORED), layers={0: given})) as forward:
            assert gap(last(model, case.stored), last(case.packed, case.stored), valid(case.stored)) <= NEAR
        assert not forward.outcome.served, "so that a guard learns nothing from it"
        assert model.attmemo.stats()["failures"]


@pytest.mark.usefixtures("still")
class TestMoved:
    """In the first block K and V depend on the token alone, but for its position."""

    @pytest.mark.parametrize(
        ("name", "kind"),
        [("ModernBERT", "full_attention"), ("ModernBERT", "sliding_attention"), ("NomicBERT", None), ("GTE", None),
         ("DeBERTa-v3", None), ("DeBERTa, c2p", None), ("DeBERTa, p2c", None), ("DeBERTa, no buckets", None)],
    )  # fmt: skip
    def test_rows_computed_beside_a_moved_record_are_exact_in_the_first_block(
        self, name: str, kind: str | None, tmp_path: Path
    ) -> None:
        bare = one_layer(name, kind)
        packed = memoize(copy.deepcopy(bare), reuse="none")
        record = batch([24], 5)
        path = rows_database(bare, [record], tmp_path / "db")
        model = memoize(copy.deepcopy(bare), 0.5, path, gate=False, budget=None)
        ids, new = record["input_ids"][0], batch([5], 6)["input_ids"][0]
        moved = [torch.cat((new, ids)), ids[4:], torch.cat((ids[:8], new, ids[8:])), torch.cat((ids[:8], ids[11:]))]
        of_record = last(packed, record)[0]
        for own in moved:
            inputs = {"input_ids": own[None], "attention_mask": torch.ones(1, len(own), dtype=torch.long)}
            with shares(model) as found:
                seen = last(model, inputs)[0]
            expected = last(packed, inputs)[0]
            source = torch.from_numpy(found[0].source).long()  # type: ignore[attr-defined]
            computed = source < 0
            there = torch.arange(len(own))
            assert bool((source[~computed] != there[~computed]).any()), "some rows have moved"
            assert gap(seen[computed], expected[computed]) <= NEAR
            assert gap(seen[~computed], of_record[source[~computed]]) <= NEAR

    @pytest.mark.parametrize("name", ["ModernBERT", "NomicBERT", "GTE", "DeBERTa-v3"])
    def test_the_end_of_a_record_that_is_much_longer_serves(self, name: str, tmp_path: Path) -> None:
        bare = one_layer(name)
        packed = memoize(copy.deepcopy(bare), reuse="none")
        record = batch([200], 5)
        path = rows_database(bare, [record], tmp_path / "db")
        model = memoize(copy.deepcopy(bare), 0.5, path, gate=False, budget=None)
        own = record["input_ids"][:, 150:190]
        inputs = {"input_ids": own, "attention_mask": torch.ones_like(own)}
        with shares(model) as found:
            seen = last(model, inputs)
        computed = found[0].source < 0  # type: ignore[attr-defined]
        assert 0 < computed.sum() < 10
        assert gap(seen[0][computed], last(packed, inputs)[0][computed]) <= NEAR
        assert model.attmemo.stats()["reused"] == 1

    def test_how_far_a_row_may_move_is_a_setting(self, case: Case) -> None:
        ids = case.stored["input_ids"][0]
        own = torch.cat((batch([3], 7)["input_ids"][0], ids))
        inputs = {"input_ids": own[None], "attention_mask": torch.ones(1, len(own), dtype=torch.long)}
        for most, served in ((None, 1), (3, 1), (2, 0), (0, 0)):
            model = case.serve(most_moved=most)
            with shares(model) as found:
                last(model, inputs)
            assert model.attmemo.stats()["reused"] == served
            if served:
                source = found[0].source  # type: ignore[attr-defined]
                assert set(np.arange(len(own))[source >= 0] - source[source >= 0]) == {3}


class TestApproximation:
    @pytest.mark.parametrize("name", ["BERT", "MPNet", "DeBERTa-v3", "ModernBERT", "NomicBERT"])
    def test_the_error_falls_as_more_rows_are_computed(self, name: str, tmp_path: Path) -> None:
        bare, packed = pair(name)
        stored = [batch([60] * 8, seed) for seed in (1, 2)]
        path = rows_database(bare, stored, tmp_path / "db")
        model = memoize(copy.deepcopy(bare), 0.0, path, gate=False, budget=None)
        inputs = changed({name: torch.cat([one[name] for one in stored]) for name in stored[0]}, 3, 0.05)
        expected = last(packed, inputs)
        errors, computed = [], []
        for near in (0, 1, 2, 4, 8, 16, 64):
            model.attmemo.planner.rule = Rule(near=near)
            model.attmemo.reset_stats()
            errors.append(root_mean_square(last(model, inputs), expected))
            computed.append(model.attmemo.stats()["rows_computed"])
        assert computed == sorted(set(computed))
        assert computed[-1] == 16 * 60
        assert all(after <= before for before, after in pairwise(errors)), errors
        assert errors[-1] <= NEAR < errors[0]

    def test_a_sequence_does_not_depend_on_its_batch_order_or_threads(self, both: Case) -> None:
        inputs = changed(both.stored, 4)
        inputs["input_ids"][2] = batch([33], 90)["input_ids"][0]  # one without a record
        model = both.serve(0.3)
        together = last(model, inputs)
        assert model.attmemo.stats()["reused"] == len(STORED) - 1
        order = torch.tensor([3, 0, 5, 2, 4, 1])
        turned = last(model, {name: value[order] for name, value in inputs.items()})
        assert gap(turned, together[order], valid(inputs)[order]) <= NEAR
        for row, n in enumerate(STORED):
            alone = last(model, {name: value[row : row + 1, :n] for name, value in inputs.items()})
            assert gap(alone[0], together[row, :n]) <= NEAR
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            assert gap(last(model, inputs), together, valid(inputs)) <= NEAR
        finally:
            torch.set_num_threads(before)

    def test_sequences_without_a_record_are_exact_beside_those_that_have_one(self, both: Case) -> None:
        inputs = changed(both.stored, 5)
        for row in (0, 3):
            n = STORED[row]
            inputs["input_ids"][row, :n] = batch([n], 91 + row)["input_ids"][0]
        model = both.serve(0.3)
        seen, expected = last(model, inputs), last(both.packed, inputs)
        stats = model.attmemo.stats()
        assert stats["reused"] == len(STORED) - 2
        assert stats["sequences"] == len(STORED)
        for row, n in enumerate(STORED):
            assert (gap(seen[row, :n], expected[row, :n]) <= NEAR) == (row in (0, 3))

    def test_a_record_of_another_length_serves(self, both: Case) -> None:
        ids, new = both.stored["input_ids"], batch([9], 8)["input_ids"][0]
        own = [torch.cat((ids[0, :30], new)), ids[2, :18], torch.cat((ids[1, :9], ids[1, 11:20]))]
        lengths = [len(one) for one in own]
        inputs = batch(lengths)
        for row, one in enumerate(own):
            inputs["input_ids"][row, : len(one)] = one
        model = both.serve()
        with shares(model) as found:
            seen = last(model, inputs)
        assert found[0].records.tolist() == [0, 2, 1]
        expected = last(both.packed, inputs)
        for row, n in enumerate(lengths):
            near = torch.nn.functional.cosine_similarity(seen[row, :n].flatten(), expected[row, :n].flatten(), dim=0)
            assert float(near) > 0.5

    def test_threads_get_their_own_answers(self, both: Case) -> None:
        model = both.serve(0.3)
        batches = [changed(both.stored, 10 + number) for number in range(4)]
        expected = [last(model, inputs) for inputs in batches]
        worst: list[float] = []

        def serve(number: int) -> None:
            for turn in range(6):
                own = (number + turn) % 4
                worst.append(gap(last(model, batches[own]), expected[own], valid(batches[own])))

        threads = [threading.Thread(target=serve, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(worst) == 18
        assert max(worst) <= NEAR
        assert not model.attmemo.stats()["failures"]


class TestWhatIsLookedUp:
    def test_types_of_tokens_matter(self, tmp_path: Path) -> None:
        bare, packed = pair("BERT")
        stored = batch([20, 14], 12, types=True)
        model = memoize(bare, 0.5, rows_database(bare, [stored], tmp_path / "db"), gate=False, budget=None)
        assert gap(last(model, stored), last(packed, stored), valid(stored)) <= NEAR
        assert model.attmemo.stats()["repeated"] == 2
        model.attmemo.reset_stats()
        other = stored | {"token_type_ids": (1 - stored["token_type_ids"]) * stored["attention_mask"]}
        assert torch.equal(last(model, other), last(packed, other))
        assert model.attmemo.stats()["reused"] == model.attmemo.stats()["repeated"] == 0

    def test_no_types_are_types_of_zero(self, case: Case) -> None:
        model = case.serve()
        zeros = torch.zeros_like(case.stored["input_ids"])
        for types in (zeros, zeros[:1]):
            last(model, case.stored, token_type_ids=types)
        assert model.attmemo.stats()["repeated"] == 2 * len(STORED)

    @pytest.mark.parametrize("name", ["BERT", "MPNet", "DeBERTa-v2"])
    def test_positions_of_the_callers_own_have_no_records_where_embeddings_hold_them(
        self, name: str, tmp_path: Path
    ) -> None:
        case = Case(name, tmp_path)
        model = case.serve()
        positions = (torch.arange(33) + 9)[None]
        seen, expected = (last(one, case.stored, position_ids=positions) for one in (model, case.packed))
        assert gap(seen, expected, valid(case.stored)) <= NEAR
        stats = model.attmemo.stats()
        assert stats["reused"] == stats["repeated"] == 0
        assert stats["not_looked_up"] == {"positions_given": len(STORED)}

    @pytest.mark.parametrize("name", ["ModernBERT", "NomicBERT", "GTE", "DeBERTa-v3"])
    def test_where_counting_begins_is_nothing_to_models_that_see_distances(self, name: str, tmp_path: Path) -> None:
        case = Case(name, tmp_path)
        model = case.serve()
        positions = (torch.arange(33) + 9)[None]
        seen, expected = (last(one, case.stored, position_ids=positions) for one in (model, case.bare))
        assert gap(seen, expected, valid(case.stored)) <= NEAR
        assert model.attmemo.stats()["repeated"] == len(STORED)

    def test_embeddings_in_place_of_tokens_have_no_records(self, case: Case) -> None:
        model = case.serve()
        mask = case.stored["attention_mask"]
        given = {"inputs_embeds": case.bare.get_input_embeddings()(case.stored["input_ids"]), "attention_mask": mask}
        assert gap(last(model, given), last(case.packed, given), mask.bool()) <= NEAR
        assert model.attmemo.stats()["not_looked_up"] == {"no_token_ids": len(STORED)}

    def test_padding_on_the_left_is_left_to_the_original_code(self, case: Case) -> None:
        model = case.serve()
        inputs = batch([9, 3], 3, left=True)
        assert torch.equal(last(model, inputs), last(case.bare, inputs))
        assert model.attmemo.stats()["ineligible"] == {"the mask is not plain padding on the right": 2}

    def test_the_share_that_a_record_supplies_decides(self, case: Case) -> None:
        inputs = changed(case.stored, 13)
        expected = last(case.packed, inputs)
        model = case.serve(0.0)
        with shares(model) as found:
            last(model, inputs)
        share = found[0].source >= 0  # type: ignore[attr-defined]
        kept = np.array([part.mean() for part in np.split(share, np.cumsum(STORED)[:-1])])
        assert 0 < kept.min() < kept.max() < 1
        for threshold in (float(kept.min()), float(np.median(kept)), float(kept.max()) + 1e-6):
            model = case.serve(threshold)
            seen = last(model, inputs)
            assert model.attmemo.stats()["reused"] == (kept >= threshold).sum()
            for row, n in enumerate(STORED):
                assert (gap(seen[row, :n], expected[row, :n]) > NEAR) == (kept[row] >= threshold)

    def test_records_are_never_made_of_approximations(self, case: Case) -> None:
        model = case.serve()
        kept: list[list[int]] = []
        model.attmemo.engine.reuse.keep = lambda lengths, rows, hidden: kept.append(lengths)
        last(model, changed(case.stored, 14, 0.05))
        assert model.attmemo.stats()["reused"] > 0
        assert not kept
        last(model, batch([7, 9], 99))
        assert kept == [[7, 9]]

    def test_nothing_is_looked_up_where_the_gate_says_that_it_does_not_pay(
        self, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = case.serve(gate=True)
        gate = model.attmemo.planner.gate
        monkeypatch.setattr(gate, "ask", lambda seconds: False)
        assert gap(last(model, case.stored), last(case.packed, case.stored), valid(case.stored)) <= NEAR
        stats = model.attmemo.stats()
        assert stats["not_looked_up"] == {"lookup_does_not_pay": len(STORED)}
        assert stats["reused"] == stats["repeated"] == 0
        monkeypatch.undo()
        last(model, case.stored)
        assert model.attmemo.stats()["repeated"] == len(STORED)


@pytest.fixture(name="path")
def _path(both: Case, tmp_path: Path) -> Path:
    """A copy of the database, to be damaged."""
    return Path(shutil.copytree(both.path, tmp_path / "db"))


class TestThingsThatGoWrong:
    """They cost time, and never a request."""

    def exact_and_counted(self, both: Case, model: Any, what: str) -> None:
        model.attmemo.reset_stats()
        inputs = changed(both.stored, 1, 0.05)  # the record of the very input has all rows: nothing is computed then
        assert torch.equal(last(model, inputs), last(both.bare, inputs))
        stats = model.attmemo.stats()
        assert sum(stats["failures"].values()) == len(STORED)
        assert what in next(iter(stats["failures"]))
        assert stats["sequences"] == stats["reused"] == stats["repeated"] == stats["tokens"] == 0

    def packed_and_counted(self, both: Case, model: Any, what: str) -> None:
        """Records that cannot be read: their sequences are computed whole, over packed rows."""
        model.attmemo.reset_stats()
        assert gap(last(model, both.stored), last(both.packed, both.stored), valid(both.stored)) <= NEAR
        stats = model.attmemo.stats()
        assert sum(stats["failures"].values()) == len(STORED)
        assert what in next(iter(stats["failures"]))
        assert stats["sequences"] == len(STORED)
        assert stats["reused"] == 0
        assert stats["rows_computed"] == stats["tokens"]

    @pytest.mark.parametrize("kind", ["rows", "last"])
    @pytest.mark.parametrize("used", [True, False], ids=["used before", "not used before"])
    def test_a_file_that_is_cut_short(self, both: Case, path: Path, kind: str, used: bool) -> None:
        model = both.serve(path=path)
        if used:
            last(model, both.stored)
        for file in (path / "arena").glob(f"{kind}-*.slots"):
            os.truncate(file, 16)
        self.packed_and_counted(both, model, "")
        model.attmemo.reset_stats()
        other = batch([12, 9], 77)
        assert gap(last(model, other), last(both.packed, other), valid(other)) <= NEAR, "what has no record is packed"
        assert model.attmemo.stats()["sequences"] == 2

    def test_a_file_that_is_gone_before_it_was_read(self, both: Case, path: Path) -> None:
        model = both.serve(path=path)
        for file in (path / "arena").glob("rows-*.slots"):
            file.unlink()
        self.packed_and_counted(both, model, "")

    def test_a_file_that_is_gone_after_it_was_read_serves_on(self, both: Case, path: Path) -> None:
        model = both.serve(path=path)
        seen = last(model, both.stored)
        shutil.rmtree(path)
        assert torch.equal(last(model, both.stored), seen)
        assert not model.attmemo.stats()["failures"]

    def test_a_database_that_is_closed(self, both: Case) -> None:
        with Database(both.path) as database:
            model = both.serve(path=database)
            last(model, both.stored)
            assert model.attmemo.stats()["repeated"] == len(STORED)
        self.packed_and_counted(both, model, "closed")

    def test_a_kernel_that_fails(self, both: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        model = both.serve()

        def broken(*args: Any, **kwargs: Any) -> Any:
            raise MemoryError("no memory for rows")

        monkeypatch.setattr(packed_module, "attend", broken)
        monkeypatch.setattr(chain_module.native, "run", broken)
        self.exact_and_counted(both, model, "no memory for rows")

    def test_a_lookup_that_fails(self, both: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        model = both.serve()

        def broken(*args: Any, **kwargs: Any) -> Any:
            raise MemoryError("no memory to look up")

        monkeypatch.setattr(model.attmemo.planner.index, "candidates", broken)
        self.exact_and_counted(both, model, "no memory to look up")

    def test_weights_that_changed(self, both: Case) -> None:
        model, bare = both.serve(), copy.deepcopy(both.bare)
        for one in (model, bare):
            with torch.no_grad():
                one.get_input_embeddings().weight.mul_(1.5)
        assert torch.equal(last(model, both.stored), last(bare, both.stored))
        assert sum(model.attmemo.stats()["ineligible"].values()) == len(STORED)


class TestAttaching:
    @pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan"), [0.5, 0.5, 0.5], True, "most", None])
    def test_a_bad_threshold_is_refused(self, case: Case, bad: Any) -> None:
        with pytest.raises(ValueError, match="threshold"):
            case.serve(bad)

    @pytest.mark.parametrize("bad", [-1, -7])
    def test_a_bad_distance_is_refused(self, case: Case, bad: int) -> None:
        with pytest.raises(ValueError, match="most_moved"):
            case.serve(most_moved=bad)

    def test_auto_is_half_of_the_tokens(self, case: Case) -> None:
        assert case.serve("auto").attmemo.threshold == 0.5

    def test_a_database_of_maps_is_refused_by_name(self, tiny_bert: str, bert_database: Path) -> None:
        model: Any = load_model(tiny_bert).model
        with pytest.raises(DatabaseError, match=r"keeps no rows of 2 blocks.(?s:.*)build-database --reuse rows"):
            memoize(model, 0.5, bert_database, reuse="rows", budget=None)
        assert "attmemo" not in model.__dict__
        memoize(model, 0.5, bert_database, budget=None)
        assert model.attmemo.reuse == "maps"
        unmemoize(model)

    def test_a_database_of_rows_is_refused_by_name_where_maps_are_asked_for(self, case: Case) -> None:
        with pytest.raises(DatabaseError, match=r"(?s:.*)attmemo "):
            case.serve(reuse="maps")

    def test_rows_are_the_default_where_the_database_keeps_them(self, case: Case) -> None:
        model = case.serve()
        assert model.attmemo.reuse == case.serve(reuse="rows").attmemo.reuse == "rows"
        assert "rows of" in repr(model.attmemo)

    def test_a_database_of_another_model_is_refused(self, case: Case) -> None:
        other = copy.deepcopy(case.bare)
        with torch.no_grad():
            other.encoder.layer[2].output.dense.weight[3, 4] += 0.1
        with pytest.raises(StaleDatabaseError, match="weights"):
            memoize(other, 0.5, case.path, reuse="rows")

    @pytest.mark.parametrize("name", REFUSED)
    def test_a_family_without_blocks_is_refused_by_name(self, name: str, tmp_path: Path) -> None:
        from attmemo.profiler.build import build_from_inputs

        if FAMILIES[name].kind != "tokens":
            pytest.skip("its inputs are no tokens")
        model: Any = FAMILIES[name].make()
        inputs = [batch([9], seed) for seed in range(3)]
        path = build_from_inputs(model, iter(inputs), tmp_path / "db", held_out=0.0)
        with pytest.raises(UnsupportedModelError, match="reuse='rows' cannot run the blocks of "):
            memoize(model, 0.5, path, reuse="rows")

    def test_a_model_without_some_of_its_heads_is_refused_by_name_and_packed_without_records(self) -> None:
        """Heads were taken out of all layers, equally many: K and V are narrower than the hidden states."""
        model: Any = FAMILIES["BERT"].make()
        size, width = model.config.hidden_size, model.config.hidden_size // model.config.num_attention_heads
        for layer in model.encoder.layer:
            own = layer.attention.self
            own.num_attention_heads, own.all_head_size = 1, width
            own.query, own.key, own.value = (torch.nn.Linear(size, width) for _ in range(3))
            layer.attention.output.dense = torch.nn.Linear(width, size)
        inputs = batch([9, 5], 0)
        with torch.inference_mode():
            wanted = model(**inputs).last_hidden_state
            with pytest.raises(UnsupportedModelError, match=f"has {width} and {size}"):
                memoize(model, database=":memory:", reuse="rows")
            memoize(model, reuse="none")
            valid = inputs["attention_mask"].bool()
            torch.testing.assert_close(model(**inputs).last_hidden_state[valid], wanted[valid])

    def test_that_answers_are_not_guarded_is_said(self, case: Case, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, "attmemo"):
            case.serve()
        assert UNGUARDED in caplog.text

    def test_a_wrong_row_is_noticed_by_the_check(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        from attmemo.errors import AdapterCheckError

        own = rows_module.layout_of

        def shifted(lengths: Any, source: Any) -> Any:
            return own(lengths, np.where(source > 0, source - 1, source).astype(np.int32))

        monkeypatch.setattr(rows_module, "layout_of", shifted)
        with pytest.raises(AdapterCheckError, match="rows of records"):
            case.serve()

    def test_an_empty_database_computes_everything(self, case: Case, tmp_path: Path) -> None:
        path = rows_database(case.bare, [], tmp_path / "db")
        model = case.serve(path=path)
        assert gap(last(model, case.stored), last(case.packed, case.stored), valid(case.stored)) <= NEAR
        assert model.attmemo.stats()["not_looked_up"] == {"no_records": len(STORED)}

    def test_disabled_and_undone_it_is_the_original(self, both: Case) -> None:
        model = both.serve()
        expected = last(both.bare, both.stored)
        model.attmemo.disable()
        assert torch.equal(last(model, both.stored), expected)
        model.attmemo.enable()
        last(model, both.stored)
        assert model.attmemo.stats()["repeated"] == len(STORED)
        handle = model.attmemo
        unmemoize(model)
        assert torch.equal(last(model, both.stored), expected)
        assert not handle.enabled
        with pytest.raises(DatabaseError):
            handle.database.view("rows", 0, 0)


class TestSurroundings:
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_a_pipeline_and_a_sentence_transformer_are_served(
        self, tiny_bert: str, log_lines: list[str], tmp_path: Path
    ) -> None:
        from transformers import pipeline

        loaded = load_model(tiny_bert)
        texts = log_lines[:12]
        known = [dict(loaded.tokenizer([text], truncation=True, max_length=48, return_tensors="pt")) for text in texts]
        path = rows_database(loaded.model, known, tmp_path / "db")
        pipe = pipeline("text-classification", model=loaded.model, tokenizer=loaded.tokenizer, device="cpu")
        options = {"batch_size": 4, "truncation": True, "max_length": 48}
        expected = pipe(texts, **options)
        memoize(pipe, 0.5, path, gate=False, budget=None)
        seen = pipe(texts, **options)
        assert pipe.model.attmemo.stats()["repeated"] == 12
        assert [one["label"] for one in seen] == [one["label"] for one in expected]
        assert np.allclose([one["score"] for one in seen], [one["score"] for one in expected], atol=1e-5)
        pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.models import Pooling, Transformer

        embedder = SentenceTransformer(modules=[Transformer(tiny_bert, max_seq_length=48), Pooling(32)], device="cpu")
        want = embedder.encode(texts)
        memoize(embedder, 0.5, path, gate=False, budget=None)
        assert np.abs(embedder.encode(texts) - want).max() <= NEAR * np.abs(want).max()
        assert embedder.attmemo.stats()["repeated"] == 12

    @pytest.mark.skipif(not hasattr(torch.compiler, "is_exporting"), reason="transformers cannot be compiled without")
    def test_a_compiled_model_is_served(self, both: Case) -> None:
        torch.compiler.reset()
        model = both.serve()
        expected = last(model, both.stored)
        model.attmemo.reset_stats()
        compiled: Any = torch.compile(model, backend="eager")
        with torch.inference_mode():
            seen = compiled(**both.stored)[0]
        assert model.attmemo.stats()["repeated"] == len(STORED)
        assert gap(seen, expected, valid(both.stored)) <= NEAR
        torch.compiler.reset()

    def test_a_copy_is_a_bare_model(self, both: Case) -> None:
        other = copy.deepcopy(both.serve())
        assert getattr(other, "attmemo", None) is None
        assert torch.equal(last(other, both.stored), last(both.bare, both.stored))

    def test_memoizing_again_moves_between_kinds(self, both: Case) -> None:
        model = both.serve()
        memoize(model, reuse="none")
        assert gap(last(model, both.stored), last(both.bare, both.stored), valid(both.stored)) <= NEAR
        memoize(model, 0.5, both.path, gate=False, budget=None)
        last(model, both.stored)
        assert model.attmemo.stats()["repeated"] == len(STORED)


class TestStats:
    def test_the_fields_are_those_that_are_told_and_their_sums_fit(self, case: Case) -> None:
        model = case.serve(0.3)
        assert set(model.attmemo.stats()) == STATS
        assert model.attmemo.stats()["share_computed"] is None
        mixed = changed(case.stored, 20)
        mixed["input_ids"][0, :30] = batch([30], 92)["input_ids"][0]
        asked = tokens = 0
        for inputs in (case.stored, mixed, batch([4, 5], 93), batch([4, 9], 94, left=True)):
            last(model, inputs)
            asked += len(inputs["input_ids"])
            tokens += int(inputs["attention_mask"].sum())
        stats = model.attmemo.stats()
        assert stats["sequences"] + sum(stats["ineligible"].values()) + sum(stats["failures"].values()) == asked
        assert stats["tokens"] == tokens - 13
        assert 0 < stats["reused"] <= stats["sequences"]
        assert 0 < stats["rows_computed"] < stats["tokens"]
        assert stats["share_computed"] == stats["rows_computed"] / stats["tokens"]
        assert all(stats[name] > 0 for name in ("ms_lookup", "ms_plan", "ms_fetch", "ms_blocks"))
        assert stats["threshold"] == 0.3
        assert stats["database"] == str(case.path)
        model.attmemo.reset_stats()
        assert model.attmemo.stats()["sequences"] == model.attmemo.stats()["ms_blocks"] == 0

    def test_rows_that_are_supplied_are_counted_one_by_one(self, case: Case) -> None:
        model = case.serve(0.0)
        inputs = changed(case.stored, 21)
        with shares(model) as found:
            last(model, inputs)
        stats = model.attmemo.stats()
        assert stats["rows_computed"] == (found[0].source < 0).sum()  # type: ignore[attr-defined]
        assert stats["tokens"] == len(found[0].source)  # type: ignore[attr-defined]


class TestGate:
    def test_asking_changes_nothing(self) -> None:
        gate = RowGate()
        gate.record(2 * LEARNED, 0, 1.0)
        state = gate._state
        assert [gate.ask(1e-6) for _ in range(5)] == [False] * 5
        assert gate._state == state

    def test_everything_is_looked_up_before_something_is_learned(self) -> None:
        gate = RowGate()
        gate.record(LEARNED - 1, 0, 1.0)
        assert gate.ask(1e-6)
        gate.record(1, 0, 1.0)
        assert not gate.ask(1e-6)
        assert gate.ask(None), "the blocks' time is not known"

    @pytest.mark.parametrize(("per_row", "pays"), [(1e-3, True), (1e-5, False)])
    def test_what_was_saved_is_held_against_what_was_spent(self, per_row: float, pays: bool) -> None:
        gate = RowGate()
        gate.record(LEARNED, 100, 0.01)
        assert gate.ask(per_row) is pays

    def test_lookups_stop_where_nothing_is_found_and_begin_again(self) -> None:
        gate, asked = RowGate(), []
        for number in range(4000):
            asked.append(gate.ask(1e-4))
            if asked[-1]:
                gate.record(128, 0 if number < 2000 else 100, 1e-3)
            else:
                gate.leave()
        assert all(asked[: LEARNED // 128])
        assert sum(asked[1000:2000]) <= 1000 / RARELY + 1
        assert sum(asked[1000:2000]) >= 1000 / (RARELY + 1) - 1
        assert all(asked[-1000:])

    def test_savings_that_do_not_pay_for_the_lookup_do_not_open_the_gate(self) -> None:
        gate, asked = RowGate(), 0
        for _ in range(2000):
            if gate.ask(1e-6):
                asked += 1
                gate.record(128, 1, 1e-3, 1e-6)
            else:
                gate.leave()
        assert asked <= LEARNED // 128 + 2000 / RARELY + 8

    def test_one_that_is_always_open_is(self) -> None:
        gate = RowGate(always=True)
        gate.record(10 * LEARNED, 0, 10.0)
        assert gate.ask(1e-9)
        assert gate.share_saved == 0.0
