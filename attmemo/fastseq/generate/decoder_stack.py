"""All layers of a decoder for the next token of some rows, in one native call: `native/decode.c`.

Its oracle is `attend_in_torch` for attention, and a model's own code for all of it.

THE LIMIT.  A step reads all weights once, and all keys and values. Few rows cost little beside that.

KEYS AND VALUES NEVER MOVE.  Each row writes those of its token to the slot of its own number. A table says for every
row and position in which slot they are: where beams change places, lines of the table do. What the beams of a sample
have in common, a prompt or a source, lies there once, without its padding.

ROUNDING.  Rows between layers, queries, keys and values have the type of the layers. Scores, weights and sums of
attention are float32; of a prompt or a source in bfloat16, weights are rounded to it (`native/attention_tiles.h`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attmemo.kernels import _decode as native
from attmemo.kernels.encoder_stack import turns_of
from attmemo.kernels.norms import KeptNorms, Norm
from attmemo.kernels.omp_team import join_torch
from attmemo.kernels.packed_weights import LINE, Panels
from attmemo.kernels.row_attention import Attend, Layout

PART: Final = 16  # numbers: heads are filled up to a whole number of them
_NO_ADDRESSES: Final = np.zeros(0, np.uint64)
_NO_SHARED: Final = (_NO_ADDRESSES, _NO_ADDRESSES, np.zeros(0, np.int64))
_NO_POSITIONS: Final = np.zeros(0, np.int32)
_NO_OWN: Final = (_NO_ADDRESSES, _NO_POSITIONS, 0, 0, 0)
_APART, _CHAINED, _READ = range(3)  # how rows go on: `native.run` tells

join_torch(native.use_team)


FEWEST: Final = native.FEWEST
"""Rows that 8-bit layers are run for by vectors, where a matrix unit is there too."""


@dataclass(frozen=True)
class Block:
    """One layer of a decoder. Its linear layers are of one kind; each norm may be missing.

    Attributes
    ----------
    qkv, out, up, down : Panels
        Layers for Q, K and V, behind attention, and of the feed-forward part.
    cross_q, cross_out : Panels or None
        Of cross-attention.
    before, before_cross, before_feed : Norm or None
        Of what goes into each part. The residual goes by it.
    behind, behind_cross, behind_feed : Norm or None
        Of the sum with the residual.
    query, key : Norm or None
        Of each head.
    """

    qkv: Panels
    out: Panels
    up: Panels
    down: Panels
    cross_q: Panels | None = None
    cross_out: Panels | None = None
    before: Norm | None = None
    before_cross: Norm | None = None
    before_feed: Norm | None = None
    behind: Norm | None = None
    behind_cross: Norm | None = None
    behind_feed: Norm | None = None
    query: Norm | None = None
    key: Norm | None = None

    @property
    def layers(self) -> tuple[Panels, ...]:
        all_of_them = (self.qkv, self.out, self.cross_q, self.cross_out, self.up, self.down)
        return tuple(layer for layer in all_of_them if layer is not None)


class SharedKeys:
    """Keys and values that all rows of a sample see, of all layers: of its prompt or its source.

    Parameters
    ----------
    layers, heads, width : int
        Heads of keys, and numbers of each.
    lengths : sequence of int
        Keys of each sample.
    dtype : torch.dtype
    """

    def __init__(self, layers: int, heads: int, width: int, lengths: Sequence[int], dtype: torch.dtype) -> None:
        self.heads, self.width, self.layers = heads, width, layers
        padded = -(-width // PART) * PART
        self.lengths = np.array(lengths, np.int64)
        self._firsts = [0, *accumulate(lengths)]
        # Zeros beyond the width: they are multiplied too.
        make = torch.empty if padded == width else torch.zeros
        self._memory = make(2, layers, self._firsts[-1] * heads * padded, dtype=dtype)
        self._padded = padded
        places = self._memory.data_ptr() + np.arange(2 * layers).reshape(2, layers, 1) * self._memory.stride(1) * (
            dtype.itemsize
        )
        offsets = np.array(self._firsts[:-1]) * heads * padded * dtype.itemsize
        self.addresses: npt.NDArray[np.uint64] = (places + offsets).astype(np.uint64)  # [2, layers, samples]

    def put(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Those of all samples, one behind the other: two of ``[sum of lengths, heads * width]``."""
        size = self.heads * self._padded
        for part, given in enumerate((keys, values)):
            memory = self._memory[part, layer]
            for first, last in pairwise(self._firsts):
                place = memory[first * size : last * size].view(self.heads, last - first, self._padded)
                heads = given[first:last].view(last - first, self.heads, self.width)
                place[..., : self.width] = heads.transpose(0, 1)

    def keep(self, samples: Sequence[int]) -> None:
        """Only these samples stay, in this order. Nothing moves."""
        self.addresses = np.ascontiguousarray(self.addresses[:, :, list(samples)])
        self.lengths = np.ascontiguousarray(self.lengths[list(samples)])

    @property
    def nbytes(self) -> int:
        """Of the samples that are left, without what heads are filled up with."""
        item = self._memory.element_size()
        return int(2 * self.layers * self.lengths.sum() * self.heads * self.width * item)


