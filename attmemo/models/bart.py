"""Encoders of BART and related models; the decoder, whose attention has the same class, stays exact."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from attmemo.models.base import Adapter, takes


class BartAdapter(Adapter):
    """`encoder.layers.i.self_attn`."""

    family = "bart"
    models: ClassVar[tuple[str, ...]] = ("BART", "mBART", "Marian", "Pegasus", "M2M-100")
    limits = "the decoder stays exact"
    part, layers = "encoder", "encoder_layers"
    out = "out_proj"
    audio: ClassVar[bool] = False  # Whisper's: its keys have no bias, and its inputs are not tokens

    def is_one(self, name: str, module: nn.Module) -> bool:
        plain = not getattr(module, "is_decoder", True) and not getattr(module, "is_causal", True)
        return plain and takes(module, "key_value_states") and takes(module, "output_attentions") == self.audio
