"""`reuse="none"`: packed blocks give what the original gives, with every head and every argument."""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

import pytest
import torch
import transformers
from families import DECODER, FAMILIES, GEMMA, _make
from packed_models import (
    EXACT,
    LEFT,
    NEAR,
    batch,
    gap,
    has_types,
    host_of,
    last,
    longest,
    of_padding,
    pair,
    uncached,
    valid,
)
from packed_tools import left_alone, ran_packed
from torch import nn
from transformers import DynamicCache

from attmemo import UnsupportedModelError, memoize
from attmemo.models.cache_name import CACHE_NAME


@pytest.fixture(params=EXACT, scope="module", name="models")
def _models(request: pytest.FixtureRequest) -> tuple[str, Any, Any]:
    """Name, bare model, and packed model, in float32."""
    return (request.param, *pair(request.param))


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

    def test_blocks_give_zeros_for_padding(self, models: tuple[str, Any, Any]) -> None:
        _, _, model = models
        inputs = batch([3, 9, 1], padded=12)
        seen = last(model, inputs)[~valid(inputs)]
        assert torch.equal(seen, of_padding(model).expand_as(seen))
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

    def test_padding_on_the_left_is_right_or_left_to_the_original_code(self, models: tuple[str, Any, Any]) -> None:
        name, bare, model = models
        most = longest(name)
        many = torch.randint(1, most + 1, (32,), generator=torch.Generator().manual_seed(2)).tolist()
        for lengths in ([3, 9, 1], [most, 1], many, [9, 9, 4]):
            inputs = batch(lengths, 4, left=True)
            if lengths == [9, 9, 4]:  # twins
                inputs["input_ids"][1] = inputs["input_ids"][0]
            if name not in LEFT:
                assert torch.equal(last(model, inputs), last(bare, inputs))
                assert left_alone(model) == {"the mask is not plain padding on the right": len(lengths)}
                continue
            seen, where = last(model, inputs), valid(inputs)
            assert gap(seen, last(bare, inputs), where) <= NEAR
            assert torch.equal(seen[~where], of_padding(model).expand_as(seen[~where]))
            assert ran_packed(model)

    def test_tuples_are_returned_where_they_are_asked_for(self, models: tuple[str, Any, Any]) -> None:
        _, bare, model = models
        inputs = batch([3, 9], 5)
        with torch.inference_mode():
            expected, seen = (host_of(one)(**inputs, return_dict=False, **uncached(bare)) for one in (bare, model))
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


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [("Mistral", {"sliding_window": 128}), ("Gemma3Text", {"sliding_window": 127}),
     ("Gemma3Text", {"sliding_window": 257, "use_bidirectional_attention": True}),
     ("ModernBert", {"local_attention": 128, "cls_token_id": 1, "sep_token_id": 2})],
)  # fmt: skip
def test_windows_in_long_texts_are_right_and_none_lies_wholly_in_padding(
    kind: str, settings: dict[str, Any], left: bool
) -> None:
    """Where all keys of a window are padding the original computes rows that are no numbers.

    Angles of far positions lose digits, so the original is told to count from 0 on the left too, as is done here.
    """
    sizes = (GEMMA if "Gemma" in kind else DECODER) | {"max_position_embeddings": 1024} | settings
    bare = _make(f"{kind}Model", f"{kind}Config", **sizes)()
    model = memoize(copy.deepcopy(bare), reuse="none")
    inputs = batch([640, 127, 128, 1, 256, 513], 3, left=left)
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    seen = last(model, inputs)
    assert gap(seen, last(bare, inputs), valid(inputs)) <= NEAR
    assert seen.isfinite().all()
    assert ran_packed(model)


@pytest.mark.parametrize("name", EXACT)
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
            seen, expected = model(**inputs, **more), bare(**inputs, **more, **uncached(bare))
            assert type(seen) is type(expected)
            assert len(seen) == len(expected)
            assert isinstance(seen, tuple) or list(seen) == list(expected)
    assert ran_packed(model)


