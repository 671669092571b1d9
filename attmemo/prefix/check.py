"""The self-check of local rows: a text of which another token is at the end, and again, gives what it gives whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from attmemo.errors import AdapterCheckError
from attmemo.forward.trial import Handle, enable_within, not_served
from attmemo.models import Adapter
from attmemo.models.base import inputs_of
from attmemo.models.check import UNKNOWN, checking, require
from attmemo.packed.check import allowed_for, apart
from attmemo.packed.prefixes import CUT
from attmemo.packed.runner import Packed


def check_local(
    handle: Handle, adapter: Adapter, model: nn.Module, packed: Packed, reach: int, room: int
) -> None:  # fmt: skip
    """Serve a text, one that ends otherwise, and this again; compare with the original's. `room`: tokens to store.

    Raises
    ------
    AdapterCheckError
        The last hidden states differ; or rows that are farther away than the reach were computed again. Nothing has
        been changed.
    """
    host = adapter.host(model)
    config: Any = host.config
    length = min(reach + 2 * CUT + 5, room)
    most = getattr(config, "max_position_embeddings", None)
    inputs = inputs_of(config, [length if most is None else min(length, int(most))])
    other = {name: value.clone() for name, value in inputs.items()}
    other["input_ids"][0, -1] = (other["input_ids"][0, -1] + 1) % int(config.vocab_size)
    with checking(model, "a text that was edited cannot be answered") as stack, torch.inference_mode():
        expected = host(**other)[0]
        enable_within(handle, stack)
        host(**inputs)
        seen, rows = [], []
        for _ in range(2):
            before = handle.engine.counters.done.rows
            seen.append(host(**other)[0])
            rows.append(handle.engine.counters.done.rows - before)
        with handle.engine.open(whole=True):
            seen.append(host(**other)[0])
        tokens = other["input_ids"].shape[1]
        kept = max(0, tokens - 1 - reach) // CUT * CUT
        if rows != [tokens - kept, tokens % CUT]:
            raise not_served("a text that was edited", handle.engine)
    what = "behind an edit the output of the blocks differs from the original's"
    require(apart(packed, seen[0], expected), allowed_for(packed, model), what)
    if packed.keeps_bits and not all(torch.equal(one, seen[-1]) for one in seen):
        raise AdapterCheckError("stored rows have other bits than computed ones.", UNKNOWN)
