"""What the attention operator writes: codes and scales bit by bit, rows and planes, in int8 and in 4 bits.

Bits are compared with arithmetic in float64 and rational numbers that shares no code with the operator.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_cases import BOTH, FLOATS, NAMES, Case, check, clone, judge, octets, run

from attmemo.fastseq.ops import cache_shape, check_arguments, multi_head_cache_attention, scale_shape
from attmemo.fastseq.serving.ops import cpu
from attmemo.fastseq.serving.ops.cache_attention import instruction_sets, pack, unpack

SETS = ["reference", *instruction_sets()]


def attend(name: str, case: Case, inputs: dict[str, Any]) -> torch.Tensor:
    """The reference, or the native implementation with one of its instruction sets."""
    if name == "reference":
        return run(case, inputs, name)
    return cpu.attend(check_arguments(**inputs, **case.attributes()), name)


def by_hand(numbers: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of rows of finite numbers, each step in float64 and rounded to their type."""

    def rounded(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return torch.from_numpy(values).to(numbers.dtype).double().numpy()

    most = {8: 127, 4: 7}[bits]
    x = numbers.double().numpy().reshape(-1, group)
    scale = np.maximum(rounded(np.abs(x).max(1) / most), rounded(np.array([1e-5])))
    quotient = rounded(x / scale[:, None])
    below = np.floor(quotient)
    rest = quotient - below  # exact
    code = below + ((rest > 0.5) | ((rest == 0.5) & (below % 2 == 1)))
    code = np.clip(code, -most, most)
    return torch.from_numpy(code.astype(np.int8)).reshape(numbers.shape), torch.from_numpy(scale).to(numbers.dtype)


def quantized(name: str, numbers: torch.Tensor, bits: int, group: int, scale_dtype: torch.dtype) -> tuple[Any, Any]:
    """Codes and scales that the operator stores for rows [n, D]: as keys; as values in reverse order."""
    n, width = numbers.shape
    case = Case([(n, 0)], heads=1, kv_heads=1, width=width, dtype=numbers.dtype, bits=bits, group=group, paged=False)
    inputs = case.make() | {
        "current_key": numbers[:, None],
        "current_value": numbers.flip(0)[:, None],
        "cachestarts": torch.tensor([0]),
        "cache": torch.zeros(cache_shape(0, n, 1, 1, width, bits), dtype=torch.int8),
        "scale": torch.full(scale_shape(0, n, 1, 1, width, group), math.nan, dtype=scale_dtype),
    }
    attend(name, case, inputs)
    codes, scale = inputs["cache"][:, 0, :, 0], inputs["scale"][:, 0, :, 0]
    codes = unpack(codes) if bits == 4 else codes
    assert torch.equal(codes[:, 0], codes[:, 1].flip(0)), "keys and values are stored alike"
    return codes[:, 0], scale[:, 0]


def hard_numbers(dtype: torch.dtype, group: int) -> torch.Tensor:
    """Rows [n, 2 * group] of what is easy to get wrong."""
    generator = torch.Generator().manual_seed(0)
    width = 2 * group
    rows = [torch.randn(200, width, generator=generator)]
    sizes = 10 ** (torch.rand(200, width, generator=generator) * 12.7 - 8)  # 1e-8 to 5e4
    rows.append(sizes * torch.randn(200, width, generator=generator).sign())
    rows.append(sizes[:, :1] * torch.rand(200, width, generator=generator))  # with scales that are subnormal in half
    for most in (127, 7):
        ties = torch.arange(width) % most + 0.5
        ties[::group] = most
        rows += [ties[None], -ties[None], ties[None] * 2**-10, ties[None] * 2**6]
    rows.append(torch.zeros(1, width))
    rows.append(torch.full((1, width), 5e-6))
    rows.append(torch.full((1, width), -4.9e-6))
    outlier = torch.full((1, width), 1e-3)
    outlier[0, group // 2] = 6e4
    rows += [outlier, torch.full((1, width), 65504.0), torch.full((1, width), -65504.0)]
    return torch.cat(rows).to(dtype)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", FLOATS, ids=NAMES.get)
@pytest.mark.parametrize(
    ("bits", "group"), [(8, 1), (8, 3), (8, 8), (8, 16), (8, 40), (8, 128), (4, 2), (4, 8), (4, 32)]
)
def test_codes_and_scales_bit_by_bit(name: str, dtype: torch.dtype, bits: int, group: int) -> None:
    numbers = hard_numbers(dtype, group)
    expected_codes, expected_scale = by_hand(numbers, bits, group)
    for scale_dtype in FLOATS:
        codes, scale = quantized(name, numbers, bits, group, scale_dtype)
        assert torch.equal(codes, expected_codes)
        assert torch.equal(scale, expected_scale.reshape(scale.shape).to(scale_dtype))
        assert int(codes.abs().max()) <= {8: 127, 4: 7}[bits]


@pytest.mark.parametrize("name", SETS)
def test_rounding_half_to_even(name: str) -> None:
    numbers = torch.tensor([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -127, 126.5]])
    codes, scale = quantized(name, numbers, 8, 8, torch.float32)
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, -127, 126]]
    assert scale.tolist() == [[1.0]]


