"""The fast implementation for CPUs (native/cache_attention.c); until it is there, nothing."""

from __future__ import annotations

import torch

from attmemo.fastseq.ops import reference
from attmemo.fastseq.ops.arguments import Arguments


def why_not(a: Arguments) -> str | None:
    """Why this implementation cannot do the call, or None."""
    return "it is not built"


def attend(a: Arguments) -> torch.Tensor:
    """The operator."""
    return reference.attend(a)
