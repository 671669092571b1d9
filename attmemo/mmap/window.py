"""The contiguous window of ``native/window.c``, where its promises stand, with this library's errors."""

from __future__ import annotations

import errno

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.dlpack import from_dlpack

from attmemo.errors import WindowBusyError, WindowError
from attmemo.mmap import _window
from attmemo.mmap.layout import SlotLayout
from attmemo.mmap.pages import map_count, max_map_count, page_size

_DLPACK = {
    torch.float32: (2, 32),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.int8: (0, 8),
    torch.uint8: (1, 8),
    torch.int32: (0, 32),
    torch.float8_e4m3fn: (1, 8),  # has a code of its own only since 2025: shown as bytes, and seen as what they are
}
"""DLPack's code and bits of the types in `DTYPES`."""


def _translated(error: Exception) -> WindowError:
    """The C extension speaks Python's errors; this library speaks its own."""
    if isinstance(error, BufferError):
        return WindowBusyError(str(error))
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return WindowError(
            f"{error.strerror}; this process has {map_count()} of {max_map_count()} mappings (vm.max_map_count)",
            "sysctl -w vm.max_map_count=1048576, or fetch with 'view'",
        )
    return WindowError(str(error))


class Window:
    """A reserved range of addresses into which slots of a file are mapped side by side, read-only.

    AttMEMO (arXiv 2301.09262), section 5.3 "Solution based on memory mapping", but with slots of one file: a file for
    each record would exceed ``vm.max_map_count``. `capacity` is in bytes, rounded up to `alignment` (a page by
    default): with 2 MiB, slots whose offset and stride are multiples of 2 MiB keep their huge pages.

    A window serves one thread at a time; other threads get `WindowBusyError`. It is not inherited through fork: in
    the child every method raises `WindowError`, as any method does if the kernel refuses.
    """

    def __init__(self, capacity: int, alignment: int | None = None) -> None:
        try:
            self._native = _window.Window(capacity, page_size() if alignment is None else alignment)
        except (ValueError, OSError) as error:
            raise _translated(error) from error

    @property
    def capacity(self) -> int:
        """Bytes reserved."""
        return self._native.capacity

    def show(
        self, fd: int, slots: npt.NDArray[np.int64], layout: SlotLayout, populate: bool, huge: bool = False
    ) -> torch.Tensor:
        """Map slots of a file side by side, as one tensor [count, *shape], contiguous only if `layout.dense`.

        The tensor is read-only as those of `Arena` are, and a lease: the window does not change until nothing refers
        to the tensor's memory any more. `populate` fills the page table now instead of at one fault for each page;
        `huge` asks the kernel to read what is not in memory in pieces of 2 MiB.

        Raises `IndexError` (no such slot) or `WindowBusyError` (leased), with the window unchanged. Raises
        `WindowError` if an argument breaks a rule, the file is too short or the kernel refuses: nothing in the window
        is accessible then, never some old slots beside some new ones.
        """
        native = self._native
        try:
            native.map_slots(fd, slots, layout.header, layout.stride, layout.slots, populate, huge)
            capsule = native.show(layout.shape, layout.stride, *_DLPACK[layout.dtype])
        except (ValueError, OSError, BufferError) as error:
            raise _translated(error) from error
        tensor: torch.Tensor = from_dlpack(capsule)
        return tensor if tensor.dtype == layout.dtype else tensor.view(layout.dtype)

    def darken(self) -> None:
        """Make the window inaccessible until the next `show`. Raises `WindowBusyError` while the window is leased."""
        try:
            self._native.darken()
        except (ValueError, OSError, BufferError) as error:
            raise _translated(error) from error

    def close(self) -> None:
        """Give the addresses back. Closing twice is fine. Raises `WindowBusyError` while the window is leased."""
        try:
            self._native.close()
        except (ValueError, OSError, BufferError) as error:
            raise _translated(error) from error
