"""The plot of the demo: speed, and what the guard let pass, over the stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from attmemo.profiler.colors import color_of
from attmemo.profiler.plots import FAINT, RED, STYLE, png
from attmemo.profiler.race import ROWS, STOCK, Lap, standing

WINDOWS: Final = 24


def draw_race(result: Mapping[str, Any]) -> bytes:
    """The result of a race as a PNG."""
    laps = [Lap(**lap) for lap in result["laps"]]
    windows = windows_of(laps, result["every"])
    with mpl.rc_context(STYLE):
        figure = Figure((8.0, 5.6), dpi=120, layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        figure.suptitle(f"{result['model']}, {result['source']}", fontsize=12, x=0.02, ha="left")
        _draw_speed(above, windows)
        _draw_shares(below, windows)
        certified = next((place for place, lap in enumerate(laps) if lap.state == "certified"), None)
        for axes in (above, below):
            if certified is not None:
                at = sum(lap.texts for lap in laps[:certified])
                axes.axvline(at, color=FAINT, linewidth=1, linestyle=":", label="the guard is certified")
            axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
        return png(figure)


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
        style = {"color": color_of(name), "label": name, "linewidth": 2.2 if name == ROWS else 1.2}
        axes.plot([end for end, _ in pairs], [found.speed[name] for _, found in pairs], **style)  # type: ignore[arg-type]
    axes.axhline(1.0, color=color_of(STOCK), linewidth=1, linestyle="--", label=STOCK)
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel("speed, stock = 1")
    axes.set_title("Speed, window by window")


def _draw_shares(axes: Axes, windows: Sequence[Sequence[Lap]]) -> None:
    ends, blue = _ends(windows), color_of(ROWS)  # all of it is about rows
    tokens, texts = ([sum(getattr(lap, what) for lap in w) for w in windows] for what in ("tokens", "texts"))
    rows, served = ([sum(getattr(lap, what) for lap in w) for w in windows] for what in ("rows", "served"))
    differ = accumulate(sum(lap.changed[ROWS] for lap in window) for window in windows)
    axes.plot(ends, [a / b for a, b in zip(rows, tokens, strict=True)], color=blue, label="rows computed")
    lines = [a / b for a, b in zip(served, texts, strict=True)]
    axes.plot(ends, lines, color=blue, linestyle="--", linewidth=1.2, label="lines served")
    axes.plot(ends, [a / b for a, b in zip(differ, ends, strict=True)], color=RED, label="changed, so far")
    axes.set_ylim(bottom=0.0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("lines")
    axes.set_title("Shares; a row that is computed twice, to verify, counts twice")
