"""Hooks around what sentence-transformers asks of a whole model before each call of it.

`encode` and `predict` put every module into evaluation mode, and look where every tensor lies. For a line of text both
together take longer than the model's blocks. Where nothing changed, native code sees so in microseconds; else the
model's own methods do what they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from attmemo.forward.hooks import Hook
from attmemo.kernels.members import have, hold

_CPU: Final = torch.device("cpu")
_DEVICE: Final = "_resolve_inference_device"
_MODES: Final = ("torch.nn.modules.module", "transformers.modeling_utils")
"""Where methods `train` are from that do nothing where the mode stays."""


class Settled:
    """Whether a model has the modules and tensors that it had, and these are at rest."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._members = tuple([one.__dict__ for one in modules])
        trees = tuple([one._modules for one in modules])
        self._tree = trees, tuple([child for tree in trees for child in tree.values()])
        dicts = tuple([part for one in modules for part in (one._parameters, one._buffers)])
        self._tensors = dicts, tuple([tensor for part in dicts for tensor in part.values()])
        self._given = [tensor for tensor in self._tensors[1] if isinstance(tensor, Tensor)]
        self._evaluation = (False,) * len(modules)
        own = [getattr(type(one), "train", None) for one in modules]
        self.has_plain_modes = all(getattr(train, "__module__", None) in _MODES for train in own)
        self._holds = True

    @property
    def evaluates(self) -> bool:
        """Whether every module is in evaluation mode."""
        return self._is_as_it_was() and have(self._members, "training", self._evaluation)

    @property
    def is_on_cpu(self) -> bool:
        """Whether every tensor is on the CPU."""
        return self._is_as_it_was() and all(tensor.device == _CPU for tensor in self._given)

    def _is_as_it_was(self) -> bool:
        """Whether modules and tensors are the very ones. Once they are not, they need not stay in memory."""
        if self._holds and not (hold(*self._tree) and hold(*self._tensors)):
            self._holds, self._tree, self._tensors, self._given = False, ((), ()), ((), ()), []
        return self._holds


class ModeHook(Hook):
    """Answers ``train(False)``, which `eval` calls, where no module trains."""

    method = "train"

    def __init__(self, owner: object, module: nn.Module, settled: Settled) -> None:
        super().__init__(owner, module)
        self._settled = settled

    def __call__(self, mode: bool = True) -> Any:
        if mode is False and self.active and self._settled.evaluates:
            return self.module
        return self.__wrapped__(mode)


class DeviceHook(Hook):
    """Answers where inputs go: to the CPU, where every tensor of the model is there."""

    method = _DEVICE

    def __init__(self, owner: object, module: nn.Module, settled: Settled) -> None:
        super().__init__(owner, module)
        self._settled = settled

    def __call__(self, device: Any = None) -> Any:
        asked = device is None or device == _CPU or device == "cpu"
        if asked and self.active and not self._is_delegated and self._settled.is_on_cpu:
            return _CPU
        return self.__wrapped__(device)

    @property
    def _is_delegated(self) -> bool:
        return bool(getattr(self.module, "_placement_is_delegated", True))


def hooks_around(owner: object, wrapper: Any) -> Sequence[Hook]:
    """Hooks for what the caller holds, still to be inserted; none where it asks for nothing before a call."""
    if not isinstance(wrapper, nn.Module) or not hasattr(type(wrapper), _DEVICE):
        return ()
    settled = Settled(wrapper)
    modes = [ModeHook(owner, wrapper, settled)] if settled.has_plain_modes else []
    return [*modes, DeviceHook(owner, wrapper, settled)]
