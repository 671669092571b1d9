"""The look of the plots, and the kinds of plots that several figures share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogFormatter, NullFormatter

from attmemo.profiler.plots import BLUE, GREEN, GREY, INK, ORANGE, STYLE, png

COLORS = (BLUE, ORANGE, GREEN, GREY, "#9c5a8a", INK)
MANY = 8  # groups whose names fit side by side
PAPER = "#b23a48"  # the colour of the paper's values, in every plot


def sheet(columns: int = 1, title: str = "", width: float = 5.2, height: float = 3.6) -> tuple[Figure, list[Axes]]:
    """A figure with a row of axes."""
    with mpl.rc_context({**STYLE, "axes.prop_cycle": mpl.cycler(color=COLORS)}):
        layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
        figure = Figure(figsize=(width * columns, height), dpi=110, layout=layout)
        found = figure.subplots(1, columns, squeeze=False)[0]
        if title:
            figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure, list(found)


def bars(
    axes: Axes, groups: Sequence[str], series: Mapping[str, Sequence[float | None]], colors: Sequence[str] = COLORS
) -> None:
    """Bars side by side in groups; None leaves a gap; a series named as the paper's has the paper's colour.

    The names of many groups stand upright.
    """
    width = 0.8 / len(series)
    for place, (name, values) in enumerate(series.items()):
        at = [group + (place - (len(series) - 1) / 2) * width for group in range(len(groups))]
        color = PAPER if name.startswith("paper") else colors[place % len(colors)]
        kept = [(x, value) for x, value in zip(at, values, strict=True) if value is not None]
        axes.bar([x for x, _ in kept], [value for _, value in kept], 0.92 * width, color=color, label=name)
    many = len(groups) > MANY
    names = [group.replace("\n", ", ") for group in groups] if many else list(groups)
    axes.set_xticks(range(len(groups)), names, rotation=90 if many else 0)


def as_png(figure: Figure) -> bytes:
    """The figure as a file; axes with logarithms have plain numbers."""
    for axes in figure.axes:
        for axis, scale in ((axes.xaxis, axes.get_xscale()), (axes.yaxis, axes.get_yscale())):
            if scale == "log":
                axis.set_minor_formatter(NullFormatter())
                if isinstance(axis.get_major_formatter(), LogFormatter):
                    axis.set_major_formatter("{x:g}")
    with mpl.rc_context(STYLE):
        return png(figure)


def legend(axes: Axes, **settings: object) -> None:
    """A legend in the style of the page."""
    with mpl.rc_context(STYLE):
        axes.legend(**settings)  # type: ignore[arg-type]
