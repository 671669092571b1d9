"""Encoders of BART and related models; the decoder, whose attention has the same class, stays exact."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from attmemo.models.base import Adapter, takes
from attmemo.models.blocks import Block, Blocks


class BartAdapter(Adapter):
    """`encoder.layers.i.self_attn`."""

    family = "bart"
    models: ClassVar[tuple[str, ...]] = ("BART", "mBART", "Marian", "Pegasus", "M2M-100")
    limits = "the decoder stays exact; rows are refused"
    has_rows = False
    part, layers = "encoder", "encoder_layers"
    out = "out_proj"
    ends_texts = True
    audio: ClassVar[bool] = False  # Whisper's: its keys have no bias, and its inputs are not tokens

    def is_one(self, name: str, module: nn.Module) -> bool:
        plain = not getattr(module, "is_decoder", True) and not getattr(module, "is_causal", True)
        return plain and takes(module, "key_value_states") and takes(module, "output_attentions") == self.audio

    def blocks(self, model: nn.Module) -> Blocks | str:
        host: Any = self.host(model)
        if not hasattr(host, "layers"):
            return "it has no encoder with blocks"
        before = hasattr(host, "layer_norm")  # a norm behind all blocks: norms stand before each part
        found = []
        for layer in host.layers:
            own, (first, second) = layer.self_attn, (layer.self_attn_layer_norm, layer.final_layer_norm)
            found.append(
                Block(
                    layer, (own.q_proj, own.k_proj, own.v_proj), own.out_proj, first if before else None,
                    None if before else first, (layer.fc1,), layer.activation_fn, False, layer.fc2,
                    second if before else None, None if before else second,
                )
            )  # fmt: skip
        first, *others = host.layers
        heads, width = self.shape(first.self_attn)
        return Blocks(first, found, heads, width, float(first.self_attn.scaling), others)
