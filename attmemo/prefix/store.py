"""Pages of prefixes: what sequences of causal models begin with.

A page is found by the page before it and by its tokens' embedded rows, so what was stored of a sequence is a walk from
its begin, and sequences that begin alike share pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import ClassVar, Final

import numpy as np

from attmemo.kernels.row_sinks import Copies, Copy
from attmemo.packed.prefixes import CUT, MARK, Embedded, Folded, Ints, Prefixes, cut, first_of, octets_of
from attmemo.prefix.pages import BEGIN, Key, Lease, Pages, Planned, slots_of

_WIDE: Final = CUT * MARK


class PrefixStore(Pages):
    """Pages of prefixes."""

    ends: ClassVar[int] = 2  # embedded rows, and the last hidden states

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
        new: dict[Key, int] = {}
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
                    self._number[page] = self._last
                    self._take(page, lease.root, len(pages))
                    pages.append(page)
                    lease.written.append((page, b, at // MARK, key))

    def plan(self, lease: Lease, embedded: Embedded, own: Ints) -> Planned:
        stored = np.zeros(len(embedded.lengths), np.int64)
        for b, slots in lease.slots.items():
            stored[b] = len(slots)
        prefixes = Prefixes.of(embedded, own, stored)
        self.reserve(lease, embedded, prefixes)
        folded = Folded.of(prefixes, embedded, lease.slots)
        begins = dict(zip(own.tolist(), folded.layout.starts.tolist(), strict=False))
        copies = self.copies(lease, embedded, prefixes, begins)
        return Planned(folded, copies, stored, int((prefixes.begins - stored).sum()))

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
