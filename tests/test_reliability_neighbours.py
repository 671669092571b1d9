"""What lies beside a window, and what is refused before a page moves."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import random
import re
from pathlib import Path

import pytest
from helpers import build_shim, preloaded, run_child
from page_tools import PAGE, SLOTS, page_offsets

from attmemo.mmap import _window

# -- the neighbours of a window


def mappings_outside(first: int, end: int) -> list[tuple[int, int, str]]:
    """(first address, end, the rest of the line) of every mapping outside a range, that of the heap by its start."""
    found = []
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) (.*)", line)
        assert match is not None
        start, stop = int(match[1], 16), int(match[2], 16)
        if not first <= start < end:
            found.append((start, 0 if "[heap]" in line else stop, match[3]))
    return found


def still_there(before: list[tuple[int, int, str]], now: list[tuple[int, int, str]]) -> bool:
    """Whether every mapping of before lies in one of now that is alike. The interpreter may take memory meanwhile."""
    return all(any(s <= start and end <= e and k == kind for s, e, k in now) for start, end, kind in before)


def between_canaries(capacity: int) -> tuple[_window.Window, int, int]:
    """A window with one page of ours exactly before it and one exactly behind it: addresses of the pages.

    Memory for all three is reserved, the middle given back, and windows made until one falls in there.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    start = libc.mmap(None, capacity + 2 * PAGE, 3, 0x22, -1, 0)  # read and write, private and anonymous
    before, behind = start, start + PAGE + capacity
    ctypes.memset(before, 0xC5, PAGE)
    ctypes.memset(behind, 0x5C, PAGE)
    assert libc.munmap(start + PAGE, capacity) == 0
    others = []
    for _ in range(1000):
        window = _window.Window(capacity, PAGE)
        if window.address == start + PAGE:
            return window, before, behind
        others.append(window)
    pytest.skip("the kernel puts no window where memory was given back")


