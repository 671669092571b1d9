"""The cache keeps every sequence's keys and values while others share, copy, grow and leave, and counts its pages.

A state machine plays a server at random against lists of tokens: whatever happened, each sequence reads back as what
was written, attention sees exactly that, and every page is counted once for each of its holders.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from attmemo.errors import ArgumentError, DoubleFreeError, OutOfPagesError, StaleStepError, UnknownSequenceError
from attmemo.fastseq.serving.ops.cache_attention import dequantize, quantize
from attmemo.fastseq.serving.ops.kv_cache import KeyValueCache
from attmemo.fastseq.serving.ops.page_allocator import PageAllocator
from attmemo.kernels.pages import zeros

LAYERS, HEADS, KV_HEADS, WIDTH, WORDS, PAGES, PAGE = 2, 4, 2, 8, 16, 9, 4
KEYS = torch.randn(WORDS, LAYERS, 2, KV_HEADS, WIDTH, generator=torch.Generator().manual_seed(0))
QUERIES = torch.randn(WORDS, HEADS, WIDTH, generator=torch.Generator().manual_seed(1))
KINDS: list[dict[str, Any]] = [
    {"cache_mode": 1, "cache_layout": 0},
    {"cache_mode": 1, "cache_layout": 3, "quant_bit": 8, "quant_group": 4},
    {"cache_mode": 1, "cache_layout": 2, "quant_bit": 4, "quant_group": 2, "scale_dtype": torch.float16},
    {"cache_mode": 0, "cache_layout": 1},
    {"cache_mode": 0, "cache_layout": 3, "quant_bit": 8, "quant_group": 8},
]


def make_cache(pages: int = PAGES, page_size: int = PAGE, **kind: Any) -> KeyValueCache:
    return KeyValueCache(
        pages=pages, page_size=page_size, num_kv_heads=KV_HEADS, head_dim=WIDTH, num_layer=LAYERS, **kind
    )


def as_stored(tokens: list[int], layer: int, cache: KeyValueCache) -> torch.Tensor:
    """What these tokens' keys and values are in the cache, ``[2, tokens, Hk, D]``."""
    numbers = KEYS[tokens, layer].transpose(0, 1)
    if cache.scale is None:
        return numbers
    codes, scale = quantize(numbers, cache.quant_bit, cache.quant_group)
    return dequantize(codes, scale.to(cache.scale.dtype)).float()


def attention(tokens: list[int], new: int, layer: int, cache: KeyValueCache) -> torch.Tensor:
    """Causal attention of the last `new` tokens over all, ``[new, H, D]``, by its definition."""
    key, value = as_stored(tokens, layer, cache).double()
    query, out = QUERIES[tokens[len(tokens) - new :]].double(), torch.zeros(new, HEADS, WIDTH, dtype=torch.float64)
    for i in range(new):
        seen = len(tokens) - new + i + 1
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            weights = torch.softmax(key[:seen, kv] @ query[i, head] / math.sqrt(WIDTH), 0)
            out[i, head] = weights @ value[:seen, kv]
    return out


def write(cache: KeyValueCache, texts: dict[int, list[int]], new: list[tuple[int, list[int]]]) -> None:
    """One step of a server: new tokens for some sequences, and what attention makes of them."""
    step = cache.advance([(number, len(tokens)) for number, tokens in new])
    flat = [token for _, tokens in new for token in tokens]
    for number, tokens in new:
        texts[number] = texts[number] + tokens
    for layer in range(LAYERS):
        key, value = KEYS[flat, layer].unbind(1)
        output = cache.attend(step, QUERIES[flat], key, value, layer, implementation="reference", validate=True)
        for at, (number, tokens) in enumerate(new):
            expected = attention(texts[number], len(tokens), layer, cache)
            begin = int(step.seqstarts[at])
            torch.testing.assert_close(output[begin : begin + len(tokens)].double(), expected, atol=2e-6, rtol=0)


def check(cache: KeyValueCache, texts: dict[int, list[int]]) -> None:
    """Every sequence reads back, every page is counted."""
    held = Counter(page for number in texts for page in cache.pages_of(number))
    stats = cache.stats()
    assert cache.sequences == tuple(texts)
    assert all(cache.holders(page) == held[page] for page in range(stats.pages))
    assert (stats.pages_used, stats.pages_free) == (len(held), stats.pages - len(held))
    assert stats.pages_shared == sum(count > 1 for count in held.values())
    assert stats.tokens == sum(map(len, texts.values()))
    for number, tokens in texts.items():
        pages = cache.pages_of(number)
        assert cache.length(number) == len(tokens)
        assert len(pages) >= cache.pages_for(len(tokens))
        assert len(set(pages)) == len(pages)
        if cache.cache_mode == 0:
            assert list(pages) == list(range(pages[0], pages[0] + len(pages))) if pages else True
            assert all(cache.holders(page) == 1 for page in pages)
        for layer in range(LAYERS):
            key, value = cache.read(number, layer)
            expected = as_stored(tokens, layer, cache)
            assert torch.equal(key, expected[0])
            assert torch.equal(value, expected[1])


