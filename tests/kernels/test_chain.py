"""Blocks in one native call give what calls of their layers give, bit by bit."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from packed_models import MODELS, batch, last
from torch import Tensor, nn

from attmemo import memoize
from attmemo.kernels import _chain
from attmemo.kernels.encoder_stack import Chain, Link
from attmemo.kernels.linear8 import Linear8
from attmemo.kernels.linear16 import Linear16
from attmemo.kernels.linear32 import Linear32
from attmemo.kernels.packed_weights import Panels
from attmemo.kernels.row_attention import Disentangled, Layout, Stored, attend
from attmemo.kernels.row_sinks import Copies, Copy

HEADS, WIDTH, HIDDEN, INNER = 3, 8, 40, 72

KINDS: list[tuple[type[Panels], torch.dtype]] = [(Linear32, torch.float32), (Linear8, torch.float32)]
if Linear16.instruction_sets():
    KINDS += [(Linear16, torch.bfloat16), (Linear8, torch.bfloat16)]
kinds = pytest.mark.parametrize(("kind", "dtype"), KINDS, ids=[f"{k.__name__}-{d}" for k, d in KINDS])


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(kind: Any, inputs: int, outputs: int, dtype: torch.dtype, seed: int, activation: str = "none") -> Panels:
    weight = numbers(seed, outputs, inputs, dtype=dtype) * inputs**-0.5
    made: Panels = kind.of([weight], [numbers(seed + 1, outputs, dtype=dtype)], activation)
    return made


def norm(dtype: torch.dtype, seed: int) -> nn.LayerNorm:
    made = nn.LayerNorm(HIDDEN).to(dtype).requires_grad_(False)
    made.weight += numbers(seed, HIDDEN, dtype=dtype) / 4
    return made


def links(kind: Any, dtype: torch.dtype, count: int = 3) -> list[Link]:
    size = HEADS * WIDTH
    return [
        Link(
            layer(kind, HIDDEN, 3 * size, dtype, seed), layer(kind, size, HIDDEN, dtype, seed + 2), norm(dtype, seed),
            layer(kind, HIDDEN, INNER, dtype, seed + 4, "gelu"), layer(kind, INNER, HIDDEN, dtype, seed + 6),
            norm(dtype, seed + 1),
        )
        for seed in range(0, 10 * count, 10)
    ]  # fmt: skip


def plain(
    blocks: list[Link], hidden: Tensor, layout: Layout, keep: Any = None, rows: Any = None, **asked: Any
) -> Tensor:
    """The oracle: a call for each layer."""
    size = HEADS * WIDTH
    for number, link in enumerate(blocks):
        own = {name: given(number) if callable(given) else given for name, given in asked.items()}
        queries, keys, values = link.qkv(hidden).split(size, 1)
        if keep is not None:
            keep(number, keys, values)
        if rows is not None and link is blocks[-1]:
            queries, hidden, layout = queries[rows], hidden[rows], layout.asking(rows)
        context = attend(queries, keys, values, HEADS, layout, **own)
        mixed = link.out(context, hidden, link.norm)
        hidden = link.down(link.up(mixed), mixed, link.last_norm)
    return hidden


def layout_of(*lengths: int) -> Layout:
    starts = np.cumsum([0, *lengths]).astype(np.int64)
    return Layout(starts, starts)


@kinds
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("lengths", [(1,), (5, 1, 9), (120, 3, 200)])
def test_a_chain_is_its_layers_bit_by_bit(
    kind: type[Panels], dtype: torch.dtype, threads: int, lengths: tuple[int, ...]
) -> None:
    blocks, layout = links(kind, dtype), layout_of(*lengths)
    hidden = numbers(77, sum(lengths), HIDDEN, dtype=dtype)
    before = hidden.clone()
    # Rows of two parts, of which the second one is empty with one row.
    count = sum(lengths)
    parts = [(0, -(-count // 2)), (count - count // 3, count)]
    sizes: Any = [((3, 2), HEADS * WIDTH), ((), HIDDEN)]
    kept, expected_kept = (
        [Copy(*part, *(torch.full((*some, part[1] - part[0], wide), 7, dtype=dtype) for some, wide in sizes))
         for part in parts]
        for _ in range(2)
    )
    torch.set_num_threads(threads)
    try:
        found = Chain(blocks, HEADS, WIDTH)(
            hidden, layout, scale=0.3, keep=Copies(kept), threads=threads
        )
        expected = plain(
            blocks, hidden, layout, Copies(expected_kept), scale=0.3, threads=threads
        )
    finally:
        torch.set_num_threads(2)
    assert torch.equal(found, expected)
    assert torch.isfinite(found).all()
    for one, other in zip(kept, expected_kept, strict=True):
        assert torch.equal(one.rows, other.rows)
        assert one.last is not None
        assert torch.equal(one.last, found[one.first : one.stop])
    assert not (kept[0].rows == 7).any(2).all()
    assert torch.equal(hidden, before), "what is read stays as it is"


@kinds
def test_each_block_gets_its_own_records_distances_and_table(kind: type[Panels], dtype: torch.dtype) -> None:
    blocks, size = links(kind, dtype), HEADS * WIDTH
    # Of seven tokens the record has all but two.
    fresh = [1, 4]
    sources = np.array([-1 - k if k not in fresh else fresh.index(k) for k in range(7)], np.int32)
    layout = Layout(np.array([0, 2]), np.array([0, 7]), np.array(fresh, np.int32), sources)
    records = [numbers(100 + number, 2, 7, size, dtype=dtype) for number in range(3)]
    terms = [
        Disentangled(numbers(200 + n, 9, size, dtype=dtype), numbers(300 + n, 9, size, dtype=dtype),
                     np.arange(13, dtype=np.int32) % 9)
        for n in range(3)
    ]  # fmt: skip

    def stored(number: int) -> Stored:
        keys, values = (np.array([part.data_ptr()], np.uint64) for part in records[number])
        return Stored(keys, values, np.array([7]), dtype, size * dtype.itemsize)

    asked: dict[str, Any] = {
        "scale": 0.3, "table": numbers(400, HEADS, 13), "stored": stored, "disentangled": terms.__getitem__
    }  # fmt: skip
    hidden = numbers(77, 2, HIDDEN, dtype=dtype)
    found = Chain(blocks, HEADS, WIDTH)(hidden, layout, **asked)
    assert torch.equal(found, plain(blocks, hidden, layout, **asked))
    asked["stored"] = lambda number: stored(0)
    assert not torch.equal(found, Chain(blocks, HEADS, WIDTH)(hidden, layout, **asked))
    asked["disentangled"] = lambda number: None if number == 1 else terms[number]
    assert torch.equal(Chain(blocks, HEADS, WIDTH)(hidden, layout, **asked), plain(blocks, hidden, layout, **asked))


@kinds
@pytest.mark.parametrize("distinct", [1, 7, 150, 299])
@pytest.mark.parametrize("threads", [1, 2])
def test_equal_rows_of_the_first_block_change_no_bit(
    kind: type[Panels], dtype: torch.dtype, distinct: int, threads: int
) -> None:
    """Some differ in their last number alone."""
    blocks, layout = links(kind, dtype), layout_of(120, 30, 150)
    order = torch.randint(distinct, (300,), generator=torch.Generator().manual_seed(5))
    values = numbers(77, distinct, HIDDEN, dtype=dtype)
    values[distinct // 2 :, :-1] = values[distinct // 2, :-1].clone()
    apart = torch.zeros(300, HIDDEN + 3, dtype=dtype)  # rows with a gap behind each
    apart[:, :HIDDEN] = values[order]
    kept, expected_kept = (Copy(100, 160, torch.zeros(3, 2, 60, HEADS * WIDTH, dtype=dtype)) for _ in range(2))
    chain = Chain(blocks, HEADS, WIDTH)
    found = chain(apart[:, :HIDDEN], layout, scale=0.3, keep=Copies([kept]), threads=threads)
    assert torch.equal(found, plain(blocks, values[order], layout, Copies([expected_kept]), scale=0.3))
    assert torch.equal(kept.rows, expected_kept.rows)


@kinds
@pytest.mark.parametrize("rows", [(0, 5, 6), (0, 5, 6, 7, 8, 9, 10, 13), ()])
@pytest.mark.parametrize("width", [8, 64])
def test_of_some_rows_only_the_result_is_computed(
    kind: type[Panels], dtype: torch.dtype, rows: tuple[int, ...], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K and V of all rows are computed in every block, and copied. With the larger width Q is whole panels."""
    monkeypatch.setattr(sys.modules[__name__], "WIDTH", width)
    blocks, layout, size = links(kind, dtype), layout_of(5, 1, 9), HEADS * width
    hidden, asked = numbers(77, 15, HIDDEN, dtype=dtype), np.array(rows, np.int64)
    copied, (kept, expected_kept) = len(rows) > 3, ([], [])
    for parts in (kept, expected_kept):
        for first, stop in ((6, 11), (5, 6)):
            last = torch.zeros(stop - first, HIDDEN, dtype=dtype) if copied else None
            parts.append(Copy(first, stop, torch.zeros(3, 2, stop - first, size, dtype=dtype), last))
    found = Chain(blocks, HEADS, WIDTH)(hidden, layout, scale=0.3, keep=Copies(kept), asked=asked)
    expected = plain(blocks, hidden, layout, Copies(expected_kept), asked, scale=0.3)
    Copies(expected_kept).end(expected, asked)
    assert found.shape == (len(rows), HIDDEN)
    assert torch.equal(found, expected)
    for one, other, places in zip(kept, expected_kept, ([2, 3, 4, 5, 6], [1]), strict=True):
        assert torch.equal(one.rows, other.rows)
        if copied:
            assert torch.equal(one.last, found[places])
            assert torch.equal(other.last, found[places])
    near = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, plain(blocks, hidden, layout, scale=0.3)[asked], rtol=near, atol=near)


