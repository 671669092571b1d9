"""Huge pages: the same bytes as in small ones and on any node."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from children import run_child
from mmap_tools import make_arena, pretend_huge, smaps

from attmemo.maps.source import multiply
from attmemo.mmap import Arena, CopyFetcher, MapFetcher, SlotLayout, ViewFetcher

FREE = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")


def from_a_pool(folder: Path) -> None:
    """Serve an arena out of the pool of huge pages, which has some, in every way."""
    layout = SlotLayout.paged((2, 400, 400), torch.float32, slots=5, header=1)
    plain = make_arena(folder / "arena.bin", layout)
    huge = Arena(folder / "arena.bin", layout, "hugepages")
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


def test_maps_out_of_a_pool_of_huge_pages_are_the_same_bytes(tmp_path: Path) -> None:
    if not FREE.exists() or int(FREE.read_text()) < 5:
        pytest.skip("fewer than 5 free pages in the pool of huge pages: sysctl vm.nr_hugepages, or make test-slow")
    from_a_pool(tmp_path)


@pytest.mark.slow
def test_maps_out_of_a_pool_made_for_it_are_the_same_bytes(tmp_path: Path) -> None:
    """Where the test may, it lends itself a few pages (16 MiB), and gives them back."""
    pool = FREE.with_name("nr_hugepages")
    if not os.access(pool, os.W_OK):
        pytest.skip(f"{pool} cannot be written: no pool can be reserved")
    before = int(pool.read_text())
    try:
        try:
            pool.write_text(str(before + 8))
        except OSError as error:
            pytest.skip(f"no pool can be reserved: {error}")
        if int(FREE.read_text()) < 5:
            pytest.skip(f"no pool can be reserved: of 8 pages asked {int(pool.read_text()) - before} were got")
        from_a_pool(tmp_path)
    finally:
        pool.write_text(str(before))


NODES = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))


def test_whatever_node_the_memory_lies_on_the_bytes_are_the_same(tmp_path: Path) -> None:
    """The policy is the task's: of pages of a file, the first to touch them decides."""
    layout = SlotLayout.paged((2, 400, 400), torch.float32, slots=5, header=1)
    slots = torch.stack([make_arena(tmp_path / "arena.bin", layout).slot(i) for i in range(5)])

    def body() -> str:
        libc = ctypes.CDLL(None, use_errno=True)
        mask = ctypes.c_ulong(sum(1 << int(node.name[4:]) for node in NODES))
        if libc.syscall(238, 3, ctypes.byref(mask), 64):  # set_mempolicy(MPOL_INTERLEAVE)
            return f"no policy can be set: {os.strerror(ctypes.get_errno())}"
        with open(tmp_path / "arena.bin", "rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with Arena(tmp_path / "arena.bin", layout, "hugepages") as arena:
            for fetcher in (CopyFetcher(), ViewFetcher(), MapFetcher()):
                with fetcher.fetch(arena, range(5)) as batch:
                    assert all(torch.equal(batch[i], slots[i]) for i in range(5)), fetcher.name
            address = arena.slot(0).data_ptr()
            lines = Path("/proc/self/numa_maps").read_text().splitlines()  # in the order of addresses
            spread = [line for line in lines if int(line.split()[0], 16) <= address][-1]
        if len(NODES) < 2:
            return "one node: the bytes are the same, and there is no spread to be seen"
        assert len(re.findall(r" N\d+=", spread)) > 1, spread
        return ""

    if os.uname().machine != "x86_64" or not Path("/proc/self/numa_maps").exists():
        pytest.skip("no NUMA to be asked here")
    if why := run_child(body).result:
        pytest.skip(why)


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
