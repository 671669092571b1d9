"""The blocks of an encoder: where they are, how one is put together, and what its attention needs beside Q, K and V.

`packed/runner.py` runs blocks over packed rows: the valid tokens of all sequences, one behind the other. An adapter of
a family with blocks returns a `Blocks`; families differ in names, in where they normalise, and in positions.

Shapes: N packed rows, hidden size H, h heads of width d.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attmemo.kernels.norms import is_norm
from attmemo.kernels.row_attention import Disentangled
from attmemo.models.base import Adapter, Call
from attmemo.models.cache_name import NEW, OLD, cache_of
from attmemo.models.masks import Spans, adds_booleans, read_mask, spans_of
from attmemo.models.projections import is_linear, is_plain

# Arguments of a stack that cannot change what it computes, or that `read` looks at by name.
_HARMLESS = frozenset({
    "hidden_states", "attention_mask", "position_embeddings", "position_ids", "return_dict", "use_cache",
    "output_hidden_states", "output_attentions", NEW, OLD,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Routed:
    """A feed-forward layer in parts, of which each row uses few: experts.

    The products of a row with the router's weights choose the parts, and become shares of their sum by softmax.
    """

    module: nn.Module  # the original, which gives the output first
    router: nn.Linear
    parts: tuple[tuple[nn.Linear, nn.Linear], ...]  # each a gated layer, and the one behind it
    used: int  # parts of a row
    activation: str  # of the gates, as kernels name it


@dataclass(frozen=True, slots=True)
class Block:
    """One block: attention with its residual, then the feed-forward layer with its residual.

    Each of the norms may be missing (None): before attention, of what it gives (`inner`), and of the sum with the
    residual (`behind`); the same three of the feed-forward layer; those of each head of Q and K.
    """

    module: nn.Module
    qkv: tuple[nn.Module, ...]  # layers for Q, K and V; or one layer whose outputs are Q, K and V in this order
    out: nn.Module
    before: nn.Module | None
    behind: nn.Module | None
    up: tuple[nn.Module, ...]  # one layer; or one that is activated, and one that it is multiplied by; or none
    activation: Callable[[Tensor], Tensor]
    gated: bool  # the first half of what `up` gives is activated, and multiplied by the other half
    down: nn.Module | None
    before_feed: nn.Module | None
    behind_feed: nn.Module | None
    inner: nn.Module | None = None
    inner_feed: nn.Module | None = None
    query: nn.Module | None = None
    key: nn.Module | None = None
    window: int | None = None  # a token sees tokens less than this far away
    kind: str = ""  # of layers with different rotary positions
    sinks: Tensor | None = None  # of each head a score that has no value, float32
    routed: Routed | None = None  # in place of `up` and `down`

    @property
    def linears(self) -> tuple[nn.Module, ...]:
        parts = () if self.routed is None else [one for pair in self.routed.parts for one in pair]
        return (*self.qkv, self.out, *self.up, *([] if self.down is None else [self.down]), *parts)

    @property
    def norms(self) -> tuple[nn.Module | None, ...]:
        feed = self.before_feed, self.inner_feed, self.behind_feed
        return self.before, self.inner, self.behind, *feed, self.query, self.key


class Blocks:
    """All blocks of one model, in order.

    Parameters
    ----------
    module : nn.Module
        Its `forward` gets the embedded hidden states and the mask. It holds all blocks; or it is the first block, and
        `followers` are the others, which the model itself calls one after the other.
    blocks : sequence of Block
    heads, width : int
        Heads of the attention, h, and their width, d.
    scale : float
        Factor of a product of query and key.
    followers : sequence of nn.Module
    key_heads : int, optional
        Heads of K and V, where several of Q share one. None: as many.
    """

    parameters: ClassVar[tuple[str, ...]] = ("hidden_states", "attention_mask")  # given by position
    rotary: ClassVar[bool] = False  # K is stored rotated by its position
    relative: bool = False  # positions enter by distances between tokens alone
    added_norm: nn.Module | None = None  # behind what `added` gives
    causal: bool = False  # a token sees itself and those before
    no_records: str | None = None  # why rows of records cannot serve them, if not for the reasons of `no_rows`
    output: type[Any] = tuple  # class of what `module` returns, if it holds all blocks; known once it was run

    def __init__(
        self, module: nn.Module, blocks: Sequence[Block], heads: int, width: int, scale: float,
        followers: Sequence[nn.Module] = (), key_heads: int | None = None,
    ) -> None:  # fmt: skip
        self.module, self.blocks, self.followers = module, tuple(blocks), tuple(followers)
        self.heads, self.width, self.scale = heads, width, scale
        self.key_heads = heads if key_heads is None else key_heads

    @property
    def nbytes(self) -> int:
        """Bytes that are kept beside the model's weights."""
        return 0

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """All modules whose work the stack does."""
        return (self.module, *self.followers)

    def refusal(self) -> str | None:
        """Why these blocks cannot be run over packed rows; None if they can."""
        for number, block in enumerate(self.blocks):
            for linear in block.linears:
                if not is_linear(linear):
                    return f"block {number} has a {type(linear).__qualname__} in place of a linear layer"
            for norm in block.norms:
                if norm is not None and not is_norm(norm):
                    return f"block {number} has a {type(norm).__qualname__} in place of a layer norm"
            for norm in (block.query, block.key):
                if norm is not None and norm.weight.shape != (self.width,):
                    return f"block {number} has norms of Q and K that are not those of a head"
        kinds = {str(one.weight.dtype)[6:] for block in self.blocks for one in block.linears if is_plain(one)}
        if len(kinds) > 1:
            return f"its linear layers are of several types ({', '.join(sorted(kinds))})"
        if self.added_norm is not None and type(self.added_norm) is not nn.LayerNorm:
            return f"behind its first block is a {type(self.added_norm).__qualname__} in place of a layer norm"
        return None

    @property
    def no_rows(self) -> str | None:
        """Why rows of records cannot serve these blocks; None if they can."""
        if self.causal:
            return "its blocks are causal"
        if self.no_records is not None:
            return self.no_records
        return "several heads of Q share one of K and V" if self.key_heads != self.heads else None

    # -- a call of the stack

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | str:
        """The call's hidden states and mask, or the reason why the call must stay exact."""
        if len(args) > len(self.parameters):
            return "more positional arguments than are known"
        given = dict(zip(self.parameters, args, strict=False)) | dict(kwargs)
        hidden = given.get("hidden_states")
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            return "hidden states are not [batch, length, hidden]"
        if cache_of(given) is not None:  # an empty one too: it is there to be filled
            return "a key-value cache is in use"
        # A block that is asked for a cache, and given none, has nothing to fill.
        for name in ("output_attentions", *(["use_cache"] if self.whole else [])):
            if given.get(name):
                return name
        for name, value in given.items():
            if name not in _HARMLESS and value is not None and value is not False:
                return f"the argument {name}"
        return Call(hidden, given.get("attention_mask"), None, given)

    def spans(self, mask: Any, batch: int, length: int) -> Spans | None:
        """Where valid tokens lie; None if the mask is not plain padding on the right.

        Padding may be on the left where distances between tokens alone count (`sees_distances`).
        """
        if isinstance(mask, Tensor) and mask.dim() == 2:
            valid = mask != 0
            if mask.shape != (batch, length) or not torch.equal(valid.to(mask.dtype), mask):
                return None
            spans = spans_of(valid)
        elif adds_booleans(self.module, mask):
            return None
        else:
            spans = read_mask(mask, batch, length, self.causal, self.mask_window)
        return None if spans is not None and spans.left and not self.sees_distances else spans

    def reads_padding(self, given: Mapping[str, Any], spans: Spans, padded: int) -> bool:
        """Whether the model reads what its blocks give for padding, in a forward with these arguments."""
        return False

    @property
    def has_prefixes(self) -> bool:
        """Whether rows that sequences begin with alike may be computed once: proven for causal, rotary blocks."""
        return self.causal and self.rotary

    @property
    def reach(self) -> int | None:
        """How far a row of the last hidden states sees to each side, through all blocks; None: without a limit."""
        if self.causal or not self.rotary:
            return None
        windows = [block.window for block in self.blocks if block.window is not None]
        return sum(windows) - len(windows) if len(windows) == len(self.blocks) else None

    @property
    def sees_distances(self) -> bool:
        """Whether blocks and embeddings are the same wherever a sequence begins."""
        return self.rotary

    @cached_property
    def whole(self) -> bool:
        """Whether `module` holds all blocks; if not it is the first of them, also if there is no other."""
        return self.module is not self.blocks[0].module

    @cached_property
    def mask_window(self) -> int | None:
        """The window of the mask that `module` gets."""
        return None if self.whole else self.blocks[0].window

    def leave(self, hidden: Tensor, call: Call) -> Any:
        """The return value of the module's `forward`, from the last hidden states ``[B, L, H]``."""
        if not self.whole:
            return self.passed(hidden)
        if issubclass(self.output, Tensor):
            return hidden
        return (hidden,) if self.output is tuple else self.output(last_hidden_state=hidden)

    def passed(self, hidden: Tensor) -> Any:
        """What a block returns that the model itself calls, from the last hidden states ``[B, L, H]``."""
        return hidden

    def added(self, call: Call, places: Tensor | None) -> Tensor | None:
        """What is added to the output of the first block, before `added_norm`; None: nothing is.

        Parameters
        ----------
        call : Call
            Embedded hidden states of the padded batch.
        places : Tensor or None
            Places in the flat batch, int64 ``[N]``, of the tokens that the result ``[N, H]`` is of; None: all.
        """
        return None

    # -- what attention needs beside Q, K and V; asked for once and kept

    def table(self, span: int) -> Tensor | None:
        """Bias by distance, float32 ``[h, 2 * span - 1]``: of key position less query position, plus ``span - 1``."""
        return None

    def tables(self, span: int) -> list[Tensor | None]:
        """The bias of each layer, or one that is that of all."""
        return [self.table(span)]

    def disentangled(self, layer: int, span: int) -> Disentangled | None:
        """Position terms of DeBERTa for one layer."""
        return None

    def angles(self, kind: str, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines ``[N, d]`` of rotary positions ``[N]``, as the model computes them in this type.

        None if positions are not rotary.
        """
        return None


class RotaryBlocks(Blocks):
    """Blocks that the model itself calls one after the other; queries and keys are rotated by their positions.

    Parameters
    ----------
    host : nn.Module
        The model that calls the blocks; its ``rotary_emb`` computes the angles, for blocks of a kind those of it.
    scale : float, optional
        Default: one by the root of the width.
    """

    rotary = True
    relative = True

    def __init__(
        self, host: Any, blocks: Sequence[Block], heads: int, width: int, *, scale: float | None = None,
        key_heads: int | None = None, causal: bool = False,
    ) -> None:  # fmt: skip
        first, *others = (block.module for block in blocks)
        super().__init__(first, blocks, heads, width, width**-0.5 if scale is None else scale, others, key_heads)
        self.host, self.causal = host, causal

    def angles(self, kind: str, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cosine, sine = self.host.rotary_emb(torch.empty(0, dtype=dtype), positions[None], *([kind] if kind else []))
        return cosine[0], sine[0]


def find_blocks(adapter: Adapter, model: nn.Module) -> Blocks | str:
    """The blocks of a model, or why they cannot be run over packed rows."""
    try:
        found = adapter.blocks(model)
    except AttributeError as error:
        return f"its blocks are of an unknown form ({error})"
    if isinstance(found, str):
        return found
    if not adapter.has_rows:
        found.no_records = f"rows of this family ({adapter.family}) are not proven"
    return found.refusal() or found


def bert_block(layer: Any, qkv: Sequence[nn.Module], out: nn.Module, behind: nn.Module) -> Block:
    """A block that normalises behind each residual, with a feed-forward layer named as BERT's."""
    up, down = layer.intermediate, layer.output
    return Block(
        layer, tuple(qkv), out, None, behind, (up.dense,), up.intermediate_act_fn, False, down.dense, None,
        down.LayerNorm,
    )  # fmt: skip
