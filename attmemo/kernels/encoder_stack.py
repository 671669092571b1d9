"""Blocks of a model, one behind the other, in one native call: `native/chain.c`.

Its oracle is the same blocks as calls of their layers and of `attend`: where norms stand behind the layers alone, the
numbers are the same, bit by bit.

WHAT IT GAINS.  The five calls of a block take 0.2 ms to ask for, whatever they compute, and each of them waits for the
interpreter lock. Norms, gates and rotations of heads have no passes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attmemo.kernels import _chain as native
from attmemo.kernels.norms import KeptNorms, Norm
from attmemo.kernels.packed_weights import LINE, PANEL, Panels
from attmemo.kernels.row_attention import (
    NOT_DISTANT,
    NOT_STORED,
    NOT_TURNED,
    Attend,
    Disentangled,
    Layout,
    Stored,
    Turn,
    table_of,
)
from attmemo.kernels.row_sinks import Copies

Angles = tuple[Tensor, Tensor]
"""Cosines and sines of each position from 0 on, float32 ``[positions, half]``."""


@dataclass(frozen=True)
class Link:
    """One block. All layers are of one kind; each norm may be missing.

    Attributes
    ----------
    qkv, out, up, down : Panels
        Layers for Q, K and V, behind attention, and of the feed-forward part.
    before, before_feed : Norm or None
        Of what goes into attention, and into the feed-forward part. The residual goes by it.
    inner, inner_feed : Norm or None
        Of what `out` and `down` give, before the residual is added.
    behind, behind_feed : Norm or None
        Of the sum with the residual.
    query, key : Norm or None
        Of each head.
    kind : str or None
        Which angles turn queries and keys; None: none do.
    window : int or None
        As in `attend`.
    """

    qkv: Panels
    out: Panels
    up: Panels
    down: Panels
    before: Norm | None = None
    inner: Norm | None = None
    behind: Norm | None = None
    before_feed: Norm | None = None
    inner_feed: Norm | None = None
    behind_feed: Norm | None = None
    query: Norm | None = None
    key: Norm | None = None
    kind: str | None = None
    window: int | None = None

    @property
    def layers(self) -> tuple[Panels, ...]:
        return self.qkv, self.out, self.up, self.down


class Chain:
    """Blocks of a model, for inference. Several threads may call one instance.

    Parameters
    ----------
    links : sequence of Link
        Weights of norms are copied: those of a model may move.
    heads, width : int
        Heads of the attention, and numbers of each.
    key_heads : int, optional
        Heads of K and V, where several of Q share one. None: as many.
    causal : bool
        As in `attend`.
    isa : str
        Of the linear layers, as in `Panels`.

    Raises
    ------
    ValueError
        The layers do not fit each other.
    """

    def __init__(
        self, links: Sequence[Link], heads: int, width: int, key_heads: int | None = None, *, causal: bool = False,
        isa: str = "",
    ) -> None:  # fmt: skip
        layers = [layer for link in links for layer in link.layers]
        first = links[0].up
        if len({(type(layer), layer.dtype) for layer in layers}) != 1:
            raise ValueError("all layers must be of one kind and type")
        if links[0].out.inputs != heads * width:
            raise ValueError(f"{heads} heads of {width} numbers do not fit a layer with {links[0].out.inputs} inputs")
        self._links, self._up, self._heads, self._causal = tuple(links), first, heads, causal
        key_heads = heads if key_heads is None else key_heads
        self._size, self._key_size = heads * width, key_heads * width
        self._kinds = list(dict.fromkeys(link.kind for link in links if link.kind is not None))
        self._norms = norms = KeptNorms()
        self._are_alike = not self._kinds and len({link.window for link in links}) == 1
        nexts = [*(link.before for link in links[1:]), None]
        self._native = native.prepare(
            norms.native(links[0].before, first.inputs),
            tuple(
                (
                    (
                        heads, key_heads, width, norms.native(link.query, width), norms.native(link.key, width),
                        -1 if link.kind is None else self._kinds.index(link.kind),
                    ),
                    link.qkv.native(norms),
                    link.out.native(norms, link.inner, link.behind, link.before_feed),
                    link.up.native(norms),
                    link.down.native(norms, link.inner_feed, link.behind_feed, following),
                )
                for link, following in zip(links, nexts, strict=True)
            ),
            (first.arithmetic, first.kind[0], isa),
        )  # fmt: skip

    def __call__(
        self, hidden: Tensor, layout: Layout, *, scale: float,
        table: Tensor | Callable[[int], Tensor | None] | None = None,
        angles: Mapping[str, Angles] | None = None, stored: Callable[[int], Stored | None] | None = None,
        turn: Callable[[str], Turn | None] | None = None,
        disentangled: Callable[[int], Disentangled | None] | None = None, keep: Copies | None = None,
        asked: npt.NDArray[np.int64] | None = None, threads: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Last hidden states ``[N, H]`` of packed rows ``[N, H]``, any strides; ``[W, H]`` of those asked for.

        Parameters
        ----------
        layout, scale, table
            As in `attend`, of all blocks; or a function that gives the table for the number of a block.
        angles
            Of each kind of the links, for every position.
        stored, disentangled : callable
            Give for the number of a block what `attend` gets. None: nothing.
        turn : callable
            Gives for a kind how far keys of records are turned. None: they are not.
        keep : Copies
            Gets K and V ``[N, key_heads * width]`` of each block, and the result.
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
        if self._links[0].before is not None:
            hidden = hidden.contiguous()
        rows, size, key_size = len(hidden), self._size, self._key_size
        if (
            self._are_alike and stored is None and disentangled is None and keep is None and asked is None
            and layout.positions is None and layout.sources is None and layout.asked is None and not callable(table)
        ):  # fmt: skip
            return self._of_whole_sequences(hidden, layout.starts, layout.key_starts, scale, table, threads)
        some = rows if asked is None else len(asked)  # of the result
        part = hidden.new_empty(rows, size + 2 * key_size)  # Q, K and V of one block after the other
        queries, keys, values = part.tensor_split((size, size + key_size), 1)
        context, mixed, after, normed = [hidden.new_empty(rows, n) for n in (size, up.inputs, up.inputs, up.inputs)]
        middle = hidden.new_empty(rows, up.outputs) if up.are_two_calls(rows, threads) else None

        shared = stored is None and disentangled is None

        def given(number: int) -> dict[str, Any]:
            link, records = self._links[number], None if stored is None else stored(number)
            moved = records is not None and not records.still
            return {
                "window": link.window,
                "table": table(number) if callable(table) else table,
                "stored": records,
                "turn": turn(link.kind) if moved and turn is not None and link.kind is not None else None,
                "disentangled": None if disentangled is None else disentangled(number),
            }

        made: dict[tuple[int | None, str | None, int], Attend] = {}
        calls: list[Attend] = []
        for number, link in enumerate(self._links):
            alike = link.window, None if turn is None else link.kind, number if callable(table) else 0
            base = made.get(alike)
            if base is None:
                base = made[alike] = Attend(
                    queries, keys, values, self._heads, layout, scale=scale, causal=self._causal,
                    out=context, threads=threads, **given(number),
                )  # fmt: skip
            elif not shared:
                own = given(number)
                base = base.of(own["stored"], own["disentangled"])
            calls.append(base)
        if shared and len(made) == 1:
            calls = calls[:1]
        positions = positions_of(layout) if self._kinds else np.zeros(0, np.int32)
        turns = [(angles or {})[kind] for kind in self._kinds]
        ending: Any = None
        if asked is not None:
            picked, wanted = hidden.new_empty(some, up.inputs), hidden.new_empty(some, size)
            apart = size % PANEL == 0
            if apart:  # of the last block K and V alone
                pair = part.view(-1)[: 2 * key_size * rows].view(rows, 2 * key_size)
                keys, values = pair[:, :key_size], pair[:, key_size:]
            attends = Attend(
                wanted, keys, values, self._heads, layout.asking(asked), scale=scale, causal=self._causal,
                out=context[:some], threads=threads, **given(len(self._links) - 1),
            )  # fmt: skip
            between = hidden.new_empty(some, up.outputs) if up.are_two_calls(some, threads) else None
            addresses = (0 if t is None else t.data_ptr() for t in (picked, wanted, between))
            places = positions[asked] if self._kinds else positions
            ending = asked, places, *addresses, apart, attends.arguments
        copies = () if keep is None else keep.addresses(len(self._links), key_size, after[:some], asked)
        ways: Any = tuple([0 if t is None else t.data_ptr() for t in (context, mixed, middle, after, normed)])
        native.run(
            self._native, (hidden.data_ptr(), hidden.stride(0) * hidden.itemsize, rows), part.data_ptr(),
            (positions, tuple([turns_of(*pair) for pair in turns])), tuple([call.arguments for call in calls]), ending,
            copies, ways, threads,
        )  # fmt: skip
        return after[:some]

    def _of_whole_sequences(
        self, hidden: Tensor, starts: npt.NDArray[np.int64], key_starts: npt.NDArray[np.int64], scale: float,
        table: Tensor | None, threads: int,
    ) -> Tensor:  # fmt: skip
        """The same where nothing but rows and their table is given, and all blocks attend alike: one row of a few
        sequences takes as long as to ask for all else.
        """
        up, rows, item, heads = self._up, len(hidden), hidden.itemsize, self._heads
        size, key_size, width = self._size, self._key_size, self._size // heads
        projected = size + 2 * key_size
        middle = up.outputs if up.are_two_calls(rows, threads) else 0
        after = hidden.new_empty(rows, up.inputs)
        widths = projected, size, up.inputs, up.inputs, middle
        taken = [(rows * own * item + LINE - 1) // LINE * LINE for own in widths]
        memory = torch.empty(sum(taken) + LINE, dtype=torch.uint8, device="cpu")
        begin = (memory.data_ptr() + LINE - 1) // LINE * LINE
        queries, context, mixed, normed, between = list(accumulate(taken[:-1], initial=begin))
        line, table = projected * item, None if table is None else table.contiguous()
        keys = queries + size * item
        call = (
            ((queries, line), (keys, line), (keys + key_size * item, line), (context, size * item)),
            (up.kind[0], rows, rows, int(key_starts[-1]), heads, key_size // width, width),
            (starts, key_starts, b"", b"", b""), NOT_STORED, NOT_TURNED,
            table_of(table, self._links[0].window, heads), NOT_DISTANT, (scale, threads, "", self._causal, 0),
        )  # fmt: skip
        native.run(
            self._native, (hidden.data_ptr(), hidden.stride(0) * item, rows), queries, _NO_TURNS, (call,), None, (),
            (context, mixed, between if middle else 0, after.data_ptr(), normed), threads,
        )  # fmt: skip
        return after


_NO_TURNS: Any = (np.zeros(0, np.int32), ())


def positions_of(layout: Layout) -> npt.NDArray[np.int32]:
    """The place of each row in its sequence, ``[N]``.

    It counts from 0 whatever the caller counts from: rotary models see distances alone, and rows of records too were
    counted from 0.
    """
    if layout.positions is not None:
        return layout.positions
    starts = layout.starts
    found: npt.NDArray[np.int32] = (np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))).astype(np.int32)
    return found


def turns_of(cosine: Tensor, sine: Tensor) -> tuple[int, int, int, int]:
    """Angles as native code has them."""
    if cosine.dtype != torch.float32 or not cosine.is_contiguous() or cosine.shape != sine.shape:
        raise ValueError(f"angles are float32 of one shape, without gaps, not {cosine.dtype} {tuple(cosine.shape)}")
    if sine.dtype != torch.float32 or not sine.is_contiguous():
        raise ValueError(f"sines are float32 without gaps, not {sine.dtype}")
    return cosine.data_ptr(), sine.data_ptr(), cosine.shape[1], cosine.shape[0]
