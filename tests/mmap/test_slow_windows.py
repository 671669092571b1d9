"""Windows under stress for minutes, beside other threads that use memory: what only many rounds show."""

from __future__ import annotations

import _ctypes
import ctypes
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from children import run_child
from mmap_tools import PAGE, SLOTS, in_threads, open_pages
from refused_calls import compiler
from window_tools import Pages, numbers

from attmemo.mmap import _window

pytestmark = pytest.mark.slow
BATCHES = 20_000


def allocate(stop: threading.Event, seed: int) -> int:
    """Take, fill, check and give back memory of all sizes, much of it mapped by malloc itself. Returns the blocks."""
    libc, rng = ctypes.CDLL(None), random.Random(seed)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    held: list[tuple[int, int, int]] = []
    count = 0
    while not stop.is_set() or held:
        if not stop.is_set() and len(held) < 24:
            size, byte = rng.choice([100, 5_000, PAGE, 200_000, SLOTS * PAGE, 2_000_000]), rng.randrange(256)
            address = libc.malloc(size)
            assert address
            ctypes.memset(address, byte, size)
            held.append((address, size, byte))
            count += 1
        else:
            address, size, byte = held.pop(rng.randrange(len(held)))
            assert ctypes.string_at(address, size) == bytes([byte]) * size, "memory changed under its owner"
            libc.free(address)
    return count


def load(stop: threading.Event, libraries: list[Path]) -> int:
    """Open libraries, call them and close them. Returns how many."""
    count = 0
    while not stop.is_set():
        number = count % len(libraries)
        library = ctypes.CDLL(str(libraries[number]))
        assert library.answer() == 1000 + number
        _ctypes.dlclose(library._handle)
        count += 1
    return count


def show(batches: int, pages: int) -> int:
    """Make windows, map, darken and close them; the right pages each time. Returns the batches."""
    rng, count = random.Random(6), 0
    windows: list[Pages] = []
    while count < batches:
        if len(windows) < 4:
            windows.append(Pages(_window, SLOTS * PAGE))
        window = rng.choice(windows)
        if (kind := rng.random()) < 0.1:
            window.close()
            windows.remove(window)
        elif kind < 0.2:
            window.darken()
        else:
            some = [rng.randrange(SLOTS) for _ in range(rng.randrange(1, SLOTS + 1))]
            window.map(pages, numbers(*some), populate=rng.random() < 0.5)
            assert window.seen() == some
            assert window.seen(PAGE - 1) == some
            count += 1
    return count


def test_malloc_and_dlopen_in_other_threads_never_meet_a_window(tmp_path: Path) -> None:
    libraries = []
    for number in range(4):
        source, library = tmp_path / f"answer{number}.c", tmp_path / f"answer{number}.so"
        source.write_text(
            f"static int room[{4000 * number + 10}]; int answer(void) {{ room[9] = {1000 + number}; return room[9]; }}"
        )
        subprocess.run([compiler(), "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        libraries.append(library)

    with open_pages(tmp_path) as pages:

        def body() -> list[int]:
            sys.setswitchinterval(1e-5)
            stop, counts = threading.Event(), [0] * 4

            def mapping() -> None:
                try:
                    counts[0] = show(BATCHES, pages)
                finally:
                    stop.set()

            def counted(place: int, found: int) -> None:
                counts[place] = found

            in_threads(
                mapping,
                lambda: counted(1, allocate(stop, 1)),
                lambda: counted(2, allocate(stop, 2)),
                lambda: counted(3, load(stop, libraries)),
            )
            return counts

        counts = run_child(body, timeout=900).result
        assert counts[0] == BATCHES
        assert min(counts) > 0
