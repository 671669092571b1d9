"""Linear layers in panels, of all kinds alike: rows in any strides, each on its own, within their bounds."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from children import run_child
from kernel_tools import APPLIED, parts, read_only, rows
from torch import nn
from walls import before_walls

from attmemo.kernels import _linear
from attmemo.kernels.linear import ACTIVATIONS
from attmemo.kernels.linear8 import Linear8
from attmemo.kernels.linear16 import Linear16
from attmemo.kernels.linear32 import Linear32

Kind = type[Linear32] | type[Linear8] | type[Linear16]
KINDS: list[tuple[Kind, torch.dtype]] = [
    (Linear32, torch.float32), (Linear8, torch.float32), (Linear8, torch.bfloat16), (Linear16, torch.bfloat16)
]  # fmt: skip
if not Linear16.instruction_sets():  # the processor has neither AMX nor avx512_bf16
    KINDS.pop()
CASES = [(kind, dtype, isa) for kind, dtype in KINDS for isa in kind.instruction_sets()]
SINGLE = [(kind, isa) for kind, dtype, isa in CASES if dtype == torch.float32]
kinds = pytest.mark.parametrize(("kind", "dtype"), KINDS, ids=str)
cases = pytest.mark.parametrize(("kind", "dtype", "isa"), CASES, ids=str)
single = pytest.mark.parametrize(("kind", "isa"), SINGLE, ids=str)


@cases
def test_the_answer_of_a_row_does_not_depend_on_the_others(kind: Kind, dtype: torch.dtype, isa: str) -> None:
    weight, bias = parts(200, 72, dtype)
    layer, x = kind.of([weight], [bias], "gelu"), rows(107, 72, dtype)
    x[3] *= 1000
    together = layer(x, isa=isa)
    for size in (1, 5, 48, 50):
        for threads in (1, 2, 7):
            apart = [layer(part, threads=threads, isa=isa) for part in torch.split(x, size)]
            assert torch.equal(torch.cat(apart), together)


@single
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_exact_over_their_whole_range(kind: Kind, isa: str, activation: str) -> None:
    """Zero inputs: the bias goes through the activation alone."""
    values = torch.cat([torch.linspace(-12, 12, 4000), torch.tensor([-1e30, -200.0, -0.0, 200.0, 1e30])])
    seen = kind.of([torch.zeros(len(values), 1)], [values], activation)(torch.zeros(1, 1), isa=isa)[0]
    expected = APPLIED[activation](values.double())
    assert ((seen - expected).abs() <= 2e-6 * (1 + expected.abs())).all()


@cases
def test_a_row_that_is_not_finite_becomes_nan_alone(kind: Kind, dtype: torch.dtype, isa: str) -> None:
    """But in 8 bits, infinity gives what it gives in a product: infinity, or NaN."""
    for inputs, activation in itertools.product((37, 128), ACTIVATIONS):
        weight, bias = parts(70, inputs, dtype)
        layer, x = kind.of([weight], [bias], activation), rows(7, inputs, dtype)
        expected = layer(x, isa=isa)
        for place, wrong in ((0, math.nan), (inputs - 1, math.inf), (17, -math.inf)):
            spoiled = x.clone()
            spoiled[4, place] = wrong
            seen = layer(spoiled, isa=isa)
            assert seen[4].isnan().all() or (kind is not Linear8 and not math.isnan(wrong))
            assert torch.equal(seen[[0, 1, 2, 3, 5, 6]], expected[[0, 1, 2, 3, 5, 6]])


@kinds
def test_any_strides_of_the_rows_give_the_same(kind: Kind, dtype: torch.dtype) -> None:
    weight, bias = parts(24, 40, dtype)
    layer, wide = kind.of([weight], [bias]), rows(34, 80, dtype)
    shapes = {
        "every second row": wide[::2, :40], "a part of each row": wide[:, 3:43], "transposed": rows(40, 9, dtype).t(),
        "one row many times": wide[:1, :40].expand(20, 40), "every second number": wide[:, ::2],
    }  # fmt: skip
    for name, x in shapes.items():
        assert torch.equal(layer(x), layer(x.contiguous().clone())), name
    for add in (rows(24, 34, dtype).t(), wide[:, 7:31], wide[:1, :24].expand(34, 24)):
        assert torch.equal(layer(wide[:, :40], add), layer(wide[:, :40], add.contiguous()))


@pytest.mark.parametrize("kind", [Linear32, Linear8])
def test_stacked_weights_are_their_layers_side_by_side(kind: Kind) -> None:
    pieces = [parts(size, 32, seed=seed) for seed, size in enumerate((32, 16, 8))]
    biases = [pieces[0][1], None, pieces[2][1]]
    x = rows(21, 32)
    apart = [kind.of([weight], [bias])(x) for (weight, _), bias in zip(pieces, biases, strict=True)]
    assert torch.equal(kind.of([weight for weight, _ in pieces], biases)(x), torch.cat(apart, 1))


def norm_of(width: int, dtype: torch.dtype, bias: bool = True) -> nn.LayerNorm:
    norm = nn.LayerNorm(width, eps=1e-5, bias=bias, dtype=dtype)
    with torch.no_grad():
        norm.weight.copy_(1 + rows(1, width, seed=5)[0] / 4)
        if bias:
            norm.bias.copy_(rows(1, width, seed=6)[0])
    return norm


@cases
@torch.inference_mode()
def test_a_norm_is_that_of_the_rows_without_it(kind: Kind, dtype: torch.dtype, isa: str) -> None:
    near = 2**-7 if dtype == torch.bfloat16 else 1e-5
    for count, inputs, outputs in ((0, 4, 4), (1, 5, 3), (7, 37, 70), (50, 64, 64), (107, 33, 200), (3, 9, 2050)):
        layer = kind.of([parts(outputs, inputs, dtype)[0]], [None], "gelu")
        x, add = rows(count, inputs, dtype), 3 + rows(count, outputs, dtype, 2)
        for norm in (norm_of(outputs, dtype), norm_of(outputs, dtype, bias=False)):
            for threads in (1, 2, 5):
                more: dict[str, Any] = {"threads": threads, "isa": isa}
                seen = layer(x, add, norm, **more)
                expected = F.layer_norm(
                    layer(x, add, **more).double(), (outputs,), norm.weight.double(),
                    None if norm.bias is None else norm.bias.double(), norm.eps,
                )  # fmt: skip
                assert seen.dtype == dtype
                assert ((seen.double() - expected).abs() <= near * (1 + expected.abs())).all()


@kinds
def test_weights_of_a_norm_are_read_at_each_call(kind: Kind, dtype: torch.dtype) -> None:
    layer, norm, x = kind.of([parts(24, 40, dtype)[0]], [None]), norm_of(24, dtype), rows(5, 40, dtype)
    with torch.inference_mode():
        before = layer(x, None, norm)
        norm.bias += 1
        near = 1e-5 if dtype == torch.float32 else 0.03
        torch.testing.assert_close(layer(x, None, norm), before + 1, rtol=0, atol=near)


def test_a_norm_of_another_kind_is_refused() -> None:
    layer, x = Linear32.of([parts(24, 40)[0]], [None]), rows(5, 40)
    strided = norm_of(24, torch.float32)
    strided.weight = nn.Parameter(torch.ones(48)[::2])
    bare = nn.LayerNorm(24, elementwise_affine=False)
    others = (norm_of(25, torch.float32), norm_of(24, torch.bfloat16), strided, bare, nn.RMSNorm(24), nn.Identity())
    for norm in others:
        assert not layer.takes(norm)
        with pytest.raises(ValueError, match="the norm must be a LayerNorm of 24"):
            layer(x, None, norm)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Linear32, Linear8])
def test_threads_may_share_a_layer(kind: Kind) -> None:
    weight, bias = parts(80, 96)
    layer = kind.of([weight], [bias], "gelu")
    inputs = [rows(count, 96, seed=count) for count in range(1, 80)]
    alone = [layer(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(layer, inputs * 4))
    assert all(torch.equal(y, alone[i % len(alone)]) for i, y in enumerate(together))


@pytest.mark.parametrize("kind", [Linear32, Linear8])
def test_made_in_inference_mode_it_works_outside(kind: Kind) -> None:
    with torch.inference_mode():
        weight, bias = parts(24, 40)
        layer = kind.of([weight], [bias])
        seen = layer(rows(5, 40))
        weight.zero_()
    assert torch.equal(layer(rows(5, 40)), seen), "its weights are its own"


@pytest.mark.parametrize("kind", [Linear32, Linear8])
def test_rows_that_do_not_fit_are_refused(kind: Kind) -> None:
    layer = kind.of([parts(24, 40)[0]], [None])
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


def columns(arithmetic: int, last: int = 64) -> tuple[np.ndarray[Any, Any], ...]:
    return tuple(
        np.zeros(size if arithmetic or place == 1 else 0, np.float32) for place, size in enumerate((64, 64, last))
    )


def native_call(arithmetic: int, **changed: Any) -> None:
    x, out = np.ones((3, 8), np.float32), np.zeros((3, 5), np.float32)
    call: dict[str, Any] = {
        "x": (x.ctypes.data, 32), "add": (0, 0), "out": out.ctypes.data, "sizes": (3, 8, 5, 0, 0, False),
        "weights": (bytes(64 * (64 if arithmetic else 32)), *columns(arithmetic)), "norm": (0, 0, 0.0, 0, True),
        "flags": (arithmetic, 1, ""),
    } | changed  # fmt: skip
    _linear.multiply(*call.values())


@pytest.mark.parametrize("arithmetic", [0, 1])
@pytest.mark.parametrize(
    "changed",
    [
        {"sizes": (-1, 8, 5, 0, 0, False)}, {"sizes": (3, 0, 5, 0, 0, False)}, {"sizes": (3, 65537, 5, 0, 0, False)},
        {"sizes": (3, 8, 0, 0, 0, False)}, {"sizes": (3, 8, 2**60, 0, 0, False)}, {"sizes": (3, 8, 5, 1, 0, False)},
        {"sizes": (3, 8, 5, 3, 0, False)}, {"sizes": (3, 8, 5, 0, 7, False)}, {"sizes": (3, 8, 5, 0, -1, False)},
        {"sizes": (3, 65, 5, 0, 0, False)}, {"sizes": (3, 8, 65, 0, 0, False)}, {"flags": (3, 1, "")},
        {"flags": (-1, 1, "")},
        {"weights": (bytes(64 * 64), *columns(1, last=63))}, {"weights": (bytes(64 * 64 - 1), *columns(1))},
        {"weights": (bytes(64 * 64), *columns(0, last=63))}, {"norm": (0, 0, -1.0, 0, True)},
        {"norm": (0, 0, math.nan, 0, True)},
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused_by_the_kernel(arithmetic: int, changed: dict[str, Any]) -> None:
    native_call(arithmetic)
    with pytest.raises(ValueError, match=r"out of range|no such|do not fit"):
        native_call(arithmetic, **changed)


@pytest.mark.parametrize("arithmetic", [0, 1])
def test_threads_types_and_instructions_that_do_not_fit_are_refused_by_the_kernel(arithmetic: int) -> None:
    for flags in ((arithmetic, 0, ""), (arithmetic, 1, "mmx")):
        with pytest.raises(ValueError, match=r"out of range|no such"):
            native_call(arithmetic, flags=flags)
    with pytest.raises(ValueError, match="no such type"):
        native_call(0, sizes=(3, 8, 5, 2, 0, False))  # bfloat16
    for wrong in (3, -1):
        with pytest.raises(ValueError, match="no such arithmetic"):
            _linear.instruction_sets(wrong)


@cases
def test_rows_are_only_read_and_nothing_behind_an_end_is_touched(
    kind: Kind, dtype: torch.dtype, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count, inputs, outputs in ((1, 1, 1), (7, 37, 70), (50, 64, 64), (3, 129, 33)):
        weight, bias = parts(outputs, inputs, dtype)
        layer = kind.of([weight], [bias], "gelu")
        x, add = rows(count, inputs, dtype), rows(count, outputs, dtype, 2)
        expected = layer(x, add, isa=isa)
        walled: list[torch.Tensor] = []

        def empty(shape: tuple[int, int], dtype: torch.dtype, walled: list[torch.Tensor] = walled) -> torch.Tensor:
            walled.append(before_walls(torch.zeros(shape, dtype=dtype)))
            return walled[-1]

        with monkeypatch.context() as patch:
            walls = (part if not part.size else before_walls(torch.from_numpy(part)).numpy() for part in layer.weights)
            patch.setattr(layer, "weights", tuple(walls))
            patch.setattr("attmemo.kernels.packed_weights.torch.empty", empty)
            seen = layer(read_only(x), read_only(add), isa=isa)
            assert seen.data_ptr() == walled[-1].data_ptr()
            assert torch.equal(seen, expected)


_FEWER = """
import torch
from attmemo.kernels.linear8 import Linear8
from attmemo.kernels.linear16 import Linear16
from attmemo.kernels.linear32 import Linear32

result = []
for kind, dtype in ((Linear32, torch.float32), (Linear8, torch.float32), (Linear16, torch.bfloat16)):
    if not kind.instruction_sets():
        continue
    torch.manual_seed(0)
    layer = kind.of([torch.randn(700, 96, dtype=dtype)], [None])
    norm = torch.nn.LayerNorm(700, dtype=dtype)
    for rows in (1, 30, 700):
        x = torch.randn(rows, 96, dtype=dtype)
        for end in (None, norm):
            result.append(torch.equal(layer(x, norm=end, threads=8), layer(x, norm=end, threads=1)))
"""


@pytest.mark.parametrize("limit", [1, 2])
def test_all_is_computed_where_fewer_threads_come_than_were_asked_for(limit: int) -> None:
    found = run_child(_FEWER, environment={"OMP_THREAD_LIMIT": str(limit)}).result
    assert found
    assert all(found)
