"""`reuse="none"`: packed blocks give what the original gives, whatever stands around them and whatever goes wrong."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from families import FAMILIES, VOCABULARY
from packed_models import MODELS, NEAR, REFUSED, batch, gap, has_types, host_of, last, longest, pair, valid
from torch import Tensor, nn

from attmemo import AttmemoError, UnsupportedModelError, memoize, unmemoize
from attmemo.errors import AdapterCheckError, DatabaseNotFoundError
from attmemo.forward.hooks import Hook
from attmemo.forward.watch import CHANGED
from attmemo.kernels import encoder_stack as chain_module
from attmemo.kernels.packed_weights import PANEL
from attmemo.models.cache_name import CACHE_NAME
from attmemo.packed import runner as packed_module
from attmemo.packed import stack as stack_module
from attmemo.profiler.models import load_model

KINDS = ["BERT", "ModernBERT"]
"""A model whose encoder calls the blocks, and one that calls them itself."""


@pytest.fixture(params=MODELS, scope="module", name="models")
def _models(request: pytest.FixtureRequest) -> tuple[str, Any, Any]:
    """Name, bare model, and packed model, in float32."""
    return (request.param, *pair(request.param))


@pytest.fixture(params=KINDS, name="both")
def _both(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """Bare model and packed model; to be changed as one likes."""
    return pair(request.param)


def ran_packed(model: Any) -> bool:
    """Whether all sequences since the last reset ran packed; resets the counters."""
    stats = model.attmemo.stats()
    model.attmemo.reset_stats()
    return stats["sequences"] > 0 and not stats["ineligible"] and not stats["failures"]


def left_alone(model: Any) -> dict[str, int]:
    """Why the original code computed everything since the last reset; resets the counters."""
    stats = model.attmemo.stats()
    model.attmemo.reset_stats()
    assert stats["sequences"] == stats["tokens"] == 0
    return dict(stats["ineligible"])


class TestExact:
    def test_float32_is_the_original_over_valid_tokens(self, models: tuple[str, Any, Any]) -> None:
        name, bare, model = models
        most = longest(name)
        many = torch.randint(1, most + 1, (64,), generator=torch.Generator().manual_seed(1)).tolist()
        for number, lengths in enumerate([[1], [most], [5, 5, 5], [1, most, 2, most - 1], many]):
            inputs = batch(lengths, number)
            assert gap(last(model, inputs), last(bare, inputs), valid(inputs)) <= NEAR, lengths
            stats = model.attmemo.stats()
            assert stats["sequences"] == len(lengths)
            assert stats["tokens"] == stats["rows_computed"] == sum(lengths)
            assert ran_packed(model)

    def test_outputs_of_padding_are_zero(self, models: tuple[str, Any, Any]) -> None:
        _, _, model = models
        inputs = batch([3, 9, 1], padded=12)
        assert not last(model, inputs)[~valid(inputs)].any()
        assert ran_packed(model)

    def test_a_batch_without_a_mask_is_one_without_padding(self, models: tuple[str, Any, Any]) -> None:
        _, bare, model = models
        inputs = {"input_ids": batch([11, 11], 2)["input_ids"]}
        assert gap(last(model, inputs), last(bare, inputs)) <= NEAR
        assert ran_packed(model)

    def test_types_of_tokens_are_seen(self, models: tuple[str, Any, Any]) -> None:
        _, bare, model = models
        if not has_types(bare):
            pytest.skip("its tokens have no types")
        inputs = batch([9, 12, 4], 3, types=True)
        expected = last(bare, inputs)
        assert gap(last(model, inputs), expected, valid(inputs)) <= NEAR
        assert ran_packed(model)
        del inputs["token_type_ids"]
        assert gap(last(model, inputs), expected, valid(inputs)) > 0.01
        assert ran_packed(model)

    def test_padding_on_the_left_is_left_to_the_original_code(self, models: tuple[str, Any, Any]) -> None:
        _, bare, model = models
        inputs = batch([3, 9, 1], 4, left=True)
        assert torch.equal(last(model, inputs), last(bare, inputs))
        assert left_alone(model) == {"the mask is not plain padding on the right": 3}

    def test_tuples_are_returned_where_they_are_asked_for(self, models: tuple[str, Any, Any]) -> None:
        _, bare, model = models
        inputs = batch([3, 9], 5)
        with torch.inference_mode():
            expected, seen = (host_of(one)(**inputs, return_dict=False) for one in (bare, model))
        assert type(seen) is type(expected)
        assert len(seen) == len(expected)
        assert gap(seen[0], expected[0], valid(inputs)) <= NEAR

    def test_a_sequence_does_not_depend_on_its_batch(self, models: tuple[str, Any, Any]) -> None:
        _, _, model = models
        inputs = batch([9, 17, 2, 30], 6)
        together = last(model, inputs)
        order = torch.tensor([2, 0, 3, 1])
        turned = last(model, {name: value[order] for name, value in inputs.items()})
        for row, n in enumerate([9, 17, 2, 30]):
            alone = last(model, {name: value[row : row + 1, :n] for name, value in inputs.items()})
            assert gap(alone[0], together[row, :n]) <= NEAR
            assert gap(turned[order.tolist().index(row), :n], together[row, :n]) <= NEAR


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_as_near_to_float64_as_the_original(name: str) -> None:
    bare, model = pair(name, torch.bfloat16)
    exact = copy.deepcopy(bare).double()
    ours = theirs = 0.0
    for seed in range(8):
        inputs = batch([33, 5, 20, 33, 12, 28, 9, 31], seed)
        where = valid(inputs)
        reference = last(exact, inputs)[where]
        ours += float((last(model, inputs)[where].double() - reference).square().sum())
        theirs += float((last(bare, inputs)[where].double() - reference).square().sum())
    assert ran_packed(model)
    assert 0 < ours**0.5 <= 1.1 * theirs**0.5


class TestHeads:
    def test_a_pooler_gets_the_last_hidden_states(self) -> None:
        bare, model = pair("BERT")
        inputs = batch([9, 2, 17])
        with torch.inference_mode():
            expected, seen = bare(**inputs).pooler_output, model(**inputs).pooler_output
        assert gap(seen, expected) <= NEAR
        assert ran_packed(model)

    @pytest.mark.parametrize(
        ("kind", "family"),
        [("BertForMaskedLM", "BERT"), ("ModernBertForMaskedLM", "ModernBERT"),
         ("MPNetForTokenClassification", "MPNet"),
         ("DebertaV2ForSequenceClassification", "DeBERTa-v3"), ("DistilBertForQuestionAnswering", "DistilBERT"),
         ("ModernBertForSequenceClassification", "ModernBERT"), ("ElectraForPreTraining", "ELECTRA"),
         ("XLMRobertaForSequenceClassification", "XLM-RoBERTa")],
    )  # fmt: skip
    def test_a_head_is_the_models_own(self, kind: str, family: str) -> None:
        import transformers

        torch.manual_seed(3)
        bare = getattr(transformers, kind)(FAMILIES[family].make().config).eval()
        model = memoize(copy.deepcopy(bare), reuse="none")
        inputs = batch([9, 2, 17])
        with torch.inference_mode():
            expected, seen = bare(**inputs)[0], model(**inputs)[0]
        where = valid(inputs) if expected.shape[:2] == inputs["input_ids"].shape else None
        assert gap(seen, expected, where) <= NEAR
        assert ran_packed(model)


def test_outputs_have_the_class_that_the_model_gives(models: tuple[str, Any, Any]) -> None:
    _, bare, model = models
    inputs = batch([9, 4])
    model.attmemo.reset_stats()
    with torch.inference_mode():
        for more in ({}, {"return_dict": True}, {"return_dict": False}):
            seen, expected = model(**inputs, **more), bare(**inputs, **more)
            assert type(seen) is type(expected)
            assert len(seen) == len(expected)
            assert isinstance(seen, tuple) or list(seen) == list(expected)
    assert ran_packed(model)


class TestArguments:
    """Right, or left to the original code and counted."""

    @pytest.mark.parametrize("wanted", ["output_hidden_states", "output_attentions"])
    def test_what_happens_inside_is_left_to_the_original_code(self, both: tuple[Any, Any], wanted: str) -> None:
        bare, model = both
        for one in both:
            one.set_attn_implementation("eager")
        inputs = batch([9, 2])
        name = wanted.removeprefix("output_")
        with torch.inference_mode():
            expected, seen = (one(**inputs, **{wanted: True})[name] for one in both)
        assert len(seen) == len(expected) > 2
        assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))
        assert left_alone(model) == {wanted: 2}
        assert gap(last(model, inputs), last(bare, inputs), valid(inputs)) <= NEAR
        assert ran_packed(model), "one request for what is inside has no effect on later ones"

    @pytest.mark.parametrize("by", [2, 1], ids=["apart", "from seven on"])
    @pytest.mark.parametrize("name", ["BERT", "MPNet", "DeBERTa-v3", "ModernBERT", "NomicBERT", "GTE"])
    def test_positions_of_the_callers_own(self, name: str, by: int) -> None:
        bare, model = pair(name)
        inputs = batch([9, 12, 4], 7)
        positions = torch.arange(12)[None] * by + (7 if by == 1 else 0)
        plain = last(bare, inputs)
        inputs["position_ids"] = positions.expand(3, 12)
        expected = last(bare, inputs)
        if name not in ("DeBERTa-v3",) and (by == 2 or name in ("BERT", "MPNet")):
            assert gap(expected, plain, valid(inputs)) > 0.01, "the positions matter"
        assert gap(last(model, inputs), expected, valid(inputs)) <= NEAR
        if name in ("ModernBERT", "NomicBERT", "GTE") and by == 2:
            assert left_alone(model) == {"positions are not consecutive": 3}
        else:
            assert ran_packed(model)

    def test_embeddings_in_place_of_tokens(self, models: tuple[str, Any, Any]) -> None:
        _, bare, model = models
        inputs = batch([9, 12, 4], 8)
        mask = inputs["attention_mask"]
        given = {"inputs_embeds": bare.get_input_embeddings()(inputs["input_ids"]).detach(), "attention_mask": mask}
        assert gap(last(model, given), last(bare, given), mask.bool()) <= NEAR
        assert ran_packed(model)

    @pytest.mark.parametrize("name", ["BERT", "MPNet", "ModernBERT", "NomicBERT"])
    def test_a_mask_that_is_more_than_padding_is_left_to_the_original_code(self, name: str) -> None:
        bare, model = pair(name)
        ids = batch([12, 12], 9)["input_ids"]
        sees = torch.ones(2, 1, 12, 12).tril().bool()
        mask = torch.zeros(2, 1, 12, 12).masked_fill_(~sees, torch.finfo(torch.float32).min)
        inputs = {"input_ids": ids, "attention_mask": mask}
        assert torch.equal(last(model, inputs), last(bare, inputs))
        assert sum(left_alone(model).values()) == 2

    @pytest.mark.parametrize("name", ["BERT", "DeBERTa-v3", "ModernBERT"])
    def test_a_mask_of_four_dimensions_with_padding_alone_is_right(self, name: str) -> None:
        """The original code uses such a mask as it is, also in layers with a window."""
        bare, model = pair(name)
        inputs = batch([30, 22], 10)
        where = valid(inputs)
        added = (~where[:, None, None, :]).float() * torch.full((30, 1), torch.finfo(torch.float32).min)
        if name == "DeBERTa-v3":
            added = where[:, None, None, :].long()
        inputs["attention_mask"] = added
        assert gap(last(model, inputs), last(bare, inputs), where) <= NEAR

    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    def test_a_boolean_mask_of_four_dimensions_is_what_the_original_makes_of_it(
        self, models: tuple[str, Any, Any], implementation: str
    ) -> None:
        """Eager attention adds it to its scores, as the numbers 0 and 1; fused attention leaves out what is False."""
        name, bare, model = models
        if bare._supports_sdpa:
            for one in (bare, model):
                one.set_attn_implementation(implementation)
        model.attmemo.reset_stats()
        inputs = batch([9, 4], 11)
        where = valid(inputs)
        for mask in (where[:, None, None, :], where[:, None, None, :].expand(2, 1, 9, 9).contiguous()):
            inputs["attention_mask"] = mask
            try:
                expected = last(bare, inputs)
            except RuntimeError as error:  # DeBERTa takes one of these forms, or none
                with pytest.raises(RuntimeError, match=re.escape(str(error)[:40])):
                    last(model, inputs)
            else:
                assert gap(last(model, inputs), expected, where) <= NEAR
        stats = model.attmemo.stats()
        assert not stats["failures"]
        added = implementation == "eager" or not bare._supports_sdpa
        if not name.startswith("DeBERTa"):
            assert (stats["sequences"], sum(stats["ineligible"].values())) == (
                (0, 4) if added or name == "ModernBERT" else (4, 0)
            )

    @pytest.mark.parametrize("value", [torch.bool, torch.float32, torch.int32])
    def test_a_mask_may_be_of_any_type(self, both: tuple[Any, Any], value: torch.dtype) -> None:
        bare, model = both
        inputs = batch([9, 2], 11)
        where = valid(inputs)
        expected = last(bare, inputs)
        inputs["attention_mask"] = inputs["attention_mask"].to(value)
        assert gap(last(model, inputs), expected, where) <= NEAR
        assert ran_packed(model)

    def test_a_sequence_without_tokens_is_left_to_the_original_code(self, both: tuple[Any, Any]) -> None:
        bare, model = both
        inputs = batch([9, 2], 12)
        inputs["attention_mask"][1] = 0
        seen, expected = last(model, inputs), last(bare, inputs)
        assert torch.equal(seen[0], expected[0])
        assert sum(left_alone(model).values()) == 2

    def test_sequences_of_no_tokens_raise_what_the_original_raises(self, models: tuple[str, Any, Any]) -> None:
        _, bare, model = models
        model.attmemo.reset_stats()
        empty = torch.zeros(3, 0, dtype=torch.long)
        for inputs in ({"input_ids": empty}, {"input_ids": empty, "attention_mask": empty}):
            with pytest.raises((RuntimeError, IndexError)) as expected:
                bare(**inputs)
            with pytest.raises(expected.type, match=re.escape(str(expected.value))):
                model(**inputs)
        stats = model.attmemo.stats()
        assert (stats["sequences"], stats["failures"]) == (0, {})

    def test_training_and_gradients_are_left_to_the_original_code(self, both: tuple[Any, Any]) -> None:
        bare, model = both
        inputs = batch([9, 2], 13)
        model.train()
        last(model, inputs)
        assert left_alone(model) == {"training mode": 2}
        model.eval()
        host_of(model)(**inputs)[0].sum().backward()
        assert next(p.grad for p in host_of(model).parameters() if p.grad is not None).any()
        assert sum(left_alone(model).values()) == 2
        with torch.no_grad():
            assert gap(model(**inputs)[0], bare(**inputs)[0], valid(inputs)) <= NEAR
        assert ran_packed(model)

    def test_dropout_that_is_left_on_keeps_its_noise(self, both: tuple[Any, Any]) -> None:
        _, model = both
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.5
                module.train()
        inputs = batch([9, 2], 14)
        assert not torch.equal(last(model, inputs), last(model, inputs))
        assert left_alone(model) == {"dropout in training mode": 4}

    def test_autocast_is_left_to_the_original_code(self, both: tuple[Any, Any]) -> None:
        bare, model = both
        inputs = batch([9, 2], 15)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(last(model, inputs), last(bare, inputs))
        assert sum(left_alone(model).values()) == 2
        assert gap(last(model, inputs), last(bare, inputs), valid(inputs)) <= NEAR

    def test_an_encoder_that_is_called_by_hand_is_exact_and_counted(self) -> None:
        bare, model = pair("BERT")
        hidden = torch.randn(2, 6, 32)
        with torch.inference_mode():
            seen, expected = (one.encoder(hidden).last_hidden_state for one in (model, bare))
        assert torch.equal(seen, expected)
        assert left_alone(model) == {"only forwards of the whole model are looked up": 2}

    def test_a_block_that_is_called_by_hand_is_exact(self) -> None:
        bare, model = pair("ModernBERT")
        hidden, places = torch.randn(2, 6, 32), torch.arange(6)[None]
        with torch.inference_mode():
            for number in (0, 2):
                angles = bare.rotary_emb(hidden, places, bare.layers[number].attention_type)
                seen, expected = (
                    one.layers[number](hidden, attention_mask=None, position_embeddings=angles)
                    for one in (model, bare)
                )
                assert torch.equal(seen, expected)

    def test_a_decoder_of_the_family_is_refused(self) -> None:
        import transformers

        config = copy.deepcopy(FAMILIES["BERT"].make().config)
        config.is_decoder = True
        with pytest.raises(UnsupportedModelError):
            memoize(transformers.BertModel(config).eval(), reuse="none")

    def test_a_cache_is_filled_by_the_original_code(self) -> None:
        from transformers import DynamicCache

        bare, model = pair("BERT")
        inputs, caches = batch([6, 6], 16), (DynamicCache(), DynamicCache())
        seen, expected = (
            last(one, inputs, **{CACHE_NAME: cache}) for one, cache in zip((model, bare), caches, strict=True)
        )
        assert torch.equal(seen, expected)
        assert caches[0].get_seq_length() == caches[1].get_seq_length() == 6
        assert left_alone(model) == {"a key-value cache is in use": 2}


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

    @pytest.mark.parametrize("name", MODELS)
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
            assert len(found) == 2
            assert torch.equal(found[0], found[1])
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

    @pytest.mark.parametrize("name", MODELS)
    def test_every_weight_of_the_blocks_is_watched(self, name: str) -> None:
        _, model = pair(name)
        modules = model.attmemo.packed.blocks.modules
        weights = list({id(p): p for module in modules for p in module.parameters()}.values())
        watch = model.attmemo.engine._watch
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


class TestRefused:
    @pytest.mark.parametrize("name", REFUSED)
    def test_a_family_without_blocks_is_refused_by_name(self, name: str) -> None:
        model: Any = FAMILIES[name].make()
        with pytest.raises(UnsupportedModelError, match=f"blocks of {type(model).__name__}.*(?s:.*)reuse='maps'"):
            memoize(model, reuse="none")
        assert not any("forward" in module.__dict__ for module in model.modules())

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
    def test_a_type_that_cannot_be_packed_is_refused_by_name(self, dtype: torch.dtype) -> None:
        with pytest.raises(UnsupportedModelError, match=f"its weights are {dtype}"):
            memoize(MODELS["BERT"]().to(dtype), reuse="none")

    def test_a_block_that_computes_something_else_is_refused(self) -> None:
        model: Any = MODELS["BERT"]()
        own = model.encoder.layer[1].forward
        model.encoder.layer[1].forward = lambda *args, **kwargs: own(*args, **kwargs) * 1.01
        with pytest.raises(AdapterCheckError, match="block 1"):
            memoize(model, reuse="none")
        assert "attmemo" not in model.__dict__

    def test_a_norm_of_another_kind_is_refused_by_name(self) -> None:
        model: Any = MODELS["BERT"]()
        model.encoder.layer[0].output.LayerNorm = nn.RMSNorm(32)
        with pytest.raises(UnsupportedModelError, match="RMSNorm in place of a layer norm"):
            memoize(model, reuse="none")

    def test_outputs_at_wrong_places_are_noticed_by_the_check(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def turned(lengths: list[int], padded: int) -> Tensor | None:
            found = places(lengths, padded)
            return None if found is None else found.roll(1)

        places = stack_module.places_of
        monkeypatch.setattr(stack_module, "places_of", turned)
        for name in KINDS:
            with pytest.raises(AdapterCheckError):
                memoize(MODELS[name](), reuse="none")

    def test_a_stack_that_cannot_be_served_is_noticed_by_the_check(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The original code answers in its place, so the answers alone would not show it."""

        def broken(*args: Any) -> Any:
            raise RuntimeError("no memory")

        monkeypatch.setattr(stack_module, "put_back", broken)
        with pytest.raises(AdapterCheckError, match="no memory"):
            memoize(MODELS["BERT"](), reuse="none")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("what", ["attend", "_norm"])
