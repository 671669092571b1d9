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
    AttMEMO, section 5.3 "Solution based on memory mapping" (004_17cf05913cb31f45.txt). Where the paper maps one file
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
    def address(self) -> int:
        """First address; 0 once closed."""
        return self._native.address

    @property
    def capacity(self) -> int:
        """Bytes reserved."""
        return self._native.capacity

    @property
    def mapped_bytes(self) -> int:
        """Bytes that the last `map` put there; 0 after a failure."""
        return self._native.mapped_bytes

    @property
    def leases(self) -> int:
        """How many readers there are; a tensor is one for as long as anything refers to its memory."""
        return self._native.leases

    def map(self, fd: int, offsets: npt.NDArray[np.int64], slot_bytes: int, populate: bool = True) -> None:
        """Show `slot_bytes` bytes of a file at each offset, side by side from the start of the window.

        Parameters
        ----------
        fd : int
            A regular file, open for reading.
        offsets : int64 array, shape [count]
            Byte offsets, multiples of the page size; the whole slot must lie inside the file.
        slot_bytes : int
            A multiple of the page size.
        populate : bool
            Fill the page table now, in one go, instead of at a fault for each page while the tensor is read.

        Raises
        ------
        WindowBusyError
            If the window is leased; it is unchanged.
        WindowError
            If an argument breaks a rule (the window is unchanged), or if the kernel refuses: then nothing in the
            window is accessible, never some old slots beside some new ones.
        """
        try:
            self._native.map(fd, offsets, slot_bytes, populate)
        except (ValueError, OSError, BufferError) as error:
            raise _translated(error) from error

    def show(
        self, fd: int, slots: npt.NDArray[np.int64], layout: SlotLayout, populate: bool, huge: bool = False
    ) -> torch.Tensor:
        """`map` of slots of a layout by their numbers, which are checked here, and their `tensor`.

        Parameters
        ----------
        fd : int
            The file; it must hold all slots of the layout.
        slots : int64 array, shape [count]
            Slot numbers.
        layout : SlotLayout
            How they lie in the file.
        populate : bool
            See `map`.
        huge : bool
            Ask the kernel to read what is not in memory in pieces of 2 MiB. A wish.

        Returns
        -------
        torch.Tensor
            See `tensor`.

        Raises
        ------
        IndexError
            If a number is not that of a slot; the window is unchanged.
        WindowBusyError, WindowError
            See `map`; also if the file is shorter than the layout says, or if there are no slots.
        """
        native = self._native
        try:
            native.map_slots(fd, slots, layout.header, layout.stride, layout.slots, populate, huge)
            capsule = native.show(layout.shape, layout.stride, *_DLPACK[layout.dtype])
        except (ValueError, OSError, BufferError) as error:
            raise _translated(error) from error
        tensor: torch.Tensor = from_dlpack(capsule)
        return tensor if tensor.dtype == layout.dtype else tensor.view(layout.dtype)

    def tensor(self, layout: SlotLayout) -> torch.Tensor:
        """The mapped slots as one tensor, which leases the window until its memory is no longer referred to.

        A batch costs a new tensor (about two microseconds) rather than a slice of one kept for the life of the
        window: the kept one could not know who still reads, and a tensor that outlives its batch would silently
        show the next one.

        Parameters
        ----------
        layout : SlotLayout
            Shape and type of a slot, and the stride that was given to `map`.

        Returns
        -------
        torch.Tensor
            Shape [count, *layout.shape] with count = `mapped_bytes` / layout.stride; contiguous only if
            `layout.dense`. Read-only, see `attmemo.mmap.tensor.slots_over`.

        Raises
        ------
        WindowError
            If nothing is mapped, or the window is closed.
        """
        try:
            capsule = self._native.show(layout.shape, layout.stride, *_DLPACK[layout.dtype])
        except (ValueError, BufferError) as error:
            raise _translated(error) from error
        slots: torch.Tensor = from_dlpack(capsule)
        return slots if slots.dtype == layout.dtype else slots.view(layout.dtype)

    def lease(self) -> None:
        """Forbid `map`, `collapse` and `close` until the matching `release`. Raises `WindowError`."""
        try:
            self._native.lease()
        except (ValueError, BufferError) as error:
            raise _translated(error) from error

    def release(self) -> None:
        """End one lease. Raises `WindowError` if there is none."""
        try:
            self._native.release()
        except (ValueError, BufferError) as error:
            raise _translated(error) from error

    def darken(self) -> None:
        """Make the window inaccessible; its mappings go when the next `map` puts others in their place.

        Raises
        ------
        WindowBusyError
            If it is leased.
        WindowError
            If the kernel refuses.
        """
        try:
            self._native.darken()
        except (ValueError, OSError, BufferError) as error:
            raise _translated(error) from error

    def collapse(self) -> None:
        """Make the whole window inaccessible and take its mappings away, keeping the addresses.

        Raises
        ------
        WindowBusyError
            If it is leased.
        WindowError
            If the kernel refuses.
        """
        try:
            self._native.collapse()
        except (ValueError, OSError, BufferError) as error:
            raise _translated(error) from error

    def close(self) -> None:
        """Give the addresses back. Closing twice is fine. Raises `WindowBusyError` while it is leased."""
        try:
            self._native.close()
        except (ValueError, OSError, BufferError) as error:
            raise _translated(error) from error
