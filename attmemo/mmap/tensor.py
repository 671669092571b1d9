"""Slots as a tensor, over memory of another owner."""

from __future__ import annotations

import ctypes

import torch

from attmemo.mmap.layout import SlotLayout


def slots_over(address: int, count: int, layout: SlotLayout, owner: object, header: int = 0) -> torch.Tensor:
    """A tensor over `count` slots in memory; no copy, and no look at the memory.

    Parameters
    ----------
    address : int
        First byte.
    count : int
        Number of slots, at least 1.
    layout : SlotLayout
        Their shape, type and distance; its own header and number of slots do not count here.
    owner : object
        Kept alive until the last tensor (view, slice, saved for autograd) over this memory is gone. Hand over a
        memoryview, and the memory's exporter knows how long it is being read.
    header : int
        Bytes between `address` and the first slot.

    Returns
    -------
    torch.Tensor
        Shape [count, *layout.shape]; contiguous only if `layout.dense`. PyTorch believes it to be writable. **It is
        not**: the pages behind it are read-only, and an in-place operation ends the process with SIGSEGV. Such
        tensors stay inside the library; a caller who wants to write clones.

    Notes
    -----
    Why not numpy: it has no bfloat16, and PyTorch warns about a read-only array or buffer, by default once in a
    process, which would use up the user's own warning. A ctypes array has an address and no opinion. It takes a
    microsecond.
    """
    memory = (ctypes.c_char * (header + count * layout.stride)).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined]
    flat = torch.frombuffer(memory, dtype=layout.dtype)
    return flat.as_strided((count, *layout.shape), layout.strides, header // layout.dtype.itemsize)
