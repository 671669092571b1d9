"""Blocks of most models since Llama: norms by the mean square, shared heads, rotary positions, gates.

Norms stand before each part. Several heads of Q share a head of K and V. The feed-forward layer is gated.

They differ in what is there beside: norms of heads of Q and K (Qwen3), norms of what a part gives (Gemma), and
windows. All is read from the modules; the self-check compares each block with the original's.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from attmemo.models.base import Adapter, takes
from attmemo.models.blocks import Block, Blocks, RotaryBlocks

_FEED = ("gate_proj", "up_proj", "down_proj", "act_fn")
_CAPS = ("attn_logit_softcapping", "softcap", "logit_cap")


def gated_blocks(adapter: Adapter, model: nn.Module, causal: bool) -> Blocks | str:
    """The blocks of a model whose `layers` are of this form, or why they cannot be packed.

    Parameters
    ----------
    adapter : Adapter
        Knows the windows of its attention.
    causal : bool
        Whether a token sees itself and those before.
    """
    host: Any = adapter.host(model)
    if not hasattr(host, "rotary_emb") or not hasattr(host, "layers"):
        return "its rotary positions are unknown"
    if causal and not getattr(host.config, "is_causal", True):
        return "its mask is not causal, its attention is (config.is_causal)"
    layers = list(host.layers[: host.config.num_hidden_layers])
    for layer in layers:
        if (reason := _refusal(layer)) is not None:
            return reason
    by_kind = takes(host.rotary_emb, "layer_type")
    own = layers[0].self_attn
    width = int(own.head_dim)
    return RotaryBlocks(
        host, [_block(adapter, layer, by_kind) for layer in layers], own.q_proj.out_features // width, width,
        scale=float(own.scaling), key_heads=own.k_proj.out_features // width, causal=causal,
    )  # fmt: skip


def _refusal(layer: Any) -> str | None:
    """Why a layer cannot be packed; None if it has the form that is known."""
    own, feed = layer.self_attn, getattr(layer, "mlp", None)
    if not all(hasattr(feed, name) for name in _FEED):
        return f"its feed-forward layers are of an unknown form ({type(feed).__name__})"
    if hasattr(own, "sinks"):
        return "its attention has sinks"
    if (name := next((name for name in _CAPS if getattr(own, name, None) is not None), None)) is not None:
        return f"its scores are capped ({name})"
    return None


def _block(adapter: Adapter, layer: Any, by_kind: bool) -> Block:
    own, feed = layer.self_attn, layer.mlp
    if hasattr(layer, "pre_feedforward_layernorm"):
        norms = {"inner": layer.post_attention_layernorm, "inner_feed": layer.post_feedforward_layernorm}
        before_feed = layer.pre_feedforward_layernorm
    else:
        norms, before_feed = {}, layer.post_attention_layernorm
    return Block(
        layer, (own.q_proj, own.k_proj, own.v_proj), own.o_proj, layer.input_layernorm, None,
        (feed.gate_proj, feed.up_proj), feed.act_fn, True, feed.down_proj, before_feed, None, **norms,
        query=getattr(own, "q_norm", None), key=getattr(own, "k_norm", None), window=adapter.window(own),
        kind=own.layer_type if by_kind else "",
    )  # fmt: skip
