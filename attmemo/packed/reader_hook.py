"""The hook around a module that reads nothing of a model's output but its last hidden states."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from attmemo.forward.engine import Engine
from attmemo.forward.hooks import Hook
from attmemo.packed.stack import Onlookers

_READ = "last_hidden_state", ("last_hidden_state",), ["last_hidden_state"]


class ReaderHook(Hook):
    """Leaves the pooler out where no one reads it: in the `Transformer` of sentence-transformers.

    Its rows are the last hidden states; what BERT's own pooler gives takes as long as the embeddings, and is dropped.
    A hook of torch on the model, or a `forward` around it, would see that it is not there: then it is computed.
    """

    def __init__(self, owner: object, module: nn.Module, engine: Engine, inner: Hook) -> None:
        super().__init__(owner, module)
        self._engine = engine
        self._onlookers = Onlookers([inner.module], [(inner.module, inner)])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active or torch.compiler.is_compiling() or not reads_last(self.module) or self._is_seen:
            return self.__wrapped__(*args, **kwargs)
        running = self._engine.current.forward
        with self._engine.open() if running is None else nullcontext(running) as forward:
            before, forward.unpooled = forward.unpooled, True
            try:
                return self.__wrapped__(*args, **kwargs)
            finally:
                forward.unpooled = before

    @property
    def _is_seen(self) -> bool:
        return self._onlookers.have_hooks or self._onlookers.have_forwards


def reader_of(outer: Any, host: nn.Module) -> nn.Module | None:
    """The module of a sentence-transformers model that reads nothing but this model's last hidden states, or None."""
    modules = outer.children() if isinstance(outer, nn.Module) and outer is not host else ()
    return next((one for one in modules if getattr(one, "model", None) is host and reads_last(one)), None)


def reads_last(module: Any) -> bool:
    """Whether this is the class of sentence-transformers, and all that it is asked for are last hidden states."""
    kind, asked = type(module), getattr(module, "modality_config", None)
    if kind.__name__ != "Transformer" or not kind.__module__.startswith("sentence_transformers.") or not asked:
        return False
    return all(one.get("method") == "forward" and one.get("method_output_name") in _READ for one in asked.values())
