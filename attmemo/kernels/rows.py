"""Rows that lie anywhere, copied to places of a tensor: `native/rows.c` and its oracle in torch."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attmemo.kernels import _rows

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as `enum type` has them


Floats = npt.NDArray[np.float32]
Steps = tuple[Floats, npt.NDArray[np.int64]]  # ``[B, H]``, and for each row which of them


def copy_rows(
    addresses: npt.NDArray[np.uint64], dtype: torch.dtype, places: npt.NDArray[np.int64], out: Tensor,
    steps: Steps | None = None,
) -> None:  # fmt: skip
    """Copy row i, ``H`` numbers of `dtype` at ``addresses[i]``, to ``out[places[i]]``, rounded to the type of `out`.

    With `steps` the row ``steps[0][steps[1][i]]`` is added first, in float32.

    `out` is ``[R, H]``, contiguous on the CPU; types are float32, float16 or bfloat16. The caller vouches for the
    addresses, and keeps the memory alive. Raises ValueError if anything else does not fit; nothing was written.
    """
    if out.dim() != 2 or not out.is_contiguous() or out.device.type != "cpu":
        raise ValueError(f"out must be contiguous, [R, H] on the CPU, not {tuple(out.shape)} on {out.device.type}")
    if dtype not in _TYPES or out.dtype not in _TYPES:
        raise ValueError(f"rows are float32, float16 or bfloat16, not {dtype} and {out.dtype}")
    where = np.ascontiguousarray(places, np.int64)
    sources = np.ascontiguousarray(addresses, np.uint64)
    if steps is None:
        steps = np.empty(0, np.float32), np.empty(0, np.int64)
    elif steps[0].ndim != 2 or steps[0].shape[1] != out.shape[1] or len(steps[1]) != len(where):
        shapes = f"{steps[0].shape} and {steps[1].shape}"
        raise ValueError(f"steps must be [B, {out.shape[1]}] and [{len(where)}], not {shapes}")
    _rows.copy(
        sources, where, (out.data_ptr(), out.shape[0], out.shape[1], _TYPES[dtype], _TYPES[out.dtype]),
        np.ascontiguousarray(steps[0], np.float32), np.ascontiguousarray(steps[1], np.int64),
    )  # fmt: skip


def copy_rows_in_torch(
    addresses: npt.NDArray[np.uint64], dtype: torch.dtype, places: npt.NDArray[np.int64], out: Tensor,
    steps: Steps | None = None,
) -> None:  # fmt: skip
    """The same, row by row."""
    for number, (address, place) in enumerate(zip(addresses.tolist(), places.tolist(), strict=True)):
        memory = (ctypes.c_char * (out.shape[1] * dtype.itemsize)).from_address(address)
        row = torch.frombuffer(bytearray(memory), dtype=dtype).float()
        if steps is not None:
            row = row + torch.from_numpy(steps[0][steps[1][number]])
        out[place] = row.to(out.dtype)
