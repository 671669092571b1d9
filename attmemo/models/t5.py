"""T5's encoder: a relative position bias, which the first layer makes for all other layers.

A hit in the first layer must still make the bias, for later layers that miss. Scores are not scaled, and `forward`
returns three values; so does that of a block.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attmemo.models.base import Adapter, Call, takes
from attmemo.models.blocks import Block, Blocks
from attmemo.models.cache_name import CACHE_NAME


class T5Blocks(Blocks):
    """Blocks whose scores gain a bias by distance, the same in all layers: positions enter by nothing else."""

    parameters: ClassVar[tuple[str, ...]] = (
        "hidden_states", "attention_mask", "position_bias", "encoder_hidden_states", "encoder_attention_mask",
        "encoder_decoder_position_bias",
    )  # fmt: skip
    relative = True
    sees_distances = True

    def passed(self, hidden: Tensor) -> Any:
        return hidden, None, None

    def buckets(self, attention: Any, distances: Tensor) -> Tensor:
        """Rows of the table of a layer for these distances."""
        found: Tensor = attention._relative_position_bucket(  # as `compute_bias` calls it
            distances, bidirectional=True, num_buckets=attention.relative_attention_num_buckets,
            max_distance=attention.relative_attention_max_distance,
        )  # fmt: skip
        return found

    def table(self, span: int) -> Tensor | None:
        return self.table_of(self.module, span)

    def table_of(self, block: Any, span: int) -> Tensor:
        """The table of a layer that has one."""
        own = block.layer[0].SelfAttention
        buckets = self.buckets(own, torch.arange(1 - span, span))
        table: Tensor = own.relative_attention_bias(buckets).T
        return table.float().contiguous()


class T5Adapter(Adapter):
    """`encoder.block.i.layer.0.SelfAttention`."""

    family = "t5"
    models: ClassVar[tuple[str, ...]] = ("T5", "mT5", "Flan-T5")
    limits = "the decoder stays exact; rows are refused"
    has_rows = False
    part, layers = "encoder", "num_layers"
    parameters: ClassVar[tuple[str, ...]] = ("hidden_states", "mask", "key_value_states", "position_bias", CACHE_NAME)
    mask_name = "mask"
    harmless = frozenset({"mask", "position_bias"})
    shared = frozenset({"mask", "position_bias"})
    projections = ("q", "k", "v")
    out = "o"
    heads, width = "n_heads", "key_value_proj_dim"
    ends_texts = True
    stack: ClassVar[type[T5Blocks]] = T5Blocks

    def is_one(self, name: str, module: nn.Module) -> bool:
        return not getattr(module, "is_decoder", True) and takes(module, "position_bias", "mask")

    def pack(self, module: nn.Module, output: Tensor, call: Call) -> Any:
        bias = call.given.get("position_bias")
        length = call.hidden.shape[1]
        if bias is None and module.has_relative_attention_bias:
            bias = module.compute_bias(length, length, device=output.device)  # type: ignore[operator]
        elif bias is None:
            bias = output.new_zeros(1, self.shape(module)[0], length, length)
        return output, bias, None

    def map_of(self, returned: Any) -> Tensor:
        probabilities: Tensor = returned[2]
        return probabilities

    def blocks(self, model: nn.Module) -> Blocks | str:
        host: Any = self.host(model)
        if not hasattr(host, "block"):
            return "it has no encoder with blocks"
        found = []
        for block in host.block:
            (attention, feeding), own = block.layer, block.layer[0].SelfAttention
            feed = feeding.DenseReluDense
            gated = hasattr(feed, "wi_0")
            up = (feed.wi_0, feed.wi_1) if gated else (feed.wi,)
            found.append(
                Block(
                    block, (own.q, own.k, own.v), own.o, attention.layer_norm, None, up, feed.act, gated, feed.wo,
                    feeding.layer_norm, None,
                )
            )  # fmt: skip
        first, *others = host.block
        own = first.layer[0].SelfAttention
        return self.stack(first, found, *self.shape(own), float(own.scaling), others)
