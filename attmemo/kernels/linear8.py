"""One linear layer in 8 bits: `native/linear.c` and its oracle in torch.

ROUNDING.  A row of x becomes codes from 0 to 255 with a scale and a zero point of its own, so its result does not
depend on other rows. A column of the weights becomes codes from -127 to 127 with a scale of its own. Sums of products
of codes are exact integers; scales, bias, activation and residual are computed in float32.

A ROW WITH A NUMBER THAT IS NOT FINITE gives a result of NaN in every column (plus the residual).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from attmemo.kernels.linear import AFTER, factor_of, stacked
from attmemo.kernels.packed_weights import LINE, MOST_INPUTS, PANEL, Numbers, Panels, Weights, columns_of

LinearName = Literal["exact", "int8"]
"""Arithmetic of linear layers: `Linear` or `Linear8`."""

TYPES: Final = (torch.float32, torch.bfloat16)


class Linear8(Panels):
    """``activation(x @ weight.T + bias)`` with weights and rows in 8 bits. See `Panels`."""

    arithmetic: ClassVar[int] = 1

    def _pack(self, weight: Tensor, bias: Tensor | None) -> Weights:
        codes, scales = rounded(weight)
        bias = scales.new_zeros(len(weight)) if bias is None else bias.detach().float()
        codes, scales, bias = (columns_of(part, self.gated) for part in (codes, scales, bias))
        sums = codes.sum(1, dtype=torch.int32)
        return _in_panels(codes), scales.numpy(), bias.numpy(), sums.numpy()

    @classmethod
    def _check(cls, weight: Tensor) -> None:
        if weight.dtype not in TYPES:
            raise ValueError(f"weights of 8-bit layers come from float32 or bfloat16, not {weight.dtype}")
        if weight.shape[1] > MOST_INPUTS:
            raise ValueError(f"8-bit layers have at most {MOST_INPUTS} inputs, not {weight.shape[1]}")


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 ``[out, in]`` and scales float32 ``[out]`` of a weight; NaN where a column is not finite."""
    weight = weight.detach().float()
    finite = weight.isfinite().all(1)
    scales = weight.abs().amax(1) / 127
    scales = torch.where(finite, scales.clamp_min(1e-30), torch.nan)
    codes = torch.where(finite[:, None], weight / scales[:, None], 0).round().to(torch.int8)
    return codes, scales


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes less their zero point ``[N, in]``, and scales ``[N, 1]``: float32; NaN where a row is not finite."""
    row = x.float()
    finite = row.isfinite().all(1, keepdim=True)
    row = torch.where(finite, row, 0)
    low, high = (found.clamp(*ends) for found, ends in
                 ((row.amin(1, True), (None, 0)), (row.amax(1, True), (0, None))))  # fmt: skip
    scale = (high / 255 - low / 255).clamp_min(1e-30)
    inverse = 1 / scale
    zero = (-low * inverse).round()
    coded = ((row * inverse).round() + zero).clamp_max(255)
    return coded - zero, torch.where(finite, scale, torch.nan)


def linear8_in_torch(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str = "none",
    add: Tensor | None = None, gated: bool = False,
) -> Tensor:  # fmt: skip
    """The same layer in torch, in the type of `x`: slow, and equal but for the rounding of float32."""
    weight, bias = stacked(weights, biases)
    codes, scales = rounded(weight)
    coded, scale = rounded_rows(x)
    line = F.linear(coded.double(), codes.double()).float() * (scale * scales)
    if bias is not None:
        line += bias.float()
    if gated:
        line, other = line.chunk(2, 1)
        line = AFTER[activation](line.contiguous()) * factor_of(other, activation)
    else:
        line = AFTER[activation](line)
    if add is not None:
        line += add.float()
    return line.to(x.dtype)


def _in_panels(codes: Tensor) -> Numbers:
    """``[columns / 64, inputs / 4, 64, 4]``, missing inputs filled with zeros."""
    codes = F.pad(codes, (0, -codes.shape[1] % LINE))
    panels = codes.view(-1, PANEL, codes.shape[1] // 4, 4).transpose(1, 2).contiguous()
    return panels.numpy()
