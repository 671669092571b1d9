"""The models that are recognised, how their calls are read, and what the self-check refuses."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertModel,
    ASTConfig,
    ASTModel,
    BertConfig,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
    CamembertConfig,
    CamembertForSequenceClassification,
    CamembertModel,
    DebertaConfig,
    DebertaModel,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    DebertaV2Model,
    DogeConfig,
    DogeModel,
    ElectraConfig,
    ElectraForSequenceClassification,
    ElectraModel,
    GPT2Config,
    GPT2Model,
    GPTBigCodeConfig,
    GPTBigCodeModel,
    LlamaConfig,
    LlamaModel,
    NomicBertConfig,
    NomicBertModel,
    Olmo2Config,
    Olmo2Model,
    OlmoConfig,
    OlmoModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
    Speech2TextConfig,
    Speech2TextModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
    XLNetConfig,
    XLNetModel,
)

from attmemo import AdapterCheckError, UnsupportedModelError, memoize, unmemoize
from attmemo.models import Adapter, Site, Spans, adapter_for, check_adapter, encoder_of
from attmemo.models.base import Rows
from attmemo.models.bert import BertAdapter
from attmemo.models.cache_name import CACHE_NAME
from attmemo.models.deberta_v2 import DebertaV2Adapter
from attmemo.models.masks import spans_of
from attmemo.models.mpnet import MPNetAdapter
from attmemo.models.projections import Slices

LAYERS = 3
SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # the default gives maps so uniform that any map passes for any other
}

BERT_LIKE: dict[str, tuple[type[Any], type[Any], type[Any]]] = {
    "bert": (BertConfig, BertModel, BertForSequenceClassification),
    "roberta": (RobertaConfig, RobertaModel, RobertaForSequenceClassification),
    "xlm-roberta": (XLMRobertaConfig, XLMRobertaModel, XLMRobertaForSequenceClassification),
    "electra": (ElectraConfig, ElectraModel, ElectraForSequenceClassification),
    "camembert": (CamembertConfig, CamembertModel, CamembertForSequenceClassification),
}
DEBERTA: dict[str, dict[str, Any]] = {
    "as v3": {
        "position_buckets": 16,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
    },
    "as v2": {"position_buckets": 16, "share_att_key": True, "conv_kernel_size": 3, "conv_act": "gelu"},
    "own position keys": {"position_buckets": 16, "share_att_key": False},
    "no buckets": {"position_buckets": -1, "share_att_key": True},
    "own keys, no buckets": {"position_buckets": -1, "share_att_key": False},
    "c2p": {"position_buckets": 16, "share_att_key": False, "pos_att_type": ["c2p"]},
    "p2c": {"position_buckets": 16, "share_att_key": False, "pos_att_type": ["p2c"]},
    "not relative": {"relative_attention": False, "pos_att_type": []},
}


def make_bert_like(family: str, *, head: bool, **more: Any) -> nn.Module:
    config_class, model_class, head_class = BERT_LIKE[family]
    torch.manual_seed(1)
    own = {"embedding_size": 16} if family == "electra" else {}
    config = config_class(**SIZES | own | more)
    model: nn.Module = (head_class if head else model_class)(config).eval()
    return model


def make_deberta(*, head: bool = False, **more: Any) -> nn.Module:
    torch.manual_seed(1)
    defaults = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0}
    config = DebertaV2Config(**SIZES | defaults | more)
    model: nn.Module = (DebertaV2ForSequenceClassification if head else DebertaV2Model)(config).eval()
    return model


KNOWN: dict[str, Callable[[], nn.Module]] = {
    f"{family}{' classifier' if head else ''}": lambda family=family, head=head: make_bert_like(family, head=head)  # type: ignore[misc]
    for family in BERT_LIKE
    for head in (False, True)
}
KNOWN |= {f"deberta-v2 {name}": lambda more=more: make_deberta(**more) for name, more in DEBERTA.items()}  # type: ignore[misc]
KNOWN |= {"deberta-v2 classifier": lambda: make_deberta(head=True, **DEBERTA["as v3"])}

UNKNOWN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bert decoder": (lambda: BertModel(BertConfig(**SIZES, is_decoder=True)), "none of its modules"),
    "bert decoder with cross-attention": (
        lambda: BertModel(BertConfig(**SIZES, is_decoder=True, add_cross_attention=True)),
        "none of its modules",
    ),
    "bert language model": (lambda: BertLMHeadModel(BertConfig(**SIZES, is_decoder=True)), "none of its modules"),
    "xlnet": (
        lambda: XLNetModel(XLNetConfig(vocab_size=120, d_model=32, n_layer=2, n_head=4, d_inner=48)),
        "none of its modules",
    ),
    "gpt2 with cross-attention": (
        lambda: GPT2Model(
            GPT2Config(vocab_size=120, n_embd=32, n_layer=2, n_head=4, n_positions=64, add_cross_attention=True)
        ),
        "it looks like gpt2, but it has cross-attention layers",
    ),
    "deberta with talking heads": (
        lambda: DebertaModel(DebertaConfig(**SIZES, talking_head=True, relative_attention=True, pos_att_type=["c2p"])),
        "it looks like deberta, but its heads are mixed after the softmax",
    ),
    "olmo that clamps": (
        lambda: OlmoModel(OlmoConfig(**SIZES, clip_qkv=8.0)),
        "it looks like llama, but it clamps Q, K and V",
    ),
    "nomic whose positions depend on the batch": (
        lambda: NomicBertModel(
            NomicBertConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
        ),
        "it looks like rotary-encoder, but its rotary positions depend on the length of the batch",
    ),
    "gpt-bigcode": (
        lambda: GPTBigCodeModel(GPTBigCodeConfig(vocab_size=120, n_embd=32, n_layer=2, n_head=4, n_positions=64)),
        "none of its modules",
    ),
    "doge, whose attention does not say whether it is causal": (
        lambda: DogeModel(DogeConfig(**SIZES, num_key_value_heads=2)),
        "none of its modules",
    ),
    "llama whose positions depend on the batch": (
        lambda: LlamaModel(
            LlamaConfig(
                **SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
            )
        ),
        "it looks like llama, but its rotary positions depend on the length of the batch",
    ),
}


NO_TOKENS: dict[str, Callable[[], nn.Module]] = {
    "audio spectrogram transformer": lambda: ASTModel(
        ASTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, num_mel_bins=16,
            max_length=32, patch_size=8, time_stride=8, frequency_stride=8,
        )
    ),
    "speech to text": lambda: Speech2TextModel(
        Speech2TextConfig(
            vocab_size=120, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, input_feat_per_channel=8,
            conv_channels=16, max_source_positions=64, max_target_positions=32,
        )
    ),
}  # fmt: skip


def state_of(model: nn.Module) -> list[tuple[str, set[str], bool, int]]:
    """What patching a model would change: attributes, training flags and hooks of every module."""
    return [
        (name, set(m.__dict__), m.training, len(m._forward_hooks) + len(m._forward_pre_hooks))
        for name, m in model.named_modules()
    ]


def refused(model: nn.Module, error: type[Exception], match: str, call: Callable[[], object]) -> None:
    """`call` raises, and leaves the model as it is, its configuration included."""
    before, implementation = state_of(model), model.config._attn_implementation  # type: ignore[union-attr]
    with pytest.raises(error, match=match):
        call()
    assert state_of(model) == before
    assert model.config._attn_implementation == implementation  # type: ignore[union-attr]


def attention_of(model: nn.Module, layer: int) -> nn.Module:
    base: Any = model.base_model
    found: nn.Module = base.encoder.layer[layer].attention.self
    return found


@pytest.fixture(params=KNOWN, name="known")
def _known(request: pytest.FixtureRequest) -> nn.Module:
    return KNOWN[request.param]()


class TestKnownFamilies:
    def test_every_layer_is_found_once_and_in_order(self, known: nn.Module) -> None:
        adapter, sites = adapter_for(known)
        assert adapter.family == ("deberta-v2" if "Deberta" in type(known).__name__ else "bert")
        assert [site.layer for site in sites] == list(range(LAYERS))
        assert [site.module for site in sites] == [attention_of(known, layer) for layer in range(LAYERS)]

    def test_the_check_passes_and_changes_nothing(self, known: nn.Module) -> None:
        adapter, sites = adapter_for(known)
        before, implementation = state_of(known), known.config._attn_implementation  # type: ignore[union-attr]
        assert check_adapter(adapter, known, sites) <= 1e-5  # exactly 0 on some processors
        assert state_of(known) == before
        assert known.config._attn_implementation == implementation  # type: ignore[union-attr]

    def test_the_check_notices_another_map(self, known: nn.Module) -> None:
        adapter, sites = adapter_for(known)

        class Uniform(type(adapter)):  # type: ignore[misc]
            def map_of(self, output: Any) -> Tensor:
                apm: Tensor = super().map_of(output)
                return torch.full_like(apm, 1.0 / apm.shape[-1])

        with pytest.raises(AdapterCheckError, match="layer 0"):
            check_adapter(Uniform(), known, sites)

    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    def test_the_check_passes_for_every_attention_implementation(self, implementation: str) -> None:
        model = make_bert_like("bert", head=False, attn_implementation=implementation)
        check_adapter(*_arguments(model))
        assert model.config._attn_implementation == implementation  # type: ignore[union-attr]

    def test_the_check_leaves_the_users_random_numbers_alone(self) -> None:
        model = make_bert_like("bert", head=True)
        torch.manual_seed(5)
        wanted = torch.rand(1)
        torch.manual_seed(5)
        check_adapter(*_arguments(model))
        assert torch.equal(torch.rand(1), wanted)

    def test_the_check_keeps_the_training_mode_of_every_part(self) -> None:
        model = make_bert_like("bert", head=True)
        attention_of(model, 1).train()
        before = state_of(model)
        check_adapter(*_arguments(model))
        assert state_of(model) == before

    def test_bfloat16_is_judged_by_its_own_precision(self) -> None:
        check_adapter(*_arguments(make_bert_like("bert", head=False).to(torch.bfloat16)))


def _arguments(model: nn.Module) -> tuple[Adapter, nn.Module, list[Site]]:
    adapter, sites = adapter_for(model)
    return adapter, model, sites


class TestRefusedModels:
    @pytest.mark.parametrize("name", UNKNOWN)
    def test_an_unknown_family_is_refused_by_name_and_left_alone(self, name: str) -> None:
        torch.manual_seed(1)
        make, reason = UNKNOWN[name]
        model = make().eval()
        with pytest.raises(UnsupportedModelError, match=r"attmemo families.*docs/own-family\.md"):
            memoize(model)
        refused(
            model, UnsupportedModelError, rf"no adapter knows .* \(model type '.*{reason}", lambda: memoize(model)
        )

    def test_an_object_that_is_no_model_is_refused(self) -> None:
        for thing in (nn.Linear(2, 2), None):
            with pytest.raises(UnsupportedModelError, match=r"holds no transformers model"):
                memoize(thing)

    def test_a_layer_with_an_adapted_value_projection_is_refused(self) -> None:
        model = make_bert_like("bert", head=False)

        class Adapted(nn.Linear):
            """Like the wrapper of a low-rank adapter."""

        attention_of(model, 1).value = Adapted(32, 32)
        refused(model, UnsupportedModelError, "looks like bert, but 2 of 3 layers", lambda: adapter_for(model))

    @pytest.mark.parametrize(
        "make", [lambda: make_bert_like("bert", head=True), lambda: make_deberta(**DEBERTA["as v3"])]
    )
    @pytest.mark.parametrize("factor", [1.001, float("nan")])
    def test_a_changed_attention_is_refused(self, make: Callable[[], nn.Module], factor: float) -> None:
        model = make()
        module = attention_of(model, 1)
        own = module.forward

        def scaled(*args: Any, **kwargs: Any) -> Any:
            context, apm = own(*args, **kwargs)
            return context * factor, apm

        module.forward = scaled
        with torch.no_grad():
            assert scaled is module.forward
            refused(model, AdapterCheckError, "layer 1 ", lambda: check_adapter(*_arguments(model)))
        assert module.forward is scaled

    def test_a_lookalike_with_another_norm_is_refused_by_name(self) -> None:
        torch.manual_seed(1)  # OLMo 2 norms all of K at once
        model = Olmo2Model(Olmo2Config(**SIZES)).eval()
        refused(model, AdapterCheckError, "cannot be checked", lambda: check_adapter(*_arguments(model)))

    @pytest.mark.parametrize("name", NO_TOKENS)
    def test_a_lookalike_with_other_inputs_is_refused(self, name: str) -> None:
        torch.manual_seed(1)
        model = NO_TOKENS[name]().eval()
        refused(model, AdapterCheckError, "cannot be checked", lambda: check_adapter(*_arguments(model)))

    def test_attention_without_a_causal_flag_is_refused_by_name(self) -> None:
        from transformers.models.mllama.configuration_mllama import MllamaVisionConfig
        from transformers.models.mllama.modeling_mllama import MllamaVisionModel

        config = MllamaVisionConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_global_layers=1, attention_heads=4,
            image_size=16, patch_size=4, intermediate_layers_indices=[0], vision_output_dim=64, max_num_tiles=1,
            supported_aspect_ratios=[[1, 1]],
        )  # fmt: skip
        with pytest.raises(UnsupportedModelError, match="no adapter knows"):
            adapter_for(MllamaVisionModel(config))

    def test_models_of_one_family_with_different_widths_both_pass(self) -> None:
        for hidden in (32, 64):
            torch.manual_seed(1)
            config = DebertaConfig(**SIZES | {"hidden_size": hidden}, relative_attention=True, pos_att_type=["c2p"])
            check_adapter(*_arguments(DebertaModel(config).eval()))

    def test_a_weight_at_the_address_of_a_deleted_one_is_read_again(self) -> None:
        slices = Slices(lambda weight: weight[:, :1])
        module, memory = nn.Linear(2, 2), torch.zeros(2, 2)
        assert slices.of(module, nn.Parameter(memory)).sum() == 0
        memory.data.fill_(1)  # counts no version
        assert slices.of(module, nn.Parameter(memory)).sum() == 2

    def test_a_weight_changed_through_data_is_read_again(self) -> None:
        torch.manual_seed(1)
        model = DebertaModel(DebertaConfig(**SIZES, relative_attention=True, pos_att_type=["c2p"])).eval()
        check_adapter(*_arguments(model))
        attention_of(model, 1).in_proj.weight.data.mul_(0.5)  # type: ignore[union-attr, operator]
        check_adapter(*_arguments(model))

    def test_a_model_that_does_not_call_its_layers_is_refused(self) -> None:
        model = make_bert_like("bert", head=False)
        layer = model.encoder.layer[2]  # type: ignore[union-attr,index]
        layer.forward = lambda hidden, *args, **kwargs: hidden
        refused(model, AdapterCheckError, "layer 2 .* is not called", lambda: check_adapter(*_arguments(model)))

    def test_a_lookalike_whose_layer_includes_projection_and_norm_is_refused(self) -> None:
        torch.manual_seed(1)  # ALBERT has the names of BERT, but projection and residual are inside
        model = AlbertModel(AlbertConfig(**SIZES | {"embedding_size": 16, "num_hidden_layers": 1})).eval()
        module: Any = model.encoder.albert_layer_groups[0].albert_layers[0].attention  # type: ignore[union-attr,index]
        refused(
            model,
            AdapterCheckError,
            "layer 0 ",
            lambda: check_adapter(BertAdapter(), model, [Site(0, "attention", module)]),
        )

    def test_attention_that_gives_no_map_is_refused(self) -> None:
        model = make_bert_like("bert", head=False)
        module = attention_of(model, 0)
        own = module.forward
        module.forward = lambda *args, **kwargs: (own(*args, **kwargs)[0], None)
        refused(model, AdapterCheckError, "layer 0 .* no attention map", lambda: check_adapter(*_arguments(model)))

    def test_a_mask_that_is_read_wrongly_is_refused(self) -> None:
        model = make_bert_like("bert", head=False)

        class Blind(BertAdapter):
            def spans(self, module: nn.Module, mask: Any, batch: int, length: int) -> Spans | None:
                return Spans([length] * batch)

        with pytest.raises(AdapterCheckError, match="reads as lengths"):
            check_adapter(Blind(), model, adapter_for(model)[1])

    def test_unmemoize_of_a_bare_model_changes_nothing(self) -> None:
        model = make_bert_like("bert", head=True)
        before = state_of(model)
        assert unmemoize(model) is model
        assert state_of(model) == before


class TestFindingTheModel:
    def test_a_transformers_model_is_found_in_itself(self) -> None:
        model = make_bert_like("bert", head=True)
        assert encoder_of(model) is model

    def test_a_model_in_a_wrapper_is_found(self) -> None:
        model = make_bert_like("bert", head=False)

        class Wrapper(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.auto_model = model

        assert encoder_of(Wrapper()) is model
        assert encoder_of(nn.Sequential(Wrapper(), nn.Identity())) is model


def mask_of(lengths: list[int], length: int) -> Tensor:
    """``[B, L]``, True where a token is valid."""
    return torch.arange(length)[None] < torch.tensor(lengths)[:, None]


def additive(valid: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``[B, 1, L, L]`` as eager attention gets it."""
    mask = torch.zeros(valid.shape, dtype=dtype).masked_fill(~valid, torch.finfo(dtype).min)
    return mask[:, None, None, :].expand(-1, 1, valid.shape[1], -1)


