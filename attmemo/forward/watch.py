"""Notices what must stay as it was at `memoize`: records belong to exact weights, and dropout is not memoized.

A forward asks where weights lie, how often they were written, and for one number of each. Weights that lie elsewhere
may be the same (`Tensor.share_memory_`, a pool of processes, a type that was left and taken again). Then all are read
once, and compared with a checksum of what they were at `memoize`: to take it reads each weight once more, about 0.1
seconds for a gigabyte, and costs a forward nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, starmap
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor, nn

from attmemo.fingerprint import AFTER_ATTENTION
from attmemo.kernels.members import hold, lie

CHANGED = "its weights or settings changed since memoize (call memoize again)"

Group = tuple[npt.NDArray[np.uint64], int, bytes]

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
        self._members: tuple[dict[str, Any], ...] = tuple(
            [members for module in modules for members in (module._modules, module._parameters) if members]
        )
        weights = list({id(p): p for module in modules for p in module._parameters.values() if p is not None}.values())
        self._counted = [weight for weight in weights if not weight.is_inference()]  # others have no version
        self._plain = [weight for weight in weights if type(weight) is nn.Parameter]  # others may have no address
        # Numbers that blocks were made ready with, or that belong to what was stored: eps of norms, factors of scores.
        self._settings = [
            (vars(module), name) for module in modules if not isinstance(module, nn.modules.dropout._DropoutNd)
            for name, value in vars(module).items() if type(value) is float and "drop" not in name
        ]
        self._held = tuple(self._all())  # keeps identities from reuse
        self._sum = self._checksum()
        self._before: tuple[Any, ...] | None = self._look()
        # A hit drops nothing: serving would take the noise out of Monte Carlo dropout.
        self._dropouts = [
            [child for one in modules for child in one.modules() if isinstance(child, nn.modules.dropout._DropoutNd)]
            for modules in layers
        ]

    @property
    def weights(self) -> frozenset[int]:
        """The weights that are watched, by their `id`: no other object gets one of these until something changed."""
        return frozenset(map(id, self._plain))

    def changed(self) -> bool:
        """Whether a weight was written or replaced, a module was replaced, or a number of one. Once True, always True.

        A weight that moved is no other one.
        """
        before = self._before
        # Places before values: these are in memory that may be freed if a weight has moved (`Tensor.share_memory_`
        # gives the same storage another block).
        if before is not None and not (
            hold(self._members, self._held) and self._written() == before[0]
            and ((self._places() == before[1] and all(starmap(lie, before[3]))) or self._moved(before))
        ):  # fmt: skip
            self._before = None
            # The old weights need not stay in memory. New lists: another thread may be iterating over these.
            self._counted, self._plain, self._settings, self._members, self._held = [], [], [], (), ()
        return self._before is None  # another thread may have noticed meanwhile

    def _moved(self, before: tuple[Any, ...]) -> bool:
        """Whether weights lie elsewhere and are what they were: then they are watched there."""
        if self._places() == before[1] or self._checksum() != self._sum:
            return False
        self._before = self._look()
        return True

    def _look(self) -> tuple[Any, ...]:
        """All that a forward compares."""
        # Fused optimizers and writes through .data leave the version as it is: one number of each weight is compared.
        numbers = [_middle(weight) for weight in self._plain if weight.numel()]
        return self._written(), self._places(), numbers, _grouped(numbers)

    def _checksum(self) -> int:
        """Of all bytes of weights with an address."""
        found = xxhash.xxh3_128()
        for weight in self._plain:
            found.update(f"{weight.dtype} {tuple(weight.shape)}".encode())
            if weight.numel():
                found.update(weight.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        return found.intdigest()

    def drops(self, layer: int) -> bool:
        """Whether a layer has a dropout in training mode."""
        return any(map(_training, self._dropouts[layer]))

    # Every forward asks these: in C as far as possible, and no number is made for a comparison of identities.

    def _written(self) -> tuple[int, list[Any]]:
        """How often weights were written, and the numbers of modules."""
        return sum(map(_version, self._counted)), list(starmap(dict.get, self._settings))

    def _places(self) -> tuple[int, ...]:
        """Where weights lie. `.to(dtype)` keeps parameters and versions, and moves."""
        return tuple(map(Tensor.data_ptr, self._plain))

    def _all(self) -> Iterator[Any]:
        """Modules and parameters as the modules hold them now."""
        return chain.from_iterable(map(dict.values, self._members))


def _grouped(numbers: list[npt.NDArray[np.generic]]) -> list[Group]:
    """Numbers by their size: where they lie, and their bytes."""
    found: dict[int, list[npt.NDArray[np.generic]]] = {}
    for number in numbers:
        found.setdefault(number.itemsize, []).append(number)
    return [
        (np.array([one.ctypes.data for one in own], np.uint64), size, b"".join(map(np.ndarray.tobytes, own)))
        for size, own in found.items()
    ]


def _middle(weight: Tensor) -> npt.NDArray[np.generic]:
    """A view of one number of a weight."""
    number = weight.detach()[tuple(size // 2 for size in weight.shape)]
    if number.dtype is torch.bfloat16:  # unknown to numpy
        number = number.view(torch.int16)
    seen: npt.NDArray[np.generic] = number.numpy()
    return seen