def cycle_between_canaries(file: int, cycles: int) -> int:
    """Map and collapse at random between two pages; they and all other mappings must not change. Returns cycles."""
    rng = random.Random(4)
    window, before, behind = between_canaries(SLOTS * PAGE)
    first, end = window.address, window.address + window.capacity

    def cycle() -> None:
        if (kind := rng.random()) < 0.2:
            rng.choice([window.collapse, window.darken])()
        elif kind < 0.3:  # refused: one page too many, or beyond the file
            with contextlib.suppress(ValueError):
                window.map(file, page_offsets(*range(SLOTS), 0)[rng.randrange(2) :], 2 * PAGE)
        else:
            slot = rng.choice([1, 2, 4])
            numbers = [rng.randrange(SLOTS - slot + 1) for _ in range(rng.randrange(SLOTS // slot + 1))]
            window.map(file, page_offsets(*numbers), slot * PAGE, populate=rng.random() < 0.1)

    gc.disable()
    for _ in range(100):  # until the interpreter has what memory it needs
        cycle()
        mappings_outside(first, end)
    outside = mappings_outside(first, end)
    for done in range(cycles):
        cycle()
        if done % 100 == 0:
            assert ctypes.string_at(before, PAGE) == b"\xc5" * PAGE, done
            assert ctypes.string_at(behind, PAGE) == b"\x5c" * PAGE, done
            assert still_there(outside, mappings_outside(first, end)), done
    assert ctypes.string_at(before, PAGE) + ctypes.string_at(behind, PAGE) == b"\xc5" * PAGE + b"\x5c" * PAGE
    assert still_there(outside, mappings_outside(first, end))
    return cycles


def test_the_pages_exactly_before_and_behind_a_window_survive_it(pages: int) -> None:
    assert run_child(lambda: cycle_between_canaries(pages, 1000)).result == 1000


# -- what is refused makes no system call


REFUSED = r"""
import ctypes, importlib.util, os
from array import array

spec = importlib.util.spec_from_file_location("attmemo.mmap._window", extension)
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
library = ctypes.CDLL(shim)
library.only_from(b"_window")
PAGE = native.page_size()
fd = os.memfd_create("pages")
os.write(fd, b"x" * (8 * PAGE))
window = native.Window(4 * PAGE, PAGE)
window.map(fd, array("q", [0, 2 * PAGE]), PAGE)

huge = 2**63 - 1
offsets = lambda *bytes: array("q", bytes)
refused = {
    "an offset behind the end": lambda: window.map(fd, offsets(8 * PAGE), PAGE),
    "a slot across the end": lambda: window.map(fd, offsets(0, 7 * PAGE), 2 * PAGE),
    "a negative offset": lambda: window.map(fd, offsets(0, -PAGE), PAGE),
    "the most negative offset": lambda: window.map(fd, offsets(-huge - 1), PAGE),
    "offset and length that wrap": lambda: window.map(fd, offsets(huge - huge % PAGE), PAGE),
    "an odd offset": lambda: window.map(fd, offsets(PAGE + 1), PAGE),
    "too many slots": lambda: window.map(fd, offsets(*range(0, 5 * PAGE, PAGE)), PAGE),
    "a slot larger than the window": lambda: window.map(fd, offsets(0), 8 * PAGE),
    "count and length that wrap": lambda: window.map(fd, offsets(0, 0), huge - huge % PAGE),
    "no length": lambda: window.map(fd, offsets(0), 0),
    "a negative length": lambda: window.map(fd, offsets(0), -PAGE),
    "an odd length": lambda: window.map(fd, offsets(0), PAGE + 8),
    "a length above 64 bits": lambda: window.map(fd, offsets(0), 1 << 70),
    "a negative descriptor": lambda: window.map(-1, offsets(0), PAGE),
    "a descriptor above 64 bits": lambda: window.map(1 << 70, offsets(0), PAGE),
    "a descriptor of a pipe": lambda: window.map(os.pipe()[0], offsets(0), PAGE),
    "a descriptor of nothing": lambda: window.map(999, offsets(0), PAGE),
    "a slot that is none": lambda: window.map_slots(fd, offsets(0, 4), 0, PAGE, 4),
    "a negative slot": lambda: window.map_slots(fd, offsets(-1), 0, PAGE, 4),
    "slots behind the end": lambda: window.map_slots(fd, offsets(0), 0, PAGE, 9),
    "slots that wrap": lambda: window.map_slots(fd, offsets(0), PAGE, huge - huge % PAGE, 2),
    "a negative header": lambda: window.map_slots(fd, offsets(0), -PAGE, PAGE, 2),
    "offsets of 32 bits": lambda: window.map(fd, array("i", [0]), PAGE),
    "a window of nothing": lambda: native.Window(0, PAGE),
    "a negative window": lambda: native.Window(-PAGE, PAGE),
    "a window that wraps": lambda: native.Window(huge, PAGE),
    "a window above 64 bits": lambda: native.Window(1 << 70, PAGE),
    "an alignment of nothing": lambda: native.Window(PAGE, 0),
    "an odd alignment": lambda: native.Window(PAGE, PAGE + 1),
    "a negative alignment": lambda: native.Window(PAGE, -PAGE),
    "alignment and size that wrap": lambda: native.Window(huge - huge % PAGE, 1 << 62),
}
result = {}
for name, call in refused.items():
    library.arm(31, 0, 0, 0)
    try:
        call()
        result[name] = "was accepted"
    except (ValueError, IndexError, OSError) as error:
        kind = type(error).__name__
        if library.count():
            result[name] = f"{library.count()} system calls"
        elif name == "a descriptor of nothing":
            assert error.errno == 9
        elif kind != ("IndexError" if name in ("a slot that is none", "a negative slot") else "ValueError"):
            result[name] = kind
    library.disarm()
with memoryview(window) as view:
    if len(view) != 2 * PAGE or bytes(view) != b"x" * (2 * PAGE):
        result["the window"] = "was changed"
library.arm(31, 0, 0, 0)
window.map(fd, array("q", [0, 2 * PAGE]), PAGE)
window.collapse()
window.close()
result["calls seen where there are some"] = library.count()
"""


def test_arguments_out_of_range_move_no_page(tmp_path: Path) -> None:
    extension = importlib.util.find_spec("attmemo.mmap._window")
    assert extension is not None
    shim = build_shim(tmp_path)
    seen = run_child(REFUSED, environment=preloaded(shim), extension=extension.origin, shim=str(shim)).result
    assert seen.pop("calls seen where there are some") >= 4, "the shim did not come between the extension and libc"
    assert seen == {}
