"""Blocks of an encoder over packed rows: the valid tokens of all sequences, one behind the other, without padding.

The limit. The work of a block is its linear layers, 24 H² operations a row for a feed-forward size of 4 H, and
attention, 4 n H a row. A padded batch computes ``B·L`` rows; the packed one computes the valid ones, and attention
looks at valid keys only.

Q, K and V are one product, and the attention kernel reads its rows where they lie. Residuals and activations are added
inside of the linear layers' kernels.

Every row is the model's own arithmetic up to rounding: nothing here approximates, but for linear layers in 8 bits,
where the caller asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from attmemo.kernels.encoder_stack import Chain, Link, positions_of
from attmemo.kernels.exact_layers import exact_layer
from attmemo.kernels.linear import Linear, grid_rows
from attmemo.kernels.linear8 import Linear8, LinearName
from attmemo.kernels.norms import norm_of
from attmemo.kernels.packed_weights import Panels
from attmemo.kernels.pages import Slab, keep_freed_memory
from attmemo.kernels.row_attention import Disentangled, Layout, Stored, Turn, attend
from attmemo.kernels.row_sinks import Copies
from attmemo.models.blocks import Block, Blocks, Routed
from attmemo.models.projections import is_plain
from attmemo.packed.experts import Experts

TYPES = (torch.float32, torch.bfloat16)
"""Number types of models whose blocks can be packed."""

_ACTIVATIONS = {"GELUActivation": "gelu", "GELUTanh": "gelu_tanh", "NewGELUActivation": "gelu_tanh", "ReLU": "relu",
                "SiLUActivation": "silu", "SiLU": "silu", "QuickGELUActivation": "quick_gelu"}  # fmt: skip

Ints = npt.NDArray[np.int64]
Fetch = Callable[[int], Stored | None]
"""K and V of records in a layer; None if no sequence has a record."""


class Packed:
    """The blocks of one model with their weights made ready. The original weights stay where they are.

    Parameters
    ----------
    blocks : Blocks
    dtype : torch.dtype
        Of the model.
    linear : {"exact", "int8"}
        Arithmetic of the linear layers. In 8 bits they are `Linear8` layers.
    """

    def __init__(self, blocks: Blocks, dtype: torch.dtype, linear: LinearName = "exact") -> None:
        self.blocks, self.dtype, self.linear = blocks, dtype, linear
        keep_freed_memory()
        shared = {block: _Layer(block, linear, blocks.rotary) for block in dict.fromkeys(blocks.blocks)}
        self._layers = [shared[block] for block in blocks.blocks]  # one block may run several times
        self._on_grid = dtype == torch.bfloat16 and any(isinstance(linear, Linear) for _, linear, _ in self.linears)
        self._spans: dict[int, Positions] = {}
        panels = [ready for _, ready, _ in self.linears if isinstance(ready, Panels)]
        slab = Slab(sum(ready.slab_bytes for ready in panels))
        for ready in panels:  # one by one: weights are never in memory three times
            ready.move(slab)
        links = [link for layer in self._layers if (link := layer.link) is not None]
        self._chain: Chain | None = None  # all blocks in one call
        if len(links) == len(self._layers):
            self._chain = Chain(links, blocks.heads, blocks.width, blocks.key_heads, causal=blocks.causal)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that were made ready, beside the model's own."""
        return self.blocks.nbytes + sum(linear.nbytes for _, linear, _ in self.linears)

    @property
    def linears(self) -> list[tuple[int, Ready, tuple[nn.Module, ...]]]:
        """Each layer that was made ready: number of its first block, the layer, and the model's own layers in it."""
        first = {layer: number for number, layer in reversed(list(enumerate(self._layers)))}
        return [(number, *pair) for layer, number in reversed(first.items()) for pair in layer.linears]

    @property
    def keeps_bits(self) -> bool:
        """Whether a row's numbers do not depend on the rows beside it: torch's own layers round by their number."""
        own = self.is_routed and all(isinstance(ready, Panels) for _, ready, _ in self.linears)
        return own or self._chain is not None

    @property
    def is_routed(self) -> bool:
        """Whether rows choose the layers that they go through."""
        return any(block.routed is not None for block in self.blocks.blocks)

    def run(
        self, hidden: Tensor, layout: Layout, longest: int, fetch: Fetch | None = None,
        keep: Copies | None = None, added: Tensor | None = None, asked: Ints | None = None,
    ) -> Tensor:  # fmt: skip
        """Last hidden states ``[N, H]`` of packed rows, or ``[W, H]`` of those asked for.

        Parameters
        ----------
        hidden : Tensor
            Embedded rows, ``[N, H]``.
        layout : Layout
            Where the rows and their keys lie.
        longest : int
            Tokens of the longest sequence.
        fetch : Fetch, optional
            Gives the rows of records.
        keep : Copies, optional
            Where K and V ``[N, H]`` of each block go, and the result.
        added : Tensor, optional
            ``[N, H]``, added to what the first block gives.
        asked : int64 [W], optional
            The rows that the result has; they rise. Of the others the last block computes K and V alone.
        """
        rows = len(hidden)
        if not rows:  # records supply everything
            return hidden
        if self._chain is not None and added is None:
            known = self.positions(longest)
            return self._chain(
                hidden, layout, scale=self.blocks.scale, table=known.tables, angles=known.angles, stored=fetch,
                turn=known.turn if self.blocks.rotary else None, keep=keep, asked=asked,
                disentangled=known.disentangled if known.is_disentangled else None,
            )  # fmt: skip
        run = grid_rows(rows) if self._on_grid else rows
        if run != rows:  # once here, not once in each linear layer; rows of zeros stay behind the others
            hidden = torch.cat((hidden, hidden.new_zeros(run - rows, hidden.shape[1])))
        known = self.positions(longest)
        angles = Angles(known, layout)
        for number in range(len(self._layers)):
            stored = None if fetch is None else fetch(number)
            ending = asked if number == len(self._layers) - 1 else None
            hidden = self.block(number, hidden, layout, known, angles, stored, keep, ending)
            if number == 0 and added is not None:
                added = added if ending is None else added[torch.from_numpy(ending)]
                hidden[: len(added)] += added
                hidden = _norm(self.blocks.added_norm, hidden)
        rows = rows if asked is None else len(asked)
        if keep is not None:
            keep.end(hidden[:rows], asked)
        return hidden[:rows]

    def block(
        self, number: int, hidden: Tensor, layout: Layout, known: Positions, angles: Angles,
        stored: Stored | None = None, keep: Copies | None = None, asked: Ints | None = None,
    ) -> Tensor:  # fmt: skip
        """One block: ``[M, H]`` to ``[M, H]``. Only the first N rows are those of `layout`; `asked`: to ``[W, H]``."""
        layer, blocks, rows = self._layers[number], self.blocks, int(layout.starts[-1])
        block = layer.block
        projected = layer.qkv(_norm(block.before, hidden))
        size, key_size = blocks.heads * blocks.width, blocks.key_heads * blocks.width
        queries, keys, values = projected.tensor_split((size, size + key_size), 1)
        for heads, norm in ((queries, block.query), (keys, block.key)):
            if norm is not None:
                heads.copy_(_norm(norm, heads.reshape(len(heads), -1, blocks.width)).flatten(1))
        turned = angles.of(block.kind)
        if turned is not None:
            _rotate(projected[:rows, : size + key_size], *turned, blocks.width)
        if keep is not None:
            keep(number, keys[:rows], values[:rows])
        queries, given = queries[:rows], layout
        if asked is not None:
            wanted = torch.from_numpy(asked)
            queries, hidden, given = queries[wanted], hidden[wanted], layout.asking(asked)
        context = projected.new_empty(len(hidden), size)
        context[len(queries) :] = 0
        turn = known.turn(block.kind) if stored is not None and not stored.still and blocks.rotary else None
        attend(
            queries, keys[:rows], values[:rows], blocks.heads, given, out=context[: len(queries)],
            scale=blocks.scale, stored=stored, turn=turn, table=known.table(number), window=block.window,
            disentangled=known.disentangled(number), causal=blocks.causal, sinks=block.sinks,
        )  # fmt: skip
        hidden = layer.mixed(context, hidden)
        if layer.routed is not None:
            return layer.routed(_norm(block.before_feed, hidden), hidden)
        inner = layer.up(_norm(block.before_feed, hidden))
        if layer.gates:
            half = inner.shape[1] // 2
            inner = layer.activate(inner[:, :half]).mul_(inner[:, half:])
        elif layer.activates:
            inner = layer.activate(inner)
        return layer.left(inner, hidden)

    def positions(self, longest: int) -> Positions:
        """What attention needs for sequences of up to so many tokens; made once for a power of two."""
        span = max(64, 1 << (longest - 1).bit_length())
        found = self._spans.get(span)
        if found is None:
            found = self._spans[span] = Positions(self.blocks, span)
        return found


