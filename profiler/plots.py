"""The figures of an evaluation and of `bench gather`: a result in, a PNG out.

A plot for which the result has no numbers is left out.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

Result = Mapping[str, Any]
"""An evaluation's result, `attmemo.evaluate/1`: what JSON can hold, shares between 0 and 1, times in ms."""

_INK, _FAINT, _GRID = "#26323a", "#6b7a85", "#e3e8ec"
_BLUE, _ORANGE, _GREEN, _GREY = "#2f6c99", "#cf7a30", "#4a8f6a", "#b8c4cc"
_PANEL_SIZE = (6.2, 3.7)
_DPI = 130


# --- reading a result of which any part may be missing ---------------------------------------------------


def as_number(value: object) -> float | None:
    """The value if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def section(result: Result, name: str) -> Mapping[str, Any]:
    value = result.get(name)
    return value if isinstance(value, Mapping) else {}


def entries_of(result: Result, name: str) -> list[Mapping[str, Any]]:
    value = result.get(name)
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, Sequence) else []


def _numbers(entries: Iterable[Mapping[str, Any]], key: str) -> list[float | None]:
    return [as_number(entry.get(key)) for entry in entries]


def _has(entries: Iterable[Mapping[str, Any]], key: str) -> bool:
    return any(number is not None for number in _numbers(entries, key))


def _as_nan(numbers: Iterable[float | None]) -> list[float]:
    """Gaps as NaN, which matplotlib leaves blank."""
    return [math.nan if number is None else number for number in numbers]


# --- the panels ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot of the report.

    Attributes
    ----------
    title, caption : str
        What it shows; how to read it.
    draw : callable
        Draws on the axes and returns whether the result held anything to draw.
    """

    title: str
    caption: str
    draw: Callable[[Axes, Result], bool]


def _draw_hit_rate(axes: Axes, result: Result) -> bool:
    layers = _with_number(result)
    if not _has(layers, "hit_rate"):
        return False
    has_ceiling = _has(layers, "exhaustive_hit_rate")
    places = _as_nan(_numbers(layers, "layer"))
    width = 0.4 if has_ceiling else 0.7
    shift = width / 2 if has_ceiling else 0.0
    left = [place - shift for place in places]
    rates = _as_nan(_numbers(layers, "hit_rate"))
    bars = axes.bar(left, rates, width, color=_BLUE, label="found by the embedder")
    off = [index for index, layer in enumerate(layers) if layer.get("gate") == "off"]
    for index in off:
        bars[index].set(facecolor="white", edgecolor=_BLUE, hatch="////", linewidth=0.8)
    if off:
        axes.bar([places[0]], [0], 0, facecolor="white", edgecolor=_BLUE, hatch="////", label="gate off: left alone")
    if has_ceiling:
        ceiling = _as_nan(_numbers(layers, "exhaustive_hit_rate"))
        axes.bar([place + shift for place in places], ceiling, width, color=_GREY, label="ceiling: exhaustive search")
    _layer_axis(axes, places)
    axes.set_ylabel("hit rate")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _legend(axes)
    return True


def _draw_similarity(axes: Axes, result: Result) -> bool:
    layers = _with_number(result)
    lines = (
        ("exhaustive_mean_similarity", "best in the database", _GREY, "s"),
        ("mean_true_similarity", "true, of what was found", _BLUE, "o"),
        ("mean_predicted_similarity", "predicted by the embedder", _ORANGE, "^"),
    )
    drawn = _lines(axes, layers, "layer", lines)
    if drawn:
        _layer_axis(axes, _as_nan(_numbers(layers, "layer")))
        threshold = as_number(result.get("threshold"))
        if threshold is not None:
            axes.axhline(threshold, color=_FAINT, linewidth=1, linestyle=(0, (4, 3)), label="threshold")
        axes.set_ylabel("mean similarity")
        _legend(axes)
    return drawn


