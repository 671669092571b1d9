"""The fast implementation for CPUs: the C kernel behind `attmemo.fastseq.serving.ops.cache_attention`."""

from __future__ import annotations

import torch

from attmemo.fastseq.serving.ops import cache_attention
from attmemo.fastseq.serving.ops.arguments import Arguments


def why_not(a: Arguments) -> str | None:
    """Why this implementation cannot do the call, or None."""
    return cache_attention.why_not(a.query, a.cache_planes, a.scale_planes)


def attend(a: Arguments, isa: str = "") -> torch.Tensor:
    """Store the new keys and values, then attend: ``[N, H, D]``. Parameters and errors as `cache_attention.attend`."""
    return cache_attention.attend(*a.tensors(), **a.settings(), isa=isa)
