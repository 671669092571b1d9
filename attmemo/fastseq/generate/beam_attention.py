"""The attention function of the private copies: beams become query rows over keys that their sample holds once.

Shapes: B samples, M beams, R = B·M rows, h query heads in groups of g over h/g key/value heads, d head width, T query
positions (1, but for a decoder prompt), N shared positions, t own positions.

A function under one name in transformers' registries is the only thing this package adds outside of its own
objects, and it is asked for by the configs of private copies alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from attmemo.fastseq.generate.el_attention import cross_projections, el_cross_attention
from attmemo.fastseq.generate.private_copy import STATE
from attmemo.fastseq.generate.refusal import Refusal
from attmemo.fastseq.generate.scores import masked, softmax

if TYPE_CHECKING:
    from attmemo.fastseq.generate.call_state import CallState

NAME = "attmemo_fastseq"

# Arguments that change what attention means and that the functions below do not implement.
_MEANINGFUL = ("softcap", "s_aux", "sliding_window", "cache")


def register() -> None:
    """Make `NAME` known to transformers. May be called any number of times."""
    AttentionInterface.register(NAME, beam_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # without it the padding mask would arrive as None


def beam_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention `[R, h, T, d]` → `[R, T, h, d]`, over shared keys where the call's cache says so; else plain SDPA."""
    state: CallState | None = vars(module.config).get(STATE)
    if state is not None and state.el is not None and key is state.el.hidden:
        _refuse_bias(module, kwargs)
        refuse_meaningful(kwargs)
        state.counts["el"] += 1
        projections = cross_projections(module, query.shape[1], query.shape[3])
        return el_cross_attention(query, key[:, 0], projections, attention_mask, scaling), None
    layer = state.shared.take(key) if state is not None else None
    if layer is None and query.shape[0] == key.shape[0]:
        if state is not None:
            state.counts["plain"] += 1
        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
        return out
    if state is None or dropout:
        raise Refusal("attention over shared keys outside of a call, or with dropout")
    refuse_meaningful(kwargs)
    if layer is not None:
        state.counts["prefix"] += 1
        assert layer.prefix_keys is not None
        assert layer.prefix_values is not None
        if kwargs.get("position_bias") is not None:
            raise Refusal("a position bias over a shared prompt")
        if attention_mask is None and query.shape[2] > 1:
            raise Refusal("several new positions over a shared prompt, without a mask")
        return (
            prefix_attention(query, layer.prefix_keys, layer.prefix_values, key, value, attention_mask, scaling),
            None,
        )
    _refuse_bias(module, kwargs)
    state.counts["shared"] += 1
    return shared_attention(query, key, value, attention_mask, scaling), None


def _refuse_bias(module: nn.Module, kwargs: dict[str, Any]) -> None:
    bias = kwargs.get("position_bias")
    if bias is not None and getattr(module, "has_relative_attention_bias", True):
        raise Refusal("a position bias in cross-attention")  # T5's is zeros, and its module says so


def refuse_meaningful(kwargs: dict[str, Any]) -> None:
    """Raise if an argument is set that shared attention would silently drop."""
    for name in _MEANINGFUL:
        if kwargs.get(name) is not None:
            raise Refusal(f"attention with {name}")


def shared_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """M beams over the keys of their sample: one product a sample and key head (FastSeq Eq. 4).

    Parameters
    ----------
    query : Tensor [R, h, T, d]
    key, value : Tensor [B, h/g, N, d]
    mask : Tensor or None
        Bool or additive, `[B or R, 1, T, N]`, the same for all query positions and beams: padding.
    scaling : float or None
        None: d ** -0.5.

    Returns
    -------
    Tensor [R, T, h, d]
    """
    rows, heads, new, _ = query.shape
    samples, key_heads, length, _ = key.shape
    folded = _fold(query, samples, key_heads)  # [B, h/g, M·g·T, d]
    if mask is not None:
        mask = mask[:: mask.shape[0] // samples, :, :1, :length]
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return _unfold(out, rows, heads, new)


def prefix_attention(
    query: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
) -> Tensor:
    """A prompt that the beams share and a suffix of their own under one softmax (FastSeq Eq. 3).

    Scores are joined, not keys: they are d times smaller.

    Parameters
    ----------
    query : Tensor [R, h, T, d]
    prefix_key, prefix_value : Tensor [B, h/g, N, d]
    key, value : Tensor [R, h/g, t, d]
    mask : Tensor or None
        Bool or additive, `[R, 1, T, N + t]`. Without one, T has to be 1.

    Returns
    -------
    Tensor [R, T, h, d]
    """
    rows, heads, new, width = query.shape
    samples, key_heads, length, _ = prefix_key.shape
    group, beams = heads // key_heads, rows // samples
    scale = width**-0.5 if scaling is None else scaling
    folded = _fold(query * scale, samples, key_heads)  # [B, h/g, M·g·T, d]
    own = (query * scale).reshape(rows, key_heads, group * new, width)
    shared_scores = torch.matmul(folded, prefix_key.transpose(-1, -2))  # [B, h/g, M·g·T, N]
    own_scores = torch.matmul(own, key.transpose(-1, -2))  # [R, h/g, g·T, t]
    shared_scores = shared_scores.view(samples, key_heads, beams, group * new, length).transpose(1, 2)
    scores = torch.cat([shared_scores.reshape(rows, key_heads, group * new, length), own_scores], dim=-1)
    if mask is not None:
        mask = mask[..., -new:, : scores.shape[-1]]  # [R, 1, T, N + t]
        by_position = scores.view(rows, key_heads * group, new, -1)
        scores = masked(by_position, mask).view(rows, key_heads, group * new, -1)
    weights = softmax(scores)
    shared_weights, own_weights = torch.split(weights, [length, key.shape[-2]], dim=-1)
    shared_weights = shared_weights.view(samples, beams, key_heads, group * new, length).transpose(1, 2)
    shared_part = torch.matmul(shared_weights.reshape(samples, key_heads, -1, length), prefix_value)
    own_part = torch.matmul(own_weights, value).view(rows, heads, new, width).transpose(1, 2)
    return _unfold(shared_part, rows, heads, new) + own_part


def _fold(query: Tensor, samples: int, key_heads: int) -> Tensor:
    """`[R, h, T, d]` → `[B, h/g, M·g·T, d]`: beams, heads of one group and positions become rows of one product."""
    rows, heads, new, width = query.shape
    beams, group = rows // samples, heads // key_heads
    split = query.reshape(samples, beams, key_heads, group, new, width)
    return split.transpose(1, 2).reshape(samples, key_heads, beams * group * new, width)


def _unfold(out: Tensor, rows: int, heads: int, new: int) -> Tensor:
    """`[B, h/g, M·g·T, d]` → `[R, T, h, d]`."""
    samples, key_heads, _, width = out.shape
    beams, group = rows // samples, heads // key_heads
    split = out.view(samples, key_heads, beams, group, new, width)
    return split.permute(0, 2, 4, 1, 3, 5).reshape(rows, new, heads, width)
