"""Feed-forward layers in parts, of which each row uses few: experts, chosen by a router.

Rows are sorted by expert, and each expert is two linear layers over its rows. A row's numbers depend on
this row alone: each step is a kernel of attmemo, or an operator of torch that treats each number, or each row, by
itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from attmemo.kernels.exact_layers import exact_layer
from attmemo.kernels.linear import Linear
from attmemo.kernels.packed_weights import Panels
from attmemo.models.blocks import Routed


class Experts:
    """The feed-forward part of one block, for inference.

    Parameters
    ----------
    routed : Routed
    parts : sequence of pairs
        Its parts, made ready.
    """

    def __init__(self, routed: Routed, parts: Sequence[tuple[Panels, Panels]]) -> None:
        self._routed, self._parts = routed, parts
        weights, biases = [routed.router.weight.detach().float()], [routed.router.bias.detach().float()]
        self._router = exact_layer(weights, biases) or Linear.of(weights, biases)

    @property
    def linears(self) -> list[tuple[Linear | Panels, tuple[nn.Module, ...]]]:
        """Each layer that was made ready, and the model's own."""
        pairs = zip(self._parts, self._routed.parts, strict=True)
        found = [(ready, (module,)) for own in pairs for ready, module in zip(*own, strict=True)]
        return [(self._router, (self._routed.router,)), *found]

    def __call__(self, x: Tensor, add: Tensor) -> Tensor:
        """Rows `x` ``[N, H]`` through their experts, plus the residual `add`: ``[N, H]``."""
        if not len(x):
            return add
        used = self._routed.used
        products, chosen = self._router(x.float()).topk(used, 1)
        weights, flat = products.softmax(1), chosen.flatten().numpy()
        order = np.argsort(flat, kind="stable")
        ends = np.cumsum(np.bincount(flat, minlength=len(self._parts)))
        rows = x.index_select(0, torch.from_numpy(order // used))
        found = torch.empty_like(rows)
        begin = 0
        for (up, down), end in zip(self._parts, ends.tolist(), strict=True):
            if end > begin:
                found[begin:end] = down(up(rows[begin:end]))
            begin = end
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        places = places.reshape(chosen.shape)
        total = torch.zeros_like(x, dtype=torch.float32)
        for turn in range(used):  # product and sum are operators of their own: no processor fuses them
            own = found.index_select(0, torch.from_numpy(places[:, turn])).float()
            total += own.mul_(weights[:, turn, None])
        return add + total.to(x.dtype)
