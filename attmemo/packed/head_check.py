"""Which of the last hidden states a model's head reads: found out by leaving all but the first rows out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attmemo.forward.batch_slices import tensors_in
from attmemo.forward.trial import Handle, enable_within
from attmemo.models import Adapter
from attmemo.models.check import checking, difference
from attmemo.packed.stack import Stack

_ROUNDED = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Greatest difference, relative to the range: fewer rows are computed in another order."""


def reads_first_row(handle: Handle, adapter: Adapter, model: nn.Module) -> bool:
    """Whether everything that a model gives out depends on the first rows of its last hidden states alone.

    A small padded batch is served twice: with all rows, and with first rows alone, where all others are NaN. A head
    that reads one of these gives NaN. A model without a head gives them out itself. Whole numbers and other objects
    cannot be NaN: a model that gives out such is not trusted.
    """
    if adapter.host(model) is model:
        return False
    inputs, _ = adapter.sample(model)
    stack = handle.engine.reuse
    assert isinstance(stack, Stack)

    def answers(first: bool) -> tuple[list[Tensor], int]:
        with checking(model, "a small batch cannot be answered") as undo, torch.inference_mode():
            enable_within(handle, undo)
            forward = undo.enter_context(handle.engine.open(first=first))
            return tensors_in(model(**inputs)) or [], forward.firsts

    try:
        (expected, _), (seen, firsts) = answers(False), answers(True)
    except Exception:  # a head that wants other arguments, or does not know the batch
        return False
    if firsts != 1 or not seen or any(not one.is_floating_point() for one in seen):
        return False
    if [one.shape for one in seen] != [one.shape for one in expected]:
        return False
    allowed = _ROUNDED[stack.packed.dtype]
    return all(difference(*pair) <= allowed for pair in zip(seen, expected, strict=True))
