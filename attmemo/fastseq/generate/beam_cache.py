"""Caches that hold what all beams of a sample have in common once, and move only what differs.

Shapes: B samples, M beams of each, R = B·M rows (the beams of a sample are neighbours), h key/value heads of width d,
N source or prompt positions, t generated positions, L layers.

Sources: FastSeq (arXiv 2106.04718), Eq. 2-4: prefix and cross-attention states of shape [B, 1, N, D], suffix of shape
[B·M, t, D]; EL-attention (arXiv 2105.04779): one hidden state in place of all keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from attmemo.fastseq.generate.refusal import Refusal

_FIRST_ROOM = 64  # positions; doubled when full, so that the copying is amortized


class BeamArena:
    """The states of every generated position, of all layers, in one tensor `[R, L, 2, h, room, d]`.

    2 for keys and values; 1 for EL-attention, which keeps hidden states (`[R, L, 1, 1, room, D]`).

    The row is the outermost dimension, so following the beams copies few long runs, and only the rows whose beam
    comes from another row; nothing is concatenated. (`DynamicCache` writes all of it anew twice a step.)

    Parameters
    ----------
    layers : int
    room : int
        Positions to reserve at first. The most a call can need, if known; it is cut to a first guess if large.
    """

    def __init__(self, layers: int, room: int) -> None:
        self.layers = layers
        self.length = 0
        self.room = max(1, min(room, _FIRST_ROOM))
        self.most = max(1, room)
        self.store: Tensor | None = None
        self._filled = [0] * layers

    def append(self, layer: int, *states: Tensor) -> list[Tensor]:
        """Write each `[R, h, T, d]` behind what the layer has; return views `[R, h, t, d]` of all of it."""
        rows, heads, new, width = states[0].shape
        start = self._filled[layer]
        end = start + new
        if self.store is None:
            self.room = max(self.room, end)
            self.store = states[0].new_empty(rows, self.layers, len(states), heads, self.room, width)
        fitting = torch.Size((rows, self.layers, len(states), heads, self.room, width))
        if self.store.shape != fitting or any(state.shape != states[0].shape for state in states):
            raise Refusal(f"layer {layer} has keys of another shape than the layers before it")
        if end > self.room:
            self._grow(end)
        home = self.store[:, layer]  # [R, 2, h, room, d]
        for part, state in enumerate(states):
            home[:, part, :, start:end] = state
        self._filled[layer] = end
        self.length = max(self._filled)
        return [home[:, part, :, :end] for part in range(len(states))]

    def drop(self, layer: int, count: int) -> None:
        """Forget a layer's last positions."""
        self._filled[layer] -= count
        self.length = max(self._filled)

    def filled(self, layer: int) -> int:
        """Positions the layer has."""
        return self._filled[layer]

    def repeat(self, times: int) -> None:
        """Every row becomes so many rows."""
        if self.store is not None:
            self.store = self.store.repeat_interleave(times, dim=0)

    def move(self, source: Tensor) -> None:
        """Row i becomes a copy of row `source[i]`, for all layers."""
        if self.store is None or not self.length:
            return
        used = self.store[..., : self.length, :]
        if used.device.type == "cpu":
            _copy_moved(used, source.tolist())
        else:
            _gather(used, source.to(used.device))

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows stay; row i becomes the former row `rows[i]`. Each target is at or before its source."""
        if self.store is None:
            return
        for target, origin in enumerate(rows):
            if target != origin:
                self.store[target, ..., : self.length, :] = self.store[origin, ..., : self.length, :]
        self.store = self.store[: len(rows)]

    def bytes(self) -> int:
        """Of the filled positions; what is reserved ahead is not counted."""
        if self.store is None:
            return 0
        rows, layers, parts, heads, _, width = self.store.shape
        return rows * layers * parts * heads * self.length * width * self.store.element_size()

    def _grow(self, need: int) -> None:
        assert self.store is not None
        self.room = max(need, min(2 * self.room, max(self.most, need)))
        rows, layers, parts, heads, _, width = self.store.shape
        larger = self.store.new_empty(rows, layers, parts, heads, self.room, width)
        larger[..., : self.length, :] = self.store[..., : self.length, :]
        self.store = larger


def _copy_moved(states: Tensor, source: Sequence[int]) -> None:
    """Row i becomes row `source[i]`: only rows that change are copied, each once."""
    for target, origin in copy_order(source):
        if origin is None:
            spare = states[target].clone()
        elif origin < 0:
            states[target] = spare
        else:
            states[target] = states[origin]


def _gather(states: Tensor, source: Tensor) -> None:
    """The same without asking the device which rows change, in two launches a layer: `states` `[R, L, …]`."""
    for layer in range(states.shape[1]):  # all at once would hold everything twice
        states[:, layer] = states[:, layer].index_select(0, source)


def copy_order(source: Sequence[int]) -> list[tuple[int, int | None]]:
    """Steps that make row i a copy of row `source[i]` in place, each row being copied at most once.

    Returns
    -------
    list of (target, origin)
        Copy origin to target, in this order. An origin of None saves the target aside first, and a later origin of -1
        writes what was saved: that is how a cycle is opened.
    """
    pending = {target: origin for target, origin in enumerate(source) if target != origin}
    readers: dict[int, int] = {}
    for origin in pending.values():
        readers[origin] = readers.get(origin, 0) + 1
    steps: list[tuple[int, int | None]] = []
    free = [target for target in pending if not readers.get(target)]
    while pending:
        while free:
            target = free.pop()
            origin = pending.pop(target)
            steps.append((target, origin))
            readers[origin] -= 1
            if not readers[origin] and origin in pending:
                free.append(origin)
        if pending:  # what is left are cycles: every row is read exactly once
            first = next(iter(pending))
            steps.append((first, None))
            target = first
            while pending[target] != first:
                origin = pending.pop(target)
                steps.append((target, origin))
                target = origin
            steps.append((target, -1))
            del pending[target]
    return steps


class BeamLayer(CacheLayerMixin):  # type: ignore[misc]
    """What the layers below have in common. transformers' own bookkeeping asks for these."""

    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beams are followed by `BeamArena.move`, once for all layers; what is shared never moves."""
        raise Refusal("the original loop asked a fastseq cache to follow its beams")


class SuffixLayer(BeamLayer):
    """Self-attention of one decoder layer: a view of the arena."""

    def __init__(self, arena: BeamArena, index: int) -> None:
        super().__init__()
        self.arena = arena
        self.index = index

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys, self.values = self.arena.append(self.index, key_states, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.arena.filled(self.index)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` positions."""
        self.arena.drop(self.index, -tokens_to_remove)


