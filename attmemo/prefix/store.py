"""Rows of prefixes in memory: K and V of every block, and the last hidden states. A bound, and what goes first.

Rows lie in pages of `CUT` tokens. A page is found by the page before it and by its tokens' embedded rows, so what was
stored of a sequence is a walk from its begin, and sequences that begin alike share pages. All pages lie in one arena:
a row of a prefix is known by its slot, wherever it is, and attention reads it there.

What goes: every page that a forward computes is stored. A page that a second sequence begins with is *common*. Pages
that were seen once go first; common ones give way only while those have less than `ONCE` of the room. So texts that
never return drive out each other. Of either kind the one goes that was used least recently, the end of a prefix before
its begin.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Final

import numpy as np
import torch
from torch import Tensor

from attmemo.kernels.pages import untouched
from attmemo.kernels.row_attention import Stored
from attmemo.kernels.row_sinks import Copies, Copy
from attmemo.packed.prefixes import CUT, MARK, Embedded, Ints, Prefixes, Sources, cut, first_of, octets_of
from attmemo.system.locking import ThreadLock

ONCE: Final = 0.25
"""Share of the room."""

BEGIN: Final = 0
"""Where walks begin, but for those of a namespace (`PrefixStore.begin`)."""
_WIDE: Final = CUT * MARK

_Key = tuple[int, bytes]  # number of the record before, and marks of the rows


@dataclass(slots=True)
class Lease:
    """What a forward reads and writes. Its pages stay until it is given back.

    Attributes
    ----------
    root : int
        Where the walks begin.
    slots : mapping of int to int32 [n]
        Where the first rows of a sequence lie.
    """

    root: int = BEGIN
    slots: dict[int, Sources] = field(default_factory=dict)
    read: dict[int, list[int]] = field(default_factory=dict)
    written: list[tuple[int, int, int, _Key]] = field(default_factory=list)  # page, sequence, first row, key


class PrefixStore:
    """Pages of rows. Several threads may use one store.

    Parameters
    ----------
    blocks, size, hidden : int
        Blocks of the model, numbers of a row of K, and of a hidden state.
    dtype : torch.dtype
    max_bytes : int
        Of the arena, at most.
    """

    def __init__(self, blocks: int, size: int, hidden: int, dtype: torch.dtype, max_bytes: int) -> None:
        self.page_bytes = CUT * (2 * blocks * size + 2 * hidden) * dtype.itemsize
        self._pages = max_bytes // self.page_bytes
        self._lock = ThreadLock()
        self._roots = 0
        slots = self._pages * CUT
        # Memory is taken when a page is written for the first time.
        self._rows = untouched((blocks, 2, slots, size), dtype)
        self._ends = untouched((2, slots, hidden), dtype)  # embedded rows, and the last hidden states
        self._clear()
        os.register_at_fork(after_in_child=partial(_in_child, weakref.ref(self)))  # a fork keeps no store alive

    def _clear(self) -> None:
        pages = self._pages
        self._found: dict[_Key, int] = {}
        self._keys: list[_Key | None] = [None] * pages
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
        """Tokens that several sequences began with."""
        return CUT * int(self._common.sum())

    # -- a forward

    def find(self, embedded: Embedded, own: Ints, root: int = BEGIN) -> Lease:
        """What is stored of these sequences' first rows, to be given back by `give_back`. Walks begin at `root`."""
        lease = Lease(root)
        with self._lock:
            self._clock += 1
            for b in own.tolist():
                pages = self._walk(embedded.marks[b], root)
                if pages:
                    slots = slots_of(pages)
                    rows = embedded.of(b, 0, len(slots))
                    stored = octets_of(self._ends[0]).view(rows.dtype)[slots]
                    if not np.array_equal(rows, stored):  # another word with the same first numbers
                        alike = cut(first_of((rows != stored).any(1)))
                        pages, slots = pages[: alike // CUT], slots[:alike]
                if pages:
                    self._used[pages], self._common[pages] = self._clock, True
                    self._held[pages] += 1
                    lease.slots[b], lease.read[b] = slots, pages
        return lease

    def _walk(self, marks: bytes, root: int) -> list[int]:
        pages, number = list[int](), root
        for at in range(0, len(marks) - _WIDE + 1, _WIDE):
            page = self._found.get((number, marks[at : at + _WIDE]))
            if page is None:
                break
            pages.append(page)
            number = int(self._number[page])
        return pages

    def reserve(self, lease: Lease, embedded: Embedded, prefixes: Prefixes) -> None:
        """Take room for the rows that will be computed, as long as there is some."""
        paths: dict[int, list[int]] = {}
        new: dict[_Key, int] = {}
        with self._lock:
            room = self._room(sum((embedded.lengths[b] - int(prefixes.begins[b])) // CUT for b in prefixes.order))
            for b in prefixes.order:
                before, begin = int(prefixes.before[b]), int(prefixes.begins[b]) // CUT
                paths[b] = pages = list(lease.read.get(b, ()) if before < 0 else paths[before][:begin])
                if before >= 0:
                    self._common[pages] = True
                if len(pages) < begin:  # what comes before was not stored
                    continue
                marks = embedded.marks[b]
                for at in range(begin * _WIDE, len(marks) - _WIDE + 1, _WIDE):
                    key = int(self._number[pages[-1]]) if pages else lease.root, marks[at : at + _WIDE]
                    if not room or key in self._found or key in new:
                        break
                    new[key] = page = room.pop()
                    # A number is never given again: what followed a record that went is not found behind another one.
                    self._last += 1
                    self._number[page], self._taken[page], self._held[page] = self._last, True, 1
                    self._used[page], self._depth[page], self._root[page] = self._clock, len(pages), lease.root
                    pages.append(page)
                    lease.written.append((page, b, at // MARK, key))

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

    def copies(self, lease: Lease, embedded: Embedded, prefixes: Prefixes, starts: Mapping[int, int]) -> Copies:
        """Where the computed rows go; embedded ones are written now. `starts`: of each sequence the first row."""
        ends = octets_of(self._ends[0])
        parts = []
        for _, run in groupby(enumerate(lease.written), lambda pair: (pair[1][1], pair[1][0] - pair[0])):
            pages = [one for _, one in run]
            (page, b, first, _), count = pages[0], CUT * len(pages)
            slots, row = slice(page * CUT, page * CUT + count), starts[b] + first - int(prefixes.begins[b])
            ends[slots] = embedded.of(b, first, first + count).view(np.uint8)
            parts.append(Copy(row, row + count, self._rows[:, :, slots], self._ends[1, slots]))
        return Copies(parts)

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
        return Stored(keys, values, np.full(batch, rows), self._rows.dtype, self._rows.stride(2) * self._rows.itemsize)

    def last(self, slots: Ints) -> Tensor:
        """Last hidden states ``[n, H]``."""
        return self._ends[1].index_select(0, torch.from_numpy(slots))

    def forget(self) -> None:
        """Forget everything."""
        with self._lock:
            self._clear()

    # -- namespaces: walks of their own, in the same room

    def begin(self) -> int:
        """A place where walks may begin, and none ever began."""
        with self._lock:
            self._roots += 1
            return -self._roots

    def counts(self, root: int) -> dict[str, int]:
        """Tokens that are found from there, those of them that several sequences began with, and bytes.

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


def _in_child(store: weakref.ref[PrefixStore]) -> None:
    """Leases of the parent's threads will never be given back, and what one was doing is half done."""
    if (found := store()) is not None:
        found._clear()
