"""Rows that lie anywhere, copied to places of a tensor: `native/rows.c` and its oracle in torch."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attmemo.kernels import _rows

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as `enum type` has them


def copy_rows(
    addresses: npt.NDArray[np.uint64], dtype: torch.dtype, places: npt.NDArray[np.int64], out: Tensor
) -> None:
    """Copy row i, ``H`` numbers of `dtype` at ``addresses[i]``, to ``out[places[i]]``, rounded to the type of `out`.

    `out` is ``[R, H]``, contiguous on the CPU; types are float32, float16 or bfloat16. The caller vouches for the
    addresses, and keeps the memory alive. Raises ValueError if anything else does not fit; nothing was written.
    """
    if out.dim() != 2 or not out.is_contiguous() or out.device.type != "cpu":
        raise ValueError(f"out must be contiguous, [R, H] on the CPU, not {tuple(out.shape)} on {out.device.type}")
    if dtype not in _TYPES or out.dtype not in _TYPES:
        raise ValueError(f"rows are float32, float16 or bfloat16, not {dtype} and {out.dtype}")
    where = np.ascontiguousarray(places, np.int64)
    sources = np.ascontiguousarray(addresses, np.uint64)
    _rows.copy(sources, where, (out.data_ptr(), out.shape[0], out.shape[1], _TYPES[dtype], _TYPES[out.dtype]))


def copy_rows_in_torch(
    addresses: npt.NDArray[np.uint64], dtype: torch.dtype, places: npt.NDArray[np.int64], out: Tensor
) -> None:
    """The same, row by row."""
    for address, place in zip(addresses.tolist(), places.tolist(), strict=True):
        memory = (ctypes.c_char * (out.shape[1] * dtype.itemsize)).from_address(address)
        out[place] = torch.frombuffer(bytearray(memory), dtype=dtype).to(out.dtype)
