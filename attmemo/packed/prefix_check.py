"""The self-check of prefixes: sequences that begin alike, and again, give what they give whole."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attmemo.errors import AdapterCheckError
from attmemo.forward.trial import Handle, enable_within, not_served
from attmemo.models import Adapter
from attmemo.models.base import inputs_of
from attmemo.models.check import UNKNOWN, checking, require
from attmemo.packed.check import allowed_for, apart
from attmemo.packed.prefixes import CUT
from attmemo.packed.runner import Packed

_LENGTHS = (2 * CUT + 1, 3 * CUT, CUT + 5, 7)
_ALIKE = CUT + 3  # tokens that the first three begin with; but for a token they are different behind


def check_prefixes(handle: Handle, adapter: Adapter, model: nn.Module, packed: Packed, times: int = 1) -> None:
    """Serve a batch of sequences that begin alike, `times` times, and compare it with the original's.

    Raises
    ------
    AdapterCheckError
        The last hidden states differ; or prefixes were computed for each sequence. Nothing has been changed.
    """
    host, inputs = adapter.host(model), _sample(adapter, model)
    valid = inputs["attention_mask"].bool()
    rows = sum(_LENGTHS) - 2 * CUT
    with checking(model, "sequences that begin alike cannot be answered") as stack, torch.inference_mode():
        expected = host(**inputs)[0][valid]
        enable_within(handle, stack)
        before = handle.engine.counters.done.rows
        seen = [host(**inputs)[0][valid] for _ in range(times)]
        if not 0 < handle.engine.counters.done.rows - before <= rows * times:
            raise not_served("a batch of equal prefixes", handle.engine)
    what = "behind equal prefixes the output of the blocks differs from the original's"
    require(apart(packed, seen[-1], expected), allowed_for(packed, model), what)
    if packed.keeps_bits and not all(torch.equal(one, seen[0]) for one in seen):
        raise AdapterCheckError("rows of stored prefixes have other bits than computed ones.", UNKNOWN)


def _sample(adapter: Adapter, model: nn.Module) -> dict[str, Tensor]:
    inputs = inputs_of(adapter.host(model).config, _LENGTHS)
    ids = inputs["input_ids"]
    ids[1:3, :_ALIKE] = ids[0, :_ALIKE]
    return inputs
