"""The self-check of reuse of rows: a small batch is served from records of its own sequences, through the hooks.

A record of the very input supplies what would have been computed, so the outputs must be those of packed blocks up to
the rounding of storage.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from attmemo.forward.plan import Plan, RowShare, Share
from attmemo.forward.trial import Handle, enable_within, not_served
from attmemo.models import Adapter, Rows, Spans
from attmemo.models.check import checking, difference, require
from attmemo.models.masks import valid_places
from attmemo.packed.check import allowed_for
from attmemo.packed.runner import Packed
from attmemo.rows.layout import Placed, RowLayout
from attmemo.rows.serve import Rows as RowReuse
from attmemo.rows.store import Ints, Record, RowStore, records_of

_ROUNDED = {torch.float32: 0.0, torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.int8: 6e-2}


def check_rows(
    handle: Handle, adapter: Adapter, model: nn.Module, storage: tuple[torch.dtype, torch.dtype], packed: Packed
) -> None:
    """Serve half of a few small sequences from records, and compare the last hidden states with packed blocks.

    Records have the types of `storage`: of K and V, and of the last hidden states.

    Raises
    ------
    AdapterCheckError
        The outputs differ. Nothing has been changed.
    """
    engine, reuse = handle.engine, handle.engine.reuse
    assert isinstance(reuse, RowReuse)
    inputs, lengths = adapter.sample(model)
    both = {
        name: torch.cat([value, value.roll(1, -1) if name == "input_ids" else value]) for name, value in inputs.items()
    }
    several = lengths + lengths
    with checking(model, "a small batch cannot be answered from records") as stack, torch.inference_mode():
        host = adapter.host(model)
        enable_within(handle, stack)
        found: list[Record] = []
        stack.callback(setattr, reuse, "keep", None)
        reuse.keep = lambda given, rows, last: found.extend(
            records_of(given, rows, last, storage, reuse.blocks.heads)
        )
        with engine.planned(Plan(spans=Spans(several), layers={0: Share.nothing(len(several))})):
            expected = host(**both)[0]
        reuse.keep = None
        before, reuse.store = reuse.store, _Held(replace(reuse.layout, storage=storage), found)
        stack.callback(setattr, reuse, "store", before)
        with engine.planned(_half(several)) as forward:
            seen = host(**both)[0]
        if len(forward.outcome.served) != len(lengths):  # known where records were read: a hit may be computed whole
            raise not_served("a small batch from records", engine)
    allowed = allowed_for(packed, model) + _ROUNDED[storage[0]]
    valid = valid_places(several, expected.shape[1])
    what = "the output of the blocks from rows of records differs from the original's"
    require(difference(seen[valid], expected[valid]), allowed, what)


class _Held(RowStore):
    """Records in memory, served as those of a database."""

    def __init__(self, layout: RowLayout, records: list[Record]) -> None:
        self._layout, self._records = layout, records

    def fetch(self, records: Ints) -> Placed:
        return Placed.copied(self._layout, [None if one < 0 else self._records[one] for one in records.tolist()])

    def close(self) -> None:
        self._records.clear()


def _half(lengths: list[int]) -> Plan:
    """The first half of the sequences is served: of three tokens two are supplied."""
    served = np.arange(len(lengths) // 2)
    record = np.where(np.arange(len(lengths)) < len(served), np.arange(len(lengths)), -1)
    parts = []
    for place, n in enumerate(lengths):
        own = np.arange(n, dtype=np.int32)
        parts.append(np.where((own % 3 == 0) | (place >= len(served)), np.int32(-1), own))
    share = RowShare(
        served, served, Rows.without(len(lengths), served), 0.0, np.concatenate(parts).astype(np.int32), record
    )
    return Plan(spans=Spans(lengths), layers={0: share})
