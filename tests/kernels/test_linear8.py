"""8-bit linear layers: the kernel gives what plain arithmetic gives, with every instruction set."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from children import run_child
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import parts, rows
from torch import Tensor

from attmemo.kernels.linear import ACTIVATIONS
from attmemo.kernels.linear8 import Linear8, linear8_in_torch, rounded

SETS = Linear8.instruction_sets()
TYPES = [torch.float32, torch.bfloat16]
NEAR = {torch.float32: 4e-6, torch.bfloat16: 2**-7}  # times (1 + abs(expected)); a step of bfloat16 is up to 2**-7


def is_near(seen: Tensor, expected: Tensor) -> bool:
    assert seen.shape == expected.shape
    assert seen.dtype == expected.dtype
    allowed = NEAR[seen.dtype] * (1 + expected.float().abs())
    return bool(((seen.float() - expected.float()).abs() <= allowed).all())


@pytest.mark.parametrize("isa", SETS)
@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 70), inputs=st.integers(1, 200) | st.sampled_from([64, 128, 320]),
    outputs=st.integers(1, 200), dtype=st.sampled_from(TYPES), activation=st.sampled_from(ACTIVATIONS),
    biased=st.booleans(), added=st.booleans(), seed=st.integers(0, 99), threads=st.integers(1, 3),
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
def test_every_instruction_set_has_the_same_codes_of_bfloat16(isa: str) -> None:
    """Whole lines of inputs, and a part of one."""
    for inputs in (128, 150):
        x = (rows(50, inputs) * torch.logspace(-6, 6, 50)[:, None]).bfloat16()
        x[7], x[8] = x[7].abs(), -x[8].abs()
        codes = Linear8.of([127 * torch.eye(inputs).bfloat16()], [None])
        assert torch.equal(codes(x, isa=isa), codes(x, isa=SETS[-1]))


@pytest.mark.parametrize("isa", SETS)
def test_gelu_in_bfloat16_is_near_over_its_whole_range(isa: str) -> None:
    values = torch.cat([torch.linspace(-6, 6, 20001), torch.tensor([-1e30, -100.0, -0.0, 100.0, 1e30])]).bfloat16()
    layer = Linear8.of([torch.zeros(len(values), 1).bfloat16()], [values], "gelu")
    seen = layer(torch.zeros(1, 1).bfloat16(), isa=isa)[0].double()
    expected = F.gelu(values.double())
    assert ((seen - expected).abs() <= 2**-8 * expected.abs() + 5e-5).all()


@pytest.mark.parametrize("isa", SETS)
def test_the_largest_sums_do_not_saturate(isa: str) -> None:
    inputs = 65536
    x, weight = torch.full((1, inputs), 255.0), torch.full((2, inputs), 127.0)
    weight[1] = -127
    seen = Linear8.of([weight], [None])(x, isa=isa)
    assert seen.tolist() == [[255 * 127 * inputs, -255 * 127 * inputs]]


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


def test_the_layer_is_near_the_exact_one() -> None:
    weight, bias = parts(96, 384)
    x = rows(64, 384)
    seen, exact = Linear8.of([weight], [bias])(x), F.linear(x, weight, bias)
    assert float(F.cosine_similarity(seen, exact).min()) > 0.9995


def test_a_layer_takes_bfloat16_and_any_strides() -> None:
    weight, bias = parts(64, 64, torch.bfloat16)
    layer, wide = Linear8.of([weight], [bias], "gelu"), rows(60, 128, torch.bfloat16)
    x, add = wide[::2, 3:67], wide[:30, ::2]
    assert torch.equal(layer(x, add), layer(x.contiguous(), add.contiguous()))


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