class TestCaches:
    """Packed blocks fill no cache: who asks for one gets the original's."""

    @pytest.mark.parametrize("kind", ["Qwen3ForCausalLM", "Gemma3ForCausalLM", "MistralForCausalLM"])
    def test_a_reranker_gets_its_logits_and_no_cache_unless_it_asks(self, kind: str) -> None:
        settings = GEMMA if "Gemma" in kind else DECODER
        bare = _make(kind, kind.replace("ForCausalLM", "TextConfig" if "Gemma" in kind else "Config"), **settings)()
        model = memoize(copy.deepcopy(bare), reuse="none")
        for left in (True, False):
            inputs = batch([9, 2, 17], 5, left=left)
            with torch.inference_mode():
                seen, expected = (one(**inputs, logits_to_keep=1) for one in (model, bare))
            where = torch.ones(3, dtype=torch.bool) if left else torch.tensor([False, False, True])
            assert gap(seen.logits[:, 0], expected.logits[:, 0], where) <= NEAR
            assert seen.past_key_values is None
            assert ran_packed(model)
            with torch.inference_mode():
                seen, expected = (one(**inputs, use_cache=True) for one in (model, bare))
            assert torch.equal(seen.logits, expected.logits)
            assert seen.past_key_values.get_seq_length() == 17
            assert left_alone(model) == {"a key-value cache is in use": 3}

    def test_generation_is_the_original_codes_and_a_cache_is_never_left_empty(self) -> None:
        bare = FAMILIES["Qwen3"].make()
        model: Any = memoize(copy.deepcopy(bare), reuse="none")
        inputs = batch([9, 4], 6, left=True)
        expected = bare.generate(**inputs, max_new_tokens=8, do_sample=False)  # type: ignore[operator]
        assert torch.equal(model.generate(**inputs, max_new_tokens=8, do_sample=False), expected)
        assert model.attmemo.stats()["sequences"] == 0
        model.attmemo.reset_stats()
        seen = model.generate(**inputs, max_new_tokens=8, do_sample=False, use_cache=False)
        assert torch.equal(seen, expected)
        assert ran_packed(model), "every step runs the whole text"
        cache = DynamicCache(config=bare.config)  # type: ignore[arg-type]
        with torch.inference_mode():
            model(**inputs, **{CACHE_NAME: cache})
        assert cache.get_seq_length() == 9
        assert left_alone(model) == {"a key-value cache is in use": 2}

    @pytest.mark.parametrize(
        ("family", "setting", "reason"),
        [("Gemma 3", {"attn_logit_softcapping": 30.0}, "scores are capped"),
         ("Qwen3", {"is_causal": False}, "not causal")],
    )  # fmt: skip
    def test_what_these_blocks_do_not_know_is_refused_by_name(
        self, family: str, setting: dict[str, Any], reason: str
    ) -> None:
        config = FAMILIES[family].make().config
        for name, value in setting.items():
            setattr(config, name, value)
        with pytest.raises(UnsupportedModelError, match=reason):
            memoize(type(FAMILIES[family].make())(config).eval(), reuse="none")

    def test_sinks_and_experts_are_refused_by_name(self) -> None:
        for kind, more, reason in (
            ("GptOss", {"num_local_experts": 2}, "sinks"),
            ("Qwen3Moe", {"num_experts": 2, "moe_intermediate_size": 16}, "unknown form"),
        ):
            config = getattr(transformers, f"{kind}Config")(**DECODER | more)
            with pytest.raises(UnsupportedModelError, match=reason):
                memoize(getattr(transformers, f"{kind}Model")(config).eval(), reuse="none")

    def test_rows_are_refused_by_name(self) -> None:
        for name, reason in (("Qwen3", "are causal"), ("EuroBERT", "several heads of Q")):
            with pytest.raises(UnsupportedModelError, match=reason):
                memoize(EXACT[name](), reuse="rows", database=":memory:", budget=0.01)


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
        if "inputs_embeds" not in inspect.signature(host_of(bare).forward).parameters:
            pytest.skip("it takes tokens alone")
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
        blocks = model.attmemo.packed.blocks
        more = blocks.causal or any(block.window for block in blocks.blocks)  # than padding has to be in the mask
        if not name.startswith("DeBERTa"):
            counted = stats["sequences"], sum(stats["ineligible"].values())
            assert counted == ((0, 4) if added or more else (4, 0))

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
                bare(**inputs, **uncached(bare))
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
