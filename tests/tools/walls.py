"""Arrays that end where memory ends."""

from __future__ import annotations

import ctypes
import mmap

import torch


def before_walls(tensor: torch.Tensor, planes: int = 1) -> torch.Tensor:
    """A copy of which each plane's last byte is the last that may be read."""
    size = tensor.numel() // planes * tensor.element_size()
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    step = room + mmap.PAGESIZE
    memory = torch.frombuffer(mmap.mmap(-1, planes * step), dtype=torch.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    for plane in range(planes):
        wall = ctypes.c_void_p(memory.data_ptr() + plane * step + room)
        assert libc.mprotect(wall, mmap.PAGESIZE, 0) == 0  # PROT_NONE
    first = memory[room - size :].view(tensor.dtype) if planes == 1 else memory.view(tensor.dtype)
    if planes == 1:
        return first[: tensor.numel()].view(tensor.shape).copy_(tensor)
    each = tensor.element_size()
    strides = (0, step // each, *tensor[0, 0].stride())
    return first.as_strided(tensor.shape, strides, (room - size) // each).copy_(tensor)
