"""What attention does with the products of queries and keys, whichever way these were made."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax(scores: Tensor) -> Tensor:
    """In float32 at least, and back, as transformers does for half precision."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    return torch.softmax(scores, dim=-1, dtype=wide).to(scores.dtype)


def masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Scores with a bool mask (False: not seen) or an additive one applied."""
    if mask is None:
        return scores
    return scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
