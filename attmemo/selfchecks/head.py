"""Which of the last hidden states a model's head reads: found out by leaving all but the first rows out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from attmemo.adapters import Adapter
from attmemo.adapters.check import checking, difference
from attmemo.errors import AdapterCheckError
from attmemo.reuse.packed import Packed
from attmemo.selfchecks import Handle, enable_within
from attmemo.selfchecks.blocks import allowed_for


class _Handle(Handle, Protocol):
    first_row: bool


def reads_first_row(handle: _Handle, adapter: Adapter, model: nn.Module, packed: Packed) -> bool:
    """Whether everything that a model gives out depends on the first rows of its last hidden states alone.

    A small padded batch is served twice: with all rows, and with first rows alone, where all others are NaN. A head
    that reads one of these gives NaN. A model without a head gives them out itself.
    """
    if adapter.host(model) is model:
        return False
    inputs, _ = adapter.sample(model)
    try:
        with checking(model, "a small batch cannot be served") as stack, torch.inference_mode():
            stack.callback(setattr, handle, "first_row", False)
            outputs = []
            for handle.first_row in (False, True):
                enable_within(handle, stack)
                outputs.append(list(_numbers(model(**inputs))))
                handle.disable()
    except AdapterCheckError:  # a head that wants other arguments
        return False
    expected, seen = outputs
    allowed = allowed_for(packed, model)
    if [one.shape for one in seen] != [one.shape for one in expected]:
        return False
    return len(seen) > 0 and all(difference(*pair) <= allowed for pair in zip(seen, expected, strict=True))


def _numbers(output: Any) -> Iterator[Tensor]:
    """All tensors of numbers in a model's output."""
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.numel():
            yield output
    elif isinstance(output, Mapping | tuple | list):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _numbers(part)
