"""The native attention kernel: every instruction set, number of threads and split gives what the reference gives."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import tracemalloc
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from children import run_child
from hypothesis import given, settings
from ops_cases import TOLERANCE, Case, cases, clone, octets
from walls import before_walls

from attmemo.fastseq.ops import check_arguments, multi_head_cache_attention
from attmemo.fastseq.serving.ops import cache_attention, cpu
from attmemo.kernels import _cache_attention as native
from attmemo.kernels import _map_product
from attmemo.kernels.omp_team import join_torch

SETS = cache_attention.instruction_sets()


def attend(case: Case, inputs: dict[str, Any], isa: str = "") -> torch.Tensor:
    return cpu.attend(check_arguments(**inputs, **case.attributes()), isa)


def test_the_best_instruction_set_comes_first() -> None:
    assert SETS[-1] == "generic"
    assert [name for name in ("amx", "avx512bf16", "avx512", "avx2", "generic") if name in SETS] == SETS
    with pytest.raises(ValueError, match="no such instruction set"):
        attend(Case([(1, 1)]), Case([(1, 1)]).make(), "avx1024")


def test_work_is_shared_with_torchs_threads() -> None:
    """Without a team every other test would pass, on one thread."""
    if not re.search(r"/lib(gomp|iomp5|omp)\b", Path("/proc/self/maps").read_text()):
        pytest.skip("torch has loaded no OpenMP library here")
    assert join_torch(native.use_team)
    assert join_torch(_map_product.use_team)
    assert not native.use_team("/nowhere/libgomp.so.1")


@settings(deadline=None, max_examples=150, derandomize=True)
@given(case=cases())
def test_instruction_sets_agree_with_the_reference(case: Case) -> None:
    inputs = case.make()
    expected = clone(inputs)
    output = multi_head_cache_attention(**expected, **case.attributes(), implementation="reference").double()
    for isa in SETS:
        own = clone(inputs)
        error = (attend(case, own, isa).double() - output).abs() / (1 + output.abs())
        assert float(error.max() if error.numel() else 0) <= TOLERANCE[case.dtype], isa
        assert torch.equal(octets(own["cache"]), octets(expected["cache"])), isa
        assert case.bits == 0 or torch.equal(octets(own["scale"]), octets(expected["scale"])), isa


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("width", [1, 3, 15, 16, 17, 33, 100, 130, 1040])
def test_widths_that_are_no_multiple_of_a_vector(isa: str, width: int) -> None:
    for bits, group in ((0, 1), (8, width)):
        case = Case([(1, 40), (20, 3)], width=width, heads=8, kv_heads=1, bits=bits, group=group)
        inputs = case.make()
        expected = multi_head_cache_attention(**clone(inputs), **case.attributes(), implementation="reference")
        torch.testing.assert_close(attend(case, inputs, isa), expected, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize(
    "sequences", [[(1, 2000)], [(1, 511), (1, 512), (1, 513)], [(120, 30), (1, 700), (2, 600)], [(30, 2000)]]
)
def test_threads_change_no_bit(sequences: list[tuple[int, int]]) -> None:
    case = Case(sequences, bits=8, page=16)
    inputs = case.make()
    before = torch.get_num_threads()
    outputs = []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            outputs.append(attend(case, clone(inputs)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(outputs[0], output) for output in outputs[1:])


@pytest.mark.parametrize("keys", [512, 513, 1024, 1500])
def test_splits_agree_with_the_reference(keys: int) -> None:
    case = Case([(1, keys - 1), (3, keys - 3)], mask="2d", page=32)
    inputs = case.make()
    inputs["attn_mask"][0, 512:1024] = float("-inf")  # a whole split is hidden
    expected = multi_head_cache_attention(**clone(inputs), **case.attributes(), implementation="reference")
    torch.testing.assert_close(attend(case, inputs), expected, atol=2e-6, rtol=2e-6)


@lru_cache(maxsize=1)  # the instruction set is what changes from test to test
def _prompts(
    dtype: torch.dtype, bits: int, width: int, *extra: tuple[str, Any]
) -> tuple[Case, dict[str, Any], torch.Tensor]:
    case = Case(
        [(40, 2500), (300, 5), (9, 600), (1, 3)], heads=8, kv_heads=2, width=width, dtype=dtype, page=16, bits=bits,
        group=width, **dict(extra),
    )  # fmt: skip
    inputs = case.make()
    if inputs["attn_mask"] is not None:
        inputs["attn_mask"][:, 3:11, :2000] = float("-inf")
    expected = multi_head_cache_attention(**clone(inputs), **case.attributes(), implementation="reference").double()
    return case, inputs, expected


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("extra", [{}, {"alibi": True}, {"mask": "3d"}, {"causal": False}], ids=str)
@pytest.mark.parametrize("bits", [0, 8])
@pytest.mark.parametrize("width", [40, 64])
def test_prompts_of_many_blocks_agree_with_the_reference(
    isa: str, dtype: torch.dtype, extra: dict[str, Any], bits: int, width: int
) -> None:
    """Chunks behind thousands of keys, which are split; a prompt of several tiles; queries that see none of a step."""
    case, inputs, expected = _prompts(dtype, bits, width, *extra.items())
    error = (attend(case, clone(inputs), isa).double() - expected).abs() / (1 + expected.abs())
    assert float(error.max()) <= TOLERANCE[dtype]


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [1, 40])
def test_numbers_without_measure_are_not_mistaken(isa: str, dtype: torch.dtype, tokens: int) -> None:
    """Masks as low as a number can be; scores of billions; no key at all; NaN and infinity where they belong."""
    case = Case([(tokens, 300)], width=64, dtype=dtype, mask="2d", hidden=0, causal=False)
    low = clone(case.make())
    low["attn_mask"][0] = torch.finfo(dtype).min
    low["attn_mask"][-1] = float("-inf") if tokens > 1 else torch.finfo(dtype).min / 2
    high = clone(case.make())
    high["attn_mask"] = None
    high["query"] *= 1e3 if dtype == torch.float16 else 3e4
    high["cache"] *= 1 if dtype == torch.float16 else 3e4
    for inputs in (low, high):
        expected = multi_head_cache_attention(**clone(inputs), **case.attributes(), implementation="reference")
        expected = expected.double()
        assert bool(expected.isfinite().all())
        error = (attend(case, inputs, isa).double() - expected).abs() / (1 + expected.abs())
        assert float(error.max()) <= TOLERANCE[dtype]
    for odd in (float("nan"), float("inf")):
        inputs = clone(case.make())
        inputs["query"][-1] = odd
        output = attend(case, inputs, isa)
        assert bool(output[-1].isnan().all())
        assert bool(output[:-1].isfinite().all())


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("tokens", [1, 40])
def test_an_infinite_scale_hides_no_key(isa: str, tokens: int) -> None:
    """float16 scales overflow where a number is above 8.3e6: the output says so, for every query."""
    case = Case([(tokens, 20)], width=64, group=64, bits=8, dtype=torch.bfloat16, scale_dtype=torch.float16)
    inputs = case.make()
    inputs["current_key"][0, :, 0] = 1e8
    assert bool(attend(case, inputs, isa).isnan().all())


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("bits", "group", "width"),
    [(0, 1, 128), (0, 1, 40), (8, 8, 128), (8, 8, 64), (8, 2, 32), (8, 32, 64), (8, 40, 40), (4, 4, 64), (4, 32, 64)],
)
def test_nothing_behind_a_tensors_end_is_touched(
    isa: str, dtype: torch.dtype, bits: int, group: int, width: int
) -> None:
    """A vector too far is a crash where memory ends, and goes unseen elsewhere."""
    case = Case(
        [(1, 70), (1, 200), (30, 3)], width=width, bits=bits, group=group, dtype=dtype, layout=3, mask="2d", page=16
    )
    inputs = case.make()
    starts = inputs["cachestarts"]
    last = max(case.row(starts, b, t) for b, (new, old) in enumerate(case.sequences) for t in range(new + old))
    walls = ("query", "current_key", "current_value", "cache", "scale", "attn_mask")
    for name in ("cache", "scale"):
        if inputs[name] is not None:
            inputs[name] = inputs[name].narrow(3, 0, last + 1).contiguous()
    expected = attend(case, clone(inputs), isa)

    def run() -> bool:
        walled = inputs | {
            name: before_walls(inputs[name], 2 if inputs[name].dim() == 5 else 1)
            for name in walls
            if inputs[name] is not None
        }
        return torch.equal(attend(case, walled, isa), expected)

    assert run_child(run).result


def test_python_threads_with_caches_of_their_own() -> None:
    case = Case([(1, 300), (4, 20)], bits=8, page=16)
    inputs = case.make()
    expected = attend(case, clone(inputs))
    wrong = []

    def serve() -> None:
        for _ in range(20):
            if not torch.equal(attend(case, clone(inputs)), expected):
                wrong.append(1)

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_nothing_of_the_size_of_the_keys_is_allocated() -> None:
    """No unpacked copy of an int8 cache: peak memory grows by far less than that would take."""
    program = """
