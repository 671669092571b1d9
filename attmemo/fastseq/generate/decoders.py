"""Decoders of transformers' models as this project's kernels run them: one description for each family.

A description names the linear layers, norms and heads of every block, how a token is embedded, and what hidden states
are multiplied with at last. `PackedDecoder` packs them, in float32, bfloat16, or 8 bits. What a family does elsewhere,
in the encoder or for a prompt, stays its own code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attmemo.fastseq.generate.refusal import Refusal
from attmemo.fastseq.generate.vocabulary import LINEAR, Linears, Vocabulary, Weights, kind_of, move_to_slab
from attmemo.kernels.decoder import Block, DecoderStack
from attmemo.kernels.linear8 import Linear8
from attmemo.kernels.norms import Norm, norm_of
from attmemo.kernels.packed_weights import MOST_INPUTS, Panels

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
_LAYERS = ("qkv", "out", "up", "down", "cross_q", "cross_out")
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
class Description:
    """A model's decoder.

    Attributes
    ----------
    blocks : list of BlockParts
    activation : str
        One of `attmemo.kernels.linear.ACTIVATIONS`.
    gated : bool
        Whether the first half of `up` is activated, and multiplied by the other half.
    heads, key_heads, width : int
    scale : float
    last : Norm or None
        Behind the last block.
    head : Linears
        From hidden states to the vocabulary.
    head_bias : Tensor or None
        Is added to the logits; it is rounded for itself.
    head_scale : float
        Hidden states are multiplied with it before.
    embed : callable
        Of tokens `[R]` and positions `[R]`, int64, on the model: hidden states `[R, hidden]`.
    crosses : list of nn.Module pairs
        Of each block the path, from the model, of the layers for keys and values of cross-attention.
    angles : callable or None
        Cosines and sines `[positions, half]`, float32, of so many positions.
    bias : callable or None
        What is added to scores, `[heads, N]`, of the largest of N distances first.
    """

    blocks: list[BlockParts]
    activation: str
    heads: int
    key_heads: int
    width: int
    scale: float
    head: Linears
    embed: Callable[[Tensor, Tensor], Tensor]
    last: Norm | None = None
    gated: bool = False
    head_bias: Tensor | None = None
    head_scale: float = 1.0
    crosses: list[tuple[nn.Module, nn.Module]] | None = None
    angles: Callable[[int], tuple[Tensor, Tensor]] | None = None
    bias: Callable[[int], Tensor] | None = None


class PackedDecoder:
    """A decoder on this project's kernels. Holds nothing of a call; made by `packed_decoder`.

    Attributes
    ----------
    stack : DecoderStack
    description : Description
    weights : "int8" or None
    nbytes : int
        Bytes that packed weights take, beside those of the model.
    """

    def __init__(self, description: Description, dtype: torch.dtype, weights: Weights) -> None:
        self.description, self.dtype, self.weights = description, dtype, weights
        self.stand_ins: dict[int, nn.Module] = {}
        kind = kind_of(dtype, weights)

        def packed(linears: Linears | None, activation: str = "none", gated: bool = False) -> Any:
            if linears is None:
                return None
            layer = kind.of(linears.weights, linears.biases, activation, gated)
            if weights is not None and len(linears.modules) == 1 and activation == "none":
                self.stand_ins[id(linears.modules[0])] = PackedLinear(layer)
            return layer

        blocks = [
            Block(
                packed(parts.qkv), packed(parts.out), packed(parts.up, description.activation, description.gated),
                packed(parts.down), packed(parts.cross_q), packed(parts.cross_out), **(parts.norms or {}),
            )
            for parts in description.blocks
        ]  # fmt: skip
        move_to_slab([layer for block in blocks for layer in block.layers])
        self.stack = DecoderStack(
            blocks, description.heads, description.key_heads, description.width, scale=description.scale,
            turned=description.angles is not None, last=description.last,
        )  # fmt: skip
        self.vocabulary = Vocabulary(
            description.head, dtype, weights, scale=description.head_scale, bias=description.head_bias
        )
        self.nbytes = self.stack.nbytes + self.vocabulary.nbytes
        if weights is not None:
            self.stand_ins[id(description.head.modules[0])] = PackedLinear(self.vocabulary.panels)

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a step reads that wants all logits."""
        return self.stack.nbytes + self.vocabulary.panels.nbytes

    def stand_for(self, model: nn.Module) -> None:
        """Round the model's other linear layers to 8 bits too: those of its encoder, or that read a prompt.

        A layer of the decoder of an encoder-decoder is run here alone, but for keys and values of the source.
        """
        description = self.description
        run_here: set[int] = set()
        if description.crosses is not None:
            parts = [getattr(block, name) for block in description.blocks for name in _LAYERS]
            run_here = {id(module) for linears in parts if linears is not None for module in linears.modules}
        for module in model.modules():
            if id(module) in self.stand_ins or id(module) in run_here or type(module).__name__ not in LINEAR:
                continue
            linears = Linears.of(module)
            layer = Linear8.of(linears.weights, linears.biases)
            self.nbytes += layer.nbytes
            self.stand_ins[id(module)] = PackedLinear(layer)

    def stand_in(self, module: nn.Module) -> nn.Module:
        """What runs in the place of a module of the model: itself, unless it is rounded."""
        return self.stand_ins.get(id(module), module)


