"""Packed blocks with whatever stands around them: wrappers, threads, hooks, and weights that change."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_models import EXACT, MODELS, NEAR, batch, gap, last, pair, valid
from packed_tools import left_alone, ran_packed
from torch import Tensor, nn

from attmemo import memoize, unmemoize
from attmemo.forward.hooks import Hook
from attmemo.forward.watch import CHANGED
from attmemo.kernels.packed_weights import PANEL
from attmemo.profiler.models import load_model


class TestSurroundings:
    @pytest.mark.skipif(not hasattr(torch.compiler, "is_exporting"), reason="transformers cannot be compiled without")
    @pytest.mark.parametrize("name", ["BERT", "ModernBERT"])
    @pytest.mark.parametrize("first", ["compiled", "memoized"])
    def test_a_model_compiled_before_or_after_is_served(self, name: str, first: str) -> None:
        torch.compiler.reset()
        bare = MODELS[name]()
        model = copy.deepcopy(bare)
        inputs = batch([9, 2, 12], 20)
        if first == "compiled":
            compiled: Any = torch.compile(model, backend="eager")
            with torch.inference_mode():
                compiled(**inputs)
        memoize(model, reuse="none")
        if first == "memoized":
            compiled = torch.compile(model, backend="eager")
        with torch.inference_mode():
            seen = compiled(**inputs)[0]
        assert ran_packed(model)
        assert gap(seen, last(bare, inputs), valid(inputs)) <= NEAR
        torch.compiler.reset()

    def test_a_pipeline_answers_as_before(self, tiny_bert: str, log_lines: list[str]) -> None:
        from transformers import pipeline

        loaded = load_model(tiny_bert)
        parts = {"model": loaded.model, "tokenizer": loaded.tokenizer}
        pipe = pipeline("text-classification", **parts, device="cpu", top_k=None)
        options = {"batch_size": 4, "truncation": True, "max_length": 48}
        expected = pipe(log_lines[:10], **options)
        memoize(pipe, reuse="none")
        seen = pipe(log_lines[:10], **options)
        assert ran_packed(loaded.model)
        for ours, theirs in zip(seen, expected, strict=True):
            assert [one["label"] for one in ours] == [one["label"] for one in theirs]
            assert np.allclose([one["score"] for one in ours], [one["score"] for one in theirs], atol=1e-5)

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_a_sentence_transformer_and_a_cross_encoder_answer_as_before(
        self, tiny_bert: str, log_lines: list[str]
    ) -> None:
        pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
        from sentence_transformers import CrossEncoder, SentenceTransformer
        from sentence_transformers.models import Pooling, Transformer

        embedder = SentenceTransformer(modules=[Transformer(tiny_bert, max_seq_length=48), Pooling(32)], device="cpu")
        want = embedder.encode(log_lines[:20])
        memoize(embedder, reuse="none")
        assert np.abs(embedder.encode(log_lines[:20]) - want).max() <= NEAR * np.abs(want).max()
        assert ran_packed(embedder)
        cross = CrossEncoder(tiny_bert, device="cpu", num_labels=5)
        pairs = [(a[:40], b[:40]) for a, b in zip(log_lines[:6], log_lines[6:12], strict=True)]
        scores = cross.predict(pairs, convert_to_numpy=True)
        memoize(cross, reuse="none")
        assert np.allclose(cross.predict(pairs, convert_to_numpy=True), scores, atol=1e-4)
        assert ran_packed(cross)

    def test_threads_get_their_own_answers(self, both: tuple[Any, Any]) -> None:
        bare, model = both
        batches = [batch([9 + number, 2, 12 - number], 30 + number) for number in range(6)]
        expected = [last(bare, inputs) for inputs in batches]
        worst: list[float] = []

        def serve(number: int) -> None:
            for turn in range(8):
                own = (number + turn) % 6
                worst.append(gap(last(model, batches[own]), expected[own], valid(batches[own])))

        threads = [threading.Thread(target=serve, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(worst) == 32
        assert max(worst) <= NEAR
        stats = model.attmemo.stats()
        assert stats["sequences"] == 96
        assert ran_packed(model)

    @pytest.mark.parametrize("threads", [1, 2])
    def test_the_number_of_threads_changes_rounding_alone(self, both: tuple[Any, Any], threads: int) -> None:
        bare, model = both
        inputs = batch([40, 3, 25], 21)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            seen = last(model, inputs)
        finally:
            torch.set_num_threads(before)
        assert gap(seen, last(bare, inputs), valid(inputs)) <= NEAR

    @pytest.mark.parametrize("name", EXACT)
    def test_hooks_inside_are_called_with_what_the_original_computes(self, name: str) -> None:
        bare, model = pair(name)
        inputs = batch([9, 2], 22)
        attention = model.attmemo.packed.blocks.blocks[1].out
        block = model.attmemo.packed.blocks.blocks[1].module
        of_bare = {id(b): a for a, b in zip(bare.modules(), model.modules(), strict=True)}
        for inner in (attention, block):
            found: list[Tensor] = []

            def keep(_module: Any, _args: Any, output: Any, found: list[Tensor] = found) -> None:
                found.append(output if isinstance(output, Tensor) else output[0])

            handles = [one.register_forward_hook(keep) for one in (of_bare[id(inner)], inner)]
            expected, seen = last(bare, inputs), last(model, inputs)
            times = len(found) // 2  # one block may run several times
            assert times == sum(one.out is attention for one in model.attmemo.packed.blocks.blocks)
            assert all(torch.equal(*both) for both in zip(found[:times], found[times:], strict=True))
            assert torch.equal(seen, expected)
            assert left_alone(model) == {"a module inside of the blocks has hooks": 2}
            for handle in handles:
                handle.remove()
        assert gap(last(model, inputs), expected, valid(inputs)) <= NEAR
        assert ran_packed(model)

    def test_a_hook_on_the_whole_encoder_is_called_and_costs_nothing(self) -> None:
        bare, model = pair("BERT")
        inputs = batch([9, 2], 23)
        found: list[Any] = []
        model.encoder.register_forward_hook(lambda _module, _args, output: found.append(output))
        seen = last(model, inputs)
        assert torch.equal(found[0].last_hidden_state, seen)
        assert ran_packed(model)
        assert gap(seen, last(bare, inputs), valid(inputs)) <= NEAR

    def test_a_forward_that_someone_put_inside_is_called(self, both: tuple[Any, Any]) -> None:
        _, model = both
        inner = model.attmemo.packed.blocks.blocks[1].out
        own, calls = inner.forward, []

        def theirs(*args: Any) -> Any:
            calls.append(1)
            return own(*args)

        inner.forward = theirs
        last(model, batch([9, 2]))
        assert calls == [1]
        assert left_alone(model) == {"a module inside of the blocks has a forward of its own": 2}


class TestWeights:
    def test_changed_weights_are_noticed(self, both: tuple[Any, Any]) -> None:
        bare, model = both
        inputs = batch([9, 2], 40)
        assert gap(last(model, inputs), last(bare, inputs), valid(inputs)) <= NEAR
        model.attmemo.reset_stats()
        name = next(name for name, weight in bare.named_parameters() if ".1." in name and weight.dim() == 2)
        for one in both:
            with torch.no_grad():
                one.get_parameter(name).add_(0.25)
        assert torch.equal(last(model, inputs), last(bare, inputs))
        assert left_alone(model) == {CHANGED: 2}
        memoize(model, reuse="none")
        assert gap(last(model, inputs), last(bare, inputs), valid(inputs)) <= NEAR
        assert ran_packed(model)

    @pytest.mark.parametrize("name", EXACT)
    def test_every_weight_of_the_blocks_is_watched(self, name: str) -> None:
        _, model = pair(name)
        modules = model.attmemo.packed.blocks.modules
        weights = list({id(p): p for module in modules for p in module.parameters()}.values())
        watch = model.attmemo.engine.watch
        assert {id(p) for p in weights} <= {id(p) for p in watch._counted}
        with torch.no_grad():
            weights[-1].add_(0.1)
        last(model, batch([9, 2], 41))
        assert left_alone(model) == {CHANGED: 2}

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_another_type_is_noticed(self, both: tuple[Any, Any], dtype: torch.dtype) -> None:
        bare, model = (one.to(dtype) for one in both)
        inputs = batch([9, 2], 42)
        assert torch.equal(last(model, inputs), last(bare, inputs))
        assert left_alone(model) == {CHANGED: 2}

    def test_two_models_that_share_weights_are_both_right(self, both: tuple[Any, Any]) -> None:
        bare, model = both
        other = copy.deepcopy(bare)
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            mine.data = theirs.data
        memoize(other, reuse="none")
        inputs = batch([9, 2], 43)
        for one in (model, other):
            assert gap(last(one, inputs), last(bare, inputs), valid(inputs)) <= NEAR
            assert ran_packed(one)
        unmemoize(other)
        assert torch.equal(last(other, inputs), last(bare, inputs))
        assert gap(last(model, inputs), last(bare, inputs), valid(inputs)) <= NEAR

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    @pytest.mark.parametrize("name", ["BERT", "DeBERTa-v3", "MPNet"])
    def test_dynamic_int8_is_served_within_its_own_rounding(self, name: str) -> None:
        from torch.ao.quantization import quantize_dynamic

        model = quantize_dynamic(MODELS[name](), {nn.Linear}, dtype=torch.qint8)
        inputs = batch([9, 9], 44)
        expected = last(model, inputs)
        memoize(model, reuse="none")
        near = nn.functional.cosine_similarity(last(model, inputs).flatten(), expected.flatten(), dim=0)
        assert float(near) > 0.99
        assert ran_packed(model)

    def test_what_is_made_ready_is_counted(self, both: tuple[Any, Any]) -> None:
        _, model = both
        blocks = model.attmemo.packed.blocks
        linears = [linear for block in blocks.blocks for linear in block.linears]
        own = sum(p.numel() * p.element_size() for linear in linears for p in linear.parameters())
        filled = sum(PANEL * (linear.in_features + 1) * 4 for linear in linears)  # up to a whole panel of columns
        assert 0 < model.attmemo.stats()["weight_bytes"] < own + filled


class TestInPlaceAndBack:
    def test_nothing_but_forward_is_touched_and_everything_comes_back(self, both: tuple[Any, Any]) -> None:
        bare, model = both
        inputs = batch([9, 2], 50)
        state = bare.state_dict()
        assert list(model.state_dict()) == list(state)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        expected = last(bare, inputs)
        model.attmemo.disable()
        assert torch.equal(last(model, inputs), expected)
        assert model.attmemo.stats()["sequences"] == 0
        model.attmemo.enable()
        assert gap(last(model, inputs), expected, valid(inputs)) <= NEAR
        assert ran_packed(model)
        unmemoize(model)
        assert torch.equal(last(model, inputs), expected)
        assert not any("forward" in module.__dict__ for module in model.modules())
        assert "attmemo" not in model.__dict__

    @pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
    def test_a_copy_is_a_bare_model(self, both: tuple[Any, Any], way: str) -> None:
        bare, model = both
        ways: dict[str, Callable[[Any], Any]] = {
            "deepcopy": copy.deepcopy, "pickle": lambda one: pickle.loads(pickle.dumps(one)), "save": _saved,
        }  # fmt: skip
        other = ways[way](model)
        assert not any(isinstance(module.__dict__.get("forward"), Hook) for module in other.modules())
        assert getattr(other, "attmemo", None) is None
        inputs = batch([9, 2], 51)
        assert torch.equal(last(other, inputs), last(bare, inputs))
        last(model, inputs)
        assert model.attmemo.stats()["sequences"] == 2

    def test_save_pretrained_saves_the_model(self, both: tuple[Any, Any], tmp_path: Path) -> None:
        bare, model = both
        model.save_pretrained(tmp_path)
        inputs = batch([9, 2], 52)
        assert torch.equal(last(type(model).from_pretrained(tmp_path).eval(), inputs), last(bare, inputs))

    def test_a_trace_records_the_exact_model(self, both: tuple[Any, Any]) -> None:
        bare, model = both
        inputs = batch([9, 2], 53)
        with torch.no_grad():
            example = inputs["input_ids"], inputs["attention_mask"]
            traced = torch.jit.trace(model, example, strict=False, check_trace=False)
            other = batch([4, 9], 54)
            found = traced(other["input_ids"], other["attention_mask"])
        found = found["last_hidden_state"] if isinstance(found, dict) else found[0]
        assert gap(found, last(bare, other), valid(other)) <= NEAR
        last(model, inputs)
        assert model.attmemo.stats()["sequences"] == 2

    def test_an_exported_program_is_exact_and_the_model_is_served_afterwards(self, both: tuple[Any, Any]) -> None:
        bare, model = both
        inputs, other = batch([9, 2], 55), batch([4, 9], 56)
        with torch.no_grad():
            program = torch.export.export(model, (), dict(inputs), strict=False)
            seen = program.module()(**other)[0]
        assert gap(seen, last(bare, other), valid(other)) <= NEAR
        model.attmemo.reset_stats()
        last(model, inputs)
        assert ran_packed(model)

    def test_memoizing_again_replaces_what_was_there(self, both: tuple[Any, Any]) -> None:
        bare, model = both
        before = model.attmemo
        memoize(model, reuse="none")
        assert model.attmemo is not before
        assert not before.enabled
        inputs = batch([9, 2], 57)
        assert gap(last(model, inputs), last(bare, inputs), valid(inputs)) <= NEAR
        assert ran_packed(model)


def _saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
