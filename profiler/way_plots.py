"""Plots of ways to the same answers: the demo's stream, and the table of peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from attmemo.profiler.peers.verdict import title_of
from attmemo.profiler.plots import BLUE, FAINT, GOLD, GREEN, GREY, INK, ORANGE, PURPLE, RED, STYLE, png
from attmemo.profiler.race import (
    CACHE,
    INT8,
    ONNX,
    ONNX_INT8,
    OPENVINO,
    OPENVINO_INT8,
    PACKED,
    ROWS,
    STOCK,
    TITLES,
    Lap,
    standing,
)

COLORS: Final = {
    "stock": FAINT, "openvino": ORANGE, "onnx": PURPLE, "none": GREEN, "rows": BLUE, "maps": GOLD, "cache": GREY,
    "8 bits": "#8cc3a4",
}  # fmt: skip
_NAMES: Final = {
    STOCK: "stock", OPENVINO: "openvino", OPENVINO_INT8: "openvino", ONNX: "onnx", ONNX_INT8: "onnx", PACKED: "none",
    ROWS: "rows", INT8: "8 bits", CACHE: "cache", "none-int8": "8 bits",
}  # fmt: skip
WINDOWS: Final = 24
FEW: Final = 8  # windows, up to which points are marked


def color_of(way: str) -> str:
    """Return the colour of a way of `attmemo.profiler.race` or of a path of `attmemo.profiler.peers`; else ink."""
    return COLORS.get(_NAMES.get(way, way.partition("-")[0]), INK)


def draw_demo(result: Mapping[str, Any]) -> bytes:
    """The result of a demo as a PNG: bars of the embedder, and the classifier window by window."""
    classifier = result.get("classifier")
    with mpl.rc_context(STYLE):
        figure = Figure((8.0, 7.4 if classifier else 2.4), dpi=120, layout="constrained")
        panels = figure.subplots(3 if classifier else 1, 1, squeeze=False)[:, 0]
        figure.suptitle(f"{result['model']}, {result['source']}", fontsize=12, x=0.02, ha="left")
        _draw_bars(panels[0], result["embedder"]["parts"]["all"]["speed"])
        if classifier:
            laps = [Lap(**lap) for lap in classifier["laps"]]
            windows = windows_of(laps, classifier["every"])
            _draw_speed(panels[1], windows)
            _draw_shares(panels[2], windows)
            certified = next((place for place, lap in enumerate(laps) if lap.state == "certified"), None)
            for axes in panels[1:]:
                if certified is not None:
                    at = sum(lap.texts for lap in laps[:certified])
                    axes.axvline(at, color=FAINT, linewidth=1, linestyle=":", label="the guard is certified")
                axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
        return png(figure)


def _draw_bars(axes: Axes, speed: Mapping[str, float]) -> None:
    names = list(speed)[::-1]
    titles = [TITLES.get(name, name) for name in names]
    drawn = axes.barh(titles, [speed[name] for name in names], 0.7, color=[color_of(name) for name in names])
    axes.bar_label(drawn, fmt="%.2f", padding=3, fontsize=8.5)
    axes.axvline(1.0, color=GREY, linestyle="--", linewidth=1)
    axes.set_xlim(0.0, 1.15 * max(speed.values()))
    axes.set_title("Embedder: speed, original model = 1")


def windows_of(laps: Sequence[Lap], every: int) -> list[Sequence[Lap]]:
    """Windows that begin with a batch that all ways computed, one of so many; the last one has what is left over."""
    size = max(every, len(laps) // WINDOWS // every * every)
    starts = list(range(0, max(len(laps) // size, 1) * size, size))
    return [laps[start:end] for start, end in zip(starts, [*starts[1:], len(laps)], strict=True)]


def _ends(windows: Sequence[Sequence[Lap]]) -> list[int]:
    return list(accumulate(sum(lap.texts for lap in window) for window in windows))


def _draw_speed(axes: Axes, windows: Sequence[Sequence[Lap]]) -> None:
    pairs = [(end, found) for end, w in zip(_ends(windows), windows, strict=True) if (found := standing(w))]
    names = [name for name in pairs[0][1].speed if name != STOCK]
    for name in names:
        style = {"color": color_of(name), "label": TITLES.get(name, name), "linewidth": 2.2 if name == ROWS else 1.2}
        style["marker"] = "o" if len(pairs) <= FEW else ""
        axes.plot([end for end, _ in pairs], [found.speed[name] for _, found in pairs], **style)  # type: ignore[arg-type]
    axes.axhline(1.0, color=color_of(STOCK), linewidth=1, linestyle="--", label=TITLES[STOCK])
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel("original model = 1")
    axes.set_title("Classifier: speed, window by window")


def _draw_shares(axes: Axes, windows: Sequence[Sequence[Lap]]) -> None:
    ends, blue = _ends(windows), color_of(ROWS)  # all of it is about reuse
    marker = "o" if len(ends) <= FEW else ""
    tokens, texts = ([sum(getattr(lap, what) for lap in w) for w in windows] for what in ("tokens", "texts"))
    rows, served = ([sum(getattr(lap, what) for lap in w) for w in windows] for what in ("rows", "served"))
    differ = accumulate(sum(lap.changed[ROWS] for lap in window) for window in windows)
    recomputed = [a / b for a, b in zip(rows, tokens, strict=True)]
    axes.plot(ends, recomputed, color=blue, label="tokens recomputed", marker=marker)
    lines = [a / b for a, b in zip(served, texts, strict=True)]
    axes.plot(ends, lines, color=blue, linestyle="--", linewidth=1.2, label="lines reused", marker=marker)
    changed = [a / b for a, b in zip(differ, ends, strict=True)]
    axes.plot(ends, changed, color=RED, label="changed, so far", marker=marker)
    axes.set_ylim(bottom=0.0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("lines")
    axes.set_title("Classifier: shares; a token that is computed twice, to check, counts twice")


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
                under = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # the original's line goes on behind
                axes.text(cell["speed"] + 0.01 * max(speeds), place, text, va="center", fontsize=7, bbox=under)
            axes.axvline(1.0, color=GREY, linestyle="--", linewidth=1)
            axes.set_xlim(0.0, 1.45 * max(speeds))
            axes.set_xlabel("speed, original model = 1")
            axes.set_title(f"batches of {size}")
        stream, model = found["stream"], found["model"]
        figure.suptitle(
            f"{Path(model['name']).name}, {model['dtype']}: {stream['asked_of_all']} of {stream['texts']} texts of "
            f"{stream['name']}",
            x=0.01, ha="left", fontsize=10,
        )  # fmt: skip
        return png(figure)
