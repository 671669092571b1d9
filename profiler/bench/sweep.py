"""`bench_gather` over batch sizes and lengths: the numbers of `attmemo bench gather --plot`."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from attmemo.errors import StorageFullError
from attmemo.profiler.bench.gather import bench_gather
from attmemo.profiler.turns import Progress, silent

BATCHES: Final = (1, 4, 16, 64)
LENGTHS: Final = (128, 256, 512)


def sweep_gather(
    *, length: int = 512, batch: int = 32, repeats: int = 9, progress: Progress = silent, **settings: Any
) -> tuple[list[dict[str, Any]], list[str]]:
    """`bench_gather`, warm only, over batch sizes at one length and over lengths at one batch size.

    Batches of `BATCHES` are measured at `length`, `LENGTHS` at `batch`, with at most 5 repeats of each; the other
    `settings` are those of `bench_gather`. Gives the points (``axis``, "batch" or "length": which was swept;
    ``batch``, ``length``, ``fetcher``, ``page_bytes``, and ``<variant>_matmul_ms`` of each variant), and notes of what
    was left out because there was no room for it.
    """
    wanted = [("batch", size, length) for size in BATCHES] + [("length", batch, size) for size in LENGTHS]
    points: list[dict[str, Any]] = []
    notes: list[str] = []
    for axis, size, tokens in wanted:
        name = f"batch {size}, length {tokens}"
        sizes: dict[str, Any] = {"length": tokens, "batch": size, "repeats": min(repeats, 5)}
        try:
            found = bench_gather(**sizes, **settings, cold=False, progress=partial(_tell_of, progress, name))
        except StorageFullError as error:
            notes.append(f"{name} is left out of the plot: {error.what}")
            continue
        point = {"axis": axis, "batch": size, "length": tokens}
        point |= {key: found[key] for key in ("fetcher", "page_bytes")}
        points.append(point | {f"{row['variant']}_matmul_ms": row["fetch_matmul_ms"] for row in found["rows"]})
    return points, notes


def _tell_of(tell: Progress, name: str, what: str, done: int, total: int) -> None:
    tell(f"{name}: {what}", done, total)
