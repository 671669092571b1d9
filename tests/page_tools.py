"""What the reliability tests of pages share."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from test_mmap_fetch import make_arena

from attmemo.mmap import Arena, SlotLayout, page_size

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
