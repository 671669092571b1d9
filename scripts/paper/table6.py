"""AttMEMO Table 6: fetching a batch of maps, copied or mapped."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure as Plot

from paper.frame import Claim, Figure, Found, Run, judge, table, where
from paper.parts.gather import bench_gather
from paper.plots import PAPER, bars, legend, sheet

# length, batch: copy, map and unmap; the table says seconds, the text milliseconds
PAPER_MS = {
    (256, 1): (52, 0.12), (256, 32): (104, 0.19), (256, 64): (106, 0.33),
    (512, 1): (111, 0.25), (512, 32): (548, 0.19), (512, 64): (731, 0.33),
}  # fmt: skip
WAYS = ("copy", "copy_reused", "map", "direct", "contiguous")


def measure(run: Run) -> Found:
    cells = []
    for length, batch in run.size(list(PAPER_MS), [(16, 2)]):
        found = run.part(
            f"gather-{length}-{batch}",
            lambda length=length, batch=batch: bench_gather(
                heads=12, length=length, batch=batch, dtype="float32", repeats=run.size(7, 1)
            ),
        )
        rows = {row["variant"]: row for row in found["rows"]}
        keys = ("fetch_ms", "fetch_matmul_ms")
        cell: dict[str, Any] = {name: {key: rows[name][key] for key in keys} for name in WAYS}
        kept = {key: found[key] for key in ("bytes", "page_bytes", "window_page_bytes", "fetcher")}
        cells.append({"length": length, "batch": batch, "load": found["conditions"]["load"], **kept, "ways": cell})
    return {"heads": 12, "dtype": "float32", "cells": cells}


def _ratio(cell: Found, key: str) -> float:
    return float(cell["ways"]["copy"][key] / cell["ways"]["map"][key])


def claims(found: Found) -> list[Claim]:
    alone, whole = ([_ratio(cell, key) for cell in found["cells"]] for key in ("fetch_ms", "fetch_matmul_ms"))
    last = found["cells"][-1]["ways"]
    floor, direct = last["contiguous"]["fetch_matmul_ms"], last["direct"]["fetch_matmul_ms"]
    return [
        Claim(
            "mapping is at least 321 times as fast as copying", "321x to 2884x",
            f"{min(alone):.0f}x to {max(alone):.0f}x for the fetch alone", judge(max(alone) > 1, min(alone) >= 321),
            "the paper's copy runs at 1 GB/s and less; a copy in memory is faster",
        ),
        Claim(
            "mapping removes the cost of the copy", "no copy, no cost",
            f"fetch and A·V together: {min(whole):.2f}x to {max(whole):.2f}x", judge(min(whole) > 1, min(whole) > 100),
            "page faults move into A·V; the table of the paper leaves A·V out",
        ),
        Claim(
            "a contiguous tensor is necessary", "“necessary in order to exploit SIMD”",
            f"our kernel reads maps where they lie: {direct:.0f} ms with A·V; maps that are contiguous already: "
            f"{floor:.0f} ms", judge(direct > 1.5 * floor),
        ),
    ]  # fmt: skip


def caption(found: Found) -> str:
    pages = {cell["length"]: cell["page_bytes"] // 1024 for cell in found["cells"]}
    sizes = " and ".join(f"{size} KiB ({length} tokens)" for length, size in pages.items())
    loads = [cell["load"] for cell in found["cells"]]
    return (
        f"Maps of {found['heads']} heads, {found['dtype']}, in a file that is in the page cache, pages of "
        f"{sizes}; medians; map and unmap together. Paper: memory mode of Optane; its "
        f"table says seconds, its text milliseconds (taken here). {where(found)}; load {min(loads):g} to "
        f"{max(loads):g}."
    )


def rows(found: Found) -> str:
    head = (
        "tokens x batch", "MB", "copy, ms", "copy into a kept tensor", "map + unmap", "copy / map",
        "paper: copy, map, ratio",
        "with A·V: copy", "map", "direct", "contiguous already",
    )  # fmt: skip
    lines = []
    for cell in found["cells"]:
        ways, paper = cell["ways"], PAPER_MS.get((cell["length"], cell["batch"]), (1.0, 1.0))
        cells = [f"{cell['length']} x {cell['batch']}", f"{cell['bytes'] / 1e6:.0f}"]
        cells += [f"{ways[name]['fetch_ms']:.2f}" for name in ("copy", "copy_reused", "map")]
        cells += [f"{_ratio(cell, 'fetch_ms'):.0f}x", f"{paper[0]}, {paper[1]}, {paper[0] / paper[1]:.0f}x"]
        cells += [f"{ways[name]['fetch_matmul_ms']:.1f}" for name in ("copy", "map", "direct", "contiguous")]
        lines.append(cells)
    return table(head, lines)


def why(found: Found) -> str:
    large, smallest = found["cells"][-1], min(cell["page_bytes"] for cell in found["cells"])
    small = [cell for cell in found["cells"] if cell["page_bytes"] == smallest][-1]

    def times(cell: dict[str, Any]) -> str:
        mapped, there = (cell["ways"][name]["fetch_matmul_ms"] for name in ("map", "contiguous"))
        return f"{mapped:.0f} ms on mapped pages and {there:.0f} ms on a tensor that is there already"

    return (
        "Mapping is far cheaper than copying, as the paper says. The product A·V that follows reads the maps, and "
        f"pays for small pages, because each is faulted in: for {small['length']} tokens and a batch of "
        f"{small['batch']} it takes {times(small)}. Pages of 2 MiB cost nothing there: for {large['length']} tokens "
        f"{times(large)}. Table 4 of the paper has the first cost in the line “other computation” (47.3 ms without "
        "memoization, 163.6 ms with it). Where pages are small the library therefore reads each record where it "
        "lies, and maps only where pages of 2 MiB are to be had. The paper's copy (111 for 12.6 MB) is slower than "
        "any copy in memory that we could measure."
    )


def draw(found: Found) -> Plot:
    figure, axes = sheet(2, "Fetching a batch of maps", 6.0)
    groups = [f"{cell['length']}\nx {cell['batch']}" for cell in found["cells"]]
    alone: dict[str, list[float | None]] = {
        name: [cell["ways"][name]["fetch_ms"] for cell in found["cells"]] for name in ("copy", "copy_reused", "map")
    }
    bars(axes[0], groups, alone)
    for name, place, marker in (("copy", 0, "D"), ("map", 1, "_")):
        values = [PAPER_MS.get((c["length"], c["batch"]), (None, None))[place] for c in found["cells"]]
        axes[0].plot(range(len(groups)), values, marker, color=PAPER, markersize=7, label=f"paper: {name}")
    axes[0].set(title="fetch alone", ylabel="ms", yscale="log", ylim=(0.01, 1e5))
    names = ("copy", "map", "direct", "contiguous")
    bars(axes[1], groups, {name: [c["ways"][name]["fetch_matmul_ms"] for c in found["cells"]] for name in names})
    axes[1].set(title="fetch and A·V", ylabel="ms", yscale="log")
    axes[1].margins(y=0.3)
    for own in axes:
        legend(own, loc="upper left", ncols=2)
    return figure


FIGURE = Figure(
    "table6", "AttMEMO Table 6: copying and mapping", measure, claims, caption, rows, why, draw, quiet=True
)
