"""Text towers of CLIP, which is causal, and of SigLIP: norms before each part, pooling at one place of each text.

CLIP pools where a text ends, SigLIP at the last place, be it padding. Packed blocks do not compute padding, so a call
whose pooler would read it stays with the original code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attmemo.models.base import Adapter, Call, Site, end_texts
from attmemo.models.blocks import Block, Blocks
from attmemo.models.masks import Spans

_LEGACY = 2  # the end of a text in old configurations, where it is the highest id


class ClipTextAdapter(Adapter):
    """`encoder.layers.i.self_attn` of a tower with `embeddings.token_embedding`."""

    family = "clip-text"
    models = ("CLIP", "SigLIP")
    limits = "text towers alone; rows and maps are refused; where padding is pooled a call stays exact"
    part = "text_model"
    out = "out_proj"
    has_rows = has_maps = False

    def sites(self, model: nn.Module) -> list[Site]:
        host: Any = self.host(model)
        return super().sites(model) if hasattr(getattr(host, "embeddings", None), "token_embedding") else []

    def is_one(self, name: str, module: nn.Module) -> bool:
        return name.startswith("encoder.layers.") and hasattr(module, "embed_dim")

    def blocks(self, model: nn.Module) -> Blocks | str:
        host: Any = self.host(model)
        causal = hasattr(host, "eos_token_id")
        if not causal and not hasattr(host, "head"):
            return "its pooling is unknown"
        heads, width = self.shape(host.encoder.layers[0].self_attn)
        return ClipTextBlocks(host, tower_blocks(host), heads, width, causal)

    def sample(self, model: nn.Module) -> tuple[dict[str, Tensor], list[int]]:
        host: Any = self.host(model)
        inputs, lengths = super().sample(model)
        if not hasattr(host, "eos_token_id"):
            mask = torch.ones_like(inputs["attention_mask"])
            return inputs | {"attention_mask": mask}, [mask.shape[1]] * len(mask)
        end = host.eos_token_id
        end_texts(inputs, lengths, int(host.config.vocab_size) - 1 if end == _LEGACY else end)
        return inputs, lengths


def tower_blocks(host: Any) -> list[Block]:
    """The blocks of a tower, of texts or of images."""
    found = []
    for layer in host.encoder.layers:
        own, feed = layer.self_attn, layer.mlp
        found.append(
            Block(
                layer, (own.q_proj, own.k_proj, own.v_proj), own.out_proj, layer.layer_norm1, None, (feed.fc1,),
                feed.activation_fn, False, feed.fc2, layer.layer_norm2, None,
            )
        )  # fmt: skip
    return found


class ClipTextBlocks(Blocks):
    """Blocks of a text tower.

    Parameters
    ----------
    tower : nn.Module
        It calls the blocks, and pools.
    blocks, heads, width
        As in `Blocks`.
    causal : bool
        Whether it is CLIP's, which tells its layers so in every call.
    """

    def __init__(self, tower: Any, blocks: Sequence[Block], heads: int, width: int, causal: bool) -> None:
        first, *others = (block.module for block in blocks)
        super().__init__(first, blocks, heads, width, width**-0.5, others)
        self.tower, self.causal = tower, causal

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | str:
        if not self.causal:
            return super().read(args, kwargs)
        call = super().read(args, {name: value for name, value in kwargs.items() if name != "is_causal"})
        if not isinstance(call, str) and call.mask is None and kwargs.get("is_causal") is not True:
            return "attention that is not causal"
        return call

    def reads_padding(self, given: Mapping[str, Any], spans: Spans, padded: int) -> bool:
        if min(spans.lengths) == padded:
            return False
        ids, end = given.get("input_ids"), getattr(self.tower, "eos_token_id", None)
        if end is None or not isinstance(ids, Tensor):
            return True
        ids = ids.reshape(-1, padded).int()  # as the tower finds the end, which is one of the places of the highest
        ends = (ids if end == _LEGACY else (ids == end).int()).argmax(-1)
        return bool((ends >= torch.tensor(spans.lengths)).any())