def test_a_broken_call_costs_time_and_never_a_request(
    name: str, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bare, model = pair(name)
    model.attmemo.engine.reuse.packed._chain = None  # a call for each layer
    inputs = batch([9, 2, 12], 60)
    expected = last(bare, inputs)
    own, calls = getattr(packed_module, what), []

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:  # not the first: work of the first block is lost too
            raise MemoryError("no memory for rows")
        return own(*args, **kwargs)

    monkeypatch.setattr(packed_module, what, sometimes)
    with caplog.at_level(logging.WARNING, "attmemo"):
        assert torch.equal(last(model, inputs), expected)
    stats = model.attmemo.stats()
    assert sum(stats["failures"].values()) == 3
    assert "no memory for rows" in next(iter(stats["failures"]))
    assert stats["sequences"] == 0
    assert "no memory for rows" in caplog.text
    model.attmemo.reset_stats()
    assert gap(last(model, inputs), expected, valid(inputs)) <= NEAR, "the next request is served again"
    assert ran_packed(model)


@pytest.mark.parametrize("name", ["BERT", "DeBERTa-v3"])
def test_blocks_in_one_call_that_fail_cost_time_and_never_a_request(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bare, model = pair(name)
    inputs = batch([9, 2, 12], 60)
    expected = last(bare, inputs)

    def broken(*_: Any) -> None:
        raise MemoryError("no memory for rows")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "attmemo"):
        patch.setattr(chain_module.native, "run", broken)
        assert torch.equal(last(model, inputs), expected)
    assert sum(model.attmemo.stats()["failures"].values()) == 3
    assert "no memory for rows" in caplog.text
    model.attmemo.reset_stats()
    assert gap(last(model, inputs), expected, valid(inputs)) <= NEAR, "the next request is served again"
    assert ran_packed(model)


def _saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("asked", [{"budget": None}, {"fill": False}])
def test_without_a_database_that_may_fill_itself_the_blocks_are_packed_and_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked: dict[str, Any]
) -> None:
    monkeypatch.setenv("ATTMEMO_CACHE", str(tmp_path))
    model = memoize(FAMILIES["BERT"].make(), **asked)
    assert model.attmemo.reuse == "none"
    assert "nothing is reused" in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("asked", [{"reuse": "rows", "fill": False}, {"reuse": "maps"}, {"threshold": 0.9}])
