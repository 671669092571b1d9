"""Projections of single tokens: the linear layers that can compute V of any tokens, and parts of fused layers."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

_TOKENWISE = {
    ("torch.nn.modules.linear", "Linear"),
    ("torch.ao.nn.quantized.dynamic.modules.linear", "Linear"),
}


def is_linear(projection: object) -> bool:
    """Whether it is a plain linear layer, or its int8 form. A wrapper does not count: it may be switched later."""
    return (type(projection).__module__, type(projection).__name__) in _TOKENWISE


def is_plain(projection: object) -> bool:
    """Whether it is a linear layer with an ordinary tensor as weight, so that a part of the weight can be used."""
    weight = getattr(projection, "weight", None)
    return type(projection) is nn.Linear and type(weight) is nn.Parameter and weight.is_floating_point()


def why_not(module: nn.Module, names: tuple[str, ...]) -> str:
    """Why a part of a fused projection cannot be used, for messages."""
    kinds = sorted({type(getattr(module, name)).__qualname__ for name in names if not is_plain(getattr(module, name))})
    return f"its fused projection is a {', '.join(kinds)} (quantized or adapted): V cannot be computed alone"


_State = tuple["weakref.ref[Tensor]", int, int]


class Slices:
    """Contiguous copies of a part of a weight, one per module. A copy is made again when the weight changes."""

    def __init__(self, cut: Callable[[Tensor], Tensor]) -> None:
        self._cut = cut
        self._kept: weakref.WeakKeyDictionary[nn.Module, tuple[_State, Tensor]] = weakref.WeakKeyDictionary()

    def forget(self, module: nn.Module) -> None:
        """Drop the copy: a write through ``.data`` changes a weight without a trace."""
        self._kept.pop(module, None)

    def of(self, module: nn.Module, weight: Tensor) -> Tensor:
        """The part of the weight as it is now."""
        # Inference tensors have no version, so their address must do; a new weight may lie where a deleted one was.
        state = weakref.ref(weight), weight.data_ptr(), 0 if weight.is_inference() else weight._version
        kept = self._kept.get(module)
        if kept is None or kept[0][0]() is not weight or kept[0][1:] != state[1:]:
            with torch.no_grad():
                kept = state, self._cut(weight.detach()).contiguous()
            self._kept[module] = kept
        return kept[1]


def share_heads(values: Tensor, heads: int, width: int) -> Tensor:
    """V with a head for each head of the map, ``[N, h * d]``, from ``[N, fewer * d]``: head i takes ``i // group``."""
    group = heads * width // values.shape[1]
    if group == 1:
        return values
    return values.view(len(values), -1, 1, width).expand(-1, -1, group, -1).reshape(len(values), heads * width)
