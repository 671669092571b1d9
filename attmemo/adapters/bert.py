"""BERT and the families that share its attention: RoBERTa, XLM-R, ELECTRA, CamemBERT.

`*SelfAttention` holds separate Linear layers `query`, `key`, `value`; the output projection lives in the parent
(`*SelfOutput`), so a hit returns the bare context. Scores go through the attention interface, which is called
with Q, K and V already projected and therefore cannot skip them: `forward` of the module is replaced instead.
"""

from __future__ import annotations

from torch import Tensor, nn

from attmemo.adapters.base import Adapter, Site, layers_named, number
from attmemo.adapters.projections import are_linear


class BertAdapter(Adapter):
    """`encoder.layer.i.attention.self` of BERT-shaped encoders."""

    family = "bert"
    models = ("BERT", "RoBERTa", "XLM-RoBERTa", "CamemBERT", "ELECTRA")
    limits = "decoders of these families"
    parameters = ("hidden_states", "attention_mask", "past_key_values")
    harmless = frozenset({"encoder_attention_mask", "encoder_hidden_states"})

    def sites(self, model: nn.Module) -> list[Site]:
        found = layers_named(model, ("query", "key", "value", "num_attention_heads", "attention_head_size", "scaling"))
        return number([
            (name, module)
            for name, module in found
            if are_linear(module, "query", "key", "value")
            and not hasattr(module, "dense")
            and "crossattention" not in name
            and not getattr(module, "is_decoder", False)
            and not getattr(module, "is_causal", False)
        ])

    def value(self, module: nn.Module, tokens: Tensor) -> Tensor:
        projected: Tensor = module.value(tokens)  # type: ignore[operator]
        return projected

    def shape(self, module: nn.Module) -> tuple[int, int]:
        return int(module.num_attention_heads), int(module.attention_head_size)  # type: ignore[arg-type]


