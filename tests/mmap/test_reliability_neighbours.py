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
from children import run_child
from mmap_tools import PAGE, SLOTS, open_pages
from refused_calls import build_shim, preloaded
from window_tools import Pages, numbers

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


def between_canaries(capacity: int) -> tuple[Pages, int, int]:
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
        window = Pages(_window, capacity)
        if window.address == start + PAGE:
            return window, before, behind
        others.append(window)
    pytest.skip("the kernel puts no window where memory was given back")


def cycle_between_canaries(file: int, cycles: int) -> int:
    """Map and darken at random between two pages; they and all other mappings must not change. Returns cycles."""
    rng = random.Random(4)
    window, before, behind = between_canaries(SLOTS * PAGE)
    first, end = window.address, window.address + window.capacity

    def cycle() -> None:
        if (kind := rng.random()) < 0.2:
            window.darken()
        elif kind < 0.3:  # refused: one page too many, or beyond the file
            with contextlib.suppress(ValueError, IndexError):
                window.map(file, numbers(*range(SLOTS), 0)[rng.randrange(2) :], PAGE, limit=SLOTS + rng.randrange(2))
        else:
            slot = rng.choice([1, 2, 4])
            some = [rng.randrange(SLOTS // slot) for _ in range(rng.randrange(SLOTS // slot + 1))]
            window.map(file, numbers(*some), slot * PAGE, populate=rng.random() < 0.1)

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
import ctypes, importlib.util, os, sys
from array import array

sys.path.insert(0, tools)
from window_tools import PAGE, Pages, numbers

spec = importlib.util.spec_from_file_location("attmemo.mmap._window", extension)
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
library = ctypes.CDLL(shim)
library.only_from(b"_window")
fd = os.memfd_create("pages")
os.write(fd, b"x" * (8 * PAGE))
window = Pages(native, 4 * PAGE)
window.map(fd, numbers(0, 2))

huge = 2**63 - 1

def show(*slots, file=fd, header=0, size=PAGE, limit=8):
    window.native.map_slots(file, numbers(*slots), header, size, limit)

refused = {
    "a slot that is none": lambda: show(0, 4, limit=4),
    "a negative slot": lambda: show(-1, limit=4),
    "the most negative slot": lambda: show(-huge - 1, limit=4),
    "the largest slot": lambda: show(huge, limit=4),
    "slots behind the end": lambda: show(0, limit=9),
    "a slot across the end": lambda: show(0, header=PAGE, size=4 * PAGE, limit=2),
    "slots that wrap": lambda: show(0, header=PAGE, size=huge - huge % PAGE, limit=2),
    "a limit that wraps": lambda: show(0, limit=huge),
    "a limit above 64 bits": lambda: show(0, limit=1 << 70),
    "a negative limit": lambda: show(0, limit=-1),
    "too many slots": lambda: show(*range(5)),
    "a slot larger than the window": lambda: show(0, size=8 * PAGE, limit=1),
    "no length": lambda: show(0, size=0),
    "a negative length": lambda: show(0, size=-PAGE),
    "an odd length": lambda: show(0, size=PAGE + 8, limit=1),
    "a length above 64 bits": lambda: show(0, size=1 << 70),
    "a negative header": lambda: show(0, header=-PAGE, limit=2),
    "an odd header": lambda: show(0, header=PAGE + 1, limit=2),
    "a negative descriptor": lambda: show(0, file=-1),
    "a descriptor above 64 bits": lambda: show(0, file=1 << 70),
    "a descriptor of a pipe": lambda: show(0, file=os.pipe()[0]),
    "a descriptor of nothing": lambda: show(0, file=999),
    "slots of 32 bits": lambda: window.native.map_slots(fd, array("i", [0]), 0, PAGE, 8),
    "a window of nothing": lambda: native.Window(0, PAGE),
    "a negative window": lambda: native.Window(-PAGE, PAGE),
    "a window that wraps": lambda: native.Window(huge, PAGE),
    "a window above 64 bits": lambda: native.Window(1 << 70, PAGE),
    "an alignment of nothing": lambda: native.Window(PAGE, 0),
    "an odd alignment": lambda: native.Window(PAGE, PAGE + 1),
    "a negative alignment": lambda: native.Window(PAGE, -PAGE),
    "alignment and size that wrap": lambda: native.Window(huge - huge % PAGE, 1 << 62),
}
outside = ("a slot that is none", "a negative slot", "the most negative slot", "the largest slot")
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
        elif kind != ("IndexError" if name in outside else "ValueError"):
            result[name] = kind
    library.disarm()
if window.seen() != [ord("x") - 1] * 2:
    result["the window"] = "was changed"
library.arm(31, 0, 0, 0)
window.map(fd, numbers(0, 2))
window.darken()
window.close()
result["calls seen where there are some"] = library.count()
"""


def test_arguments_out_of_range_move_no_page(tmp_path: Path) -> None:
    extension = importlib.util.find_spec("attmemo.mmap._window")
    assert extension is not None
    shim = build_shim(tmp_path)
    seen = run_child(
        REFUSED,
        environment=preloaded(shim),
        extension=extension.origin,
        shim=str(shim),
        tools=str(Path(__file__).parent),
    ).result
    assert seen.pop("calls seen where there are some") >= 4, "the shim did not come between the extension and libc"
    assert seen == {}


@pytest.mark.slow
def test_the_pages_exactly_before_and_behind_a_window_survive_a_hundred_thousand_cycles(tmp_path: Path) -> None:
    with open_pages(tmp_path) as pages:
        assert run_child(lambda: cycle_between_canaries(pages, 100_000), timeout=600).result == 100_000
