"""Blocks with norms behind them, one behind the other, in one native call: `native/chain.c`.

Its oracle is the same blocks as calls of their layers and of `attend`: the numbers are the same, bit by bit.

WHAT IT GAINS.  The five calls of a block take 0.2 ms to ask for, whatever they compute, and each of them waits for the
interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from attmemo.kernels import _chain as native
from attmemo.kernels.packed_weights import PANEL, Panels
from attmemo.kernels.row_attention import Attend, Disentangled, Layout, Stored
from attmemo.kernels.row_sinks import Copies


@dataclass(frozen=True)
class Link:
    """One block. All layers are of one kind; of the norms each stands behind the layer before it."""

    qkv: Panels
    out: Panels
    norm: nn.LayerNorm
    up: Panels
    down: Panels
    last_norm: nn.LayerNorm

    @property
    def layers(self) -> tuple[tuple[Panels, nn.LayerNorm | None], ...]:
        return (self.qkv, None), (self.out, self.norm), (self.up, None), (self.down, self.last_norm)


class Chain:
    """Blocks of an encoder, for inference. Several threads may call one instance.

    Parameters
    ----------
    links : sequence of Link
        Weights of norms are copied: those of a model may move.
    heads, width : int
        Heads of the attention, and numbers of each.
    isa : str
        Of the linear layers, as in `Panels`.

    Raises
    ------
    ValueError
        The layers do not fit each other.
    """

    def __init__(self, links: Sequence[Link], heads: int, width: int, isa: str = "") -> None:
        layers = [pair for link in links for pair in link.layers]
        first = links[0].up
        if len({(type(layer), layer.dtype) for layer, _ in layers}) != 1:
            raise ValueError("all layers must be of one kind and type")
        if links[0].out.inputs != heads * width:
            raise ValueError(f"{heads} heads of {width} numbers do not fit a layer with {links[0].out.inputs} inputs")
        self._links, self._up, self._heads = tuple(links), first, heads
        self._norms: list[Tensor] = []
        self._native = native.prepare(
            tuple(
                (layer.inputs, layer.outputs, layer.kind[1], layer.weights, self._copied(layer, norm))
                for layer, norm in layers
            ),
            (first.arithmetic, first.kind[0], isa),
        )

    def _copied(self, layer: Panels, norm: nn.LayerNorm | None) -> tuple[int, int, float]:
        """What `layer.norm_of` gives, of a copy that stays where it is."""
        weight, bias, eps = layer.norm_of(norm)
        if norm is None:
            return weight, bias, eps
        parts = [None if part is None else part.detach().clone() for part in (norm.weight, norm.bias)]
        self._norms += [part for part in parts if part is not None]
        weight, bias = (0 if part is None else part.data_ptr() for part in parts)
        return weight, bias, eps

    def __call__(
        self, hidden: Tensor, layout: Layout, *, scale: float, table: Tensor | None = None,
        stored: Callable[[int], Stored | None] | None = None,
        disentangled: Callable[[int], Disentangled | None] | None = None, keep: Copies | None = None,
        asked: npt.NDArray[np.int64] | None = None, threads: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Last hidden states ``[N, H]`` of packed rows ``[N, H]``, any strides; ``[W, H]`` of those asked for.

        Parameters
        ----------
        layout, scale, table
            As in `attend`, of all blocks.
        stored, disentangled : callable
            Give for the number of a block what `attend` gets. None: nothing.
        keep : Copies
            Gets K and V ``[N, heads * width]`` of each block, and the result.
        asked : int64 [W]
            The rows that the result has; they rise. Of the others the last block computes K and V. None: all.
        threads : int, optional
            None: as many as torch uses.

        Raises
        ------
        ValueError, MemoryError
            As `Panels` and `attend` do.
        """
        up, threads = self._up, torch.get_num_threads() if threads is None else threads
        hidden = up.rows_of(hidden)
        rows, size = len(hidden), self._links[0].out.inputs
        some = rows if asked is None else len(asked)  # of the result
        count = 1 if stored is None and disentangled is None else len(self._links)
        part = hidden.new_empty(rows, 3 * size)  # Q, K and V of one block after the other
        queries, keys, values = part[:, :size], part[:, size : 2 * size], part[:, 2 * size :]
        context, mixed, after = [hidden.new_empty(rows, width) for width in (size, up.inputs, up.inputs)]
        middle = hidden.new_empty(rows, up.outputs) if up.are_two_calls(rows, threads) else None
        calls: list[Attend] = []
        for number in range(count):
            records = None if stored is None else stored(number)
            terms = None if disentangled is None else disentangled(number)
            calls.append(calls[0].of(records, terms) if calls else Attend(
                queries, keys, values, self._heads, layout, scale=scale, table=table, out=context, threads=threads,
                stored=records, disentangled=terms,
            ))  # fmt: skip
        ending: Any = None
        if asked is not None:
            picked, wanted = hidden.new_empty(some, up.inputs), hidden.new_empty(some, size)
            number, apart = len(self._links) - 1, size % PANEL == 0
            if apart:  # of the last block K and V alone
                pair = part.view(-1)[: 2 * size * rows].view(rows, 2 * size)
                keys, values = pair[:, :size], pair[:, size:]
            last = Attend(
                wanted, keys, values, self._heads, layout.asking(asked), scale=scale, table=table, out=context[:some],
                threads=threads, stored=None if stored is None else stored(number),
                disentangled=None if disentangled is None else disentangled(number),
            )  # fmt: skip
            between = hidden.new_empty(some, up.outputs) if up.are_two_calls(some, threads) else None
            addresses = (0 if t is None else t.data_ptr() for t in (picked, wanted, between))
            ending = asked, *addresses, apart, last.arguments
        copies = () if keep is None else keep.addresses(len(self._links), size, after[:some], asked)
        ways: Any = tuple([0 if t is None else t.data_ptr() for t in (context, mixed, middle, after)])
        native.run(
            self._native, (hidden.data_ptr(), hidden.stride(0) * hidden.itemsize, rows), part.data_ptr(),
            tuple([call.arguments for call in calls]), ending, copies, ways, threads,
        )  # fmt: skip
        return after[:some]
