"""Hooks: a `forward` that stands in front of a module's own `forward`, and can be removed; or another method."""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from attmemo.forward.engine import Engine, is_exporting
from attmemo.forward.plan import Plan
from attmemo.models import Site
from attmemo.models.cache_name import cache_of

_LOG = logging.getLogger("attmemo")


class Hook(ABC):
    """Base of all hooks.

    A copied or pickled model must not take the engine along: the copy would get the records of the model it was copied
    from. So a copy gets the `forward` that was there before.

    Attributes
    ----------
    method : str
        The method that it stands in front of.
    """

    method: ClassVar[str] = "forward"

    def __init__(self, owner: object, module: nn.Module) -> None:
        self.owner = owner
        self.module = module
        self.active = True
        self.__wrapped__: Callable[..., Any] = getattr(module, self.method)  # where `inspect.signature` looks
        self._before = module.__dict__.get(self.method)

    @property
    def __code__(self) -> Any:
        """Of the function behind: `torch.export` names it in its messages."""
        return self.__wrapped__.__code__

    def insert(self) -> None:
        """Stand in front of the module's method."""
        setattr(self.module, self.method, self)

    def remove(self) -> None:
        """Put back the method from before. One that was put around this one since stays in place."""
        self.active = False
        if self.module.__dict__.get(self.method) is not self:
            kind = type(self.module).__name__
            _LOG.warning("attmemo: the %s of %s was replaced since memoize: left", self.method, kind)
        elif self._before is None:
            delattr(self.module, self.method)  # the class's own method shows through again
        else:
            setattr(self.module, self.method, self._before)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's method, served."""

    def __reduce__(self) -> tuple[Any, ...]:
        if self._before is not None:
            return _same, (self._before,)
        # The module is being copied: here it stands for its copy, whose state holds no such method yet.
        return getattr, (self.module, self.method)


class ModelHook(Hook):
    """Tells the engine where a forward of the model begins and ends; callers of `model.forward` run no torch hooks.

    Packed blocks fill no key-value cache, and neither do maps of encoders. A configuration may ask for one in every
    call: here only calls that ask for one themselves get one.

    Attributes
    ----------
    names : tuple of str
        Arguments of the model's `forward`.
    whole : callable or None
        Gets the arguments of a forward, and returns its output; or None: it goes through the model's modules; or the
        plan that it follows on this way.
    """

    whole: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None

    def __init__(self, owner: object, engine: Engine, model: nn.Module) -> None:
        super().__init__(owner, model)
        names = tuple(inspect.signature(self.__wrapped__).parameters)
        fills_none = engine.reuse.whole or not engine.adapter.causal
        self._use_cache = names.index("use_cache") if fills_none and "use_cache" in names else None
        self._begin = _naming(engine.begin_forward, model, names)
        self._end = engine.end_forward
        self._begin_unseen, self._end_unseen = _unseen(self._begin), _unseen(self._end)
        self.names, self.whole, self._engine = names, None, engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled = torch.compiler.is_compiling()
        if not self.active or (compiled and is_exporting()):
            return self.__wrapped__(*args, **kwargs)
        if self.whole is not None and not compiled:
            output = self.whole(args, kwargs)
            if isinstance(output, Plan):
                with self._engine.planned(output):
                    return self(*args, **kwargs)
            if output is not None:
                return output
        unasked = self._use_cache is not None and len(args) <= self._use_cache and kwargs.get("use_cache") is None
        if unasked and cache_of(kwargs) is None:
            kwargs["use_cache"] = False
        (self._begin_unseen if compiled else self._begin)(args, kwargs)
        try:
            return self.__wrapped__(*args, **kwargs)
        finally:
            (self._end_unseen if compiled else self._end)()


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