def test_a_result_that_is_not_asked_for_cannot_be_copied() -> None:
    chain, size = Chain(links(Linear32, torch.float32), HEADS, WIDTH), HEADS * WIDTH
    hidden, copy = numbers(7, 6, HIDDEN), Copy(1, 4, torch.empty(3, 2, 3, size), torch.empty(3, HIDDEN))
    for rows in ((0, 1, 2), (1, 2), (2, 3, 4), ()):
        with pytest.raises(ValueError, match="not all of the rows 1 to 3"):
            chain(hidden, layout_of(6), scale=0.3, keep=Copies([copy]), asked=np.array(rows, np.int64))
    for wrong in (np.array([0, 6]), np.array([-1])):
        with pytest.raises((ValueError, IndexError)):
            chain(hidden, layout_of(6), scale=0.3, asked=wrong)
    with pytest.raises(ValueError, match="asked for"):
        _chain.run(chain._native, (0, 0, 6), 0, (0,), (np.array([6]), 0, 0, 0, False, ()), (), (0, 0, 0, 0), 1)
    with pytest.raises(ValueError, match="within a panel"):
        _chain.run(chain._native, (0, 0, 6), 0, (0,), (np.array([5]), 0, 0, 0, True, ()), (), (0, 0, 0, 0), 1)