class Server(RuleBasedStateMachine):
    """Random life of a cache."""

    kind: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache(**self.kind)
        self.cache.cache.fill_(77)  # what was there before must not matter
        if self.cache.scale is not None:
            self.cache.scale.fill_(math.nan)
        self.texts: dict[int, list[int]] = {}
        self.freed: list[int] = []

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(list(self.texts)))

    @rule(reserve=st.integers(0, 2 * PAGE))
    def open(self, reserve: int) -> None:
        free = self.cache.pages_free
        try:
            number = self.cache.open(reserve)
        except OutOfPagesError:
            assert self.cache.cache_mode == 0 or self.cache.pages_for(reserve) > free
            return
        assert number not in self.texts
        assert number not in self.freed
        self.texts[number] = []

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        origin = self.pick(data)
        length = data.draw(st.integers(0, len(self.texts[origin])))
        reserve = data.draw(st.sampled_from([0, 0, PAGE, 3 * PAGE]))
        own = max(0, self.cache.pages_for(reserve) - self.cache.pages_for(length))
        free = self.cache.pages_free
        try:
            number = self.cache.fork(origin, length, reserve)
        except OutOfPagesError:
            assert self.cache.cache_mode == 0 or own > free
            assert self.cache.pages_free == free
            return
        assert self.cache.cache_mode == 0 or self.cache.pages_free == free - own
        self.texts[number] = self.texts[origin][:length]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        number = self.pick(data)
        self.cache.free(number)
        del self.texts[number]
        self.freed.append(number)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        number = self.pick(data)
        length = data.draw(st.integers(0, len(self.texts[number])))
        self.cache.truncate(number, length)
        del self.texts[number][length:]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        numbers = data.draw(st.lists(st.sampled_from(list(self.texts)), unique=True, max_size=4))
        counts = data.draw(st.lists(st.integers(0, 6), min_size=len(numbers), max_size=len(numbers)))
        if data.draw(st.booleans()):  # as a server does it, or in any order
            counts.sort(key=lambda count: count != 1)
        words = st.integers(0, WORDS - 1)
        new = [(n, data.draw(st.lists(words, min_size=c, max_size=c))) for n, c in zip(numbers, counts, strict=True)]
        needed = self.cache.pages_needed([(number, len(tokens)) for number, tokens in new])
        free, before = self.cache.pages_free, {number: self.cache.pages_of(number) for number in self.texts}
        try:
            write(self.cache, self.texts, new)
        except OutOfPagesError:
            assert self.cache.cache_mode == 0 or needed > free
            assert self.cache.pages_free == free
            assert self.cache.cache_mode == 0 or before == {n: self.cache.pages_of(n) for n in self.texts}
            return
        assert needed <= free
        assert self.cache.pages_free == free - needed

    @precondition(lambda self: self.freed)
    @rule(data=st.data())
    def free_again(self, data: st.DataObject) -> None:
        with pytest.raises(DoubleFreeError):
            self.cache.free(data.draw(st.sampled_from(self.freed)))

    @invariant()
    def all_is_kept_and_counted(self) -> None:
        check(self.cache, self.texts)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(str(value) for value in kind.values()))
def test_a_random_server_never_loses_a_token_or_a_page(kind: dict[str, Any]) -> None:
    machine = type("KindOfServer", (Server,), {"kind": kind})
    quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=30, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=quiet
        ),
    )


def test_a_partly_filled_page_is_copied_only_when_one_of_its_holders_writes() -> None:
    cache, texts = make_cache(), {}
    first = cache.open()
    texts[first] = []
    write(cache, texts, [(first, [1, 2, 3, 4, 5, 6])])
    second = cache.fork(first)
    texts[second] = list(texts[first])
    assert cache.pages_of(first) == cache.pages_of(second)
    assert cache.stats().pages_shared == 2
    assert cache.pages_needed([(second, 1)]) == 1
    write(cache, texts, [(second, [7])])
    assert cache.pages_of(first)[0] == cache.pages_of(second)[0]  # the full page is shared on
    assert cache.pages_of(first)[1] != cache.pages_of(second)[1]
    assert cache.pages_needed([(first, 1)]) == 0  # it has its page for itself again
    write(cache, texts, [(first, [8])])
    check(cache, texts)


