"""Huge pages: the same bytes as in small ones (H8: T18, T19)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_mmap_arena import pretend_huge, smaps
from test_mmap_fetch import make_arena

from attmemo.mmap import Arena, CopyFetcher, MapFetcher, SlotLayout, ViewFetcher, multiply


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
