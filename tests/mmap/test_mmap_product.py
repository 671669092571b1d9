"""A·V read from the arena: right for every instruction set, shape and type, and nothing written elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attmemo.db.encodings import TYPES, pack, unpack
from attmemo.errors import DatabaseTruncatedError
from attmemo.kernels import _map_product
from attmemo.kernels.map_product import _FORMS, is_direct
from attmemo.maps.source import multiply
from attmemo.mmap import Arena, SlotLayout

SETS = _map_product.instruction_sets()
BFLOAT16_SETS = _map_product.instruction_sets(True)
POISON = 7.25


def call(**changes: Any) -> torch.Tensor:
    """One call of the kernel on two maps of 2 heads x 3 tokens, width 4, with something changed."""
    context = torch.full((3, 5, 8), POISON)
    arguments: dict[str, Any] = {
        "maps": np.zeros(3 * 18, np.float32),
        "offsets": np.array([72, 0], np.int64),
        "form": 0,
        "heads": 2,
        "length": 3,
        "width": 4,
        "values": np.ones((6, 8), np.float32),
        "starts": np.array([0, 3], np.int64),
        "context": context.numpy(),
        "rows": np.array([2, 0], np.int64),
        "padded": 5,
        "threads": 1,
    }
    try:
        _map_product.multiply(**(arguments | changes))
    except (ValueError, TypeError, BufferError):
        assert bool((context == POISON).all()), "refused, but something was written"
        raise
    return context


@pytest.mark.parametrize("bfloat16", [False, True])
@settings(deadline=None, max_examples=60)
@given(
    choice=st.data(),
    dtype=st.sampled_from(sorted(_FORMS, key=str)),
    causal=st.booleans(),
    heads=st.integers(1, 3),
    length=st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 96, 128])),
    width=st.one_of(st.integers(1, 20), st.sampled_from([32, 48, 64, 80, 128])),
    padding=st.integers(0, 3),
    batch=st.integers(1, 4),
    threads=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_the_product_is_that_of_float64(
    choice: st.DataObject,
    bfloat16: bool,
    dtype: torch.dtype,
    causal: bool,
    heads: int,
    length: int,
    width: int,
    padding: int,
    batch: int,
    threads: int,
    seed: int,
) -> None:
    """In bfloat16 within half a step; where the matrix unit rounds the map, within what that adds to a sum."""
    isa = choice.draw(st.sampled_from(BFLOAT16_SETS if bfloat16 else SETS))
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(5, heads, length, length, generator=generator).mul(4)
    if causal:
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    name = next(name for name, known in TYPES.items() if known == dtype)
    maps = torch.stack([pack(apm, name, causal) for apm in scores.softmax(-1)])
    stride = maps[0].numel() * maps.element_size()
    slots = torch.randint(0, 5, (batch,), generator=generator)
    starts = torch.randperm(batch, generator=generator) * length + 2
    kind, bits = (torch.bfloat16, torch.int16) if bfloat16 else (torch.float32, torch.float32)
    values = torch.randn(batch * length + 2, heads * width, generator=generator).to(kind)
    values[:2] = torch.nan  # rows that no map reads
    rows = torch.randperm(batch + 2, generator=generator)[:batch]
    context = torch.full((batch + 2, length + padding, heads * width), POISON).to(kind)
    _map_product.multiply(
        maps=maps.view(torch.uint8).numpy(),
        offsets=(slots * stride).numpy(),
        form=_FORMS[dtype],
        heads=heads,
        length=length,
        width=width,
        values=values.view(bits).numpy(),
        starts=starts.numpy(),
        context=context.view(bits).numpy(),
        rows=rows.numpy(),
        padded=length + padding,
        threads=threads,
        triangle=causal,
        isa=isa,
        bfloat16=bfloat16,
    )
    for slot, start, row in zip(slots.tolist(), starts.tolist(), rows.tolist(), strict=True):
        v = values[start : start + length].view(length, heads, width).transpose(0, 1).double()
        apm = unpack(maps[slot]).double()
        expected = (apm @ v).transpose(0, 1).reshape(length, heads * width)
        slack = (apm @ v.abs()).transpose(0, 1).reshape(length, heads * width) if isa == "amx" else 0.0
        within = 1e-5 * (1 + expected.abs()) + (2.0**-8 * (expected.abs() + slack) if bfloat16 else 0.0)
        assert bool(((context[row, :length].double() - expected).abs() <= within).all())
        assert bool((context[row, length:] == 0).all())
    untouched = [row for row in range(batch + 2) if row not in rows.tolist()]
    assert bool((context[untouched] == POISON).all())


@pytest.mark.parametrize(("isa", "bfloat16"), [(isa, False) for isa in SETS] + [(isa, True) for isa in BFLOAT16_SETS])
@pytest.mark.parametrize("length", [61, 96])
def test_a_sequence_gives_the_same_bits_in_any_company_and_with_any_number_of_threads(
    isa: str, bfloat16: bool, length: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    heads, width, batch = 3, 32, 7
    kind = torch.bfloat16 if bfloat16 else torch.float16
    maps = torch.rand(batch, heads, length, length, generator=generator).softmax(-1).to(kind)
    values = torch.randn(batch * length, heads * width, generator=generator)
    stride, found = maps[0].numel() * 2, {}
    bits = lambda numbers: (numbers.view(torch.int16) if bfloat16 else numbers).numpy()  # noqa: E731
    values = values.to(torch.bfloat16 if bfloat16 else torch.float32)
    for threads in (1, 2, 5):
        for group in ([4], [0, 4], [6, 5, 4, 3, 2, 1, 0]):
            context = torch.empty(batch, length, heads * width, dtype=values.dtype)
            picked = np.array(group, np.int64)
            _map_product.multiply(
                maps.view(torch.uint8).numpy(), picked * stride, _FORMS[kind], heads, length, width, bits(values),
                picked * length, bits(context), picked, length, threads, isa=isa, bfloat16=bfloat16,
            )  # fmt: skip
            found[threads, len(group)] = context[4].clone()
    first = found[1, 1]
    assert all(torch.equal(first, other) for other in found.values())


def test_every_half_precision_number_is_read_as_it_is() -> None:
    """Subnormals, infinities and NaN included: an accidental flush to zero would hide in a tolerance."""
    bits = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    for dtype in (torch.float16, torch.bfloat16):
        numbers = bits.view(dtype)
        for isa in SETS:
            context = torch.empty(65536, 1, 1)
            _map_product.multiply(
                numbers.view(torch.uint8).numpy(), np.arange(65536) * 2, _FORMS[dtype], 1, 1, 1,
                np.ones((1, 1), np.float32), np.zeros(65536, np.int64), context.numpy(), np.arange(65536), 1, 2,
                isa=isa,
            )  # fmt: skip
            seen, expected = (t.nan_to_num(0.5, 1e38, -1e38) for t in (context.flatten(), numbers.float()))
            assert torch.equal(seen, expected), (dtype, isa)


@pytest.mark.parametrize("isa", [isa for isa in BFLOAT16_SETS if isa != "amx"])
def test_every_bfloat16_is_read_and_written_as_it_is(isa: str) -> None:
    """The matrix unit takes subnormals for zero, here and in torch."""
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    context = torch.empty(65536, 1, 1, dtype=torch.bfloat16)
    _map_product.multiply(
        np.ones(1, np.float32), np.zeros(65536, np.int64), 0, 1, 1, 1, numbers.view(torch.int16)[:, None].numpy(),
        np.arange(65536), context.view(torch.int16).numpy(), np.arange(65536), 1, 2, isa=isa, bfloat16=True,
    )  # fmt: skip
    seen, expected = (t.float().nan_to_num(0.5, 3e38, -3e38) for t in (context.flatten(), numbers))
    assert torch.equal(seen, expected)


def test_the_matrix_unit_is_not_asked_for_float32() -> None:
    if "amx" not in BFLOAT16_SETS:
        pytest.skip("this processor has no matrix unit for bfloat16")
    with pytest.raises(ValueError, match="no such instruction set"):
        call(isa="amx")


def test_what_is_not_a_number_in_a_map_does_not_come_out_as_one() -> None:
    maps = np.zeros(3 * 18, np.float32)
    maps[0] = np.nan
    assert bool(call(maps=maps)[0, 0, :4].isnan().all())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"offsets": np.array([72, 148], np.int64)}, "outside the buffer"),
        ({"offsets": np.array([-4, 0], np.int64)}, "outside the buffer"),
        ({"offsets": np.array([2, 0], np.int64)}, "not aligned"),
        ({"offsets": np.array([2**62, 0], np.int64)}, "outside the buffer"),
        ({"offsets": np.array([0], np.int64)}, "one length"),
        ({"starts": np.array([0, 4], np.int64)}, "outside the values"),
        ({"starts": np.array([-1, 0], np.int64)}, "outside the values"),
        ({"rows": np.array([3, 0], np.int64)}, "outside the context"),
        ({"rows": np.array([-1, 0], np.int64)}, "outside the context"),
        ({"rows": np.array([1, 1], np.int64)}, "named twice"),
        ({"form": 4}, "no such form"),
        ({"form": -1}, "no such form"),
        ({"heads": 0}, "must be positive"),
        ({"heads": 2**40, "width": 2**40}, "below 2"),
        ({"length": -1}, "must be positive"),
        ({"padded": 2}, "at least length"),
        ({"padded": 4}, "whole number of rows"),
        ({"bfloat16": True, "starts": np.array([0, 10], np.int64)}, "outside the values"),
        ({"bfloat16": True, "width": 5}, "whole number of rows"),
        ({"width": 5}, "whole number of rows"),
        ({"threads": 0}, "must be positive"),
        ({"isa": "sse9"}, "no such instruction set"),
        ({"maps": b""}, "outside the buffer"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_anything_is_written(changes: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        call(**changes)


def test_a_context_that_cannot_be_written_is_refused() -> None:
    with pytest.raises((TypeError, BufferError)):
        call(context=bytes(3 * 5 * 8 * 4))


def test_no_sequence_is_no_work() -> None:
    none = np.zeros(0, np.int64)
    assert bool((call(offsets=none, starts=none, rows=none) == POISON).all())


def test_a_library_that_is_not_loaded_or_no_openmp_is_not_used() -> None:
    assert not _map_product.use_team("/nonexistent/libgomp.so.1")
    assert not _map_product.use_team(_map_product.__file__)  # loaded, but no OpenMP


class TestArena:
    def make(self, folder: Path, dtype: torch.dtype) -> tuple[Arena, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        layout = SlotLayout.paged((2, 9, 9), dtype, slots=4, header=4096)
        maps = torch.rand(4, 2, 9, 9, generator=generator).softmax(-1).to(dtype)
        file = folder / "a.slots"
        with file.open("wb") as stream:
            stream.write(bytes(layout.header))
            for apm in maps:
                stream.write(apm.view(torch.uint8).numpy().tobytes().ljust(layout.stride, b"\xff"))
        return Arena(file, layout), maps

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_slots_are_found_where_the_layout_says(self, tmp_path: Path, dtype: torch.dtype) -> None:
        arena, maps = self.make(tmp_path, dtype)
        values, context = torch.randn(18, 10), torch.empty(2, 9, 10)
        with torch.inference_mode():
            multiply(arena, [3, 1], values, np.array([9, 0]), context, np.array([0, 1]))
        for row, slot, start in ((0, 3, 9), (1, 1, 0)):
            v = values[start : start + 9].view(9, 2, 5).transpose(0, 1)
            expected = (maps[slot].float() @ v).transpose(0, 1).reshape(9, 10)
            assert torch.allclose(context[row], expected, atol=1e-6)

    def test_a_file_cut_short_is_an_error_and_not_a_signal(self, tmp_path: Path) -> None:
        arena, _ = self.make(tmp_path, torch.float32)
        with (tmp_path / "a.slots").open("r+b") as stream:
            stream.truncate(4096)
        with pytest.raises(DatabaseTruncatedError, match="truncated"):
            multiply(arena, [3], torch.randn(9, 10), np.array([0]), torch.empty(1, 9, 10), np.array([0]))

    def test_shapes_and_slots_that_do_not_fit_are_named(self, tmp_path: Path) -> None:
        arena, _ = self.make(tmp_path, torch.float32)
        none, context = np.array([0]), torch.empty(1, 9, 10)
        with pytest.raises(IndexError, match="slot 4"):
            multiply(arena, [4], torch.randn(9, 10), none, context, none)
        for values in (torch.randn(9, 11), torch.randn(9, 10).bfloat16(), torch.randn(1, 9, 10)):
            with pytest.raises(ValueError, match="cannot multiply"):
                multiply(arena, [0], values, none, context, none)

    def test_values_in_half_precision_are_left_to_torch_where_it_can_read_the_maps(self) -> None:
        whole = SlotLayout.paged((2, 9, 9), torch.bfloat16)
        assert is_direct(whole.shape, whole.dtype, torch.float32)
        assert not is_direct(whole.shape, whole.dtype, torch.bfloat16)
        assert not is_direct(whole.shape, whole.dtype, torch.float64), "values that the kernel does not read"
        assert is_direct((2, 9, 9), torch.float16, torch.bfloat16)
        assert not is_direct((2, 9, 9), torch.float16, torch.float16)
        assert is_direct((2, 45), torch.bfloat16, torch.bfloat16)
        assert is_direct((2, 9, 9), torch.uint8, torch.bfloat16)
        assert not is_direct((2, 9, 9), torch.int8, torch.float32)

    def test_a_triangle_of_a_size_that_is_none_is_refused(self, tmp_path: Path) -> None:
        layout = SlotLayout.paged((2, 44), torch.float32, slots=1)
        (tmp_path / "t.slots").write_bytes(bytes(layout.file_bytes))
        none = np.array([0])
        with Arena(tmp_path / "t.slots", layout) as arena, pytest.raises(ValueError, match="cannot multiply"):
            multiply(arena, [0], torch.randn(9, 10), none, torch.empty(1, 9, 10), none)

    def test_values_in_half_precision_are_rounded_once(self, tmp_path: Path) -> None:
        layout = SlotLayout.paged((2, 9, 9), torch.uint8, slots=1)
        apm = torch.rand(2, 9, 9, generator=torch.Generator().manual_seed(1)).softmax(-1)
        body = pack(apm, "uint8", False).numpy().tobytes()
        (tmp_path / "t.slots").write_bytes(body.ljust(layout.stride, b"\0"))
        values, context = torch.randn(9, 10).bfloat16(), torch.full((3, 11, 10), POISON).bfloat16()
        with Arena(tmp_path / "t.slots", layout) as arena:
            multiply(arena, [0], values, np.array([0]), context, np.array([1]))
        v = values.float().view(9, 2, 5).transpose(0, 1)
        expected = (unpack(pack(apm, "uint8", False)) @ v).transpose(0, 1).reshape(9, 10)
        assert torch.allclose(context[1, :9].float(), expected, atol=2e-2)
        assert bool((context[1, 9:] == 0).all())
        assert bool((context[[0, 2]] == POISON).all())
