"""GPT-2: one `Conv1D` computes Q, K and V. Its weight is ``[in, 3 H]``; the last third of the columns is V.

BLAS multiplies some columns of a wider matrix where they lie, so nothing is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attmemo.models.base import Adapter, Call, Site, layers_named, number
from attmemo.models.cache_name import CACHE_NAME


class GPT2Adapter(Adapter):
    """`h.i.attn`."""

    family = "gpt2"
    models = ("GPT-2", "DistilGPT2")
    limits = "cross-attention and a quantized or adapted c_attn are refused"
    projections = ()
    out = "c_proj"
    heads = "num_heads"
    causal = True
    parameters = (
        "hidden_states", CACHE_NAME, "attention_mask", "encoder_hidden_states", "encoder_attention_mask",
        "output_attentions",
    )  # fmt: skip
    harmless = frozenset({"encoder_attention_mask"})

    def sites(self, model: nn.Module) -> list[Site]:
        found = layers_named(model, ("c_attn", "c_proj", "num_heads", "head_dim", "split_size"))
        return number([(name, module) for name, module in found if self.is_one(name, module)])

    def is_one(self, name: str, module: nn.Module) -> bool:
        # GPT-BigCode has the same names, but its c_attn is a Linear with one head of K and V.
        return not getattr(module, "is_cross_attention", True) and not hasattr(module, "multi_query")

    def refusal(self, model: nn.Module) -> str | None:
        if getattr(model.config, "add_cross_attention", False):
            return "it has cross-attention layers"
        for site in self.sites(model):
            for part in (site.module.c_attn, site.module.c_proj):
                weight = getattr(part, "weight", None)
                if type(part).__name__ != "Conv1D" or type(weight) is not nn.Parameter:
                    return f"its fused projection is a {type(part).__name__} (quantized or adapted)"
        return None

    def value(self, module: nn.Module, tokens: Tensor) -> Tensor:
        return self._columns(module, tokens, 2)

    def key(self, module: nn.Module, call: Call) -> Tensor:
        batch, length, _ = call.hidden.shape
        keys = self._columns(module, call.hidden.flatten(0, 1), 1)
        return keys.view(batch, length, *self.shape(module)).transpose(1, 2)

    def _columns(self, module: nn.Module, tokens: Tensor, third: int) -> Tensor:
        size = int(module.split_size)  # type: ignore[arg-type]
        part = slice(third * size, (third + 1) * size)
        fused: nn.Module = module.c_attn  # type: ignore[assignment]
        return torch.addmm(fused.bias[part], tokens, fused.weight[:, part])  # type: ignore[index]
