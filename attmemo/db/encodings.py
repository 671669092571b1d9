"""How numbers are stored: types of slots, and maps in fewer bytes; `unpack` is the oracle of `native/map_product.c`.

The 8-bit form stores ``q = round(top * cbrt(p / max(row)))`` and reads ``p = q^3 / sum(q^3)``: the root spends its
steps on small entries, where most are, and rows sum to one by construction. Each row takes the `top` of 255 to 248
that loses least. Mean similarity of a map to its 8-bit form, over real maps of six logs: 0.9980 to 0.9985 (with 255
for all rows 0.9977 to 0.9981; square root 0.9971 to 0.9985, fourth root 0.9976 to 0.9982, linear with a scale per row
0.987 to 0.996). A causal map is zero above its diagonal; only the lower triangle is stored, row after row.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

TYPES: Final = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "uint8": torch.uint8, "int8": torch.int8, "float8_e4m3": torch.float8_e4m3fn, "int32": torch.int32,
}  # fmt: skip
"""Number types that a slot may have, by the name in the manifest."""

# The greatest probability of a row is stored as one of these. A reader divides rows by their sum.
TOPS: Final = range(255, 247, -1)
# Choices of storage: the types of maps and of hidden states. Only training and indexing read hidden states in 8 bits:
# the loss of mantissa disappears in their means.
STORAGE: Final = {name: (name, name) for name in ("float32", "bfloat16", "float16")}
STORAGE["uint8"] = ("uint8", "float8_e4m3")
# Choices of storage of rows: the types of K and V, and of the last hidden states.
ROW_STORAGE: Final = {name: (name, name) for name in ("float32", "bfloat16", "float16")}
ROW_STORAGE["int8"] = ("int8", "bfloat16")


def row_types(storage: str) -> tuple[torch.dtype, torch.dtype]:
    """The types of K and V, and of the last hidden states, of a choice in `ROW_STORAGE`."""
    of_rows, of_last = ROW_STORAGE[storage]
    return TYPES[of_rows], TYPES[of_last]


def length_of(shape: tuple[int, ...]) -> int:
    """Tokens n of maps stored as ``[h, n, n]``, or as lower triangles ``[h, n (n + 1) / 2]``."""
    return (math.isqrt(8 * shape[-1] + 1) - 1) // 2 if len(shape) == 2 else shape[-1]


def pack(apm: Tensor, dtype: str, causal: bool) -> Tensor:
    """A map ``[h, n, n]`` as it is stored in a type of `TYPES`; contiguous, on the CPU."""
    apm = apm.detach().to("cpu")
    if TYPES[dtype] == torch.uint8:
        apm = _to_roots(apm.to(torch.float32))
    apm = apm.to(TYPES[dtype])
    if causal:
        rows, columns = torch.tril_indices(apm.shape[-1], apm.shape[-1])
        apm = apm[:, rows, columns]
    return apm.contiguous()


def _to_roots(apm: Tensor) -> Tensor:
    """The q of each number, [h, n, n]: of the scales in `TOPS`, each row takes the one that loses least."""
    found = torch.empty_like(apm)
    q, read = torch.empty_like(apm[0]), torch.empty_like(apm[0])
    for head, best in zip(apm, found, strict=True):  # one at a time: it stays in the cache
        # A row without any probability would divide by zero; it stays zero, and reads as not a number.
        most = head.amax(-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny)
        roots = (head / most).pow_(1.0 / 3.0)
        least = torch.full_like(most, torch.inf)
        torch.mul(roots, TOPS[0], out=best).round_()
        for top in TOPS:
            torch.mul(roots, top, out=q).round_()
            torch.mul(q, q, out=read).mul_(q)
            read.mul_(read.sum(-1, keepdim=True).reciprocal_()).sub_(head)
            lost = torch.linalg.vector_norm(read, ord=1, dim=-1, keepdim=True)  # twice the total variation distance
            better = (lost < least).squeeze(-1)
            best[better] = q[better]
            least = torch.minimum(lost, least)
    return found


def quantize(rows: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Codes int8 ``[..., n, h * d]`` of rows, and a scale for each row and head, float32 ``[..., n, h]``.

    A number is its code times its scale. The largest number of a row and head has code 127 or -127.
    """
    parts = rows.float().unflatten(-1, (heads, -1))  # type: ignore[no-untyped-call]
    scales = parts.abs().amax(-1) / 127
    codes = (parts / scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).round_()
    return codes.to(torch.int8).flatten(-2), scales


def unpack(stored: Tensor) -> Tensor:
    """The map ``[h, n, n]`` in a stored one: float32 from 8 bits, else its own type, a view if it is stored whole."""
    apm = stored
    if stored.dim() == 2:
        length = length_of(tuple(stored.shape))
        apm = stored.new_zeros(stored.shape[0], length, length)
        rows, columns = torch.tril_indices(length, length)
        apm[:, rows, columns] = stored
    if stored.dtype == torch.uint8:
        apm = apm.to(torch.float32).pow_(3)
        apm = apm / apm.sum(-1, keepdim=True)
    return apm
