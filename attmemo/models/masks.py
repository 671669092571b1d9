"""Reading attention masks: where the valid tokens lie, and whether only padding is masked.

The whole mask is compared with the mask that the family's layers get for these tokens. A mask that differs in one
bit (packed sequences, the user's own mask) keeps the call exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

_AT_ONCE: Final = 1 << 18
"""Numbers of a mask."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Valid tokens of each sequence: the first ``lengths[i]``, or the last if padding is on the left."""

    lengths: list[int]
    left: bool = False

    def to_front(self, hidden: Tensor) -> Tensor:
        """``[B, L, H]`` with valid tokens first."""
        return _turned(hidden, hidden.shape[1] - torch.tensor(self.lengths)) if self.left else hidden

    def to_back(self, hidden: Tensor) -> Tensor:
        """The reverse of `to_front`."""
        return _turned(hidden, torch.tensor(self.lengths)) if self.left else hidden


def valid_places(lengths: Sequence[int], padded: int) -> npt.NDArray[np.bool_]:
    """Which places of a batch padded on the right hold tokens, ``[B, L]``."""
    found: npt.NDArray[np.bool_] = np.arange(padded)[None] < np.asarray(lengths)[:, None]
    return found


def spans_of(valid: Tensor) -> Spans | None:
    """Spans of a ``[B, L]`` boolean tensor; None if a sequence is empty, has a gap, or has padding on both sides."""
    seen = valid.numpy()  # a forward of few tokens waits longer for torch's operators than for all of this
    counts = seen.sum(-1)
    lengths: list[int] = counts.tolist()
    padded = seen.shape[-1]
    if min(lengths, default=0) == 0:
        return None
    if min(lengths) == padded or np.array_equal(valid_places(lengths, padded), seen):
        return Spans(lengths)
    if np.array_equal(np.arange(padded) >= padded - counts[:, None], seen):
        return Spans(lengths, left=True)
    return None


def read_mask(mask: Any, batch: int, length: int, causal: bool = False, window: int | None = None) -> Spans | None:
    """Spans of a mask that transformers made; None for any other mask.

    `mask` is ``[B or 1, 1, L or 1, L]``: boolean (True attends), or numbers added to scores (0 attends, the type's
    lowest value does not); None: no padding. `window` is how far a token sees in sliding attention: itself and
    ``window - 1`` tokens back, if not `causal` also ahead.
    """
    if mask is None:
        return Spans([length] * batch) if window is None or window >= length else None
    if not isinstance(mask, Tensor):  # a BlockMask of flex attention
        return None
    rows, heads, queries, keys = mask.shape if mask.dim() == 4 else (0, 0, 0, 0)
    if rows not in (1, batch) or heads != 1 or queries not in (1, length) or keys != length:
        return None
    if mask.shape[-2] == 1 or mask.stride(-2) == 0:  # the same for all queries: read one
        mask = mask[:, :, :1]
    allowed = _allowed(mask)
    if allowed is None:
        return None
    allowed = allowed[:, 0]  # [B or 1, L or 1, L]
    if allowed.shape[1] == 1:
        if causal and length > 1:
            return None
        valid = allowed[:, 0]
    else:
        valid = allowed.diagonal(dim1=1, dim2=2)  # a valid token sees itself, and no token sees padding
    spans = spans_of(valid.expand(batch, length))
    if spans is None:
        return None
    if allowed.shape[1] == 1:
        return spans if window is None or window >= length else None
    own, seen = valid.numpy(), allowed.numpy()  # NumPy: torch compares bytes that are broadcast one by one
    band = _band(length, causal, window) if causal or window is not None else None
    some = max(1, _AT_ONCE // (len(own) * length))  # of a long text what is compared stays in a cache
    for first in range(0, length, some):
        part = slice(first, first + some)
        wanted = own[:, None, :] if band is None else own[:, None, :] & band[part]
        same = seen[:, part] == wanted
        if not same.all() and not (same | ~own[:, part, None]).all():  # rows of padding do not matter
            return None
    return spans


def _band(length: int, causal: bool, window: int | None) -> npt.NDArray[np.bool_]:
    """Which keys a query sees by its distance, ``[L, L]``: a view of one line of numbers."""
    ahead = np.arange(1 - length, length)  # key position minus query position
    seen = ahead <= 0 if causal else np.ones(len(ahead), np.bool_)
    if window is not None:
        seen &= abs(ahead) < window
    return np.lib.stride_tricks.as_strided(seen[length - 1 :], (length, length), (-1, 1), writeable=False)


def adds_booleans(module: nn.Module, mask: Any) -> bool:
    """Whether attention adds this boolean mask to its scores, as the numbers 0 and 1: eager attention does."""
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        return False
    configs = (inner.config for inner in module.modules() if hasattr(inner, "config"))
    return getattr(next(configs, None), "_attn_implementation", None) == "eager"


def consecutive(positions: Tensor | None, spans: Spans, length: int) -> bool:
    """Whether positions ``[B or 1, L]`` count up by one over the valid tokens."""
    if positions is None:
        return True
    if positions.dim() != 2 or positions.shape[-1] != length or positions.shape[0] not in (1, len(spans.lengths)):
        return False
    steps = positions.diff() == 1  # [B or 1, L - 1]
    if bool(steps.all()):
        return True
    rows = zip(steps.expand(len(spans.lengths), -1), spans.lengths, strict=True)
    return all(bool((row[length - n :] if spans.left else row[: n - 1]).all()) for row, n in rows)


def _allowed(mask: Tensor) -> Tensor | None:
    """The mask as a boolean, True where it attends; None if the mask adds other numbers."""
    if mask.dtype is torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    attends = mask == 0
    # Numbers in between are an unknown bias.
    return attends if bool((attends | (mask <= torch.finfo(mask.dtype).min / 2)).all()) else None


def _turned(hidden: Tensor, by: Tensor) -> Tensor:
    batch, length = hidden.shape[:2]
    places = (torch.arange(length)[None] + by[:, None]) % length
    return hidden[torch.arange(batch)[:, None], places]
