"""`reuse="rows"`: what a record supplies is taken from it, and all else is computed."""

from __future__ import annotations

import copy
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import _bias
from packed_models import (
    MODELS,
    NEAR,
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
from rows_tools import STORED, Case
from torch import Tensor

from attmemo import DatabaseError, memoize
from attmemo.forward.plan import Plan, Reused, RowShare
from attmemo.handle.stack import blocks_of
from attmemo.kernels.align import Rule
from attmemo.models import Rows, Spans, adapter_for
from attmemo.models.deberta import DebertaBlocks
from attmemo.rows import serve as rows_module

HALF_STEP = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-9, "int8": 1 / 254}
"""Of the largest number of a row: what rounding to a type changes at most."""


@pytest.fixture(params=MODELS, scope="module", name="family")
def _family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("rows"))


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
    found, kept = blocks_of(bare, adapter_for(bare)[0], "rows"), source >= 0
    columns: dict[Any, Tensor] = {}  # those of K and V, by layer
    times: Counter[Any] = Counter()  # one block may run several times
    for block in found.blocks:
        if len(block.qkv) == 3:
            columns |= {module: torch.arange(module.out_features) for module in block.qkv[1:]}  # type: ignore[arg-type]
            times.update(block.qkv[1:])
            continue
        (module,), size = block.qkv, found.heads * found.width
        every = torch.arange(3 * size)
        if isinstance(found, DebertaBlocks):  # heads lie one behind the other
            module = block.module.attention.self.in_proj  # type: ignore[union-attr, assignment]
            every = every.view(found.heads, 3, found.width).transpose(0, 1).flatten()
        columns[module] = every[size:]
        times[module] += 1
    seen: dict[Any, list[Tensor]] = {module: [] for module in columns}

    def keep(module: Any, args: Any, output: Tensor) -> None:
        if len(seen[module]) < times[module]:  # DeBERTa calls it again, for distances
            seen[module].append(output)

    def replace(module: Any, args: Any, output: Tensor) -> None:
        if seen[module]:
            rows, both = seen[module].pop(0), columns[module]
            output[0, torch.nonzero(kept), both] = rows[0, source[kept][:, None], both]

    for hook in (keep, replace):
        handles = [module.register_forward_hook(hook) for module in columns]
        states = last(bare, {"input_ids": record if hook is keep else own})
        for handle in handles:
            handle.remove()
    return states[0]


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

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(serve, range(3)))
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
