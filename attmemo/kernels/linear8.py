"""One linear layer in 8 bits: `native/linear8.c` and its oracle in torch.

ROUNDING.  A row of x becomes codes from 0 to 255 with a scale and a zero point of its own, so its result does not
depend on other rows. A column of the weights becomes codes from -127 to 127 with a scale of its own. Sums of products
of codes are exact integers; scales, bias, activation and residual are computed in float32.

A ROW WITH A NUMBER THAT IS NOT FINITE gives a result of NaN in every column (plus the residual).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attmemo.kernels import _linear8 as native
from attmemo.kernels.linear import ACTIVATIONS, AFTER, check_parts, check_rows, stacked
from attmemo.kernels.team import join_torch

LinearName = Literal["exact", "int8"]
"""Arithmetic of linear layers: `Linear` or `Linear8`."""

TYPES: Final = {torch.float32: 0, torch.bfloat16: 2}  # as `enum type` has them
_PANEL: Final = 64  # as native/linear8.h has them
_MOST_INPUTS: Final = 65536
_Numbers = np.ndarray[Any, Any]
_Weights = tuple[_Numbers, _Numbers, _Numbers, _Numbers]


class Linear8:
    """``activation(x @ weight.T + bias)`` with weights and rows in 8 bits, for inference.

    Later changes of the weights it was made from are not seen. Several threads may call one instance.

    Attributes
    ----------
    inputs, outputs : int
        Width of a row of `x`, and of a row of the result.
    dtype : torch.dtype
        Of weights, rows and result.
    packed : bool
        Always True: weights lie in the kernel's order.
    nbytes : int
        Bytes that this layer keeps beside the tensors it was made from.
    """

    packed: Final = True

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str) -> None:
        self.outputs, self.inputs = weight.shape
        self.dtype, self.activation = weight.dtype, activation
        codes, scales = rounded(weight)
        columns = -(-self.outputs // _PANEL) * _PANEL
        self._codes = _in_panels(codes, columns)
        # What the kernel reads for each column, one behind the other.
        whole = [_longer(part, columns) for part in (scales, scales.new_zeros(0) if bias is None else bias.float())]
        whole.append(_longer(codes.sum(1, dtype=torch.int32), columns))
        self._columns = whole[0].numpy(), whole[1].numpy(), whole[2].numpy()
        self.nbytes = self._codes.nbytes + sum(part.nbytes for part in self._columns)

    @classmethod
    def of(cls, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str = "none") -> Linear8:
        """Prepare the layer whose weight is `weights` stacked, such as those of Q, K and V.

        Parameters
        ----------
        weights : sequence of Tensor
            Each ``[out, in]`` with the same ``in``; plain dense tensors on the CPU, all float32 or all bfloat16.
        biases : sequence of Tensor or None
            One for each weight, ``[out]``. None is zeros.
        activation : str
            One of `attmemo.kernels.linear.ACTIVATIONS`: "gelu" is the exact one.

        Raises
        ------
        ValueError
            If the activation is not known, or the tensors are not of this kind or do not fit each other.
        """
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
        check_parts(weights, biases)
        if weights[0].dtype not in TYPES:
            raise ValueError(f"weights of 8-bit layers come from float32 or bfloat16, not {weights[0].dtype}")
        if weights[0].shape[1] > _MOST_INPUTS:
            raise ValueError(f"8-bit layers have at most {_MOST_INPUTS} inputs, not {weights[0].shape[1]}")
        with torch.inference_mode(False), torch.no_grad():
            return cls(*stacked(weights, biases), activation)

    def __call__(self, x: Tensor, add: Tensor | None = None, *, threads: int | None = None, isa: str = "") -> Tensor:
        """The layer on rows `x` ``[N, inputs]``, plus the residual `add` ``[N, outputs]``: ``[N, outputs]``.

        Any strides and any N, 0 too. `threads`: None is as many as torch uses. `isa`: one of `instruction_sets`, empty
        for the best.

        Raises ValueError if shapes, types or devices do not fit, MemoryError if there is no memory for some rows.
        """
        check_rows(x, self.inputs, self.dtype, add, self.outputs)
        out = torch.empty((len(x), self.outputs), dtype=self.dtype)
        x = _in_lines(x)
        add = None if add is None else _in_lines(add)
        native.multiply(
            _lines(x), (0, 0) if add is None else _lines(add), out.data_ptr(),
            (len(x), self.inputs, self.outputs, TYPES[self.dtype], ACTIVATIONS.index(self.activation)),
            self._weights, (torch.get_num_threads() if threads is None else threads, isa),
        )  # fmt: skip
        return out

    def feed(
        self, behind: Linear8, x: Tensor, add: Tensor | None = None, *, threads: int | None = None, isa: str = ""
    ) -> Tensor:
        """``behind(self(x), add)`` in one call; what lies between the layers is not rounded to their type.

        `behind` has no activation. Raises as a call does.
        """
        if behind.inputs != self.outputs or behind.dtype != self.dtype or behind.activation != "none":
            raise ValueError(
                f"the second layer must take {self.dtype} [N, {self.outputs}] and have no activation, not "
                f"{behind.dtype} [N, {behind.inputs}] and {behind.activation!r}"
            )
        check_rows(x, self.inputs, self.dtype, add, behind.outputs)
        out = torch.empty((len(x), behind.outputs), dtype=self.dtype)
        x = _in_lines(x)
        add = None if add is None else _in_lines(add)
        native.feed(
            _lines(x), (0, 0) if add is None else _lines(add), out.data_ptr(),
            (len(x), self.inputs, self.outputs, behind.outputs, TYPES[self.dtype], ACTIVATIONS.index(self.activation)),
            self._weights, behind._weights, (torch.get_num_threads() if threads is None else threads, isa),
        )  # fmt: skip
        return out

    @property
    def _weights(self) -> _Weights:
        return (self._codes, *self._columns)


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 ``[out, in]`` and scales float32 ``[out]`` of a weight; NaN where a column is not finite."""
    weight = weight.detach().float()
    finite = weight.isfinite().all(1)
    scales = weight.abs().amax(1) / 127
    scales = torch.where(finite, scales.clamp_min(1e-30), torch.nan)
    codes = torch.where(finite[:, None], weight / scales[:, None], 0).round().to(torch.int8)
    return codes, scales