def boolean(valid: Tensor) -> Tensor:
    """``[B, 1, L, L]`` as fused attention gets it."""
    return valid[:, None, None, :].expand(-1, 1, valid.shape[1], -1)


def outer(valid: Tensor) -> Tensor:
    """``[B, 1, L, L]`` as DeBERTa makes it."""
    return (valid[:, :, None] & valid[:, None, :])[:, None].long()


FORMS: dict[str, tuple[Adapter, Callable[[Tensor], Tensor]]] = {
    "float": (BertAdapter(), additive),
    "half": (BertAdapter(), lambda valid: additive(valid, torch.float16)),
    "float, own memory": (BertAdapter(), lambda valid: additive(valid).contiguous()),
    "float, one row": (BertAdapter(), lambda valid: additive(valid)[:, :, :1]),
    "bool": (BertAdapter(), boolean),
    "bool, own memory": (BertAdapter(), lambda valid: boolean(valid).contiguous()),
    "outer product": (DebertaV2Adapter(), outer),
    "outer product, float": (DebertaV2Adapter(), lambda valid: outer(valid).float()),
    "outer product, bool": (DebertaV2Adapter(), lambda valid: outer(valid).bool()),
}


def lengths_of(adapter: Adapter, mask: Any, batch: int, length: int) -> list[int] | None:
    """The lengths that a mask is read as; None: the call stays exact."""
    spans = adapter.spans(nn.Identity(), mask, batch, length)
    assert spans is None or not spans.left
    return None if spans is None else spans.lengths


