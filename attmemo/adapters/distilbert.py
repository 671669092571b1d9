"""DistilBERT: separate projections, the output projection inside the module."""

from __future__ import annotations

from torch import Tensor, nn

from attmemo.adapters.base import Adapter, Site, layers_named, number
from attmemo.adapters.projections import are_linear


class DistilBertAdapter(Adapter):
    """`transformer.layer.i.attention`."""

    family = "distilbert"
    models = ("DistilBERT",)

    def sites(self, model: nn.Module) -> list[Site]:
        parts = ("q_lin", "k_lin", "v_lin", "out_lin")
        found = layers_named(model, (*parts, "n_heads", "attention_head_size"))
        return number([(name, module) for name, module in found if are_linear(module, *parts)])

    def value(self, module: nn.Module, tokens: Tensor) -> Tensor:
        projected: Tensor = module.v_lin(tokens)  # type: ignore[operator]
        return projected

    def finish(self, module: nn.Module, context: Tensor, hidden: Tensor) -> Tensor:
        output: Tensor = module.out_lin(context)  # type: ignore[operator]
        return output

    def shape(self, module: nn.Module) -> tuple[int, int]:
        return int(module.n_heads), int(module.attention_head_size)  # type: ignore[arg-type]
