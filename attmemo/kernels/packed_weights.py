"""What linear layers of `native/linear.c` have in common: rows in, rows out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attmemo.kernels import _linear as native
from attmemo.kernels.linear import ACTIVATIONS, agrees, check_parts, check_rows, sample, stacked
from attmemo.kernels.norms import NO_NORM, KeptNorms, NativeNorm, Norm
from attmemo.kernels.omp_team import join_torch
from attmemo.kernels.pages import Slab

PANEL: Final = 64  # columns of a panel, as native/linear.h has them
LINE: Final = 64  # bytes; inputs of 8 and 16 bits are filled up with zeros to whole lines
MOST_INPUTS: Final = 65536
_FEW: Final = 48  # rows: threads share columns then, not rows, or each of them would read all weights
Numbers = np.ndarray[Any, Any]
Weights = tuple[Numbers, Numbers, Numbers, Numbers]  # panels, scales, bias, sums
_TYPES: Final = {torch.float32: 0, torch.bfloat16: 2}  # as `enum type` has them

join_torch(native.use_team)


class Panels(ABC):
    """A linear layer whose weights lie in panels of columns, for inference.

    The result of a row depends on this row alone: not on the others, their number or the threads. Later changes of the
    tensors it was made from may or may not be seen. Several threads may call one instance.

    Attributes
    ----------
    inputs, outputs : int
        Width of a row of `x`, and of a row of the result.
    dtype : torch.dtype
        Of weights, rows and result.
    activation : str
        One of `attmemo.kernels.linear.ACTIVATIONS`.
    gated : bool
        Whether the first half of the layer is activated, and multiplied by the other half: ``[N, outputs]``.
    nbytes : int
        Bytes that this layer keeps beside the tensors it was made from.
    """

    arithmetic: ClassVar[int]  # as `enum arithmetic` has it
    inputs: int
    outputs: int
    dtype: torch.dtype
    activation: str
    gated: bool
    weights: Weights

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str, gated: bool = False) -> None:
        self.outputs, self.inputs = len(weight) // (2 if gated else 1), weight.shape[1]
        self.dtype, self.activation, self.gated = weight.dtype, activation, gated
        self.weights = self._pack(weight, bias)

    @abstractmethod
    def _pack(self, weight: Tensor, bias: Tensor | None) -> Weights:
        """A weight ``[out, in]`` and a bias ``[out]`` as the kernel reads them."""

    @classmethod
    @abstractmethod
    def _check(cls, weight: Tensor) -> None:
        """Check that the kernel takes weights of this type and width, or raise ValueError."""

    @classmethod
    def of(
        cls, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str = "none", gated: bool = False
    ) -> Self:
        """Prepare the layer whose weight is `weights` stacked, such as those of Q, K and V.

        Parameters
        ----------
        weights : sequence of Tensor
            Each ``[out, in]`` with the same ``in``; plain dense tensors on the CPU, of one type that the kernel takes.
        biases : sequence of Tensor or None
            One for each weight, ``[out]``. None is zeros.
        activation : str
            One of `attmemo.kernels.linear.ACTIVATIONS`: "gelu" is the exact one.
        gated : bool
            Whether the first half of the columns is activated, and multiplied by the other half.

        Raises
        ------
        ValueError
            If the activation is not known, or the tensors are not of this kind or do not fit each other.
        """
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
        check_parts(weights, biases)
        cls._check(weights[0])
        with torch.inference_mode(False), torch.no_grad():
            return cls(*stacked(weights, biases), activation, gated)

    @classmethod
    def instruction_sets(cls) -> list[str]:
        """The instruction sets of this processor that the kernel was built for, best first."""
        return native.instruction_sets(cls.arithmetic)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.weights)

    @property
    def slab_bytes(self) -> int:
        """Bytes that its weights take in a slab."""
        return sum(map(Slab.size_of, self.weights))

    def move(self, slab: Slab) -> None:
        """Keep the weights in a slab from now on. Before the first call: another one may read them where they were."""
        panels, scales, bias, sums = map(slab.keep, self.weights)
        self.weights = panels, scales, bias, sums

    def are_two_calls(self, rows: int, threads: int) -> bool:
        """Whether two layers are faster one after the other for so many rows."""
        return rows < _FEW and threads > 1 and self.dtype == torch.float32

    @property
    def kind(self) -> tuple[int, int, bool]:
        """Type, activation, and whether it is gated, as native code has them."""
        return _TYPES[self.dtype], ACTIVATIONS.index(self.activation), self.gated

    def native(self, kept: KeptNorms, *norms: Norm | None) -> Any:
        """The layer as `prepare` of `_chain` and of `_decode` take it, with the three norms that it ends with."""
        ends = tuple([kept.native(norm, self.outputs) for norm in norms or (None, None, None)])
        return self.inputs, self.outputs, self.kind[1], self.gated, self.weights, ends

    def takes(self, norm: Any) -> bool:
        """Whether `norm` is a layer norm that a call can end with."""
        if not isinstance(norm, nn.LayerNorm) or not self._fits(norm.weight):
            return False
        return norm.bias is None or self._fits(norm.bias)

    def _fits(self, part: Any) -> bool:
        return (
            isinstance(part, Tensor) and part.dtype == self.dtype and part.shape == (self.outputs,)
            and part.is_contiguous() and part.device.type == "cpu"
        )  # fmt: skip

    def norm_of(self, norm: nn.LayerNorm | None) -> NativeNorm:
        """A norm that a call ends with, as native code has it. ValueError: this layer does not take it."""
        if norm is None:
            return NO_NORM
        if not self.takes(norm):
            raise ValueError(f"the norm must be a LayerNorm of {self.outputs} numbers of {self.dtype}, not {norm}")
        bias = 0 if norm.bias is None else norm.bias.data_ptr()
        return norm.weight.data_ptr(), bias, norm.eps, _TYPES[self.dtype], True

    def rows_of(self, x: Tensor) -> Tensor:
        """`x`, or a copy whose rows have no gaps inside; ValueError if `x` is not ``[N, inputs]`` for this layer."""
        check_rows(x, self.inputs, self.dtype, None, self.outputs)
        return _in_lines(x)

    def __call__(
        self, x: Tensor, add: Tensor | None = None, norm: nn.LayerNorm | None = None, *, threads: int | None = None,
        isa: str = "",
    ) -> Tensor:  # fmt: skip
        """The layer on rows `x` ``[N, inputs]``, plus the residual `add` ``[N, outputs]``, normed: ``[N, outputs]``.

        Any strides and any N, 0 too. `norm`: one that this layer `takes`; its weights are read at each call.
        `threads`: None is as many as torch uses. `isa`: one of the instruction sets of this arithmetic, empty for the
        best.

        Raises ValueError if shapes, types or devices do not fit, MemoryError if there is no memory for some rows.
        """
        check_rows(x, self.inputs, self.dtype, add, self.outputs)
        out = torch.empty((len(x), self.outputs), dtype=self.dtype)
        x = _in_lines(x)
        add = None if add is None else _in_lines(add)
        native.multiply(
            _lines(x), (0, 0) if add is None else _lines(add), out.data_ptr(),
            (len(x), self.inputs, self.outputs, *self.kind), self.weights, self.norm_of(norm),
            (self.arithmetic, torch.get_num_threads() if threads is None else threads, isa),
        )  # fmt: skip
        return out


class ExactPanels(Panels):
    """Layers that compute in the type of their weights. Their oracle is `torch.nn.functional.linear`."""

    taken: ClassVar[torch.dtype]
    """The type that the kernel takes."""

    @classmethod
    def _check(cls, weight: Tensor) -> None:
        if weight.dtype != cls.taken or weight.shape[1] > MOST_INPUTS:
            name = str(cls.taken).removeprefix("torch.")
            raise ValueError(f"weights are {name} with at most {MOST_INPUTS} inputs, not {weight.dtype}")

    @classmethod
    def where_it_pays(
        cls, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str = "none", gated: bool = False
    ) -> Self | None:
        """The layer, if the tensors are of this type and the processor has instructions that the kernel was made for.

        It is compared with torch on a few rows; None also if it differs.
        """
        if weights[0].dtype != cls.taken or weights[0].shape[1] > MOST_INPUTS:
            return None
        if cls.instruction_sets()[:1] in ([], ["generic"]):
            return None
        layer = cls.of(weights, biases, activation, gated)
        with torch.no_grad():
            x = sample(layer.inputs, layer.dtype)
            return layer if agrees(layer(x), x, *stacked(weights, biases), activation, None, gated) else None


def columns_of(weight: Tensor, gated: bool) -> Tensor:
    """A weight ``[out, in]``, or a bias ``[out]``, with as many columns as whole panels have, in the panels' order.

    Of a gated layer, half of a panel are columns that are activated, half those that they are multiplied by.
    """
    half = PANEL // 2 if gated else PANEL
    parts = weight.view(2 if gated else 1, -1, *weight.shape[1:])
    parts = F.pad(parts, (*[0, 0] * (weight.dim() - 1), 0, -parts.shape[1] % half))
    turned = parts.view(len(parts), -1, half, *weight.shape[1:]).transpose(0, 1)
    return turned.reshape(-1, *weight.shape[1:])


def _lines(x: Tensor) -> tuple[int, int]:
    """Address, and bytes from a row to the next."""
    return x.data_ptr(), x.stride(0) * x.itemsize


def _in_lines(x: Tensor) -> Tensor:
    """`x`, or a copy whose rows have no gaps inside."""
    return x if x.shape[1] == 1 or x.stride(1) == 1 else x.contiguous()
