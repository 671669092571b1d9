"""One linear layer in float32: `native/linear.c`. Its oracle is `torch.nn.functional.linear`.

THE LIMIT of many rows is arithmetic; of few rows, reading the weights once. oneDNN reaches 85 % of the first, as this
kernel does, and is far from the second. The four layers of a block of width 384, six blocks one behind the other, on
two cores with AVX-512, how many times as fast as `attmemo.kernels.linear.Linear`:

    rows                1     16     32     64     96    192    400   1536
    one thread        2.0    1.4    1.3    1.1    1.1   0.95    1.0    1.0
    two threads       2.3    1.7    1.3    1.2    1.2    1.1    1.0   0.95

Reused rows leave few rows to compute, and a single request has few: both are on the left.

ROADS NOT TAKEN, none of them faster beyond noise: 12 or 14 rows of 32 columns in registers in place of 6 of 64; 64 to
192 inputs at a time, which keep a part of a panel in the first cache; asking for the next panel while this one is
multiplied; tasks of 96 or 192 rows.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from attmemo.kernels.packed_weights import PANEL, ExactPanels, Weights, columns_of

_EMPTY = np.zeros(0, np.float32)


class Linear32(ExactPanels):
    """``activation(x @ weight.T + bias)`` in float32. See `Panels`."""

    arithmetic: ClassVar[int] = 0
    taken = torch.float32

    def _pack(self, weight: Tensor, bias: Tensor | None) -> Weights:
        panels = columns_of(weight, self.gated).view(-1, PANEL, self.inputs).transpose(1, 2)
        bias = columns_of(weight.new_zeros(len(weight)) if bias is None else bias, self.gated)
        return panels.contiguous().numpy(), _EMPTY, bias.numpy(), _EMPTY
