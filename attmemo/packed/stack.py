"""Serving a whole stack of blocks over packed rows, from nothing: `reuse="none"`.

One call of the stack does the work of all blocks. Valid tokens are taken out of the padded batch, the blocks run
over them (`runner.py`), and the last hidden states go back to where the tokens were. Sequences that are the same are
computed once (`duplicates.py`), and so is what causal ones begin with alike (`prefixes.py`). Outputs of padding are
zero. The pooler and the head are the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from attmemo.forward.context import NOTHING, Forward
from attmemo.forward.plan import Share
from attmemo.forward.reuse import Exact
from attmemo.kernels.members import are_empty, have
from attmemo.kernels.row_attention import Layout
from attmemo.kernels.row_sinks import Copies, Copy
from attmemo.models import Call, Site, Spans
from attmemo.models.blocks import Blocks
from attmemo.models.masks import consecutive, valid_places
from attmemo.packed.duplicates import Twins
from attmemo.packed.prefixes import Embedded, Folded, Prefixes
from attmemo.packed.runner import Fetch, Packed

ON_THE_RIGHT = "the mask is not plain padding on the right"
READS_PADDING = "the model's pooler reads a place of padding"


Keep = Callable[[list[int], Tensor, Tensor], None]
"""Gets lengths ``[B]``, K and V ``[layers, 2, N, H]``, and the last hidden states ``[N, H]``, all packed."""

Ints = npt.NDArray[np.int64]

Copied = Callable[[Ints], Copies]
"""Gets where each sequence begins among the computed rows, ``[B + 1]``; a twin of another one has no rows."""


class Onlookers:
    """Who else sees what modules are given and what they give: hooks of torch, and a `forward` around one of them.

    Parameters
    ----------
    modules : sequence of nn.Module
    own : sequence of pairs
        Modules, not only these, and the `forward` that may stand in front of each.
    """

    def __init__(self, modules: Sequence[nn.Module], own: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> None:
        everywhere, known = nn.modules.module, {id(module): hook for module, hook in own}
        hooks: list[Any] = [hooks for one in modules for hooks in (one._forward_hooks, one._forward_pre_hooks)]
        self._hooks = *hooks, everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks
        self._members = tuple([one.__dict__ for one in modules])
        self._own = tuple([known.get(id(one)) for one in modules])

    @property
    def have_hooks(self) -> bool:
        """Whether a hook must be called.

        transformers leaves hooks on modules once hidden states were asked for: they do nothing in a forward that is
        not asked for these.
        """
        return not are_empty(self._hooks) and any(
            getattr(hook, "__module__", None) != "transformers.utils.output_capturing"
            for hooks in self._hooks for hook in hooks.values()
        )  # fmt: skip

    @property
    def have_forwards(self) -> bool:
        """Whether another `forward` stands in front of a module than may."""
        return not have(self._members, "forward", self._own)


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
    shares : bool
        Whether what causal sequences of a batch begin with alike is computed once.
    """

    name: ClassVar[str] = "none"
    whole: ClassVar[bool] = True
    failure: ClassVar[str] = "the blocks could not be run over packed rows"

    def __init__(self, blocks: Blocks, packed: Packed) -> None:
        self.blocks, self.packed = blocks, packed
        self.keep: Keep | None = None
        self.shares = blocks.has_prefixes and packed.keeps_bits
        self.watch([])

    def read(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | str:
        call = self.blocks.read(args, kwargs)
        if isinstance(call, str):
            return call
        if call.hidden.dtype != self.packed.dtype:
            return f"hidden states are {call.hidden.dtype}, the model was {self.packed.dtype}"
        if torch.is_autocast_enabled("cpu"):
            return "autocast"
        if self._inside.have_hooks:
            return "a module inside of the blocks has hooks"
        if self._inside.have_forwards:
            return "a module inside of the blocks has a forward of its own"
        return call

    def watch(self, hooks: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> None:
        # Hooks on the module that holds all blocks run as ever: its input and its output are the original's. Where the
        # model itself calls the blocks, a `forward` put around one of them would see the last hidden states.
        whole = [self.blocks.module] if self.blocks.whole else []
        inner = [child for module in self.blocks.modules for child in module.modules() if child not in whole]
        self._inside = Onlookers(inner, hooks)

    def run_as(self, other: Stack) -> None:
        """Run the same blocks as another stack does now: in its arithmetic, and behind its hooks."""
        self.packed, self._inside = other.packed, other._inside

    def modules(self, site: Site) -> Sequence[nn.Module]:
        return self.blocks.modules

    def window(self, module: nn.Module) -> int | None:
        return self.blocks.mask_window

    def spans(self, module: nn.Module, call: Call, given: Mapping[str, Any] | None) -> Spans | str:
        given = {} if given is None else given
        mask = given.get("attention_mask")
        if isinstance(mask, dict):
            return "masks of its own for each kind of layer"
        if isinstance(mask, Tensor) and mask.dim() != 2 and any(block.window for block in self.blocks.blocks):
            return "a mask of its own in place of windows"
        batch, padded = int(call.hidden.shape[0]), int(call.hidden.shape[1])
        spans = self.blocks.spans(call.mask, batch, padded)
        if spans is None:
            return ON_THE_RIGHT
        if self.blocks.rotary and not consecutive(given.get("position_ids"), spans, padded):
            return "positions are not consecutive"
        return READS_PADDING if self.blocks.reads_padding(given, spans, padded) else spans

    def serve(self, site: Site, call: Call, spans: Spans, share: Share, forward: Forward) -> Tensor:
        """Last hidden states ``[B, L, H]``."""
        if self.keep is None:
            return self._whole(call, spans, forward)
        blocks, count = self.blocks, sum(spans.lengths)
        rows = call.hidden.new_empty(len(blocks.blocks), 2, count, blocks.heads * blocks.width)
        last = call.hidden.new_empty(count, call.hidden.shape[2])
        every = Copies([Copy(0, count, rows, last)])
        output = self._whole(call, spans, forward, lambda _: every, Twins.none(len(spans.lengths)))
        self.keep(spans.lengths, rows, last)
        return output

    def _whole(
        self, call: Call, spans: Spans, forward: Forward, copied: Copied | None = None, twins: Twins | None = None
    ) -> Tensor:
        """Last hidden states ``[B, L, H]`` of sequences that are all computed whole, each of `twins` once."""
        start, forward.outcome = perf_counter(), NOTHING
        batch = len(spans.lengths)
        twins = Twins.of(call.hidden, spans.lengths, left=spans.left) if twins is None else twins
        if self.shares and copied is None and not forward.first:
            output = self._folded(call, spans, forward, twins, start)
            if output is not None:
                return output
        some, lengths = twins.some, np.array(spans.lengths)
        if some:
            lengths[~twins.own] = 0
        starts = np.zeros(batch + 1, np.int64)
        np.cumsum(lengths, out=starts[1:])
        places = places_of(lengths.tolist(), call.hidden.shape[1], spans.left)
        keep = None if copied is None else copied(starts)
        own = np.append(starts[:-1][twins.own], starts[-1]) if some else starts
        asked = None if spans.left else self._asked(forward, own[:-1], keep)
        found = self.compute(
            call, places, Layout(own, own), max(spans.lengths), keep=keep, asked=asked, packed=forward.packed
        )
        if asked is not None:
            forward.firsts += 1
            found = put_first(found, asked, own[:-1], np.flatnonzero(twins.own), call.hidden.shape[:2])
        elif places is not None:
            found = put_back(found, places, batch * call.hidden.shape[1])
        output = found.view(call.hidden.shape)
        if some:
            twins.spread(output)
        self._count(spans.lengths, lengths, twins, forward, blocks=perf_counter() - start, first=asked is not None)
        return output

    def _folded(self, call: Call, spans: Spans, forward: Forward, twins: Twins, start: float) -> Tensor | None:
        """The same, where what sequences begin with alike is computed once; None: there is nothing such."""
        own = np.flatnonzero(twins.own)
        if len(own) < 2:
            return None
        embedded = Embedded(call.hidden, spans.lengths, spans.left)
        prefixes = Prefixes.of(embedded, own)
        if not prefixes.begins.any():
            return None
        folded = Folded.of(prefixes, embedded)
        found = self._compute_folded(call, folded, forward)
        output = unfold(found, folded, call.hidden.shape)
        twins.spread(output)
        lengths = np.array(spans.lengths)
        lengths[~twins.own] = 0
        self._count(
            spans.lengths, lengths, twins, forward, blocks=perf_counter() - start, shared=int(prefixes.begins.sum())
        )
        return output

    def _compute_folded(
        self, call: Call, folded: Folded, forward: Forward, fetch: Fetch | None = None, keep: Copies | None = None
    ) -> Tensor:
        longest = int(np.diff(folded.layout.key_starts).max())
        places = torch.from_numpy(folded.places)
        return self.compute(call, places, folded.layout, longest, fetch=fetch, keep=keep, packed=forward.packed)

    def compute(
        self, call: Call, places: Tensor | None, layout: Layout, longest: int, *, fetch: Fetch | None = None,
        keep: Copies | None = None, asked: Ints | None = None, packed: Packed | None = None,
    ) -> Tensor:  # fmt: skip
        """Last hidden states ``[N, H]`` of the tokens at these places of the flat batch; None: of all.

        `asked`: of these rows alone, ``[W, H]``. `packed`: in place of the stack's own blocks.
        """
        return (packed or self.packed).run(
            call.rows_at(places), layout, longest, fetch, keep, self.blocks.added(call, places), asked
        )

    def _asked(self, forward: Forward, firsts: Ints, keep: Copies | None) -> Ints | None:
        """The computed rows whose last hidden states are asked for, and rise; None: all.

        `firsts`: those of each sequence's first token.
        """
        if not forward.first or self.keep is not None:
            return None
        return firsts if keep is None else keep.asked(firsts)

    def _count(
        self, lengths: list[int], rows: npt.NDArray[np.int64], twins: Twins, forward: Forward, *, blocks: float,
        fetch: float = 0.0, beside: int = 0, first: bool = False, shared: int = 0,
        stored: int = 0,
    ) -> None:  # fmt: skip
        """Count one forward: tokens and computed rows of each sequence, and seconds by part.

        `beside`: rows that were computed to verify answers. `first`: first rows alone were given. `shared`: of these
        rows so many were computed for another sequence of the batch. `stored`: rows of stored prefixes.

        An observer sees for each twin the rows of the first one, and rows that are shared as if they were not: a
        client must not learn what others ask meanwhile.
        """
        if forward.observed is not None:
            forward.observed.see(lengths, rows[twins.firsts].tolist(), forward.repeats, beside)
        asked = [] if forward.repeats else lengths
        computed = int(rows.sum()) + beside - shared
        forward.counters.work(len(asked), sum(asked), computed, fetch=fetch, blocks=blocks, first=first)
        if shared or stored:
            forward.counters.prefixes(shared, stored)

    def join(
        self, site: Site, call: Call, share: Share, served: Tensor, exact: Exact, arguments: tuple[Any, Any]
    ) -> tuple[Any, float]:
        return self.blocks.leave(served, call), 0.0

    def passed(self, hidden: Tensor) -> Any:
        return self.blocks.passed(hidden)

    def close(self) -> None:
        """Nothing is held."""


def put_back(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """Rows ``[N, H]`` at these places of ``[count, H]``, zeros elsewhere."""
    return rows.new_zeros(count, rows.shape[1]).index_copy_(0, places, rows)


def unfold(found: Tensor, folded: Folded, shape: Sequence[int]) -> Tensor:
    """Rows ``[B, L, H]`` of all tokens, zeros elsewhere, from the computed ones ``[N, H]``."""
    rows = found.index_select(0, torch.from_numpy(folded.sources))
    return put_back(rows, torch.from_numpy(folded.every), shape[0] * shape[1]).view(*shape)


def put_first(found: Tensor, asked: Ints, firsts: Ints, slots: Ints, shape: Sequence[int]) -> Tensor:
    """Rows `firsts`, of the rows ``[W, H]`` that were asked for, as first rows of these sequences of ``[B, L]``.

    All others are NaN, flat as the result ``[B * L, H]`` is: what would read them gives no number.
    """
    output = found.new_full((shape[0] * shape[1], found.shape[1]), torch.nan)
    if len(asked) > len(firsts):
        found = found.index_select(0, torch.from_numpy(np.searchsorted(asked, firsts)))
    return output.index_copy_(0, torch.from_numpy(slots * shape[1]), found)


def places_of(lengths: list[int], padded: int, left: bool = False) -> Tensor | None:
    """Places of valid tokens in a flat batch, int64 ``[N]``; None if there is no padding.

    `left`: whether padding is on the left.
    """
    if min(lengths) == padded:
        return None
    valid = valid_places(lengths, padded)
    return torch.from_numpy(np.flatnonzero(valid[:, ::-1] if left else valid))
