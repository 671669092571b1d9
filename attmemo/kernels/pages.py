"""Memory and its pages: huge ones where the machine gives them, and used again where it was freed.

Huge pages: zeros of a cache, and weights that are read in every forward.

With pages of 4 KiB a processor walks through its page tables for each page that it has not read lately; with pages of
2 MiB it hardly ever does. Linux gives large pages on request (`madvise`), unless its settings forbid them; then
nothing is lost.

Reading 170 MiB of weights once, two threads: 25e9 bytes a second in small pages, 31e9 in huge ones.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import Any, Final

import numpy as np
import torch

_WORTH: Final = 1 << 22  # bytes; less has few page tables to walk through
_LINE: Final = 64  # bytes
_LARGEST: Final = (32 << 20) - (1 << 16)  # bytes: from a larger block glibc does not learn

Numbers = np.ndarray[Any, Any]


def keep_freed_memory() -> None:
    """Have each heap of the process keep up to 64 MiB of what is freed, as far as glibc's settings are its own.

    glibc gives the end of a heap back to the system once more is free there than twice the largest block that was
    mapped and freed. So a forward frees its rows, and the next one touches each page anew: of a six-layer DeBERTa and
    32 lines 1,750 pages, 2.5 of 18 ms. One large block, freed untouched, raises that threshold. Threads that compute
    at once have a heap each.
    """
    torch.empty(_LARGEST, dtype=torch.uint8, device="cpu")


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None = None) -> torch.Tensor:
    """`torch.zeros`; a large tensor on the CPU lies in huge pages if there are any."""
    size = math.prod(shape) * dtype.itemsize
    memory = _memory(size) if torch.empty(0, device=device).device.type == "cpu" else None
    if memory is None:  # let torch tell if there is no such amount of memory
        return torch.zeros(shape, dtype=dtype, device=device)
    # Written now, not when a token first comes there: a lack of memory shows here, and no step waits for zeros.
    return torch.frombuffer(memory, dtype=dtype).view(shape).zero_()  # holds on to the memory


def untouched(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Numbers on the CPU that take memory where they are written first: zeros, or whatever lies there."""
    memory = _memory(math.prod(shape) * dtype.itemsize)
    if memory is None:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype).view(shape)  # holds on to the memory


class Slab:
    """Room for arrays that lie one behind the other in huge pages. The last array that is left holds it.

    Parameters
    ----------
    nbytes : int
        Of all arrays that will be kept, each rounded up by `size_of`. No memory is taken before it is written.
    """

    def __init__(self, nbytes: int) -> None:
        self._memory, self._next = _memory(nbytes), 0

    @staticmethod
    def size_of(array: Numbers) -> int:
        """Bytes that an array takes."""
        return -(-array.nbytes // _LINE) * _LINE

    def keep(self, array: Numbers) -> Numbers:
        """A copy of the array, at a multiple of 64 bytes; the array itself if there are no huge pages for it."""
        if self._memory is None or array.nbytes == 0:
            return array
        found: Numbers = np.frombuffer(self._memory, array.dtype, array.size, self._next).reshape(array.shape)
        found[...] = array
        self._next += self.size_of(array)
        return found


def _memory(size: int) -> mmap.mmap | None:
    """So many bytes of zeros, in huge pages if there are any; None if that is not worth it, or there is no room."""
    if size < _WORTH or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    # Private: what is shared has huge pages only where an administrator gave them to shared memory, too.
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        return None
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
