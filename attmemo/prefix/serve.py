"""Reuse of equal rows: those that an earlier request, or another sequence of the batch, has computed are read.

A row of a causal block depends on the rows up to its own (`PrefixRows`), one of local blocks on those within their
reach (`LocalRows`), and on nothing else. So what is read is what would be computed, bit by bit where attmemo's own
kernels compute; elsewhere up to rounding. Nothing guards the answers.
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
from attmemo.packed.prefixes import Embedded, Folded
from attmemo.packed.runner import Packed
from attmemo.packed.stack import Stack, unfold
from attmemo.prefix.pages import BEGIN, Pages


class PrefixRows(Stack):
    """Serves a stack of causal blocks, and what is stored of its sequences' first rows.

    Parameters
    ----------
    blocks : Blocks
    packed : Packed
    store : Pages
    root : int
        Where keys begin in the store: each namespace has a place of its own.
    """

    name: ClassVar[str] = "prefix"

    def __init__(self, blocks: Blocks, packed: Packed, store: Pages, root: int = BEGIN) -> None:
        super().__init__(blocks, packed)
        self.store, self.root, self.shares = store, root, True

    def _folded(self, call: Call, spans: Spans, forward: Forward, twins: Twins, start: float) -> Tensor | None:
        if forward.whole or forward.packed is not None:  # no record, or rows of another arithmetic
            return super()._folded(call, spans, forward, twins, start) if self.blocks.has_prefixes else None
        store, embedded, own = self.store, Embedded(call.hidden, spans.lengths, spans.left), np.flatnonzero(twins.own)
        lease = store.find(embedded, own, self.root)
        try:
            plan = store.plan(lease, embedded, own)
            planned = perf_counter()
            found = self._compute_folded(
                call, plan.folded, forward,
                (lambda number: store.layer(number, len(own))) if lease.read else None, plan.copies,
            )  # fmt: skip
            done = perf_counter()
            store.publish(lease)
            output = self._spread(found, plan.folded, call)
        finally:
            store.give_back(lease)
        twins.spread(output)
        lengths = np.array(spans.lengths) - plan.stored
        lengths[~twins.own] = 0
        self._count(
            spans.lengths, lengths, twins, forward, fetch=planned - start, blocks=done - planned,
            shared=plan.shared, stored=int(plan.stored.sum()),
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


class LocalRows(PrefixRows):
    """Serves a stack of blocks that are all local, and what is stored of its sequences."""

    name: ClassVar[str] = "local"
