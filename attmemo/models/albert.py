"""ALBERT: many layers share one attention module, which also has the output projection, the residual and the norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from attmemo.kernels.exact_layers import exact_layer
from attmemo.kernels.packed_weights import Panels
from attmemo.models.base import Adapter, Call, Site, number
from attmemo.models.blocks import Block, Blocks
from attmemo.models.projections import is_plain


class AlbertAdapter(Adapter):
    """`encoder.albert_layer_groups.g.albert_layers.j.attention`, in the order of the layers."""

    family = "albert"
    models = ("ALBERT",)
    projections = ("query", "key", "value")
    out = "dense"
    heads, width = "num_attention_heads", "attention_head_size"
    marks = ("LayerNorm", "scaling")

    def sites(self, model: nn.Module) -> list[Site]:
        found = super().sites(model)
        config = getattr(self.host(model), "config", None)
        groups, inner = getattr(config, "num_hidden_groups", 0), getattr(config, "inner_group_num", 0)
        if not found or len(found) != groups * inner:
            return []
        layers = int(config.num_hidden_layers)  # type: ignore[union-attr]
        order = [found[int(layer / (layers / groups)) * inner + j] for layer in range(layers) for j in range(inner)]
        return number([(site.name, site.module) for site in order])

    def depth(self, model: nn.Module) -> int | None:
        layers = super().depth(model)
        return None if layers is None else layers * int(getattr(self.host(model).config, "inner_group_num", 1))

    def finish(self, module: nn.Module, context: Tensor, hidden: Tensor) -> Tensor:
        output: Tensor = module.LayerNorm(hidden + super().finish(module, context, hidden))  # type: ignore[operator]
        return output

    def blocks(self, model: nn.Module) -> Blocks | str:
        host: Any = self.host(model)
        encoder = getattr(host, "encoder", None)
        if encoder is None or not hasattr(encoder, "albert_layer_groups"):
            return "it has no encoder with blocks"
        count, groups = host.config.num_hidden_layers, encoder.albert_layer_groups
        made = [[_block(layer) for layer in group.albert_layers] for group in groups]
        found = [block for number in range(count) for block in made[int(number / (count / len(groups)))]]
        heads, width = self.shape(groups[0].albert_layers[0].attention)
        return AlbertBlocks(encoder, found, heads, width, width**-0.5)


def _block(layer: Any) -> Block:
    own = layer.attention
    return Block(
        layer, (own.query, own.key, own.value), own.dense, None, own.LayerNorm, (layer.ffn,), layer.activation, False,
        layer.ffn_output, None, layer.full_layer_layer_norm,
    )  # fmt: skip


class AlbertBlocks(Blocks):
    """Blocks of which some are the same. Their module first widens the embedded rows, which are narrower."""

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | str:
        call = super().read(args, kwargs)
        return call if isinstance(call, str) else replace(call, hidden=self._widened(call.hidden))

    def _widened(self, hidden: Tensor) -> Tensor:
        module: Any = self.module
        own, layer = module.embedding_hidden_mapping_in, self._layer
        if type(hidden) is not Tensor or hidden.requires_grad or hidden.shape[-1] != own.in_features:
            return hidden
        if layer is None or hidden.dtype != layer.dtype or hidden.device.type != "cpu":
            found: Tensor = own(hidden)
            return found
        return layer(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

    @cached_property
    def _layer(self) -> Panels | None:
        """The layer that widens rows, by a kernel that rounds each row alone; None: torch computes it."""
        module: Any = self.module
        own = module.embedding_hidden_mapping_in
        return exact_layer([own.weight], [own.bias]) if is_plain(own) else None

    @property
    def nbytes(self) -> int:
        return 0 if self._layer is None else self._layer.nbytes
