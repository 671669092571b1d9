"""Pages under stress: neighbours of a window, refused calls, races, repeated use. Tests are named after the wound.

What takes minutes to show is asked again, with more rounds, in slow/test_slow_mmap.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import math
import os
import random
import re
import sys
import tempfile
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import CLEAR, MPROTECT, MUNMAP, RESERVE, SHOW, build_shim, preloaded, run_child
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_db_tools import fill
from test_mmap_arena import pretend_huge, smaps
from test_mmap_fetch import make_arena

from attmemo import _kernels, _native
from attmemo.db import KIND_INPUT, KIND_MAP, Database
from attmemo.db.forms import unpack
from attmemo.errors import AttmemoError, WindowBusyError, WindowError
from attmemo.mmap import (
    Arena,
    CopyFetcher,
    Fetcher,
    MapFetcher,
    SlotLayout,
    ViewFetcher,
    Window,
    map_count,
    multiply,
    page_size,
)
from attmemo.mmap.product import _FORMS

PAGE = page_size()
SLOTS = 16


@contextlib.contextmanager
def open_pages(folder: Path) -> Iterator[int]:
    """A file whose page i is full of the byte i + 1."""
    path = folder / "pages"
    path.write_bytes(b"".join(bytes([i + 1]) * PAGE for i in range(SLOTS)))
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def small_arena(folder: Path) -> Arena:
    """Slots of two pages, the second of them padded with what is not a number."""
    return make_arena(folder / "arena.bin", SlotLayout.paged((2, 27, 27), torch.float32, slots=SLOTS))


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[int]:
    with open_pages(tmp_path) as descriptor:
        yield descriptor


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with small_arena(tmp_path) as opened:
        yield opened


def page_offsets(*numbers: int) -> array[int]:
    return array("q", [number * PAGE for number in numbers])


def in_threads(*works: Callable[[], None]) -> None:
    """Run all of these at once; the first exception in any of them is raised here."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# -- the child utility itself


def test_a_child_that_dies_fails_its_caller_unless_that_was_declared() -> None:
    crash = lambda: ctypes.string_at(0)  # noqa: E731
    assert run_child(crash, signals=["SIGSEGV"]).signal == "SIGSEGV"
    with pytest.raises(AssertionError, match="SIGSEGV"):
        run_child("import ctypes, faulthandler; faulthandler.disable(); ctypes.string_at(0)")
    with pytest.raises(AssertionError, match="KeyError: 7"):
        run_child(lambda: {}[7])  # type: ignore[misc]
    with pytest.raises(AssertionError, match="code 3"):
        run_child(lambda: os._exit(3))
    assert "KeyError: 7" in (run_child("{}[7]", may_raise=True).error or "")
    assert run_child(lambda: [1, "two"]).result == [1, "two"]
    assert run_child("result = number + 1", number=1).result == 2
    assert run_child(lambda: time.sleep(30), timeout=1, signals=["SIGALRM"]).signal == "SIGALRM"


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


def between_canaries(capacity: int) -> tuple[_native.Window, int, int]:
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
        window = _native.Window(capacity, PAGE)
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

spec = importlib.util.spec_from_file_location("attmemo._native", extension)
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
library = ctypes.CDLL(shim)
library.only_from(b"_native")
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
    extension = importlib.util.find_spec("attmemo._native")
    assert extension is not None
    shim = build_shim(tmp_path)
    seen = run_child(REFUSED, environment=preloaded(shim), extension=extension.origin, shim=str(shim)).result
    assert seen.pop("calls seen where there are some") >= 4, "the shim did not come between the extension and libc"
    assert seen == {}


# -- a fetch while the kernel refuses mappings

