"""Fetching a batch of records: three twins with the same face and the same numbers.

`copy`   gathers into a fresh tensor. Nothing can go wrong; the oracle in tests and the others' way out.
`view`   hands out one tensor for each record where it lies. No gathering at all, one matmul for each record.
`map`    puts the records' pages side by side in a window: one tensor, no copy, one matmul for the batch.

Fetch and A·V of 32 bfloat16 maps of 12 x 512 x 512, ms on two cores: copy 100-109; view 29 (4 KiB pages) or 23-28
(2 MiB); map 37 or 20-25. Hence `choose_fetcher`. A tensor kept from a batch never changes: its window is leased.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from attmemo.errors import WindowBusyError, WindowError
from attmemo.mmap.arena import Arena, Mapping, Slots
from attmemo.mmap.pages import HUGE_PAGE, map_count, max_map_count, page_size
from attmemo.mmap.window import Window

FetcherName = Literal["auto", "direct", "map", "view", "copy"]

RECOUNT = 1024
"""Fetches of one thread between two looks at how many mappings the process has."""


class Batch(AbstractContextManager["Batch"]):
    """The records of one fetch, in the order asked for: one tensor [B, *shape], or B `parts` of shape [*shape].

    A batch is valid inside its ``with`` block. Afterwards it raises `WindowError`. A tensor that was kept never
    changes: the next fetch finds the window leased and copies. So clone what must be kept.
    """

    __slots__ = ("_at_close", "_length", "_open", "_parts", "_stacked")

    def __init__(
        self,
        stacked: torch.Tensor | None,
        parts: Sequence[torch.Tensor] = (),
        at_close: Callable[[], None] | None = None,
    ) -> None:
        self._stacked = stacked
        self._parts = parts
        self._at_close = at_close
        self._length = len(parts) if stacked is None else stacked.shape[0]
        self._open = True

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        """Record `index`, [*shape], contiguous, to be read only. IndexError: no such record (none is negative)."""
        self._check_open()
        if not 0 <= index < self._length:
            raise IndexError(f"record {index} of a batch of {self._length}")
        return self._parts[index] if self._stacked is None else self._stacked[index]

    @property
    def stacked(self) -> torch.Tensor | None:
        """All records as one tensor [B, *shape], to be read only; None where they lie apart (`view`).

        Ask ``is_contiguous()``, which padded slots are not: `torch.matmul` silently copies such a batch before it
        multiplies, which costs more than one matmul for each record.
        """
        self._check_open()
        return self._stacked

    def _check_open(self) -> None:
        if not self._open:
            raise WindowError("this batch was used after its with block; clone inside the block what must be kept")

    def close(self) -> None:
        """Let the tensors go; what the end of the ``with`` block does."""
        if self._open:
            self._open = False
            self._stacked = None
            self._parts = ()
            if self._at_close is not None:
                self._at_close()

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except WindowBusyError:
            if error is None:  # an error on its way holds the frames that hold the tensors: report that one
                raise


class Fetcher(Protocol):
    """The face of the three twins."""

    @property
    def name(self) -> str:
        """One of "map", "view" and "copy"."""

    def fetch(self, arena: Arena, slots: Slots) -> AbstractContextManager[Batch]:
        """The records in the slots [B], in this order, repetitions included; B may be 0.

        Raises `IndexError` (no such slot), `DatabaseTruncatedError` (the file was cut short since it was opened) or
        `WindowError` (the fetcher was closed).
        """

    def close(self) -> None:
        """Give everything back. Tensors still held stay valid. Closing twice is fine."""


class _Closable:
    """Refuses work after `close`, so that the twins agree on that too."""

    _closed = False

    def close(self) -> None:
        self._closed = True

    def _begin(self, arena: Arena, slots: Slots) -> tuple[Mapping, npt.NDArray[np.int64]]:
        if self._closed:
            raise WindowError("this fetcher was closed")
        mapping = arena.mapping
        indices = mapping.indices(slots)
        mapping.check_whole()
        return mapping, indices


def _copied(mapping: Mapping, indices: npt.NDArray[np.int64]) -> Batch:
    if len(indices) == 0:
        return Batch(torch.empty((0, *mapping.layout.shape), dtype=mapping.layout.dtype))
    return Batch(torch.stack([mapping.slot(index) for index in indices.tolist()]))


class CopyFetcher(_Closable):
    """Gathers into a fresh tensor [B, *shape]: arXiv 2301.09262, 5.3 "Performance problem due to memory copy"."""

    name = "copy"

    def fetch(self, arena: Arena, slots: Slots) -> Batch:
        """See `Fetcher.fetch`."""
        return _copied(*self._begin(arena, slots))


class ViewFetcher(_Closable):
    """One view of the arena for each record; `Batch.stacked` is None."""

    name = "view"

    def fetch(self, arena: Arena, slots: Slots) -> Batch:
        """See `Fetcher.fetch`."""
        mapping, indices = self._begin(arena, slots)
        return Batch(None, [mapping.slot(index) for index in indices.tolist()])


class _Windows(threading.local):
    """What one thread owns."""

    def __init__(self) -> None:  # called anew in every thread
        self.pid = os.getpid()
        self.by_kind: dict[tuple[int, int], Window] = {}  # (slot stride, alignment), bytes
        self.fetches = 0
        self.room = 0  # mappings that may still be made, at the last count


class MapFetcher(_Closable):
    """Maps the records' pages side by side; one tensor [B, *shape], no copy (arXiv 2301.09262, section 5.3, table 6).

    Each thread has windows of its own, one for each slot stride and page size. A batch is copied as a whole if its
    window is still being read (a batch inside a batch, a tensor kept), if the process is near ``vm.max_map_count``, or
    if the kernel refuses: `fallbacks` counts such batches of all threads, `fallback_reason` is that of the last one.

    A batch takes at most B mappings. A sixteenth of the limit is left to malloc, thread stacks and shared libraries,
    which would fail first and less politely. After fork the child makes windows of its own.

    `strict`, for tests and benchmarks: the window is inaccessible from the end of each batch, and a tensor that is
    still held there raises `WindowBusyError`. Otherwise pages stay until the next fetch or `close`.
    """

    name = "map"

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.fallbacks = 0
        self.fallback_reason: str | None = None
        self._limit = max_map_count()
        self._mine = _Windows()
        self._all: weakref.WeakSet[Window] = weakref.WeakSet()
        self._lock = threading.Lock()

    def fetch(self, arena: Arena, slots: Slots) -> Batch:
        """See `Fetcher.fetch`."""
        # A batch of 64 maps is mapped in a tenth of a millisecond. After a layer's work, when nothing of this is in
        # the caches, as much again would be spent on checks in numpy: the window checks numbers and file in C.
        if self._closed:
            raise WindowError("this fetcher was closed")
        mapping = arena.mapping
        as_it_is = type(slots) is np.ndarray and slots.dtype == np.int64 and slots.ndim == 1
        indices = cast(npt.NDArray[np.int64], slots) if as_it_is else mapping.indices(slots)
        count = len(indices)
        if count == 0:
            mapping.check_whole()
            return _copied(mapping, indices)
        layout = mapping.layout
        if layout.stride % page_size():
            return _copied(mapping, mapping.indices(slots))  # of bytes, which are multiplied where they lie
        page, huge = mapping.window_facts
        populate = page < HUGE_PAGE  # of 2 MiB pages it doubles the time and takes nothing from A·V
        try:
            mine = self._check_room(count)
            window = mine.by_kind.get((layout.stride, page))
            if window is None or window.capacity < count * layout.stride:
                window = self._make_window(layout.stride, page, count)
            stacked = window.show(mapping.fd, indices, layout, populate, huge)
        except IndexError:
            mapping.indices(indices)  # says it as the others do
            raise
        except WindowError as error:
            indices = mapping.indices(indices)  # refused perhaps before they were checked
            if isinstance(error.__cause__, OSError):
                self._mine.room = 0  # until the next count: what the kernel refused now it would refuse again
                # A window that could not even be made dark refuses work for ever; the next is a new one.
                self._mine.by_kind.pop((layout.stride, page), None)
            with self._lock:
                self.fallbacks += 1
                self.fallback_reason = error.what
            mapping.check_whole()  # a copy would die of what the window politely refused
            return _copied(mapping, indices)
        return Batch(stacked, at_close=window.darken if self.strict else None)

    def close(self) -> None:
        """See `Fetcher.close`. A window that is still read goes when its last tensor does."""
        super().close()
        with self._lock:
            windows = list(self._all)
            self._all.clear()
        for window in windows:
            try:
                window.close()
            except WindowError:  # leased, or inherited through fork: its addresses go with the last reference
                continue
        self._mine = _Windows()

    def _check_room(self, count: int) -> _Windows:
        """What this thread owns, if the process has room for so many mappings more."""
        mine = self._mine
        if mine.pid != os.getpid():
            mine = self._mine = _Windows()  # the windows are the parent's
            self._lock = threading.Lock()  # and the thread that held the lock does not exist here
        if mine.fetches % RECOUNT == 0:
            mine.room = self._limit - self._limit // 16 - map_count()
        mine.fetches += 1
        if count > mine.room:
            raise WindowError(
                f"a window of {count} slots needs up to {count} mappings and there is room for {max(mine.room, 0)}: "
                f"vm.max_map_count is {self._limit}, of which {self._limit // 16} are left to the rest of the process",
                "sysctl -w vm.max_map_count=1048576, or fetch with 'view'",
            )
        return mine

    def _make_window(self, stride: int, alignment: int, count: int) -> Window:
        # A power of two: growing one by one would leave a trail of reservations.
        window = Window(stride << (count - 1).bit_length(), alignment)
        self._mine.by_kind[stride, alignment] = window
        with self._lock:
            self._all.add(window)
        return window


def choose_fetcher(name: FetcherName, arena_page_bytes: int) -> Fetcher:
    """The twin of this name, or ValueError; with "auto" the fastest one for these `Arena.window_page_bytes`."""
    if name == "auto":
        name = "map" if arena_page_bytes >= HUGE_PAGE else "view"
    twins: dict[str, Callable[[], Fetcher]] = {"map": MapFetcher, "view": ViewFetcher, "copy": CopyFetcher}
    if name not in twins:
        raise ValueError(f"no fetcher is called {name!r}; there are 'auto', {', '.join(map(repr, twins))}")
    return twins[name]()
