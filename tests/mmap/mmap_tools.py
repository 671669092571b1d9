"""What the tests of arenas and windows share."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from attmemo.mmap import HUGE_PAGE, Arena, SlotLayout, hugepages, page_size
from attmemo.mmap import pages as in_pages

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


def smaps(address: int) -> str:
    """The paragraph of /proc/self/smaps about the mapping at an address."""
    entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(errors="replace"), flags=re.M)
    for entry in entries:
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", entry)
        if match and int(match[1], 16) <= address < int(match[2], 16):
            return entry
    raise AssertionError(f"nothing is mapped at {address:#x}")


def pretend_huge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the memory file be kept although its pages are small: everything but the page size is then real."""
    claim = lambda address, nbytes: (HUGE_PAGE, nbytes)  # noqa: E731
    monkeypatch.setattr(hugepages, "huge_mapping", claim)
    monkeypatch.setattr(in_pages, "huge_mapping", claim)
    monkeypatch.setattr(hugepages, "shared_memory_allowed", lambda: True)


def make_arena(path: Path, layout: SlotLayout) -> Arena:
    """An arena of random numbers whose header and padding are 0xFF: NaN, wherever they become visible."""
    generator = torch.Generator().manual_seed(layout.nbytes)
    with path.open("wb") as file:
        file.write(b"\xff" * layout.header)
        for _ in range(layout.slots):
            slot = torch.rand(layout.shape, generator=generator).to(layout.dtype)
            file.write(slot.view(torch.uint8).numpy().tobytes())
            file.write(b"\xff" * (layout.stride - layout.nbytes))
    return Arena(path, layout)
