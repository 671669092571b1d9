"""8-bit linear layers: the kernel gives what plain arithmetic gives, with every instruction set."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import run_child
from hypothesis import given, settings
from hypothesis import strategies as st
from test_linear import APPLIED
from test_ops_native import before_walls
from test_row_attention import read_only
from torch import Tensor

from attmemo.kernels import _linear8
from attmemo.kernels.linear import ACTIVATIONS
from attmemo.kernels.linear8 import Linear8, instruction_sets, linear8_in_torch, rounded

SETS = instruction_sets()
TYPES = [torch.float32, torch.bfloat16]
NEAR = {torch.float32: 4e-6, torch.bfloat16: 2**-8}  # times (1 + abs(expected))


def parts(outputs: int, inputs: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=random) / inputs**0.5
    return weight.to(dtype), torch.randn(outputs, generator=random).to(dtype)


def rows(count: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return (torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) + 0.3).to(dtype)


def is_near(seen: Tensor, expected: Tensor) -> bool:
    assert seen.shape == expected.shape
    assert seen.dtype == expected.dtype
    allowed = NEAR[seen.dtype] * (1 + expected.float().abs())
    return bool(((seen.float() - expected.float()).abs() <= allowed).all())


@pytest.mark.parametrize("isa", SETS)
@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 70), inputs=st.integers(1, 200), outputs=st.integers(1, 200), dtype=st.sampled_from(TYPES),
    activation=st.sampled_from(ACTIVATIONS), biased=st.booleans(), added=st.booleans(), seed=st.integers(0, 99),
    threads=st.integers(1, 3),
)  # fmt: skip
def test_the_kernel_is_its_oracle(
    isa: str, count: int, inputs: int, outputs: int, dtype: torch.dtype, activation: str, biased: bool, added: bool,
    seed: int, threads: int,
) -> None:  # fmt: skip
    weight, bias = parts(outputs, inputs, dtype, seed)
    x, add = rows(count, inputs, dtype, seed), rows(count, outputs, dtype, seed + 1) if added else None
    layer = Linear8.of([weight], [bias if biased else None], activation)
    expected = linear8_in_torch(x, [weight], [bias if biased else None], activation, add)
    assert is_near(layer(x, add, threads=threads, isa=isa), expected)


@pytest.mark.parametrize("isa", SETS)
def test_every_instruction_set_has_the_same_integers(isa: str) -> None:
    """Columns of unit vectors give the codes back; scales of 1 give the sums."""
    x = rows(50, 150) * torch.logspace(-6, 6, 50)[:, None]
    codes = Linear8.of([127 * torch.eye(150)], [None])
    assert torch.equal(codes(x, isa=isa), codes(x, isa=SETS[0]))
    whole = torch.randint(0, 256, (50, 150), generator=torch.Generator().manual_seed(0)).float()
    whole[:, :2] = torch.tensor([0.0, 255.0])
    weight = torch.randint(-127, 128, (90, 150), generator=torch.Generator().manual_seed(1)).float()
    weight[:, 0] = 127
    assert torch.equal(Linear8.of([weight], [None])(whole, isa=isa), whole @ weight.T)


@pytest.mark.parametrize("isa", SETS)
def test_the_largest_sums_do_not_saturate(isa: str) -> None:
    inputs = 65536
    x, weight = torch.full((1, inputs), 255.0), torch.full((2, inputs), 127.0)
    weight[1] = -127
    seen = Linear8.of([weight], [None])(x, isa=isa)
    assert seen.tolist() == [[255 * 127 * inputs, -255 * 127 * inputs]]


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_answer_of_a_row_does_not_depend_on_the_others(isa: str, dtype: torch.dtype) -> None:
    weight, bias = parts(200, 72, dtype)
    layer, x = Linear8.of([weight], [bias], "gelu"), rows(107, 72, dtype)
    x[3] *= 1000
    together = layer(x, isa=isa)
    for size in (1, 5, 48, 50):
        for threads in (1, 2, 7):
            apart = [layer(part, threads=threads, isa=isa) for part in torch.split(x, size)]
            assert torch.equal(torch.cat(apart), together)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_exact_over_their_whole_range(isa: str, activation: str) -> None:
    """Zero inputs: the bias goes through the activation alone."""
    values = torch.cat([torch.linspace(-12, 12, 4000), torch.tensor([-1e30, -200.0, -0.0, 200.0, 1e30])])
    seen = Linear8.of([torch.zeros(len(values), 1)], [values], activation)(torch.zeros(1, 1), isa=isa)[0]
    expected = APPLIED[activation](values.double())
    assert ((seen - expected).abs() <= 2e-6 * (1 + expected.abs())).all()


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_row_that_is_not_finite_becomes_nan_and_its_neighbours_do_not(isa: str, dtype: torch.dtype) -> None:
    weight, bias = parts(70, 37, dtype)
    for activation in ACTIVATIONS:
        layer, x = Linear8.of([weight], [bias], activation), rows(7, 37, dtype)
        expected = layer(x, isa=isa)
        for place, wrong in ((0, math.nan), (36, math.inf), (17, -math.inf)):
            spoiled = x.clone()
            spoiled[4, place] = wrong
            seen = layer(spoiled, isa=isa)
            assert seen[4].isnan().all()
            assert torch.equal(seen[[0, 1, 2, 3, 5, 6]], expected[[0, 1, 2, 3, 5, 6]])


@pytest.mark.parametrize("isa", SETS)
def test_rows_of_one_number_and_of_extreme_numbers(isa: str) -> None:
    weight, bias = parts(70, 37)
    layer = Linear8.of([weight], [bias])
    most = torch.finfo(torch.float32).max
    x = torch.zeros(8, 37)
    x[1], x[2], x[3, 5], x[4, 5], x[5, 5], x[6, ::2], x[7] = 3.0, -2.0, 1e-40, 1e-29, -1e20, most / 64, -most / 64
    seen = layer(x, isa=isa)
    assert torch.equal(seen[0], bias)
    assert is_near(seen[:5], linear8_in_torch(x[:5], [weight], [bias]))
    assert is_near(seen[1:3], F.linear(x[1:3], rounded(weight)[0] * rounded(weight)[1][:, None], bias))
    huge = linear8_in_torch(x[5:], [weight], [bias])
    assert ((seen[5:] - huge).abs() <= 1e-5 * huge.abs().amax(1, keepdim=True)).all()


def test_weights_that_are_not_finite_spoil_their_column_alone() -> None:
    weight, bias = parts(6, 8)
    weight[2, 3], weight[4, 0], weight[5] = math.nan, math.inf, 0
    seen = Linear8.of([weight], [bias])(rows(3, 8))
    assert seen[:, [2, 4]].isnan().all()
    assert seen[:, [0, 1, 3]].isfinite().all()
    assert torch.equal(seen[:, 5], bias[5].expand(3))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_any_strides_of_the_rows_give_the_same(dtype: torch.dtype) -> None:
    weight, bias = parts(24, 40, dtype)
    layer, wide = Linear8.of([weight], [bias]), rows(34, 80, dtype)
    shapes = {
        "every second row": wide[::2, :40], "a part of each row": wide[:, 3:43], "transposed": rows(40, 9, dtype).t(),
        "one row many times": wide[:1, :40].expand(20, 40), "every second number": wide[:, ::2],
    }  # fmt: skip
    for name, x in shapes.items():
        assert torch.equal(layer(x), layer(x.contiguous().clone())), name
    for add in (rows(24, 34, dtype).t(), wide[:, 7:31], wide[:1, :24].expand(34, 24)):
        assert torch.equal(layer(wide[:, :40], add), layer(wide[:, :40], add.contiguous()))


def test_the_layer_is_near_the_exact_one() -> None:
    weight, bias = parts(96, 384)
    x = rows(64, 384)
    seen, exact = Linear8.of([weight], [bias])(x), F.linear(x, weight, bias)
    assert float(F.cosine_similarity(seen, exact).min()) > 0.9995


def test_stacked_weights_are_their_layers_side_by_side() -> None:
    pieces = [parts(size, 32, seed=seed) for seed, size in enumerate((32, 16, 8))]
    biases = [pieces[0][1], None, pieces[2][1]]
    x = rows(21, 32)
    apart = [Linear8.of([weight], [bias])(x) for (weight, _), bias in zip(pieces, biases, strict=True)]
    assert torch.equal(Linear8.of([weight for weight, _ in pieces], biases)(x), torch.cat(apart, 1))


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_two_layers_in_one_call_are_one_behind_the_other(isa: str, activation: str) -> None:
    for count, inputs, inner, outputs in ((0, 4, 4, 4), (1, 5, 7, 3), (13, 64, 130, 65), (107, 70, 33, 200)):
        up, bias = parts(inner, inputs)
        first, second = Linear8.of([up], [bias], activation), Linear8.of([parts(outputs, inner)[0]], [None])
        x, add = rows(count, inputs), rows(count, outputs, seed=2)
        expected = second(first(x, isa=isa), add, isa=isa)
        for threads in (1, 2, 7):
            assert torch.equal(first.feed(second, x, add, threads=threads, isa=isa), expected)
        assert torch.equal(first.feed(second, x, isa=isa), second(first(x, isa=isa), isa=isa))


def test_two_layers_in_one_call_take_bfloat16_and_any_strides() -> None:
    up, bias = parts(96, 64, torch.bfloat16)
    first, second = Linear8.of([up], [bias], "gelu"), Linear8.of([parts(64, 96, torch.bfloat16)[0]], [None])
    wide = rows(60, 128, torch.bfloat16)
    x, add = wide[::2, 3:67], wide[:30, ::2]
    seen = first.feed(second, x, add)
    exact = Linear8.of([up.float()], [bias.float()], "gelu")
    single = exact.feed(Linear8.of([parts(64, 96, torch.bfloat16)[0].float()], [None]), x.float(), add.float())
    assert torch.equal(seen, single.bfloat16()), "what lies between is not rounded"


def test_two_layers_that_do_not_fit_are_refused() -> None:
    first = Linear8.of([parts(24, 40)[0]], [None], "gelu")
    x, wide = rows(3, 40), parts(8, 24)[0]
    for wrong in (Linear8.of([wide], [None], "relu"), Linear8.of([wide.bfloat16()], [None]), first):
        with pytest.raises(ValueError, match="the second layer must take"):
            first.feed(wrong, x)
    with pytest.raises(ValueError, match="add must be a dense tensor"):
        first.feed(Linear8.of([wide], [None]), x, rows(3, 24))
    with pytest.raises(ValueError, match="x must be a dense tensor"):
        first.feed(Linear8.of([wide], [None]), rows(3, 24))


def test_threads_may_share_a_layer() -> None:
    weight, bias = parts(80, 96)
    layer = Linear8.of([weight], [bias], "gelu")
    inputs = [rows(count, 96, seed=count) for count in range(1, 80)]
    alone = [layer(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(layer, inputs * 4))
    assert all(torch.equal(y, alone[i % len(alone)]) for i, y in enumerate(together))


def test_made_in_inference_mode_it_works_outside() -> None:
    with torch.inference_mode():
        weight, bias = parts(24, 40)
        layer = Linear8.of([weight], [bias])
        seen = layer(rows(5, 40))
        weight.zero_()
    assert torch.equal(layer(rows(5, 40)), seen), "its weights are its own"


def test_bytes_kept_are_a_quarter_of_the_weights_and_some_for_each_column() -> None:
    weight, bias = parts(128, 64)
    assert Linear8.of([weight], [bias]).nbytes == 128 * 64 + 3 * 4 * 128


def test_weights_of_another_kind_are_refused() -> None:
    weight, bias = parts(24, 40)
    with pytest.raises(ValueError, match=r"float32 or bfloat16, not torch\.float64"):
        Linear8.of([weight.double()], [None])
    with pytest.raises(ValueError, match="at most 65536 inputs, not 65537"):
        Linear8.of([torch.zeros(1, 65537)], [None])
    with pytest.raises(ValueError, match="'mish' is not one of"):
        Linear8.of([weight], [bias], "mish")
    with pytest.raises(ValueError, match="does not fit"):
        Linear8.of([weight], [bias[:-1]])


def test_rows_that_do_not_fit_are_refused() -> None:
    layer = Linear8.of([parts(24, 40)[0]], [None])
    x = rows(3, 40)
    for wrong in (x[:, 1:], x[0], x[None], x.bfloat16(), x.to("meta"), x.to_sparse()):
        with pytest.raises(ValueError, match="x must be a dense tensor"):
            layer(wrong)
        with pytest.raises(ValueError, match="add must be a dense tensor"):
            layer(x, wrong)
    with pytest.raises(ValueError, match="add has 2 rows, x has 3"):
        layer(x, rows(2, 24))
    with pytest.raises(ValueError, match="no such instructions"):
        layer(x, isa="mmx")
    with pytest.raises(ValueError, match="out of range"):
        layer(x, threads=0)


def native_call(**changed: Any) -> None:
    x, out = np.ones((3, 8), np.float32), np.zeros((3, 5), np.float32)
    call: dict[str, Any] = {
        "x": (x.ctypes.data, 32), "add": (0, 0), "out": out.ctypes.data, "sizes": (3, 8, 5, 0, 0),
        "weights": (bytes(64 * 8), *(np.zeros(64, np.float32) for _ in range(3))), "flags": (1, ""),
    } | changed  # fmt: skip
    _linear8.multiply(*call.values())


@pytest.mark.parametrize(
    "changed",
    [
        {"sizes": (-1, 8, 5, 0, 0)}, {"sizes": (3, 0, 5, 0, 0)}, {"sizes": (3, 65537, 5, 0, 0)},
        {"sizes": (3, 8, 0, 0, 0)}, {"sizes": (3, 8, 2**60, 0, 0)}, {"sizes": (3, 8, 5, 1, 0)},
        {"sizes": (3, 8, 5, 3, 0)}, {"sizes": (3, 8, 5, 0, 5)}, {"sizes": (3, 8, 5, 0, -1)},
        {"sizes": (3, 9, 5, 0, 0)}, {"sizes": (3, 8, 65, 0, 0)}, {"flags": (0, "")}, {"flags": (1, "amx")},
        {"weights": (bytes(64 * 8), *(np.zeros(64, np.float32) for _ in range(2)), np.zeros(63, np.int32))},
        {"weights": (bytes(64 * 8 - 1), *(np.zeros(64, np.float32) for _ in range(3)))},
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused_by_the_kernel(changed: dict[str, Any]) -> None:
    native_call()
    with pytest.raises(ValueError, match=r"out of range|no such|do not fit"):
        native_call(**changed)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rows_are_only_read_and_nothing_behind_an_end_is_touched(
    isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count, inputs, outputs in ((1, 1, 1), (7, 37, 70), (50, 64, 64), (3, 129, 33)):
        weight, bias = parts(outputs, inputs, dtype)
        layer = Linear8.of([weight], [bias], "gelu")
        x, add = rows(count, inputs, dtype), rows(count, outputs, dtype, 2)
        expected = layer(x, add, isa=isa)
        walled = before_walls(torch.zeros(count, outputs, dtype=dtype))
        with monkeypatch.context() as patch:
            patch.setattr(layer, "_codes", before_walls(torch.from_numpy(layer._codes)).numpy())
            patch.setattr(layer, "_columns", tuple(before_walls(torch.from_numpy(c)).numpy() for c in layer._columns))
            patch.setattr("attmemo.kernels.linear8.torch.empty", lambda *_args, walled=walled, **_kwargs: walled)
            seen = layer(read_only(x), read_only(add), isa=isa)
            assert seen.data_ptr() == walled.data_ptr()
            assert torch.equal(seen, expected)
            square = Linear8.of([parts(outputs, outputs, dtype)[0]], [None])
            fed = layer.feed(square, read_only(x), read_only(add), isa=isa)
        assert fed.data_ptr() == walled.data_ptr()
        assert torch.equal(fed, layer.feed(square, x, add, isa=isa))


def test_too_little_memory_is_an_error_and_no_crash() -> None:
    code = """
    import resource
    import torch
    from attmemo.kernels.linear8 import Linear8

    layer = Linear8.of([torch.ones(1, 65536)], [None])
    x = torch.ones(60, 65536)
    layer(x[:1], threads=1)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (1 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (used, used))
    try:
        layer(x, threads=64)
    except MemoryError:
        result = "refused"
    """
    assert run_child(code).result == "refused"