def _draw_speed(axes: Axes, result: Result) -> bool:
    drawn = _lines(axes, sweep_points(result), "threshold", (("speedup", "speed-up", _BLUE, "o"),))
    if drawn:
        best = section(result, "time").get("best_exact")
        name = f"exact ({best})" if best else "exact"
        axes.axhline(1.0, color=_FAINT, linewidth=1, linestyle=(0, (4, 3)), label=name)
        axes.set_ylabel("times the speed of exact")
        _threshold_axis(axes, result)
        _legend(axes)
    return drawn


def _draw_quality(axes: Axes, result: Result) -> bool:
    lines = (
        ("hit_rate", "hit rate", _GREY, "s"),
        ("agreement", "same answer as exact", _BLUE, "o"),
        ("cosine_mean", "cosine to exact, mean", _GREEN, "^"),
    )
    drawn = _lines(axes, sweep_points(result), "threshold", lines)
    if drawn:
        axes.set_ylabel("share, or cosine")
        _threshold_axis(axes, result)
        _legend(axes)
    return drawn


def _draw_controls(axes: Axes, result: Result) -> bool:
    controls = entries_of(result, "controls")
    candidates = (
        ("hit_rate", "hit rate", _GREY),
        ("agreement", "same answer as exact", _BLUE),
        ("accuracy", "accuracy", _ORANGE),
        ("cosine_mean", "cosine to exact", _GREEN),
    )
    measures = tuple(measure for measure in candidates if _has(controls, measure[0]))
    if not measures:
        return False
    height = 0.8 / len(measures)
    lowest = 0.0
    for order, (key, label, color) in enumerate(measures):
        places = [index + (order - (len(measures) - 1) / 2) * height for index in range(len(controls))]
        values = _numbers(controls, key)
        axes.barh(places, _as_nan(values), height * 0.9, color=color, label=label)
        lowest = min(lowest, *(value or 0.0 for value in values))
        for place, value in zip(places, values, strict=True):
            if value is not None:
                text = f"{100 * value:.1f}%" if key != "cosine_mean" else f"{value:.3f}"
                axes.text(max(value, 0) + 0.012, place, text, va="center", fontsize=7, color=_FAINT)
    axes.set_yticks(range(len(controls)), [str(control.get("name", "?")) for control in controls])
    for tick in axes.get_yticklabels():
        tick.set_parse_math(False)
    axes.invert_yaxis()
    axes.set_xlim(lowest, 1.14)
    axes.set_xticks([tick / 4 for tick in range(math.floor(4 * lowest), 5)])
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x", color=_GRID)
    _legend(axes)
    return True


_PARTS = (
    ("lookup", "embed and search", _ORANGE),
    ("fetch_and_av", "V, fetch and A·V", _GREEN),
    ("misses_in_mixed_batches", "exact attention (misses)", _BLUE),
    ("other", "the rest of the model", _GREY),
)


def _draw_parts(axes: Axes, result: Result) -> bool:
    time = section(result, "time")
    exact = {name: as_number(value) for name, value in section(time, "exact_ms").items()}
    rows = [(f"exact: {name}", {"exact": value}) for name, value in exact.items() if value is not None]
    parts = {key: as_number(section(time, "parts_ms").get(key)) for key, _, _ in _PARTS}
    known = {key: value for key, value in parts.items() if value is not None}
    memoized = as_number(time.get("memoized_ms"))
    if known:
        rows.append(("memoized", known))
    elif memoized is not None:
        rows.append(("memoized", {"exact": memoized}))
    if not rows:
        return False
    colors = {"exact": "#8fa3b0", **{key: color for key, _, color in _PARTS}}
    labels = {key: label for key, label, _ in _PARTS}
    longest = max(sum(max(value, 0.0) for value in row.values()) for _, row in rows)
    for place, (name, row) in enumerate(rows):
        left = 0.0
        for key, value in row.items():
            axes.barh(place, max(value, 0.0), 0.55, left=left, color=colors[key], label=labels.get(key))
            left += max(value, 0.0)
        total = memoized if name == "memoized" and memoized is not None else left
        axes.text(left + 0.015 * longest, place, f"{total:.3g} ms", va="center", fontsize=8, color=_INK)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    for tick in axes.get_yticklabels():
        tick.set_parse_math(False)
    axes.invert_yaxis()
    axes.set_xlim(0, max(longest, 1e-9) * 1.18)
    axes.set_xlabel(f"milliseconds per {time.get('per') or 'sequence'}")
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x", color=_GRID)
    if known:
        _legend(axes, columns=3)
    return True


