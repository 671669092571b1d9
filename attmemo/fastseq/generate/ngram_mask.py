"""No n-gram twice: the score of each token that would complete a known n-gram becomes -inf.

FastSeq (arXiv 2106.04718), Algorithm 1. `ban_ngrams` is the C kernel: it writes the few banned scores in place.
`banned_mask` is its oracle in plain torch, for any device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attmemo.kernels import _ngram

_FORMS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float64: "float64"}


def banned_mask(scores: Tensor, tokens: Tensor, text: Tensor, size: int) -> Tensor:
    """Where `ban_ngrams` writes -inf in `scores` ``[R, V]``, in plain torch: bool ``[R, V]``.

    `tokens` int64 ``[R, T]`` are those of each sequence so far; the last ``size - 1`` begin the next n-gram. `text`
    int64 ``[R / k, S]`` has the banned n-grams, a row for k consecutive sequences (beams). `size` is at least 1.
    """
    rows, columns = scores.shape
    if tokens.shape[1] < size - 1 or text.shape[1] < size or rows == 0:
        return scores.new_zeros((rows, columns), dtype=torch.bool)
    group = rows // text.shape[0]
    windows = text.unfold(1, size, 1)  # [R / k, W, n]
    suffix = tokens[:, tokens.shape[1] - (size - 1) :].view(text.shape[0], group, 1, size - 1)
    matches = (windows[:, None, :, :-1] == suffix).all(-1).view(rows, -1)  # [R, W]
    last = windows[..., -1].repeat_interleave(group, 0)
    # A window without a match writes to an extra column: there it cannot unban the token of another window.
    last = torch.where(matches & (last >= 0) & (last < columns), last, columns)
    mask = scores.new_zeros((rows, columns + 1), dtype=torch.bool)
    return mask.scatter_(1, last, True)[:, :columns]


def takes(scores: Tensor, tokens: Tensor, text: Tensor) -> bool:
    """Whether the C kernel can do a call: tensors on the CPU, known types, whole rows without overlap, no tracing."""
    return (
        scores.device.type == tokens.device.type == text.device.type == "cpu"
        and scores.dtype in _FORMS
        and not scores.requires_grad
        and not torch.compiler.is_compiling()
        and (scores.shape[1] <= 1 or scores.stride(1) == 1)
        and (scores.shape[0] <= 1 or scores.stride(0) >= scores.shape[1])
    )


def ban_ngrams(scores: Tensor, tokens: Tensor, text: Tensor, size: int) -> None:
    """Set the scores in `banned_mask` to -inf, in place, for tensors that the kernel `takes`.

    Raises ValueError if shapes do not fit; nothing was written.
    """
    # numpy has no bfloat16. The kernel only needs the width of a score.
    items = scores.view(torch.int16) if scores.dtype == torch.bfloat16 else scores
    _ngram.ban_ngrams(items.numpy(), _contiguous_rows(tokens), _contiguous_rows(text), size, _FORMS[scores.dtype])


def _contiguous_rows(ids: Tensor) -> Any:
    contiguous = ids.shape[1] <= 1 or ids.stride(1) == 1
    apart = ids.shape[0] <= 1 or ids.stride(0) >= ids.shape[1]
    return (ids if contiguous and apart else ids.contiguous()).numpy()
