"""EL-attention: attention over hidden states that are never projected to keys and values.

With Q = x W_q + b_q, K = H W_k + b_k and V = H W_v + b_v, head by head:

    Q Kᵀ       = (Q W_kᵀ) Hᵀ + (Q b_kᵀ) 1ᵀ     the last term is the same for every key: softmax removes it
    P V        = (P H) W_v + b_v                 every row of P sums to 1

so b_k is dropped and b_v is added behind, exactly. The factors are kept apart: merged they would be h times larger.
One H `[B, 1, N, D]` then stands for the keys and values of all heads, and in cross-attention of all layers: h times
the arithmetic of attention, 1 / (2·L·M) of the memory of the original beam search. Source: EL-attention (arXiv
2105.04779), section 3; FastSeq's code and the article keep b_k.

Shapes: B samples, M beams, R = B·M rows, h heads of width d, D width of the hidden states, N shared positions, t own
ones, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from attmemo.fastseq.generate.beam_cache import BeamArena, BeamLayer, keep_rows
from attmemo.fastseq.generate.refusal import Refusal
from attmemo.fastseq.generate.scores import masked, softmax
from attmemo.fastseq.generate.streamed_linear import StreamedLinear
from attmemo.models.cache_name import CACHE_NAME


@dataclass(frozen=True)
class Projections:
    """An attention layer's matrices, as views of its weights: nothing is copied or merged.

    Attributes
    ----------
    query_weight : Tensor [h·d, D] or None
        None in cross-attention, where the module itself has projected the queries.
    query_bias : Tensor [h·d] or None
    key_weight, value_weight : Tensor [h, d, D]
    value_bias : Tensor [h, 1, d] or None
    """

    query_weight: Tensor | None
    query_bias: Tensor | None
    key_weight: Tensor
    value_weight: Tensor
    value_bias: Tensor | None


def cross_projections(module: Any, heads: int, width: int) -> Projections:
    """The key and value matrices of a cross-attention module with `heads` heads of `width`.

    Raises
    ------
    Refusal
        By name, if the algebra does not hold for it.
    """
    refuse_unfoldable(module)
    for key_name, value_name in (("k_proj", "v_proj"), ("k", "v"), ("key_proj", "value_proj")):
        key, value = getattr(module, key_name, None), getattr(module, value_name, None)
        if key is not None and value is not None:
            break
    else:
        raise Refusal(f"EL-attention: {type(module).__name__} has no key and value projection of a known name")
    for linear in (key, value):
        if type(linear) not in (nn.Linear, StreamedLinear):
            raise Refusal(f"EL-attention: a projection is {type(linear).__name__}, not Linear")
        if linear.out_features != heads * width:
            raise Refusal("EL-attention: grouped key and value heads")
    bias = value.bias
    return Projections(
        None,
        None,
        key.weight.view(heads, width, -1),
        value.weight.view(heads, width, -1),
        None if bias is None else bias.view(heads, 1, width),
    )


def self_projections(module: Any) -> tuple[Projections, nn.Module, int, float]:
    """A GPT-2-like self-attention's matrices, its output projection, its number of heads, and its scale.

    Raises
    ------
    Refusal
        By name: rotary positions, normed keys, or a module this does not know.
    """
    refuse_unfoldable(module)
    kind = type(module).__name__
    if kind == "GPT2Attention":
        fused, heads = module.c_attn, int(module.num_heads)
        if type(fused) is not Conv1D:
            raise Refusal(f"EL-attention: a projection is {type(fused).__name__}, not Conv1D")
        depth = fused.weight.shape[0]
        query, key, value = fused.weight.t().split(depth)  # Conv1D holds [D, 3·D]
        query_bias, _, value_bias = fused.bias.split(depth)
        out, scale = module.c_proj, float(module.scaling)
    elif kind == "OPTAttention":
        if any(
            type(getattr(module, name)) not in (nn.Linear, StreamedLinear) for name in ("q_proj", "k_proj", "v_proj")
        ):
            raise Refusal("EL-attention: a projection is not Linear")
        heads, scale, out = int(module.num_heads), float(module.scaling), module.out_proj
        query, key, value = module.q_proj.weight, module.k_proj.weight, module.v_proj.weight
        query_bias, value_bias = module.q_proj.bias, module.v_proj.bias
        depth = query.shape[1]
    else:
        raise Refusal(f"EL-attention: {kind} is not a GPT-2-like self-attention that is known")
    width = depth // heads
    return (
        Projections(
            query,
            query_bias,
            key.reshape(heads, width, depth),
            value.reshape(heads, width, depth),
            None if value_bias is None else value_bias.view(heads, 1, width),
        ),
        out,
        heads,
        scale,
    )


def refuse_unfoldable(module: nn.Module) -> None:
    """Raise where something that depends on the key's position, or is not linear, stands between H and the scores."""
    for name, _ in module.named_modules():
        leaf = name.rsplit(".", 1)[-1]
        if leaf in ("k_norm", "key_norm", "k_layernorm", "kv_norm", "kv_a_layernorm", "k_ln"):
            raise Refusal(
                f"EL-attention: {type(module).__name__} norms its keys ({leaf}), which does not commute with a product"
            )
        if "rotary" in leaf or leaf == "rope":
            raise Refusal(f"EL-attention: {type(module).__name__} rotates its keys by their position ({leaf})")


