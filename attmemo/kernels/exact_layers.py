"""The linear layer of a model's own type, by a kernel that was made for it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from attmemo.kernels.linear16 import Linear16
from attmemo.kernels.linear32 import Linear32
from attmemo.kernels.packed_weights import ExactPanels


def exact_layer(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str = "none", gated: bool = False
) -> ExactPanels | None:
    """The layer as `ExactPanels.where_it_pays` makes it, in float32 or bfloat16; None: torch computes it as fast."""
    made = (kind.where_it_pays(weights, biases, activation, gated) for kind in (Linear32, Linear16))
    return next((layer for layer in made if layer is not None), None)