def test_forks_that_write_in_the_same_step_leave_the_page_to_the_last() -> None:
    cache, texts = make_cache(), {}
    origin = cache.open()
    texts[origin] = []
    write(cache, texts, [(origin, [3, 1])])
    forks = [cache.fork(origin) for _ in range(3)]
    texts |= {fork: [3, 1] for fork in forks}
    cache.free(origin)
    del texts[origin]
    assert cache.pages_needed([(fork, 1) for fork in forks]) == 2
    write(cache, texts, [(fork, [fork]) for fork in forks])
    assert cache.stats().pages_used == 3
    check(cache, texts)


def test_a_fork_at_the_edge_of_a_page_copies_nothing() -> None:
    cache, texts = make_cache(), {}
    first = cache.open()
    texts[first] = []
    write(cache, texts, [(first, list(range(2 * PAGE)))])
    second = cache.fork(first, PAGE)
    texts[second] = list(range(PAGE))
    assert cache.pages_needed([(second, 1)]) == 1  # a new page, no copy
    write(cache, texts, [(second, [9])])
    assert cache.stats().pages_shared == 1
    check(cache, texts)


def test_a_step_is_what_the_operator_takes() -> None:
    cache = make_cache()
    a, b, c = (cache.open() for _ in range(3))
    cache.advance([(b, 5)])
    step = cache.advance([(b, 1), (a, 3), (c, 0)])
    assert step.sequences == (b, a, c)
    assert step.seqstarts.tolist() == [0, 1, 4, 4]
    assert step.kvstarts.tolist() == [0, 6, 9, 9]
    assert step.start_pos.tolist() == [5, 0, 0]
    assert step.positions.tolist() == [5, 0, 1, 2]
    assert step.last.tolist() == [0, 3, 3]
    assert (step.decoding_batches, step.max_seqlen, step.max_kvlen, step.tokens, step.keys) == (1, 3, 6, 4, 9)
    assert step.cachestarts.shape == (3, 2)
    first, second = cache.pages_of(b)
    assert step.cachestarts[0].tolist() == [first * PAGE, second * PAGE]  # offsets of tokens, not page numbers
    assert step.cachestarts[1:, 1].tolist() == [-1, -1]
    nothing = cache.advance([])
    assert nothing.seqstarts.tolist() == [0]
    assert nothing.cachestarts.shape == (0, 1)


def test_without_room_nothing_changes_and_the_error_says_what_is_missing() -> None:
    cache, texts = make_cache(pages=3), {}
    for length in (4, 3):
        texts[number := cache.open()] = []
        write(cache, texts, [(number, list(range(length)))])
    with pytest.raises(OutOfPagesError, match="2 pages are needed, but 1 of 3 are free"):
        cache.advance([(1, 2), (0, 1)])
    check(cache, texts)
    with pytest.raises(OutOfPagesError):
        cache.open(reserve=2 * PAGE)
    check(cache, texts)
    cache.advance([(1, 2)])


def test_offsets_need_neighbours_and_a_sequence_moves_to_where_they_are() -> None:
    cache, texts = make_cache(pages=5, cache_mode=0), {}
    for number in [cache.open() for _ in range(3)]:
        texts[number] = []
        write(cache, texts, [(number, [number] * PAGE)])
    write(cache, texts, [(2, [5] * PAGE)])  # the page behind it is free
    assert cache.pages_of(2) == (2, 3)
    cache.free(0)
    del texts[0]
    assert cache.pages_free == 2  # the first and the last
    with pytest.raises(OutOfPagesError, match="2 neighbouring pages are needed; 2 are free, but not side by side"):
        cache.advance([(1, 1)])
    check(cache, texts)
    with pytest.raises(OutOfPagesError, match="1 are free"):
        cache.advance([(2, 1), (1, 1)])
    assert cache.pages_of(2) == (2, 3)  # what it was given for the step is taken back
    check(cache, texts)
    cache.free(2)
    del texts[2]
    write(cache, texts, [(1, [6])])
    assert cache.pages_of(1) == (1, 2)
    new = cache.open()
    texts[new] = []
    write(cache, texts, [(new, [7] * PAGE)])
    assert cache.pages_of(new) == (0,)
    write(cache, texts, [(new, [8])])  # page 1 is another's: it moves
    assert cache.pages_of(new) == (3, 4)
    check(cache, texts)