class _Layer:
    """The linear layers of one block."""

    def __init__(self, block: Block, linear: LinearName, rotary: bool) -> None:
        self.block, self._rotary = block, rotary
        name = _ACTIVATIONS.get(type(block.activation).__name__)
        self.activate = block.activation
        self.qkv, self.out = _ready(block.qkv, linear), _ready((block.out,), linear)
        self.mixed = _normed(self.out, block.inner, block.behind)
        self.routed: Callable[[Tensor, Tensor], Tensor] | None = None  # in place of `up` and `down`
        self.experts = None if block.routed is None else _experts(block.routed, linear)
        if block.routed is not None:
            self.routed = _Original(block.routed.module) if self.experts is None else self.experts
        if block.down is None:
            return
        self.down = _ready((block.down,), linear)
        gated = None if name is None or not block.gated else _panels(block.up, linear, name, True)
        fused = name if name is not None and not block.gated and all(map(is_plain, block.up)) else "none"
        self.up = _ready(block.up, linear, fused) if gated is None else gated
        # Gate and activation are steps of their own.
        self.gates, self.activates = block.gated and gated is None, gated is None and fused == "none"
        self.left = _normed(self.down, block.inner_feed, block.behind_feed)

    @property
    def link(self) -> Link | None:
        """The block as a part of a chain, if nothing is between its five calls that is not in them."""
        block = self.block
        if block.down is None or block.sinks is not None:
            return None
        kind = type(self.up)
        parts = [part for part in (self.qkv, self.out, self.up, self.down) if isinstance(part, Panels)]
        if self.activates or any(type(part) is not kind for part in parts) or len(parts) != 4:
            return None
        norms = [None if norm is None else norm_of(norm) for norm in block.norms]
        if any(norm is None and given is not None for norm, given in zip(norms, block.norms, strict=True)):
            return None
        before, inner, behind, before_feed, inner_feed, behind_feed, query, key = norms
        qkv, out, up, down = parts
        return Link(
            qkv, out, up, down, before, inner, behind, before_feed, inner_feed, behind_feed, query, key,
            block.kind if self._rotary else None, block.window,
        )  # fmt: skip

    @property
    def linears(self) -> list[tuple[Ready, tuple[nn.Module, ...]]]:
        block = self.block
        found: list[tuple[Ready, tuple[nn.Module, ...]]] = [(self.qkv, block.qkv), (self.out, (block.out,))]
        if block.down is not None:
            return [*found, (self.up, block.up), (self.down, (block.down,))]
        if self.experts is not None:
            return [*found, *self.experts.linears]
        routed = () if block.routed is None else (block.routed.module,)
        return [*found, (Called(routed), routed)]


