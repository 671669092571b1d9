"""Small random models of every family, with weights that make maps neither flat nor one-hot, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

LAYERS = 3
VOCABULARY = 120
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # the default gives maps so uniform that any map passes for any other
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER: dict[str, Any] = SIZES | {"num_key_value_heads": 2}
GEMMA: dict[str, Any] = DECODER | {
    "head_dim": 12, "sliding_window": 8, "query_pre_attn_scalar": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_GPT: dict[str, Any] = {"vocab_size": VOCABULARY, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2}
_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": LAYERS, "decoder_layers": 2, "encoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "init_std": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_ff": 48, "num_layers": LAYERS, "num_decoder_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "initializer_factor": 1.5, "pad_token_id": 0, "eos_token_id": 2,
    "decoder_start_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One row of the table: how to make the model, which adapter is to know it, and what goes in."""

    adapter: str
    make: Callable[[], nn.Module]
    kind: str = "tokens"  # "pixels" or "audio"
    generates: bool = False
    padded: bool = True
    note: str = field(default="", compare=False)


def _bias(model: nn.Module) -> nn.Module:
    """Biases and norms start at zero and one, where a forgotten one would not be noticed."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                noise = torch.rand(parameter.shape, generator=generator) - 0.5
                parameter.add_(0.4 * noise if "norm" not in name.lower() else 0.2 * noise)
    return model.eval()


def _make(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(1)
        return _bias(getattr(hf, model)(getattr(hf, config)(**settings)))

    return make


FAMILIES: dict[str, Family] = {
    "BERT": Family("bert", _make("BertModel", "BertConfig", **SIZES)),
    "BERT classifier": Family("bert", _make("BertForSequenceClassification", "BertConfig", **SIZES)),
    "RoBERTa": Family("bert", _make("RobertaModel", "RobertaConfig", **SIZES)),
    "XLM-RoBERTa": Family("bert", _make("XLMRobertaModel", "XLMRobertaConfig", **SIZES)),
    "CamemBERT": Family("bert", _make("CamembertModel", "CamembertConfig", **SIZES)),
    "ELECTRA": Family("bert", _make("ElectraModel", "ElectraConfig", **SIZES, embedding_size=16)),
    "ALBERT": Family("albert", _make("AlbertModel", "AlbertConfig", **SIZES, embedding_size=16)),
    "ALBERT, groups": Family(
        "albert",
        _make("AlbertModel", "AlbertConfig", **SIZES | {"num_hidden_layers": 4}, embedding_size=16,
              num_hidden_groups=2, inner_group_num=2),
    ),
    "DistilBERT": Family(
        "distilbert",
        _make("DistilBertModel", "DistilBertConfig", vocab_size=VOCABULARY, dim=32, hidden_dim=48, n_layers=LAYERS,
              n_heads=4, initializer_range=0.3),
    ),
    "MPNet": Family("mpnet", _make("MPNetModel", "MPNetConfig", **SIZES)),
    "DeBERTa": Family(
        "deberta",
        _make("DebertaModel", "DebertaConfig", **SIZES, relative_attention=True, pos_att_type=["c2p", "p2c"],
              type_vocab_size=0, position_biased_input=False),
    ),
    "DeBERTa-v2": Family(
        "deberta-v2",
        _make("DebertaV2Model", "DebertaV2Config", **SIZES, relative_attention=True, pos_att_type=["p2c", "c2p"],
              position_buckets=16, share_att_key=True, conv_kernel_size=3, conv_act="gelu", type_vocab_size=0),
    ),
    "DeBERTa-v3": Family(
        "deberta-v2",
        _make("DebertaV2ForSequenceClassification", "DebertaV2Config", **SIZES, relative_attention=True,
              pos_att_type=["p2c", "c2p"], position_buckets=16, share_att_key=True, norm_rel_ebd="layer_norm",
              position_biased_input=False, type_vocab_size=0),
    ),
    "ModernBERT": Family(
        "modernbert",
        _make("ModernBertModel", "ModernBertConfig", **SIZES | {"num_hidden_layers": 4}, local_attention=8,
              global_attn_every_n_layers=3, cls_token_id=1, sep_token_id=2),
        note="windows of 4 tokens to each side",
    ),
    "NomicBERT": Family("rotary-encoder", _make("NomicBertModel", "NomicBertConfig", **SIZES)),
    "GTE": Family("rotary-encoder", _make("GteModel", "GteConfig", **SIZES)),
    "ViT": Family(
        "vit",
        _make("ViTModel", "ViTConfig", hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=4,
              intermediate_size=48, image_size=16, patch_size=4, initializer_range=0.3),
        kind="pixels", padded=False,
    ),
    "DeiT": Family(
        "vit",
        _make("DeiTModel", "DeiTConfig", hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=4,
              intermediate_size=48, image_size=16, patch_size=4, initializer_range=0.3),
        kind="pixels", padded=False, note="a second token before the patches",
    ),
    "BART": Family(
        "bart", _make("BartForConditionalGeneration", "BartConfig", **_SEQ2SEQ), generates=True
    ),
    "mBART": Family(
        "bart", _make("MBartForConditionalGeneration", "MBartConfig", **_SEQ2SEQ), generates=True
    ),
    "Marian": Family("bart", _make("MarianMTModel", "MarianConfig", **_SEQ2SEQ), generates=True),
    "Pegasus": Family(
        "bart", _make("PegasusForConditionalGeneration", "PegasusConfig", **_SEQ2SEQ), generates=True
    ),
    "M2M-100": Family(
        "bart", _make("M2M100ForConditionalGeneration", "M2M100Config", **_SEQ2SEQ), generates=True
    ),
    "BART encoder": Family("bart", lambda: FAMILIES["BART"].make().get_encoder()),  # type: ignore[operator]
    "T5": Family("t5", _make("T5ForConditionalGeneration", "T5Config", **_T5, d_kv=6), generates=True),
    "Flan-T5": Family(
        "t5", _make("T5ForConditionalGeneration", "T5Config", **_T5, d_kv=6, feed_forward_proj="gated-gelu"),
        generates=True,
    ),
    "mT5": Family("t5", _make("MT5ForConditionalGeneration", "MT5Config", **_T5, d_kv=6), generates=True),
    "T5 encoder": Family(
        "t5",
        _make("T5EncoderModel", "T5Config", vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=LAYERS,
              num_heads=4, relative_attention_num_buckets=8, initializer_factor=1.5),
    ),
    "mT5 encoder": Family(
        "t5",
        _make("MT5EncoderModel", "MT5Config", vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=LAYERS,
              num_heads=4, relative_attention_num_buckets=8, initializer_factor=1.5),
    ),
    "Whisper": Family(
        "whisper",
        _make("WhisperForConditionalGeneration", "WhisperConfig", **_SEQ2SEQ | {"max_source_positions": 20},
              num_mel_bins=8, max_target_positions=32),
        kind="audio", padded=False,
    ),
    "GPT-2": Family(
        "gpt2", _make("GPT2LMHeadModel", "GPT2Config", **_GPT, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=64),
        generates=True,
    ),
    "DistilGPT2": Family(
        "gpt2", _make("GPT2LMHeadModel", "GPT2Config", **_GPT, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        generates=True,
    ),
    "GPT-2, scaled by layer": Family(
        "gpt2",
        _make("GPT2LMHeadModel", "GPT2Config", **_GPT, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=64,
              scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True),
        generates=True,
    ),
    "GPT-Neo": Family(
        "gpt-neo",
        _make("GPTNeoForCausalLM", "GPTNeoConfig", **_GPT | {"initializer_range": 0.15}, hidden_size=32, num_layers=4,
              num_heads=4, attention_types=[[["global", "local"], 2]], window_size=6, max_position_embeddings=64,
              intermediate_size=48),
        generates=True, note="windows of 6 tokens in every other layer",
    ),
    "OPT": Family(
        "opt",
        _make("OPTForCausalLM", "OPTConfig", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=LAYERS,
              num_attention_heads=4, ffn_dim=48, max_position_embeddings=64, init_std=0.3, word_embed_proj_dim=32,
              pad_token_id=0, bos_token_id=1, eos_token_id=2),
        generates=True,
    ),
    "Llama": Family("llama", _make("LlamaForCausalLM", "LlamaConfig", **DECODER), generates=True),
    "Llama classifier": Family("llama", _make("LlamaForSequenceClassification", "LlamaConfig", **DECODER)),
    "Mistral": Family("llama", _make("MistralForCausalLM", "MistralConfig", **DECODER, sliding_window=None),
                      generates=True),
    "Mistral, window": Family(
        "llama", _make("MistralForCausalLM", "MistralConfig", **DECODER, sliding_window=6), generates=True,
        note="sees 6 tokens",
    ),
    "Qwen2": Family("llama", _make("Qwen2ForCausalLM", "Qwen2Config", **DECODER), generates=True),
    "Qwen2, windows": Family(
        "llama",
        _make("Qwen2ForCausalLM", "Qwen2Config", **DECODER, use_sliding_window=True, sliding_window=6,
              max_window_layers=1),
        generates=True,
    ),
    "Qwen3": Family("llama", _make("Qwen3ForCausalLM", "Qwen3Config", **DECODER, head_dim=12), generates=True),
    "Gemma 3": Family(
        "llama", _make("Gemma3ForCausalLM", "Gemma3TextConfig", **GEMMA),
        note="repeats its last token, whatever it saw",
    ),
    "Gemma 3, bidirectional": Family(
        "rotary-encoder", _make("Gemma3TextModel", "Gemma3TextConfig", **GEMMA, use_bidirectional_attention=True),
        note="as EmbeddingGemma",
    ),
    "EuroBERT": Family(
        "rotary-encoder",  # no bias damps what rounding does to larger weights
        _make("EuroBertModel", "EuroBertConfig", **DECODER | {"initializer_range": 0.2}, mask_token_id=3),
    ),
    "Jina v3": Family("rotary-encoder", _make("JinaEmbeddingsV3Model", "JinaEmbeddingsV3Config", **SIZES)),
}  # fmt: skip


def inputs_of(family: Family, lengths: list[int], seed: int = 0, left: bool = False) -> dict[str, Tensor]:
    """A batch of random inputs; tokens are padded at the end, or at the start."""
    generator = torch.Generator().manual_seed(seed)
    if family.kind == "pixels":
        return {"pixel_values": torch.randn(len(lengths), 3, 16, 16, generator=generator)}
    if family.kind == "audio":
        return {"input_features": torch.randn(len(lengths), 8, 40, generator=generator)}
    longest = max(lengths)
    ids = torch.zeros(len(lengths), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, n in enumerate(lengths):
        own = slice(longest - n, longest) if left else slice(n)
        ids[row, own] = torch.randint(5, VOCABULARY, (n,), generator=generator)
        mask[row, own] = 1
    return {"input_ids": ids, "attention_mask": mask}
