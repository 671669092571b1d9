"""The pictures of the benchmarks: `attmemo bench gather --plot` and `attmemo bench layer --all-families --plot`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator

from attmemo.profiler.plots import BLUE, GREEN, GREY, INK, ORANGE, STYLE, numbers, png

_FETCHES: Final = {
    "copy": ("fresh copy", "#9c5a8a", "s-"),
    "copy_reused": ("copy into a kept buffer", GREY, "D-"),
    "map": ("map + unmap", BLUE, "o-"),
    "view": ("views, one product each", GREEN, "^-"),
    "direct": ("direct, where they lie", ORANGE, "v-"),
    "contiguous": ("contiguous: no fetch", INK, "--"),
}


def draw_gather(result: Mapping[str, Any]) -> bytes:
    """Draw what a batch of maps costs with its product, by variant: against batch size, and against length.

    `result` is that of `bench_gather`, with the points of `sweep_gather` as ``sweep``; None is left out of a line.
    Gives a PNG.
    """
    where, pages = result["conditions"], result["page_bytes"] / 1024
    said = f"{where['heads']} heads, {where['dtype']}, {where['residency']}, pages of {pages:g} KiB"
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.4, 5.2), dpi=130, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
        heading = f"Fetch of a batch of maps with the product A·V: {said}, {where['threads']} threads"
        figure.suptitle(heading, fontsize=12, x=0.02, ha="left")
        panels = figure.subplots(1, 2, sharey=True, squeeze=False)[0]
        for axes, axis, other in zip(panels, ("batch", "length"), ("length", "batch"), strict=True):
            swept = [point for point in result["sweep"] if point["axis"] == axis]
            swept.sort(key=lambda point: int(point[axis]))
            for name, (label, color, style) in _FETCHES.items():
                times = numbers(swept, f"{name}_matmul_ms")
                axes.plot(numbers(swept, axis), times, style, color=color, label=label)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0)))
            axes.set_xticks([point[axis] for point in swept], [str(point[axis]) for point in swept], minor=False)
            axes.minorticks_off()
            axes.yaxis.set_major_formatter("{x:g}")
            held = ", ".join(sorted({str(point[other]) for point in swept}))
            axes.set_title(f"Against {axis} ({other} {held})")
            axes.set_xlabel({"batch": "sequences in a batch", "length": "tokens of a sequence"}[axis])
        panels[0].set_ylabel("milliseconds, lower is better")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        return png(figure)


def draw_families(result: Mapping[str, Any]) -> bytes:
    """Draw how much faster a forward is with every sequence served, and at most could be, family by family.

    `result` is that of `bench_families`. Gives a PNG: a panel for each family; a pair of bars, served and ceiling, for
    each shape and precision.
    """
    rows, where, columns = result["rows"], result["conditions"], 4
    families = list(dict.fromkeys(str(row["family"]) for row in rows))
    lines = max(1, -(-len(families) // columns))
    highest = max([1.0, *(row[key] for row in rows for key in ("speedup", "ceiling"))])
    with mpl.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
        figure = Figure(figsize=(15.5, 0.9 + 2.9 * lines), dpi=130, layout=layout)
        heading = (
            f"Time of an exact forward over that of one with every sequence served ({where['layers']} layers of width "
            f"{where['hidden']}): filled as measured, outlined without lookup and fetch"
        )
        figure.suptitle(heading, fontsize=12, x=0.01, ha="left")
        for place, family in enumerate(families, start=1):
            axes = figure.add_subplot(lines, columns, place)
            own = [row for row in rows if row["family"] == family]
            shapes = sorted({(row["length"], row["batch"]) for row in own})
            for shift, (dtype, color) in enumerate((("float32", BLUE), ("bfloat16", ORANGE))):
                there = [row for row in own if row["dtype"] == dtype]
                xs = [shapes.index((row["length"], row["batch"])) + 0.4 * shift - 0.2 for row in there]
                for key, fill in (("ceiling", "none"), ("speedup", color)):
                    heights = [row[key] - 1.0 for row in there]
                    label = dtype if key == "speedup" and there else None
                    axes.bar(xs, heights, 0.36, 1.0, color=fill, edgecolor=color, linewidth=1.0, label=label)
            axes.axhline(1.0, color=INK, linewidth=0.9)
            axes.set_yscale("log", base=2)
            axes.set_ylim(0.75, 1.2 * highest)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.set_title(family, fontsize=10.5)
            axes.set_xticks(range(len(shapes)), [f"{n}\nx {batch}" for n, batch in shapes], fontsize=7.5)
            if place == 1:
                axes.legend(fontsize=8, loc="upper left", ncols=2)
        return png(figure)