FETCHES = r"""
import ctypes, errno, gc, itertools, os
from pathlib import Path
import torch
from attmemo.mmap import Arena, CopyFetcher, MapFetcher, SlotLayout
from attmemo.mmap.fetch import RECOUNT

library = ctypes.CDLL(shim)
library.only_from(b"_native")
PAGE = os.sysconf("SC_PAGE_SIZE")
layout = SlotLayout.paged((2, 27, 27), torch.float32, slots=16)
arena = Arena(path, layout)
old, new = [1, 3, 5, 7, 9, 11], [14, 2, 12, 13, 2]
record = lambda tensor: tensor.clone().view(torch.uint8).numpy().tobytes()
def oracle(slots):
    with CopyFetcher().fetch(arena, slots) as batch:
        return record(batch.stacked)
wanted = {"old": oracle(old), "new": oracle(new)}
reader, writer = os.pipe()

def readable(address):
    try:
        os.write(writer, (ctypes.c_char * 1).from_address(address))
    except OSError:
        return False
    os.read(reader, 1)
    return True

def dark(window):
    pages = range(window.address, window.address + window.capacity, PAGE)
    return window.mapped_bytes == 0 and not any(map(readable, pages))

for twin in (MapFetcher(), MapFetcher(strict=True)):
    for slots in ([16], [0, -1], [1 << 62, 0], [-(1 << 63)], [1 << 80], [0.5]):
        library.arm(31, 0, 0, 0)
        try:
            twin.fetch(arena, slots)
            raise AssertionError(f"{slots} were accepted")
        except (IndexError, ValueError):
            assert library.count() == 0 and twin.fallbacks == 0, slots
        library.disarm()

result = {"copied": 0, "mapped": 0, "scenes": 0, "lost": 0}
codes = (errno.ENOMEM, errno.EAGAIN, errno.EINVAL)
for calls, code, forever, used in itertools.product(calls_sets, codes, (0, 1), (False, True)):
    for at in itertools.count(1):
        assert at < 50
        where = (calls, code, forever, used, at)
        fetcher = MapFetcher()
        if used:  # so that there is an old batch, which must not be seen beside or instead of the new one
            with fetcher.fetch(arena, old) as batch:
                assert record(batch.stacked) == wanted["old"]
            batch = None
        windows = list(fetcher._all)
        library.arm(calls, at, forever, code)
        batch = fetcher.fetch(arena, new)
        hit = library.disarm()
        windows = windows or list(fetcher._all)
        assert record(batch.stacked) == wanted["new"], where
        assert all(torch.equal(batch[i], arena.slot(slot)) for i, slot in enumerate(new)), where
        assert fetcher.fallbacks in (0, 1), where
        if fetcher.fallbacks:
            result["copied"] += 1
            assert hit, where
            assert os.strerror(code) in fetcher.fallback_reason, (where, fetcher.fallback_reason)
            # All that there is of a window is dark; where not even that could be had, nobody may look.
            if calls & 8 == 0:
                assert all(map(dark, windows)), where
        else:
            result["mapped"] += 1
            assert windows and windows[0].leases, where
        if hit and calls == 1:
            assert fetcher.fallbacks == 1, where  # a slot that could not be mapped is never overlooked
        batch.close()
        batch = None
        # The kernel is in order again, and at the latest after the next count so is the fetcher.
        copied = fetcher.fallbacks
        fetcher._mine.fetches = 0
        with fetcher.fetch(arena, old) as batch:
            assert record(batch.stacked) == wanted["old"], where
        batch = None
        result["lost"] += fetcher.fallbacks > copied
        windows = None
        fetcher.close()
        result["scenes"] += 1
        if not hit:
            break
"""


def test_whichever_mmap_is_refused_a_fetch_gives_the_bytes_of_the_copy(tmp_path: Path) -> None:
    make_arena(tmp_path / "arena.bin", SlotLayout.paged((2, 27, 27), torch.float32, slots=16)).close()
    shim = build_shim(tmp_path)
    mmaps = [SHOW, CLEAR, RESERVE, SHOW | CLEAR, SHOW | CLEAR | RESERVE]
    with_others = [SHOW | CLEAR | MPROTECT, SHOW | CLEAR | RESERVE | MPROTECT | MUNMAP]
    seen = run_child(
        FETCHES,
        environment=preloaded(shim),
        shim=str(shim),
        path=str(tmp_path / "arena.bin"),
        calls_sets=mmaps + with_others,
    ).result
    assert seen["copied"] > 100, "the shim did not come between the extension and libc"
    assert seen["mapped"] > 50
    assert seen["lost"] == 0, "a fetcher went on copying when the kernel was in order again"