@pytest.mark.parametrize("form", FORMS)
class TestMasks:
    @settings(derandomize=True, deadline=None, max_examples=30)
    @given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), more=st.integers(0, 4))
    def test_padding_at_the_end_reads_as_its_lengths(self, form: str, lengths: list[int], more: int) -> None:
        adapter, make = FORMS[form]
        length = max(lengths) + more
        assert lengths_of(adapter, make(mask_of(lengths, length)), len(lengths), length) == lengths

    @settings(derandomize=True, deadline=None, max_examples=60)
    @given(valid=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4))
    def test_any_other_padding_stays_exact(self, form: str, valid: list[list[bool]]) -> None:
        adapter, make = FORMS[form]
        counts = [sum(row) for row in valid]
        plain = all(row == [True] * n + [False] * (5 - n) and n > 0 for row, n in zip(valid, counts, strict=True))
        found = lengths_of(adapter, make(torch.tensor(valid)), len(valid), 5)
        assert found == (counts if plain else None)

    def test_a_mask_of_another_batch_or_length_stays_exact(self, form: str) -> None:
        adapter, make = FORMS[form]
        mask = make(mask_of([3, 5], 5))
        assert lengths_of(adapter, mask, 3, 5) is None
        assert lengths_of(adapter, mask, 2, 6) is None
        assert lengths_of(adapter, mask[:, 0], 2, 5) is None
        assert lengths_of(adapter, mask.repeat(1, 4, 1, 1), 2, 5) is None


