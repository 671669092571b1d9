"""Forwards of a whole model in few calls, and the same through its modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from packed_models import host_of
from torch import Tensor, nn

from attmemo.forward.hooks import Hook, ModelHook
from attmemo.forward.plan import Plan


def hook_of(model: nn.Module) -> ModelHook:
    hook = host_of(model).__dict__["forward"]
    while isinstance(hook, Hook) and not isinstance(hook, ModelHook):  # others stand around it
        hook = hook.__wrapped__
    assert isinstance(hook, ModelHook)
    return hook


@contextmanager
def hooked(model: nn.Module) -> Iterator[None]:
    """Inside, all forwards go through the model's modules."""
    hook = hook_of(model)
    whole, hook.whole = hook.whole, None
    try:
        yield
    finally:
        hook.whole = whole


@contextmanager
def noted(model: nn.Module) -> Iterator[list[bool]]:
    """Inside, notes of each forward whether it was few calls."""
    hook, notes = hook_of(model), []
    whole = hook.whole
    assert whole is not None

    def note(args: Any, kwargs: Any) -> Any:
        output = whole(args, kwargs)
        notes.append(output is not None and not isinstance(output, Plan))
        return output

    hook.whole = note
    try:
        yield notes
    finally:
        hook.whole = whole


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: 0 and -0 differ, and NaN is what it is."""
    return tensor.contiguous().view(torch.uint8)


def assert_same(seen: Any, expected: Any) -> None:
    assert type(seen) is type(expected)
    assert list(seen) == list(expected)
    assert vars(seen).keys() == vars(expected).keys()
    for name in expected:
        assert torch.equal(bits(seen[name]), bits(expected[name])), name
        assert getattr(seen, name) is seen[name]
        assert seen[name].stride() == expected[name].stride()