PANELS: tuple[Panel, ...] = (
    Panel(
        "Hit rate by layer",
        "Share of sequences for which the layer used a stored map. The ceiling is what an exhaustive search with "
        "the true similarity would have found at the same threshold.",
        _draw_hit_rate,
    ),
    Panel(
        "Similarity by layer",
        "Mean similarity between a layer's own map and the stored one. The prediction should lie below the truth.",
        _draw_similarity,
    ),
    Panel(
        "Speed against threshold",
        "Speed against the best exact path of the same run, lookup and misses included. Above 1 memoization pays.",
        _draw_speed,
    ),
    Panel(
        "Quality against threshold",
        "What a lower threshold costs: how often the answer stays that of the exact model.",
        _draw_quality,
    ),
    Panel(
        "Memoized against the controls",
        "The controls replace the map that was looked up by a layer's mean map or by a random stored map, or reuse "
        "only the answers of exact duplicates. Memoization should beat all of them.",
        _draw_controls,
    ),
    Panel("Where the time goes", "Mean time, exact paths beside the memoized one.", _draw_parts),
)
"""The plots, in reading order."""


def _with_number(result: Result) -> list[Mapping[str, Any]]:
    return [layer for layer in entries_of(result, "layers") if as_number(layer.get("layer")) is not None]


def sweep_points(result: Result) -> list[Mapping[str, Any]]:
    """The sweep's points in order of threshold."""
    points = [point for point in entries_of(result, "sweep") if as_number(point.get("threshold")) is not None]
    return sorted(points, key=lambda point: float(point["threshold"]))


def _lines(
    axes: Axes, entries: Sequence[Mapping[str, Any]], x: str, lines: Iterable[tuple[str, str, str, str]]
) -> bool:
    """Draw a line for each (key, label, color, marker) that has a number."""
    drawn = False
    for key, label, color, marker in lines:
        if _has(entries, key):
            xs, ys = _as_nan(_numbers(entries, x)), _as_nan(_numbers(entries, key))
            axes.plot(xs, ys, color=color, marker=marker, markersize=4.5, linewidth=1.6, label=label)
            drawn = True
    return drawn


def _layer_axis(axes: Axes, places: Sequence[float]) -> None:
    axes.set_xlabel("layer")
    axes.set_xlim(min(places) - 0.6, max(places) + 0.6)
    if len(places) <= 16:
        axes.set_xticks(places, [f"{place:g}" for place in places])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))


def _threshold_axis(axes: Axes, result: Result) -> None:
    axes.set_xlabel("similarity threshold")
    chosen = as_number(result.get("threshold"))
    if chosen is not None:
        axes.axvline(chosen, color=_FAINT, linewidth=1, linestyle=":", label=f"in use: {chosen:.3g}")


