"""The hook around a whole model whose answers are looked at."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from attmemo.forward.hooks import Hook

Run = Callable[[Callable[..., Any], Sequence[str], tuple[Any, ...], dict[str, Any]], Any]
"""Gets the model's `forward`, the names of its arguments, and the arguments; returns its output."""


class AnswerHook(Hook):
    """Has the forwards of a model run by what looks at its answers: a guard, or the choice of linear layers.

    A compiled model cannot run its parts again: inside of it nothing is served from a record.
    """

    def __init__(self, owner: object, model: nn.Module, run: Run) -> None:
        super().__init__(owner, model)
        self._run = run
        self._names = tuple(inspect.signature(self.__wrapped__).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active or torch.compiler.is_compiling():
            return self.__wrapped__(*args, **kwargs)
        return self._run(self.__wrapped__, self._names, args, kwargs)
