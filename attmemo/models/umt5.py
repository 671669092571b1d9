"""UMT5's encoder: T5's, where each layer has a relative position bias of its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attmemo.models.base import takes
from attmemo.models.cache_name import CACHE_NAME
from attmemo.models.t5 import T5Adapter, T5Blocks


class UMT5Blocks(T5Blocks):
    """Blocks whose scores gain a bias by distance, in each layer another one."""

    parameters = "hidden_states", "attention_mask", "encoder_hidden_states", "encoder_attention_mask"

    def tables(self, span: int) -> list[Tensor | None]:
        return [self.table_of(block, span) for block in self.modules]

    def buckets(self, attention: Any, distances: Tensor) -> Tensor:
        found: Tensor = attention._relative_position_bucket(distances)
        return found

    def passed(self, hidden: Tensor) -> Any:
        return hidden


class UMT5Adapter(T5Adapter):
    """`encoder.block.i.layer.0.SelfAttention`."""

    family = "umt5"
    models = ("UMT5",)
    limits = "the decoder stays exact; rows and maps are refused"
    has_maps = False
    parameters = ("hidden_states", "encoder_hidden_states", CACHE_NAME, "attention_mask")
    mask_name = "attention_mask"
    stack = UMT5Blocks

    def is_one(self, name: str, module: nn.Module) -> bool:
        plain = not getattr(module, "is_decoder", True) and bool(getattr(module, "has_relative_attention_bias", False))
        return plain and takes(module, "attention_mask") and not takes(module, "position_bias")