# -- readers while others fetch


def read_while_fetching(arena: Arena, seconds: float, readers: int = 2) -> tuple[int, int, int]:
    """One thread fetches, others check what it handed them. Returns (fetches, fallbacks, checksums compared)."""
    expected = [zlib.crc32(arena.slot(slot).numpy().tobytes()) for slot in range(len(arena))]
    fetcher, end = MapFetcher(), time.monotonic() + seconds
    handed: list[list[tuple[list[int], torch.Tensor]]] = [[] for _ in range(readers)]  # what each reader is to read
    stop, compared, fetches = threading.Event(), [0] * readers, 0

    def read(mine: int) -> None:
        rng = random.Random(mine)
        while not stop.is_set() or handed[mine]:
            if not handed[mine]:
                time.sleep(0)
                continue
            slots, tensor = handed[mine].pop(0)
            for _ in range(rng.randrange(1, 6)):
                seen = [zlib.crc32(record.numpy().tobytes()) for record in tensor]
                assert seen == [expected[slot] for slot in slots]
                compared[mine] += len(seen)
            del tensor

    def fetch() -> None:
        nonlocal fetches
        rng = random.Random(8)
        try:
            while time.monotonic() < end:
                slots = [rng.randrange(len(arena)) for _ in range(rng.randrange(1, 9))]
                with fetcher.fetch(arena, slots) as batch:
                    assert batch.stacked is not None
                    fetches += 1
                    queue = handed[rng.randrange(readers)]
                    if len(queue) < 3:
                        queue.append((slots, batch.stacked))  # read after the block, and during later ones
                    for i in range(0, len(slots), 3):
                        assert zlib.crc32(batch[i].numpy().tobytes()) == expected[slots[i]]
        finally:
            stop.set()

    in_threads(fetch, *(lambda mine=mine: read(mine) for mine in range(readers)))  # type: ignore[misc]
    return fetches, fetcher.fallbacks, sum(compared)


def test_a_reader_sees_the_records_it_was_given_while_others_are_fetched(arena: Arena) -> None:
    fetches, fallbacks, compared = run_child(lambda: read_while_fetching(arena, 2.0)).result
    assert compared > 100
    assert 0 < fallbacks < fetches, "both a free and a leased window must have been met"


# -- close, del and collection while others work


def drop(held: list[Any], number: int) -> None:
    """Let go of what is held: two times in three closed first, now and then collected at once."""
    thing = held[0]
    if number % 3:
        thing.close()
    held.clear()
    del thing
    if number % 20 == 0:
        gc.collect()


def races(body: Callable[[int], None], rounds: int = 200) -> None:
    """Many rounds of a race in a child, where a crash is seen by its name, with threads that change often."""

    def run() -> None:
        sys.setswitchinterval(1e-6)
        for number in range(rounds):
            body(number)
        gc.collect()

    run_child(run, timeout=110)


