"""Small models of every family, with weights that make the outputs differ: random biases, and no two beams tie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    OPTConfig,
    OPTForCausalLM,
    PegasusConfig,
    PegasusForConditionalGeneration,
    ProphetNetConfig,
    ProphetNetForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from attmemo import fastseq

VOCAB = 97
_SEQ = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_T5 = {  # heads times head width is not the model width
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 12,
    "num_heads": 4,
    "num_layers": 3,  # stock fails on a decoder deeper than the encoder
    "num_decoder_layers": 2,
    "d_ff": 48,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
_LM = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
_WHISPER = {
    **{name: value for name, value in _SEQ.items() if name not in ("max_position_embeddings", "forced_eos_token_id")},
    "max_source_positions": 20,
    "max_target_positions": 64,
    "num_mel_bins": 8,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}


def _unilm() -> Any:
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        pad_token_id=1,
    )
    return fastseq.PrefixLM.from_bert(BertForMaskedLM(config), mask_token_id=3, eos_token_id=2)


MAKERS: dict[str, Callable[[], Any]] = {
    "bart": lambda: BartForConditionalGeneration(BartConfig(**_SEQ)),
    "distilbart": lambda: BartForConditionalGeneration(
        BartConfig(**{**_SEQ, "encoder_layers": 3, "decoder_layers": 1})
    ),
    "mbart": lambda: MBartForConditionalGeneration(MBartConfig(**_SEQ)),
    "marian": lambda: MarianMTModel(MarianConfig(**{**_SEQ, "decoder_vocab_size": VOCAB})),
    "pegasus": lambda: PegasusForConditionalGeneration(PegasusConfig(**_SEQ)),
    "m2m_100": lambda: M2M100ForConditionalGeneration(M2M100Config(**_SEQ)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**_T5)),
    "mt5": lambda: MT5ForConditionalGeneration(MT5Config(**_T5)),
    "umt5": lambda: UMT5ForConditionalGeneration(UMT5Config(**_T5)),
    "whisper": lambda: WhisperForConditionalGeneration(WhisperConfig(**_WHISPER)),
    "prophetnet": lambda: ProphetNetForConditionalGeneration(
        ProphetNetConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_encoder_layers=2,
            num_decoder_layers=2,
            num_encoder_attention_heads=4,
            num_decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=64,
            ngram=2,
            pad_token_id=0,  # stock counts positions from the pad token's id
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
        )
    ),
    "unilm": _unilm,
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=128,
            bos_token_id=0,
            eos_token_id=2,
            pad_token_id=1,
        )
    ),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            word_embed_proj_dim=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=48,
            max_position_embeddings=128,
            bos_token_id=0,
            eos_token_id=2,
            pad_token_id=1,
        )
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_LM)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_LM)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_LM, head_dim=12)),
}
SEQ2SEQ = ("bart", "distilbart", "mbart", "marian", "pegasus", "m2m_100", "t5", "mt5", "umt5", "prophetnet")
CAUSAL = ("unilm", "gpt2", "opt", "llama", "qwen2", "qwen3")


def make(family: str, seed: int = 0) -> Any:
    """The family's small model in evaluation mode, every parameter drawn anew."""
    model = MAKERS[family]().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(drawn * (0.4 if parameter.dim() > 1 else 0.3) + (1.0 if norm else 0.0))
            if family == "prophetnet":  # else it says one word forever, whatever the source
                if "value_proj" in name or "out_proj" in name:
                    parameter.mul_(8.0 if "cross_attn" in name else 4.0)
                elif "word_embeddings" in name:
                    parameter.mul_(0.3)
                elif "norm" in name and name.endswith("bias"):
                    parameter.mul_(0.2)
    if family == "whisper":
        model.generation_config.suppress_tokens = None
        model.generation_config.begin_suppress_tokens = None
        model.generation_config.forced_decoder_ids = None
    return model


def inputs(family: str, padding: str | None = None, batch: int = 3, length: int = 17) -> dict[str, Tensor]:
    """Inputs for `generate`: padded on a side ("left", "right"), or not at all."""
    generator = torch.Generator().manual_seed(7)
    if family == "whisper":
        return {"input_features": torch.randn(batch, 8, 40, generator=generator)}
    ids = torch.randint(3, VOCAB, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    pad = 0 if "t5" in family or family == "prophetnet" else 1
    for row, cut in enumerate((0, 6, 3)[:batch]):
        if padding == "right" and cut:
            mask[row, -cut:] = 0
        elif padding == "left" and cut:
            mask[row, :cut] = 0
    return {"input_ids": ids.masked_fill(mask == 0, pad), "attention_mask": mask}


def both(model: Any, fast: Any, arguments: dict[str, Tensor], setting: dict[str, Any]) -> tuple[Any, Any]:
    """What a model generates, and what its fast twin does, from the same seed."""
    common = {"max_new_tokens": 16, **setting}
    torch.manual_seed(3)
    expected = model.generate(**arguments, **common)
    torch.manual_seed(3)
    return expected, fast.generate(**arguments, **common)


Pairs = dict[str, tuple[Any, Any]]
"""Models and their fast twins, by family."""


def pair_of(pairs: Pairs, family: str, quicken: Callable[[Any], Any]) -> tuple[Any, Any]:
    """A model of a family and its fast twin, made once."""
    if family not in pairs:
        model = make(family)
        pairs[family] = model, quicken(model)
    return pairs[family]
