"""BERT and the families that share its attention: RoBERTa, XLM-R, ELECTRA, CamemBERT.

`*SelfAttention` holds separate Linear layers `query`, `key`, `value`. The output projection is in another module
(`*SelfOutput`), so a hit returns the bare context. `forward` of the module is replaced, not the attention interface:
the interface gets Q, K and V already projected, so it cannot skip their projection.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from attmemo.models.base import Adapter
from attmemo.models.blocks import Blocks, bert_block
from attmemo.models.cache_name import CACHE_NAME
from attmemo.models.embeddings import Embeddings, embeddings_named


class BertAdapter(Adapter):
    """`encoder.layer.i.attention.self` of BERT-shaped encoders."""

    family = "bert"
    models = ("BERT", "RoBERTa", "XLM-RoBERTa", "CamemBERT", "ELECTRA")
    limits = "decoders of these families are refused"
    parameters = ("hidden_states", "attention_mask", CACHE_NAME)
    harmless = frozenset({"encoder_attention_mask", "encoder_hidden_states"})
    projections = ("query", "key", "value")
    out = None
    heads, width = "num_attention_heads", "attention_head_size"
    marks = ("scaling",)

    def is_one(self, name: str, module: nn.Module) -> bool:
        return (
            not hasattr(module, "dense")
            and "crossattention" not in name
            and not getattr(module, "is_decoder", False)
            and not getattr(module, "is_causal", False)
        )

    def blocks(self, model: nn.Module) -> Blocks | str:
        encoder: Any = getattr(self.host(model), "encoder", None)
        if encoder is None or not hasattr(encoder, "layer"):
            return "it has no encoder with blocks"
        found = []
        for layer in encoder.layer:
            own, out = layer.attention.self, layer.attention.output
            if getattr(layer, "is_decoder", False) or getattr(layer, "add_cross_attention", False):
                return "its blocks are those of a decoder"
            found.append(bert_block(layer, (own.query, own.key, own.value), out.dense, out.LayerNorm))
        heads, width = self.shape(encoder.layer[0].attention.self)
        return Blocks(encoder, found, heads, width, width**-0.5)

    def embeddings(self, model: nn.Module) -> Embeddings | None:
        return embeddings_named(self.host(model))
