"""The hook around a model whose head may read first rows alone."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from attmemo.forward.batch_slices import tensors_in
from attmemo.forward.engine import Engine
from attmemo.forward.hooks import Hook
from attmemo.packed.stack import Onlookers, Stack

_LOG = logging.getLogger("attmemo")

_FOR_FIRST_ROWS = frozenset({
    "input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "labels", "return_dict",
    "pixel_values",
})  # fmt: skip
"""Arguments with which a head reads the rows that it reads without them."""


class HeadHook(Hook):
    """Asks for first rows alone while a model runs whose head reads nothing else of what its blocks give.

    All rows are computed where more may be seen: a hook of torch, a `forward` around a part of the model, an argument
    that is not known, a compiled model. If the head reads more after all (another one, or one that looks for a token),
    what it gives is not finite: then the call is done again with all rows, and so are all later ones.
    """

    def __init__(
        self, owner: object, model: nn.Module, stack: Stack, engine: Engine, own: Sequence[Hook]
    ) -> None:
        super().__init__(owner, model)
        self.reads_more = False
        self._names, self._engine = tuple(inspect.signature(self.__wrapped__).parameters), engine
        modules = stack.blocks.modules
        inside = {id(child) for module in modules for child in module.modules()} - set(map(id, modules))
        outside = [module for module in model.modules() if module is not model and id(module) not in inside]
        self._outside = Onlookers(outside, [(hook.module, hook) for hook in own])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active or self.reads_more or torch.compiler.is_compiling() or self._is_seen(args, kwargs):
            return self.__wrapped__(*args, **kwargs)
        running = self._engine.current.forward
        with self._engine.open() if running is None else nullcontext(running) as forward:
            before, forward.first, given = forward.first, True, forward.firsts
            try:
                output = self.__wrapped__(*args, **kwargs)
            finally:
                forward.first = before
        if forward.firsts == given or all(bool(part.isfinite().all()) for part in tensors_in(output) or ()):
            return output
        self.reads_more = True
        _LOG.warning(
            "attmemo: %s reads more than first rows of its last hidden states: all are computed from now on",
            type(self.module).__name__,
        )
        return self.__wrapped__(*args, **kwargs)

    def _is_seen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether something may see more than the head."""
        if len(args) > len(self._names) or not _FOR_FIRST_ROWS.issuperset((*self._names[: len(args)], *kwargs)):
            return True
        return self._outside.have_hooks or self._outside.have_forwards
