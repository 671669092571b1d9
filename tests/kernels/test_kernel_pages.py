"""Arrays in huge pages: the same numbers in another place."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from attmemo.kernels import pages
from attmemo.kernels.linear32 import Linear32
from attmemo.kernels.pages import Slab


def arrays() -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    return [random.normal(size=(700, 999)), random.integers(0, 9, 33, dtype=np.int8), np.zeros(0, np.float32),
            random.normal(size=1 << 20).astype(np.float32)]  # fmt: skip


FAULTS = """
import ctypes, resource
from attmemo.kernels.pages import keep_freed_memory

allocator = ctypes.CDLL(None)
allocator.malloc.restype, allocator.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def touched():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        pieces = [allocator.malloc(1 << 20) for _ in range(56)]
        for piece in pieces:
            ctypes.memset(piece, 1, 1 << 20)
        for piece in pieces:
            allocator.free(piece)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

touched()
first = touched()
keep_freed_memory()
touched()
print(first, touched())
"""


def test_memory_that_is_freed_again_and_again_is_kept() -> None:
    """56 MiB in pieces of 1 MiB, ten times."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    said = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, env=environment)
    before, after = map(int, said.stdout.split())
    if before < 10 * 1000:
        pytest.skip(f"this allocator keeps freed memory by itself: {before} pages were touched anew")
    assert after < before / 10


def test_a_slab_keeps_the_numbers_at_multiples_of_a_line() -> None:
    given = arrays()
    slab = Slab(sum(map(Slab.size_of, given)))
    kept = [slab.keep(array) for array in given]
    assert all(np.array_equal(array, own) and array.dtype == own.dtype for array, own in zip(given, kept, strict=True))
    assert all(own.ctypes.data % 64 == 0 for own in kept if own.size)
    assert not any(np.shares_memory(one, other) for i, one in enumerate(kept) for other in kept[:i])


def test_small_arrays_stay_where_they_are() -> None:
    array = np.ones(9)
    assert Slab(Slab.size_of(array)).keep(array) is array


def test_a_machine_without_room_for_a_slab_keeps_arrays_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(pages.mmap, "mmap", refuse)
    array = np.ones(1 << 20)
    assert Slab(Slab.size_of(array)).keep(array) is array


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages")
def test_a_layer_that_was_moved_gives_the_same_numbers() -> None:
    torch.manual_seed(0)
    layer = Linear32.of([torch.randn(1024, 1200)], [torch.randn(1024)])
    x, place = torch.randn(5, 1200), layer.weights[0].ctypes.data
    expected = layer(x)
    layer.move(Slab(layer.slab_bytes))
    assert layer.weights[0].ctypes.data != place
    assert torch.equal(layer(x), expected)
