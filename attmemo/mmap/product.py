"""A·V with the maps read where they lie in the arena: the fourth way, which fetches nothing.

The others hand out tensors and leave the product to torch, which wants one type and one contiguous tensor: maps in
half precision are converted, those that lie apart are multiplied one by one, and products are transposed into place.
`native/product.c` does all of it in one pass over the stored bytes. Fetch and product of 21 float16 maps of 4 x 128 x
128, in turns on two cores: 0.62 ms, against 1.13 ms for views and `torch.matmul`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from attmemo import _kernels
from attmemo.mmap.arena import Arena, Slots
from attmemo.mmap.layout import SlotLayout
from attmemo.openmp import join_torch

_VALUES = (torch.float32, torch.bfloat16, torch.float16)
_FORMS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.uint8: 3}  # as `enum form` has them

Ints = npt.NDArray[np.int64]


def length_of(shape: tuple[int, ...]) -> int:
    """Tokens n of maps that are stored as ``[h, n, n]`` or, only the lower triangle, as ``[h, n (n + 1) / 2]``."""
    return (math.isqrt(8 * shape[-1] + 1) - 1) // 2 if len(shape) == 2 else shape[-1]


def is_direct(layout: SlotLayout, values: torch.dtype) -> bool:
    """Whether maps stored like this are better multiplied here than by torch, for values of this type.

    Values in half precision are left to torch, which multiplies them in the processor's matrix unit, unless it would
    have to make the map first: triangles, and maps of another type.
    """
    if layout.dtype not in _FORMS or values not in _VALUES:
        return False
    return values == torch.float32 or layout.dtype != values or len(layout.shape) == 2


def multiply(
    arena: Arena, slots: Slots, values: torch.Tensor, starts: Ints, context: torch.Tensor, rows: Ints
) -> None:
    """``context[rows[i], :n] = A_i V_i`` for maps A_i in the arena; what lies behind n becomes zero.

    Parameters
    ----------
    arena : Arena
        Slots of ``[h, n, n]``, or ``[h, n (n + 1) / 2]`` for lower triangles; float32, float16, bfloat16, or uint8 for
        numbers in proportion to their cubes (`attmemo.db.forms`).
    slots : sequence of int, shape [g]
        Where the maps are.
    values : Tensor
        V of all sequences, ``[N, h * d]``, contiguous; float32, bfloat16 or float16. Sums are made in float32. With
        values in bfloat16, maps may be rounded to it, as the model's own are (see `native/product_amx.h`).
    starts : array of int, shape [g]
        First row of each sequence in `values`; n rows are read from there.
    context : Tensor
        ``[B, L, h * d]``, contiguous, of the type of `values`, L >= n. Written.
    rows : array of int, shape [g]
        Which of the B each product goes to; none twice.

    Raises
    ------
    IndexError
        If there is no such slot.
    ValueError
        If shapes or types do not fit; nothing was written.
    DatabaseTruncatedError
        If the file was cut short since it was opened.
    MemoryError
        If there is no memory for a few rows.

    Notes
    -----
    The result of a sequence depends neither on the others nor on the number of threads. Work is shared among torch's
    own threads, as many as `torch.get_num_threads` says.
    """
    mapping = arena.mapping
    layout = mapping.layout
    indices = mapping.indices(slots)
    mapping.check_whole()
    if len(indices) == 0:
        return
    triangle = len(layout.shape) == 2
    heads, length = layout.shape[0], length_of(layout.shape)
    width = values.shape[-1] // heads
    fits = (
        layout.shape[1:] == ((length * (length + 1) // 2,) if triangle else (length, length))
        and layout.dtype in _FORMS
        and values.dtype == context.dtype
        and values.dtype in _VALUES
        and values.dim() == 2
        and context.dim() == 3
        and values.shape[1] == context.shape[2] == heads * width
    )
    if not fits:
        raise ValueError(
            f"cannot multiply maps {list(layout.shape)} {layout.dtype} with values {list(values.shape)} "
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
    _kernels.multiply(
        maps=mapping.memory,
        offsets=mapping.offsets(indices),
        form=_FORMS[layout.dtype],
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
        brain=values.dtype == torch.bfloat16,
    )
    if half:
        context[torch.from_numpy(np.ascontiguousarray(rows, np.int64))] = target.to(context.dtype)


def _bits(numbers: torch.Tensor) -> npt.NDArray[np.generic]:
    """The memory of a tensor; numpy has no bfloat16."""
    array: npt.NDArray[np.generic] = (
        numbers.view(torch.int16) if numbers.dtype == torch.bfloat16 else numbers
    ).numpy()
    return array


join_torch(_kernels.use_team)