def tried(said: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """What a call returns, or None where it is refused in these words."""
    try:
        return call(*arguments)
    except (ValueError, BufferError, AttmemoError) as error:
        if not re.search(said, str(error)):
            raise
        return None


def test_a_window_of_the_extension_closed_and_dropped_in_a_race_gives_errors_only(pages: int) -> None:
    def body(number: int) -> None:
        held = [_native.Window(SLOTS * PAGE, PAGE)]
        rng = random.Random(number)
        said = "closed|leased|another thread|changing"

        def work(seed: int) -> None:
            mine = random.Random(seed)
            for _ in range(6):
                window = held[0] if held else None
                if window is None:
                    return
                numbers = [mine.randrange(SLOTS) for _ in range(mine.randrange(1, SLOTS))]
                tried(said, window.map, pages, page_offsets(*numbers), PAGE)
                view = tried(said, memoryview, window)
                if view is not None:
                    assert all(0 < view[i] <= SLOTS for i in range(0, len(view), PAGE))
                    view.release()

        def end() -> None:
            window = held[0]
            for _ in range(rng.randrange(4)):
                tried(said, window.collapse)
            if number % 3:
                tried(said, window.close)
            held.clear()
            del window
            if number % 20 == 0:
                gc.collect()

        in_threads(lambda: work(number), lambda: work(number + 1000), end)

    races(body)


def test_a_tensor_of_a_window_remapped_in_a_race_is_as_long_as_what_is_mapped(arena: Arena) -> None:
    layout = arena.layout
    many, one = arena.offsets(range(0, SLOTS, 2)), arena.offsets([3])

    def body(number: int) -> None:
        window, done = Window(SLOTS * layout.stride), threading.Event()

        def remap() -> None:
            try:
                for turn in range(30):
                    with contextlib.suppress(WindowBusyError):
                        window.map(arena.fd, one if turn % 2 else many, layout.stride)
                if number % 2:
                    with contextlib.suppress(WindowBusyError):
                        window.close()
            finally:
                done.set()

        def read() -> None:
            while not done.is_set():
                tensor = tried("no slots|closed|another thread", window.tensor, layout)
                if tensor is not None:
                    assert len(tensor) in (1, SLOTS // 2)
                    assert torch.equal(tensor[-1], arena.slot(3 if len(tensor) == 1 else SLOTS - 2))
                del tensor

        in_threads(remap, read)

    races(body)


def test_a_tensor_is_never_longer_than_what_its_own_lease_shows(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The race above, made certain: another thread maps fewer slots just before the lease is taken."""
    layout, window = arena.layout, Window(SLOTS * arena.layout.stride)
    window.map(arena.fd, arena.offsets(range(8)), layout.stride)

    def outpaced(window: Window) -> int:
        seen = window._native.mapped_bytes
        window._native.map(arena.fd, arena.offsets([3]), layout.stride)
        return seen

    monkeypatch.setattr(Window, "mapped_bytes", property(outpaced))
    count = len(window.tensor(layout))  # a number: to show a tensor that is too long would end the process
    assert count * layout.stride == window._native.mapped_bytes


def test_a_fetcher_closed_and_dropped_in_a_race_gives_whole_batches_or_errors(arena: Arena) -> None:
    expected = [arena.slot(slot).clone() for slot in range(SLOTS)]

    def body(number: int) -> None:
        held = [MapFetcher(strict=number % 2 == 0)]

        def work(seed: int) -> None:
            rng, kept = random.Random(seed), []
            for _ in range(6):
                fetcher = held[0] if held else None
                if fetcher is None:
                    break
                slots = [rng.randrange(SLOTS) for _ in range(rng.randrange(1, 7))]
                batch = tried("closed", fetcher.fetch, arena, slots)
                if batch is None:
                    break
                assert all(torch.equal(batch[i], expected[slot]) for i, slot in enumerate(slots))
                if not fetcher.strict:
                    kept.append((slots[-1], batch[len(slots) - 1]))
                with contextlib.suppress(WindowError):  # closed meanwhile by the other thread
                    batch.close()
            assert all(torch.equal(tensor, expected[slot]) for slot, tensor in kept)

        in_threads(lambda: work(number), lambda: work(number + 1000), lambda: drop(held, number))

    races(body)


def test_an_arena_closed_grown_and_dropped_in_a_race_gives_its_bytes_or_an_error(tmp_path: Path, arena: Arena) -> None:
    path, few = tmp_path / "arena.bin", arena.layout.with_slots(SLOTS // 2)
    expected = [arena.slot(slot).clone() for slot in range(SLOTS)]
    products = [slot.sum(-1).T for slot in expected]

    def product(opened: Arena, slot: int) -> torch.Tensor:
        context, first = torch.empty(1, 27, 2), np.array([0])
        multiply(opened, [slot], torch.ones(27, 2), first, context, first)
        return context[0]

    def body(number: int) -> None:
        held = [Arena(path, few)]

        def work(seed: int) -> None:
            rng, fetcher, kept = random.Random(seed), (MapFetcher, ViewFetcher, CopyFetcher)[seed % 3](), []
            for _ in range(6):
                opened = held[0] if held else None
                if opened is None:
                    break
                slot = rng.randrange(SLOTS // 2)
                batch = tried("closed", fetcher.fetch, opened, [slot])
                if batch is None:
                    break
                with batch:
                    kept.append((slot, batch[0]))
                context = tried("closed", product, opened, slot)
                if context is not None:
                    assert torch.allclose(context, products[slot], atol=1e-4)
            del opened
            assert all(torch.equal(tensor, expected[slot]) for slot, tensor in kept)

        def end() -> None:
            if number % 2:
                held[0].grow(SLOTS)
            drop(held, number)

        in_threads(lambda: work(3 * number), lambda: work(3 * number + 1), lambda: work(3 * number + 2), end)

    races(body)


def test_a_database_closed_and_dropped_in_a_race_gives_its_records_or_an_error(tmp_path: Path) -> None:
    path = fill(tmp_path / "db")
    with Database(path) as database:
        expected = [database.slot(KIND_MAP, 1, record) for record in range(len(database))]

    def body(number: int) -> None:
        held = [Database(path)]

        def work(seed: int) -> None:
            rng, kept = random.Random(seed), []
            for _ in range(6):
                opened = held[0] if held else None
                if opened is None:
                    break
                record = rng.randrange(len(expected))
                view = tried("closed", opened.view, KIND_MAP, 1, record)
                if view is None:
                    break
                kept.append((record, view))
            del opened
            assert all(torch.equal(view, expected[record]) for record, view in kept)

        in_threads(lambda: work(number), lambda: work(number + 1000), lambda: drop(held, number))

    races(body)


# -- many fetches


def holdings() -> tuple[int, int]:
    """Mappings and open files of this process."""
    gc.collect()
    return map_count(), len(os.listdir("/proc/self/fd"))


def gather_many(arena: Arena, gathers: int) -> dict[str, list[int]]:
    """Fetches and products, half and half, right each time; what the process holds before and after."""
    rng, generator = random.Random(16), torch.Generator().manual_seed(16)
    heads, n = arena.layout.shape[:2]
    values = torch.randn(4 * n, heads * 4, generator=generator)
    batches = [[rng.randrange(len(arena)) for _ in range(rng.randrange(1, 5))] for _ in range(64)]

    def product(slots: list[int]) -> torch.Tensor:
        context, rows = torch.empty(4, n, heads * 4), np.arange(len(slots))
        multiply(arena, slots, values, rows * n, context, rows)
        return context[: len(slots)]

    sums = [[float(arena.slot(slot).double().sum()) for slot in slots] for slots in batches]
    products = [product(slots) for slots in batches]
    for slots, sound in zip(batches, products, strict=True):
        for i, slot in enumerate(slots):
            v = values[i * n : (i + 1) * n].view(n, heads, 4).transpose(0, 1)
            assert torch.allclose(sound[i], (arena.slot(slot) @ v).transpose(0, 1).reshape(n, -1), atol=1e-3)
    with MapFetcher().fetch(arena, batches[0]):
        pass
    before = holdings()
    fetcher = MapFetcher()
    for number in range(gathers // 2):
        which = rng.randrange(len(batches))
        with fetcher.fetch(arena, batches[which]) as batch:
            i = rng.randrange(len(batch))
            if number % 16 == 0:
                assert float(batch[i].double().sum()) == sums[which][i], number
            else:
                assert batch[i].view(-1)[0] == arena.slot(batches[which][i]).view(-1)[0]
        assert torch.equal(product(batches[which]), products[which]), number
    assert fetcher.fallbacks == 0
    fetcher.close()
    del fetcher, batch
    return {"before": list(before), "after": list(holdings())}


def check_holdings(seen: dict[str, list[int]]) -> None:
    # Three to spare: malloc's own. A leak would be as many as there were gathers.
    assert abs(seen["after"][0] - seen["before"][0]) <= 3
    assert seen["after"][1] == seen["before"][1]


def test_fetches_and_products_leave_no_mapping_and_no_open_file_behind(arena: Arena) -> None:
    check_holdings(run_child(lambda: gather_many(arena, 4000)).result)


# -- sizes that fit no page


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    heads=st.integers(1, 3),
    n=st.one_of(st.integers(1, 600), st.sampled_from([16, 32, 64, 100, 128, 200, 512, 600])),
    dtype=st.sampled_from(sorted(_FORMS, key=str)),
    triangle=st.booleans(),
    header=st.sampled_from([0, 1]),
    page=st.sampled_from([1 << 12, 1 << 14, 1 << 16]),
    batch=st.lists(st.integers(0, 3), min_size=1, max_size=4),
)
def test_sizes_that_fit_no_page_come_out_as_the_copy_and_without_padding(
    heads: int, n: int, dtype: torch.dtype, triangle: bool, header: int, page: int, batch: list[int]
) -> None:
    if page % PAGE:
        page = PAGE
    shape = (heads, n * (n + 1) // 2) if triangle else (heads, n, n)
    layout = SlotLayout.paged(shape, dtype, slots=4, header=header, page=page)
    assert layout.stride % page == 0
    assert layout.stride - layout.nbytes < page
    with tempfile.TemporaryDirectory() as folder, make_arena(Path(folder) / "arena.bin", layout) as arena:
        raw = np.fromfile(Path(folder, "arena.bin"), np.uint8)
        # The oracle: the records alone, cut out of the file without this library's help.
        dense = np.concatenate([raw[layout.offset(i) : layout.offset(i) + layout.nbytes] for i in batch])
        twins: list[Fetcher] = [CopyFetcher(), ViewFetcher(), MapFetcher(strict=True)]
        for fetcher in twins:
            with fetcher.fetch(arena, batch) as got:
                seen = np.concatenate([record.view(-1).view(torch.uint8).numpy() for record in got])
                assert np.array_equal(seen, dense), fetcher.name
                if got.stacked is not None:
                    honest = fetcher.name == "copy" or layout.dense or len(batch) == 1
                    assert got.stacked.is_contiguous() == honest
            assert getattr(fetcher, "fallbacks", 0) == 0
            fetcher.close()
        count, width, padded = len(batch), 5, n + 1
        values = torch.randn(count * n, heads * width, generator=torch.Generator().manual_seed(n))
        starts, rows = np.arange(count)[::-1] * n, np.arange(count)
        products = [torch.full((count, padded, heads * width), 7.25) for _ in range(2)]
        multiply(arena, batch, values, starts, products[0], rows)
        _kernels.multiply(
            dense, rows * layout.nbytes, _FORMS[dtype], heads, n, width, values.numpy(), np.ascontiguousarray(starts),
            products[1].numpy(), rows, padded, 1, triangle,
        )  # fmt: skip
        assert torch.equal(*(product.view(torch.int32) for product in products)), "not the bits of the copy"
        assert bool((products[0][:, n:] == 0).all())
        if dtype != torch.uint8:  # there numbers stand for squares, and zeros for nothing: see test_mmap_product.py
            record = torch.from_numpy(dense[: layout.nbytes].copy()).view(dtype).view(shape)
            v = values[starts[0] : starts[0] + n].view(n, heads, width).transpose(0, 1).double()
            expected = (unpack(record).double() @ v).transpose(0, 1).reshape(n, -1)
            assert torch.allclose(products[0][0, :n].double(), expected, rtol=1e-4, atol=1e-3 * math.sqrt(n))


# -- huge pages that are really there


def test_maps_out_of_a_pool_of_huge_pages_are_the_same_bytes(tmp_path: Path) -> None:
    free = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    if not free.exists() or int(free.read_text()) < 5:
        pytest.skip("fewer than 5 free pages in the pool of huge pages: sysctl vm.nr_hugepages")
    layout = SlotLayout.paged((2, 400, 400), torch.float32, slots=5, header=1)
    plain = make_arena(tmp_path / "arena.bin", layout)
    huge = Arena(tmp_path / "arena.bin", layout, "hugepages")
    assert (huge.residency, huge.notice) == ("hugepages", None)
    assert huge.page_bytes == huge.window_page_bytes == 2 << 20
    assert "/anon_hugepage" in smaps(huge.slot(0).data_ptr()) or "KernelPageSize:     2048 kB" in smaps(
        huge.slot(0).data_ptr()
    )
    order, values = [4, 0, 0, 2], torch.randn(1600, 6, generator=torch.Generator().manual_seed(2))
    for fetcher in (CopyFetcher(), ViewFetcher(), MapFetcher(strict=True)):
        with fetcher.fetch(huge, order) as batch:
            assert all(torch.equal(batch[i], plain.slot(slot)) for i, slot in enumerate(order)), fetcher.name
        assert getattr(fetcher, "fallbacks", 0) == 0
    products = [torch.empty(4, 400, 6) for _ in range(2)]
    for source, product in zip((plain, huge), products, strict=True):
        multiply(source, order, values, np.arange(4) * 400, product, np.arange(4))
    assert torch.equal(*products)


def test_maps_in_small_and_in_huge_pages_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = SlotLayout.paged((2, 380, 380), torch.float16, slots=3, header=1)
    wide = SlotLayout.paged((2, 600, 600), torch.float32, slots=3, header=1)
    for number, kind in enumerate((layout, wide)):
        plain = make_arena(tmp_path / f"{number}.bin", kind)
        refused = Arena(tmp_path / f"{number}.bin", kind, "hugepages")
        with monkeypatch.context() as patch:
            pretend_huge(patch)
            huge = Arena(tmp_path / f"{number}.bin", kind, "hugepages")
        assert huge.residency == "hugepages"
        assert (refused.notice is None) == (refused.residency == "hugepages")
        n, order = kind.shape[1], [2, 0, 2]
        values, rows = torch.randn(3 * n, 8, generator=torch.Generator().manual_seed(5)), np.arange(3)
        seen = []
        for source in (plain, refused, huge):
            product = torch.empty(3, n, 8)
            multiply(source, order, values, rows * n, product, rows)
            with MapFetcher(strict=True).fetch(source, order) as batch:
                seen.append((product, torch.stack(list(batch))))
        assert all(torch.equal(seen[0][k], other[k]) for other in seen[1:] for k in (0, 1))


# -- nobody writes


def writable(entry: str) -> bool:
    """Whether a paragraph of smaps allows a store, now or after mprotect."""
    flags = re.search(r"^VmFlags: (.*)$", entry, re.M)
    assert flags is not None
    return "w" in entry.split()[1] or bool({"wr", "mw"} & set(flags[1].split()))


def file_mappings(*names: str) -> list[str]:
    """The paragraphs of smaps whose file has one of these in its name."""
    text = Path("/proc/self/smaps").read_text(errors="replace")
    entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.M)
    return [entry for entry in entries if any(name in entry.split("\n", 1)[0] for name in names)]


def test_no_mapping_of_an_arena_a_window_or_a_copy_in_memory_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_huge(monkeypatch)
    layout = SlotLayout.paged((2, 27, 27), torch.float32, slots=SLOTS)
    plain = make_arena(tmp_path / "arena.bin", layout)
    huge = Arena(tmp_path / "arena.bin", layout, "hugepages")
    assert huge.residency == "hugepages"
    fetcher, other = MapFetcher(), MapFetcher()
    with fetcher.fetch(plain, [1, 3, 5]) as batch, other.fetch(huge, [1, 3, 5]) as copied:
        assert fetcher.fallbacks == other.fallbacks == 0
        assert torch.equal(batch[1], copied[1])
        found = file_mappings(str(tmp_path), "memfd:attmemo-arena")
        assert len(found) >= 8  # each arena, and three slots of each in a window
        assert not any(map(writable, found))


def test_a_slot_of_a_database_may_be_written_and_the_file_stays_as_it_was(tmp_path: Path) -> None:
    path = fill(tmp_path / "db")
    # All but the table of who reads at the moment, which LMDB keeps for every reader.
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != "lock.mdb")
    before = {file: file.read_bytes() for file in files}
    with Database(path) as database:
        for kind in (KIND_MAP, KIND_INPUT):
            view = database.view(kind, 0, 1)
            for store in (lambda v=view: v.zero_(), lambda v=view: v.masked_fill_(v > 0, 1.0)):
                assert run_child(store, signals=["SIGSEGV"]).signal == "SIGSEGV"
            copy = database.slot(kind, 0, 1)
            original = copy.clone()
            copy.zero_()
            assert torch.equal(database.view(kind, 0, 1), original)
        found = file_mappings(".slots")
        assert found
        assert not any(map(writable, [entry for entry in found if str(path) in entry]))
        assert {file: file.read_bytes() for file in files} == before
