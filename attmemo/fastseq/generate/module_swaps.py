"""Attention modules that do not go through transformers' interface: what takes their place in a private copy.

ProphetNet's cross-attention computes its own products and checks their shapes. Its n-gram self-attention is left
alone: it reads the suffix, which every beam has of its own. (FastSeq, arXiv 2106.04718, also changes only the
cross-attention there.)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from attmemo.fastseq.generate.beam_attention import shared_attention
from attmemo.fastseq.generate.call_state import CallState
from attmemo.fastseq.generate.el_attention import cross_projections, el_cross_attention
from attmemo.models.cache_name import CACHE_NAME

SWAPPED = ("ProphetNetAttention",)


def swap_modules(model: Any, state: CallState) -> None:
    """Put ours in the places of a private copy's modules. The parents of such modules have to be copies themselves."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if type(child).__name__ == "ProphetNetAttention" and name == "cross_attn":
                parent._modules[name] = ProphetNetCross(child, state)


class ProphetNetCross(nn.Module):
    """Cross-attention with the weights of a `ProphetNetAttention`, over keys that are held once a sample."""

    def __init__(self, inner: nn.Module, state: CallState) -> None:
        super().__init__()
        self.inner: Any = inner
        self.state = state

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """`[R, T, D]` to `[R, T, D]`; T is 1 + the predicting streams. The mask `[B, h, 1, N]` is additive."""
        inner = self.inner
        layer_idx = inner.layer_idx
        cache = kwargs.pop(CACHE_NAME, None)
        if key_value_states is None or not cache.is_updated.get(layer_idx):
            out = inner(hidden_states, key_value_states, attention_mask, cache, **kwargs)
            return out[0], None
        rows, new, depth = hidden_states.shape
        heads, width = inner.num_attn_heads, inner.head_dim
        query = F.linear(hidden_states, inner.query_proj.weight, inner.query_proj.bias)
        query = query.view(rows, new, heads, width).transpose(1, 2)
        layer = cache.cross_attention_cache.layers[layer_idx]
        mask = None if attention_mask is None else attention_mask[:, :1]
        if self.state.el is not None:
            self.state.counts["el"] += 1
            projections = cross_projections(inner, heads, width)
            out = el_cross_attention(query, layer.keys[:, 0], projections, mask, None)
        else:
            self.state.counts["shared"] += 1
            out = shared_attention(query, layer.keys, layer.values, mask, None)
        return inner.out_proj(out.reshape(rows, new, depth)), None
