"""Decoders and encoders of transformers' models as this project's kernels run them: one description for each family.

A description names the linear layers, norms and heads of every block, how a token is embedded, and what hidden states
are multiplied with at last. What a family does elsewhere stays its own code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attmemo.fastseq.generate.refusal import Refusal
from attmemo.fastseq.generate.vocabulary import Linears
from attmemo.kernels.norms import Norm, norm_of

_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
_BEHIND = {"bart", "marian"}  # norms stand behind the sums
_BEFORE = {"mbart", "pegasus"}
_TURNED = {"llama", "qwen2", "qwen3"}
_STATIC_ROPES = {"default", "linear", "llama3"}  # angles depend on the position alone


@dataclass(frozen=True)
class BlockParts:
    """What `Block` has, not packed yet."""

    qkv: Linears
    out: Linears
    up: Linears
    down: Linears
    cross_q: Linears | None = None
    cross_out: Linears | None = None
    norms: dict[str, Norm] | None = None


@dataclass(frozen=True)
class Stack:
    """Blocks one behind the other, of a decoder or an encoder.

    Attributes
    ----------
    blocks : list of BlockParts
    activation : str
        One of `attmemo.kernels.linear.ACTIVATIONS`.
    heads, key_heads, width : int
    scale : float
    embed : callable
        Of tokens `[R]` and positions `[R]`, int64, on the model: hidden states `[R, hidden]`.
    last : Norm or None
        Behind the last block.
    gated : bool
        Whether the first half of `up` is activated, and multiplied by the other half.
    angles : callable or None
        Cosines and sines `[positions, half]`, float32, of so many positions.
    bias : callable or None
        What is added to scores: of a decoder `[heads, N]`, of the largest of N distances first; of an encoder
        `[heads, 2 N - 1]`, of N - 1 tokens back first.
    """

    blocks: list[BlockParts]
    activation: str
    heads: int
    key_heads: int
    width: int
    scale: float
    embed: Callable[[Tensor, Tensor], Tensor]
    last: Norm | None = None
    gated: bool = False
    angles: Callable[[int], tuple[Tensor, Tensor]] | None = None
    bias: Callable[[int], Tensor] | None = None


@dataclass(frozen=True)
class Description:
    """A model.

    Attributes
    ----------
    decoder : Stack
    head : Linears
        From hidden states to the vocabulary.
    head_bias : Tensor or None
        Is added to the logits; it is rounded for itself.
    head_scale : float
        Hidden states are multiplied with it before.
    encoder : Stack or None
    crosses : list of Linears
        Of each block of the decoder the layers for keys and values of cross-attention.
    """

    decoder: Stack
    head: Linears
    head_bias: Tensor | None = None
    head_scale: float = 1.0
    encoder: Stack | None = None
    crosses: list[Linears] | None = None


def describe(model: Any) -> Description:
    """Raises Refusal where a model is of no family that is described here."""
    kind = str(model.config.model_type)
    known = {"gpt2": _gpt2, "t5": _t5, "mt5": _t5}
    known |= dict.fromkeys(_BEHIND | _BEFORE, _bart) | dict.fromkeys(_TURNED, _llama)
    if kind not in known or type(model).__module__.split(".")[0] != "transformers":
        raise Refusal(f"the decoder of {type(model).__name__} is not described")
    try:
        return known[kind](model)
    except AttributeError as error:  # another head than the family's language model
        raise Refusal(f"{type(model).__name__} has another structure: {error}") from error


def _norm(module: nn.Module) -> Norm:
    found = norm_of(module)
    if found is None:
        raise Refusal(f"a norm of {type(module).__name__}")
    return found


def _square_norm(module: Any) -> Norm:
    """T5's: by the mean square. Its class may be another's that is faster, such as apex's."""
    if type(module).__name__ not in ("T5LayerNorm", "MT5LayerNorm"):
        raise Refusal(f"a norm of {type(module).__name__}")
    return Norm(module.weight.detach(), None, module.variance_epsilon, False)


def _norms(**modules: nn.Module | None) -> dict[str, Norm]:
    return {name: _norm(module) for name, module in modules.items() if module is not None}


