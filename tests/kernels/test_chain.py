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
from attmemo.kernels.norms import Norm
from attmemo.kernels.packed_weights import NO_NORM, PANEL, Panels
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


def norm(dtype: torch.dtype, seed: int, width: int = HIDDEN, centred: bool = True) -> Norm:
    weight, bias = 1 + numbers(seed, width, dtype=dtype) / 4, numbers(seed + 1, width, dtype=dtype) / 4
    return Norm(weight, bias if centred else None, 1e-5, centred)


def module_of(given: Norm | None) -> nn.LayerNorm:
    """The layer norm that a layer ends with."""
    assert given is not None
    made = nn.LayerNorm(len(given.weight), given.eps, dtype=given.weight.dtype).requires_grad_(False)
    made.weight.copy_(given.weight)
    made.bias.copy_(given.bias)
    return made


def links(kind: Any, dtype: torch.dtype, count: int = 3) -> list[Link]:
    size = HEADS * WIDTH
    return [
        Link(
            layer(kind, HIDDEN, 3 * size, dtype, seed), layer(kind, size, HIDDEN, dtype, seed + 2),
            layer(kind, HIDDEN, INNER, dtype, seed + 4, "gelu"), layer(kind, INNER, HIDDEN, dtype, seed + 6),
            behind=norm(dtype, seed), behind_feed=norm(dtype, seed + 1),
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
        mixed = link.out(context, hidden, module_of(link.behind))
        hidden = link.down(link.up(mixed), mixed, module_of(link.behind_feed))
    return hidden


def gate(kind: Any, inputs: int, outputs: int, dtype: torch.dtype, seed: int, activation: str = "silu") -> Panels:
    weights = [numbers(seed + i, outputs, inputs, dtype=dtype) * inputs**-0.5 for i in range(2)]
    made: Panels = kind.of(weights, [None, numbers(seed + 2, outputs, dtype=dtype)], activation, True)
    return made


KEY_HEADS, HALF = 1, 3
WINDOWS = (None, 4, 4)


def modern(kind: Any, dtype: torch.dtype, activation: str = "silu") -> list[Link]:
    """Three blocks with norms by the mean square in every place, a gate, shared heads, and angles of two kinds."""
    size, key_size, found = HEADS * WIDTH, KEY_HEADS * WIDTH, []
    for number, window in enumerate(WINDOWS):
        seed = 50 * number
        norms = {
            name: norm(dtype, seed + 20 + 2 * place, WIDTH if name in ("query", "key") else HIDDEN, centred=False)
            for place, name in enumerate(("before", "inner", "before_feed", "inner_feed", "query", "key"))
            if number == 0 or "inner" not in name
        }
        found.append(
            Link(
                layer(kind, HIDDEN, size + 2 * key_size, dtype, seed), layer(kind, size, HIDDEN, dtype, seed + 2),
                gate(kind, HIDDEN, INNER, dtype, seed + 4, activation), layer(kind, INNER, HIDDEN, dtype, seed + 8),
                **norms, kind="far" if window is None else "near", window=window,
            )
        )  # fmt: skip
    return found


def turning() -> dict[str, tuple[Tensor, Tensor]]:
    angles = torch.outer(torch.arange(512.0), torch.tensor([1.0, 0.3, 0.01]))
    return {kind: ((by * angles).cos(), (by * angles).sin()) for kind, by in (("far", 1), ("near", 0.5))}


def turned(heads: Tensor, positions: Tensor, kind: str) -> Tensor:
    cosine, sine = (part[positions][:, None] for part in turning()[kind])
    low, high, rest = heads.float().tensor_split((HALF, 2 * HALF), -1)
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine, rest), -1).to(heads.dtype)


def plain_modern(
    blocks: list[Link], hidden: Tensor, layout: Layout, causal: bool, keep: Any = None, rows: Any = None
) -> Tensor:
    """The oracle: one step after the other."""
    size, key_size = HEADS * WIDTH, KEY_HEADS * WIDTH
    positions = torch.cat([torch.arange(int(n)) for n in np.diff(layout.starts)])

    def normed(given: Norm | None, part: Tensor) -> Tensor:
        return part if given is None else given(part)

    for number, link in enumerate(blocks):
        assert link.kind is not None
        queries, keys, values = link.qkv(normed(link.before, hidden)).split([size, key_size, key_size], 1)
        queries, keys = (
            turned(normed(own, part.reshape(len(part), -1, WIDTH)), positions, link.kind).flatten(1)
            for own, part in ((link.query, queries), (link.key, keys))
        )
        if keep is not None:
            keep(number, keys, values)
        if rows is not None and link is blocks[-1]:
            queries, hidden, layout = queries[rows], hidden[rows], layout.asking(rows)
        context = attend(queries, keys, values, HEADS, layout, scale=0.3, causal=causal, window=link.window)
        for part, own, before in ((link.out, link.inner, None), (link.down, link.inner_feed, link.before_feed)):
            given = context if part is link.out else link.up(normed(before, hidden))
            hidden = part(given, hidden) if own is None else normed(own, part(given)) + hidden
    return hidden


