"""ViT: patches instead of tokens. All patches are valid, and every image has the same number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attmemo.models.base import CHECK_LENGTHS, Adapter, takes
from attmemo.models.blocks import Block, Blocks


class ViTAdapter(Adapter):
    """`layers.i.attention`."""

    family = "vit"
    models = ("ViT", "DeiT")
    limits = "rows are refused"
    has_rows = False

    def is_one(self, name: str, module: nn.Module) -> bool:
        plain = not getattr(module, "is_causal", True) and not takes(module, "position_embeddings")
        return plain and not takes(module, "key_value_states")

    def sample(self, model: nn.Module) -> tuple[dict[str, Tensor], list[int]]:
        host: Any = self.host(model)
        count = int(host.embeddings.position_embeddings.shape[1])  # patches, the class token, and DeiT's second
        return pixels_of(model, host.config), [count] * len(CHECK_LENGTHS)

    def blocks(self, model: nn.Module) -> Blocks | str:
        host: Any = self.host(model)
        if not hasattr(host, "layers"):
            return "it has no encoder with blocks"
        found = []
        for layer in host.layers:
            own, feed = layer.attention, layer.mlp
            found.append(
                Block(
                    layer, (own.q_proj, own.k_proj, own.v_proj), own.o_proj, layer.layernorm_before, None, (feed.fc1,),
                    feed.activation_fn, False, feed.fc2, layer.layernorm_after, None,
                )
            )  # fmt: skip
        first, *others = host.layers
        return Blocks(first, found, *self.shape(first.attention), float(first.attention.scaling), others)


def pixels_of(model: nn.Module, config: Any) -> dict[str, Tensor]:
    """Images for the self-check of a model with this configuration."""
    size = config.image_size if isinstance(config.image_size, list | tuple) else [config.image_size] * 2
    shape = (len(CHECK_LENGTHS), int(config.num_channels), int(size[0]), int(size[1]))
    pixels = torch.sin(torch.arange(torch.Size(shape).numel()) * 0.731).view(shape)
    return {"pixel_values": pixels.to(next(model.parameters()).dtype)}
