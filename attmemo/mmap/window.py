"""The contiguous window as the library sees it: `attmemo.mmap._window.Window` with this library's errors.

Everything about pages, promises and roads not taken stands at the head of ``native/window.c``.
"""

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

    Parameters
    ----------
    capacity : int
        Bytes to reserve; rounded up to `alignment`. Addresses only, no memory.
    alignment : int, optional
        Bytes; a power of two and a multiple of the page size, which is the default. With 2 MiB, slots whose offset
        and stride are multiples of 2 MiB keep their huge pages.

    Raises
    ------
    WindowError
        If the addresses cannot be reserved, or an argument breaks a rule.

    Notes
    -----
    AttMEMO (arXiv 2301.09262), section 5.3 "Solution based on memory mapping". Where the paper maps one file
    object for each record, this maps slots of one file: a record each would exceed ``vm.max_map_count``.

    A window serves one thread at a time; other threads get `WindowBusyError`. It is not inherited through fork: in
    the child every method raises `WindowError`.
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
        """Map slots of a file side by side from the start of the window, as one tensor.

        The tensor is a lease: the window does not change until nothing refers to the tensor's memory any more. A
        batch costs a new tensor (about two microseconds) rather than a slice of one kept for the life of the window:
        a kept tensor could not know its readers, and a tensor that outlives its batch would silently show the next.

        Parameters
        ----------
        fd : int
            A regular file, open for reading; it must hold all slots of the layout.
        slots : int64 array, shape [count]
            Slot numbers; they are checked.
        layout : SlotLayout
            How the slots lie in the file. Stride and header are multiples of the page size.
        populate : bool
            Fill the page table now, in one go, instead of at a fault for each page while the tensor is read.
        huge : bool
            Ask the kernel to read what is not in memory in pieces of 2 MiB. A wish.

        Returns
        -------
        torch.Tensor
            Shape [count, *layout.shape]; contiguous only if `layout.dense`. Read-only, see
            `attmemo.mmap.tensor.slots_over`.

        Raises
        ------
        IndexError
            If a number is not that of a slot; the window is unchanged.
        WindowBusyError
            If the window is leased; it is unchanged.
        WindowError
            If an argument breaks a rule (the window is unchanged), if the file is shorter than the layout says, if
            there are no slots, or if the kernel refuses: then nothing in the window is accessible, never some old
            slots beside some new ones.
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
        """Make the window inaccessible; its mappings go when the next `show` puts others in their place.

        Raises
        ------
        WindowBusyError
            If the window is leased.
        WindowError
            If the kernel refuses.
        """
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
