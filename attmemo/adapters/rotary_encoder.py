"""Encoders with separate projections and rotary positions: NomicBERT, GTE, and others of the same structure."""

from __future__ import annotations

from torch import nn

from attmemo.adapters.base import Adapter, takes


class RotaryEncoderAdapter(Adapter):
    """`layers.i.self_attn` of bidirectional models with the argument `position_embeddings`."""

    family = "rotary-encoder"
    models = ("NomicBERT", "GTE")
    rotary = True
    parameters = ("hidden_states", "attention_mask", "position_embeddings")

    def is_one(self, name: str, module: nn.Module) -> bool:
        plain = not getattr(module, "is_causal", True) and not hasattr(module, "sliding_window")
        return plain and takes(module, "position_embeddings")