def _activation(name: object) -> str:
    if name not in _ACTIVATIONS:
        raise Refusal(f"the activation {name}")
    return _ACTIVATIONS[str(name)]


def _bart_stack(part: Any, config: Any, heads: int, *, crosses: bool) -> Stack:
    """An encoder, or a decoder with cross-attention."""
    behind = config.model_type in _BEHIND
    names = ("behind", "behind_feed", "behind_cross") if behind else ("before", "before_feed", "before_cross")
    blocks = []
    for layer in part.layers:
        own, cross = layer.self_attn, layer.encoder_attn if crosses else None
        found = [layer.self_attn_layer_norm, layer.final_layer_norm]
        found += [layer.encoder_attn_layer_norm] if crosses else []
        blocks.append(
            BlockParts(
                Linears.of(own.q_proj, own.k_proj, own.v_proj), Linears.of(own.out_proj), Linears.of(layer.fc1),
                Linears.of(layer.fc2), None if cross is None else Linears.of(cross.q_proj),
                None if cross is None else Linears.of(cross.out_proj),
                _norms(**dict(zip(names, found, strict=False))),
            )
        )  # fmt: skip
    places, normed = part.embed_positions, getattr(part, "layernorm_embedding", None)
    offset, scale = int(getattr(places, "offset", 0)), getattr(part, "embed_scale", 1.0)

    def embed(tokens: Tensor, positions: Tensor) -> Tensor:
        rows: Tensor = part.embed_tokens(tokens) * scale + F.embedding(positions + offset, places.weight)
        return rows if normed is None else normed(rows)

    final = getattr(part, "layer_norm", None)
    if (final is None) != behind:
        raise Refusal(f"a {config.model_type} with norms elsewhere")
    width = config.d_model // heads
    return Stack(
        blocks, _activation(config.activation_function), heads, heads, width, width**-0.5, embed,
        None if final is None else _norm(final),
    )  # fmt: skip


def _bart(model: Any) -> Description:
    config = model.config
    decoder = _bart_stack(model.model.decoder, config, config.decoder_attention_heads, crosses=True)
    encoder = _bart_stack(model.model.encoder, config, config.encoder_attention_heads, crosses=False)
    both = [(layer.encoder_attn.k_proj, layer.encoder_attn.v_proj) for layer in model.model.decoder.layers]
    bias = model.final_logits_bias.detach().flatten()
    return Description(
        decoder, Linears.of(model.lm_head), bias if bool(bias.any()) else None, encoder=encoder,
        crosses=[Linears.of(*pair) for pair in both],
    )  # fmt: skip


def _gpt2(model: Any) -> Description:
    decoder, config = model.transformer, model.config
    plain = config.scale_attn_weights and not config.scale_attn_by_inverse_layer_idx
    if not plain or config.reorder_and_upcast_attn or config.add_cross_attention:
        raise Refusal("GPT-2 with attention that is scaled by layers, or with cross-attention")
    blocks = [
        BlockParts(
            Linears.of(layer.attn.c_attn), Linears.of(layer.attn.c_proj), Linears.of(layer.mlp.c_fc),
            Linears.of(layer.mlp.c_proj), norms=_norms(before=layer.ln_1, before_feed=layer.ln_2),
        )
        for layer in decoder.h
    ]  # fmt: skip

    def embed(tokens: Tensor, positions: Tensor) -> Tensor:
        rows: Tensor = decoder.wte(tokens) + decoder.wpe(positions)
        return rows

    width = config.n_embd // config.n_head
    stack = Stack(
        blocks, _activation(config.activation_function), config.n_head, config.n_head, width, width**-0.5, embed,
        _norm(decoder.ln_f),
    )  # fmt: skip
    return Description(stack, Linears.of(model.lm_head))


