"""The plots of a report and of `attmemo inspect`: measurements in, PNG out."""

from __future__ import annotations

import datetime
import io
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from attmemo.profiler.tables import Result

Lines = Mapping[str, tuple[str, str, str]]  # by key: label, color, style

INK, FAINT, GRID = "#26323a", "#6b7a85", "#d5dde2"
BLUE, ORANGE, GREEN, GREY = "#2f6c99", "#cf7a30", "#4a8f6a", "#8fa1ac"
PURPLE, GOLD, RED = "#9c5a8a", "#b59a2e", "#b3403a"
COLUMN_CHARACTERS: Final = 66  # of a heading, above one column of panels
_PALE: Final = 0.4  # of bars of controls
STYLE: Final[dict[Any, Any]] = {
    "axes.axisbelow": True, "axes.edgecolor": GREY, "axes.grid": True, "axes.grid.axis": "y", "axes.labelcolor": INK,
    "axes.labelsize": 9, "axes.spines.right": False, "axes.spines.top": False, "axes.titlecolor": INK,
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
    reuse: tuple[str, ...] = ("maps", "rows")
    column: str = ""


def _draw_hit_rate(axes: Axes, result: Result) -> None:
    layers = result["layers"]
    places, ceiling = numbers(layers, "layer"), numbers(layers, "exhaustive_hit_rate")
    axes.bar(places, numbers(layers, "hit_rate"), 0.7, color=BLUE, label="served")
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


def _by_threshold(axes: Axes, result: Result, lines: Lines, label: str = "") -> None:
    """Draw lines over the thresholds of a sweep; without a label they are shares of sequences."""
    _draw_lines(axes, result["sweep"], "threshold", lines)
    _name_shares(axes, label)
    axes.set_xlabel("similarity threshold")
    chosen = result.get("threshold")
    if isinstance(chosen, float):  # else one for each layer
        axes.axvline(chosen, color=FAINT, linewidth=1, linestyle=":", label=f"in use: {chosen:.3g}")


def _by_share(axes: Axes, result: Result, lines: Lines, label: str = "", control: str = "") -> None:
    """Draw lines over the share of rows computed, and what each control gives of this key, hollow and grey."""
    _draw_lines(axes, result["sweep"], "share_computed", lines)
    controls = [row for row in (result.get("controls") or ())[1:] if row.get("share_computed") is not None]
    for row, mark in zip(controls, "sDo", strict=False):
        if row.get(control) is not None:
            label_of = f"control: {row['name']}"
            at = row["share_computed"], row[control]
            axes.plot(*at, mark, color=FAINT, fillstyle="none", markersize=7, label=label_of)
    _name_shares(axes, label)
    axes.set_xlim(0.0, 1.02)
    axes.set_xlabel("share of tokens recomputed")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _name_shares(axes: Axes, label: str) -> None:
    axes.set_ylabel(label or "share of sequences")
    if not label:
        axes.set_ylim(0.0, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _draw_speed(axes: Axes, result: Result) -> None:
    _by_threshold(axes, result, {"speedup": ("memoized", BLUE, "o-")}, "times the speed of exact")
    axes.axhline(1.0, color=FAINT, linewidth=1, linestyle="--", label="exact")


def _draw_speed_by_share(axes: Axes, result: Result) -> None:
    shares = numbers(result["sweep"], "share_computed")
    least = min([0.9, *(share for share in shares if share > 0.0)])
    line = [least + (1.0 - least) * step / 50 for step in range(51)]
    axes.plot(line, [1.0 / share for share in line], "--", color=FAINT, linewidth=1, label="limit: 1 / share")
    packed = ("against packed blocks", BLUE, "o-")
    lines = {"speedup_packed": packed, "speedup": ("against the original model", GREY, "s-")}
    _by_share(axes, result, lines, "times the speed")
    axes.set_ylim(bottom=0.0)


_SHARES: Final[Lines] = {"hit_rate": ("hit rate", GREY, "s-"), "agreement": ("same answer as exact", BLUE, "o-")}
_COSINES: Final[Lines] = {"cosine_mean": ("mean", GREEN, "^-"), "cosine_p1": ("lowest 1 %", ORANGE, "v-")}
_TO_EXACT: Final = "cosine to exact"


def _draw_controls(axes: Axes, result: Result) -> None:
    bars = {
        "hit_rate": ("hit rate", GREY), "agreement": ("same answer as exact", BLUE), "accuracy": ("accuracy", ORANGE),
    }  # fmt: skip
    _draw_bars(axes, result["controls"], bars, "{:.1%}")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _draw_control_cosines(axes: Axes, result: Result) -> None:
    _draw_bars(axes, result["controls"], {"cosine_mean": ("cosine to exact, mean", GREEN)}, "{:.3f}")


def _draw_bars(axes: Axes, controls: Sequence[Result], bars: Mapping[str, tuple[str, str]], form: str) -> None:
    """Draw a bar for each key (label, color) that has a number: of what was measured, and paler of the controls."""
    known = [key for key in bars if not all(map(math.isnan, numbers(controls, key)))]
    height = 0.8 / max(1, len(known))
    for order, key in enumerate(known):
        label, color = bars[key]
        for place, value in enumerate(numbers(controls, key)):
            middle, first = place - 0.4 + (order + 0.5) * height, place == 0
            axes.barh(middle, value, 0.9 * height, color=color, alpha=1.0 if first else _PALE, label=label * first)
            if not math.isnan(value):
                axes.text(max(value, 0) + 0.012, middle, form.format(value), va="center", fontsize=7, color=FAINT)
    axes.set_xlim(right=1.14)
    _name_bars(axes, [f"{'control: ' * (place > 0)}{control['name']}" for place, control in enumerate(controls)])
    for tick in axes.get_yticklabels()[1:]:
        tick.set_color(FAINT)


_PARTS: Final = {
    "exact": ("", GREY), "lookup": ("lookup", ORANGE), "fetch_and_av": ("V, fetch and A·V", GREEN),
    "misses_in_mixed_batches": ("exact attention (misses)", BLUE), "plan": ("plan of rows", PURPLE),
    "fetch": ("fetch of rows", GREEN), "blocks": ("blocks, rows computed", BLUE),
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
    _name_bars(axes, list(bars))


PANELS: Final = (
    Panel("layers", "Hit rate by layer", "Share of sequences for which the layer used a stored map. The ceiling is "
          "the hit rate of an exhaustive search with the true similarity at the same threshold.", _draw_hit_rate),
    Panel("layers", "Similarity by layer", "Mean similarity between a layer's own map and the stored one. The "
          "prediction should lie below the truth.", _draw_similarity),
    Panel("sweep", "Speed by threshold", "Speed against the exact model of the same run, with lookups and misses. "
          "Above 1 memoization pays.", _draw_speed, ("maps",)),
    Panel("sweep", "Speed by share of tokens recomputed", "Each point is a threshold. Without any other work the "
          "speed against packed blocks would be one over the share. Against the original model it can be higher: no "
          "padding is computed.",
          _draw_speed_by_share, ("rows",)),
    Panel("time", "Where the time goes", "Time of the median pass, exact paths beside the memoized one.", _draw_time),
    Panel("sweep", "Same answers by threshold", "The price of a lower threshold: fewer answers are those of the exact "
          "model.", partial(_by_threshold, lines=_SHARES), ("maps",)),
    Panel("sweep", "Cosine by threshold", "The same as a distance: how far outputs are from the exact ones.",
          partial(_by_threshold, lines=_COSINES, label=_TO_EXACT), ("maps",), "cosine_mean"),
    Panel("sweep", "Same answers by share of tokens recomputed", "Each point is a threshold. Beside it, grey, the "
          "controls, with the rows computed that the records leave.",
          partial(_by_share, lines=_SHARES, control="agreement"), ("rows",)),
    Panel("sweep", "Cosine by share of tokens recomputed", "The same as a distance: how far outputs are from the "
          "exact ones.", partial(_by_share, lines=_COSINES, label=_TO_EXACT, control="cosine_mean"), ("rows",),
          "cosine_mean"),
    Panel("controls", "Against the controls: shares", "The controls, paler, serve means, zeros or any other record "
          "in place of the one that was found, or only the answers of exact duplicates. Memoization should beat all "
          "of them.", _draw_controls, column="agreement"),
    Panel("controls", "Against the controls: cosine", "The same controls, as a distance.", _draw_control_cosines,
          column="cosine_mean"),
)  # fmt: skip


def present_panels(result: Result) -> list[Panel]:
    """The panels whose part the result has."""
    return [panel for panel in PANELS if result.get("reuse", "maps") in panel.reuse and _is_measured(panel, result)]


def _is_measured(panel: Panel, result: Result) -> bool:
    part = result.get(panel.part) or ()
    return bool(part) and (not panel.column or not all(map(math.isnan, numbers(part, panel.column))))


def draw_panels(panels: Sequence[Panel], result: Result, heading: str | None = None) -> bytes:
    """Draw panels in one figure, two beside each other, as a PNG.

    A heading stands above the panels, each of which then has its title; long lines are wrapped. Without one the figure
    is bare and its background transparent.
    """
    columns, rows = min(2, max(1, len(panels))), max(1, math.ceil(len(panels) / 2))
    with mpl.rc_context(STYLE):
        # A bare figure is small, so that its text can be read on a phone.
        size, dpi = ((4.9, 3.2), 180) if heading is None else ((6.2 * columns, 3.7 * rows + 0.8), 130)
        figure = Figure(size, dpi, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
        if heading is not None:
            wide = COLUMN_CHARACTERS * columns
            lines = [line for part in heading.splitlines() for line in textwrap.wrap(part, wide)]
            figure.suptitle("\n".join(lines), fontsize=12, x=0.02, ha="left", linespacing=1.5)
        if not panels:
            figure.text(0.5, 0.4, "This result holds no measurements to plot.", ha="center")
        for place, panel in enumerate(panels, start=1):
            axes = figure.add_subplot(rows, columns, place)
            panel.draw(axes, result)
            # Below the plot, where no data can hide behind it.
            if axes.get_legend_handles_labels()[0]:
                axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.22 if axes.get_xlabel() else -0.12), ncols=2)
            if heading is not None:
                axes.set_title(panel.title)
        return png(figure, transparent=heading is None)


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


def _name_bars(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")


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
