"""One linear layer, prepared once for the fastest way that this torch and this processor have.

`Linear` keeps the weights in the order that oneDNN reads them in, and lets the same call add the bias, the activation
and a residual. torch has this in private operators, those that its compiler emits for frozen weights. A private
operator may be missing or change, so each layer is checked against plain arithmetic when it is prepared. Where the
check fails, the layer runs by `torch.nn.functional.linear`. For float32 on processors with AVX2, and for bfloat16 on
those with AMX or avx512_bf16, there are kernels of our own, linear32.py and linear16.py.

A NEW NUMBER OF ROWS.  oneDNN generates code for each number of rows: in bfloat16 with AMX 1 ms a layer, 8 ms with GELU
fused, where the product of 300 rows takes 0.5 ms. A stream of packed rows has another number in every batch. So layers
in bfloat16 run on a few numbers only, `grid_rows`, which cost at most 7 % more rows beyond the first 256. The linear
layers and norms of six blocks of width 384, each batch with another number of rows: 1.5 to 2.1 times as fast as on the
number itself. float32 code takes 0.3 ms where the product takes 6: there it does not pay.

WHAT IT GAINS.  Against `torch.nn.functional.linear`, for widths of 384 to 3072, on two busy cores with AMX: 1.3 to 1.9
times as fast in bfloat16, from one row to 4096. In float32 1.0 to 1.4 times from 46 rows on, 0.9 to 1.2 at 8, 0.7 at
one. A residual added in the same call makes a whole block about 1.05 times as fast in bfloat16, 1.1 in float32.

ROADS NOT TAKEN
  MKL's packed weights for float32: 1.1 to 1.5 times as fast, but only for the one number of rows they were packed for.
  A kernel for the layer norm of a sum: with the sum in the product's own call there is no second pass to save. The
  kernel made a block of width 384 or 768 0.84 to 1.07 times as fast.
  8-bit layers with torch's product, `qlinear_pointwise`: the passes around the product eat up what it gains. The four
  layers of a block (1536 rows) on a machine with AMX, how many times as fast as they are here in bfloat16:

                                                                 width 384    width 768
    products alone, one thread                                     1.78         1.82
    with rounding, scaling and GELU in vectorised C, one thread    1.03         1.26
    with torch's operators around each product, two threads        0.1 to 0.4   0.4 to 0.6

  linear8.py does all of it in one pass, and measures otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

_FUSED: Final = {
    "none": ("none", ""),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "quick_gelu": ("none", ""),
    "clipped": ("none", ""),
}
"""What the private operator calls each activation: name and algorithm."""

_NOT_FUSED: Final = ("quick_gelu", "clipped")
"""Activations that it does not know: they are a pass of their own."""

AFTER: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "none": lambda y: y,
    "relu": torch.relu_,
    "silu": lambda y: F.silu(y, inplace=True),
    "gelu": lambda y: torch.ops.aten.gelu_(y, approximate="none"),
    "gelu_tanh": lambda y: torch.ops.aten.gelu_(y, approximate="tanh"),
    "quick_gelu": lambda y: y.mul_(torch.sigmoid(1.702 * y)),
    "clipped": lambda y: y.clamp_(max=LIMIT).mul_(torch.sigmoid(1.702 * y)),
}
ACTIVATIONS: Final = tuple(_FUSED)

LIMIT: Final = 7.0
"""Of "clipped": as in native/linear.h."""

_CHECKED: Final = 16  # rows of the check


def grid_rows(rows: int) -> int:
    """How many rows a bfloat16 layer runs for so many: the next of 16, 32, ... 512, 544, ... 1024, 1088, ...

    Sixteen steps for each power of two, none shorter than the 16 rows of an AMX tile: 117 numbers up to 20,000 rows.
    A caller that holds its rows at the front of a buffer of this many saves `Linear` a copy.
    """
    step = max(16, 1 << (rows - 1).bit_length() >> 5) if rows > 0 else 1
    return -(-rows // step) * step


class Linear:
    """``activation(x @ weight.T + bias)``, for inference: no gradient flows to the weights.

    Later changes of the weights it was made from may or may not be seen. Several threads may call one instance.

    Attributes
    ----------
    inputs, outputs : int
        Width of a row of `x`, and of a row of the result.
    dtype : torch.dtype
        Of weights, rows and result.
    packed : bool
        Whether the private operators are used.
    nbytes : int
        Bytes that this layer keeps beside the tensors it was made from (the padding of oneDNN's blocks not counted).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str, given: set[int]) -> None:
        self.outputs, self.inputs = weight.shape
        self.dtype = weight.dtype
        self.activation = activation
        self._bias = bias
        self._fused, self._algorithm = _FUSED[activation]
        order = _packed(weight, bias, activation)
        self.packed = order is not None
        # With the weights in oneDNN's order, a stacked copy in plain order is of no more use.
        self._weight = weight if order is None else order
        self._adds = self.packed and _adds(self._weight, weight, bias, activation)
        own = [weight] if self.packed or weight.data_ptr() not in given else []
        own += [bias] if bias is not None and bias.data_ptr() not in given else []
        self.nbytes = sum(t.numel() * t.element_size() for t in own)

    @classmethod
    def of(cls, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str = "none") -> Linear:
        """Prepare the layer whose weight is `weights` stacked, such as those of Q, K and V.

        Parameters
        ----------
        weights : sequence of Tensor
            Each ``[out, in]`` with the same ``in``; plain dense tensors of one floating type on the CPU.
        biases : sequence of Tensor or None
            One for each weight, ``[out]``. None is zeros where another weight has a bias.
        activation : str
            One of `ACTIVATIONS`: "gelu" is the exact one.

        Raises
        ------
        ValueError
            If the activation is not known, or the tensors are not of this kind or do not fit each other.
        """
        if activation not in _FUSED:
            raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
        check_parts(weights, biases)
        # Tensors made in inference mode could not be used outside it.
        with torch.inference_mode(False), torch.no_grad():
            weight, bias = stacked(weights, biases)
            given = {t.data_ptr() for t in (*weights, *biases) if t is not None}
            return cls(weight, bias, activation, given)

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """The layer on rows `x` ``[N, inputs]``, plus the residual `add` ``[N, outputs]``: ``[N, outputs]``.

        Any strides and any N, 0 too. The result is a new tensor; its storage may be longer than N rows. The residual
        is added before the result is rounded to bfloat16 where the operator can do it, after it elsewhere.

        Raises ValueError if shapes, types or devices do not fit.
        """
        check_rows(x, self.inputs, self.dtype, add, self.outputs)
        rows = x.shape[0]
        if rows == 0:
            return x.new_empty((0, self.outputs))
        if not self.packed:
            plain = AFTER[self.activation](F.linear(x, self._weight, self._bias))
            return plain if add is None else plain.add_(add)
        run = grid_rows(rows) if self.dtype == torch.bfloat16 else rows
        x = _lengthened(x, run)
        operator = torch.ops.mkldnn._linear_pointwise
        y: Tensor
        if add is not None and self._adds:
            y = operator.binary(x, _lengthened(add, run), self._weight, self._bias, "add")
            return y if run == rows else y[:rows]
        y = operator(x, self._weight, self._bias, self._fused, [], self._algorithm)
        y = AFTER[self.activation](y) if self.activation in _NOT_FUSED else y
        y = y if run == rows else y[:rows]
        return y if add is None else y.add_(add)


def check_rows(x: Tensor, width: int, dtype: torch.dtype, add: Tensor | None, outputs: int) -> None:
    """ValueError unless `x` ``[N, width]`` and `add` ``[N, outputs]`` are dense, of this type and on the CPU."""
    # Private operators and native code do not look at the shape: a row too short would be read beyond its end.
    for name, rows, columns in (("x", x, width), ("add", add, outputs)):
        if rows is None:
            continue
        if rows.dim() != 2 or rows.shape[1] != columns or rows.dtype != dtype or not _is_plain(rows):
            seen = f"{rows.dtype} {tuple(rows.shape)} on {rows.device.type}"
            raise ValueError(f"{name} must be a dense tensor, {dtype} [N, {columns}] on the CPU, not {seen}")
    if add is not None and len(add) != len(x):
        raise ValueError(f"add has {len(add)} rows, x has {len(x)}")


def _is_plain(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.layout == torch.strided


def check_parts(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
    """ValueError unless the weights can be stacked and each bias fits its weight."""
    if not weights or len(weights) != len(biases):
        raise ValueError(f"{len(weights)} weights and {len(biases)} biases: there must be one bias or None for each")
    first = weights[0]
    for weight, bias in zip(weights, biases, strict=True):
        for name, tensor in (("weight", weight), ("bias", bias)):
            if tensor is None:
                continue
            # Subclasses may compute anything: quantized, distributed or traced tensors.
            if type(tensor) not in (Tensor, torch.nn.Parameter) or not _is_plain(tensor):
                raise ValueError(f"a {name} must be a plain dense tensor on the CPU, not {type(tensor).__name__}")
            if tensor.dtype != first.dtype or not tensor.is_floating_point():
                raise ValueError(f"weights and biases must be of one floating type: {first.dtype}, {tensor.dtype}")
        if weight.dim() != 2 or weight.shape[1] != first.shape[1] or 0 in weight.shape:
            raise ValueError(f"weights must be [out, in] with one `in`: {tuple(first.shape)}, {tuple(weight.shape)}")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"a bias of shape {tuple(bias.shape)} does not fit a weight {tuple(weight.shape)}")


def stacked(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    bias: Tensor | None = None
    if any(b is not None for b in biases):
        filled = [w.new_zeros(w.shape[0]) if b is None else b.detach() for w, b in zip(weights, biases, strict=True)]
        bias = filled[0].contiguous() if len(filled) == 1 else torch.cat(filled)
    if len(weights) == 1:
        return weights[0].detach().contiguous(), bias
    return torch.cat([w.detach() for w in weights]), bias


def _packed(weight: Tensor, bias: Tensor | None, activation: str) -> Tensor | None:
    """The weight in oneDNN's order, or None if the private operators are not there or wrong for this layer."""
    if weight.dtype not in (torch.bfloat16, torch.float32):
        return None
    try:
        # The number of rows told here changes nothing that could be measured, from 8 to 4096.
        order: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 512)
        x = sample(weight.shape[1], weight.dtype)
        name, algorithm = _FUSED[activation]
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, order, bias, name, [], algorithm)
        y = AFTER[activation](y) if activation in _NOT_FUSED else y
    except (AttributeError, RuntimeError, TypeError):
        return None
    return order if agrees(y, x, weight, bias, activation, None) else None


def _adds(order: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> bool:
    """Whether the private operator can add a residual in the same call."""
    if activation != "none":
        return False
    x, add = sample(weight.shape[1], weight.dtype), sample(weight.shape[0], weight.dtype)
    try:
        y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, add, order, bias, "add")
    except (AttributeError, RuntimeError, TypeError):
        return False
    return agrees(y, x, weight, bias, activation, add)


def sample(width: int, dtype: torch.dtype) -> Tensor:
    """Rows without a pattern that a wrong order of numbers could hide in, the same every time."""
    return torch.arange(1.0, _CHECKED * width + 1).mul_(1.618).sin_().view(_CHECKED, width).to(dtype)


def agrees(
    y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, add: Tensor | None,
    gated: bool = False,
) -> bool:  # fmt: skip
    """Whether `y` is the layer on `x`, up to rounding.

    `gated`: the first half of the columns is activated, and multiplied by the other half.
    """
    if y.shape != (len(x), len(weight) // (2 if gated else 1)) or y.dtype != x.dtype or y.layout != torch.strided:
        return False
    x, weight = x.float(), weight.float()
    bias = None if bias is None else bias.float()
    line = F.linear(x, weight, bias)
    other, wrong = torch.ones(()), weight.shape[1] * 2**-23 * _sizes(x, weight, bias)
    if gated:
        line, other = line.chunk(2, 1)
        other = factor_of(other, activation)
        wrong, more = wrong.chunk(2, 1)
        wrong = other.abs() * wrong + (line.abs() + wrong) * more
    exact = AFTER[activation](line.clone()) * other
    if add is not None:
        exact += add
    # Two roundings to `dtype` on the way, of numbers no larger than these (the slope of GELU is at most 1.13), and
    # those of a float32 sum in any order. A number in a wrong place is off by a hundred times as much.
    bound = 2 * torch.finfo(y.dtype).eps * ((line * other).abs() + exact.abs()) + wrong
    return bool(((y.float() - exact).abs() <= bound).all())


def factor_of(other: Tensor, activation: str) -> Tensor:
    """What the activated half of a gated layer is multiplied with, from the other half."""
    return other.clamp(-LIMIT, LIMIT) + 1 if activation == "clipped" else other


def _sizes(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Sums of the sizes of what a layer sums."""
    return F.linear(x.abs(), weight.abs(), None if bias is None else bias.abs())


def _lengthened(x: Tensor, rows: int) -> Tensor:
    """`x` with that many rows, whatever the last ones hold: no row of a product depends on another."""
    width = x.shape[1]
    if x.stride() == (width, 1):
        if len(x) == rows:
            return x
        end = x.storage_offset() + rows * width
        if end * x.element_size() <= x.untyped_storage().nbytes():
            return x.as_strided((rows, width), (width, 1))  # what lies behind it in its own storage
    longer = x.new_empty((rows, width))
    longer[: len(x)] = x
    return longer