@kinds
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1,), (5, 1, 9), (120, 3, 200)])
@pytest.mark.parametrize("rows", [None, (0, 5, 6, 14), ()])
def test_norms_gates_and_turned_heads_in_one_call_are_the_steps_one_by_one(
    kind: type[Panels], dtype: torch.dtype, causal: bool, lengths: tuple[int, ...], rows: tuple[int, ...] | None
) -> None:
    if rows is not None and sum(lengths) <= 14:
        rows = rows[:1]
    blocks, layout = modern(kind, dtype), layout_of(*lengths)
    asked = None if rows is None else np.array(rows, np.int64)
    hidden = numbers(77, sum(lengths), HIDDEN, dtype=dtype)
    kept, expected_kept = (
        Copy(0, sum(lengths), torch.zeros(3, 2, sum(lengths), KEY_HEADS * WIDTH, dtype=dtype)) for _ in range(2)
    )
    chain, before = Chain(blocks, HEADS, WIDTH, KEY_HEADS, causal=causal), hidden.clone()
    more: dict[str, Any] = {"scale": 0.3, "angles": turning(), "asked": asked}
    found = chain(hidden, layout, keep=Copies([kept]), threads=1, **more)
    expected = plain_modern(blocks, hidden, layout, causal, Copies([expected_kept]), asked)
    # 8-bit codes and bfloat16 turn a difference in the last bit into one of a step.
    near, typical = (5e-6, 5e-7) if kind is Linear32 else (0.3, 2e-2)
    for one, other in ((found, expected), (kept.rows, expected_kept.rows)):
        assert one.shape == other.shape
        apart = (one.float() - other.float()).abs() / (1 + other.float().abs())
        assert bool((apart <= near).all())
        assert not len(apart) or float(apart.mean()) <= typical
    assert torch.equal(chain(hidden, layout, threads=2, **more), found), "threads change no bit"
    assert torch.equal(hidden, before), "what is read stays as it is"
    if rows is not None and WIDTH * HEADS % PANEL:
        everything = chain(hidden, layout, **more | {"asked": None})
        torch.testing.assert_close(found, everything[asked], rtol=near, atol=near)


@kinds
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "quick_gelu", "clipped"])
@pytest.mark.parametrize("outputs", [INNER, 64, 33])
@pytest.mark.parametrize("inputs", [HIDDEN, 200])
def test_a_gate_is_the_product_of_two_layers(
    kind: type[Panels], dtype: torch.dtype, activation: str, outputs: int, inputs: int
) -> None:
    clips = activation == "clipped"  # and 1 is added to the other number
    x = numbers(3, 70, inputs, dtype=dtype) * (6 if clips else 1)
    weights = [numbers(seed, outputs, inputs, dtype=dtype) * inputs**-0.5 for seed in (1, 2)]
    biases = [numbers(4, outputs, dtype=dtype), None]
    one, other = (kind.of([weight], [bias], own)(x) for weight, bias, own in  # type: ignore[attr-defined]
                  zip(weights, biases, (activation, "none"), strict=True))  # fmt: skip
    other = other.clamp(-7, 7) + 1 if clips else other
    made = kind.of(weights, biases, activation, True)  # type: ignore[attr-defined]
    near = 1e-5 if dtype == torch.float32 else 6e-2 if clips else 2e-2  # the other number was rounded before
    torch.testing.assert_close(made(x), one * other, rtol=near, atol=near)
    for isa in kind.instruction_sets():
        torch.testing.assert_close(made(x, isa=isa), one * other, rtol=near, atol=near)


