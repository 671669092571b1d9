"""Pages of models all of whose layers are local: a row depends on the tokens around it, and on none farther away.

Each layer looks a window to each side, so through all of them a token sees their sum: the *reach*. A page is found by
the embedded rows of its tokens and of all within reach, by its place in the text (rotary keys are turned by it), and
by where the text begins and ends, if that is within reach. So around an edit those pages are found that are farther
away than the reach, as long as no token moved; what moved is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from itertools import groupby
from typing import Final

import numpy as np
import torch

from attmemo.kernels.row_attention import Layout
from attmemo.kernels.row_sinks import Copies, Copy
from attmemo.packed.prefixes import CUT, Embedded, Folded, Ints, Sources
from attmemo.prefix.pages import BEGIN, Lease, Pages, Planned, slots_of

_DIGEST: Final = 16
"""Bytes by which rows, and pages, are told apart."""


class LocalStore(Pages):
    """Pages of texts.

    Parameters
    ----------
    blocks, size, hidden, dtype, max_bytes
        As in `Pages`.
    reach : int
        So far a row of the last hidden states sees, to each side.
    """

    def __init__(
        self, blocks: int, size: int, hidden: int, dtype: torch.dtype, max_bytes: int, reach: int
    ) -> None:  # fmt: skip
        super().__init__(blocks, size, hidden, dtype, max_bytes)
        self._reach = reach

    def find(self, embedded: Embedded, own: Ints, root: int = BEGIN) -> Lease:
        lease = Lease(root, keys={b: list(self._keys_of(embedded, b)) for b in own.tolist()})
        with self._lock:
            self._clock += 1
            for b, keys in lease.keys.items():
                found = {at: page for at, key in enumerate(keys) if (page := self._found.get((root, key))) is not None}
                lease.slots[b] = slots = np.full(embedded.lengths[b], -1, np.int32)
                pages = list(found.values())
                if pages:
                    self._used[pages], self._common[pages] = self._clock, True
                    self._held[pages] += 1
                    lease.read[b] = pages
                    slots[: CUT * len(keys)].reshape(-1, CUT)[list(found)] = slots_of(pages).reshape(-1, CUT)
        return lease

    def _keys_of(self, embedded: Embedded, sequence: int) -> Iterator[bytes]:
        """Of each whole page of a sequence."""
        rows, reach = embedded.of(sequence, 0, embedded.lengths[sequence]), self._reach
        marks = b"".join([blake2b(row, digest_size=_DIGEST).digest() for row in rows])
        for begin in range(0, len(rows) - CUT + 1, CUT):
            near = marks[max(0, begin - reach) * _DIGEST : (begin + CUT + reach) * _DIGEST]
            yield blake2b(near, digest_size=_DIGEST, salt=begin.to_bytes(8, "little")).digest()

    def plan(self, lease: Lease, embedded: Embedded, own: Ints) -> Planned:
        self._reserve(lease)
        folded = _folded(embedded, own, lease.slots)
        stored = np.zeros(len(embedded.lengths), np.int64)
        for b, slots in lease.slots.items():
            stored[b] = np.count_nonzero(slots >= 0)
        return Planned(folded, self._copies(lease, folded, own), stored, 0)

    def _reserve(self, lease: Lease) -> None:
        with self._lock:
            missing = [
                (b, at, (lease.root, key)) for b, keys in lease.keys.items() for at, key in enumerate(keys)
                if lease.slots[b][CUT * at] < 0
            ]  # fmt: skip
            room, new = self._room(len(missing)), set[tuple[int, bytes]]()
            for b, at, key in missing:
                if key in self._found or key in new:
                    continue
                if not room:
                    break
                new.add(key)
                page = room.pop()
                self._take(page, lease.root)
                lease.written.append((page, b, CUT * at, key))

    def _copies(self, lease: Lease, folded: Folded, own: Ints) -> Copies:
        """Where the computed rows go."""
        begins = dict(zip(own.tolist(), folded.layout.key_starts.tolist(), strict=False))
        rows = [(page, int(folded.sources[begins[b] + first])) for page, b, first, _ in lease.written]
        parts = []
        for _, run in groupby(enumerate(rows), lambda pair: (pair[1][0] - pair[0], pair[1][1] - CUT * pair[0])):
            some = [one for _, one in run]
            (page, row), count = some[0], CUT * len(some)
            slots = slice(page * CUT, page * CUT + count)
            parts.append(Copy(row, row + count, self._rows[:, :, slots], self._ends[-1, slots]))
        return Copies(parts)


def _folded(embedded: Embedded, own: Ints, slots: dict[int, Sources]) -> Folded:
    """These sequences of a batch, of which rows that lie in slots are not computed."""
    lengths = np.array(embedded.lengths)[own]
    starts, key_starts = np.zeros((2, len(own) + 1), np.int64)
    kept = np.concatenate([slots[b] for b in own.tolist()])
    fresh = kept < 0
    np.cumsum(lengths, out=key_starts[1:])
    starts[1:] = np.cumsum(fresh)[key_starts[1:] - 1]
    sources = np.where(fresh, np.cumsum(fresh) - 1, -1 - kept).astype(np.int32)
    positions = np.arange(len(kept)) - np.repeat(key_starts[:-1], lengths)
    every = positions + np.repeat(own * embedded.padded + np.array(embedded.begins)[own], lengths)
    layout = Layout(starts, key_starts, positions[fresh].astype(np.int32), sources)
    if fresh.all():  # rows that lie one behind the other are found sooner
        layout = Layout(starts, key_starts)
    return Folded(layout, every[fresh], every, sources)