class TestOddMasks:
    @pytest.mark.parametrize("adapter", [BertAdapter(), DebertaV2Adapter()])
    def test_no_mask_means_that_every_token_is_valid(self, adapter: Adapter) -> None:
        assert lengths_of(adapter, None, 2, 7) == [7, 7]

    def test_one_mask_for_all_sequences_applies_to_each(self) -> None:
        assert lengths_of(BertAdapter(), boolean(mask_of([3], 5)), 4, 5) == [3, 3, 3, 3]

    @pytest.mark.parametrize("adapter", [BertAdapter(), DebertaV2Adapter()])
    def test_a_causal_mask_stays_exact(self, adapter: Adapter) -> None:
        assert lengths_of(adapter, torch.ones(5, 5).tril().bool().expand(2, 1, 5, 5), 2, 5) is None

    @pytest.mark.parametrize("adapter", [BertAdapter(), DebertaV2Adapter()])
    def test_blocks_of_packed_sequences_stay_exact(self, adapter: Adapter) -> None:
        blocks = torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).bool().expand(2, 1, 5, 5)
        assert lengths_of(adapter, blocks, 2, 5) is None

    @pytest.mark.parametrize("bias", [-1e4, -3.0, 1e-6, float("nan")])
    def test_a_bias_is_not_taken_for_padding(self, bias: float) -> None:
        mask = additive(mask_of([5], 5)).clone()
        mask[..., 4] = bias
        assert lengths_of(BertAdapter(), mask, 1, 5) is None

    def test_a_boolean_mask_stays_exact_where_attention_adds_it(self) -> None:
        mask, eager, fused = boolean(mask_of([3, 5], 5)), nn.Identity(), nn.Identity()
        eager.config = SimpleNamespace(_attn_implementation="eager")  # type: ignore[assignment]
        fused.config = SimpleNamespace(_attn_implementation="sdpa")  # type: ignore[assignment]
        assert BertAdapter().spans(eager, mask, 2, 5) is None
        assert BertAdapter().spans(fused, mask, 2, 5) == Spans([3, 5])
        assert BertAdapter().spans(eager, additive(mask_of([3, 5], 5)), 2, 5) == Spans([3, 5])
        assert MPNetAdapter().spans(nn.Identity(), mask, 2, 5) is None, "it has no other attention"

    def test_minus_infinity_is_padding(self) -> None:
        mask = torch.zeros(1, 1, 1, 5)
        mask[..., 3:] = float("-inf")
        assert lengths_of(BertAdapter(), mask, 1, 5) == [3]

    @pytest.mark.parametrize("mask", [torch.ones(1, 1, 5, 5, dtype=torch.long), object()])
    def test_a_mask_that_is_neither_bool_nor_float_stays_exact(self, mask: Any) -> None:
        assert lengths_of(BertAdapter(), mask, 1, 5) is None

    def test_a_sequence_without_a_valid_token_stays_exact(self) -> None:
        assert spans_of(torch.tensor([[True, False], [False, False]])) is None

    def test_spans_are_padding_on_one_side_of_all_sequences(self) -> None:
        given = {"1110 1111": [3, 4], "0111 1111": [3, 4], "1111 1111": [4, 4], "1011 1111": None, "0110 1111": None,
                 "1110 0111": None}  # fmt: skip
        for bits, lengths in given.items():
            found = spans_of(torch.tensor([[bit == "1" for bit in row] for row in bits.split()]))
            assert (None if found is None else found.lengths) == lengths
            assert found is None or found.left is bits.startswith("0")

    def test_a_mask_that_differs_between_valid_queries_stays_exact(self) -> None:
        allowed = outer(mask_of([4], 6)).bool()
        allowed[0, 0, 1, 3] = False
        assert lengths_of(DebertaV2Adapter(), allowed, 1, 6) is None


