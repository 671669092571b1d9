"""Encoders with separate projections and rotary positions: NomicBERT, GTE, Jina v3, EuroBERT, bidirectional Gemma 3,
and others of the same structure.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from attmemo.models.base import Adapter, takes
from attmemo.models.blocks import Block, Blocks, RotaryBlocks
from attmemo.models.gated import gated_blocks


class RotaryEncoderAdapter(Adapter):
    """`layers.i.self_attn` of bidirectional models with the argument `position_embeddings`."""

    family = "rotary-encoder"
    models = ("NomicBERT", "GTE", "Jina v3", "EuroBERT", "Gemma 3, bidirectional")
    limits = "rows are refused where several heads of Q share one of K and V (EuroBERT, Gemma 3)"
    rotary = True
    parameters = ("hidden_states", "attention_mask", "position_embeddings")

    def is_one(self, name: str, module: nn.Module) -> bool:
        return not getattr(module, "is_causal", True) and takes(module, "position_embeddings")

    def window(self, module: nn.Module) -> int | None:
        window = getattr(module, "sliding_window", None)
        return None if window is None else int(window)

    def blocks(self, model: nn.Module) -> Blocks | str:
        host: Any = self.host(model)
        if not hasattr(host, "rotary_emb") or not hasattr(host, "layers"):
            return "its rotary positions are unknown"
        if hasattr(host.layers[0], "input_layernorm"):
            return gated_blocks(self, model, causal=False)
        found = []
        for layer in host.layers[: host.config.num_hidden_layers]:
            own, feed = layer.self_attn, layer.mlp
            if all(hasattr(feed, name) for name in ("gate_proj", "up_proj", "down_proj")):
                up: Any = (feed.gate_proj, feed.up_proj)
                activation, down = feed.act_fn, feed.down_proj
            elif all(hasattr(feed, name) for name in ("fc1", "fc2", "activation_fn")):
                up, activation, down = (feed.fc1,), feed.activation_fn, feed.fc2
            else:
                return f"its feed-forward layers are of an unknown form ({type(feed).__name__})"
            found.append(
                Block(
                    layer, (own.q_proj, own.k_proj, own.v_proj), own.o_proj, None, layer.post_attention_layernorm,
                    up, activation, len(up) == 2, down, None, layer.post_mlp_layernorm, window=self.window(own),
                )
            )  # fmt: skip
        heads, width = self.shape(host.layers[0].self_attn)
        return RotaryBlocks(host, found, heads, width)