def linear8_in_torch(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str = "none",
    add: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The same layer in torch, in the type of `x`: slow, and equal but for the rounding of float32."""
    weight, bias = stacked(weights, biases)
    codes, scales = rounded(weight)
    row = x.float()
    finite = row.isfinite().all(1, keepdim=True)
    row = torch.where(finite, row, 0)
    low, high = (found.clamp(*ends) for found, ends in
                 ((row.amin(1, True), (None, 0)), (row.amax(1, True), (0, None))))  # fmt: skip
    scale = (high / 255 - low / 255).clamp_min(1e-30)
    inverse = 1 / scale
    zero = (-low * inverse).round()
    coded = ((row * inverse).round() + zero).clamp_max(255)
    sums = F.linear((coded - zero).double(), codes.double())
    line = sums.float() * (torch.where(finite, scale, torch.nan) * scales)
    if bias is not None:
        line += bias.float()
    line = AFTER[activation](line)
    if add is not None:
        line += add.float()
    return line.to(x.dtype)


def instruction_sets() -> list[str]:
    """The instruction sets of this processor that the kernel was built for, best first."""
    return native.instruction_sets()


def _in_panels(codes: Tensor, columns: int) -> _Numbers:
    """``[columns / 64, inputs / 4, 64, 4]``, what is missing filled with zeros."""
    outputs, inputs = codes.shape
    codes = F.pad(codes, (0, -inputs % 4, 0, columns - outputs))
    panels = codes.view(-1, _PANEL, codes.shape[1] // 4, 4).transpose(1, 2).contiguous()
    return panels.numpy()


def _longer(part: Tensor, columns: int) -> Tensor:
    return F.pad(part, (0, columns - len(part))).contiguous()


def _lines(x: Tensor) -> tuple[int, int]:
    """Address, and bytes from a row to the next."""
    return x.data_ptr(), x.stride(0) * x.itemsize


def _in_lines(x: Tensor) -> Tensor:
    """`x`, or a copy whose rows have no gaps inside."""
    return x if x.shape[1] == 1 or x.stride(1) == 1 else x.contiguous()


join_torch(native.use_team)
