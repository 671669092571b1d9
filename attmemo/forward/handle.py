"""The handle at ``model.attmemo``: the switch and the counters, for every kind of reuse."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from attmemo.arguments import check_namespace
from attmemo.db import Database
from attmemo.db.pools.shared_pool import SharedPool
from attmemo.errors import ArgumentError, AttmemoError
from attmemo.forward.engine import Engine
from attmemo.forward.hooks import FollowerHook, Hook, LayerHook, ModelHook
from attmemo.forward.wrapper_hooks import hooks_around
from attmemo.models import Site
from attmemo.models.base import by_module


class Memoization(ABC):
    """The handle at ``model.attmemo``: counters and the switch.

    Attributes
    ----------
    database : Database, SharedPool or None
        The prepared one. None: there is none.
    host : nn.Module
        The part of the model that is memoized.
    caller : object
        What the caller of `memoize` holds: the model, or a wrapper around it. Takes effect with the next `enable`.
    spaces : Namespaces or None
        Of `attmemo.handle.namespaces`; None: what requests bring is not kept.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        engine: Engine,
        *,
        owned: bool = False,
        followers: Sequence[nn.Module] = (),
    ) -> None:
        self.engine = engine
        self.owns_database = owned  # opened for this memoization alone, and closed with it
        self.database: Database | SharedPool | None = engine.database
        self.host = engine.adapter.host(model)
        self._sites, self._followers = list(sites), list(followers)
        self._hooks: list[Hook] = []
        self._undone = False
        self.caller: object = model
        self.spaces: Any = None

    # -- namespaces

    def namespace(self, name: str) -> AbstractContextManager[Any]:
        """While inside, forwards of this task, or of this thread, read and leave records of this namespace alone.

        Its guard is its own. Several tasks of one event loop may each be in a namespace, and await inside.

        Parameters
        ----------
        name : str
            1 to 128 printable characters. A namespace begins when it is first named.

        Raises
        ------
        ArgumentError
            It can be no name, or there are as many namespaces as `memoize` was told.
        """
        check_namespace(name)
        return self.engine.open(space=None if self.spaces is None else self.spaces.open(name))

    def namespaces(self) -> dict[str, dict[str, Any]]:
        """The counters of each namespace by name, as `stats` has them. ``open``: it was named since."""
        return {} if self.spaces is None else self.spaces.stats()

    def forget(self, name: str) -> None:
        """Forget a namespace: its records, what its guard learned, and its folder. ArgumentError: there is none."""
        if self.spaces is None:
            raise ArgumentError(f"there is no namespace {name!r}.", "nothing of requests is kept")
        self.spaces.forget(name)

    # -- the switch

    @property
    @abstractmethod
    def reuse(self) -> str:
        """The kind of reuse: ``"maps"``, ``"rows"`` or ``"none"``."""

    @property
    def enabled(self) -> bool:
        """Whether the model is memoized."""
        return bool(self._hooks)

    def enable(self) -> None:
        """Memoize from now on."""
        if self.enabled:
            return
        if self._undone:
            raise AttmemoError("this memoization was undone or replaced.", "call memoize(model, …) again")
        hooks: list[Hook] = [LayerHook(self, self.engine, sites) for sites in by_module(self._sites)]
        hooks += [FollowerHook(self, self.engine, module) for module in self._followers]
        for hook in hooks:
            hook.insert()
            self._hooks.append(hook)
        self._begin()
        self.engine.reuse.watch([(hook.module, hook) for hook in hooks])

    def _begin(self) -> None:
        """Have forwards of the model served, once all parts are."""
        hook = ModelHook(self, self.engine, self.host)
        hook.insert()
        hook.whole = self._whole(hook)
        self._hooks.append(hook)
        self._hooks += self._insert_outer()
        for around in hooks_around(self, self.caller):
            around.insert()
            self._hooks.append(around)

    def _whole(self, hook: ModelHook) -> Callable[[tuple[Any, ...], dict[str, Any]], Any] | None:
        """What runs whole forwards, beside the hooks that are in place; None: nothing does."""
        return None

    def _insert_outer(self) -> list[Hook]:
        """Insert hooks around the whole model, once all others are in place."""
        return []

    def disable(self, seconds: float = 60.0) -> None:
        """Put the original `forward` of every module back; nothing of the engine stays in the way.

        Where the model itself calls the blocks, this waits for forwards of other threads: the first block has done the
        work of those behind it, which must not do it again. Not to be called from inside of a forward.

        Parameters
        ----------
        seconds : float
            How long to wait for such forwards.

        Raises
        ------
        AttmemoError
            One takes longer. The model stays memoized.
        """
        if self._hooks and self._followers:
            while not isinstance(hook := self._hooks.pop(), ModelHook):
                hook.remove()
            hook.remove()  # from now on forwards are the original ones
            if not self.engine.wait(seconds):
                self._begin()
                raise AttmemoError(
                    f"another thread has been in a forward of {type(self.host).__name__} for more than {seconds:g} s: "
                    "its blocks cannot be put back meanwhile, so the model stays memoized.",
                    "end that forward, then call it again",
                )
        while self._hooks:
            self._hooks.pop().remove()

    def reset_stats(self) -> None:
        """Start counting anew, in all namespaces."""
        self.engine.reset_stats()
        for one in () if self.spaces is None else self.spaces.opened():
            one.engine.reset_stats()

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Counters since the last reset, JSON-able."""

    def undo(self) -> None:
        """Disable for good and give windows back, as `unmemoize` does."""
        self.disable()
        self._undone = True
        self.engine.close()
        if self.owns_database and self.database is not None:
            self.database.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copied or pickled model is a bare one
