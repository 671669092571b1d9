"""The arguments of one call: read, checked against the specification, and resolved.

Everything is checked before anything is written. The hard part is `_check_contents`: which rows of the cache are
used, do these rows exist, and does one sequence write rows that another sequence reads or writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from attmemo.errors import ArgumentError, ArgumentTypeError, CacheOverlapError, CacheRangeError
from attmemo.fastseq.serving.ops import cache_attention
from attmemo.fastseq.serving.ops.cache_layout import AXES, cache_shape, layer_planes, scale_shape

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_CODES = {8: (torch.int8,), 4: (torch.uint8, torch.int8)}
_MASKS = (*FLOATS, torch.float64)

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Indices:
    """Where sequences and pages lie, as arrays in the host's memory: the four index inputs."""

    seqstarts: Ints  # [B + 1]
    kvstarts: Ints  # [B + 1]
    cachestarts: Ints  # [B] or [B, MaxP]
    start_pos: Ints  # [B]

    @property
    def lengths(self) -> Ints:
        """New tokens of each sequence: ``sq``."""
        return np.diff(self.seqstarts)

    @property
    def kv_lengths(self) -> Ints:
        """Keys of each sequence, those in the cache and the new ones: ``kv``."""
        return np.diff(self.kvstarts)


@dataclass(frozen=True)
class Arguments:
    """One call, its shapes and types checked. Shapes: B sequences, N tokens, H and Hk heads, D elements a head."""

    query: torch.Tensor  # [N, H, D]
    key: torch.Tensor  # [N, Hk, D]
    value: torch.Tensor  # [N, Hk, D]
    seqstarts: torch.Tensor  # [B + 1]
    kvstarts: torch.Tensor  # [B + 1]
    cachestarts: torch.Tensor  # [B], or [B, MaxP] with pages
    start_pos: torch.Tensor  # [B]
    decoding_batches: int
    max_seqlen: int | None  # None: to be computed
    max_kvlen: int | None
    cache: torch.Tensor  # see layout.cache_shape
    scale: torch.Tensor | None  # see layout.scale_shape; None unless quantised
    mask: torch.Tensor | None  # [H or 1, N, >= kvstarts[B]]; added to the scores
    num_heads: int
    head_dim: int
    is_causal: bool
    is_alibi: bool
    num_kv_heads: int  # resolved: never 0
    layer_idx: int
    quant_bit: int
    quant_group: int
    paged: bool
    cache_layout: int
    page_size: int

    @property
    def batch(self) -> int:
        """Sequences: B."""
        return self.start_pos.shape[0]

    @property
    def tokens(self) -> int:
        """Rows of the cache: MaxT."""
        return self.cache.shape[AXES[self.cache_layout].index("T")]

    @property
    def repeats(self) -> int:
        """Query heads that share a key-value head: R."""
        return self.num_heads // self.num_kv_heads

    @cached_property
    def cache_planes(self) -> torch.Tensor:
        """The layer's keys and values, a view ``[2, tokens, Hk, D]`` (4 bits: ``D / 2``)."""
        return layer_planes(self.cache, self.cache_layout, self.layer_idx)

    @cached_property
    def scale_planes(self) -> torch.Tensor | None:
        """The layer's scales, a view ``[2, tokens, Hk, D / quant_group]``."""
        return None if self.scale is None else layer_planes(self.scale, self.cache_layout, self.layer_idx)

    @cached_property
    def indices(self) -> Indices:
        """The index inputs on the host, copied: what was checked must be what is used. Waits for a device."""
        arrays = (
            np.array(tensor.detach().cpu().numpy(), np.int64, order="C")
            for tensor in (self.seqstarts, self.kvstarts, self.cachestarts, self.start_pos)
        )
        return Indices(*arrays)

    def tensors(self) -> tuple[Any, ...]:
        """What `attmemo.fastseq.serving.ops.cache_attention` takes by position."""
        at = self.indices
        indices = (at.seqstarts, at.kvstarts, at.cachestarts, at.start_pos)
        return self.query, self.key, self.value, self.cache_planes, self.scale_planes, self.mask, indices

    def settings(self) -> dict[str, Any]:
        """What `attmemo.fastseq.serving.ops.cache_attention` takes by name."""
        names = ("quant_bit", "page_size", "decoding_batches", "is_causal", "is_alibi")
        return {name: getattr(self, name) for name in names}


