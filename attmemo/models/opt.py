"""OPT: learned positions, and queries that are scaled before the product."""

from __future__ import annotations

from torch import nn

from attmemo.models.base import Adapter, takes
from attmemo.models.cache_name import CACHE_NAME


class OPTAdapter(Adapter):
    """`decoder.layers.i.self_attn`."""

    family = "opt"
    models = ("OPT",)
    part = "decoder"
    causal = True
    out = "out_proj"
    parameters = ("hidden_states", CACHE_NAME, "attention_mask", "output_attentions")

    def is_one(self, name: str, module: nn.Module) -> bool:
        plain = bool(getattr(module, "is_causal", False)) and hasattr(module, "enable_bias")
        return plain and not takes(module, "key_value_states") and not takes(module, "position_embeddings")