def test_a_database_that_was_asked_for_and_is_missing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    monkeypatch.setenv("ATTMEMO_CACHE", str(tmp_path))
    with pytest.raises(DatabaseNotFoundError, match=r"no database .*for this model"):
        memoize(FAMILIES["BERT"].make(), **asked)


class TestBlocksThatTheModelCalls:
    """The first block does the work of all: what holds for one of them must hold for the whole stack."""

    def test_gradients_reach_the_blocks_behind_a_frozen_first_one(self) -> None:
        bare, model = pair("ModernBERT")
        for one in (bare, model):
            host = host_of(one)
            for part in (host.embeddings, host.layers[0]):
                part.requires_grad_(False)
            host(**batch([7, 5]))[0].sum().backward()
        for mine, own in zip(model.parameters(), bare.parameters(), strict=True):
            assert (mine.grad is None) == (own.grad is None)
        assert host_of(model).layers[1].attn.Wo.weight.grad is not None
        assert "gradients" in next(iter(model.attmemo.stats()["ineligible"]))

    def test_disabling_waits_for_a_forward_of_another_thread(self) -> None:
        bare, model = pair("ModernBERT")
        inputs, inside, go, found = batch([9, 4]), threading.Event(), threading.Event(), []
        serve = model.attmemo.engine.reuse.serve

        def slow(*given: Any) -> Any:
            served = serve(*given)
            inside.set()
            assert go.wait(30)
            return served

        model.attmemo.engine.reuse.serve = slow
        asker = threading.Thread(target=lambda: found.append(last(model, inputs)))
        asker.start()
        assert inside.wait(30)
        switch = threading.Thread(target=model.attmemo.disable)
        switch.start()
        switch.join(0.2)
        assert switch.is_alive(), "the first block has done the work of those behind it"
        go.set()
        asker.join(30)
        switch.join(30)
        assert gap(found[0], last(bare, inputs), valid(inputs)) <= NEAR
        assert not model.attmemo.enabled

    def test_a_forward_that_does_not_end_keeps_the_model_served(self) -> None:
        bare, model = pair("ModernBERT")
        inputs, inside, go, found = batch([9, 4]), threading.Event(), threading.Event(), []
        serve = model.attmemo.engine.reuse.serve

        def slow(*given: Any) -> Any:
            served = serve(*given)
            inside.set()
            assert go.wait(30)
            return served

        model.attmemo.engine.reuse.serve = slow
        asker = threading.Thread(target=lambda: found.append(last(model, inputs)))
        asker.start()
        assert inside.wait(30)
        with pytest.raises(AttmemoError, match=r"another thread has been in a forward of ModernBertModel for more"):
            model.attmemo.disable(seconds=0.01)
        assert model.attmemo.enabled
        go.set()
        asker.join(30)
        model.attmemo.engine.reuse.serve = serve
        model.attmemo.reset_stats()
        assert gap(found[0], last(bare, inputs), valid(inputs)) <= NEAR
        assert gap(last(model, inputs), last(bare, inputs), valid(inputs)) <= NEAR
        assert ran_packed(model)
        model.attmemo.disable()
        assert torch.equal(last(model, inputs), last(bare, inputs))
        assert not any(isinstance(module.__dict__.get("forward"), Hook) for module in model.modules())

    @pytest.mark.parametrize("number", [0, 1])
    def test_a_forward_put_around_a_block_sees_what_the_original_would(self, number: int) -> None:
        bare, model = pair("ModernBERT")
        seen: dict[int, Any] = {}
        for one in (bare, model):
            block = host_of(one).layers[number]

            def around(hidden: Tensor, *args: Any, own: Any = block.forward, key: int = id(one), **more: Any) -> Any:
                seen[key] = hidden
                return own(hidden, *args, **more)

            block.forward = around
        inputs = batch([8, 3])
        assert torch.equal(last(model, inputs), last(bare, inputs))
        assert torch.equal(seen[id(model)], seen[id(bare)])
        assert "a forward of its own" in next(iter(model.attmemo.stats()["ineligible"]))


