"""Linear layers for few rows on the CPU: the weight is read as the large left factor of the product.

A decoding step multiplies some rows with every weight once; what it costs is reading the weights. For the product
x Wᵀ with few rows MKL reads W at half the speed that it does for W xᵀ. Which of the two is taken changes the rounding,
as another batch size would.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MOST_ROWS = 32  # above, the usual order is as fast or faster
FEWEST_WEIGHTS = 2**19  # below, the weight stays in the cache and the order does not matter


class StreamedLinear(nn.Linear):
    """Stands for a `nn.Linear` in a private copy, and shares its parameters. Made by `streamed`."""

    def forward(self, input: Tensor) -> Tensor:
        """`[…, in]` to `[…, out]`."""
        rows = input.numel() // self.in_features
        if rows > MOST_ROWS:
            return F.linear(input, self.weight, self.bias)
        columns = input.reshape(rows, self.in_features).t()
        if self.bias is None:
            out = torch.mm(self.weight, columns)
        else:
            out = torch.addmm(self.bias.unsqueeze(1), self.weight, columns)
        return out.t().contiguous().view(*input.shape[:-1], self.out_features)


def streamed(linear: nn.Module) -> StreamedLinear | None:
    """A stand-in for a linear layer where one pays: plain, on the CPU, in float32, large. Else None."""
    # A quantized weight is a tensor of another class, which may not know these products.
    if type(linear) is not nn.Linear or type(linear.weight) is not nn.Parameter:
        return None
    if linear.weight.numel() < FEWEST_WEIGHTS:
        return None
    if linear.weight.device.type != "cpu" or linear.weight.dtype != torch.float32:
        return None
    twin = StreamedLinear.__new__(StreamedLinear)
    twin.__dict__.update(vars(linear))
    return twin
