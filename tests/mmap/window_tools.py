"""A window as the tests see it: pages come by `map_slots` and are looked at through `show`, the path that serves.

Imports only the standard library: child processes without torch use this too, with an extension of their own.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from typing import Any

PAGE = os.sysconf("SC_PAGE_SIZE")
_PIPE = os.pipe()


class _Shown(ctypes.Structure):
    """The beginning of what DLPack calls a managed tensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
    )


def numbers(*slots: int) -> array[int]:
    return array("q", slots)


def readable(address: int) -> bool:
    """Ask the kernel whether a byte can be read; a system call fails where a load would be a signal."""
    try:
        os.write(_PIPE[1], (ctypes.c_char * 1).from_address(address))
    except OSError:
        return False
    os.read(_PIPE[0], 1)
    return True


class Pages:
    """A window of the extension `native`, and where it lies.

    The address comes from a first batch of one page, which is dark again when the test begins.
    """

    def __init__(self, native: Any, capacity: int, alignment: int = PAGE) -> None:
        self.native = native.Window(capacity, alignment)
        self.capacity = self.native.capacity
        file = os.memfd_create("one page")
        os.ftruncate(file, PAGE)
        self.map(file, numbers(0), PAGE)
        os.close(file)
        self.address = self.look()[0]
        self.darken()

    def map(
        self,
        fd: int,
        slots: Any,
        slot_bytes: int = PAGE,
        populate: bool = True,
        header: int = 0,
        limit: int | None = None,
    ) -> None:
        """`map_slots` from a file that is full of slots, unless `limit` says how many there are."""
        if limit is None:
            limit = (os.fstat(fd).st_size - header) // slot_bytes
        self.native.map_slots(fd, slots, header, slot_bytes, limit, populate)

    def look(self) -> tuple[int, int, object]:
        """Address of the pages that are shown, how many there are, and what holds them."""
        capsule = self.native.show((1,), PAGE, 1, 8)
        point = ctypes.pythonapi.PyCapsule_GetPointer
        point.restype, point.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        shown = _Shown.from_address(point(capsule, b"dltensor"))
        return shown.data, shown.shape[0], capsule

    def seen(self, at: int = 0) -> list[int]:
        """The first byte (or that `at`) of every page that is shown, less one: which page of the file is there."""
        address, count, _capsule = self.look()
        return [(ctypes.c_ubyte * 1).from_address(address + i * PAGE + at)[0] - 1 for i in range(count)]

    def dark(self) -> bool:
        """Whether the window shows nothing and no page of it can be read."""
        try:
            self.look()
        except ValueError as error:
            if "no slots" not in str(error):
                raise
        else:
            return False
        return not any(readable(address) for address in range(self.address, self.address + self.capacity, PAGE))

    def darken(self) -> None:
        self.native.darken()

    def close(self) -> None:
        self.native.close()
