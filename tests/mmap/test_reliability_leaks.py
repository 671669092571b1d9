"""Many fetches: nothing is left behind."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from children import run_child
from mmap_tools import small_arena

from attmemo.maps.source import multiply
from attmemo.mmap import Arena, MapFetcher, map_count


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


@pytest.mark.slow
def test_a_million_fetches_and_products_leave_no_mapping_and_no_open_file_behind(tmp_path: Path) -> None:
    with small_arena(tmp_path) as arena:
        check_holdings(run_child(lambda: gather_many(arena, 1_000_000), timeout=3000).result)
