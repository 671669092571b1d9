"""GPT-Neo: scores without scaling, in float32, and sliding attention in every other layer.

The module applies the sliding window itself. The mask argument does not contain the window, so it is read as a plain
causal mask; the stored map contains the window. The cache argument is called `layer_past`.
"""

from __future__ import annotations

from torch import nn

from attmemo.models.base import Adapter


class GPTNeoAdapter(Adapter):
    """`h.i.attn.attention`."""

    family = "gpt-neo"
    models = ("GPT-Neo",)
    causal = True
    out = "out_proj"
    cache_name = "layer_past"
    harmless = frozenset({"layer_past"})

    def is_one(self, name: str, module: nn.Module) -> bool:
        return hasattr(module, "attention_type") and hasattr(module, "layer_id")

    def layer_index(self, module: nn.Module) -> int:
        return int(module.layer_id)  # type: ignore[arg-type]
