"""ModernBERT: one fused projection, rotary positions, and sliding attention in most layers.

The rows of `Wqkv` are those of Q, then K, then V, so V is a view of the last third. In two of three layers a token
sees 64 tokens to each side. The map of such a layer is a band; it is stored and multiplied like any other map.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from attmemo.models.base import Adapter, Site, layers_named, number, takes
from attmemo.models.blocks import Block, Blocks, RotaryBlocks
from attmemo.models.projections import is_linear, is_plain, why_not


class ModernBertAdapter(Adapter):
    """`layers.i.attn`."""

    family = "modernbert"
    models = ("ModernBERT",)
    limits = "a quantized or adapted Wqkv is refused"
    projections = ()
    out = "Wo"
    rotary = True
    parameters = ("hidden_states", "position_embeddings", "attention_mask")

    def sites(self, model: nn.Module) -> list[Site]:
        found = layers_named(model, ("Wqkv", "Wo", "head_dim", "is_causal"))
        return number([
            (name, module) for name, module in found if not module.is_causal and takes(module, "position_embeddings")
        ])

    def refusal(self, model: nn.Module) -> str | None:
        if (reason := super().refusal(model)) is not None:
            return reason
        for site in self.sites(model):
            if not is_plain(site.module.Wqkv) or not is_linear(site.module.Wo):
                return why_not(site.module, ("Wqkv", "Wo"))
        return None

    def window(self, module: nn.Module) -> int | None:
        window = getattr(module, "sliding_window", None)
        return None if window is None else int(window)

    def value(self, module: nn.Module, tokens: Tensor) -> Tensor:
        fused: nn.Linear = module.Wqkv  # type: ignore[assignment]
        first = 2 * fused.out_features // 3
        return linear(tokens, fused.weight[first:], None if fused.bias is None else fused.bias[first:])

    def blocks(self, model: nn.Module) -> Blocks | str:
        host: Any = self.host(model)
        if not hasattr(host, "rotary_emb"):
            return "its rotary positions are unknown"
        found = []
        for layer in host.layers:
            own, feed = layer.attn, layer.mlp
            before = None if isinstance(layer.attn_norm, nn.Identity) else layer.attn_norm
            found.append(
                Block(
                    layer, (own.Wqkv,), own.Wo, before, None, (feed.Wi,), feed.act, True, feed.Wo, layer.mlp_norm,
                    None, window=self.window(own), kind=layer.attention_type,
                )
            )  # fmt: skip
        heads, width = self.shape(host.layers[0].attn)
        return RotaryBlocks(host, found, heads, width)
