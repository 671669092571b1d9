"""Random models of each family in the shape of its base model, and random inputs for them."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor, nn

from attmemo.db.encodings import TYPES
from attmemo.loading import quiet
from paper.parts.limits import SEED

VOCABULARY: Final = 1000
_MELS: Final = 80
_PATCH: Final = 16
# Where the family is not the model type.
_TYPES: Final = {
    "rotary-encoder": "nomic_bert", "gpt-neo": "gpt_neo", "clip-text": "clip_text_model",
    "clip-vision": "clip_vision_model", "privacy-filter": "openai_privacy_filter",
}  # fmt: skip


def _disentangled(version: int) -> dict[str, Any]:
    more = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
    newer = {"position_buckets": 256, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
    return more | {"type_vocab_size": 0, "layer_norm_eps": 1e-7} | (newer if version > 1 else {})


def _settings(family: str, hidden: int, heads: int, length: int, layers: int) -> dict[str, Any]:
    """What the family's configuration is made with: names that all know, and those that are its own."""
    wide, spread = 4 * hidden, math.sqrt(2.0 / hidden)
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "intermediate_size": wide,
        "max_position_embeddings": max(512, length) + 2,  # some families count from behind the padding index
        # Q and K then have a variance of 2, and scores a standard deviation of 2: maps that are neither flat nor
        # one-hot. The usual 0.02 gives flat ones.
        "initializer_range": spread, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    pair = {
        "encoder_ffn_dim": wide, "decoder_layers": 1, "decoder_attention_heads": heads, "decoder_ffn_dim": wide,
        "init_std": spread, "decoder_start_token_id": 2,
    }  # fmt: skip
    t5 = {"d_kv": hidden // heads, "d_ff": wide, "num_decoder_layers": 1}
    own: dict[str, dict[str, Any]] = {
        "albert": {"embedding_size": 128},
        "distilbert": {"hidden_dim": wide},
        "deberta": _disentangled(1),
        "deberta-v2": _disentangled(2),
        "modernbert": {"intermediate_size": 3 * hidden // 2, "cls_token_id": 1, "sep_token_id": 2},
        "vit": {"patch_size": _PATCH, "image_size": [_PATCH, _PATCH * (length - 1)]},
        "clip-vision": {"patch_size": _PATCH, "image_size": _PATCH * math.isqrt(length - 1)},
        "privacy-filter": {"head_dim": hidden // heads, "num_key_value_heads": 1, "intermediate_size": hidden},
        "bart": pair,
        "t5": t5, "umt5": t5,
        "whisper": pair | {"max_source_positions": length, "num_mel_bins": _MELS},
        "gpt-neo": {
            "num_layers": layers, "num_heads": heads,
            "attention_types": [[["global"], layers]] if layers % 2 else [[["global", "local"], layers // 2]]},
        "opt": {"ffn_dim": wide, "word_embed_proj_dim": hidden, "init_std": spread},
        "llama": {
            "num_key_value_heads": heads // 4 if heads % 4 == 0 else heads, "intermediate_size": 8 * hidden // 3},
    }  # fmt: skip
    return shape | own.get(family, {})


def random_model(family: str, hidden: int, heads: int, length: int, layers: int, dtype: str) -> nn.Module:
    """A model of the family's base shape, made under a seed of its own; call it inside `fork_rng`.

    Decoders have a quarter as many heads of K and V where the family shares them.
    """
    import transformers

    settings = _settings(family, hidden, heads, length, layers)
    torch.manual_seed(SEED)
    with quiet():
        config = transformers.AutoConfig.for_model(_TYPES.get(family, family), **settings)
        model: nn.Module = transformers.AutoModel.from_config(config)
    return model.to(TYPES[dtype]).eval()


def random_inputs(family: str, generator: torch.Generator, rows: int, length: int, dtype: str) -> dict[str, Tensor]:
    """Inputs of `length` tokens, patches or frames for each of `rows` sequences, none padded."""
    if family == "vit":
        pixels = torch.randn(rows, 3, _PATCH, _PATCH * (length - 1), generator=generator)
        return {"pixel_values": pixels.to(TYPES[dtype])}
    if family == "clip-vision":  # a square of patches, and the class token
        side = _PATCH * math.isqrt(length - 1)
        return {"pixel_values": torch.randn(rows, 3, side, side, generator=generator).to(TYPES[dtype])}
    if family == "whisper":
        return {"input_features": torch.randn(rows, _MELS, 2 * length, generator=generator).to(TYPES[dtype])}
    ids = torch.randint(10, VOCABULARY, (rows, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
