"""Llama and decoders of the same structure: Mistral, Qwen2, Qwen3, Gemma 3, and others that pass the self-check.

They have rotary positions and grouped heads of K and V. Some have a norm on each head of Q and K, some have sliding
attention. K for the cache is rotated by the family's own function, which is in the module's own file.
"""

from __future__ import annotations

import sys

from torch import Tensor, nn

from attmemo.models.base import Adapter, Call, takes
from attmemo.models.blocks import Blocks
from attmemo.models.cache_name import CACHE_NAME
from attmemo.models.gated import gated_blocks


class LlamaAdapter(Adapter):
    """`layers.i.self_attn`."""

    family = "llama"
    models = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma 3")
    limits = (
        "rope_type dynamic or longrope, queries scaled by position, clip_qkv and attention sinks are refused; so are "
        "blocks with experts or capped scores, and rows"
    )
    causal = True
    rotary = True
    parameters = ("hidden_states", "position_embeddings", "attention_mask", CACHE_NAME)

    def is_one(self, name: str, module: nn.Module) -> bool:
        plain = bool(getattr(module, "is_causal", False)) and hasattr(module, "num_key_value_groups")
        return plain and takes(module, "position_embeddings", CACHE_NAME)

    def refusal(self, model: nn.Module) -> str | None:
        if (reason := super().refusal(model)) is not None:
            return reason
        if getattr(self.host(model).config, "clip_qkv", None) is not None:
            return "it clamps Q, K and V (clip_qkv)"
        for site in self.sites(model):
            if hasattr(site.module, "sinks"):
                return "its maps do not sum to one (attention sinks)"
            if not hasattr(sys.modules[type(site.module).__module__], "apply_rotary_pos_emb"):
                return "its rotary positions are applied in an unknown way"
        return None

    def window(self, module: nn.Module) -> int | None:
        # Mistral's layers all have the window of the configuration. Other models give one per layer, or None.
        config = getattr(module, "config", None)
        always = not hasattr(config, "layer_types") or getattr(config, "layer_types", None) is None
        default = getattr(config, "sliding_window", None) if always else None
        window = getattr(module, "sliding_window", default)
        return None if window is None else int(window)

    def blocks(self, model: nn.Module) -> Blocks | str:
        return gated_blocks(self, model, causal=True)

    def key(self, module: nn.Module, call: Call) -> Tensor:
        keys = super().key(module, call)
        norm = getattr(module, "k_norm", None)
        if norm is not None:
            keys = norm(keys)
        cos, sin = call.given["position_embeddings"]
        rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
        rotated: Tensor = rotate(keys[:, :0], keys, cos, sin)[1]  # with zero heads of Q
        return rotated