class Called:
    """Linear layers that are called as they are: a quantized layer keeps its weights to itself."""

    nbytes = 0

    def __init__(self, modules: tuple[nn.Module, ...]) -> None:
        self._modules = modules

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        found = torch.cat([module(x) for module in self._modules], 1)
        return found if add is None else found.add_(add)


Ready = Linear | Panels | Called


class _Original:
    """The model's own module in place of experts."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, x: Tensor, add: Tensor) -> Tensor:
        found: Tensor = self._module(x[None])[0][0]
        return found.add_(add)


def _experts(routed: Routed, linear: LinearName) -> Experts | None:
    """The parts made ready; None: some have no kernel."""
    found = []
    for up, down in routed.parts:
        first, second = _panels((up,), linear, routed.activation, True), _ready((down,), linear)
        if first is None or not isinstance(second, Panels):
            return None
        found.append((first, second))
    return Experts(routed, found)


def _panels(
    modules: tuple[nn.Module, ...], linear: LinearName, activation: str, gated: bool = False
) -> Panels | None:
    """A layer by a kernel of attmemo; None if there is no such layer."""
    if not all(map(is_plain, modules)):
        return None
    weights, biases = _parts(modules)
    if linear == "int8":
        return Linear8.of(weights, biases, activation, gated)
    return exact_layer(weights, biases, activation, gated)


def _ready(modules: tuple[nn.Module, ...], linear: LinearName, activation: str = "none") -> Ready:
    if not all(map(is_plain, modules)):
        return Called(modules)
    return _panels(modules, linear, activation) or Linear.of(*_parts(modules), activation)


def _parts(modules: tuple[Any, ...]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Weights and biases."""
    return [module.weight for module in modules], [module.bias for module in modules]


