"""The plots of a report and of `attmemo inspect`: measurements in, PNG out."""

from __future__ import annotations

import datetime
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.rcsetup import cycler
from matplotlib.ticker import MaxNLocator, PercentFormatter

from attmemo.profiler.tables import Result

Lines = Mapping[str, tuple[str, str, str]]  # by key: label, color, style

INK, FAINT, GRID = "#26323a", "#6b7a85", "#d5dde2"
BLUE, ORANGE, GREEN, GREY = "#2f6c99", "#cf7a30", "#4a8f6a", "#8fa1ac"
PURPLE, GOLD, RED = "#9c5a8a", "#b59a2e", "#b3403a"
STYLE: Final[dict[Any, Any]] = {
    "axes.axisbelow": True, "axes.edgecolor": GREY, "axes.grid": True, "axes.grid.axis": "y", "axes.labelcolor": INK,
    "axes.labelsize": 9, "axes.prop_cycle": cycler(color=[BLUE, ORANGE, GREEN, PURPLE, GOLD, RED, GREY]),
    "axes.spines.right": False, "axes.spines.top": False, "axes.titlecolor": INK,
    "axes.titlelocation": "left", "axes.titlesize": 11, "grid.color": GRID,
    "legend.borderaxespad": 0.0, "legend.fontsize": 8.5, "legend.frameon": False, "legend.labelcolor": INK,
    "lines.linewidth": 1.6, "lines.markersize": 4.5, "text.color": INK, "text.parse_math": False,
    "xtick.color": FAINT, "xtick.labelcolor": INK, "xtick.labelsize": 8.5,
    "ytick.color": FAINT, "ytick.labelcolor": INK, "ytick.labelsize": 8.5,
}  # fmt: skip


