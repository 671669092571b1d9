"""DistilBERT: separate projections, with the output projection inside the module."""

from __future__ import annotations

from typing import Any

from torch import nn

from attmemo.models.base import Adapter
from attmemo.models.blocks import Block, Blocks
from attmemo.models.embeddings import Embeddings, embeddings_named


class DistilBertAdapter(Adapter):
    """`transformer.layer.i.attention`."""

    family = "distilbert"
    models = ("DistilBERT",)
    projections = ("q_lin", "k_lin", "v_lin")
    out = "out_lin"
    heads, width = "n_heads", "attention_head_size"

    def blocks(self, model: nn.Module) -> Blocks | str:
        transformer: Any = getattr(self.host(model), "transformer", None)
        if transformer is None or not hasattr(transformer, "layer"):
            return "it has no transformer with blocks"
        found = []
        for layer in transformer.layer:
            own, feed = layer.attention, layer.ffn
            found.append(
                Block(
                    layer, (own.q_lin, own.k_lin, own.v_lin), own.out_lin, None, layer.sa_layer_norm, (feed.lin1,),
                    feed.activation, False, feed.lin2, None, layer.output_layer_norm,
                )
            )  # fmt: skip
        heads, width = self.shape(transformer.layer[0].attention)
        return Blocks(transformer, found, heads, width, width**-0.5)

    def embeddings(self, model: nn.Module) -> Embeddings | None:
        return embeddings_named(self.host(model))
