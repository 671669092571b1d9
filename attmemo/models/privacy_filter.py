"""Privacy Filter: an encoder whose tokens see few neighbours in every layer, with experts and attention sinks.

Neighbouring numbers of a head of Q and K are turned against each other, in most models its two halves. Scores are
products of Q and K alone, so both are projected in the order of halves: then turning is that of all families. Experts
lie in one tensor, input first; each becomes two layers that look into it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attmemo.models.base import Adapter, takes
from attmemo.models.blocks import Block, Blocks, RotaryBlocks, Routed
from attmemo.models.projections import is_plain

_GATE = 1.702, 7.0  # slope and limit that kernels know


class PrivacyFilterAdapter(Adapter):
    """`layers.i.self_attn` with sinks, and `layers.i.mlp` with a router and experts."""

    family = "privacy-filter"
    models = ("Privacy Filter",)
    limits = "rows and maps are refused"
    marks = ("sinks",)
    has_rows = has_maps = False
    rotary = True
    parameters = ("hidden_states", "position_embeddings", "attention_mask")

    def is_one(self, name: str, module: nn.Module) -> bool:
        return not getattr(module, "is_causal", True) and takes(module, "position_embeddings")

    def window(self, module: nn.Module) -> int | None:
        return int(module.sliding_window)  # type: ignore[arg-type]

    def blocks(self, model: nn.Module) -> Blocks | str:
        host: Any = self.host(model)
        found = []
        for layer in host.layers[: host.config.num_hidden_layers]:
            own, feed = layer.self_attn, layer.mlp
            if not is_plain(own.q_proj) or not is_plain(own.k_proj):
                return "its Q and K are quantized or adapted: their numbers cannot be put into another order"
            if (float(feed.experts.alpha), float(feed.experts.limit)) != _GATE:
                return "its experts have a gate of another form"
            width = int(own.head_dim)
            found.append(
                Block(
                    layer, (_in_halves(own.q_proj, width), _in_halves(own.k_proj, width), own.v_proj), own.o_proj,
                    layer.input_layernorm, None, (), nn.Identity(), False, None, layer.post_attention_layernorm, None,
                    window=self.window(own), sinks=own.sinks.detach().float(), routed=_routed(feed),
                )
            )  # fmt: skip
        own = host.layers[0].self_attn
        heads, keys = (part.out_features // int(own.head_dim) for part in (own.q_proj, own.k_proj))
        return PrivacyFilterBlocks(
            host, found, heads, int(own.head_dim), scale=float(own.scaling) ** 2, key_heads=keys
        )


class PrivacyFilterBlocks(RotaryBlocks):
    """Blocks whose Q and K are projected in the order of halves."""

    @property
    def nbytes(self) -> int:
        parts = [part for block in self.blocks for linear in block.qkv[:2] for part in linear.parameters()]
        return sum(part.nbytes for part in parts)

    def angles(self, kind: str, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cosine, sine = super().angles(kind, positions, dtype)  # of one half
        return torch.cat((cosine, cosine), -1), torch.cat((sine, sine), -1)


def _in_halves(linear: Any, width: int) -> nn.Linear:
    """The layer with those numbers of a head first that have even places, then the others."""
    order = torch.arange(linear.out_features).view(-1, width // 2, 2).transpose(1, 2).reshape(-1)
    bias = None if linear.bias is None else linear.bias.detach()[order]
    return _linear(linear.weight.detach()[order], bias)


def _routed(feed: Any) -> Routed:
    own, router = feed.experts, feed.router
    ups = zip(own.gate_up_proj.detach(), own.gate_up_proj_bias.detach(), strict=True)
    downs = zip(own.down_proj.detach(), own.down_proj_bias.detach(), strict=True)
    parts = [
        (_linear(up.T, up_bias), _linear(down.T, down_bias))
        for (up, up_bias), (down, down_bias) in zip(ups, downs, strict=True)
    ]
    return Routed(feed, _linear(router.weight.detach(), router.bias.detach()), tuple(parts), int(router.top_k),
                  "clipped")  # fmt: skip


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A layer with these tensors: no number is copied."""
    outputs, inputs = weight.shape
    found = nn.Linear(inputs, outputs, bias is not None, device="meta")
    found.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        found.bias = nn.Parameter(bias, requires_grad=False)
    return found