@pytest.mark.parametrize("name", ["RobertaPreLayerNorm", "XLMRobertaXL"])
def test_a_relative_of_a_family_is_refused_with_the_form_that_is_unknown(name: str) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = getattr(transformers, f"{name}Config")(**sizes, vocab_size=VOCABULARY)
    model = getattr(transformers, f"{name}Model")(config).eval()
    with pytest.raises(UnsupportedModelError, match="unknown form"):
        memoize(model, reuse="none")


def test_a_model_that_cannot_be_packed_is_told_that_the_database_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ATTMEMO_CACHE", str(tmp_path))
    with pytest.raises(DatabaseNotFoundError):
        memoize(FAMILIES["BERT"].make().to(torch.float16))
    assert "nothing is reused" not in caplog.text


@pytest.mark.parametrize(
    "asked",
    [
        {"reuse": "none", "database": "somewhere"}, {"reuse": "none", "threshold": 0.5}, {"reuse": "none", "near": 2},
        {"reuse": "maps", "most_moved": 3}, {"reuse": "rows", "lookup": "layer"}, {"reuse": "rows", "fetch": "copy"},
        {"near": 1.5}, {"near": "1"}, {"most_moved": 10**30}, {"near": True},
    ],
)  # fmt: skip
def test_a_setting_of_another_kind_of_reuse_or_of_a_wrong_type_is_refused(asked: dict[str, Any]) -> None:
    model = FAMILIES["BERT"].make()
    with pytest.raises(ValueError, match=r"near|most_moved|settings of maps|reuses nothing"):
        memoize(model, **asked)
    assert not hasattr(model, "attmemo")


def test_keys_are_turned_without_being_scaled_again() -> None:
    model = MODELS["NomicBERT"]()
    rotary = host_of(model).rotary_emb
    rotary.attention_scaling = 1.139  # as YaRN has it: stored keys hold the factor already
    packed = memoize(model, reuse="none").attmemo.packed
    turn = packed.positions(32).turn("")
    assert turn is not None
    assert torch.allclose(turn.cos**2 + turn.sin**2, torch.ones_like(turn.cos), atol=1e-5)
