"""Defects that were found by use, each as a promise: memory that moves, tracers, closed databases, errors, threads."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from handle_tools import Inputs, logits
from torch import Tensor

from attmemo import AdapterCheckError, Database, DatabaseError, memoize, unmemoize
from attmemo.forward.plan import Plan
from attmemo.forward.stats import Counters
from attmemo.kernels import map_product
from attmemo.models.bert import BertAdapter
from attmemo.perfmodel.gate import Gate


def serve(model: Any, database: Any, **options: Any) -> Any:
    return memoize(model, 0.0, database, gate=False, **options)


def forward_in_a_child(model: Any, inputs: Inputs, answers: Any) -> None:
    with torch.inference_mode():
        answers.put(model(**inputs).logits.numpy())


class TestMemoryThatMoves:
    def test_a_model_moved_to_shared_memory_is_served_on(
        self, model: Any, inputs: Inputs, exact: Tensor, bert_database: Path
    ) -> None:
        serve(model, bert_database).share_memory()
        for _ in range(3):
            assert torch.allclose(logits(model, inputs), exact, atol=1e-5)
        stats = model.attmemo.stats()
        assert (stats["ineligible"], stats["hits"] > 0) == ({}, True)

    def test_a_model_sent_to_a_spawned_process_is_right_in_both(
        self, model: Any, inputs: Inputs, exact: Tensor, bert_database: Path
    ) -> None:
        serve(model, bert_database)
        context = torch.multiprocessing.get_context("spawn")
        answers = context.Queue()
        child = context.Process(target=forward_in_a_child, args=(model, inputs, answers))
        child.start()
        given = torch.from_numpy(answers.get(timeout=120))
        child.join()
        assert torch.allclose(given, exact, atol=1e-5)
        assert torch.allclose(logits(model, inputs), exact, atol=1e-5)
        assert model.attmemo.stats()["hits"] > 0


class TestTracersAndExporters:
    def test_a_trace_records_the_exact_model(
        self, model: Any, inputs: Inputs, exact: Tensor, bert_database: Path
    ) -> None:
        serve(model, bert_database)
        assert logits(model, inputs).shape == exact.shape
        assert model.attmemo.stats()["hits"] > 0
        example = (inputs["input_ids"], inputs["attention_mask"])
        with torch.no_grad():
            traced = torch.jit.trace(model, example, strict=False, check_trace=False)
            again = traced(*example)
        found = again["logits"] if isinstance(again, dict) else again[0]
        assert torch.allclose(found, exact, atol=1e-5)

    def test_an_exported_program_is_exact_and_the_model_is_served_afterwards(
        self, model: Any, inputs: Inputs, exact: Tensor, bert_database: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        serve(model, bert_database)
        with torch.no_grad(), caplog.at_level(logging.WARNING, "attmemo"):
            program = torch.export.export(model, (), dict(inputs), strict=False)
            assert torch.allclose(program.module()(**inputs).logits, exact, atol=1e-5)
        assert "changed since memoize" not in caplog.text
        model.attmemo.reset_stats()
        logits(model, inputs)
        assert model.attmemo.stats()["hits"] > 0


class TestDatabasesThatGoAway:
    def test_a_closed_database_leaves_requests_exact_and_is_counted(
        self, model: Any, inputs: Inputs, exact: Tensor, bert_database: Path
    ) -> None:
        with Database(bert_database) as database:
            serve(model, database)
        assert model.attmemo.stats()["failed"] == 0
        assert torch.equal(logits(model, inputs), exact)
        stats = model.attmemo.stats()
        (reason,) = stats["failures"]
        assert "was closed" in reason
        assert stats["failed"] == stats["failures"][reason] > 0

    def test_a_models_own_database_may_be_given_to_a_second_memoize(
        self, model: Any, inputs: Inputs, bert_database: Path
    ) -> None:
        serve(model, bert_database)
        database = model.attmemo.database
        serve(model, database)
        logits(model, inputs)
        assert model.attmemo.stats()["hits"] > 0
        unmemoize(model)
        with pytest.raises(Exception, match="was closed"):
            database.index(-1)  # the second memoization closed the database that the first one had opened

    def test_a_lookup_without_memory_leaves_a_request_exact(
        self, model: Any, inputs: Inputs, exact: Tensor, bert_database: Path
    ) -> None:
        serve(model, bert_database)

        def broken(*_: Any) -> Any:
            raise MemoryError("no room for 12 vectors")

        model.attmemo.engine.planner.index.find = broken
        assert torch.equal(logits(model, inputs), exact)
        stats = model.attmemo.stats()
        assert (stats["hits"], list(stats["failures"])) == (
            0,
            ["the lookup failed (MemoryError: no room for 12 vectors)"],
        )


    def test_a_database_without_maps_is_refused_by_name(
        self, model: Any, bert_database: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(type(Database(bert_database).manifest), "layers_kept", lambda self, kind: 0)
        with pytest.raises(DatabaseError, match="keeps no attention maps"):
            serve(model, bert_database)

    def test_a_mask_that_cannot_be_read_for_lack_of_memory_leaves_a_request_exact(
        self, model: Any, inputs: Inputs, exact: Tensor, bert_database: Path
    ) -> None:
        serve(model, bert_database)
        engine = model.attmemo.engine

        def broken(*_: Any) -> Any:
            raise MemoryError("no room for the mask")

        engine.reuse.read = broken
        assert torch.equal(logits(model, inputs), exact)
        assert sum(model.attmemo.stats()["failures"].values()) == len(inputs["input_ids"]) * engine.layers


class TestArguments:
    def test_nothing_is_loaded_into_huge_pages_before_everything_else_is_checked(
        self, model: Any, bert_database: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loads: list[Any] = []
        monkeypatch.setattr(
            Database, "reside", lambda self, asked, *_: loads.append(asked) if asked == "hugepages" else None
        )
        with pytest.raises(ValueError, match="similarity score"):
            memoize(model, 2.0, bert_database, residency="hugepages")
        assert not loads
        memoize(model, 0.5, bert_database, residency="hugepages")
        assert loads == ["hugepages"]


class TestOneDecision:
    @pytest.mark.parametrize(("lookup", "expected"), [("sequence", [-1]), ("layer", [0, 1])])
    def test_the_gate_is_asked_once_a_forward_or_once_a_layer(
        self,
        model: Any,
        inputs: Inputs,
        flat_database: Path,
        monkeypatch: pytest.MonkeyPatch,
        lookup: Any,
        expected: list[int],
    ) -> None:
        memoize(model, 0.0, flat_database, lookup=lookup, gate=False)
        asked: list[int] = []
        real = Gate.ask

        def ask(gate: Gate, layer: int, *rest: Any) -> Any:
            asked.append(layer)
            return real(gate, layer, *rest)

        monkeypatch.setattr(Gate, "ask", ask)
        logits(model, inputs)
        assert asked == expected

    def test_later_layers_only_read_the_plan(self, model: Any, inputs: Inputs, bert_database: Path) -> None:
        engine = serve(model, bert_database).attmemo.engine
        seen: list[Plan] = []
        count = engine.counters.call
        engine.counters.call = lambda layer, plan, *rest: (seen.append(plan), count(layer, plan, *rest))
        logits(model, inputs)
        assert len(seen) == engine.layers
        assert len({id(plan) for plan in seen}) == 1


class TestTheSelfCheckRunsThePathThatServes:
    def test_a_wrong_kernel_is_noticed(self, model: Any, bert_database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = map_product.multiply

        def wrong(*given: Any) -> None:
            real(*given)
            given[-2].mul_(1.01)  # the context

        monkeypatch.setattr(map_product, "multiply", wrong)
        with pytest.raises(AdapterCheckError, match="a hit differs"):
            serve(model, bert_database)

    def test_misses_taken_from_other_sequences_are_noticed(
        self, model: Any, bert_database: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = BertAdapter.take_rows

        def wrong(self: Any, args: Any, kwargs: Any, rows: Any, cache: Any = None) -> Any:
            rows.index = rows.index.flip(0)
            return real(self, args, kwargs, rows, cache)

        monkeypatch.setattr(BertAdapter, "take_rows", wrong)
        with pytest.raises(AdapterCheckError, match=r"a miss beside hits differs|cannot be answered"):
            serve(model, bert_database)

    def test_a_lost_output_is_noticed_and_changes_nothing(
        self, model: Any, inputs: Inputs, exact: Tensor, bert_database: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(BertAdapter, "pack", lambda self, module, output, call: (output * 0, None))
        model.train()
        with pytest.raises(AdapterCheckError):
            serve(model, bert_database)
        assert model.training
        model.eval()
        assert not any("forward" in module.__dict__ for module in model.modules())
        assert torch.equal(logits(model, inputs), exact)


def test_counters_lose_nothing_under_threads() -> None:
    counters, plan = Counters(1), Plan("a reason", eligible=False)

    def count() -> None:
        for _ in range(2000):
            counters.call(0, plan, 1)
            counters.call(0, Plan(), 1)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.layers[0].sequences == 16000
    assert counters.ineligible == {"a reason": 16000}


def test_failures_keep_a_bounded_number_of_texts() -> None:
    counters = Counters(1)
    for number in range(100):
        counters.failure("the lookup failed", OSError(f"file {number}"), 1)
    assert sum(counters.failures.values()) == 100
    assert len(counters.failures) <= 21
    assert counters.failures["the lookup failed (OSError: file 3)"] == 1


def test_a_failure_is_told_at_first_and_whenever_it_is_ten_times_as_many() -> None:
    counters = Counters(1)
    told = [count for _ in range(1200) if (count := counters.failure("the lookup failed", OSError("a file"), 1))]
    assert told == [1, 10, 100, 1000]
    assert counters.failure("the lookup failed", OSError("another file"), 25) == 25
    assert counters.failed == 1225


def test_the_process_pool_of_a_sentence_transformer_leaves_the_parent_alive(
    tiny_bert: str, bert_database: Path, log_lines: list[str], tmp_path: Path
) -> None:
    sentence = pytest.importorskip("sentence_transformers")
    folder = shutil.copytree(tiny_bert, tmp_path / "model")
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    words = Transformer(str(folder), max_seq_length=48)
    whole = sentence.SentenceTransformer(modules=[words, Pooling(words.get_word_embedding_dimension())], device="cpu")
    serve(whole, bert_database)
    before = whole.encode(log_lines[:6])
    pool = whole.start_multi_process_pool(["cpu"])
    try:
        inside = whole.encode(log_lines[:6], pool=pool)
    finally:
        whole.stop_multi_process_pool(pool)
    assert abs(inside - before).max() < 1e-2
    assert abs(whole.encode(log_lines[:6]) - before).max() < 1e-2
