"""Image towers of CLIP and SigLIP: patches instead of tokens, all of them valid."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attmemo.models.base import CHECK_LENGTHS, Adapter, Site
from attmemo.models.blocks import Blocks
from attmemo.models.clip_text import tower_blocks
from attmemo.models.vit import pixels_of


class ClipVisionAdapter(Adapter):
    """`encoder.layers.i.self_attn` of a tower with `embeddings.patch_embedding`."""

    family = "clip-vision"
    models = ("CLIP images", "SigLIP images")
    limits = "image towers alone (of a model with both: model.vision_model); SigLIP 2, rows and maps are refused"
    part = "vision_model"
    out = "out_proj"
    has_rows = has_maps = False

    def sites(self, model: nn.Module) -> list[Site]:
        host: Any = self.host(model)
        cut = getattr(getattr(host, "embeddings", None), "patch_embedding", None)
        return super().sites(model) if isinstance(cut, nn.Conv2d) else []

    def is_one(self, name: str, module: nn.Module) -> bool:
        return name.startswith("encoder.layers.") and hasattr(module, "embed_dim")

    def blocks(self, model: nn.Module) -> Blocks | str:
        host: Any = self.host(model)
        first, *others = host.encoder.layers
        heads, width = self.shape(first.self_attn)
        return Blocks(first, tower_blocks(host), heads, width, float(first.self_attn.scale), others)

    def sample(self, model: nn.Module) -> tuple[dict[str, Tensor], list[int]]:
        host: Any = self.host(model)
        count = int(host.embeddings.position_embedding.num_embeddings)  # patches, and CLIP's class token
        return pixels_of(model, host.config), [count] * len(CHECK_LENGTHS)