class PrefixLayer(SuffixLayer):
    """Self-attention over a prompt that all beams share, `[B, h, N, d]`, and a suffix of their own.

    The first update is the prompt itself, at B rows. Later ones return the keys and values of the suffix alone, and
    the attention function recognizes the tensor and adds the prefix (FastSeq Eq. 3).
    """

    def __init__(self, arena: BeamArena, index: int, shared: SharedTensors) -> None:
        super().__init__(arena, index)
        self.shared = shared
        self.prefix_keys: Tensor | None = None
        self.prefix_values: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.prefix_keys is None:
            self.lazy_initialization(key_states, value_states)
            self.prefix_keys, self.prefix_values = key_states.contiguous(), value_states.contiguous()
            return self.prefix_keys, self.prefix_values
        keys, values = super().update(key_states, value_states)
        self.shared.expect(keys, self)
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        if self.prefix_keys is None or self.prefix_values is None or self.arena.filled(self.index):
            super().crop(tokens_to_remove)
        else:
            self.prefix_keys = self.prefix_keys[..., :tokens_to_remove, :]
            self.prefix_values = self.prefix_values[..., :tokens_to_remove, :]

    def get_seq_length(self) -> int:
        return (0 if self.prefix_keys is None else self.prefix_keys.shape[-2]) + super().get_seq_length()

    def swap_out(self, moved: Sequence[tuple[int, int]], count: int) -> None:
        if self.prefix_keys is not None and self.prefix_values is not None:
            self.prefix_keys = keep_rows(self.prefix_keys, moved, count)
            self.prefix_values = keep_rows(self.prefix_values, moved, count)

    def bytes(self) -> int:
        return _bytes(self.prefix_keys) + _bytes(self.prefix_values)


class CrossLayer(BeamLayer):
    """Cross-attention of one decoder layer: keys and values `[B, h, N, d]`, made once, by the layer's projections."""

    def __init__(self) -> None:
        super().__init__()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.is_initialized:
            raise Refusal("cross-attention states were computed twice")
        self.lazy_initialization(key_states, value_states)
        # The projections give [B, N, h, d] seen as [B, h, N, d]; read at every step, it is worth a copy (1.3x on CPU).
        self.keys, self.values = key_states.contiguous(), value_states.contiguous()
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[-2]

    def swap_out(self, moved: Sequence[tuple[int, int]], count: int) -> None:
        self.keys = keep_rows(self.keys, moved, count)
        self.values = keep_rows(self.values, moved, count)

    def bytes(self) -> int:
        return _bytes(self.keys) + _bytes(self.values)


