"""A key-value cache for many sequences: who holds which page, and the operator's inputs for the next step.

The tensors are the operator's `cache` and `scale`; this file decides where in them each sequence lies. A server asks
for a step (`advance`), runs the model's layers on it (`attend`), and frees what has finished (`free`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from attmemo.errors import ArgumentError, DoubleFreeError, OutOfPagesError, StaleStepError, UnknownSequenceError
from attmemo.fastseq.serving.ops.attention import multi_head_cache_attention
from attmemo.fastseq.serving.ops.cache_attention import cache_rows, load
from attmemo.fastseq.serving.ops.cache_layout import AXES, cache_shape, layer_planes, scale_shape
from attmemo.fastseq.serving.ops.cache_step import CachedSequence, CacheStep, make_step
from attmemo.fastseq.serving.ops.page_allocator import PageAllocator
from attmemo.kernels.pages import zeros


@dataclass(frozen=True)
class CacheStats:
    """How full a cache is."""

    pages: int
    pages_free: int
    pages_used: int
    pages_shared: int  # held by more than one sequence
    sequences: int
    tokens: int  # of all sequences; a shared one counts for each
    bytes: int  # of the tensors
    bytes_used: int  # of the pages in use
    bytes_per_token: int


class KeyValueCache:
    """Keys and values of many sequences in one tensor, with pages that sequences can share.

    Parameters
    ----------
    pages, page_size : int
        How many pages, and tokens of each.
    num_kv_heads, head_dim, num_layer : int
        As the operator's attributes.
    dtype : torch.dtype
        Of the model's keys and values, and of the cache unless it is quantised.
    quant_bit, quant_group : int
        0, 8 or 4 bits, and how many neighbouring elements share a scale.
    scale_dtype : torch.dtype, optional
        Of the scales; that of the keys if not given. float16 halves their bytes, and rounds them.
    cache_mode : int
        1: pages anywhere. 0: each sequence lies in neighbouring rows; a sequence that grows into another's is moved,
        and `fork` copies instead of sharing.
    cache_layout : int
        How the axes lie in memory; see `cache_shape`.
    device : torch.device or str, optional
        Where the tensors are.

    Raises
    ------
    ArgumentError
        If there is no such cache.

    Notes
    -----
    One thread at a time. Pages are given out by reference count; a page that is only partly filled can be shared too
    and is copied when one of its holders writes to it.
    """

    def __init__(
        self,
        *,
        pages: int,
        page_size: int = 128,
        num_kv_heads: int,
        head_dim: int,
        num_layer: int = 1,
        dtype: torch.dtype = torch.float32,
        quant_bit: int = 0,
        quant_group: int = 8,
        scale_dtype: torch.dtype | None = None,
        cache_mode: int = 1,
        cache_layout: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        sizes = {"pages": pages, "page_size": page_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for name, size in {**sizes, "num_layer": num_layer, "quant_group": quant_group}.items():
            if size < 1:
                raise ArgumentError(f"KeyValueCache: {name} is {size}, expected 1 or more")
        if cache_mode not in (0, 1):
            raise ArgumentError(f"KeyValueCache: cache_mode is {cache_mode}, expected 0 (offsets) or 1 (pages)")
        if quant_bit not in (0, 8, 4):
            raise ArgumentError(f"KeyValueCache: quant_bit is {quant_bit}, expected 0 (none), 8 or 4")
        if quant_bit and head_dim % quant_group:
            raise ArgumentError(
                f"KeyValueCache: head_dim {head_dim} is not a multiple of quant_group {quant_group}",
                "choose a quant_group that divides it",
            )
        if quant_bit == 4 and quant_group % 2:
            raise ArgumentError(f"KeyValueCache: quant_group {quant_group} must be even with quant_bit 4")
        self.page_size, self.num_kv_heads, self.head_dim, self.num_layer = page_size, num_kv_heads, head_dim, num_layer
        self.dtype, self.quant_bit, self.quant_group = dtype, quant_bit, quant_group
        self.cache_mode, self.cache_layout = cache_mode, cache_layout
        stored = {0: dtype, 8: torch.int8, 4: torch.uint8}[quant_bit]
        shape = cache_shape(cache_layout, pages * page_size, num_layer, num_kv_heads, head_dim, quant_bit)
        self.cache = zeros(shape, stored, device)
        self.scale: torch.Tensor | None = None
        if quant_bit:
            shape = scale_shape(cache_layout, pages * page_size, num_layer, num_kv_heads, head_dim, quant_group)
            self.scale = zeros(shape, scale_dtype or dtype, device)
        self._allocator = PageAllocator(pages)
        self._sequences: dict[int, CachedSequence] = {}
        self._next = 0

    # --- what is there -----------------------------------------------------------------------------------------------

    @property
    def sequences(self) -> tuple[int, ...]:
        """All sequences that are not freed, oldest first."""
        return tuple(self._sequences)

    @property
    def pages_free(self) -> int:
        """Pages that no sequence holds."""
        return self._allocator.free

    def length(self, sequence: int) -> int:
        """Tokens of a sequence in the cache."""
        return self._find(sequence).length

    def pages_of(self, sequence: int) -> tuple[int, ...]:
        """The pages a sequence holds, in the order of its tokens."""
        return tuple(self._find(sequence).pages)

    def holders(self, page: int) -> int:
        """How many sequences hold a page."""
        return self._allocator.holders(page)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens of one sequence."""
        return -(-tokens // self.page_size)

    def pages_needed(self, requests: Sequence[tuple[int, int]]) -> int:
        """Free pages that `advance` would take for these ``(sequence, new tokens)``, copies of shared pages included.

        Without pages (``cache_mode=0``) they also have to be neighbours, which only `advance` finds out.
        """
        needed, written = 0, Counter[int]()
        for number, tokens in requests:
            sequence = self._find(number)
            needed += max(0, self.pages_for(sequence.length + tokens) - len(sequence.pages))
            if tokens and (page := self._page_to_copy(sequence)) is not None:
                written[page] += 1
        # Of a page whose every holder writes, the last one keeps it.
        return needed + sum(min(count, self.holders(page) - 1) for page, count in written.items())

    def stats(self) -> CacheStats:
        """How full the cache is."""
        tensors = [self.cache] if self.scale is None else [self.cache, self.scale]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        pages, free = self._allocator.pages, self._allocator.free
        return CacheStats(
            pages=pages,
            pages_free=free,
            pages_used=pages - free,
            pages_shared=self._allocator.shared,
            sequences=len(self._sequences),
            tokens=sum(sequence.length for sequence in self._sequences.values()),
            bytes=size,
            bytes_used=size // pages * (pages - free),
            bytes_per_token=size // (pages * self.page_size),
        )

    # --- sequences come and go ---------------------------------------------------------------------------------------

    def open(self, reserve: int = 0) -> int:
        """A new sequence without tokens, and room for `reserve` of them; its number, which is never used again.

        Raises
        ------
        OutOfPagesError
            If there is no such room.
        """
        sequence = CachedSequence()
        if reserve:
            self._grow(sequence, reserve)
            sequence.reserved = len(sequence.pages)
        return self._admit(sequence)

    def fork(self, sequence: int, length: int | None = None, reserve: int = 0) -> int:
        """A new sequence that begins with the first `length` tokens of another one (all, if not given).

        With pages it shares them; nothing is copied until one of the two writes to the page where they part. `reserve`
        is room for so many tokens in all, without that copy.

        Raises
        ------
        ArgumentError
            If the other one is shorter.
        OutOfPagesError
            If there is no room for what is reserved or, without pages (``cache_mode=0``), for the copy.
        """
        origin = self._find(sequence)
        length = origin.length if length is None else length
        if not 0 <= length <= origin.length:
            raise ArgumentError(f"fork of sequence {sequence}: length is {length}, expected 0 to {origin.length}")
        fork = CachedSequence(length)
        if self.cache_mode == 1:
            fork.pages = origin.pages[: self.pages_for(length)]
            self._allocator.share(fork.pages)
        try:
            self._grow(fork, max(length, reserve))
        except OutOfPagesError:
            self._allocator.release(fork.pages)
            raise
        fork.reserved = self.pages_for(reserve)
        if self.cache_mode == 0 and length:
            self._copy(origin.pages[0] * self.page_size, fork.pages[0] * self.page_size, length)
        return self._admit(fork)

    def free(self, sequence: int) -> None:
        """Let go of a sequence: pages without another holder become free.

        Raises
        ------
        DoubleFreeError
            If it was freed before.
        UnknownSequenceError
            If there never was one of this number.
        """
        self._allocator.release(self._find(sequence).pages)
        del self._sequences[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the tokens from `length` on, such as a draft that was refused, and the pages that held only those.

        What was reserved stays reserved; steps made before can no longer be attended.

        Raises
        ------
        ArgumentError
            If the sequence is shorter.
        """
        found = self._find(sequence)
        if not 0 <= length <= found.length:
            raise ArgumentError(f"truncate of sequence {sequence}: length is {length}, expected 0 to {found.length}")
        found.version += length < found.length
        found.length = length
        self._trim(found, max(self.pages_for(length), found.reserved))

    # --- a step of a server ------------------------------------------------------------------------------------------

    def advance(self, requests: Sequence[tuple[int, int]]) -> CacheStep:
        """Room for new tokens, and the operator's inputs to write and attend them. All requests, or nothing changes.

        Parameters
        ----------
        requests : sequence of (int, int)
            Sequence and number of new tokens; sequences with one token first, since the operator has those in front
            (elsewhere they are right too, but slower). Each sequence once.

        Returns
        -------
        CacheStep
            For one pass through the model: the same for all its layers.

        Raises
        ------
        OutOfPagesError
            If there is no room; see `pages_needed`.
        ArgumentError
            If a sequence is named twice or a number of tokens is negative.

        Notes
        -----
        The sequences count as longer from here on. Should the pass fail, `truncate` takes that back.
        """
        named = Counter(number for number, _ in requests)
        for number, tokens in requests:
            if named[number] > 1:
                raise ArgumentError(f"advance: sequence {number} is named {named[number]} times, expected once")
            if tokens < 0:
                raise ArgumentError(f"advance: {tokens} new tokens for sequence {number}, expected 0 or more")
        needed = self.pages_needed(requests)
        if needed > self._allocator.free:
            raise OutOfPagesError(
                f"advance: {needed} pages are needed, but {self._allocator.free} of {self._allocator.pages} are free",
                "free or shorten a sequence; pages_needed() tells before",
            )
        held = [(sequence := self._find(number), len(sequence.pages)) for number, _ in requests]
        try:
            for number, tokens in requests:
                sequence = self._find(number)
                if tokens and (page := self._page_to_copy(sequence)) is not None:
                    self._part(sequence, page)
                self._grow(sequence, sequence.length + tokens)
        except OutOfPagesError:  # only without pages: there are enough, but no neighbours
            for sequence, before in held:
                self._trim(sequence, before)
            raise
        step = make_step(
            [(number, self._find(number), tokens) for number, tokens in requests],
            page_size=self.page_size,
            paged=self.cache_mode == 1,
            device=self.cache.device,
        )
        for number, tokens in requests:
            self._find(number).length += tokens
        return step

    def attend(
        self,
        step: CacheStep,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int = 0,
        *,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = True,
        is_alibi: bool = False,
        implementation: str = "auto",
        validate: bool = False,
    ) -> torch.Tensor:
        """One layer's attention for a step: `multi_head_cache_attention` on this cache.

        Parameters
        ----------
        step : CacheStep
            From `advance`.
        query : Tensor, shape [N, num_heads, head_dim]
        key, value : Tensor, shape [N, num_kv_heads, head_dim]
        layer : int
            Which layer of the cache.
        attn_mask, is_causal, is_alibi, implementation, validate
            As the operator's. The indices come from `advance`, so they are not validated again unless asked for.

        Returns
        -------
        Tensor, shape [N, num_heads, head_dim]

        Raises
        ------
        ArgumentError
            If the tensors do not fit the step or the cache.
        DoubleFreeError
            If a sequence of the step was freed meanwhile.
        StaleStepError
            If tokens of the step were taken back meanwhile, or moved: its rows may be another sequence's now.
        """
        for number, version in zip(step.sequences, step.versions, strict=True):
            if self._find(number).version != version:
                raise StaleStepError(
                    f"attend: sequence {number} was truncated or moved after this step was made",
                    "advance() again, and attend that step",
                )
        if query.dim() != 3 or len(query) != step.tokens:
            raise ArgumentError(
                f"attend: query has shape {list(query.shape)}, expected [{step.tokens}, num_heads, {self.head_dim}]",
                "one row for each new token of the step",
            )
        if attn_mask is not None and attn_mask.numel() and attn_mask.shape[-1] < step.keys:
            raise ArgumentError(f"attend: attn_mask has {attn_mask.shape[-1]} columns, expected {step.keys} or more")
        return multi_head_cache_attention(
            query, key, value, step.seqstarts, step.kvstarts, step.cachestarts, step.start_pos, step.decoding_batches,
            step.max_seqlen, step.max_kvlen, self.cache, self.scale, attn_mask, query.shape[1], self.head_dim,
            is_causal, is_alibi, self.num_kv_heads, self.num_layer, layer, self.quant_bit, self.quant_group,
            self.cache_mode, self.cache_layout, self.page_size, implementation=implementation, validate=validate,
        )  # fmt: skip

    def read(self, sequence: int, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a sequence as attention sees them: dequantised, two of ``[length, num_kv_heads, D]``."""
        found = self._find(sequence)
        starts = np.array(found.pages, np.int64) * self.page_size
        rows = cache_rows(starts, 0, found.length, self.page_size)
        scale = None if self.scale is None else layer_planes(self.scale, self.cache_layout, layer)
        return load(layer_planes(self.cache, self.cache_layout, layer), scale, rows, self.quant_bit, self.dtype)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _find(self, number: int) -> CachedSequence:
        found = self._sequences.get(number)
        if found is not None:
            return found
        if isinstance(number, int) and 0 <= number < self._next:
            raise DoubleFreeError(f"sequence {number} was freed before", "a sequence is used no more after free()")
        raise UnknownSequenceError(f"the cache has no sequence {number!r}", "open() and fork() give their numbers")

    def _admit(self, sequence: CachedSequence) -> int:
        number, self._next = self._next, self._next + 1
        self._sequences[number] = sequence
        return number

    def _page_to_copy(self, sequence: CachedSequence) -> int | None:
        """Where in its pages the next token goes to a page that others hold too: that page."""
        place = sequence.length // self.page_size
        page = sequence.pages[place] if place < len(sequence.pages) else None
        return page if page is not None and self.holders(page) > 1 else None

    def _part(self, sequence: CachedSequence, page: int) -> None:
        """A copy of a shared page, for this sequence alone."""
        place = sequence.length // self.page_size
        (own,) = self._allocator.allocate(1)
        self._copy(page * self.page_size, own * self.page_size, sequence.length % self.page_size)
        self._allocator.release([page])
        sequence.pages[place] = own
        sequence.version += 1

    def _grow(self, sequence: CachedSequence, tokens: int) -> None:
        """Pages for so many tokens in all."""
        total, held = self.pages_for(tokens), len(sequence.pages)
        if total <= held:
            return
        if self.cache_mode == 1:
            sequence.pages += self._allocator.allocate(total - held)
        elif held and self._allocator.is_free(sequence.pages[-1] + 1, total - held):
            sequence.pages += self._allocator.claim(sequence.pages[-1] + 1, total - held)
        else:
            first = self._allocator.find_run(total)
            if first is None:
                raise OutOfPagesError(
                    f"{total} neighbouring pages are needed; {self._allocator.free} are free, but not side by side",
                    "free a sequence, reserve room when opening one, or use pages (cache_mode=1)",
                )
            moved = self._allocator.claim(first, total)
            if held:
                self._copy(sequence.pages[0] * self.page_size, first * self.page_size, sequence.length)
            self._allocator.release(sequence.pages)
            sequence.pages = moved
            sequence.version += held > 0

    def _trim(self, sequence: CachedSequence, pages: int) -> None:
        self._allocator.release(sequence.pages[pages:])
        del sequence.pages[pages:]

    def _copy(self, source: int, target: int, tokens: int) -> None:
        """Rows of all layers, codes and scales as they are."""
        axis = AXES[self.cache_layout].index("T")
        for tensor in (self.cache, self.scale):
            if tensor is not None and tokens:
                tensor.narrow(axis, target, tokens).copy_(tensor.narrow(axis, source, tokens))
