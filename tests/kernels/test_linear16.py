"""bfloat16 linear layers by a matrix unit or AVX-512: the kernel gives what torch gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import APPLIED, parts, rows

from attmemo.kernels.linear import ACTIVATIONS
from attmemo.kernels.linear16 import Linear16

unit = pytest.mark.skipif(not Linear16.instruction_sets(), reason="this processor has neither AMX nor avx512_bf16")
sets = pytest.mark.parametrize("isa", Linear16.instruction_sets() or [""])


@unit
@settings(max_examples=150, deadline=None)
@given(
    count=st.integers(0, 70) | st.integers(1, 1300), inputs=st.integers(1, 200), outputs=st.integers(1, 200),
    activation=st.sampled_from(ACTIVATIONS), biased=st.booleans(), added=st.booleans(), seed=st.integers(0, 99),
    threads=st.integers(1, 3), isa=st.sampled_from(Linear16.instruction_sets() or [""]),
)  # fmt: skip
def test_the_kernel_is_its_oracle(
    count: int, inputs: int, outputs: int, activation: str, biased: bool, added: bool, seed: int, threads: int,
    isa: str,
) -> None:  # fmt: skip
    weight, bias = parts(outputs, inputs, torch.bfloat16, seed)
    x, add = rows(count, inputs, torch.bfloat16, seed), rows(count, outputs, torch.bfloat16, seed + 1)
    layer = Linear16.of([weight], [bias if biased else None], activation)
    exact = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    expected = APPLIED[activation](exact) + (add.double() if added else 0)
    seen = layer(x, add if added else None, threads=threads, isa=isa)
    assert seen.dtype == torch.bfloat16
    # One rounding of the result, and those of sums in float32; GELU is right to 4e-5.
    assert ((seen - expected).abs() <= 2**-8 * expected.abs() + (5e-5 if activation == "gelu" else 1e-5)).all()


@unit
@sets
def test_gelu_is_exact_where_nothing_or_all_is_left_and_near_elsewhere(isa: str) -> None:
    x = torch.cat([torch.tensor([-torch.inf, -1e30, -100.0, -4.5, 0.0, 4.5, 100.0, 1e30, torch.inf, torch.nan]),
                   torch.linspace(-6, 6, 20001)])[:, None].bfloat16()  # fmt: skip
    seen = Linear16.of([torch.ones(64, 1).bfloat16()], [None], "gelu")(x, isa=isa)[:, 5].double()
    assert (seen[1:4] == 0).all()
    assert torch.equal(seen[4:9], x[4:9, 0].double())
    assert seen[9].isnan()
    expected = F.gelu(x[10:, 0].double())
    assert ((seen[10:] - expected).abs() <= 2**-8 * expected.abs() + 5e-5).all()


@unit
@sets
def test_rows_of_many_inputs_are_worked_on_in_small_chunks_with_the_same_result(isa: str) -> None:
    weight, bias = parts(70, 9000, torch.bfloat16)
    layer, x = Linear16.of([weight], [bias]), rows(300, 9000, torch.bfloat16)
    together = layer(x, threads=3, isa=isa)
    assert torch.equal(torch.cat([layer(part, threads=1, isa=isa) for part in x.split(7)]), together)
    expected = F.linear(x.double(), weight.double(), bias.double())
    assert ((together - expected).abs() <= 2**-8 * expected.abs() + 1e-4).all()


@unit
def test_bytes_kept_are_those_of_the_weights_and_whole_tiles() -> None:
    weight, bias = parts(100, 70, torch.bfloat16)
    assert Linear16.of([weight], [bias]).nbytes == 2 * 128 * 96 + 4 * 128


def test_weights_of_another_kind_are_refused_and_left_to_others() -> None:
    weight, bias = (part.bfloat16() for part in parts(24, 40))
    with pytest.raises(ValueError, match=r"bfloat16 with at most 65536 inputs, not torch\.float32"):
        Linear16.of([weight.float()], [None])
    with pytest.raises(ValueError, match="at most 65536 inputs"):
        Linear16.of([torch.zeros(1, 65537).bfloat16()], [None])
    with pytest.raises(ValueError, match="'mish' is not one of"):
        Linear16.of([weight], [bias], "mish")
    with pytest.raises(ValueError, match="does not fit"):
        Linear16.of([weight], [bias[:-1]])
    assert Linear16.where_it_pays([weight.float()], [None]) is None
    assert Linear16.where_it_pays([torch.zeros(1, 65537).bfloat16()], [None]) is None


def test_the_layer_is_left_to_others_where_such_instructions_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = parts(24, 40, torch.bfloat16)
    monkeypatch.setattr(Linear16, "instruction_sets", list)
    assert Linear16.where_it_pays([weight], [bias]) is None


@unit
def test_a_kernel_that_errs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = parts(24, 40, torch.bfloat16)
    assert Linear16.where_it_pays([weight], [bias]) is not None
    real = Linear16.__call__
    monkeypatch.setattr(Linear16, "__call__", lambda *args, **kwargs: real(*args, **kwargs) * 1.1)
    assert Linear16.where_it_pays([weight], [bias]) is None
