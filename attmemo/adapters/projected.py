"""Attention modules with `q_proj`, `k_proj`, `v_proj` and an output projection: most that transformers has today.

Which of them a family means is told apart by what else the module has, so each names its own conditions in `is_one`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor, nn

from attmemo.adapters.base import Adapter, Site, layers_named, number
from attmemo.adapters.projections import are_linear


class ProjectedAdapter(Adapter):
    """Base of those families.

    Attributes
    ----------
    out : str
        Name of the output projection.
    """

    out: ClassVar[str] = "o_proj"

    @abstractmethod
    def is_one(self, name: str, module: nn.Module) -> bool:
        """Whether a module that has the projections is self-attention of this family."""

    def sites(self, model: nn.Module) -> list[Site]:
        parts = ("q_proj", "k_proj", "v_proj", self.out)
        found = layers_named(self.host(model), (*parts, "head_dim"))
        return number([
            (name, module) for name, module in found if are_linear(module, *parts) and self.is_one(name, module)
        ])

    def value(self, module: nn.Module, tokens: Tensor) -> Tensor:
        projected: Tensor = module.v_proj(tokens)  # type: ignore[operator]
        return projected

    def finish(self, module: nn.Module, context: Tensor, hidden: Tensor) -> Tensor:
        output: Tensor = getattr(module, self.out)(context)
        return output

    def shape(self, module: nn.Module) -> tuple[int, int]:
        width = int(module.head_dim)  # type: ignore[arg-type]
        return int(getattr(module, self.out).in_features) // width, width