def why_not_packed(dtype: torch.dtype, weights: Weights) -> str | None:
    """Why this processor has no kernels for such layers that would pay, or None."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"there are no kernels for {dtype}"
    if weights is None:
        sets = kind_of(dtype, weights).instruction_sets()
        if not sets or sets[0] == "generic":
            return "the processor has no instructions that kernels were made for"
    return None


def packed_decoder(model: Any, weights: Weights) -> PackedDecoder:
    """The decoder of a model, packed. Refusal: its family is not described, or this one differs from the family."""
    if (reason := why_not_packed(model.dtype, weights)) is not None:
        raise Refusal(reason)
    kinds = {tensor.dtype for tensor in model.parameters()}
    if kinds != {model.dtype}:
        raise Refusal("weights of several types")
    description = describe(model)
    widest = max(
        weight.shape[1]
        for parts in description.blocks
        for linears in (parts.qkv, parts.out, parts.up, parts.down)
        for weight in linears.weights
    )
    if widest > MOST_INPUTS:
        raise Refusal(f"a layer with {widest} inputs")
    packed = PackedDecoder(description, model.dtype, weights)
    if weights is not None:
        packed.stand_for(model)
    return packed


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


def _bart(model: Any) -> Description:
    decoder, config = model.model.decoder, model.config
    behind = config.model_type in _BEHIND
    blocks, crosses = [], []
    for layer in decoder.layers:
        own, cross = layer.self_attn, layer.encoder_attn
        names = ("behind", "behind_cross", "behind_feed") if behind else ("before", "before_cross", "before_feed")
        found = (layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm)
        blocks.append(
            BlockParts(
                Linears.of(own.q_proj, own.k_proj, own.v_proj), Linears.of(own.out_proj), Linears.of(layer.fc1),
                Linears.of(layer.fc2), Linears.of(cross.q_proj), Linears.of(cross.out_proj),
                _norms(**dict(zip(names, found, strict=True))),
            )
        )  # fmt: skip
        crosses.append((cross.k_proj, cross.v_proj))
    heads = config.decoder_attention_heads
    places = decoder.embed_positions
    offset, normed = int(getattr(places, "offset", 0)), getattr(decoder, "layernorm_embedding", None)

    def embed(tokens: Tensor, positions: Tensor) -> Tensor:
        rows: Tensor = decoder.embed_tokens(tokens) + F.embedding(positions + offset, places.weight)
        return rows if normed is None else normed(rows)

    final = getattr(decoder, "layer_norm", None)
    if (final is None) != behind:
        raise Refusal(f"{type(model).__name__} with norms elsewhere")
    bias = model.final_logits_bias.detach().flatten()
    return Description(
        blocks, _activation(config.activation_function), heads, heads, config.d_model // heads,
        (config.d_model // heads) ** -0.5, Linears.of(model.lm_head), embed, None if final is None else _norm(final),
        head_bias=bias if bool(bias.any()) else None, crosses=crosses,
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
    return Description(
        blocks, _activation(config.activation_function), config.n_head, config.n_head, width, width**-0.5,
        Linears.of(model.lm_head), embed, _norm(decoder.ln_f),
    )  # fmt: skip


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

    return Description(
        blocks, _activation(config.hidden_act), config.num_attention_heads, config.num_key_value_heads, width,
        width**-0.5, Linears.of(model.lm_head), embed, _norm(decoder.norm), gated=True, angles=angles,
    )  # fmt: skip


def _t5(model: Any) -> Description:
    decoder, config = model.decoder, model.config
    blocks, crosses = [], []
    gated = bool(config.is_gated_act)
    for block in decoder.block:
        own, cross, feed = block.layer[0], block.layer[1], block.layer[2]
        dense = feed.DenseReluDense
        up = Linears.of(dense.wi_0, dense.wi_1) if gated else Linears.of(dense.wi)
        blocks.append(
            BlockParts(
                Linears.of(own.SelfAttention.q, own.SelfAttention.k, own.SelfAttention.v),
                Linears.of(own.SelfAttention.o), up, Linears.of(dense.wo), Linears.of(cross.EncDecAttention.q),
                Linears.of(cross.EncDecAttention.o),
                {
                    "before": _square_norm(own.layer_norm),
                    "before_cross": _square_norm(cross.layer_norm),
                    "before_feed": _square_norm(feed.layer_norm),
                },
            )
        )  # fmt: skip
        crosses.append((cross.EncDecAttention.k, cross.EncDecAttention.v))
    first = decoder.block[0].layer[0].SelfAttention

    def embed(tokens: Tensor, positions: Tensor) -> Tensor:
        rows: Tensor = decoder.embed_tokens(tokens)
        return rows

    def bias(count: int) -> Tensor:
        last: Tensor = first.compute_bias(1, count, past_seen_tokens=count - 1)  # [1, heads, 1, N], the nearest last
        return last[0, :, 0].detach().float().contiguous()

    scaled = getattr(config, "scale_decoder_outputs", False)  # mT5's are not
    return Description(
        blocks, _activation(config.dense_act_fn), config.num_heads, config.num_heads, config.d_kv, 1.0,
        Linears.of(model.lm_head), embed, _square_norm(decoder.final_layer_norm), gated,
        head_scale=config.d_model**-0.5 if scaled else 1.0, crosses=crosses, bias=bias,
    )  # fmt: skip


class PackedLinear(nn.Module):
    """A linear layer on this project's kernels, where modules of transformers expect one."""

    def __init__(self, panels: Panels) -> None:
        super().__init__()
        self.panels = panels
        self.weight = torch.empty(0, dtype=panels.dtype)  # T5 asks for its type

    def forward(self, input: Tensor) -> Tensor:
        """`[…, in]` to `[…, out]`."""
        rows = input.reshape(-1, self.panels.inputs)
        return self.panels(rows.to(self.panels.dtype)).view(*input.shape[:-1], self.panels.outputs)
