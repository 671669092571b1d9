"""ALBERT: one attention module serves many layers, and goes on to the projection, the residual and the norm."""

from __future__ import annotations

from torch import Tensor, nn

from attmemo.adapters.base import Adapter, Site, layers_named
from attmemo.adapters.projections import are_linear


class AlbertAdapter(Adapter):
    """`encoder.albert_layer_groups.g.albert_layers.j.attention`, in the order in which layers call it."""

    family = "albert"
    models = ("ALBERT",)

    def sites(self, model: nn.Module) -> list[Site]:
        found = layers_named(model, ("query", "key", "value", "dense", "LayerNorm", "num_attention_heads", "scaling"))
        config = getattr(self.host(model), "config", None)
        groups, inner = getattr(config, "num_hidden_groups", 0), getattr(config, "inner_group_num", 0)
        if not found or len(found) != groups * inner or not all(
            are_linear(module, "query", "key", "value", "dense") for _, module in found
        ):
            return []
        layers = int(config.num_hidden_layers)  # type: ignore[union-attr]
        order = [found[int(layer / (layers / groups)) * inner + j] for layer in range(layers) for j in range(inner)]
        return [Site(layer, name, module) for layer, (name, module) in enumerate(order)]

    def depth(self, model: nn.Module) -> int | None:
        layers = super().depth(model)
        return None if layers is None else layers * int(getattr(self.host(model).config, "inner_group_num", 1))

    def value(self, module: nn.Module, tokens: Tensor) -> Tensor:
        projected: Tensor = module.value(tokens)  # type: ignore[operator]
        return projected

    def finish(self, module: nn.Module, context: Tensor, hidden: Tensor) -> Tensor:
        output: Tensor = module.LayerNorm(hidden + module.dense(context))  # type: ignore[operator]
        return output

    def shape(self, module: nn.Module) -> tuple[int, int]:
        return int(module.num_attention_heads), int(module.attention_head_size)  # type: ignore[arg-type]