def why_no_self_el(model: Any) -> str | None:
    """The reason why EL-attention does not hold for a decoder's self-attention, or None if it does."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "rope_parameters", None) or getattr(config, "rope_theta", None):
        return f"{config.model_type} rotates its keys by their position (RoPE); use attention='shared'"
    found = [module for module in model.modules() if type(module).__name__ in ("GPT2Attention", "OPTAttention")]
    if not found:
        return f"{config.model_type} is not a decoder like GPT-2 whose attention is known"
    try:
        for module in found:
            self_projections(module)
    except Refusal as refusal:
        return str(refusal)
    return None


def absorb(query: Tensor, key_weight: Tensor, samples: int) -> Tensor:
    """Queries `[R, h, T, d]`, scaled, to `[B, M·h·T, D]`: multiplied into the key matrices, head by head."""
    rows, heads, new, width = query.shape
    by_head = query.transpose(0, 1).reshape(heads, rows * new, width)
    wide = torch.bmm(by_head, key_weight)  # [h, R·T, D]
    depth = wide.shape[-1]
    wide = wide.view(heads, samples, rows // samples, new, depth).permute(1, 2, 0, 3, 4)
    return wide.reshape(samples, -1, depth)


def release(context: Tensor, value_weight: Tensor, value_bias: Tensor | None, rows: int, new: int) -> Tensor:
    """Weighted hidden states `[B, M·h·T, D]` to `[R, T, h, d]`: through the value matrices, head by head."""
    samples, _, depth = context.shape
    heads, width, _ = value_weight.shape
    split = context.view(samples, rows // samples, heads, new, depth).permute(2, 0, 1, 3, 4)
    out = torch.bmm(split.reshape(heads, rows * new, depth), value_weight.transpose(1, 2))
    if value_bias is not None:
        out = out + value_bias
    return out.view(heads, rows, new, width).permute(1, 2, 0, 3)


def times_states(queries: Tensor, hidden: Tensor) -> Tensor:
    """`[B, X, D]` times the transposed states `[B, N, D]`: `[B, X, N]`."""
    if queries.device.type != "cpu":
        return torch.bmm(queries, hidden.transpose(1, 2))
    # On the CPU a batched product over few large samples is many times slower than one product after the other.
    return torch.stack([F.linear(query, states) for query, states in zip(queries, hidden, strict=True)])


def weigh_states(weights: Tensor, hidden: Tensor) -> Tensor:
    """`[B, X, N]` times the states `[B, N, D]`: `[B, X, D]`."""
    if weights.device.type != "cpu":
        return torch.bmm(weights, hidden)
    return torch.stack([torch.mm(weight, states) for weight, states in zip(weights, hidden, strict=True)])


def el_cross_attention(
    query: Tensor, hidden: Tensor, projections: Projections, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """M beams over the hidden states of their sample.

    Parameters
    ----------
    query : Tensor [R, h, T, d]
    hidden : Tensor [B, N, D]
    projections : Projections
    mask : Tensor or None
        Bool or additive, `[B or R, 1, T, N]`, the same for all query positions and beams.
    scaling : float or None
        None: d ** -0.5.

    Returns
    -------
    Tensor [R, T, h, d]
    """
    rows, _, new, width = query.shape
    samples, length, _ = hidden.shape
    wide = absorb(query * (width**-0.5 if scaling is None else scaling), projections.key_weight, samples)
    if mask is not None:
        mask = mask[:: mask.shape[0] // samples, 0, :1, :length]  # [B, 1, N]
    scores = masked(times_states(wide, hidden), mask)
    weights = softmax(scores)
    return release(weigh_states(weights, hidden), projections.value_weight, projections.value_bias, rows, new)


class ELCrossLayer(BeamLayer):
    """One decoder layer's part of the encoder's hidden states, the same tensor `[B, 1, N, D]` for all layers.

    Filled from the start, so that the model does not project it.
    """

    def __init__(self, states: ELStates) -> None:
        super().__init__()
        self.states = states
        self.is_initialized = True
        states.layers.append(self)
        self.keys = self.values = states.hidden

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise Refusal("the model projected keys that EL-attention does not need")

    def get_seq_length(self) -> int:
        return int(self.states.hidden.shape[2])


class ELStates:
    """The encoder's hidden states, once for all layers.

    Parameters
    ----------
    hidden : Tensor [B, N, D]
    """

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden.contiguous().unsqueeze(1)
        self.layers: list[ELCrossLayer] = []

    def swap_out(self, moved: Sequence[tuple[int, int]], count: int) -> None:
        # The encoder's outputs may be the caller's own: they are not written to.
        if moved:
            self.hidden = self.hidden.clone()
        self.hidden = swapped = keep_rows(self.hidden, moved, count)
        for layer in self.layers:
            layer.keys = layer.values = swapped

    def bytes(self) -> int:
        return self.hidden.numel() * self.hidden.element_size()


class ELSelfLayer(BeamLayer):
    """The inputs of one decoder layer's self-attention: the prompt's `[B, N, D]` once, the rest in the arena."""

    def __init__(self, arena: BeamArena, index: int) -> None:
        super().__init__()
        self.arena = arena
        self.index = index
        self.prefix: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise Refusal("the model projected keys that EL-attention does not need")

    def get_seq_length(self) -> int:
        return (0 if self.prefix is None else self.prefix.shape[1]) + self.arena.filled(self.index)

    def swap_out(self, moved: Sequence[tuple[int, int]], count: int) -> None:
        if self.prefix is not None:
            self.prefix = keep_rows(self.prefix, moved, count)

    def bytes(self) -> int:
        return 0 if self.prefix is None else self.prefix.numel() * self.prefix.element_size()


class ELSelfAttention(nn.Module):
    """Takes the place of a GPT-2-like self-attention in a private copy.

    Parameters
    ----------
    inner : nn.Module
        The module it replaces; its weights are used, and it reads the prompt itself.
    counts : Counter
        Where each step is counted.
    """

    def __init__(self, inner: nn.Module, layer_idx: int, counts: dict[str, int]) -> None:
        super().__init__()
        self.inner = inner
        self.layer_idx = layer_idx
        self.counts = counts
        self.projections, self.out, self.heads, self.scale = self_projections(inner)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """`[R, T, D]` to `[R, T, D]`; T is 1 but for the prompt."""
        layer: ELSelfLayer = kwargs.pop(CACHE_NAME).layers[self.layer_idx]
        if layer.prefix is None:
            layer.prefix = hidden_states.contiguous()
            out = self.inner(hidden_states, attention_mask=attention_mask, **kwargs)
            return out[0], None
        rows, new, depth = hidden_states.shape
        if new != 1 or kwargs.get("encoder_hidden_states") is not None:
            raise Refusal("EL self-attention over more than one new position, or in a decoder with cross-attention")
        self.counts["el_self"] += 1
        p = self.projections
        assert p.query_weight is not None
        query = F.linear(hidden_states, p.query_weight, p.query_bias) * self.scale
        query = query.view(rows, self.heads, 1, -1)
        samples, length, _ = layer.prefix.shape
        (own,) = layer.arena.append(layer.index, hidden_states.unsqueeze(1))
        own = own[:, 0]  # [R, t, D]
        wide = absorb(query, p.key_weight, samples)  # [B, M·h, D]
        shared_scores = times_states(wide, layer.prefix).view(rows, self.heads, length)
        wide = wide.view(rows, self.heads, depth)
        scores = torch.cat([shared_scores, torch.matmul(wide, own.transpose(1, 2))], dim=-1)
        if attention_mask is not None:
            scores = masked(scores, attention_mask[:, 0, :, : scores.shape[-1]])
        weights = softmax(scores)
        shared_weights, own_weights = torch.split(weights, [length, own.shape[1]], dim=-1)
        context = weigh_states(shared_weights.reshape(samples, -1, length), layer.prefix)
        context = context + torch.matmul(own_weights, own).view(samples, -1, depth)
        out = release(context, p.value_weight, p.value_bias, rows, new)  # [R, 1, h, d]
        return self.out(out.reshape(rows, new, -1)), None


def swap_self_attention(model: Any, counts: dict[str, int]) -> None:
    """Put `ELSelfAttention` in the places of a private copy's self-attention modules."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if type(child).__name__ in ("GPT2Attention", "OPTAttention") and not isinstance(parent, ELSelfAttention):
                parent._modules[name] = ELSelfAttention(child, int(child.layer_idx), counts)