HIDDEN = torch.zeros(2, 5, 32)


class TestReading:
    @pytest.mark.parametrize(
        ("more", "reason"),
        [
            ({CACHE_NAME: object()}, "key-value cache"),
            ({"encoder_hidden_states": HIDDEN}, "cross-attention"),
            ({"output_attentions": True}, "output_attentions"),
            ({"is_causal": True}, "is_causal"),
            ({"cu_seq_lens_q": torch.tensor([0, 5])}, "cu_seq_lens_q"),
            ({"position_bias": HIDDEN}, "position_bias"),
        ],
    )
    def test_an_ineligible_bert_call_says_why(self, more: dict[str, Any], reason: str) -> None:
        read = BertAdapter().read(
            nn.Identity(), (HIDDEN,), {"attention_mask": None, "encoder_hidden_states": None} | more
        )
        assert isinstance(read, str)
        assert reason in read

    @pytest.mark.parametrize(
        ("args", "more", "reason"),
        [
            ((HIDDEN, None, True), {}, "output_attentions"),
            ((HIDDEN, None), {"output_attentions": True}, "output_attentions"),
            ((HIDDEN, None, False, HIDDEN), {}, "query states"),
            ((HIDDEN, None), {"query_states": HIDDEN}, "query states"),
        ],
    )
    def test_an_ineligible_deberta_call_says_why(
        self, args: tuple[Any, ...], more: dict[str, Any], reason: str
    ) -> None:
        read = DebertaV2Adapter().read(nn.Identity(), args, more)
        assert isinstance(read, str)
        assert reason in read

    @pytest.mark.parametrize("adapter", [BertAdapter(), DebertaV2Adapter()])
    @pytest.mark.parametrize("hidden", [None, torch.zeros(5, 32), torch.zeros(2, 1, 5, 32)])
    def test_hidden_states_of_another_shape_stay_exact(self, adapter: Adapter, hidden: Any) -> None:
        assert isinstance(adapter.read(nn.Identity(), (hidden, None), {}), str)

    @pytest.mark.parametrize("adapter", [BertAdapter(), DebertaV2Adapter()])
    def test_arguments_are_found_by_position_and_by_name(self, adapter: Adapter) -> None:
        mask = boolean(mask_of([3, 5], 5))
        for call in (
            adapter.read(nn.Identity(), (HIDDEN, mask), {}),
            adapter.read(nn.Identity(), (HIDDEN,), {"attention_mask": mask}),
            adapter.read(nn.Identity(), (), {"hidden_states": HIDDEN, "attention_mask": mask}),
        ):
            assert not isinstance(call, str)
            assert call.hidden is HIDDEN
            assert call.mask is mask


