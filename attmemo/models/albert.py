"""ALBERT: many layers share one attention module, which also has the output projection, the residual and the norm."""

from __future__ import annotations

from torch import Tensor, nn

from attmemo.models.base import Adapter, Site, number


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