@kinds
def test_rows_may_lie_apart_and_none_is_fine(kind: type[Panels], dtype: torch.dtype) -> None:
    chain, layout = Chain(links(kind, dtype), HEADS, WIDTH), layout_of(4, 2)
    hidden = numbers(7, 6, 2 * HIDDEN, dtype=dtype)
    expected = chain(hidden[:, :HIDDEN].contiguous(), layout, scale=0.3)
    assert torch.equal(chain(hidden[:, :HIDDEN], layout, scale=0.3), expected)
    assert torch.equal(chain(hidden[:, :HIDDEN].t().contiguous().t(), layout, scale=0.3), expected)
    assert chain(hidden[:0, :HIDDEN], layout_of(), scale=0.3).shape == (0, HIDDEN)


def test_layers_that_do_not_fit_are_refused() -> None:
    blocks = links(Linear32, torch.float32)
    narrow = layer(Linear32, HIDDEN, 60, torch.float32, 1)
    other = layer(Linear8, HIDDEN, 72, torch.float32, 1)
    for part, wrong in (("qkv", narrow), ("up", narrow), ("down", narrow), ("out", narrow), ("qkv", other)):
        with pytest.raises(ValueError, match=r"fit each other|one kind|must be a LayerNorm|do not fit a layer"):
            Chain([replace(blocks[0], **{part: wrong}), *blocks[1:]], HEADS, WIDTH)
    with pytest.raises(ValueError, match="do not fit a layer"):
        Chain(blocks, HEADS, WIDTH + 1)
    with pytest.raises(ValueError, match="activation"):
        Chain([replace(blocks[0], down=layer(Linear32, INNER, HIDDEN, torch.float32, 1, "relu"))], HEADS, WIDTH)
    with pytest.raises(ValueError, match="LayerNorm"):
        Chain([replace(blocks[0], norm=nn.LayerNorm(HIDDEN + 1))], HEADS, WIDTH)
    with pytest.raises(ValueError, match="no such instructions"):
        Chain(blocks, HEADS, WIDTH, "mmx")