def _legend(axes: Axes, columns: int = 2) -> None:
    """Below the plot, where no data can hide behind it."""
    handles, labels = axes.get_legend_handles_labels()
    below = -0.2 if axes.get_xlabel() else -0.1
    legend = axes.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(0.0, below),
        ncols=columns,
        frameon=False,
        fontsize=8.5,
        labelcolor=_INK,
        borderaxespad=0.0,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _style(axes: Axes) -> None:
    axes.grid(visible=True, axis="y", color=_GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    axes.tick_params(colors=_FAINT, labelcolor=_INK, labelsize=8.5)
    axes.xaxis.label.set(color=_INK, fontsize=9)
    axes.yaxis.label.set(color=_INK, fontsize=9)


def _draw(panel: Panel, axes: Axes, result: Result) -> bool:
    _style(axes)
    return panel.draw(axes, result)


def present_panels(result: Result) -> list[Panel]:
    """The panels for which the result has numbers."""
    return [panel for panel in PANELS if panel.draw(Figure().subplots(), result)]


def draw_overview(result: Result, heading: str) -> bytes:
    """Draw every panel the result has numbers for in one figure.

    Parameters
    ----------
    result : mapping
        An evaluation's result.
    heading : str
        What stands above the panels; long lines are wrapped.

    Returns
    -------
    bytes
        A PNG.
    """
    panels = present_panels(result)
    columns = min(2, max(1, len(panels)))
    rows = max(1, math.ceil(len(panels) / columns))
    width, height = _PANEL_SIZE
    figure = Figure(
        figsize=(max(columns * width, 8.0), rows * height * 1.08 + 0.8),
        layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.15),
    )
    heading = "\n".join(line for part in heading.splitlines() for line in textwrap.wrap(part, 66 * columns))
    title = figure.suptitle(heading, fontsize=12, color=_INK, x=0.02, ha="left", linespacing=1.5)
    title.set_parse_math(False)
    if not panels:
        figure.text(0.5, 0.4, "This result holds no measurements to plot.", ha="center", color=_FAINT)
    for place, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, place)
        _draw(panel, axes, result)
        axes.set_title(panel.title, fontsize=11, color=_INK, loc="left")
    return _png(figure)


def draw_alone(panel: Panel, result: Result) -> bytes:
    figure = Figure(figsize=_PANEL_SIZE, layout="constrained")
    _draw(panel, figure.subplots(), result)
    return _png(figure)


_GATHER_LINES = (
    ("copy", "fresh copy", "#9c5a8a", "s", "-"),
    ("copy_reused", "copy into a kept buffer", _GREY, "D", "-"),
    ("map", "map + unmap", _BLUE, "o", "-"),
    ("view", "views, one product each", _GREEN, "^", "-"),
    ("direct", "direct, where they lie", _ORANGE, "v", "-"),
    ("contiguous", "contiguous: no fetch", _INK, "", "--"),
)
_GATHER_AXES = (("batch", "sequences in a batch", "length", "tokens"), ("length", "tokens", "batch", "sequences"))


def _swept(result: Result, axis: str) -> list[Mapping[str, Any]]:
    """The points of one axis of a sweep over batches and lengths, in order."""
    points = [point for point in entries_of(result, "sweep") if point.get("axis") == axis]
    return sorted(
        (point for point in points if as_number(point.get(axis)) is not None), key=lambda point: float(point[axis])
    )


