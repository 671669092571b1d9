"""Hooks: a `forward` that stands in front of a module's own `forward`, and can be removed."""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from attmemo.adapters import Site
from attmemo.engine import Engine, is_exporting
from attmemo.guarded import Guarded
from attmemo.parts import tensors_in
from attmemo.reuse.stack import Onlookers, Stack

_LOG = logging.getLogger("attmemo")

_FOR_FIRST_ROWS = frozenset({
    "input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "labels", "return_dict",
})  # fmt: skip
"""Arguments with which a head reads the rows that it reads without them."""


class Hook(ABC):
    """Base of all hooks.

    A copied or pickled model must not take the engine along: the copy would get the records of the model it was copied
    from. So a copy gets the `forward` that was there before.
    """

    def __init__(self, owner: object, module: nn.Module) -> None:
        self.owner = owner
        self.module = module
        self.active = True
        self.__wrapped__: Callable[..., Any] = module.forward  # where `inspect.signature` looks
        self._before = module.__dict__.get("forward")

    @property
    def __code__(self) -> Any:
        """Of the function behind: `torch.export` names it in its messages."""
        return self.__wrapped__.__code__

    def insert(self) -> None:
        """Stand in front of the module's `forward`."""
        self.module.forward = self

    def remove(self) -> None:
        """Put back the `forward` from before. A `forward` that was put around this one since stays in place."""
        self.active = False
        if self.module.__dict__.get("forward") is not self:
            _LOG.warning("attmemo: the forward of %s was replaced since memoize: left", type(self.module).__name__)
        elif self._before is None:
            del self.module.forward  # the class's own method shows through again
        else:
            self.module.forward = self._before

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's `forward`, served."""

    def __reduce__(self) -> tuple[Any, ...]:
        if self._before is not None:
            return _same, (self._before,)
        # The module is being copied: here it stands for its copy, whose state holds no `forward` yet.
        return getattr, (self.module, "forward")


class ModelHook(Hook):
    """Tells the engine where a forward of the model begins and ends; callers of `model.forward` run no torch hooks."""

    def __init__(self, owner: object, engine: Engine, model: nn.Module) -> None:
        super().__init__(owner, model)
        self._begin = _naming(engine.begin_forward, model, tuple(inspect.signature(self.__wrapped__).parameters))
        self._end = engine.end_forward
        self._begin_unseen, self._end_unseen = _unseen(self._begin), _unseen(self._end)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled = torch.compiler.is_compiling()
        if not self.active or (compiled and is_exporting()):
            return self.__wrapped__(*args, **kwargs)
        (self._begin_unseen if compiled else self._begin)(args, kwargs)
        try:
            return self.__wrapped__(*args, **kwargs)
        finally:
            (self._end_unseen if compiled else self._end)()


class AnswerHook(Hook):
    """Runs the forwards of a model whose answers are guarded.

    A compiled model cannot run its parts again: inside of it nothing is served from a record.
    """

    def __init__(self, owner: object, engine: Engine, model: nn.Module, guarded: Guarded) -> None:
        super().__init__(owner, model)
        self._engine, self._guarded = engine, guarded
        self._names = tuple(inspect.signature(self.__wrapped__).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active or torch.compiler.is_compiling():
            return self.__wrapped__(*args, **kwargs)
        return self._guarded(self.__wrapped__, self._names, args, kwargs, self._engine.counters)


class HeadHook(Hook):
    """Asks for first rows alone while a model runs whose head reads nothing else of what its blocks give.

    All rows are computed where more may be seen: a hook of torch, a `forward` around a part of the model, an argument
    that is not known, a compiled model. If the head reads more after all (another one, or one that looks for a token),
    what it gives is not finite: then the call is done again with all rows, and so are all later ones.
    """

    def __init__(self, owner: object, model: nn.Module, stack: Stack, own: Sequence[Hook]) -> None:
        super().__init__(owner, model)
        self.reads_more = False
        self._names, self._thread = tuple(inspect.signature(self.__wrapped__).parameters), stack.thread
        modules = stack.blocks.modules
        inside = {id(child) for module in modules for child in module.modules()} - set(map(id, modules))
        outside = [module for module in model.modules() if module is not model and id(module) not in inside]
        self._outside = Onlookers(outside, [(hook.module, hook) for hook in own])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active or self.reads_more or torch.compiler.is_compiling() or self._is_seen(args, kwargs):
            return self.__wrapped__(*args, **kwargs)
        thread = self._thread
        before, thread.first, given = thread.first, True, thread.firsts
        try:
            output = self.__wrapped__(*args, **kwargs)
        finally:
            thread.first = before
        if thread.firsts == given or all(bool(part.isfinite().all()) for part in tensors_in(output) or ()):
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


class LayerHook(Hook):
    """Asks the engine to serve one layer, or several layers that share a module."""

    def __init__(self, owner: object, engine: Engine, sites: Sequence[Site]) -> None:
        super().__init__(owner, sites[0].module)
        self._sites = sites
        self._attend, self._attend_unseen = engine.attend, _unseen(engine.attend)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled = torch.compiler.is_compiling()
        if not self.active or (compiled and is_exporting()):
            return self.__wrapped__(*args, **kwargs)
        return (self._attend_unseen if compiled else self._attend)(self._sites, self.__wrapped__, args, kwargs)


class FollowerHook(Hook):
    """Passes hidden states through a block whose work the first block of the forward has done."""

    def __init__(self, owner: object, engine: Engine, module: nn.Module) -> None:
        super().__init__(owner, module)
        self._follow, self._follow_unseen = engine.follow, _unseen(engine.follow)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled = torch.compiler.is_compiling()
        if not self.active or (compiled and is_exporting()):
            return self.__wrapped__(*args, **kwargs)
        return (self._follow_unseen if compiled else self._follow)(self.__wrapped__, args, kwargs)


def _naming(
    begin: Callable[[nn.Module, dict[str, Any]], None], model: nn.Module, names: tuple[str, ...]
) -> Callable[[tuple[Any, ...], dict[str, Any]], None]:
    """Name the arguments of a forward, and begin it.

    Not a method of the hook: a method that is kept by its own object keeps the packed weights, too, until Python looks
    for cycles. Not in `__call__`: the compiler of torch 2.6 cannot trace ``zip(strict=…)``.
    """

    def begin_named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        begin(model, dict(zip(names, args, strict=False)) | kwargs)

    return begin_named


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a graph break for torch.compile, which cannot trace a lookup.

    The break costs microseconds at each call, so it is used only inside a compiled model.
    """
    hidden: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return hidden


def _same(value: Any) -> Any:
    return value
