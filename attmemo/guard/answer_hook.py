"""The hook around a whole model whose answers are guarded."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from attmemo.forward.hooks import Hook
from attmemo.guard.forward import Guarded


class AnswerHook(Hook):
    """Runs the forwards of a model whose answers are guarded.

    A compiled model cannot run its parts again: inside of it nothing is served from a record.
    """

    def __init__(self, owner: object, model: nn.Module, guarded: Guarded) -> None:
        super().__init__(owner, model)
        self._guarded = guarded
        self._names = tuple(inspect.signature(self.__wrapped__).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active or torch.compiler.is_compiling():
            return self.__wrapped__(*args, **kwargs)
        return self._guarded(self.__wrapped__, self._names, args, kwargs)
