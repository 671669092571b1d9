"""Memory of a cache: zeros in huge pages, where the machine gives them.

Decoding reads a cache's pages in no order. With pages of 4 KiB each of them is a walk through the processor's page
tables besides; with pages of 2 MiB hardly any is. Linux gives large pages on request (`madvise`), unless its settings
forbid them; then nothing is lost.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

_WORTH = 1 << 22  # bytes; less has few page tables to walk through


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None = None) -> torch.Tensor:
    """`torch.zeros`; a large tensor on the CPU lies in huge pages if there are any."""
    size = math.prod(shape) * dtype.itemsize
    on_cpu = torch.empty(0, device=device).device.type == "cpu"
    if not on_cpu or size < _WORTH or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    # Private: what is shared has huge pages only where an administrator gave them to shared memory, too.
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):  # let torch tell that there is no such amount of memory
        return torch.zeros(shape, dtype=dtype, device=device)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    # Written now, not when a token first comes there: a lack of memory shows here, and no step waits for zeros.
    return torch.frombuffer(memory, dtype=dtype).view(shape).zero_()  # holds on to the memory
