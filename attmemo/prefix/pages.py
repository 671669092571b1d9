"""Pages of rows in memory: K and V of every block, and the last hidden states. A bound, and what goes first.

Rows lie in pages of `CUT` tokens. All pages lie in one arena: a row is known by its slot, wherever it is, and
attention reads it there. Each store has keys of its own by which pages are found.

What goes: every page that a forward computes is stored. A page that a second sequence has is *common*. Pages that were
seen once go first; common ones give way only while those have less than `ONCE` of the room. So texts that never return
drive out each other. Of either kind the one goes that was used least recently, the end of a prefix before its begin.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from attmemo.kernels.pages import untouched
from attmemo.kernels.row_attention import Stored
from attmemo.kernels.row_sinks import Copies
from attmemo.packed.prefixes import CUT, Embedded, Folded, Ints, Sources
from attmemo.system.locking import thread_lock, weakly

ONCE: Final = 0.25
"""Share of the room."""

BEGIN: Final = 0
"""The root of all, but for those of a namespace (`Pages.begin`)."""

Key = tuple[int, bytes]  # number of the record before, or of the root, and what the rows are told by

@dataclass(slots=True)
class Lease:
    """What a forward reads and writes. Its pages stay until it is given back.

    Attributes
    ----------
    root : int
        Where keys begin.
    slots : mapping of int to int32 [n]
        Where rows of a sequence lie: the first n; or of all of them, -1 where a row is not stored.
    """

    root: int = BEGIN
    slots: dict[int, Sources] = field(default_factory=dict)
    read: dict[int, list[int]] = field(default_factory=dict)
    written: list[tuple[int, int, int, Key]] = field(default_factory=list)  # page, sequence, first row, key
    keys: dict[int, list[bytes]] = field(default_factory=dict)  # of the pages of a sequence, where each has its own


@dataclass(frozen=True, slots=True)
class Planned:
    """What a forward computes, and what of it is stored.

    Attributes
    ----------
    folded : Folded
    copies : Copies
    stored : int64 [B]
        Rows of each sequence that are read.
    shared : int
        Rows that another sequence of the batch computes.
    """

    folded: Folded
    copies: Copies
    stored: Ints
    shared: int


class Pages(ABC):
    """Pages of rows. Several threads may use one store.

    Parameters
    ----------
    blocks, size, hidden : int
        Blocks of the model, numbers of a row of K, and of a hidden state.
    dtype : torch.dtype
    max_bytes : int
        Of the arena, at most.
    """

    ends: ClassVar[int] = 1  # hidden states of a token: the last ones

    def __init__(self, blocks: int, size: int, hidden: int, dtype: torch.dtype, max_bytes: int) -> None:
        self.page_bytes = CUT * (2 * blocks * size + self.ends * hidden) * dtype.itemsize
        self._pages = max_bytes // self.page_bytes
        self._lock = thread_lock()
        self._roots = 0
        slots = self._pages * CUT
        # Memory is taken when a page is written for the first time.
        self._rows = untouched((blocks, 2, slots, size), dtype)
        self._ends = untouched((self.ends, slots, hidden), dtype)
        self._clear()
        # Leases of the parent's threads will never be given back in a child, and what one was doing is half done.
        os.register_at_fork(after_in_child=weakly(self._clear))

    def _clear(self) -> None:
        pages = self._pages
        self._found: dict[Key, int] = {}
        self._keys: list[Key | None] = [None] * pages
        self._number, self._used, self._depth, self._held, self._root = (np.zeros(pages, np.int64) for _ in range(5))
        self._common, self._taken = np.zeros(pages, np.bool_), np.zeros(pages, np.bool_)
        self._clock = self._last = 0

    def __len__(self) -> int:
        """Tokens that are stored."""
        return CUT * len(self._found)

    @property
    def nbytes(self) -> int:
        return self.page_bytes * len(self._found)

    @property
    def max_bytes(self) -> int:
        return self.page_bytes * self._pages

    @property
    def common(self) -> int:
        """Tokens that several sequences have."""
        return CUT * int(self._common.sum())

    # -- a forward

    @abstractmethod
    def find(self, embedded: Embedded, own: Ints, root: int = BEGIN) -> Lease:
        """What is stored of these sequences, to be given back by `give_back`."""

    @abstractmethod
    def plan(self, lease: Lease, embedded: Embedded, own: Ints) -> Planned:
        """What is to be computed of these sequences. Room is taken for it, as long as there is some."""

    def _take(self, page: int, root: int, depth: int = 0) -> None:
        self._taken[page], self._held[page] = True, 1
        self._used[page], self._depth[page], self._root[page] = self._clock, depth, root

    def _room(self, count: int) -> list[int]:
        """Pages that are free now, at most `count`, the first one last."""
        free = np.flatnonzero(~self._taken)[:count]
        missing = count - len(free)
        if missing > 0:
            able = self._taken & (self._held == 0)
            once = np.flatnonzero(able & ~self._common)
            few = np.count_nonzero(self._taken & ~self._common) + len(free)
            more = max(0, int(ONCE * self._pages) - int(few))  # so many common ones may give way
            rest = np.flatnonzero(able & self._common)
            gone = [self._oldest(once, missing), self._oldest(rest, min(more, missing - len(once)))]
            for page in (pages := np.concatenate(gone)).tolist():
                key = self._keys[page]
                if key is not None:
                    self._found.pop(key, None)
                self._keys[page], self._taken[page], self._common[page] = None, False, False
            free = np.concatenate([free, pages])
        room: list[int] = np.sort(free)[::-1].tolist()
        return room

    def _oldest(self, pages: Ints, count: int) -> Ints:
        """Of these pages those that were used least recently, ends of prefixes first."""
        if count <= 0:
            return pages[:0]
        return pages[np.lexsort((-self._depth[pages], self._used[pages]))[:count]]

    def publish(self, lease: Lease) -> None:
        """Let others find what was written."""
        same: dict[int, int] = {}  # another thread wrote the same meanwhile
        with self._lock:
            for page, _, _, (before, marks) in lease.written:
                key = same.get(before, before), marks
                found = self._found.setdefault(key, page)
                if found == page:
                    self._keys[page] = key
                else:
                    same[int(self._number[page])] = int(self._number[found])
                    self._common[found] = True

    def give_back(self, lease: Lease) -> None:
        """End a lease. What was written and not published is free again."""
        with self._lock:
            for pages in lease.read.values():
                self._held[pages] -= 1
            for page, *_ in lease.written:
                self._held[page] -= 1
                if self._keys[page] is None:
                    self._taken[page] = self._common[page] = False

    # -- rows

    def layer(self, number: int, batch: int) -> Stored:
        """K and V of a block, for each of so many sequences."""
        keys, values = (np.full(batch, self._rows[number, plane].data_ptr(), np.uint64) for plane in (0, 1))
        rows = self._rows.shape[2]
        return Stored(
            keys, values, np.full(batch, rows), self._rows.dtype, self._rows.stride(2) * self._rows.itemsize,
            still=True,
        )  # fmt: skip

    def last(self, slots: Ints) -> Tensor:
        """Last hidden states ``[n, H]``."""
        return self._ends[-1].index_select(0, torch.from_numpy(slots))

    def forget(self) -> None:
        """Forget everything."""
        with self._lock:
            self._clear()

    # -- namespaces: roots of their own, in the same room

    def begin(self) -> int:
        """A root that nothing was ever stored at."""
        with self._lock:
            self._roots += 1
            return -self._roots

    def counts(self, root: int) -> dict[str, int]:
        """Tokens that are found from there, those of them that several sequences have, and bytes.

        From `BEGIN`: all that is stored.
        """
        with self._lock:
            own = self._taken if root == BEGIN else self._taken & (self._root == root)
            pages, common = int(own.sum()), int((own & self._common).sum())
        return {
            "tokens": CUT * pages, "common": CUT * common, "bytes": self.page_bytes * pages,
            "max_bytes": self.max_bytes,
        }  # fmt: skip

    def leave(self, root: int) -> None:
        """Forget what is found from there, for ever. A forward that runs keeps what it reads until it ends."""
        with self._lock:
            own = self._taken & (self._root == root)
            for page in np.flatnonzero(own).tolist():
                self._found.pop(self._keys[page] or (root, b""), None)
            for page in np.flatnonzero(own & (self._held == 0)).tolist():
                self._keys[page], self._taken[page], self._common[page] = None, False, False
                self._rows[:, :, page * CUT : (page + 1) * CUT] = 0
                self._ends[:, page * CUT : (page + 1) * CUT] = 0

    def close(self) -> None:
        """Forget everything and give memory back; nothing is stored from now on."""
        with self._lock:
            self._pages = 0
            self._rows, self._ends = self._rows[:, :, :0].clone(), self._ends[:, :0].clone()
            self._clear()


def slots_of(pages: Sequence[int]) -> Sources:
    """The slots of pages, one behind the other."""
    found = np.array(pages, np.int32)[:, None] * CUT + np.arange(CUT)
    return found.astype(np.int32).reshape(-1)
