"""MPNet: no attention interface and no fused attention; a relative position bias is added to the scores.

The encoder makes the bias once and gives it to each layer, so a hit does not need it. `output_attentions` makes the
module return its map; without this argument the module returns a tuple of one value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attmemo.models.base import Adapter, Call
from attmemo.models.blocks import Blocks, bert_block
from attmemo.models.embeddings import Embeddings, embeddings_named


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

    def adds(self, module: nn.Module, mask: Any) -> bool:
        return isinstance(mask, Tensor) and mask.dtype is torch.bool

    def blocks(self, model: nn.Module) -> Blocks | str:
        encoder: Any = getattr(self.host(model), "encoder", None)
        if encoder is None or not hasattr(encoder, "relative_attention_bias"):
            return "it has no encoder with blocks"
        found = []
        for layer in encoder.layer:
            own = layer.attention.attn
            found.append(bert_block(layer, (own.q, own.k, own.v), own.o, layer.attention.LayerNorm))
        heads, width = self.shape(encoder.layer[0].attention.attn)
        return MPNetBlocks(encoder, found, heads, width, width**-0.5)

    def embeddings(self, model: nn.Module) -> Embeddings | None:
        return embeddings_named(self.host(model))


class MPNetBlocks(Blocks):
    """Blocks whose scores gain a bias by distance, the same in all layers. Embeddings hold positions too."""

    def leave(self, hidden: Tensor, call: Call) -> Any:
        return super().leave(hidden, call) if call.given.get("return_dict") else (hidden,)

    def table(self, span: int) -> Tensor | None:
        encoder: Any = self.module
        distances = torch.arange(1 - span, span)  # key less query
        buckets = encoder.relative_position_bucket(distances, num_buckets=32)  # as `compute_position_bias` calls it
        table: Tensor = encoder.relative_attention_bias(buckets).T
        return table.float().contiguous()
