"""The operator in plain torch, one sequence after the other, on any device: the oracle of `cache_attention`."""

from __future__ import annotations

import torch

from attmemo.fastseq.serving.ops import cache_attention
from attmemo.fastseq.serving.ops.arguments import Arguments


def attend(a: Arguments) -> torch.Tensor:
    """Store the new keys and values, then attend: ``[N, H, D]`` in the query's type."""
    return cache_attention.attend_in_torch(*a.tensors(), **a.settings())
