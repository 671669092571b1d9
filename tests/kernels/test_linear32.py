"""float32 linear layers: the kernel gives what torch gives, with every instruction set."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import APPLIED, parts, rows

from attmemo.kernels.linear import ACTIVATIONS
from attmemo.kernels.linear32 import Linear32

SETS = Linear32.instruction_sets()


@pytest.mark.parametrize("isa", SETS)
@settings(max_examples=80, deadline=None)
@given(
    count=st.integers(0, 70), inputs=st.integers(1, 200), outputs=st.integers(1, 200),
    activation=st.sampled_from(ACTIVATIONS), biased=st.booleans(), added=st.booleans(), seed=st.integers(0, 99),
    threads=st.integers(1, 3),
)  # fmt: skip
def test_the_kernel_is_its_oracle(
    isa: str,
    count: int,
    inputs: int,
    outputs: int,
    activation: str,
    biased: bool,
    added: bool,
    seed: int,
    threads: int,
) -> None:
    weight, bias = parts(outputs, inputs, seed=seed)
    x, add = rows(count, inputs, seed=seed), rows(count, outputs, seed=seed + 1)
    layer = Linear32.of([weight], [bias if biased else None], activation)
    exact = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    expected = APPLIED[activation](exact) + (add if added else 0)
    seen = layer(x, add if added else None, threads=threads, isa=isa)
    assert seen.dtype == torch.float32
    assert ((seen - expected).abs() <= 4e-6 * (1 + expected.abs())).all()


def test_bytes_kept_are_those_of_the_weights_and_whole_panels() -> None:
    weight, bias = parts(100, 64)
    assert Linear32.of([weight], [bias]).nbytes == 4 * (128 * 64 + 128)


def test_weights_of_another_kind_are_refused_and_left_to_others() -> None:
    weight, bias = parts(24, 40)
    with pytest.raises(ValueError, match=r"float32 with at most 65536 inputs, not torch\.bfloat16"):
        Linear32.of([weight.bfloat16()], [None])
    with pytest.raises(ValueError, match="at most 65536 inputs"):
        Linear32.of([torch.zeros(1, 65537)], [None])
    with pytest.raises(ValueError, match="'mish' is not one of"):
        Linear32.of([weight], [bias], "mish")
    with pytest.raises(ValueError, match="does not fit"):
        Linear32.of([weight], [bias[:-1]])
    assert Linear32.where_it_pays([weight.bfloat16()], [None]) is None
    assert Linear32.where_it_pays([torch.zeros(1, 65537)], [None]) is None


def test_the_layer_is_left_to_others_where_the_processor_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = parts(24, 40)
    monkeypatch.setattr(Linear32, "instruction_sets", lambda: ["generic"])
    assert Linear32.where_it_pays([weight], [bias]) is None


@pytest.mark.skipif(SETS[0] == "generic", reason="this processor has no instructions that the kernel was made for")
def test_a_kernel_that_errs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = parts(24, 40)
    assert Linear32.where_it_pays([weight], [bias]) is not None
    real = Linear32.__call__
    monkeypatch.setattr(Linear32, "__call__", lambda *args, **kwargs: real(*args, **kwargs) * 1.001)
    assert Linear32.where_it_pays([weight], [bias]) is None