def test_calls_that_do_not_fit_are_refused_before_anything_is_written() -> None:
    chain = Chain(links(Linear32, torch.float32), HEADS, WIDTH)
    hidden, size = numbers(7, 6, HIDDEN), HEADS * WIDTH
    for wrong in (hidden[:, :-1], hidden.bfloat16(), hidden[0]):
        with pytest.raises(ValueError, match="x must be"):
            chain(wrong, layout_of(6), scale=0.3)
    with pytest.raises(ValueError, match="starts must end"):
        chain(hidden, layout_of(4), scale=0.3)
    with pytest.raises(ValueError, match="out of range"):
        chain(hidden, layout_of(6), scale=0.3, threads=0)
    for calls in ((), (0, 0)):
        with pytest.raises(ValueError, match="out of range"):
            _chain.run(chain._native, (0, 0, 0), 0, calls, None, (), (0, 0, 0, 0), 1)
    for shape, dtype in (((2, 2, 6, size), None), ((3, 2, 6, size + 1), None), ((3, 2, 6, size), torch.half)):
        with pytest.raises(ValueError, match="copies are"):
            chain(hidden, layout_of(6), scale=0.3, keep=Copies([Copy(0, 6, torch.empty(shape, dtype=dtype))]))
    rows = torch.empty(3, 2, 6, size)
    for wrong in (torch.empty(6, HIDDEN - 1), torch.empty(6, HIDDEN).half()):
        with pytest.raises(ValueError, match="copies are"):
            chain(hidden, layout_of(6), scale=0.3, keep=Copies([Copy(0, 6, rows, wrong)]))
    for first in (1, -1):
        with pytest.raises(ValueError, match="not among those"):
            chain(hidden, layout_of(6), scale=0.3, keep=Copies([Copy(first, first + 6, rows)]))
    for into in (torch.empty(3, 2, 5, size), torch.empty(3, 2, size, 6).transpose(2, 3)):
        with pytest.raises(ValueError, match="do not fit"):
            Copy(0, 6, into)
    for wrong in (torch.empty(5, HIDDEN), torch.empty(HIDDEN, 6).t()):
        with pytest.raises(ValueError, match="do not fit"):
            Copy(0, 6, rows, wrong)
    with pytest.raises(ValueError, match="four layers"):
        _chain.prepare((), (0, 0, ""))
    with pytest.raises(ValueError, match="no such"):
        _chain.prepare((), (7, 0, ""))


def test_a_chain_keeps_what_it_reads_alive() -> None:
    def make() -> Chain:
        return Chain(links(Linear32, torch.float32), HEADS, WIDTH)

    chain, hidden = make(), numbers(7, 6, HIDDEN)
    expected = plain(links(Linear32, torch.float32), hidden, layout_of(6), scale=0.3)
    gc.collect()
    junk = [torch.full((HIDDEN,), float("nan")) for _ in range(1000)]  # where freed norms would be
    assert torch.equal(chain(hidden, layout_of(6), scale=0.3), expected)
    assert len(junk) == 1000


@pytest.mark.parametrize("name", ["BERT", "MPNet", "DistilBERT", "ELECTRA", "DeBERTa-v3"])
@pytest.mark.parametrize("linear", ["exact", "int8"])
def test_a_model_whose_blocks_are_one_call_gives_what_single_calls_give(name: str, linear: str) -> None:
    model = MODELS[name]().eval()
    memoize(model, reuse="none", linear=linear)
    packed = model.attmemo.engine.reuse.packed
    inputs = batch([9, 2, 30, 1], 60)
    found = last(model, inputs)
    chain, packed._chain = packed._chain, None
    assert chain is not None
    assert torch.equal(found, last(model, inputs))
    assert not model.attmemo.stats()["failures"]
