"""What must stay as it was when a model was memoized: maps belong to exact weights, and dropout is not memoized."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from attmemo.adapters import Site
from attmemo.fingerprint import AFTER_ATTENTION

CHANGED = "its weights changed since memoize (call memoize again)"

_version = attrgetter("_version")
_training = attrgetter("training")


class Watch:
    """Notices new weights without reading them all, so that it can be asked in every forward.

    Parameters
    ----------
    host : nn.Module
        The part of the model whose weights maps depend on.
    sites : sequence of Site
        Its attention layers.
    """

    def __init__(self, host: nn.Module, sites: Sequence[Site]) -> None:
        modules = [module for name, module in host.named_modules() if not f"{name}.".startswith(AFTER_ATTENTION)]
        self._members: list[dict[str, Any]] = [
            members for module in modules for members in (module._modules, module._parameters) if members
        ]
        weights = list({id(p): p for module in modules for p in module._parameters.values() if p is not None}.values())
        self._counted = [weight for weight in weights if not weight.is_inference()]  # those count no versions
        self._plain = [weight for weight in weights if type(weight) is nn.Parameter]  # others may have no address
        # Fused optimizers and writes through .data count no versions: one number of each weight is looked at.
        self._numbers = [_middle(weight) for weight in self._plain if weight.numel()]
        self._held = list(self._all())  # keeps identities from reuse
        self._before: tuple[Any, ...] | None = self._state()
        # A hit drops nothing, so it would take the noise out of Monte Carlo dropout.
        self._dropouts = [
            [child for child in site.module.modules() if isinstance(child, nn.modules.dropout._DropoutNd)]
            for site in sites
        ]

    def changed(self) -> bool:
        """Whether a weight was written to, replaced, or moved, or a module put in the place of another.

        Once it was, it remains so.
        """
        if self._before is not None and self._state() != self._before:
            self._before = None
            # The old weights need not stay in memory. New lists: another thread may be going over these.
            self._members, self._counted, self._plain, self._numbers, self._held = [], [], [], [], []
        return self._before is None

    def drops(self, layer: int) -> bool:
        """Whether a layer has a dropout in training mode."""
        return any(map(_training, self._dropouts[layer]))

    def _state(self) -> tuple[Any, ...]:
        # In C as far as it goes. Addresses differ after .to(dtype), which keeps the parameters and their versions.
        return (
            sum(map(_version, self._counted)),
            sum(map(Tensor.data_ptr, self._plain)),
            b"".join(map(np.ndarray.tobytes, self._numbers)),
            tuple(map(id, self._all())),
        )

    def _all(self) -> Iterator[Any]:
        """Modules and parameters as they stand in the modules now."""
        return chain.from_iterable(map(dict.values, self._members))


def _middle(weight: Tensor) -> npt.NDArray[np.generic]:
    """One number of a weight, where it lies."""
    number = weight.detach()[tuple(size // 2 for size in weight.shape)]
    if number.dtype is torch.bfloat16:  # unknown to numpy
        number = number.view(torch.int16)
    seen: npt.NDArray[np.generic] = number.numpy()
    return seen