def _normed(layer: Ready, inner: Any, norm: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The layer with a residual and the norms in front of it and behind: in one call if it takes the one behind."""
    if inner is not None:
        return lambda x, add: _norm(norm, _norm(inner, layer(x)).add_(add))
    if isinstance(layer, Panels) and layer.takes(norm):
        return lambda x, add: layer(x, add, norm)
    return lambda x, add: _norm(norm, layer(x, add))


class Positions:
    """What attention needs to know of positions, for sequences of up to `span` tokens."""

    def __init__(self, blocks: Blocks, span: int) -> None:
        self._blocks, self._span = blocks, span
        with torch.no_grad():
            self._tables = blocks.tables(span)
            self._terms = [blocks.disentangled(layer, span) for layer in range(len(blocks.blocks))]
        self.is_disentangled = any(terms is not None for terms in self._terms)  # some layer has such terms
        self._turns: dict[str, Turn] = {}
        kinds = {block.kind for block in blocks.blocks} if blocks.rotary else ()
        self.angles = {kind: self._angles_of(kind) for kind in kinds}  # of positions from 0 on

    def _angles_of(self, kind: str) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[span, d / 2]`` in float32: both halves of a head turn by the same angles."""
        with torch.no_grad():
            found = self._blocks.angles(kind, torch.arange(self._span), torch.float32)
        assert found is not None
        cosine, sine = (part[:, : part.shape[1] // 2].float().contiguous() for part in found)
        return cosine, sine

    def disentangled(self, layer: int) -> Disentangled | None:
        return self._terms[layer]

    def table(self, layer: int) -> Tensor | None:
        return self._tables[layer if len(self._tables) > 1 else 0]

    @property
    def tables(self) -> Tensor | Callable[[int], Tensor | None] | None:
        """Biases by distance: of all layers, or a function of the layer."""
        return self.table if len(self._tables) > 1 else self._tables[0]

    def turn(self, kind: str) -> Turn | None:
        """Rotations by a distance, for stored keys."""
        if kind not in self._turns:
            found = self._blocks.angles(kind, torch.arange(1 - self._span, self._span), torch.float32)
            if found is None:
                return None
            cosine, sine = found
            scale = torch.hypot(cosine, sine)  # not 1 with YaRN: stored keys have this factor already
            cosine, sine, half = cosine / scale, sine / scale, cosine.shape[1] // 2
            self._turns[kind] = Turn(cosine[:, :half].contiguous(), sine[:, :half].contiguous())
        return self._turns[kind]


class Angles:
    """Rotary angles of the rows of one forward, by kind of layer."""

    def __init__(self, known: Positions, layout: Layout) -> None:
        self._known, self._places = known.angles, positions_of(layout)
        self._found: dict[str, tuple[Tensor, Tensor]] = {}

    def of(self, kind: str) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines ``[N, 1, d / 2]``: both halves of a head turn by the same angles. None: nothing turns."""
        if kind not in self._known:
            return None
        if kind not in self._found:
            cosine, sine = (part[torch.from_numpy(self._places)][:, None] for part in self._known[kind])
            self._found[kind] = cosine, sine
        return self._found[kind]


def _rotate(projected: Tensor, cosine: Tensor, sine: Tensor, width: int) -> None:
    """Rotate queries and keys, ``[N, 2 h d]``, in place."""
    heads = projected.view(len(projected), -1, width)
    first, second = heads.float().chunk(2, dim=-1)
    heads.copy_(torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1))


def _norm(norm: Any, hidden: Tensor) -> Tensor:
    """The norm of a block, or the rows themselves where the block has none there."""
    if norm is not None and type(norm) is not nn.LayerNorm:
        own: Tensor = norm(hidden)
        return own
    return hidden if norm is None else layer_norm(hidden, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
