"""Encoders with separate projections and rotary positions: NomicBERT, GTE, and others of the same structure."""

from __future__ import annotations

from typing import Any

from torch import nn

from attmemo.models.base import Adapter, takes
from attmemo.models.blocks import Block, Blocks, RotaryBlocks


class RotaryEncoderAdapter(Adapter):
    """`layers.i.self_attn` of bidirectional models with the argument `position_embeddings`."""

    family = "rotary-encoder"
    models = ("NomicBERT", "GTE")
    rotary = True
    parameters = ("hidden_states", "attention_mask", "position_embeddings")

    def is_one(self, name: str, module: nn.Module) -> bool:
        plain = not getattr(module, "is_causal", True) and not hasattr(module, "sliding_window")
        return plain and takes(module, "position_embeddings")

    def blocks(self, model: nn.Module) -> Blocks | str:
        host: Any = self.host(model)
        if not hasattr(host, "rotary_emb") or not hasattr(host, "layers"):
            return "its rotary positions are unknown"
        found = []
        for layer in host.layers[: host.config.num_hidden_layers]:
            own, feed = layer.self_attn, layer.mlp
            if not all(hasattr(feed, name) for name in ("gate_proj", "up_proj", "down_proj")):
                return f"its feed-forward layers are of an unknown form ({type(feed).__name__})"
            found.append(
                Block(
                    layer, (own.q_proj, own.k_proj, own.v_proj), own.o_proj, None, layer.post_attention_layernorm,
                    (feed.gate_proj, feed.up_proj), feed.act_fn, True, feed.down_proj, None, layer.post_mlp_layernorm,
                )
            )  # fmt: skip
        heads, width = self.shape(host.layers[0].self_attn)
        return RotaryBlocks(host, found, heads, width)
