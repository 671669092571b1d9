"""Namespaces: tenants of one model. Each has records, a guard and an account of time of its own.

    with model.attmemo.namespace("a"): model(…)
      the forward's context names the handle of "a"; the hooks of the model ask its engine and its guard (`Engine.of`)

Weights, checks, hooks and the thread for idle times are the model's. Records of all namespaces share one bound of
bytes (`attmemo.db.pools.shares`). A namespace is made when it is first named.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from attmemo.arguments import check_namespace
from attmemo.db.folder import SEGMENTS
from attmemo.db.namespaces import bytes_in, folder_of, named_in, write_name
from attmemo.db.pools.filling import is_filling
from attmemo.db.pools.shared_pool import SharedPool
from attmemo.db.pools.shares import Sharer, Shares
from attmemo.errors import ArgumentError, AttmemoError, DatabaseError
from attmemo.packed.stack import Stack
from attmemo.rows.live_store import GrowingRows
from attmemo.system.locking import thread_lock

LOOK: Final = 10.0
"""Seconds between two looks at what namespaces hold that are not open."""
SOON: Final = 0.05
"""Seconds that each of the others is waited for, where a namespace begins: to begin with fewer bytes costs records."""

if TYPE_CHECKING:
    from attmemo.handle.stack import StackMemoization


@dataclass(eq=False, slots=True)
class Space:
    """One namespace, open or not."""

    name: str
    handle: StackMemoization | None = None
    sharer: Sharer | None = None
    gone: bool = False
    lock: threading.RLock = field(default_factory=thread_lock)


class Namespaces:
    """The namespaces of one model. Any thread may ask.

    Parameters
    ----------
    outer : StackMemoization
        The model's own handle.
    make : callable
        Makes the handle of a name, with so many bytes for its records.
    most : int
        Namespaces, at most.
    places : sequence of Path
        Folders in which namespaces have folders.
    settle : callable, optional
        Given each handle once it is among `opened`: what changed for all while it was made, changes for it.
    """

    def __init__(
        self, outer: StackMemoization, make: Callable[[str, int], StackMemoization], most: int,
        places: Sequence[Path] = (), settle: Callable[[StackMemoization], None] | None = None,
    ) -> None:  # fmt: skip
        self._outer, self._make, self.most, self._places, self._settle = outer, make, most, places, settle
        self._lock, self._spaces, self._closed = thread_lock(), dict[str, Space](), False
        self._shares: Shares | None = None
        self._looked = monotonic()
        for name in (name for place in places for name in named_in(place)):
            self._spaces[name] = Space(name, sharer=self._sharer(self._looked))
            self._look_at(self._spaces[name])

    def __len__(self) -> int:
        return len(self._spaces)

    def admit(self, name: str) -> Space:
        """Return a namespace, open or not. ArgumentError: it can be no name, or there are too many."""
        space = self._spaces.get(name)
        if space is not None:
            return space
        check_namespace(name)
        with self._lock:
            if name not in self._spaces and len(self._spaces) >= self.most:
                what = f"there are {len(self._spaces)} namespaces already, and namespaces={self.most} is the limit."
                raise ArgumentError(what, "model.attmemo.forget(NAME) takes one out; memoize(…, namespaces=N)")
            return self._spaces.setdefault(name, Space(name))

    def open(self, name: str) -> StackMemoization:
        """Return the handle of a namespace. ArgumentError as `admit`."""
        while True:
            space = self.admit(name)
            with space.lock:
                if space.gone:  # it was forgotten meanwhile: it begins anew
                    continue
                if (handle := space.handle) is None:
                    handle = space.handle = self._opened(space)
                    if self._settle is not None:
                        self._settle(handle)
                if space.sharer is not None:
                    space.sharer.used = monotonic()
            own, outer = handle.engine.reuse, self._outer.engine.reuse
            assert isinstance(own, Stack)
            assert isinstance(outer, Stack)
            own.run_as(outer)  # 8-bit layers may serve by now
            return handle

    def _opened(self, space: Space) -> StackMemoization:
        if self._closed:
            raise AttmemoError("this memoization was undone or replaced.", "call memoize(model, …) again")
        sharer, space.sharer = space.sharer or self._sharer(), None
        try:
            handle = self._make(space.name, self._first_bytes(sharer))
        except BaseException:
            if sharer is not None:
                sharer.told = 0  # nothing was opened: others may have it
            raise
        finally:
            space.sharer = sharer
        store = handle.engine.reuse.store  # type: ignore[attr-defined]
        if sharer is not None and isinstance(store, GrowingRows):
            sharer.nbytes = _bytes_of(store)
            store.bound = self._bound_of(handle, sharer)
        for place in self._places:
            write_name(folder_of(place, space.name), space.name)
        return handle

    # -- bytes

    def _first_bytes(self, sharer: Sharer | None) -> int:
        """Bytes that a new store may take: others are asked to leave some."""
        if sharer is None or self._shares is None:
            return 0
        sharer.used = monotonic()
        for handle in (self._outer, *self.opened()):
            if handle._store is not None:
                handle._store.flush(SOON)  # it asks what it may take
        return self._shares.of(sharer)

    def _sharer(self, used: float | None = None) -> Sharer | None:
        """Have records share the bound; None: none are kept."""
        store = getattr(self._outer.engine.reuse, "store", None)
        if not isinstance(store, GrowingRows) or not store.fills or store.pool.max_bytes is None:
            return None
        if self._shares is None:
            self._shares = Shares(store.pool.max_bytes)
            own = self._shares.add(_bytes_of(store), told=store.pool.max_bytes)
            store.bound = self._bound_of(self._outer, own)
        return self._shares.add(lambda: 0, used)

    def _bound_of(self, handle: StackMemoization, sharer: Sharer) -> Callable[[], int]:
        """What the store of a handle asks before it writes."""
        shares, seen = self._shares, [-1]
        assert shares is not None

        def bound() -> int:
            done = handle.engine.counters.done.sequences
            if done != seen[0]:
                seen[0], sharer.used = done, monotonic()
            self._shrink_closed(shares)
            return shares.of(sharer)

        return bound

    def _look_at(self, space: Space) -> None:
        """See what a namespace that is not open holds: another process may use it."""
        nbytes, written = 0, 0.0
        for folder in (folder_of(place, space.name) for place in self._places):
            nbytes += bytes_in(folder)
            with suppress(OSError):
                written = max(written, *(file.stat().st_mtime for file in (folder, folder / SEGMENTS)))
        if space.sharer is not None:
            space.sharer.nbytes, space.sharer.used = partial(int, nbytes), monotonic() - (time.time() - written)

    def _shrink_closed(self, shares: Shares) -> None:
        """Take the oldest records out of namespaces that are not open, where others need the bytes."""
        looks = monotonic() - self._looked > LOOK
        self._looked = monotonic() if looks else self._looked
        for space in [one for one in list(self._spaces.values()) if one.handle is None and one.sharer is not None]:
            with space.lock:
                if looks and space.handle is None:
                    self._look_at(space)
                sharer = space.sharer
                if space.handle is not None or space.gone or sharer is None or not (held := sharer.nbytes()):
                    continue
                most = shares.of(sharer)
                if most >= held:
                    continue
                for place in self._places:
                    with suppress(DatabaseError, OSError):  # it stays as it is, and others have less
                        sharer.nbytes = _shrunk(folder_of(place, space.name), most)

    # -- all of them

    def stats(self) -> dict[str, dict[str, Any]]:
        """The counters of each namespace, by name; of one that is not open its bytes."""
        found: dict[str, dict[str, Any]] = {}
        for name, space in list(self._spaces.items()):
            handle, sharer = space.handle, space.sharer
            nbytes = 0 if sharer is None else sharer.nbytes()
            found[name] = {"open": False, "record_bytes": nbytes, "guard": None} if handle is None else (
                {"open": True} | handle.stats() | {"enabled": self._outer.enabled}
            )  # fmt: skip
        return found

    def opened(self) -> list[StackMemoization]:
        """Return the handles of those that are open."""
        return [space.handle for space in list(self._spaces.values()) if space.handle is not None]

    def forget(self, name: str) -> None:
        """Forget a namespace: its records, what its guard learned, and its folder. ArgumentError: there is none."""
        with self._lock:
            space = self._spaces.pop(name, None)
        if space is None:
            raise ArgumentError(f"there is no namespace {name!r}.", "model.attmemo.namespaces() lists them")
        if self._outer.deferred is not None:
            self._outer.deferred.forget()  # inputs of this one may wait to be verified
        with space.lock:
            space.gone = True
            self._close(space)
            for place in self._places:
                shutil.rmtree(folder_of(place, name), ignore_errors=True)

    def close(self) -> None:
        """Close all, and open none any more. Folders stay."""
        self._closed = True
        for space in list(self._spaces.values()):
            with space.lock:
                self._close(space)
        store = getattr(self._outer.engine.reuse, "store", None)
        if isinstance(store, GrowingRows):
            store.bound = None  # it leads here

    def _close(self, space: Space) -> None:
        handle, sharer, space.handle, space.sharer = space.handle, space.sharer, None, None
        if handle is not None:
            handle.deferred = None  # it is the model's
            handle.undo()
            if isinstance(store := getattr(handle.engine.reuse, "store", None), GrowingRows):
                store.bound = None
        if sharer is not None and self._shares is not None:
            self._shares.remove(sharer)


def _bytes_of(store: GrowingRows) -> Callable[[], int]:
    return lambda: store.nbytes


def _shrunk(folder: Path, most: int) -> Callable[[], int]:
    """Bring a folder within a bound; what says its bytes."""
    if is_filling(folder):
        pool = SharedPool(folder, most)
        try:
            pool.look()
            pool.trim()
        finally:
            pool.close()
    return partial(int, bytes_in(folder))
