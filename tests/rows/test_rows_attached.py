"""`reuse="rows"` on a model: attached and undone, with whatever stands around it; no failure costs a request."""

from __future__ import annotations

import copy
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES
from packed_models import (
    NEAR,
    REFUSED,
    batch,
    changed,
    gap,
    last,
    rows_database,
    shares,
    valid,
)
from pools import damage
from rows_tools import STORED, Case
from stored_rows import StoredRows

from attmemo import DatabaseError, StaleDatabaseError, UnsupportedModelError, memoize, unmemoize
from attmemo.errors import ArgumentError
from attmemo.handle.rows import UNGUARDED
from attmemo.kernels import encoder_stack as chain_module
from attmemo.packed import runner as packed_module
from attmemo.profiler.models import load_model
from attmemo.rows import serve as rows_module
from attmemo.rows.gate import LEARNED, RARELY, RowGate

STATS = {
    "enabled", "reuse", "database", "folder", "threshold", "sequences", "reused", "repeated", "served", "tokens",
    "rows_computed", "share_computed", "ms_lookup", "ms_plan", "ms_fetch", "ms_blocks", "not_looked_up", "ineligible",
    "failures", "failed", "weight_bytes", "first_row", "records", "record_bytes", "offered", "guard", "linear",
    "linear_choice", "pays", "rows_afterwards", "prefixes", "local", "shadow",
}  # fmt: skip


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

    @pytest.mark.parametrize("used", [True, False], ids=["used before", "not used before"])
    def test_a_file_that_is_cut_short(self, both: Case, path: Path, used: bool) -> None:
        model = both.serve(path=path)
        if used:
            last(model, both.stored)
        for file in (path / "segments").iterdir():
            os.truncate(file, 16)
        self.packed_and_counted(both, model, "")
        model.attmemo.reset_stats()
        other = batch([12, 9], 77)
        assert gap(last(model, other), last(both.packed, other), valid(other)) <= NEAR, "what has no record is packed"
        assert model.attmemo.stats()["sequences"] == 2

    def test_a_record_that_is_damaged(self, both: Case, path: Path) -> None:
        """Its sequence is computed, the others of the batch are served."""
        model = both.serve(path=path)
        damage(StoredRows(path).kept[2])
        assert gap(last(model, both.stored), last(both.packed, both.stored), valid(both.stored)) <= NEAR
        stats = model.attmemo.stats()
        [(what, count)] = stats["failures"].items()
        assert ("does not match its checksum" in what, count) == (True, 1)
        assert stats["repeated"] == len(STORED) - 1
        last(model, both.stored)
        assert model.attmemo.stats()["failures"] == stats["failures"], "it is not found again"

    @pytest.mark.parametrize("used", [True, False], ids=["used before", "not used before"])
    def test_a_folder_that_is_gone_serves_on(self, both: Case, path: Path, used: bool) -> None:
        model = both.serve(path=path)
        if used:
            last(model, both.stored)
        shutil.rmtree(path)
        last(model, both.stored)
        stats = model.attmemo.stats()
        assert stats["repeated"] == (2 if used else 1) * len(STORED)
        assert not stats["failures"]

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
        with pytest.raises(DatabaseError, match=r"keeps maps, and no rows.(?s:.*)build-database --reuse rows"):
            memoize(model, 0.5, bert_database, reuse="rows", budget=None)
        assert "attmemo" not in model.__dict__
        memoize(model, 0.5, bert_database, budget=None)
        assert model.attmemo.reuse == "maps"
        unmemoize(model)

    def test_a_database_of_rows_is_refused_by_name_where_maps_are_asked_for(self, case: Case) -> None:
        with pytest.raises(ArgumentError, match=r"keeps rows, and no maps(?s:.*)attmemo inspect"):
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
            memoize(other, 0.5, case.path, reuse="rows", budget=0.01)

    @pytest.mark.parametrize("name", REFUSED)
    def test_a_family_without_blocks_is_refused_by_name(self, name: str, tmp_path: Path) -> None:
        from attmemo.profiler.build import build_from_inputs

        if FAMILIES[name].kind != "tokens":
            pytest.skip("its inputs are no tokens")
        model: Any = FAMILIES[name].make()
        inputs = [batch([9], seed) for seed in range(3)]
        path = build_from_inputs(model, iter(inputs), tmp_path / "db", held_out=0.0)
        with pytest.raises(UnsupportedModelError, match="reuse='rows' cannot run the blocks of "):
            memoize(model, 0.5, path, reuse="rows", budget=0.01)

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
                memoize(model, database=":memory:", reuse="rows", budget=0.01)
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