def test_wrong_use_is_named_before_anything_changes() -> None:
    cache = make_cache()
    first = cache.open()
    cache.advance([(first, 3)])
    with pytest.raises(UnknownSequenceError, match="no sequence 5"):
        cache.length(5)
    with pytest.raises(ArgumentError, match="named 2 times"):
        cache.advance([(first, 1), (first, 1)])
    with pytest.raises(ArgumentError, match="-1 new tokens"):
        cache.advance([(first, -1)])
    with pytest.raises(ArgumentError, match="expected 0 to 3"):
        cache.fork(first, 4)
    with pytest.raises(ArgumentError, match="expected 0 to 3"):
        cache.truncate(first, 4)
    assert cache.length(first) == 3
    step = cache.advance([(first, 2)])
    query, key = torch.zeros(3, HEADS, WIDTH), torch.zeros(3, KV_HEADS, WIDTH)
    with pytest.raises(ArgumentError, match=r"expected \[2, num_heads, 8\]"):
        cache.attend(step, query, key, key)
    with pytest.raises(ArgumentError, match="4 columns, expected 5"):
        cache.attend(step, query[:2], key[:2], key[:2], attn_mask=torch.zeros(2, 4))
    cache.free(first)
    with pytest.raises(DoubleFreeError, match="freed before"):
        cache.attend(step, query[:2], key[:2], key[:2])
    with pytest.raises(DoubleFreeError, match="freed before"):
        cache.fork(first)
    for wrong in (
        {"pages": 0},
        {"page_size": 0},
        {"cache_mode": 2},
        {"quant_bit": 2},
        {"quant_bit": 8, "quant_group": 3},
        {"quant_bit": 4, "quant_group": 1},
        {"cache_layout": 4},
    ):
        with pytest.raises(ArgumentError):
            make_cache(**wrong)


def test_a_step_that_was_taken_back_cannot_write_into_another_sequence() -> None:
    cache = make_cache(pages=2)
    first = cache.open()
    step = cache.advance([(first, 1)])
    cache.truncate(first, 0)
    cache.advance([(cache.open(), 1)])  # has the page now
    query, key = torch.ones(1, HEADS, WIDTH), torch.ones(1, KV_HEADS, WIDTH)
    before = cache.cache.clone()
    with pytest.raises(StaleStepError, match=f"sequence {first} was truncated or moved"):
        cache.attend(step, query, key, key)
    assert torch.equal(cache.cache, before)


def test_a_step_whose_sequence_moved_cannot_write_where_it_was() -> None:
    cache = make_cache(pages=4, cache_mode=0)
    first, second = cache.open(), cache.open()
    step = cache.advance([(first, PAGE)])
    cache.advance([(second, 1)])
    cache.advance([(first, 1)])  # no neighbour is free: moves
    key = torch.ones(PAGE, KV_HEADS, WIDTH)
    with pytest.raises(StaleStepError):
        cache.attend(step, torch.ones(PAGE, HEADS, WIDTH), key, key)


@pytest.mark.parametrize("mode", [0, 1])
def test_what_was_reserved_stays_when_tokens_are_taken_back(mode: int) -> None:
    cache = make_cache(cache_mode=mode)
    sequence = cache.open(reserve=3 * PAGE)
    pages = cache.pages_of(sequence)
    cache.advance([(sequence, PAGE + 1)])
    cache.truncate(sequence, 1)
    assert cache.pages_of(sequence) == pages
    fork = cache.fork(sequence, 1, reserve=2 * PAGE)
    cache.truncate(fork, 0)
    assert len(cache.pages_of(fork)) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_large_caches_are_zeros_that_stay(dtype: torch.dtype) -> None:
    for numbers in (1000, 3 << 20, (3 << 20) + 1):
        tensor = zeros((numbers, 2), dtype)
        assert (tensor.shape, tensor.dtype) == ((numbers, 2), dtype)
        assert int((tensor != 0).sum()) == 0
        tensor[-1] = 3
        gc.collect()
        assert float(tensor.sum()) == 6
    with pytest.raises(RuntimeError):  # torch's own words for what no machine has
        zeros((1 << 62, 2), dtype)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ({}, 2 * 2 * 2 * 8 * 4),
        ({"dtype": torch.float16}, 2 * 2 * 2 * 8 * 2),
        ({"quant_bit": 8, "quant_group": 8}, 2 * 2 * 2 * (8 + 4)),
        ({"quant_bit": 4, "quant_group": 8, "scale_dtype": torch.float16}, 2 * 2 * 2 * (4 + 2)),
    ],
)
def test_the_bytes_are_really_saved(kind: dict[str, Any], expected: int) -> None:
    stats = make_cache(**kind).stats()
    assert stats.bytes_per_token == expected
    assert stats.bytes == expected * PAGES * PAGE
    assert stats.bytes_used == 0


def test_pages_that_are_not_free_are_not_claimed() -> None:
    allocator = PageAllocator(4)
    taken = allocator.allocate(2)
    assert taken == [0, 1]
    assert allocator.find_run(2) == 2
    assert allocator.find_run(3) is None
    with pytest.raises(OutOfPagesError):
        allocator.claim(1, 2)
    with pytest.raises(OutOfPagesError):
        allocator.allocate(3)
    allocator.share([1])
    allocator.release(taken)
    assert (allocator.free, allocator.shared, allocator.holders(1)) == (3, 0, 1)
