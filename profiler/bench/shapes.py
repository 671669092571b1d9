"""Random models of each family in the shape of its base model, and random inputs for them."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor, nn

from attmemo.db.forms import TYPES
from attmemo.loading import quiet
from attmemo.profiler.bench.limits import SEED

VOCABULARY: Final = 1000
_MELS: Final = 80
_PATCH: Final = 16


def _tokens(hidden: int, heads: int, length: int, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": max(512, length) + 2,  # some families count from behind the padding index
        # Q and K then have a variance of 2, and scores a standard deviation of 2: maps that are neither flat nor
        # one-hot. The usual 0.02 gives flat ones.
        "initializer_range": math.sqrt(2.0 / hidden),
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def _disentangled(shape: dict[str, Any], version: int) -> dict[str, Any]:
    more = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
    newer = {"position_buckets": 256, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
    return shape | more | {"type_vocab_size": 0, "layer_norm_eps": 1e-7} | (newer if version > 1 else {})


def _seq2seq(shape: dict[str, Any]) -> dict[str, Any]:
    hidden, heads, wide = shape["hidden_size"], shape["num_attention_heads"], shape["intermediate_size"]
    return {
        "vocab_size": VOCABULARY, "d_model": hidden, "encoder_layers": shape["num_hidden_layers"],
        "encoder_attention_heads": heads, "encoder_ffn_dim": wide, "decoder_layers": 1,
        "decoder_attention_heads": heads, "decoder_ffn_dim": wide, "init_std": shape["initializer_range"],
        "max_position_embeddings": shape["max_position_embeddings"], "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 2,
    }  # fmt: skip


def _config(family: str, shape: dict[str, Any], length: int) -> tuple[str, dict[str, Any]]:
    """Name of the configuration class and what it is made with."""
    hidden, heads, layers = shape["hidden_size"], shape["num_attention_heads"], shape["num_hidden_layers"]
    spread, positions, wide = shape["initializer_range"], shape["max_position_embeddings"], shape["intermediate_size"]
    common = {"vocab_size": VOCABULARY, "max_position_embeddings": positions, "initializer_range": spread}
    made: dict[str, tuple[str, dict[str, Any]]] = {
        "bert": ("BertConfig", shape),
        "albert": ("AlbertConfig", shape | {"embedding_size": 128}),
        "distilbert": ("DistilBertConfig", common | {
            "dim": hidden, "hidden_dim": wide, "n_layers": layers, "n_heads": heads}),
        "mpnet": ("MPNetConfig", shape),
        "deberta": ("DebertaConfig", _disentangled(shape, 1)),
        "deberta-v2": ("DebertaV2Config", _disentangled(shape, 2)),
        "modernbert": ("ModernBertConfig", shape | {
            "intermediate_size": 3 * hidden // 2, "cls_token_id": 1, "sep_token_id": 2}),
        "rotary-encoder": ("NomicBertConfig", shape),
        "vit": ("ViTConfig", {
            "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "intermediate_size": 4 * hidden, "initializer_range": spread, "patch_size": _PATCH,
            "image_size": [_PATCH, _PATCH * (length - 1)]}),
        "bart": ("BartConfig", _seq2seq(shape)),
        "t5": ("T5Config", {
            "vocab_size": VOCABULARY, "d_model": hidden, "d_kv": hidden // heads, "d_ff": 4 * hidden,
            "num_layers": layers, "num_decoder_layers": 1, "num_heads": heads}),
        "whisper": ("WhisperConfig", _seq2seq(shape) | {
            "max_source_positions": length, "num_mel_bins": _MELS}),
        "gpt2": ("GPT2Config", {
            "vocab_size": VOCABULARY, "n_embd": hidden, "n_layer": layers, "n_head": heads,
            "n_positions": positions, "initializer_range": spread}),
        "gpt-neo": ("GPTNeoConfig", common | {
            "hidden_size": hidden, "num_layers": layers, "num_heads": heads, "intermediate_size": wide,
            "attention_types": [[["global"], layers]] if layers % 2 else [[["global", "local"], layers // 2]]}),
        "opt": ("OPTConfig", {
            "vocab_size": VOCABULARY, "hidden_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "ffn_dim": wide, "word_embed_proj_dim": hidden, "init_std": spread,
            "max_position_embeddings": positions}),
        "llama": ("LlamaConfig", shape | {
            "num_key_value_heads": heads // 4 if heads % 4 == 0 else heads, "intermediate_size": 8 * hidden // 3}),
    }  # fmt: skip
    return made[family]


def random_model(family: str, hidden: int, heads: int, length: int, layers: int, dtype: str) -> nn.Module:
    """A model of the family's base shape, made under a seed of its own; call it inside `fork_rng`.

    Decoders have a quarter as many heads of K and V where the family shares them.
    """
    import transformers

    name, settings = _config(family, _tokens(hidden, heads, length, layers), length)
    torch.manual_seed(SEED)
    with quiet():
        config = getattr(transformers, name)(**settings)
        model: nn.Module = transformers.AutoModel.from_config(config)
    return model.to(TYPES[dtype]).eval()


def random_inputs(family: str, generator: torch.Generator, rows: int, length: int, dtype: str) -> dict[str, Tensor]:
    """Inputs of `length` tokens, patches or frames for each of `rows` sequences, none padded."""
    if family == "vit":
        pixels = torch.randn(rows, 3, _PATCH, _PATCH * (length - 1), generator=generator)
        return {"pixel_values": pixels.to(TYPES[dtype])}
    if family == "whisper":
        return {"input_features": torch.randn(rows, _MELS, 2 * length, generator=generator).to(TYPES[dtype])}
    ids = torch.randint(10, VOCABULARY, (rows, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
