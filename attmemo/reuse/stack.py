"""Serving a whole stack of blocks over packed rows, from nothing: `reuse="none"`.

One call of the stack does the work of all blocks. Valid tokens are taken out of the padded batch, the blocks run
over them (`packed.py`), and the last hidden states go back to where the tokens were. Outputs of padding are zero. The
pooler and the head are the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from attmemo.adapters import Call, Site, Spans
from attmemo.adapters.blocks import Blocks
from attmemo.counters import Counters
from attmemo.kernels.row_attention import Layout
from attmemo.plan import Share
from attmemo.reuse import Exact
from attmemo.reuse.packed import Packed

_ON_THE_RIGHT = "the mask is not plain padding on the right"


Keep = Callable[[list[int], list[tuple[Tensor, Tensor]], Tensor], None]
"""Gets lengths ``[B]``, K and V ``[N, H]`` of each layer, and the last hidden states ``[N, H]``, all packed."""


class Stack:
    """Serves a stack of blocks.

    Parameters
    ----------
    blocks : Blocks
    packed : Packed
        The blocks, made ready.

    Attributes
    ----------
    keep : Keep or None
        Gets what a forward computed: this is how records are made.
    """

    name: ClassVar[str] = "none"
    whole: ClassVar[bool] = True

    def __init__(self, blocks: Blocks, packed: Packed) -> None:
        self.blocks, self.packed = blocks, packed
        self.keep: Keep | None = None
        # Hooks on the modules that the model itself calls run as ever.
        inner = [child for module in blocks.modules for child in module.modules() if child is not module]
        hooks = [(child._forward_hooks, child._forward_pre_hooks) for child in inner]
        everywhere = nn.modules.module
        self._hooks: list[Any] = [hook for pair in hooks for hook in pair]
        self._hooks += [everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks]

    def read(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | str:
        call = self.blocks.read(args, kwargs)
        if isinstance(call, str):
            return call
        if call.hidden.dtype != self.packed.dtype:
            return f"hidden states are {call.hidden.dtype}, the model was {self.packed.dtype}"
        if torch.is_autocast_enabled("cpu"):
            return "autocast"
        if any(self._hooks):
            return "a module inside of the blocks has hooks"
        return call

    def window(self, module: nn.Module) -> int | None:
        return self.blocks.mask_window

    def spans(self, module: nn.Module, call: Call, given: Mapping[str, Any] | None) -> Spans | str:
        if given is not None and isinstance(given.get("attention_mask"), dict):
            return "masks of its own for each kind of layer"
        batch, padded = int(call.hidden.shape[0]), int(call.hidden.shape[1])
        spans = self.blocks.spans(call.mask, batch, padded)
        return _ON_THE_RIGHT if spans is None else spans

    def serve(self, site: Site, call: Call, spans: Spans, share: Share, counters: Counters) -> Tensor:
        """Last hidden states ``[B, L, H]``."""
        start = perf_counter()
        batch, padded, size = call.hidden.shape
        starts = np.concatenate([[0], np.cumsum(spans.lengths)])
        places = places_of(spans.lengths, padded)
        rows = call.hidden.reshape(batch * padded, size)
        rows = rows if places is None else rows.index_select(0, places)
        positions = self.positions(call, places, batch, padded)
        layout, kept = Layout(starts, starts), list[tuple[Tensor, Tensor]]()
        keep = None if self.keep is None else lambda _layer, keys, values: kept.append((keys.clone(), values.clone()))
        found = self.packed.run(rows, layout, max(spans.lengths), positions, keep=keep)
        if self.keep is not None:
            self.keep(spans.lengths, kept, found)
        if places is None:
            output = found
        else:
            output = found.new_zeros(batch * padded, size).index_copy_(0, places, found)
        counters.work(int(starts[-1]), int(starts[-1]), blocks=perf_counter() - start)
        return output.view(batch, padded, size)

    def positions(self, call: Call, places: Tensor | None, batch: int, padded: int) -> Tensor:
        """Position of each valid token as the model counts them, int64 ``[N]``."""
        given = call.given.get("position_ids")
        if given is None:
            given = torch.arange(padded)[None]
        every = given.expand(batch, padded).reshape(-1)
        return every if places is None else every.index_select(0, places)

    def join(
        self, site: Site, call: Call, share: Share, served: Tensor, exact: Exact, arguments: tuple[Any, Any]
    ) -> tuple[Any, float]:
        return self.blocks.leave(served, call), 0.0

    def close(self) -> None:
        """Nothing is held."""


def places_of(lengths: list[int], padded: int) -> Tensor | None:
    """Places of valid tokens in a flat batch, int64 ``[N]``; None if there is no padding."""
    if min(lengths) == padded:
        return None
    valid = np.arange(padded)[None] < np.asarray(lengths)[:, None]
    return torch.from_numpy(np.flatnonzero(valid))