def _refuse(what: str, hint: str | None = None, kind: type[ArgumentError] = ArgumentError) -> NoReturn:
    raise kind(f"multi_head_cache_attention: {what}", hint)


def _integer(name: str, value: Any) -> int:
    """An integer given as such, or as a tensor of one element."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            _refuse(
                f"{name} is a tensor {list(value.shape)} {value.dtype}, expected one integer", kind=ArgumentTypeError
            )
        return int(value.item())
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        _refuse(f"{name} is {value!r}, expected an integer", kind=ArgumentTypeError)
    return int(value)


def _check_attributes(a: Arguments, num_layer: int) -> None:
    for name in ("num_heads", "head_dim", "quant_group", "page_size"):
        if getattr(a, name) < 1:
            _refuse(f"{name} is {getattr(a, name)}, expected 1 or more")
    if a.num_kv_heads < 1 or a.num_heads % a.num_kv_heads:
        _refuse(f"num_heads {a.num_heads} is not a multiple of num_kv_heads {a.num_kv_heads}")
    if num_layer < 1 or not 0 <= a.layer_idx < num_layer:
        _refuse(f"layer_idx is {a.layer_idx}, expected 0 to num_layer - 1, and num_layer is {num_layer}")
    if a.cache_layout not in range(len(AXES)):
        _refuse(f"cache_layout is {a.cache_layout}, expected 0, 1, 2 or 3")
    if a.quant_bit not in (0, 8, 4):
        _refuse(f"quant_bit is {a.quant_bit}, expected 0 (none), 8 or 4")
    if a.quant_bit and a.head_dim % a.quant_group:
        _refuse(f"head_dim {a.head_dim} is not a multiple of quant_group {a.quant_group}")
    if a.quant_bit == 4 and (a.head_dim % 2 or a.quant_group % 2):
        _refuse(
            f"head_dim {a.head_dim} and quant_group {a.quant_group} must be even with quant_bit 4",
            "two elements share a byte, and they must share a scale",
        )


def _check_tensor(name: str, tensor: Any, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    if not isinstance(tensor, torch.Tensor):
        _refuse(f"{name} is a {type(tensor).__name__}, expected a tensor", kind=ArgumentTypeError)
    if tensor.dtype not in dtypes:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        hint = None
        if name == "attn_mask" and tensor.dtype == torch.bool:
            hint = "the mask is added to the scores: torch.zeros(shape).masked_fill(~mask, float('-inf'))"
        _refuse(
            f"{name} is {str(tensor.dtype).removeprefix('torch.')}, expected {expected}", hint, kind=ArgumentTypeError
        )
    if tensor.device != device:
        _refuse(f"{name} is on {tensor.device}, query on {device}", f"{name}.to({str(device)!r})")


def _check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...], meaning: str) -> None:
    if tuple(tensor.shape) != expected:
        _refuse(f"{name} has shape {list(tensor.shape)}, expected {list(expected)}: {meaning}")


def _check_tensors(a: Arguments, num_layer: int, given_mask: torch.Tensor | None) -> None:
    query, device = a.query, getattr(a.query, "device", torch.device("cpu"))
    heads, width, layout = a.num_heads, a.head_dim, a.cache_layout
    _check_tensor("query", query, FLOATS, device)
    if query.dim() != 3:
        _refuse(f"query has shape {list(query.shape)}, expected [tokens, num_heads, head_dim]")
    _check_shape("query", query, (query.shape[0], heads, width), "(tokens, num_heads, head_dim)")
    for name in ("key", "value"):
        _check_tensor(f"current_{name}", getattr(a, name), (query.dtype,), device)
        _check_shape(
            f"current_{name}",
            getattr(a, name),
            (query.shape[0], a.num_kv_heads, width),
            "(tokens, num_kv_heads, head_dim)",
        )
    for name in ("seqstarts", "kvstarts", "cachestarts", "start_pos"):
        _check_tensor(name, getattr(a, name), (torch.int64, torch.int32), device)
    if a.start_pos.dim() != 1:
        _refuse(f"start_pos has shape {list(a.start_pos.shape)}, expected [sequences]")
    batch = a.start_pos.shape[0]
    for name in ("seqstarts", "kvstarts"):
        _check_shape(name, getattr(a, name), (batch + 1,), "one more than start_pos has sequences")
    if a.cachestarts.dim() != (2 if a.paged else 1):
        _refuse(
            f"cachestarts has shape {list(a.cachestarts.shape)}, expected "
            + ("[sequences, pages] with cache_mode 1" if a.paged else "[sequences] with cache_mode 0")
        )
    if a.cachestarts.shape[0] != batch:
        _refuse(f"cachestarts has {len(a.cachestarts)} sequences, start_pos {batch}")

    _check_tensor("cache", a.cache, _CODES.get(a.quant_bit, FLOATS), device)
    if a.cache.dim() != 5:
        _refuse(f"cache has shape {list(a.cache.shape)}, expected five axes: see attmemo.fastseq.ops.cache_shape")
    tokens = a.cache.shape[AXES[layout].index("T")]
    shape = cache_shape(layout, tokens, num_layer, a.num_kv_heads, width, a.quant_bit)
    _check_shape("cache", a.cache, shape, f"as cache_layout {layout} has it")
    if a.quant_bit:
        if a.scale is None:
            _refuse(f"scale is missing with quant_bit {a.quant_bit}", "scale_shape() has its shape")
        _check_tensor("scale", a.scale, FLOATS, device)
        shape = scale_shape(layout, tokens, num_layer, a.num_kv_heads, width, a.quant_group)
        _check_shape("scale", a.scale, shape, f"as cache_layout {layout} and quant_group have it")
    elif a.scale is not None:
        _refuse("scale is given with quant_bit 0, which uses none", "pass None, or quant_bit=8")
    for name in ("cache", "scale"):
        written = getattr(a, name)
        if written is not None and any(n > 1 and s == 0 for n, s in zip(written.shape, written.stride(), strict=True)):
            _refuse(f"{name} is expanded: several of its elements share memory, and it is written", "clone() it")

    mask = a.mask
    if mask is not None:
        _check_tensor("attn_mask", mask, _MASKS, device)
        if mask.dim() != 3 or mask.shape[0] not in (1, heads) or mask.shape[1] != query.shape[0]:
            given = list(mask.shape if given_mask is None else given_mask.shape)
            _refuse(
                f"attn_mask has shape {given}, expected [tokens, keys] or [num_heads, tokens, keys] with "
                f"{query.shape[0]} tokens and {heads} heads"
            )


def _is_sound(a: Arguments) -> bool:
    """Whether `_check_contents` would find nothing: the same rules in native code, which is done in microseconds."""
    if any(limit is not None and limit < 0 for limit in (a.max_seqlen, a.max_kvlen)):
        return False
    return cache_attention.are_sound(
        a.tensors()[-1],
        tokens=a.query.shape[0],
        rows=a.tokens,
        page_size=a.page_size,
        decoding_batches=a.decoding_batches,
        max_seqlen=a.max_seqlen,
        max_kvlen=a.max_kvlen,
        mask_columns=None if a.mask is None else a.mask.shape[2],
    )


def _check_contents(a: Arguments) -> None:
    """Whether the index inputs agree with each other, with the limits and with the cache."""
    at = a.indices
    for name, starts in (("seqstarts", at.seqstarts), ("kvstarts", at.kvstarts)):
        if starts[0] != 0 or np.any(starts[1:] < starts[:-1]):
            _refuse(f"{name} must begin with 0 and never decrease, not {_show(starts)}")
    if at.seqstarts[-1] != a.query.shape[0]:
        _refuse(f"seqstarts ends with {at.seqstarts[-1]}, but query has {a.query.shape[0]} tokens")
    for b in np.nonzero(at.start_pos < 0)[0][:1]:
        _refuse(f"start_pos of sequence {b} is {at.start_pos[b]}, expected 0 or more")
    lengths, kv_lengths = at.lengths, at.kv_lengths
    for b in np.nonzero(kv_lengths - lengths != at.start_pos)[0][:1]:
        _refuse(
            f"kvstarts gives sequence {b} {kv_lengths[b]} keys, but start_pos {at.start_pos[b]} and {lengths[b]} new "
            f"tokens make {at.start_pos[b] + lengths[b]}",
            "kvstarts[b + 1] - kvstarts[b] = start_pos[b] + seqstarts[b + 1] - seqstarts[b]",
        )
    if not 0 <= a.decoding_batches <= a.batch:
        _refuse(f"decoding_batches is {a.decoding_batches}, expected 0 to {a.batch}, the number of sequences")
    for name, limit, seen in (("max_seqlen", a.max_seqlen, lengths), ("max_kvlen", a.max_kvlen, kv_lengths)):
        if limit is not None and limit < seen.max(initial=0):
            _refuse(f"{name} is {limit}, but a sequence has {seen.max(initial=0)}")
    if a.mask is not None and a.mask.shape[2] < at.kvstarts[-1]:
        _refuse(f"attn_mask has {a.mask.shape[2]} columns, but all sequences together have {at.kvstarts[-1]} keys")
    _check_rows(a, lengths, kv_lengths)


def _check_rows(a: Arguments, lengths: Ints, kv_lengths: Ints) -> None:
    """Every row that is used exists; no row is written twice, nor written by one behind a sequence that reads it."""
    at = a.indices
    if a.paged:
        pages, size = at.cachestarts, a.page_size
    else:  # one page for everything
        pages, size = at.cachestarts[:, None], max(1, int(kv_lengths.max(initial=1)))
    used = -(-kv_lengths // size)
    for b in np.nonzero(used > pages.shape[1])[0][:1]:
        _refuse(
            f"sequence {b} has {kv_lengths[b]} keys, but {pages.shape[1]} pages of {size} hold "
            f"{pages.shape[1] * size}",
            "cachestarts needs an entry for every page",
        )
    owner = np.repeat(np.arange(a.batch), used)  # of each page in use
    place = np.arange(used.sum()) - np.repeat(np.cumsum(used) - used, used)  # its number in its sequence
    start = pages[owner, place]
    count = np.minimum(size, kv_lengths[owner] - place * size)
    for bad in np.nonzero((start < 0) | (start > a.tokens - count))[0][:1]:
        entry = f"cachestarts[{owner[bad]}" + (f", {place[bad]}]" if a.paged else "]")
        _refuse(
            f"{entry} is {start[bad]}, and {count[bad]} rows from there are used, but the cache has {a.tokens}",
            "entries are token offsets, not page numbers: see attmemo.fastseq.ops.page_offsets",
            CacheRangeError,
        )

    first = np.maximum(0, at.start_pos[owner] - place * size)  # of each page, the first row written
    writes = (first < count) & (lengths[owner] > 0)
    low, high, writer = (start + first)[writes], (start + count)[writes], owner[writes]
    order = np.argsort(low, kind="stable")
    low, high, writer = low[order], high[order], writer[order]
    for bad in np.nonzero(low[1:] < high[:-1])[0][:1]:
        _refuse(
            f"sequences {writer[bad]} and {writer[bad + 1]} both write row {low[bad + 1]} of the cache",
            "give each sequence pages of its own from start_pos on",
            CacheOverlapError,
        )
    # Rows are read when all are written. What a later sequence writes, an earlier one would, by the specification,
    # have read before: the two must not meet. The other way round they may: two requests with one new prefix.
    lowest, behind = np.searchsorted(high, start, "right"), np.searchsorted(low, start + count, "left")
    for page in np.nonzero(behind > lowest)[0] if a.batch > 1 else ():
        late = writer[lowest[page] : behind[page]]
        if np.any(late > owner[page]):
            _refuse(
                f"sequence {late.max()} writes rows of the cache that sequence {owner[page]} before it reads",
                "copy a shared page before writing to it",
                CacheOverlapError,
            )


def _show(numbers: Ints) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"[{shown}, ...]" if len(numbers) > 8 else f"[{shown}]"


def check_arguments(
    query: torch.Tensor,
    current_key: torch.Tensor,
    current_value: torch.Tensor,
    seqstarts: torch.Tensor,
    kvstarts: torch.Tensor,
    cachestarts: torch.Tensor,
    start_pos: torch.Tensor,
    decoding_batches: torch.Tensor | int,
    max_seqlen: torch.Tensor | int | None,
    max_kvlen: torch.Tensor | int | None,
    cache: torch.Tensor,
    scale: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
    num_heads: int,
    head_dim: int,
    is_causal: bool = True,
    is_alibi: bool = False,
    num_kv_heads: int = 0,
    num_layer: int = 1,
    layer_idx: int = 0,
    quant_bit: int = 0,
    quant_group: int = 8,
    cache_mode: int = 0,
    cache_layout: int = 0,
    page_size: int = 128,
    *,
    validate: bool = True,
) -> Arguments:
    """Check a call against the specification and resolve what may be left out.

    Parameters are those of `multi_head_cache_attention`. Shapes and types are always checked; with ``validate=False``
    what stands in the index inputs is believed (and on a GPU not waited for).

    Raises
    ------
    ArgumentTypeError
        If a dtype or an argument's type is wrong.
    CacheRangeError, CacheOverlapError
        If a page in use lies outside the cache, or two sequences would disturb each other.
    ArgumentError
        If any other rule is broken; it is the base of the others.
    """
    if cache_mode not in (0, 1):
        _refuse(f"cache_mode is {cache_mode}, expected 0 (offset) or 1 (pages)")
    mask = attn_mask if isinstance(attn_mask, torch.Tensor) and attn_mask.numel() > 0 else None
    if mask is None and isinstance(attn_mask, torch.Tensor) and attn_mask.dtype == torch.bool:
        _check_tensor("attn_mask", attn_mask, _MASKS, attn_mask.device)
    if isinstance(scale, torch.Tensor) and scale.numel() == 0 and not quant_bit:
        scale = None  # how a graph says that there is none
    arguments = Arguments(
        query=query,
        key=current_key,
        value=current_value,
        seqstarts=seqstarts,
        kvstarts=kvstarts,
        cachestarts=cachestarts,
        start_pos=start_pos,
        decoding_batches=_integer("decoding_batches", decoding_batches),
        max_seqlen=None if max_seqlen is None else _integer("max_seqlen", max_seqlen),
        max_kvlen=None if max_kvlen is None else _integer("max_kvlen", max_kvlen),
        cache=cache,
        scale=scale,
        mask=mask[None] if mask is not None and mask.dim() == 2 else mask,
        num_heads=num_heads,
        head_dim=head_dim,
        is_causal=bool(is_causal),
        is_alibi=bool(is_alibi),
        num_kv_heads=num_kv_heads or num_heads,
        layer_idx=layer_idx,
        quant_bit=quant_bit,
        quant_group=quant_group,
        paged=cache_mode == 1,
        cache_layout=cache_layout,
        page_size=page_size,
    )
    _check_attributes(arguments, num_layer)
    _check_tensors(arguments, num_layer, mask)
    if validate and not _is_sound(arguments):
        _check_contents(arguments)
    return arguments
