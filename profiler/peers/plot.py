"""The plot of a table: speed of every path, a panel for each batch size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from attmemo.profiler.colors import color_of
from attmemo.profiler.peers.verdict import title_of
from attmemo.profiler.plots import GREY, STYLE, png


def draw_table(found: Mapping[str, Any]) -> bytes:
    """A result of `measure` as a PNG."""
    sizes = found["batch"]
    panels = [[c for c in found["cells"] if c["batch"] == size and "speed" in c] for size in sizes]
    most = max(map(len, panels))
    with mpl.rc_context(STYLE | {"axes.grid.axis": "x"}):
        figure = Figure((4.4 * len(sizes) + 0.6, 0.28 * most + 1.3), dpi=130, layout="constrained")
        for axes, size, cells in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, panels, strict=True):
            cells = sorted(cells, key=lambda one: float(one["speed"]))
            speeds = [cell["speed"] for cell in cells]
            colors = [color_of(cell["path"]) for cell in cells]
            axes.barh([title_of(cell) for cell in cells], speeds, 0.7, color=colors)
            for place, cell in enumerate(cells):
                text = f"{cell['speed']:.2f}, {100 * cell['quality']['changed']:.1f} % changed"
                under = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # the line of stock goes on behind
                axes.text(cell["speed"] + 0.01 * max(speeds), place, text, va="center", fontsize=7, bbox=under)
            axes.axvline(1.0, color=GREY, linestyle="--", linewidth=1)
            axes.set_xlim(0.0, 1.45 * max(speeds))
            axes.set_xlabel("speed, stock = 1")
            axes.set_title(f"batches of {size}")
        stream, model = found["stream"], found["model"]
        figure.suptitle(
            f"{Path(model['name']).name}, {model['dtype']}: {stream['asked_of_all']} of {stream['texts']} texts of "
            f"{stream['name']}",
            x=0.01, ha="left", fontsize=10,
        )  # fmt: skip
        return png(figure)