import resource, torch
from attmemo.fastseq.ops import cache_shape, multi_head_cache_attention, scale_shape
torch.set_num_threads(1)
tokens, heads, width = 65536, 4, 64
cache = torch.ones(cache_shape(3, tokens, 1, heads, width), dtype=torch.int8)
scale = torch.ones(scale_shape(3, tokens, 1, heads, width, 64))
def step(keys):
    q, k = torch.randn(1, heads, width), torch.randn(1, heads, width)
    multi_head_cache_attention(
        q, k, k, torch.tensor([0, 1]), torch.tensor([0, keys]), torch.tensor([0]), torch.tensor([keys - 1]), 1, None,
        None, cache, scale, None, heads, width, quant_bit=8, quant_group=64, cache_layout=3)
step(64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(tokens)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, 2 * tokens * heads * width * 4)
"""
    words = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    grown, unpacked = map(int, words)
    assert grown < unpacked / 20, "an unpacked copy"


def test_the_native_call_checks_what_it_can() -> None:
    """Sizes that would lead astray are refused for every caller."""
    case = Case([(1, 3)], bits=8)
    a = check_arguments(**case.make(), **case.attributes())
    at = a.indices
    output = torch.zeros(a.query.shape)
    tensors = (
        *(cache_attention._tokens(tensor) for tensor in (a.query, a.key, a.value)),
        cache_attention._planes(a.cache_planes),
        cache_attention._planes(a.scale_planes),
        cache_attention._NONE,
    )
    indices = (at.seqstarts, at.kvstarts, at.cachestarts, at.start_pos)
    sizes = (1, a.tokens, 4, 2, 16, 8, 8, at.cachestarts.shape[1] if a.paged else 1, 4)
    good: list[Any] = [tensors, output.data_ptr(), indices, sizes, (True, 0, 1), cache_attention._NO_SLOPES, ""]
    native.attend(*good)
    short = (at.seqstarts[:1], *indices[1:])
    for place, wrong in (
        (0, ((*tensors[0][:1], 7, *tensors[0][2:]), *tensors[1:])),
        (0, ((*tensors[0][:1], 1, *tensors[0][2:]), *tensors[1:])),
        (0, (*tensors[:4], cache_attention._NONE, cache_attention._NONE)),
        (2, short),
        (3, (*sizes[:2], 3, *sizes[3:])),
        (3, (*sizes[:5], 5, *sizes[6:])),
        (3, (*sizes[:6], 3, *sizes[7:])),
        (3, (*sizes[:7], 9, 4)),
        (3, (1, 2, *sizes[2:])),
        (3, (2, *sizes[1:])),
        (4, (True, 0, 0)),
        (5, cache_attention._slopes(3)),
    ):
        arguments = [*good]
        arguments[place] = wrong
        before = octets(a.cache).clone()
        with pytest.raises(ValueError):
            native.attend(*arguments)
        assert torch.equal(octets(a.cache), before)
    with pytest.raises(TypeError):
        native.attend(*good[:3])


def test_nothing_leaks() -> None:
    case = Case([(1, 600), (2, 0)], bits=8)
    inputs = case.make()
    attend(case, inputs)
    tracemalloc.start()
    for _ in range(50):
        attend(case, inputs)
        with pytest.raises(ValueError):
            attend(case, inputs, "none")
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert grown < 50_000


def test_a_lone_query_head_of_a_wide_group() -> None:
    """More query heads than a tile has rows."""
    case = Case([(1, 20), (2, 600)], heads=200, kv_heads=1, width=8)
    inputs = case.make()
    expected = multi_head_cache_attention(**clone(inputs), **case.attributes(), implementation="reference")
    for isa in SETS:
        torch.testing.assert_close(attend(replace(case), clone(inputs), isa), expected, atol=2e-6, rtol=2e-6)
