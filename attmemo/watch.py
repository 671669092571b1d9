"""Notices what must stay as it was at `memoize`: maps belong to exact weights, and dropout is not memoized."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from attmemo.fingerprint import AFTER_ATTENTION

CHANGED = "its weights changed since memoize (call memoize again)"

_version = attrgetter("_version")
_training = attrgetter("training")


class Watch:
    """Notices new weights without reading all of them, so that every forward can ask.

    Parameters
    ----------
    host : nn.Module
        The part of the model whose weights maps depend on.
    layers : sequence of sequences of nn.Module
        The modules whose work is served, by site.
    """

    def __init__(self, host: nn.Module, layers: Sequence[Sequence[nn.Module]]) -> None:
        modules = [module for name, module in host.named_modules() if not f"{name}.".startswith(AFTER_ATTENTION)]
        self._members: list[dict[str, Any]] = [
            members for module in modules for members in (module._modules, module._parameters) if members
        ]
        weights = list({id(p): p for module in modules for p in module._parameters.values() if p is not None}.values())
        self._counted = [weight for weight in weights if not weight.is_inference()]  # others have no version
        self._plain = [weight for weight in weights if type(weight) is nn.Parameter]  # others may have no address
        # Fused optimizers and writes through .data leave the version as it is: one number of each weight is compared.
        self._numbers = [_middle(weight) for weight in self._plain if weight.numel()]
        self._held = list(self._all())  # keeps identities from reuse
        self._before: tuple[Any, ...] | None = (self._places(), self._values())
        # A hit drops nothing: serving would take the noise out of Monte Carlo dropout.
        self._dropouts = [
            [child for one in modules for child in one.modules() if isinstance(child, nn.modules.dropout._DropoutNd)]
            for modules in layers
        ]

    def changed(self) -> bool:
        """Whether a weight was written, replaced or moved, or a module was replaced. Once True, always True."""
        before = self._before
        # Places before values: these are in memory that may be freed if a weight has moved (`Tensor.share_memory_`
        # gives the same storage another block).
        if before is not None and (
            not self._holds() or self._places() != before[0] or self._values() != before[1]
        ):  # fmt: skip
            self._before = before = None
            # The old weights need not stay in memory. New lists: another thread may be iterating over these.
            self._members, self._counted, self._plain, self._numbers, self._held = [], [], [], [], []
        return self._before is None  # another thread may have noticed meanwhile

    def drops(self, layer: int) -> bool:
        """Whether a layer has a dropout in training mode."""
        return any(map(_training, self._dropouts[layer]))

    # Every forward asks these three: in C as far as possible, and no number is made for a comparison of identities.

    def _holds(self) -> bool:
        """Whether modules hold the very modules and parameters that they held."""
        return sum(map(len, self._members)) == len(self._held) and all(map(is_, self._all(), self._held))

    def _places(self) -> tuple[Any, ...]:
        """Where weights lie and how often they were written. `.to(dtype)` keeps parameters and versions, and moves."""
        return sum(map(_version, self._counted)), tuple(map(Tensor.data_ptr, self._plain))

    def _values(self) -> bytes:
        return b"".join(map(np.ndarray.tobytes, self._numbers))

    def _all(self) -> Iterator[Any]:
        """Modules and parameters as the modules hold them now."""
        return chain.from_iterable(map(dict.values, self._members))


def _middle(weight: Tensor) -> npt.NDArray[np.generic]:
    """A view of one number of a weight."""
    number = weight.detach()[tuple(size // 2 for size in weight.shape)]
    if number.dtype is torch.bfloat16:  # unknown to numpy
        number = number.view(torch.int16)
    seen: npt.NDArray[np.generic] = number.numpy()
    return seen
