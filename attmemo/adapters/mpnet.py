"""MPNet: no attention interface and no fused attention; a relative position bias is added to the scores.

The encoder makes the bias once and gives it to each layer, so a hit does not need it. `output_attentions` makes the
module return its map; without this argument the module returns a tuple of one value.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attmemo.adapters.base import Adapter, Call


class MPNetAdapter(Adapter):
    """`encoder.layer.i.attention.attn`."""

    family = "mpnet"
    models = ("MPNet",)
    parameters = ("hidden_states", "attention_mask", "position_bias", "output_attentions")
    harmless = frozenset({"position_bias"})
    shared = frozenset({"attention_mask", "position_bias"})
    projections = ("q", "k", "v")
    out = "o"
    heads, width = "num_attention_heads", "attention_head_size"
    marks = ("all_head_size",)
    maps_on_request = True

    def pack(self, module: nn.Module, output: Tensor, call: Call) -> Any:
        return (output,)
