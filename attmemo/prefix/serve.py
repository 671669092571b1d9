"""Reuse of equal prefixes: rows that an earlier request, or another sequence of the batch, has computed are read.

A row of a causal block depends on the rows up to its own, and on nothing else. So what is read is what would be
computed, bit by bit where attmemo's own kernels compute; elsewhere up to rounding. Nothing guards the answers.
"""

from __future__ import annotations

from time import perf_counter
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from attmemo.forward.context import Forward
from attmemo.models import Call, Spans
from attmemo.models.blocks import Blocks
from attmemo.packed.duplicates import Twins
from attmemo.packed.prefixes import Embedded, Folded, Prefixes
from attmemo.packed.runner import Packed
from attmemo.packed.stack import Stack, unfold
from attmemo.prefix.store import BEGIN, PrefixStore


class PrefixRows(Stack):
    """Serves a stack of causal blocks, and what is stored of its sequences' first rows.

    Parameters
    ----------
    blocks : Blocks
    packed : Packed
    store : PrefixStore
    root : int
        Where walks in the store begin: each namespace has a place of its own.
    """

    name: ClassVar[str] = "prefix"

    def __init__(self, blocks: Blocks, packed: Packed, store: PrefixStore, root: int = BEGIN) -> None:
        super().__init__(blocks, packed)
        self.store, self.root, self.shares = store, root, True

    def _folded(self, call: Call, spans: Spans, forward: Forward, twins: Twins, start: float) -> Tensor | None:
        if forward.whole or forward.packed is not None:  # no record, or rows of another arithmetic
            return super()._folded(call, spans, forward, twins, start)
        store, embedded, own = self.store, Embedded(call.hidden, spans.lengths, spans.left), np.flatnonzero(twins.own)
        lease = store.find(embedded, own, self.root)
        try:
            stored = np.zeros(len(spans.lengths), np.int64)
            for b, slots in lease.slots.items():
                stored[b] = len(slots)
            prefixes = Prefixes.of(embedded, own, stored)
            store.reserve(lease, embedded, prefixes)
            folded = Folded.of(prefixes, embedded, lease.slots)
            begins = dict(zip(own.tolist(), folded.layout.starts.tolist(), strict=False))
            keep = store.copies(lease, embedded, prefixes, begins)
            planned = perf_counter()
            found = self._compute_folded(
                call, folded, forward, (lambda number: store.layer(number, len(own))) if lease.slots else None, keep
            )
            done = perf_counter()
            store.publish(lease)
            output = self._spread(found, folded, call)
        finally:
            store.give_back(lease)
        twins.spread(output)
        lengths = np.array(spans.lengths) - stored
        lengths[~twins.own] = 0
        self._count(
            spans.lengths, lengths, twins, forward, fetch=planned - start, blocks=done - planned,
            shared=int((prefixes.begins - stored).sum()), stored=int(stored.sum()),
        )  # fmt: skip
        return output

    def _spread(self, found: Tensor, folded: Folded, call: Call) -> Tensor:
        """Rows ``[B, L, H]`` of all tokens."""
        sources, fresh = folded.sources, folded.sources >= 0
        if fresh.all():
            return unfold(found, folded, call.hidden.shape)
        output = call.hidden.new_zeros(call.hidden.shape)
        rows = output.view(-1, output.shape[2])
        rows.index_copy_(
            0, torch.from_numpy(folded.every[~fresh]), self.store.last(-1 - sources[~fresh].astype(np.int64))
        )
        rows.index_copy_(
            0, torch.from_numpy(folded.every[fresh]), found.index_select(0, torch.from_numpy(sources[fresh]))
        )
        return output

    def close(self) -> None:
        if self.root == BEGIN:
            self.store.close()
        else:
            self.store.leave(self.root)