class TestTakingRows:
    def test_only_tensors_of_the_batch_are_cut(self) -> None:
        mask = torch.arange(3.0)[:, None]
        rows = Rows(3, np.array([2, 0]))
        for keep in (False, True):
            assert rows.of(mask, keep).tolist() == rows.of(mask.clone(), keep).tolist() == [[2.0], [0.0]]
            assert [part.tolist() for part in rows.of((mask, mask[:1]), keep)] == [[[2.0], [0.0]], [[0.0]]]
            for shared in (None, "x", torch.tensor(3.0), torch.zeros(1, 5), torch.zeros(4, 5)):
                assert rows.of(shared, keep) is shared

    def test_each_mask_gives_its_own_sequences(self) -> None:
        first, second = torch.arange(3.0), torch.arange(3.0) + 5
        rows = Rows(3, np.array([1]))
        assert rows.of(first, keep=True) is rows.of(first, keep=True)
        assert (rows.of(first, keep=True).item(), rows.of(second, keep=True).item()) == (1.0, 6.0)

    def test_deberta_keeps_positions_that_look_like_a_batch(self) -> None:
        batch = 3
        hidden, mask = torch.randn(batch, 5, 32), torch.ones(batch, 1, 5, 5)
        positions, embeddings = torch.zeros(batch, 5, 5), torch.randn(batch, 32)
        rows = torch.tensor([1])
        for args, kwargs in (
            ((hidden, mask, False, None, positions, embeddings), {}),
            ((hidden, mask), {"relative_pos": positions, "rel_embeddings": embeddings}),
        ):
            taken, named = DebertaV2Adapter().take_rows(args, kwargs, Rows(batch, rows.numpy()))
            given = dict(enumerate(taken)) | named
            assert torch.equal(given[0], hidden[rows])
            assert torch.equal(given[1], mask[rows])
            assert given[4 if len(args) > 2 else "relative_pos"] is positions
            assert given[5 if len(args) > 2 else "rel_embeddings"] is embeddings

    @pytest.mark.parametrize(
        "name", ["bert", "deberta-v2 as v3", "deberta-v2 as v2", "electra", "deberta-v2 no buckets"]
    )
    def test_a_cut_call_gives_the_sequences_of_the_whole_call(self, name: str) -> None:
        model = KNOWN[name]()
        adapter, sites = adapter_for(model)
        calls: list[tuple[Any, Any, Any]] = []
        handle = sites[1].module.register_forward_hook(
            lambda _m, args, kwargs, output: calls.append((args, kwargs, output)), with_kwargs=True
        )
        ids = torch.arange(4 * 11).view(4, 11) % 100 + 5
        valid = mask_of([11, 7, 3, 9], 11)
        base: Any = model.base_model
        with torch.no_grad():
            base(input_ids=ids, attention_mask=valid.long())
            handle.remove()
            args, kwargs, output = calls[0]
            some_args, some_kwargs = adapter.take_rows(args, kwargs, Rows(4, np.array([3, 1])))
            part = adapter.output_of(sites[1].module(*some_args, **some_kwargs))
        whole = adapter.output_of(output)
        assert torch.allclose(part[0, :9], whole[3, :9], atol=1e-5)
        assert torch.allclose(part[1, :7], whole[1, :7], atol=1e-5)
