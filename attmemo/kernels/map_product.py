"""A·V with the maps read where they lie in the arena: the fourth way, which fetches nothing.

Torch wants one type and one contiguous tensor. The C code takes one pass over the stored bytes: 21 float16 maps of
4 x 128 x 128 take 0.62 ms on two cores, against 1.13 ms for views and `torch.matmul`.
"""

from __future__ import annotations

from mmap import mmap

import numpy as np
import numpy.typing as npt
import torch

from attmemo.kernels import _map_product
from attmemo.kernels.omp_team import join_torch

_VALUES = (torch.float32, torch.bfloat16, torch.float16)
_FORMS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.uint8: 3}  # as `enum form` has them

Ints = npt.NDArray[np.int64]


def is_direct(shape: tuple[int, ...], dtype: torch.dtype, values: torch.dtype) -> bool:
    """Whether this kernel multiplies maps of this shape and type by V of the type `values` faster than torch does.

    Torch multiplies maps and values of the same half precision in the matrix unit, but must convert maps of another
    type and expand triangles ``[h, n (n + 1) / 2]``.
    """
    if dtype not in _FORMS or values not in _VALUES:
        return False
    return values == torch.float32 or dtype != values or len(shape) == 2


def multiply(
    maps: mmap | bytes | npt.NDArray[np.uint8],
    offsets: Ints,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    length: int,
    values: torch.Tensor,
    starts: Ints,
    context: torch.Tensor,
    rows: Ints,
) -> None:
    """``context[rows[i], :n] = A_i V_i`` for maps A_i that lie in memory; what lies behind n becomes zero.

    Map i begins at byte ``offsets[i]`` of `maps`, with `shape` ``[h, n, n]``, or ``[h, n (n + 1) / 2]`` for a lower
    triangle; uint8 holds numbers in proportion to their cubes (`attmemo.db.encodings`). V_i are n rows from
    ``starts[i]`` of `values` ``[N, h * d]``, contiguous; `context` is ``[B, L, h * d]``, of the same type,
    L >= n. No row twice.

    Sums are float32; with values in bfloat16 the kernel may round maps to bfloat16, as the model's own softmax does. A
    result depends neither on the other sequences nor on the number of threads, which are torch's own. ValueError:
    shapes or types do not fit, nothing was written. MemoryError: none for a few rows.
    """
    if len(offsets) == 0:
        return
    triangle = len(shape) == 2
    heads = shape[0]
    width = values.shape[-1] // heads
    fits = (
        shape[1:] == ((length * (length + 1) // 2,) if triangle else (length, length))
        and dtype in _FORMS
        and values.dtype == context.dtype
        and values.dtype in _VALUES
        and values.dim() == 2
        and context.dim() == 3
        and values.shape[1] == context.shape[2] == heads * width
    )
    if not fits:
        raise ValueError(
            f"cannot multiply maps {list(shape)} {dtype} with values {list(values.shape)} "
            f"{values.dtype} into a context {list(context.shape)} {context.dtype}"
        )
    wide, target = values.detach(), context.detach()
    starts, places = np.ascontiguousarray(starts, np.int64), np.ascontiguousarray(rows, np.int64)
    half = values.dtype == torch.float16
    if half:
        if len(np.unique(places)) != len(places):
            raise ValueError("a row of the context is named twice")
        first = int(starts.min())  # of a batch of many lengths only the rows that this one needs
        wide, starts = wide[first : int(starts.max()) + length].float(), starts - first
        target = torch.empty(len(places), *context.shape[1:], dtype=torch.float32)
        places = np.arange(len(places))
    _map_product.multiply(
        maps=maps,
        offsets=offsets,
        form=_FORMS[dtype],
        heads=heads,
        length=length,
        width=width,
        values=_bits(wide),
        starts=starts,
        context=_bits(target),
        rows=places,
        padded=context.shape[1],
        threads=torch.get_num_threads(),
        triangle=triangle,
        bfloat16=values.dtype == torch.bfloat16,
    )
    if half:
        context[torch.from_numpy(np.ascontiguousarray(rows, np.int64))] = target.to(context.dtype)


def _bits(numbers: torch.Tensor) -> npt.NDArray[np.generic]:
    """The memory of a tensor; numpy has no bfloat16."""
    numbers = numbers.view(torch.int16) if numbers.dtype == torch.bfloat16 else numbers
    array: npt.NDArray[np.generic] = numbers.numpy()
    return array


join_torch(_map_product.use_team)
