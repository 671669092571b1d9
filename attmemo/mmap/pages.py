"""What this machine's pages are like: their size, how many mappings a process may have, how a range is mapped."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import struct

HUGE_PAGE = 2 << 20
"""Bytes in a huge page, where this library uses them (x86-64, and arm64 with 4 KiB pages)."""

_PAGEMAP_SCAN = 0xC0606610  # _IOWR('f', 16, struct pm_scan_arg), since Linux 6.7
_PAGE_IS_HUGE = 1 << 6
_RANGE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")
_HUGE_FIELDS = ("ShmemPmdMapped:", "FilePmdMapped:")


def page_size() -> int:
    """Bytes in a page of this machine: 4096 on x86-64, up to 65536 on arm64 and ppc64."""
    return os.sysconf("SC_PAGE_SIZE")


def round_up(nbytes: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `nbytes`."""
    return -(-nbytes // multiple) * multiple


def max_map_count() -> int:
    """How many mappings a process may have (``vm.max_map_count``), those of malloc and thread stacks included."""
    try:
        with open("/proc/sys/vm/max_map_count", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 65530  # the kernel's own default


def map_count() -> int:
    """How many mappings this process has now; 0 where /proc does not say. Half a microsecond for each mapping."""
    try:
        with open("/proc/self/maps", "rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 16), b""))
    except OSError:
        return 0


def is_huge(address: int) -> bool:
    """Whether the page at an address is mapped as a huge one, now. Touch it first: what is not mapped is not huge.

    The kernel is asked about this one page (three microseconds); one older than 6.7, about the whole process.
    """
    start = address - address % page_size()
    found = (ctypes.c_uint64 * 3)()  # struct page_region: start, end, categories
    # struct pm_scan_arg: its size, flags, start, end, (out) end of the walk, list, its length, most pages (0: all),
    # then categories: inverted, demanded, one demanded of several, told
    wanted = (96, 0, start, start + page_size(), 0, ctypes.addressof(found), 1, 0, 0, _PAGE_IS_HUGE, 0, _PAGE_IS_HUGE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            regions: int = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, bytearray(struct.pack("12Q", *wanted)))
            return regions == 1
    except OSError:
        return huge_mapping(address, 1)[1] > 0


def huge_mapping(address: int, nbytes: int) -> tuple[int, int]:
    """Bytes of the largest page that a range is mapped with, and how many bytes have pages of `HUGE_PAGE` or more.

    Asking for huge pages is a wish that the kernel may ignore without an error, so the answer is read back from
    ``/proc/self/smaps``. Only pages that were touched count; mappings that only touch the range count whole.
    """
    page_bytes, huge_bytes, inside, size = page_size(), 0, False, 0
    try:
        with open("/proc/self/smaps", encoding="utf-8", errors="replace") as file:
            for line in file:
                if match := _RANGE.match(line):
                    first, end = int(match[1], 16), int(match[2], 16)
                    inside, size = first < address + nbytes and address < end, end - first
                elif inside and line.startswith(_HUGE_FIELDS):
                    seen = int(line.split()[1]) * 1024
                    huge_bytes += seen
                    page_bytes = max(page_bytes, HUGE_PAGE if seen else 0)
                elif inside and line.startswith("KernelPageSize:"):
                    kernel_page = int(line.split()[1]) * 1024
                    if kernel_page >= HUGE_PAGE:  # hugetlbfs: such a mapping has no other pages
                        huge_bytes += size
                        page_bytes = max(page_bytes, kernel_page)
    except OSError:
        pass
    return page_bytes, huge_bytes