@pytest.mark.parametrize("name", SETS)
def test_the_clamp_matters_in_bfloat16(name: str) -> None:
    numbers = hard_numbers(torch.bfloat16, 8)
    groups = numbers.reshape(-1, 8)
    scale = (groups.abs().amax(1) / torch.tensor(127.0).bfloat16()).clamp(min=1e-5)
    assert int(torch.round(groups / scale[:, None]).abs().max()) == 128, "no group that needs it"
    assert int(quantized(name, numbers, 8, 8, torch.float32)[0].abs().max()) == 127


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", FLOATS, ids=NAMES.get)
@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_have_a_scale(name: str, dtype: torch.dtype, bits: int) -> None:
    codes, scale = quantized(name, torch.zeros(2, 8, dtype=dtype), bits, 8, torch.float32)
    assert not codes.any()
    assert torch.equal(scale, torch.full((2, 1), 1e-5).to(dtype).float())


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS, ids=NAMES.get)
def test_a_group_with_nan_or_infinity(name: str, bad: float, dtype: torch.dtype) -> None:
    numbers = torch.ones(3, 16, dtype=dtype)
    numbers[1, 3] = bad
    codes, scale = quantized(name, numbers, 8, 8, torch.float32)
    assert codes[1, :8].tolist() == [0] * 8
    assert str(float(scale[1, 0])) == str(abs(bad))
    codes[1, :8], scale[1, 0] = codes[0, :8], scale[0, 0]
    assert torch.equal(codes[1], codes[0]), "other groups"
    assert torch.equal(scale[1], scale[0])


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    numbers=st.lists(st.floats(-65504, 65504, width=16), min_size=8, max_size=8),
    dtype=st.sampled_from(FLOATS),
    bits=st.sampled_from([8, 4]),
    group=st.sampled_from([2, 4, 8]),
)
def test_any_numbers(numbers: list[float], dtype: torch.dtype, bits: int, group: int) -> None:
    rows = torch.tensor([numbers]).to(dtype)
    expected_codes, expected_scale = by_hand(rows, bits, group)
    for name in SETS:
        codes, scale = quantized(name, rows, bits, group, torch.float32)
        assert torch.equal(codes, expected_codes)
        assert torch.equal(scale, expected_scale.reshape(scale.shape).float())


@pytest.mark.parametrize("bits", [8, 4])
def test_the_error_is_half_a_step(bits: int) -> None:
    numbers = torch.randn(50, 64, generator=torch.Generator().manual_seed(1))
    codes, scale = quantized(SETS[-1], numbers, bits, 16, torch.float32)
    steps = scale.repeat_interleave(16, 1)
    again = codes * steps
    assert bool(((again - numbers).abs() <= steps * 0.500001).all())
    other, _ = quantized(SETS[-1], again, bits, 16, torch.float32)
    assert int((other.int() - codes.int()).abs().max()) <= 1


def test_packing_is_undone_for_every_byte() -> None:
    every = torch.arange(256, dtype=torch.int64).to(torch.uint8)[None]
    codes = unpack(every)
    assert codes.min() == -8
    assert codes.max() == 7
    assert torch.equal(pack(codes), every)
    assert unpack(torch.tensor([0x21], dtype=torch.uint8)).tolist() == [1, 2], "the low half comes first"
    assert unpack(torch.tensor([0xF8], dtype=torch.uint8)).tolist() == [-8, -1]


@pytest.mark.parametrize("bits", [8, 4])
def test_a_small_cache_is_small(bits: int) -> None:
    shape = cache_shape(0, 100, 3, 2, 64, bits)
    assert math.prod(shape) == 100 * 3 * 2 * 2 * 64 * bits // 8
    assert math.prod(scale_shape(0, 100, 3, 2, 64, 16)) == 100 * 3 * 2 * 2 * 4


