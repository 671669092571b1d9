"""Decoders and encoders packed for this project's kernels, in float32, bfloat16, or 8 bits."""

from __future__ import annotations

import copy
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from attmemo.fastseq.generate.decoder_stack import Block, DecoderStack, SharedKeys
from attmemo.fastseq.generate.descriptions import Stack, describe
from attmemo.fastseq.generate.refusal import Refusal
from attmemo.fastseq.generate.vocabulary import Linears, Vocabulary, Weights, kind_of, move_to_slab
from attmemo.kernels.linear8 import Linear8
from attmemo.kernels.packed_weights import MOST_INPUTS, Panels

_AT_ONCE: Final = 1024  # tokens that are read together: weights are read once for them, and they stay in a cache
_WORTH: Final = 1 << 22  # weights of a decoder: of fewer, drafts cost more than they save


class PackedStack:
    """The blocks of a decoder or an encoder. Holds nothing of a call.

    Attributes
    ----------
    parts : Stack
    blocks : DecoderStack
    """

    def __init__(self, parts: Stack, kind: type[Panels]) -> None:
        self.parts = parts

        def packed(linears: Linears | None, activation: str = "none", gated: bool = False) -> Any:
            return None if linears is None else kind.of(linears.weights, linears.biases, activation, gated)

        blocks = [
            Block(
                packed(block.qkv), packed(block.out), packed(block.up, parts.activation, parts.gated),
                packed(block.down), packed(block.cross_q), packed(block.cross_out), **(block.norms or {}),
            )
            for block in parts.blocks
        ]  # fmt: skip
        move_to_slab([layer for block in blocks for layer in block.layers])
        self.blocks = DecoderStack(
            blocks, parts.heads, parts.key_heads, parts.width, scale=parts.scale, turned=parts.angles is not None,
            last=parts.last,
        )  # fmt: skip

    def read(
        self, tokens: Tensor, places: Tensor, seen: Tensor, shared: SharedKeys | None = None, *, causal: bool
    ) -> Tensor:
        """Hidden states of the tokens that are seen `[sum of lengths, hidden]`, and keys and values in `shared`.

        Parameters
        ----------
        tokens, places : Tensor [B, N] int64
        seen : Tensor [B, N] bool
            At least one of each sample.
        shared : SharedKeys, optional
            Of these samples.
        causal : bool
        """
        lengths: list[int] = seen.sum(1).tolist()
        found = torch.empty(sum(lengths), self.blocks.hidden, dtype=self.blocks.dtype)
        parts, done, first = self.parts, 0, 0
        angles = None if parts.angles is None else parts.angles(int(places.max()) + 1)
        bias = None if parts.bias is None else parts.bias(max(lengths))
        while first < len(lengths):
            last, count = first + 1, lengths[first]
            while last < len(lengths) and count + lengths[last] <= _AT_ONCE:
                count, last = count + lengths[last], last + 1
            some = seen[first:last]
            at = places[first:last][some]
            hidden = parts.embed(tokens[first:last][some], at).contiguous()
            theirs = copy.copy(shared)
            if theirs is not None:
                theirs.keep(range(first, last))
            found[done : done + count] = self.blocks.read(
                hidden, lengths[first:last], theirs, causal=causal, bias=bias, angles=angles,
                positions=None if angles is None else at.numpy().astype(np.int32),
            )  # fmt: skip
            done, first = done + count, last
        return found


class PackedDecoder:
    """A decoder on this project's kernels, with its encoder, if it has one. Made by `packed_decoder`.

    Attributes
    ----------
    stack : PackedStack
        The decoder's blocks.
    draft : PackedStack or None
        The same in 8 bits, where that is worth it: what it foresees is checked.
    encoder : PackedStack or None
    crosses : list of Panels
        Of each block the layer for keys and values of cross-attention.
    vocabulary : Vocabulary
    weights : "int8" or None
    nbytes : int
        Bytes that packed weights take, beside those of the model.
    """

    def __init__(self, model: Any, dtype: torch.dtype, weights: Weights) -> None:
        description = describe(model)
        decoder, encoder = description.decoder, description.encoder
        of_all = [parts for stack in (decoder, encoder) if stack is not None for parts in stack.blocks]
        kinds = [linears for parts in of_all for linears in (parts.qkv, parts.out, parts.up, parts.down)]
        if (widest := max(weight.shape[1] for linears in kinds for weight in linears.weights)) > MOST_INPUTS:
            raise Refusal(f"a layer with {widest} inputs")
        self.dtype, self.weights = dtype, weights
        kind = kind_of(dtype, weights)
        self.stack = PackedStack(decoder, kind)
        self.encoder = None if encoder is None else PackedStack(encoder, kind)
        self.crosses = [kind.of(linears.weights, linears.biases) for linears in description.crosses or []]
        move_to_slab(self.crosses)
        self.vocabulary = Vocabulary(
            description.head, dtype, weights, scale=description.head_scale, bias=description.head_bias
        )
        size = sum(layer.inputs * layer.outputs for layer in self.stack.blocks.panels)
        pays = (dtype, weights) == (torch.float32, None) and size >= _WORTH and self.vocabulary.is_rough
        self.draft = PackedStack(decoder, Linear8) if pays else None
        kept = [stack.blocks.nbytes for stack in (self.stack, self.encoder, self.draft) if stack is not None]
        self.nbytes = sum(kept) + sum(layer.nbytes for layer in self.crosses) + self.vocabulary.nbytes

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a step reads that wants all logits."""
        return self.stack.blocks.nbytes + self.vocabulary.panels.nbytes

    def encode(self, ids: Tensor, mask: Tensor | None) -> Tensor | None:
        """The encoder's states `[B, N, hidden]`, zeros for padding; None where only the model's own code reads it."""
        seen = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        if self.encoder is None or seen.shape != ids.shape or ids.numel() == 0 or not bool(seen.any(1).all()):
            return None
        pieces = seen[:, 0].long() + (seen[:, 1:] & ~seen[:, :-1]).sum(1)
        if self.encoder.parts.bias is not None and int(pieces.max()) > 1:
            return None  # tokens are farther from each other than those between them say
        blocks = self.encoder.blocks
        whole = torch.zeros(*ids.shape, blocks.hidden, dtype=blocks.dtype)
        places = torch.arange(ids.shape[1]).expand_as(ids)
        whole[seen] = self.encoder.read(ids, places, seen, causal=False)
        return whole


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
    return PackedDecoder(model, model.dtype, weights)