class SharedTensors:
    """Which key tensors stand for more than they hold. The attention function looks them up here, by identity."""

    def __init__(self) -> None:
        self._expected: dict[int, PrefixLayer] = {}

    def expect(self, keys: Tensor, layer: PrefixLayer) -> None:
        self._expected[id(keys)] = layer

    def take(self, keys: Tensor) -> PrefixLayer | None:
        """The layer whose suffix this is, or None for a plain tensor."""
        layer = self._expected.get(id(keys))
        if layer is None or layer.keys is not keys:
            return None
        del self._expected[id(keys)]
        return layer

    def clear(self) -> None:
        """Forget what was handed out and not taken."""
        self._expected.clear()

    def require_all_taken(self) -> None:
        """Raise if a suffix was handed out and did not arrive: the prompt would be missing in the attention."""
        if self._expected:
            raise Refusal("the model changes its keys between the cache and the attention function")


class BeamCache:
    """The caches of one call: what to hand to the model, and how rows move and leave.

    Parameters
    ----------
    self_cache : transformers.Cache
        Of `SuffixLayer`.
    cross_cache : transformers.Cache or None
    arena : BeamArena
    holders : sequence
        What holds states that beams share: each has `swap_out` and `bytes`.
    """

    def __init__(
        self, arena: BeamArena, self_cache: Cache, cross_cache: Cache | None, holders: Sequence[Holder] = ()
    ) -> None:
        self.arena = arena
        self.self_cache = self_cache
        self.cross_cache = cross_cache
        self.holders = holders

    def move(self, source: Tensor) -> None:
        """Row i of the suffix becomes row `source[i]`."""
        self.arena.move(source)

    def keep(self, samples: Sequence[int], beams: int) -> None:
        """Only these samples stay, in the order given; see `hole_filling` for the orders that are cheap."""
        self.arena.keep([sample * beams + beam for sample in samples for beam in range(beams)])
        moved = [(target, origin) for target, origin in enumerate(samples) if target != origin]
        for holder in self.holders:
            holder.swap_out(moved, len(samples))

    def bytes(self) -> dict[str, int]:
        """Bytes of the states held, as `{"shared": …, "suffix": …}`.

        `shared` is 2·L·B·N·D·s for shared keys and values and B·N·D·s for EL; `suffix` is 2·L·R·t·D·s, or half of it.
        """
        return {"shared": sum(holder.bytes() for holder in self.holders), "suffix": self.arena.bytes()}


class Holder(Protocol):
    """What holds states of which there is one row a sample."""

    def swap_out(self, moved: Sequence[tuple[int, int]], count: int) -> None:
        """Row `target` becomes the former row `origin` for each pair, then only the first `count` rows stay."""

    def bytes(self) -> int:
        """Bytes held."""


def hole_filling(alive: Sequence[bool]) -> list[int]:
    """An order of the samples that are alive in which as few as possible change their place.

    Samples from the end fill the holes. Cross-attention states are large, and the order of the samples does not
    matter: each one's place in the output is remembered elsewhere.
    """
    count = sum(alive)
    late = [sample for sample in range(count, len(alive)) if alive[sample]]
    return [sample if alive[sample] else late.pop() for sample in range(count)]


def keep_rows(tensor: Tensor, moved: Sequence[tuple[int, int]], count: int) -> Tensor:
    """Row `target` becomes the former row `origin` for each pair, in place; the first `count` rows are left."""
    for target, origin in moved:
        tensor[target] = tensor[origin]
    return tensor[:count]


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def shared_cache(layers: int, room: int, shared: SharedTensors, *, encoder_decoder: bool) -> BeamCache:
    """An empty cache of keys and values: for an encoder-decoder, or for a decoder whose prompt is shared."""
    arena = BeamArena(layers, room)
    if not encoder_decoder:
        prefixes = [PrefixLayer(arena, index, shared) for index in range(layers)]
        return BeamCache(arena, Cache(layers=prefixes), None, prefixes)
    own = Cache(layers=[SuffixLayer(arena, index) for index in range(layers)])
    crosses = [CrossLayer() for _ in range(layers)]
    return BeamCache(arena, own, Cache(layers=crosses), crosses)