@BOTH
@pytest.mark.parametrize("dtype", FLOATS, ids=NAMES.get)
@pytest.mark.parametrize("cache_dtype", FLOATS, ids=NAMES.get)
def test_casts_between_floating_types(implementation: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    case = Case([(3, 4), (1, 2)], dtype=dtype, cache_dtype=cache_dtype, width=18, magnitude=30.0)
    inputs = case.make()
    inputs["current_key"][0, 0, :4] = torch.tensor([65504.0, 1e-7, -0.0, 6.1e-5])
    run(case, inputs, implementation)
    for plane, name in ((0, "current_key"), (1, "current_value")):
        for i in range(3):
            stored = inputs["cache"][case.address(plane, case.row(inputs["cachestarts"], 0, 4 + i), 1)]
            assert torch.equal(stored, inputs[name][i, 1].to(cache_dtype))


@BOTH
def test_casts_round_half_to_even(implementation: str) -> None:
    """Every float16, and the middles between neighbours, from float32 to float16; likewise bfloat16."""
    for cache_dtype in (torch.float16, torch.bfloat16):
        whole = torch.arange(0, 65536, 5, dtype=torch.int32).to(torch.uint16).view(cache_dtype)
        whole = whole[whole.isfinite()].float()
        step = torch.nextafter(whole.to(cache_dtype), torch.tensor(math.inf).to(cache_dtype)).float() - whole
        numbers = torch.cat((whole, whole + step / 2, torch.nextafter(whole + step / 2, torch.tensor(0.0))))
        numbers = numbers[numbers.isfinite()]
        numbers = numbers[: len(numbers) // 16 * 16].reshape(-1, 1, 16)
        case = Case([(len(numbers), 0)], heads=1, kv_heads=1, paged=False, cache_dtype=cache_dtype, width=16)
        inputs = {
            "query": torch.zeros(len(numbers), 1, 16),
            "current_key": numbers,
            "current_value": -numbers,
            "seqstarts": torch.tensor([0, len(numbers)]),
            "kvstarts": torch.tensor([0, len(numbers)]),
            "cachestarts": torch.tensor([0]),
            "start_pos": torch.tensor([0]),
            "decoding_batches": 0,
            "max_seqlen": None,
            "max_kvlen": None,
            "cache": torch.zeros(cache_shape(0, len(numbers), 1, 1, 16), dtype=cache_dtype),
            "scale": None,
            "attn_mask": None,
        }
        for name in [implementation] if implementation == "reference" else instruction_sets():
            inputs["cache"].zero_()
            arguments = check_arguments(**inputs, **case.attributes())
            if name == "reference":
                multi_head_cache_attention(**inputs, **case.attributes(), implementation=name)
            else:
                cpu.attend(arguments, name)
            assert torch.equal(inputs["cache"][:, 0, 0], numbers.to(cache_dtype)), name
            assert torch.equal(inputs["cache"][:, 0, 1], -numbers.to(cache_dtype)), name


# B. Where it is stored


@BOTH
@pytest.mark.parametrize("page", [1, 3, 16, 128, 256])
def test_chunks_that_cross_pages(implementation: str, page: int) -> None:
    check(Case([(1, page - 1), (1, page), (5, max(0, page - 2)), (7, page)], page=page, width=8), implementation)


@BOTH
@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_chunks_do_what_one_call_does(implementation: str, bits: int, chunk: int) -> None:
    """Bit by bit in the cache; outputs are the same to rounding, for each token sees what is stored of the others."""
    case = Case([(11, 0)], bits=bits, page=3)
    inputs = case.make()
    at_once = clone(inputs)
    whole = run(case, at_once, implementation)
    for first in range(0, 11, chunk):
        last = min(11, first + chunk)
        part = inputs | {name: inputs[name][first:last] for name in ("query", "current_key", "current_value")}
        part |= {
            "seqstarts": torch.tensor([0, last - first]),
            "kvstarts": torch.tensor([0, last]),
            "start_pos": torch.tensor([first]),
        }
        output = run(replace(case, sequences=[(last - first, first)]), part, implementation)
        torch.testing.assert_close(output, whole[first:last], atol=2e-6, rtol=2e-6)
    assert torch.equal(octets(inputs["cache"]), octets(at_once["cache"]))
    if bits:
        assert torch.equal(octets(inputs["scale"]), octets(at_once["scale"]))


@BOTH
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_layouts_and_modes_hold_the_same(implementation: str, bits: int) -> None:
    """The same numbers in all layouts, by pages and by offset: the same output, bit by bit."""
    outputs = []
    for layout in range(4):
        for paged in (False, True):
            case = Case([(9, 0), (4, 0)], layout=layout, paged=paged, bits=bits, layers=2, layer=1, page=4)
            inputs = case.make()
            fixed = Case([(9, 0), (4, 0)], bits=bits).make()
            inputs |= {name: fixed[name] for name in ("query", "current_key", "current_value")}
            outputs.append(run(case, inputs, implementation))
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


@BOTH
@pytest.mark.parametrize("layer", [0, 4])
def test_first_and_last_layer(implementation: str, layer: int) -> None:
    for layout in range(4):
        check(Case([(2, 3)], layers=5, layer=layer, layout=layout, bits=8), implementation)


@BOTH
def test_inputs_from_one_fused_tensor(implementation: str) -> None:
    case = Case([(3, 2), (1, 5)], heads=4, kv_heads=2, bits=8)
    inputs = case.make()
    expected = run(case, clone(inputs), implementation)
    fused = torch.cat([inputs[name] for name in ("query", "current_key", "current_value")], 1)
    sliced = clone(inputs) | {
        "query": fused[:, :4],
        "current_key": fused[:, 4:6],
        "current_value": fused[:, 6:],
    }
    assert torch.equal(run(case, sliced, implementation), expected)
    turned = clone(inputs) | {
        name: inputs[name].transpose(0, 2).contiguous().transpose(0, 2)
        for name in ("query", "current_key", "current_value")
    }
    assert torch.equal(run(case, turned, implementation), expected)


@pytest.mark.parametrize("implementation", ["reference", "cpu", "auto"])
@pytest.mark.parametrize(("name", "bits"), [("cache", 0), ("scale", 8)])
def test_a_cache_with_any_strides(implementation: str, name: str, bits: int) -> None:
    """Right, or by 'auto' left to the one that can: never wrong."""
    case = Case([(3, 2), (1, 5)], layout=2, bits=bits)
    inputs = case.make()
    expected = run(case, clone(inputs), "reference")
    given = inputs[name]
    gaps = torch.full((*given.shape[:4], given.shape[4] + 24), math.nan)
    gaps[..., : given.shape[4]] = given
    reordered = given.permute(3, 1, 2, 0, 4).contiguous().permute(3, 1, 2, 0, 4)
    wide = torch.full((*given.shape, 2), math.nan)
    wide[..., 0] = given
    for other in (gaps[..., : given.shape[4]], reordered, *([] if implementation == "cpu" else [wide[..., 0]])):
        assert torch.allclose(run(case, clone(inputs) | {name: other}, implementation), expected, atol=1e-6)


@BOTH
@pytest.mark.parametrize("bits", [0, 8])
def test_sequences_share_a_prefix(implementation: str, bits: int) -> None:
    """Two page lists begin with the same pages, and write to their own."""
    case = Case([(1, 8), (2, 8)], bits=bits, page=4)
    inputs = case.make()
    inputs["cachestarts"][1, :2] = inputs["cachestarts"][0, :2]
    check(case, implementation, inputs)


@BOTH
def test_rows_that_are_used_again(implementation: str) -> None:
    """A sequence ends, another one is given its rows: nothing of the first is left."""
    case = Case([(9, 0)], bits=8, page=4)
    inputs = case.make()
    run(case, inputs, implementation)
    check(replace(case, sequences=[(9, 0)]), implementation, inputs | {"current_key": inputs["current_key"].flip(0)})


# C. What is attended


@BOTH
@pytest.mark.parametrize("bits", [8, 4])
def test_new_tokens_are_attended_as_they_were_stored(implementation: str, bits: int) -> None:
    case = Case([(6, 0)], bits=bits, width=32)
    inputs = case.make()
    output = check(case, implementation, clone(inputs))
    raw = judge(replace(case, bits=0), inputs | {"cache": unquantized(case, inputs), "scale": None})
    assert float((output.double() - torch.from_numpy(raw)).abs().max()) > 2e-3, "raw keys and values would do, too"


def unquantized(case: Case, inputs: dict[str, Any]) -> torch.Tensor:
    """A float32 cache that holds the new tokens of a single sequence."""
    cache = torch.zeros(cache_shape(case.layout, 64, case.layers, case.kv_heads, case.width))
    for i in range(case.sequences[0][0]):
        row = case.row(inputs["cachestarts"], 0, i)
        for head in range(case.kv_heads):
            cache[case.address(0, row, head)] = inputs["current_key"][i, head]
            cache[case.address(1, row, head)] = inputs["current_value"][i, head]
    return cache


@BOTH
@pytest.mark.parametrize(("bits", "lowest"), [(8, -128), (4, 0x88)])
def test_codes_that_were_never_written_are_never_read(implementation: str, bits: int, lowest: int) -> None:
    case = Case([(1, 5)], bits=bits)
    inputs = case.make()
    for t in range(5):
        inputs["cache"][case.address(1, case.row(inputs["cachestarts"], 0, t), 0)] = lowest
    check(case, implementation, inputs)


@BOTH
def test_flushing_subnormals_changes_nothing(implementation: str) -> None:
    case = Case([(4, 0)], dtype=torch.float16, bits=8, scale_dtype=torch.float16, magnitude=1e-4)
    inputs = case.make()
    expected = clone(inputs)
    run(case, expected, implementation)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        run(case, inputs, implementation)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(octets(inputs["cache"]), octets(expected["cache"]))
    assert torch.equal(octets(inputs["scale"]), octets(expected["scale"]))
    assert float(inputs["scale"][inputs["scale"] > 0].min()) < 6e-5, "no scale was subnormal"
