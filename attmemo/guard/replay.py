"""A part of a forward, run again: exactly, or from last hidden states of records."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from attmemo.forward.batch_slices import take
from attmemo.forward.context import Forward, Outcome
from attmemo.forward.engine import Engine
from attmemo.guard.asking import Asking
from attmemo.guard.deferred import Inputs, Model


def replay(engine: Engine, asking: Asking, **given: Any) -> AbstractContextManager[Forward]:
    """While inside, forwards compute a part of another one again; `given` are fields of `Forward`."""
    return engine.open(asking=asking, repeats=True, **given)


def run_again(
    engine: Engine, forward: Model, inputs: Inputs, batch: int, places: list[int], last: Tensor | None = None
) -> tuple[Any, Outcome]:
    """Return the output for some sequences of a batch, and what blocks did.

    The sequences are computed whole, or from these last hidden states ``[b, L, H]``.
    """
    args, kwargs = take(inputs, torch.tensor(places), batch)
    with replay(engine, Asking(), last=last) as opened:
        return forward(*args, **kwargs), opened.outcome
