"""Sizes that fit no page."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mmap_tools import PAGE, make_arena

from attmemo.db.encodings import unpack
from attmemo.kernels import _map_product
from attmemo.kernels.map_product import _FORMS
from attmemo.maps.source import multiply
from attmemo.mmap import CopyFetcher, Fetcher, MapFetcher, SlotLayout, ViewFetcher


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
        _map_product.multiply(
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
