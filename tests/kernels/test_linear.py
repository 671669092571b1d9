"""One linear layer by the fastest way there is: right with the private operators of torch and without them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from kernel_tools import APPLIED
from torch import Tensor

from attmemo.kernels import linear
from attmemo.kernels.linear import ACTIVATIONS, Linear, grid_rows

TYPES = [torch.float32, torch.bfloat16]


def parts(outputs: int, inputs: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=random) / inputs**0.5
    return weight.to(dtype), torch.randn(outputs, generator=random).to(dtype)


def rows(count: int, width: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none") -> Tensor:
    return APPLIED[activation](F.linear(x.double(), weight.double(), None if bias is None else bias.double()))


def error(y: Tensor, reference: Tensor) -> float:
    return float((y.double() - reference).square().mean().sqrt())


@pytest.fixture(params=["as it is", "operator missing", "operator wrong", "other signature"])
def torch_has(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A torch as it is, and torches whose private operators changed."""

    class Operators:
        @staticmethod
        def _reorder_linear_weight(weight: Tensor, rows: int | None = None) -> Tensor:
            return weight

        @staticmethod
        def _linear_pointwise(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
            if request.param == "other signature":
                raise TypeError("takes two arguments")
            return F.linear(x, weight.roll(1, 0))

    kind: str = request.param
    if kind == "operator missing":
        monkeypatch.setattr(torch.ops, "mkldnn", object())
    elif kind != "as it is":
        monkeypatch.setattr(torch.ops, "mkldnn", Operators)
    return kind


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_farther_from_float64_than_torch_whatever_torch_has(
    torch_has: str, activation: str, dtype: torch.dtype
) -> None:
    weight, bias = parts(80, 96, dtype)
    layer = Linear.of([weight], [bias], activation)
    if torch_has != "as it is":
        assert not layer.packed
    elif dtype == torch.float32:
        assert layer.packed == torch.backends.mkldnn.is_available()
    for count in (1, 2, 15, 16, 33, 300):
        x = rows(count, 96, dtype)
        reference = exact(x, weight, bias, activation)
        theirs = APPLIED[activation](F.linear(x, weight, bias))
        y = layer(x)
        assert y.shape == (count, 80)
        assert y.dtype == dtype
        assert error(y, reference) <= 1.1 * error(theirs, reference) + 1e-7


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.usefixtures("torch_has")
def test_a_residual_is_added_behind_the_activation(activation: str, dtype: torch.dtype) -> None:
    weight, bias = parts(48, 64, dtype)
    layer = Linear.of([weight], [bias], activation)
    for count in (1, 17, 64):
        x, add = rows(count, 64, dtype), rows(count, 48, dtype, 2)
        kept = add.clone()
        reference = exact(x, weight, bias, activation) + add.double()
        theirs = APPLIED[activation](F.linear(x, weight, bias)) + add
        assert error(layer(x, add=add), reference) <= 1.1 * error(theirs, reference) + 1e-7
        assert torch.equal(add, kept)


@pytest.mark.parametrize("sums", ["missing", "wrong"])
def test_a_residual_is_right_where_only_its_operator_is_not(sums: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Product:
        def __init__(self, real: Callable[..., Tensor]) -> None:
            self.real = real
            if sums == "wrong":
                self.binary = lambda x, add, weight, bias, name: real(x, weight, bias, "none", [], "") - add

        def __call__(self, *arguments: object) -> Tensor:
            return self.real(*arguments)

    class Operators:
        _reorder_linear_weight = torch.ops.mkldnn._reorder_linear_weight
        _linear_pointwise = Product(torch.ops.mkldnn._linear_pointwise.default)

    monkeypatch.setattr(torch.ops, "mkldnn", Operators)
    weight, bias = parts(48, 64, torch.float32)
    layer = Linear.of([weight], [bias])
    assert layer.packed == torch.backends.mkldnn.is_available()
    x, add = rows(17, 64, torch.float32), rows(17, 48, torch.float32, 2)
    assert error(layer(x, add=add), exact(x, weight, bias) + add.double()) < 1e-5


def test_threads_may_share_a_layer() -> None:
    weight, bias = parts(80, 96, torch.bfloat16)
    layer = Linear.of([weight], [bias], "gelu")
    inputs = [rows(count, 96, torch.bfloat16, count) for count in range(1, 80)]
    alone = [layer(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(layer, inputs * 4))
    assert all(torch.equal(y, alone[i % len(alone)]) for i, y in enumerate(together))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_stacked_weights_are_their_layers_side_by_side(dtype: torch.dtype) -> None:
    pieces = [parts(size, 32, dtype, seed) for seed, size in enumerate((32, 16, 8))]
    biases = [pieces[0][1], None, pieces[2][1]]
    layer = Linear.of([weight for weight, _ in pieces], biases)
    x = rows(21, 32, dtype)
    reference = torch.cat([exact(x, weight, bias) for (weight, _), bias in zip(pieces, biases, strict=True)], 1)
    assert error(layer(x), reference) <= 1.1 * error(reference.to(dtype), reference) + 1e-6
    plain = Linear.of([weight for weight, _ in pieces], [None] * 3)(x)
    assert error(plain, torch.cat([exact(x, weight, None) for weight, _ in pieces], 1)) <= torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [*TYPES, torch.float16, torch.float64], ids=str)
def test_any_strides_of_the_rows_give_the_same(dtype: torch.dtype) -> None:
    weight, bias = parts(24, 40, dtype)
    layer = Linear.of([weight], [bias])
    wide = rows(34, 80, dtype)
    shapes = {
        "every second row": wide[::2, :40], "a part of each row": wide[:, 3:43], "transposed": rows(40, 9, dtype).t(),
        "one row many times": wide[:1, :40].expand(20, 40), "every second number": wide[:, ::2],
    }  # fmt: skip
    for name, x in shapes.items():
        assert torch.equal(layer(x), layer(x.contiguous().clone())), name
    add = rows(24, 34, dtype).t()
    assert torch.equal(layer(wide[:, :40], add=add), layer(wide[:, :40], add=add.contiguous()))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rows_behind_the_last_one_change_nothing(dtype: torch.dtype) -> None:
    layer = Linear.of(*([part] for part in parts(24, 40, dtype)), activation="gelu")  # type: ignore[arg-type]
    buffer = torch.full((64, 40), float("nan"), dtype=dtype)
    buffer[:33] = rows(33, 40, dtype)
    assert torch.equal(layer(buffer[:33]), layer(buffer[:33].clone()))
    assert buffer[33:].isnan().all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_no_rows_give_no_rows(dtype: torch.dtype) -> None:
    weight, bias = parts(24, 40, dtype)
    empty = torch.empty(0, 40, dtype=dtype)
    assert Linear.of([weight], [bias], "gelu")(empty).shape == (0, 24)
    assert Linear.of([weight], [bias])(empty, add=torch.empty(0, 24, dtype=dtype)).shape == (0, 24)


def test_made_in_inference_mode_it_works_outside_and_the_other_way() -> None:
    with torch.inference_mode():
        weight, bias = parts(24, 40, torch.bfloat16)
        inside = Linear.of([weight, weight], [bias, None])
        x = rows(5, 40, torch.bfloat16)
        y = inside(x)
    outside = Linear.of([torch.nn.Parameter(weight.clone())], [torch.nn.Parameter(bias.clone())])
    assert torch.equal(inside(x.clone()), y)
    with torch.inference_mode():
        assert torch.equal(outside(x), y[:, :24])
    assert not outside(x.clone()).requires_grad


def test_weights_of_another_kind_are_refused() -> None:
    weight, bias = parts(24, 40, torch.float32)

    class Other(Tensor):
        pass

    for wrong in (
        weight.to_sparse(), weight.to_mkldnn(), weight.to("meta"), weight.int(), weight[0], weight[:, :0],
        weight.as_subclass(Other),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="weight"):
            Linear.of([wrong], [None])
    with pytest.raises(ValueError, match="one floating type"):
        Linear.of([weight, weight.bfloat16()], [None, None])
    with pytest.raises(ValueError, match="does not fit"):
        Linear.of([weight], [bias[:-1]])
    with pytest.raises(ValueError, match="for each"):
        Linear.of([weight], [])
    with pytest.raises(ValueError, match="with one `in`"):
        Linear.of([weight, weight[:, 1:]], [None, None])
    with pytest.raises(ValueError, match="'mish' is not one of"):
        Linear.of([weight], [bias], "mish")


def test_rows_that_do_not_fit_are_refused() -> None:
    weight, bias = parts(24, 40, torch.float32)
    layer = Linear.of([weight], [bias])
    x = rows(3, 40, torch.float32)
    for wrong in (x[:, 1:], x[0], x[None], x.bfloat16(), x.to("meta"), x.to_sparse()):
        with pytest.raises(ValueError, match="x must be a dense tensor"):
            layer(wrong)
        with pytest.raises(ValueError, match="add must be a dense tensor"):
            layer(x, add=wrong)
    with pytest.raises(ValueError, match="add has 2 rows, x has 3"):
        layer(x, add=rows(2, 24, torch.float32))


def test_bytes_kept_are_those_that_the_layer_does_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = parts(24, 40, torch.bfloat16)
    one, two = 24 * 40 * 2, 2 * (24 * 40 * 2 + 24 * 2)
    assert Linear.of([weight], [bias]).nbytes in (0, one)
    assert Linear.of([weight, weight], [bias, None]).nbytes == two
    monkeypatch.setattr(linear, "_packed", lambda *_: None)
    assert Linear.of([weight], [bias]).nbytes == 0
    assert Linear.of([weight, weight], [bias, None]).nbytes == two


def test_the_grid_has_few_sizes_none_much_longer_than_asked() -> None:
    assert [grid_rows(n) for n in (0, 1, 16, 17, 512, 513, 1024, 1025)] == [0, 16, 16, 32, 512, 544, 1024, 1088]
    for n in range(257, 5000):
        assert n <= grid_rows(n) <= 1.07 * n
        assert grid_rows(grid_rows(n)) == grid_rows(n)
    assert len({grid_rows(n) for n in range(16384)}) < 128