def numbers(rows: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """A column of rows, with NaN for None or nothing: matplotlib leaves a gap."""
    return [math.nan if row.get(key) is None else float(row[key]) for row in rows]


def png(figure: Figure, transparent: bool = False) -> bytes:
    """The figure as a file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi="figure", facecolor="white", transparent=transparent)
    return buffer.getvalue()


class Panel(NamedTuple):
    """One plot: the part of the result that it shows, its title, how to read it, and the function that draws it.

    It needs a number in one column of the part, if `column` names one.
    """

    part: str
    title: str
    caption: str
    draw: Callable[[Axes, Result], None]
    column: str = ""


def _draw_hit_rate(axes: Axes, result: Result) -> None:
    layers = result["layers"]
    places, ceiling = numbers(layers, "layer"), numbers(layers, "exhaustive_hit_rate")
    axes.bar(places, numbers(layers, "hit_rate"), 0.7, color=BLUE, label="reused")
    if not all(map(math.isnan, ceiling)):
        ends = [place - 0.42 for place in places], [place + 0.42 for place in places]
        axes.hlines(ceiling, *ends, color=ORANGE, linewidth=2, label="ceiling: exhaustive search")
    off = [place for place, layer in zip(places, layers, strict=True) if layer.get("gate") == "off"]
    if off:
        axes.plot(off, [0.02] * len(off), "x", color=FAINT, label="gate off: left exact", clip_on=False)
    axes.set_ylabel("hit rate")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _number_layers(axes, places)


def _draw_similarity(axes: Axes, result: Result) -> None:
    lines = {
        "exhaustive_mean_similarity": ("best in the database", GREY, "s-"),
        "mean_true_similarity": ("true, of what was found", BLUE, "o-"),
        "mean_predicted_similarity": ("predicted by the embedder", ORANGE, "^-"),
        "threshold": ("threshold", FAINT, "--"),
    }
    _draw_lines(axes, result["layers"], "layer", lines)
    axes.set_ylabel("mean similarity")
    _number_layers(axes, numbers(result["layers"], "layer"))


def _sweep(axes: Axes, result: Result, lines: Lines, label: str = "", control: str = "") -> None:
    """Draw lines over the thresholds of a sweep; of rows over the share of tokens recomputed, which each gives.

    Without a label they are shares of sequences. Of rows, what each control gives of the key `control` stands beside
    them, hollow and grey.
    """
    by_share, chosen = result.get("reuse") == "rows", result.get("threshold")
    _draw_lines(axes, result["sweep"], "share_computed" if by_share else "threshold", lines)
    axes.set_ylabel(label or "share of sequences")
    if not label:
        axes.set_ylim(0.0, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if by_share:
        for row, mark in zip((result.get("controls") or ())[1:], "sDo", strict=False):
            at = row.get("share_computed"), row.get(control)
            if None not in at:
                label_of = f"control: {row['name']}"
                axes.plot(*at, mark, color=FAINT, fillstyle="none", markersize=7, label=label_of)
        axes.set_xlim(0.0, 1.02)
        axes.set_xlabel("share of tokens recomputed")
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        return
    axes.set_xlabel("similarity threshold")
    if isinstance(chosen, float):  # else one for each layer
        axes.axvline(chosen, color=FAINT, linewidth=1, linestyle=":", label=f"in use: {chosen:.3g}")


def _draw_speed(axes: Axes, result: Result) -> None:
    packed, stock = ("against packed blocks", BLUE, "o-"), ("against the original model", GREY, "s-")
    _sweep(axes, result, {"speedup_packed": packed, "speedup": stock}, "times the speed")
    axes.axhline(1.0, color=FAINT, linewidth=1, linestyle="--", label="exact")
    shares = [share for share in numbers(result["sweep"], "share_computed") if share > 0.0]
    if shares:
        least = min(0.9, *shares)
        line = [least + (1.0 - least) * step / 50 for step in range(51)]
        axes.plot(line, [1.0 / share for share in line], ":", color=FAINT, linewidth=1, label="limit: 1 / share")
    axes.set_ylim(bottom=0.0)


_SHARES: Final[Lines] = {"hit_rate": ("hit rate", GREY, "s-"), "agreement": ("same answer as exact", BLUE, "o-")}
_COSINES: Final[Lines] = {"cosine_mean": ("mean", GREEN, "^-"), "cosine_p1": ("lowest 1 %", ORANGE, "v-")}

_PARTS: Final = {
    "exact": ("", GREY), "lookup": ("lookup", ORANGE), "fetch_and_av": ("V, fetch and A·V", GREEN),
    "misses_in_mixed_batches": ("exact attention (misses)", BLUE), "plan": ("plan of rows", PURPLE),
    "fetch": ("fetch of rows", GREEN), "blocks": ("blocks, tokens recomputed", BLUE),
    "other": ("the rest of the model", "#b4c1c9"),
}  # fmt: skip


def _draw_time(axes: Axes, result: Result) -> None:
    time = result["time"]
    bars = {f"exact: {name}": {"exact": spent} for name, spent in time["exact_ms"].items()}
    bars["memoized"] = time["parts_ms"]
    totals = [*time["exact_ms"].values(), time["memoized_ms"]]
    ends = [sum(parts.values()) for parts in bars.values()]
    for place, (parts, end, total) in enumerate(zip(bars.values(), ends, totals, strict=True)):
        left = 0.0
        for key, spent in parts.items():
            label, color = _PARTS[key]
            axes.barh(place, spent, 0.55, left=left, color=color, label=label or None)
            left += spent
        axes.text(end + 0.015 * max(ends), place, f"{total:.3g} ms", va="center", fontsize=8)
    axes.set_xlim(0, max(ends) * 1.18)
    axes.set_xlabel(f"milliseconds per {time['per']}")
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")


PANELS: Final = (
    Panel("layers", "Hit rate by layer", "Share of sequences for which the layer used a stored map. The ceiling is "
          "the hit rate of an exhaustive search with the true similarity at the same threshold.", _draw_hit_rate),
    Panel("layers", "Similarity by layer", "Mean similarity between a layer's own map and the stored one. The "
          "prediction should lie below the truth.", _draw_similarity),
    Panel("sweep", "Speed", "Each point is a threshold, timed with lookups and misses. Above 1 reuse pays. Of rows: "
          "without any other work the speed against packed blocks would be one over the share; against the original "
          "model it can be higher, since no padding is computed.", _draw_speed),
    Panel("time", "Where the time goes", "Time of the median pass, exact paths beside the memoized one.", _draw_time),
    Panel("sweep", "Same answers", "The price of a lower threshold: fewer answers are those of the exact model. Grey: "
          "controls, which the records should beat.", partial(_sweep, lines=_SHARES, control="agreement")),
    Panel("sweep", "Cosine", "The same as a distance: how far outputs are from the exact ones.",
          partial(_sweep, lines=_COSINES, label="cosine to exact", control="cosine_mean"), "cosine_mean"),
)  # fmt: skip


def present_panels(result: Result) -> list[Panel]:
    """The panels whose part the result has."""
    return [panel for panel in PANELS if _is_measured(panel, result)]


def _is_measured(panel: Panel, result: Result) -> bool:
    part = result.get(panel.part) or ()
    return bool(part) and (not panel.column or not all(map(math.isnan, numbers(part, panel.column))))


def draw_panel(panel: Panel, result: Result) -> bytes:
    """Draw a panel as a PNG without a background, so small that its text can be read on a phone."""
    with mpl.rc_context(STYLE):
        figure = Figure((4.9, 3.2), dpi=180, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
        axes = figure.subplots()
        panel.draw(axes, result)
        # Below the plot, where no data can hide behind it.
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.22 if axes.get_xlabel() else -0.12), ncols=2)
        return png(figure, transparent=True)


def _draw_lines(axes: Axes, rows: Sequence[Result], x: str, lines: Lines) -> None:
    """Draw a line for each key that has a number, in order of `x`."""
    rows = sorted(rows, key=lambda row: float(row[x]))
    for key, (label, color, style) in lines.items():
        values = numbers(rows, key)
        if not all(map(math.isnan, values)):
            axes.plot(numbers(rows, x), values, style, color=color, label=label)


def _number_layers(axes: Axes, places: Sequence[float]) -> None:
    axes.set_xlabel("layer")
    axes.set_xlim(min(places) - 0.6, max(places) + 0.6)
    if len(places) <= 16:
        axes.set_xticks(places, [f"{place:g}" for place in places])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))


def plot_history(history: Sequence[Mapping[str, Any]]) -> bytes:
    """Share of the rows that was computed in each period, and its requests, as PNG."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.2), dpi=150, layout="constrained")
        rows, requests = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        begins = [datetime.datetime.fromtimestamp(part["begin"]).astimezone() for part in history]
        widths = [datetime.timedelta(seconds=part["seconds"]) for part in history]
        shares = [part["rows"] / max(part["tokens"], 1) for part in history]
        rows.bar(begins, shares, widths, align="edge", color=BLUE)
        rows.axhline(1.0, color=GREY, linewidth=1, linestyle="--")
        rows.set_title("Tokens recomputed, checks included")
        rows.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        rows.set_ylim(0.0, max(1.05, *shares))
        requests.bar(begins, [part["requests"] for part in history], widths, align="edge", color=FAINT)
        requests.set_title("Requests")
        locator = AutoDateLocator(tz=begins[0].tzinfo)  # type: ignore[no-untyped-call]
        requests.xaxis.set_major_locator(locator)
        form = ConciseDateFormatter(locator, tz=begins[0].tzinfo)  # type: ignore[no-untyped-call]
        requests.xaxis.set_major_formatter(form)
        return png(figure)