def draw_gather(result: Result) -> bytes:
    """Draw what a batch of maps costs with its product, by variant: against batch size, and against length.

    Parameters
    ----------
    result : mapping
        Of `bench_gather`, with the points of `sweep_gather` as ``sweep``: ``axis``, ``batch``, ``length`` and
        ``<variant>_matmul_ms``, milliseconds. A variant without numbers is left out.

    Returns
    -------
    bytes
        A PNG.
    """
    figure = Figure(figsize=(10.4, 5.2), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.03))
    conditions = section(result, "conditions")
    pages = as_number(result.get("page_bytes"))
    said = [f"{conditions.get('heads', '?')} heads", str(conditions.get("dtype", "?")), str(result.get("residency"))]
    said += [] if pages is None else [f"pages of {pages / 1024:g} KiB" if pages < 1 << 20 else "pages of 2 MiB"]
    said += [f"{conditions['threads']} threads"] if "threads" in conditions else []
    heading = f"Fetch of a batch of maps with the product A·V: {', '.join(said)}"
    title = figure.suptitle(heading, fontsize=12, color=_INK, x=0.02, ha="left")
    title.set_parse_math(False)
    panels: list[Axes] = []
    for place, (axis, label, other, unit) in enumerate(_GATHER_AXES, start=1):
        axes = figure.add_subplot(1, 2, place, sharey=panels[0] if panels else None)
        panels.append(axes)
        _style(axes)
        swept = _swept(result, axis)
        for name, text, color, marker, line in _GATHER_LINES:
            if _has(swept, f"{name}_matmul_ms"):
                ys = _as_nan(_numbers(swept, f"{name}_matmul_ms"))
                xs = _as_nan(_numbers(swept, axis))
                axes.plot(xs, ys, line, color=color, marker=marker, markersize=4.5, linewidth=1.6, label=text)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = [float(point[axis]) for point in swept]
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel(label)
        held = f" ({swept[0].get(other)} {unit})" if swept else ": nothing measured"
        axes.set_title(f"Against {axis}{held}", fontsize=11, color=_INK, loc="left")
    panels[0].set_ylabel("milliseconds, lower is better")
    # What both panels share is said once.
    handles = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if handles:
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False, labelcolor=_INK
        )
    return _png(figure)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, facecolor="white")
    return buffer.getvalue()


_FAMILY_COLUMNS = 4


def draw_families(result: Result) -> bytes:
    """Draw how much faster a forward is with every row served, and at most could be, family by family.

    Parameters
    ----------
    result : mapping
        Of `bench_families`.

    Returns
    -------
    bytes
        A PNG: a panel for each family; a pair of bars, served and ceiling, for each shape and precision.
    """
    rows = entries_of(result, "rows")
    families = list(dict.fromkeys(str(row["family"]) for row in rows))
    lines = max(1, -(-len(families) // _FAMILY_COLUMNS))
    figure = Figure(figsize=(15.5, 0.9 + 2.9 * lines), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    conditions = section(result, "conditions")
    said = f"{conditions.get('layers', '?')} layers of width {conditions.get('hidden', '?')}"
    title = figure.suptitle(
        f"Time of an exact forward over that of one with every row served ({said}): filled as measured, "
        "outlined without lookup and fetch",
        fontsize=12, color=_INK, x=0.01, ha="left",
    )  # fmt: skip
    title.set_parse_math(False)
    highest = max([1.0, *(number for key in ("speedup", "ceiling") for number in _numbers(rows, key) if number)])
    for place, family in enumerate(families, start=1):
        axes = figure.add_subplot(lines, _FAMILY_COLUMNS, place)
        _style(axes)
        own = [row for row in rows if row["family"] == family]
        shapes = sorted({(int(row["length"]), int(row["batch"])) for row in own})
        for shift, (dtype, color) in enumerate((("float32", _BLUE), ("bfloat16", _ORANGE))):
            found = {(int(row["length"]), int(row["batch"])): row for row in own if row["dtype"] == dtype}
            xs = [number + 0.4 * shift - 0.2 for number in range(len(shapes))]
            for key, filled in (("ceiling", False), ("speedup", True)):
                ys = _as_nan(as_number(found.get(shape, {}).get(key)) for shape in shapes)
                axes.bar(
                    xs, [y - 1.0 for y in ys], bottom=1.0, width=0.36, color=color if filled else "none",
                    edgecolor=color, linewidth=1.0, label=dtype if filled else None,
                )  # fmt: skip
        axes.axhline(1.0, color=_INK, linewidth=0.9)
        axes.set_yscale("log", base=2)
        axes.set_ylim(0.75, 1.2 * highest)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.set_title(family, fontsize=10.5, color=_INK, loc="left")
        axes.xaxis.set_major_locator(FixedLocator(list(range(len(shapes)))))
        axes.set_xticklabels([f"{length}\nx {batch}" for length, batch in shapes], fontsize=7.5)
        if place == 1:
            axes.legend(fontsize=8, frameon=False, loc="upper left", ncols=2)
    return _png(figure)