class OwnKeys:
    """Keys and values of decoded tokens, of all layers and rows.

    Parameters
    ----------
    layers, heads, width : int
        Heads of keys, and numbers of each.
    rows : int
        At most.
    dtype : torch.dtype
    """

    def __init__(self, layers: int, heads: int, width: int, rows: int, dtype: torch.dtype) -> None:
        self.layers, self.heads, self.width, self.slots, self.dtype = layers, heads, width, rows, dtype
        self.length = 0
        self.table: npt.NDArray[np.int32] = np.zeros((rows, native.ROOM), np.int32)
        self.chunks: list[Tensor] = []
        self.addresses = _NO_ADDRESSES

    def make_room(self, more: int = 1) -> None:
        """For so many more positions."""
        while self.length + more > len(self.chunks) * native.ROOM:
            padded = -(-self.width // PART) * PART
            shape = (self.layers, 2, self.slots, self.heads, native.ROOM, padded)
            self.chunks.append(torch.empty(shape, dtype=self.dtype))
            self.addresses = np.array([chunk.data_ptr() for chunk in self.chunks], np.uint64)
        while self.length + more > self.table.shape[1]:
            self.table = np.concatenate((self.table, np.zeros_like(self.table)), 1)

    def add(self, more: int = 1) -> None:
        """So many more positions are filled."""
        self.table[:, self.length : self.length + more] = np.arange(len(self.table))[:, None]
        self.length += more

    def take(self, rows: npt.NDArray[np.int64]) -> None:
        """Row i goes on as a copy of row `rows[i]`; there may be more rows than before, up to those of `slots`."""
        self.table = np.ascontiguousarray(self.table[rows])

    @property
    def nbytes(self) -> int:
        """Of the positions that are filled; what lies ready is not counted."""
        size = 2 * self.layers * self.heads * self.width * self.dtype.itemsize
        return size * len(self.table) * self.length


class DecoderStack:
    """Blocks of a decoder, for inference. Several threads may call one instance.

    Parameters
    ----------
    blocks : sequence of Block
        Weights of norms are copied.
    heads, key_heads, width : int
        Heads of queries, of keys and values, and numbers of each.
    scale : float
        Products of queries and keys are multiplied with it.
    last : Norm or None
        Behind the last block.
    isa, attention : str
        Instruction sets of linear layers, and of a step's attention; empty: the best.

    Raises
    ------
    ValueError
        The layers do not fit each other.
    """

    def __init__(
        self, blocks: Sequence[Block], heads: int, key_heads: int, width: int, *, scale: float, turned: bool = False,
        last: Norm | None = None, isa: str = "", attention: str = "",
    ) -> None:  # fmt: skip
        layers = [layer for block in blocks for layer in block.layers]
        first = layers[0]
        if len({(type(layer), layer.dtype) for layer in layers}) != 1:
            raise ValueError("all layers must be of one kind and type")
        self.dtype, self.width, self.heads, self.key_heads = first.dtype, width, heads, key_heads
        self.layers, self.hidden, self.turned, self.last = len(blocks), first.inputs, turned, last
        self.scale, self._attention = scale, attention
        self._middle = max(block.up.outputs for block in blocks)
        self._norms = norms = KeptNorms()
        self._blocks = tuple(blocks)
        nexts = [*(block.before for block in blocks[1:]), last]
        self._native = native.prepare(
            norms.native(blocks[0].before, first.inputs),
            tuple(
                (
                    norms.native(block.query, width), norms.native(block.key, width), turned, block.qkv.native(norms),
                    block.out.native(norms, None, block.behind, block.before_cross or block.before_feed),
                    None if block.cross_q is None else block.cross_q.native(norms),
                    None if block.cross_out is None
                    else block.cross_out.native(norms, None, block.behind_cross, block.before_feed),
                    block.up.native(norms), block.down.native(norms, None, block.behind_feed, following),
                )
                for block, following in zip(blocks, nexts, strict=True)
            ),
            (heads, key_heads, width, scale), (first.arithmetic, first.kind[0], isa, attention),
        )  # fmt: skip

    @property
    def panels(self) -> list[Panels]:
        """Its linear layers."""
        return [layer for block in self._blocks for layer in block.layers]

    @property
    def nbytes(self) -> int:
        """Bytes that its linear layers keep."""
        return sum(layer.nbytes for layer in self.panels)

    def step(
        self, hidden: Tensor, beams: int, own: OwnKeys, shared: SharedKeys | None = None, *, chained: bool = False,
        positions: npt.NDArray[np.int32] | None = None, angles: tuple[Tensor, Tensor] | None = None,
        bias: Tensor | None = None, threads: int | None = None,
    ) -> Tensor:  # fmt: skip
        """The next token of each row through all blocks, and the last norm: ``[R, hidden]``.

        Parameters
        ----------
        hidden : Tensor ``[R, hidden]``
            Embedded tokens. Is written to.
        beams : int
            Neighbouring rows that are of one sample.
        own : OwnKeys
            Of R rows; gains a position. With `chained` of R / beams rows; gains `beams` positions.
        shared : SharedKeys, optional
            Of R / beams samples: what cross-attention sees; without cross-attention, what stands before the own keys.
        chained : bool
            Whether the rows of a sample are tokens of one text that follow each other. Each gets the bits that it
            gets alone.
        positions : int32 ``[R]``, optional
            Which of the angles turn queries and keys.
        angles : two Tensors ``[positions, half]``, optional
            Cosines and sines, float32.
        bias : Tensor ``[heads, N]``, optional
            Is added to scores of own keys, float32: of the largest distance first, of a token and itself last.
        threads : int, optional
            None: as many as torch uses.

        Raises
        ------
        ValueError
            Sizes or types do not fit each other.
        MemoryError
        """
        lines, more = (len(hidden) // beams, beams) if chained else (len(hidden), 1)
        sizes = (self.layers, self.key_heads, self.width)
        if len(own.table) != lines or (own.layers, own.heads, own.width) != sizes or own.dtype != self.dtype:
            raise ValueError("own keys do not fit rows and blocks")
        if shared is not None and (shared.layers, shared.heads, shared.width) != sizes:
            raise ValueError("shared keys do not fit the blocks")
        own.make_room(more)
        held = (own.addresses, own.table, own.table.shape[1], own.length, own.slots)
        keys = _NO_SHARED if shared is None else (*shared.addresses, shared.lengths)
        way = _CHAINED if chained else _APART
        ways, found = self._ways(hidden)
        self._run((len(hidden), beams, way), held, keys, positions, angles, bias, ways, None, threads)
        own.add(more)
        return found

    def read(
        self, hidden: Tensor, lengths: Sequence[int], shared: SharedKeys | None = None, *, causal: bool,
        positions: npt.NDArray[np.int32] | None = None, angles: tuple[Tensor, Tensor] | None = None,
        bias: Tensor | None = None, threads: int | None = None,
    ) -> Tensor:  # fmt: skip
        """All tokens of some samples through all blocks, and the last norm: ``[R, hidden]``.

        Parameters
        ----------
        hidden : Tensor ``[R, hidden]``
            Embedded tokens of all samples, one behind the other, without padding. Is written to.
        lengths : sequence of int
            Tokens of each sample.
        shared : SharedKeys, optional
            Of samples of these lengths: keys and values are written to it.
        causal : bool
            Whether a token sees those before it and itself alone, or all of its sample.
        bias : Tensor ``[heads, 2 N - 1]``, optional
            Of N - 1 tokens back first, of N - 1 tokens ahead last.
        positions, angles, threads
            As for `step`.

        Raises
        ------
        ValueError
            Sizes or types do not fit each other.
        MemoryError
        """
        sizes = (self.layers, self.key_heads, self.width)
        if sum(lengths) != len(hidden) or min(lengths, default=0) < 1:
            raise ValueError("the rows are not those of the samples")
        if bias is not None and bias.shape[1] // 2 + 1 < max(lengths):
            raise ValueError("there is no bias for a distance")
        if shared is not None and (
            (shared.layers, shared.heads, shared.width) != sizes or shared.lengths.tolist() != list(lengths)
        ):
            raise ValueError("shared keys do not fit samples and blocks")
        ways, found = self._ways(hidden)
        first, second = self.heads * self.width, (self.heads + self.key_heads) * self.width
        queries, keys, values = ways[1][:, :first], ways[1][:, first:second], ways[1][:, second:]
        starts = np.array([0, *accumulate(lengths)], np.int64)
        call = Attend(
            queries, keys, values, self.heads, Layout(starts, starts), scale=self.scale, out=ways[2], table=bias,
            causal=causal, threads=threads, isa=self._attention,
        )  # fmt: skip
        held = _NO_SHARED if shared is None else (*shared.addresses, shared.lengths)
        rows = (len(hidden), 1, _READ)
        self._run(rows, _NO_OWN, held, positions, angles, None, ways, call.arguments, threads)
        return found

    def _ways(self, hidden: Tensor) -> tuple[list[Tensor], Tensor]:
        """What rows go through, and where they end."""
        if hidden.dtype != self.dtype or hidden.shape[1] != self.hidden or not hidden.is_contiguous():
            raise ValueError(f"rows must be {self.dtype} [N, {self.hidden}] without gaps, not {tuple(hidden.shape)}")
        count, item = len(hidden), self.dtype.itemsize
        projected = (self.heads + 2 * self.key_heads) * self.width
        widths = (projected, self.heads * self.width, self.hidden, self.hidden, self._middle, self.hidden)
        taken = [(count * width * item + LINE - 1) // LINE * LINE for width in widths]
        memory = torch.empty(sum(taken) + LINE, dtype=torch.uint8)
        begin = -memory.data_ptr() % LINE
        places = accumulate(taken[:-1], initial=begin)
        ways = [
            memory[place : place + count * width * item].view(self.dtype).view(count, width)
            for place, width in zip(places, widths, strict=True)
        ]
        return [hidden, *ways], hidden if self.last is None else ways[-1]

    def _run(
        self, rows: tuple[int, int, int], own: Any, shared: Any,
        positions: npt.NDArray[np.int32] | None, angles: tuple[Tensor, Tensor] | None, bias: Tensor | None,
        ways: list[Tensor], attend: Any, threads: int | None,
    ) -> None:  # fmt: skip
        if self.turned and (positions is None or angles is None):
            raise ValueError("queries are turned: positions and angles are missing")
        if bias is not None and (bias.dtype != torch.float32 or len(bias) != self.heads or not bias.is_contiguous()):
            raise ValueError(f"a bias must be float32 [{self.heads}, N] without gaps")
        addresses: Any = tuple(way.data_ptr() for way in ways)
        native.run(
            self._native, rows, own,
            (_NO_POSITIONS, 0, 0, 0, 0) if positions is None or angles is None else (positions, *turns_of(*angles)),
            (0, 0) if bias is None else (bias.data_ptr(), bias.shape[1]), shared, addresses, attend,
            torch.get_num_threads() if threads is None else threads,
        )  # fmt: skip


def attend_in_torch(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, bias: Tensor | None = None
) -> Tensor:  # fmt: skip
    """One row's attention, the oracle: query ``[heads, width]``, keys and values ``[N, key heads, width]``.

    `bias` is ``[heads, N]``. Returns ``[heads, width]`` in the type of the query.
    """
    group = len(query) // keys.shape[1]
    wide, all_keys, all_values = (part.float() for part in (query, keys, values))
    scores = torch.einsum("hd,nhd->hn", wide * scale, all_keys.repeat_interleave(group, 1))
    weights = (scores if bias is None else scores + bias).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, all_values.repeat_interleave(group, 1)).to(query.dtype)
