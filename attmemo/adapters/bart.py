"""Encoders of BART and related models: mBART, Marian, Pegasus, M2M-100, Blenderbot.

The same class also computes self- and cross-attention of the decoder, which stay exact. Only the encoder is memoized;
`generate` calls it once.
"""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from attmemo.adapters.base import Adapter, encoder_part, takes


class BartAdapter(Adapter):
    """`encoder.layers.i.self_attn`."""

    family = "bart"
    models: ClassVar[tuple[str, ...]] = ("BART", "mBART", "Marian", "Pegasus", "M2M-100")
    limits = "the decoder stays exact"
    out = "out_proj"

    def host(self, model: nn.Module) -> nn.Module:
        return encoder_part(model)

    def depth(self, model: nn.Module) -> int | None:
        return getattr(getattr(self.host(model), "config", None), "encoder_layers", None)

    def is_one(self, name: str, module: nn.Module) -> bool:
        plain = not getattr(module, "is_decoder", True) and not getattr(module, "is_causal", True)
        return plain and takes(module, "key_value_states") and not self.is_audio(module)

    @staticmethod
    def is_audio(module: nn.Module) -> bool:
        """Whether the module is Whisper's: its keys have no bias, and its inputs are not tokens."""
        return takes(module, "output_attentions")