def _llama(model: Any) -> Description:
    decoder, config = model.model, model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
        raise Refusal("attention in a sliding window")
    rope = decoder.rotary_emb
    if getattr(rope, "rope_type", None) not in _STATIC_ROPES:
        raise Refusal(f"angles of the kind {getattr(rope, 'rope_type', None)}")
    blocks = []
    for layer in decoder.layers:
        own, feed = layer.self_attn, layer.mlp
        blocks.append(
            BlockParts(
                Linears.of(own.q_proj, own.k_proj, own.v_proj), Linears.of(own.o_proj),
                Linears.of(feed.gate_proj, feed.up_proj), Linears.of(feed.down_proj),
                norms=_norms(
                    before=layer.input_layernorm, before_feed=layer.post_attention_layernorm,
                    query=getattr(own, "q_norm", None), key=getattr(own, "k_norm", None),
                ),
            )
        )  # fmt: skip
        if layer.self_attn.scaling != layer.self_attn.head_dim**-0.5:
            raise Refusal("attention of another scale")
    width = decoder.layers[0].self_attn.head_dim

    def embed(tokens: Tensor, positions: Tensor) -> Tensor:
        rows: Tensor = decoder.embed_tokens(tokens)
        return rows

    def angles(count: int) -> tuple[Tensor, Tensor]:
        like = decoder.embed_tokens.weight[:1, None]
        cosine, sine = (part[0].float() for part in rope(like, torch.arange(count)[None]))
        half = width // 2
        if cosine.shape[-1] != width or not torch.equal(cosine[:, :half], cosine[:, half:]):
            raise Refusal("angles for a part of a head")
        return cosine[:, :half].contiguous(), sine[:, :half].contiguous()

    stack = Stack(
        blocks, _activation(config.hidden_act), config.num_attention_heads, config.num_key_value_heads, width,
        width**-0.5, embed, _norm(decoder.norm), gated=True, angles=angles,
    )  # fmt: skip
    return Description(stack, Linears.of(model.lm_head))


def _t5_stack(part: Any, config: Any, *, crosses: bool) -> Stack:
    blocks = []
    gated = bool(config.is_gated_act)
    for block in part.block:
        own, feed = block.layer[0], block.layer[-1]
        cross = block.layer[1] if crosses else None
        dense = feed.DenseReluDense
        norms = {"before": _square_norm(own.layer_norm), "before_feed": _square_norm(feed.layer_norm)}
        if cross is not None:
            norms["before_cross"] = _square_norm(cross.layer_norm)
        blocks.append(
            BlockParts(
                Linears.of(own.SelfAttention.q, own.SelfAttention.k, own.SelfAttention.v),
                Linears.of(own.SelfAttention.o),
                Linears.of(dense.wi_0, dense.wi_1) if gated else Linears.of(dense.wi), Linears.of(dense.wo),
                None if cross is None else Linears.of(cross.EncDecAttention.q),
                None if cross is None else Linears.of(cross.EncDecAttention.o), norms,
            )
        )  # fmt: skip
    first = part.block[0].layer[0].SelfAttention

    def embed(tokens: Tensor, positions: Tensor) -> Tensor:
        rows: Tensor = part.embed_tokens(tokens)
        return rows

    def bias(count: int) -> Tensor:
        keys = count if crosses else 2 * count - 1
        found: Tensor = first.compute_bias(1, keys, past_seen_tokens=count - 1)  # [1, heads, 1, keys]
        return found[0, :, 0].detach().float().contiguous()

    return Stack(
        blocks, _activation(config.dense_act_fn), config.num_heads, config.num_heads, config.d_kv, 1.0, embed,
        _square_norm(part.final_layer_norm), gated, bias=bias,
    )  # fmt: skip


def _t5(model: Any) -> Description:
    config = model.config
    both = [(block.layer[1].EncDecAttention.k, block.layer[1].EncDecAttention.v) for block in model.decoder.block]
    scaled = getattr(config, "scale_decoder_outputs", False)  # mT5's are not
    return Description(
        _t5_stack(model.decoder, config, crosses=True), Linears.of(model.lm_head),
        head_scale=config.d_model**-0.5 if scaled else 1.0, encoder=_t5_stack(model.encoder, config, crosses=False),
        crosses=[Linears.of(*pair) for pair in both],
    )  # fmt: skip
