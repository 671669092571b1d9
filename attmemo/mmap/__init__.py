"""Arena files in memory, and batches of their slots as tensors.

    arena = Arena("layer.bin", SlotLayout.paged((12, 128, 128), torch.bfloat16, slots=1000))
    fetcher = choose_fetcher("auto", arena.window_page_bytes)
    with fetcher.fetch(arena, [7, 3, 7]) as batch:
        batch.stacked        # [3, 12, 128, 128], or None: then batch[0], batch[1], batch[2]

Imports nothing of attmemo but its errors, and knows nothing of attention. The dangerous part is `native/window.c`.
"""

from attmemo.mmap.arena import Arena, Residency, Slots
from attmemo.mmap.fetch import Batch, CopyFetcher, Fetcher, FetcherName, MapFetcher, ViewFetcher, choose_fetcher
from attmemo.mmap.layout import CACHE_LINE, DTYPES, SlotLayout
from attmemo.mmap.pages import HUGE_PAGE, map_count, max_map_count, page_size, round_up
from attmemo.mmap.window import Window

__all__ = [
    "CACHE_LINE", "DTYPES", "HUGE_PAGE", "Arena", "Batch", "CopyFetcher", "Fetcher", "FetcherName", "MapFetcher",
    "Residency", "SlotLayout", "Slots", "ViewFetcher", "Window", "choose_fetcher", "map_count", "max_map_count",
    "page_size", "round_up",
]  # fmt: skip
