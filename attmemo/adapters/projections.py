"""Projections of single tokens: which kinds of linear layer give V of any tokens, and rows of a fused one."""

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
    """A plain linear layer, or its int8 form.

    Not what wraps one: a low-rank adapter can be switched and a hook can move weights after the database was built.
    """
    return (type(projection).__module__, type(projection).__name__) in _TOKENWISE


def are_linear(module: nn.Module, *names: str) -> bool:
    """Whether all these attributes of a module are."""
    return all(is_linear(getattr(module, name)) for name in names)


def is_plain(projection: object) -> bool:
    """A linear layer whose weight is an ordinary tensor, of which rows can be taken."""
    weight = getattr(projection, "weight", None)
    return type(projection) is nn.Linear and type(weight) is nn.Parameter and weight.is_floating_point()


def why_not(module: nn.Module, names: tuple[str, ...]) -> str:
    """What stands in the way of taking rows of fused projections, for people to read."""
    kinds = sorted({type(getattr(module, name)).__qualname__ for name in names if not is_plain(getattr(module, name))})
    return f"its fused projection is a {', '.join(kinds)} (quantized or adapted), of which V cannot be taken alone"


_State = tuple["weakref.ref[Tensor]", int, int]


class Slices:
    """Contiguous copies of a part of a weight, one for each module, made anew when the weight changes."""

    def __init__(self, cut: Callable[[Tensor], Tensor]) -> None:
        self._cut = cut
        self._kept: weakref.WeakKeyDictionary[nn.Module, tuple[_State, Tensor]] = weakref.WeakKeyDictionary()

    def forget(self, module: nn.Module) -> None:
        """Cut anew the next time: a write through ``.data`` changes a weight unseen."""
        self._kept.pop(module, None)

    def of(self, module: nn.Module, weight: Tensor) -> Tensor:
        """The part, as it is now. Inference tensors count no versions: their address has to do.

        An address alone would be that of a weight put in the place of one that is gone.
        """
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