@kinds
@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize("some", [None, 3, 290])
def test_layers_behind_attention_give_the_same_bits_in_one_call_and_in_several(
    kind: type[Panels], dtype: torch.dtype, width: int, some: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With norms before and behind, a gate, and turned heads of the next block's queries and keys."""
    monkeypatch.setattr(sys.modules[__name__], "WIDTH", width)
    layout, hidden = layout_of(200, 1, 99), numbers(77, 300, HIDDEN, dtype=dtype)
    asked = None if some is None else np.sort(np.random.default_rng(3).permutation(300)[:some])
    chain, found = Chain(modern(kind, dtype), HEADS, WIDTH, KEY_HEADS, causal=True), []
    for several in (False, True):
        monkeypatch.setattr(kind, "are_two_calls", lambda *_, several=several: several)
        kept = Copy(150, 260, torch.zeros(3, 2, 110, KEY_HEADS * WIDTH, dtype=dtype))
        found += [
            chain(hidden, layout, scale=0.3, angles=turning(), asked=asked, keep=Copies([kept]), threads=1), kept.rows
        ]  # fmt: skip
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert bool((found[1] != 0).any())


@kinds
@pytest.mark.parametrize("inner", [96, 1536])
@pytest.mark.parametrize("made", ["none", "gelu", "relu", "gelu gate", "silu gate"])
def test_what_lies_between_two_layers_alone_has_the_bits_of_rows_that_are_read_again(
    kind: type[Panels], dtype: torch.dtype, inner: int, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whole lines, which a matrix unit's kernel never writes as rows. The last rows are no whole group of 32."""
    activation, gated = made.split()[0], made.endswith("gate")
    up = (gate if gated else layer)(kind, HIDDEN, inner, dtype, 4, activation)
    blocks = [replace(link, up=up, down=layer(kind, inner, HIDDEN, dtype, 6)) for link in links(kind, dtype, 2)]
    monkeypatch.setattr(kind, "are_two_calls", lambda *_: False)
    for lengths in ((200, 1, 99), (130, 11)):
        hidden, layout = numbers(77, sum(lengths), HIDDEN, dtype=dtype), layout_of(*lengths)
        found = Chain(blocks, HEADS, WIDTH)(hidden, layout, scale=0.3, threads=1)
        assert torch.equal(found, plain(blocks, hidden, layout, scale=0.3))


@pytest.mark.parametrize("kind", ["far", "near"])
def test_equal_rows_at_different_positions_are_turned_apart(kind: str) -> None:
    blocks = [replace(link, kind=kind) for link in modern(Linear32, torch.float32)]
    hidden, layout = numbers(7, 3, HIDDEN)[[0, 1, 0, 0, 1, 2, 0, 1, 2, 2, 0, 0]], layout_of(5, 7)
    kept = Copy(0, 12, torch.zeros(3, 2, 12, KEY_HEADS * WIDTH))
    chain = Chain(blocks, HEADS, WIDTH, KEY_HEADS, causal=True)
    found = chain(hidden, layout, scale=0.3, angles=turning(), keep=Copies([kept]))
    expected = plain_modern(blocks, hidden, layout, True)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
    assert torch.equal(kept.rows[0, 1, 0], kept.rows[0, 1, 2])
    assert not torch.equal(kept.rows[0, 0, 0], kept.rows[0, 0, 2])


def test_angles_that_do_not_fit_are_refused() -> None:
    chain = Chain(modern(Linear32, torch.float32), HEADS, WIDTH, KEY_HEADS)
    hidden, layout, angles = numbers(7, 6, HIDDEN), layout_of(6), turning()
    call: dict[str, Any] = {"scale": 0.3}
    with pytest.raises(ValueError, match="none for a position"):
        chain(hidden, layout, angles={kind: (c[:5], s[:5]) for kind, (c, s) in angles.items()}, **call)
    wide = {kind: (torch.cat((c, c), 1), torch.cat((s, s), 1)) for kind, (c, s) in angles.items()}
    with pytest.raises(ValueError, match="do not fit the heads"):
        chain(hidden, layout, angles=wide, **call)
    with pytest.raises(ValueError, match="float32"):
        chain(hidden, layout, angles={kind: (c.double(), s.double()) for kind, (c, s) in angles.items()}, **call)
    with pytest.raises(KeyError):
        chain(hidden, layout, angles={"far": angles["far"]}, **call)


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
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = Chain(blocks, HEADS, WIDTH)(
            hidden, layout, scale=0.3, keep=Copies(kept), threads=threads
        )
        expected = plain(
            blocks, hidden, layout, Copies(expected_kept), scale=0.3, threads=threads
        )
    finally:
        torch.set_num_threads(threads_before)
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


@kinds
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize("some", [3, 290])
def test_of_many_rows_too_only_the_result_is_computed(
    kind: type[Panels], dtype: torch.dtype, threads: int, width: int, some: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread takes a chunk of rows through all layers of a block, and K and V of the next one."""
    monkeypatch.setattr(sys.modules[__name__], "WIDTH", width)
    blocks, layout = links(kind, dtype), layout_of(200, 1, 99)
    hidden = numbers(77, 300, HIDDEN, dtype=dtype)
    asked = np.sort(np.random.default_rng(3).permutation(300)[:some])
    kept, expected_kept = (Copy(150, 260, torch.zeros(3, 2, 110, HEADS * width, dtype=dtype)) for _ in range(2))
    found = Chain(blocks, HEADS, WIDTH)(hidden, layout, scale=0.3, keep=Copies([kept]), asked=asked, threads=threads)
    assert torch.equal(found, plain(blocks, hidden, layout, Copies([expected_kept]), asked, scale=0.3))
    assert torch.equal(kept.rows, expected_kept.rows)


def test_a_result_that_is_not_asked_for_cannot_be_copied() -> None:
    chain, size = Chain(links(Linear32, torch.float32), HEADS, WIDTH), HEADS * WIDTH
    hidden, copy = numbers(7, 6, HIDDEN), Copy(1, 4, torch.empty(3, 2, 3, size), torch.empty(3, HIDDEN))
    for rows in ((0, 1, 2), (1, 2), (2, 3, 4), ()):
        with pytest.raises(ValueError, match="not all of the rows 1 to 3"):
            chain(hidden, layout_of(6), scale=0.3, keep=Copies([copy]), asked=np.array(rows, np.int64))
    for wrong in (np.array([0, 6]), np.array([-1])):
        with pytest.raises((ValueError, IndexError)):
            chain(hidden, layout_of(6), scale=0.3, asked=wrong)
    none = np.zeros(0, np.int32)
    start: Any = chain._native, (0, 0, 6), 0, (none, ())
    with pytest.raises(ValueError, match="asked for"):
        _chain.run(*start, (0,), (np.array([6]), none, 0, 0, 0, False, ()), (), (0, 0, 0, 0, 0), 1)
    with pytest.raises(ValueError, match="within a panel"):
        _chain.run(*start, (0,), (np.array([5]), none, 0, 0, 0, True, ()), (), (0, 0, 0, 0, 0), 1)


@kinds
@pytest.mark.parametrize("asked", ["nothing", "table", "window", "causal"])
def test_rows_alone_give_the_bits_that_they_give_with_copies(
    kind: type[Panels], dtype: torch.dtype, asked: str
) -> None:
    """Of rows alone less is asked for; of rows that are copied too, every part."""
    blocks, layout = links(kind, dtype), layout_of(5, 1, 90)
    if asked == "window":
        blocks = [replace(link, window=3) for link in blocks]
    chain, hidden = Chain(blocks, HEADS, WIDTH, causal=asked == "causal"), numbers(7, 96, HIDDEN, dtype=dtype)
    table = numbers(8, HEADS, 2 * 96 - 1) if asked == "table" else None
    keep = Copies([Copy(0, 96, torch.empty(3, 2, 96, HEADS * WIDTH, dtype=dtype), None)])
    seen = chain(hidden, layout, scale=0.3, table=table)
    assert torch.equal(seen, chain(hidden, layout, scale=0.3, table=table, keep=keep))
    if asked != "nothing":
        assert not torch.equal(seen, Chain(links(kind, dtype), HEADS, WIDTH)(hidden, layout, scale=0.3))


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
        with pytest.raises(ValueError, match=r"fit each other|one kind|does not fit|do not fit"):
            Chain([replace(blocks[0], **{part: wrong}), *blocks[1:]], HEADS, WIDTH)
    with pytest.raises(ValueError, match="do not fit a layer"):
        Chain(blocks, HEADS, WIDTH + 1)
    with pytest.raises(ValueError, match="activation"):
        Chain([replace(blocks[0], down=layer(Linear32, INNER, HIDDEN, torch.float32, 1, "relu"))], HEADS, WIDTH)
    with pytest.raises(ValueError, match="does not fit rows"):
        Chain([replace(blocks[0], behind=norm(torch.float32, 1, HIDDEN + 1))], HEADS, WIDTH)
    with pytest.raises(ValueError, match="another layer than the first"):
        Chain([replace(blocks[0], out=gate(Linear32, HEADS * WIDTH, HIDDEN, torch.float32, 1))], HEADS, WIDTH)
    for wrong in ({"query": norm(torch.float32, 1, WIDTH)}, {"key": norm(torch.float32, 1, WIDTH)}):
        with pytest.raises(ValueError, match="heads do not fit"):  # a layer norm
            Chain([replace(blocks[0], **wrong)], HEADS, WIDTH)
    for keys in (2, 4):
        with pytest.raises(ValueError, match="fit"):
            Chain(blocks, HEADS, WIDTH, keys)
    with pytest.raises(ValueError, match="no such instructions"):
        Chain(blocks, HEADS, WIDTH, isa="mmx")


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
            _chain.run(chain._native, (0, 0, 0), 0, (np.zeros(0, np.int32), ()), calls, None, (), (0, 0, 0, 0, 0), 1)
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
    with pytest.raises(ValueError, match="no blocks"):
        _chain.prepare(NO_NORM, (), (0, 0, ""))
    with pytest.raises(ValueError, match="no such"):
        _chain.prepare(NO_NORM, (), (7, 0, ""))


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
