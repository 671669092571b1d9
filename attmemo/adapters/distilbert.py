"""DistilBERT: separate projections, with the output projection inside the module."""

from __future__ import annotations

from attmemo.adapters.base import Adapter


class DistilBertAdapter(Adapter):
    """`transformer.layer.i.attention`."""

    family = "distilbert"
    models = ("DistilBERT",)
    projections = ("q_lin", "k_lin", "v_lin")
    out = "out_lin"
    heads, width = "n_heads", "attention_head_size"
