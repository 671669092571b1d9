"""Write what an evaluation found: a page to read, a figure to show, the numbers to compute with.

The page shows the figure's panels one by one between its tables. Whatever the result lacks (a key that is
absent, None, or a number that is not finite) is left out; a report is never refused for a missing part.
"""

from __future__ import annotations

import base64
import io
import json
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from attmemo.errors import AttmemoError

__all__ = ["PANELS", "Panel", "Table", "draw_overview", "make_tables", "write_report"]

Result = Mapping[str, Any]
"""An evaluation's result, `attmemo.evaluate/1`: what JSON can hold, shares between 0 and 1, times in ms."""

_INK, _FAINT, _GRID = "#26323a", "#6b7a85", "#e3e8ec"
_BLUE, _ORANGE, _GREEN, _GREY = "#2f6c99", "#cf7a30", "#4a8f6a", "#b8c4cc"
_PANEL_SIZE = (6.2, 3.7)
_DPI = 130


# --- reading a result of which any part may be missing ---------------------------------------------------


def _number(value: object) -> float | None:
    """The value if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _section(result: Result, name: str) -> Mapping[str, Any]:
    value = result.get(name)
    return value if isinstance(value, Mapping) else {}


def _entries(result: Result, name: str) -> list[Mapping[str, Any]]:
    value = result.get(name)
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, Sequence) else []


def _numbers(entries: Iterable[Mapping[str, Any]], key: str) -> list[float | None]:
    return [_number(entry.get(key)) for entry in entries]


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
        threshold = _number(result.get("threshold"))
        if threshold is not None:
            axes.axhline(threshold, color=_FAINT, linewidth=1, linestyle=(0, (4, 3)), label="threshold")
        axes.set_ylabel("mean similarity")
        _legend(axes)
    return drawn


def _draw_speed(axes: Axes, result: Result) -> bool:
    drawn = _lines(axes, _sweep(result), "threshold", (("speedup", "speed-up", _BLUE, "o"),))
    if drawn:
        best = _section(result, "time").get("best_exact")
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
    drawn = _lines(axes, _sweep(result), "threshold", lines)
    if drawn:
        axes.set_ylabel("share, or cosine")
        _threshold_axis(axes, result)
        _legend(axes)
    return drawn


def _draw_controls(axes: Axes, result: Result) -> bool:
    controls = _entries(result, "controls")
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
    time = _section(result, "time")
    exact = {name: _number(value) for name, value in _section(time, "exact_ms").items()}
    rows = [(f"exact: {name}", {"exact": value}) for name, value in exact.items() if value is not None]
    parts = {key: _number(_section(time, "parts_ms").get(key)) for key, _, _ in _PARTS}
    known = {key: value for key, value in parts.items() if value is not None}
    memoized = _number(time.get("memoized_ms"))
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
    return [layer for layer in _entries(result, "layers") if _number(layer.get("layer")) is not None]


def _sweep(result: Result) -> list[Mapping[str, Any]]:
    """The sweep's points in order of threshold."""
    points = [point for point in _entries(result, "sweep") if _number(point.get("threshold")) is not None]
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
    chosen = _number(result.get("threshold"))
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


def _present(result: Result) -> list[Panel]:
    """The panels for which the result has numbers."""
    return [panel for panel in PANELS if panel.draw(Figure().subplots(), result)]


def draw_overview(result: Result) -> bytes:
    """Draw every panel the result has numbers for in one figure.

    Parameters
    ----------
    result : mapping
        An evaluation's result.

    Returns
    -------
    bytes
        A PNG.
    """
    panels = _present(result)
    columns = min(2, max(1, len(panels)))
    rows = max(1, math.ceil(len(panels) / columns))
    width, height = _PANEL_SIZE
    figure = Figure(
        figsize=(max(columns * width, 8.0), rows * height * 1.08 + 0.8),
        layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.15),
    )
    heading = f"{_headline(result)}\n{_verdict(result)}"
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


def _draw_alone(panel: Panel, result: Result) -> bytes:
    figure = Figure(figsize=_PANEL_SIZE, layout="constrained")
    _draw(panel, figure.subplots(), result)
    return _png(figure)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, facecolor="white")
    return buffer.getvalue()


# --- the tables ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the report, as text.

    Attributes
    ----------
    title, note : str
        Its heading; a line under it, or nothing.
    columns : tuple of str
        Column names; empty for a table of names and values.
    rows : tuple of tuple of str
        Cells.
    """

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


_NOTHING = "–"
Show = Callable[[object], str]


def _percent(value: object) -> str:
    """A share; just under 1 it keeps a digit more, so that it does not read as all."""
    number = _number(value)
    if number is None:
        return _NOTHING
    return f"{100 * number:.2f}%" if 0.99 <= number < 1 else f"{100 * number:.1f}%"


def _decimal(format_: str, unit: str = "") -> Show:
    def show(value: object) -> str:
        number = _number(value)
        return _NOTHING if number is None else f"{number:{format_}}{unit}"

    return show


def _plain(value: object) -> str:
    if value is None or value == "" or (isinstance(value, float) and not math.isfinite(value)):
        return _NOTHING
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or _NOTHING
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _size(value: object) -> str:
    number = _number(value)
    if number is None:
        return _NOTHING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} TiB"


_similarity, _milliseconds, _times = _decimal(".3f"), _decimal(".3g", " ms"), _decimal(".2f", "×")

_LAYER_COLUMNS: tuple[tuple[str, str, Show], ...] = (
    ("layer", "layer", _plain),
    ("queries", "queries", _plain),
    ("hits", "hits", _plain),
    ("hit_rate", "hit rate", _percent),
    ("exhaustive_hit_rate", "ceiling", _percent),
    ("mean_predicted_similarity", "similarity, predicted", _similarity),
    ("mean_true_similarity", "similarity, true", _similarity),
    ("exhaustive_mean_similarity", "similarity, best", _similarity),
    ("gate", "gate", _plain),
    ("ms_spent", "spent", _milliseconds),
    ("ms_saved", "saved", _milliseconds),
)
_CONTROL_COLUMNS: tuple[tuple[str, str, Show], ...] = (
    ("name", "method", _plain),
    ("hit_rate", "hit rate", _percent),
    ("agreement", "same answer", _percent),
    ("accuracy", "accuracy", _percent),
    ("cosine_mean", "cosine, mean", _decimal(".4f")),
    ("logit_distance_mean", "logit distance, mean", _decimal(".4f")),
)
_SWEEP_COLUMNS: tuple[tuple[str, str, Show], ...] = (
    ("threshold", "threshold", _decimal(".4g")),
    ("hit_rate", "hit rate", _percent),
    ("speedup", "speed-up", _times),
    ("agreement", "same answer", _percent),
    ("changed", "changed answers", _percent),
    ("cosine_mean", "cosine, mean", _decimal(".4f")),
)
_CONDITIONS: tuple[tuple[str, str, str, Show], ...] = (
    ("database", "model", "model", _plain),
    ("database", "family", "family", _plain),
    ("database", "layers", "layers", _plain),
    ("database", "heads", "heads", _plain),
    ("database", "path", "database", _plain),
    ("database", "records", "records", _plain),
    ("database", "bytes", "database size", _size),
    ("data", "files", "data", _plain),
    ("data", "sequences", "sequences", _plain),
    ("data", "tokens", "tokens", _plain),
    ("data", "mean_length", "tokens per sequence, mean", _decimal(".1f")),
    ("conditions", "cpu", "processor", _plain),
    ("conditions", "cores", "cores", _plain),
    ("conditions", "threads", "threads", _plain),
    ("conditions", "kernel", "kernel", _plain),
    ("conditions", "torch", "torch", _plain),
    ("conditions", "transformers", "transformers", _plain),
    ("conditions", "dtype", "computed in", _plain),
    ("conditions", "storage_dtype", "stored as", _plain),
    ("conditions", "batch_size", "batch size", _plain),
    ("conditions", "max_length", "longest sequence, tokens", _plain),
    ("conditions", "fetch", "fetch", _plain),
    ("conditions", "page_bytes", "page size", _size),
    ("conditions", "repeats", "timing repeats", _plain),
)


def _rows_table(
    title: str, note: str, entries: Sequence[Mapping[str, Any]], columns: Sequence[tuple[str, str, Show]]
) -> Table:
    """A table of entries without the columns that are empty throughout."""
    filled = [(name, [show(entry.get(key)) for entry in entries]) for key, name, show in columns]
    shown = [(name, cells) for name, cells in filled if any(cell != _NOTHING for cell in cells)]
    rows = zip(*(cells for _, cells in shown), strict=True)
    return Table(title, note, tuple(name for name, _ in shown), tuple(rows))


def _pairs_table(title: str, note: str, pairs: Iterable[tuple[str, ...]]) -> Table:
    """A table of names and values without the values that are missing."""
    return Table(title, note, (), tuple(pair for pair in pairs if pair[1] != _NOTHING))


def _speedup(result: Result) -> str:
    time = _section(result, "time")
    low, high = _times(time.get("speedup_low")), _times(time.get("speedup_high"))
    interval = f" ({low} to {high})" if _NOTHING not in (low, high) else ""
    speedup = _times(time.get("speedup"))
    return speedup if speedup == _NOTHING else speedup + interval


def _times_per(result: Result) -> str:
    time = _section(result, "time")
    exact = _milliseconds(_section(time, "exact_ms").get(str(time.get("best_exact"))))
    memoized = _milliseconds(time.get("memoized_ms"))
    if memoized == _NOTHING:
        return _NOTHING
    return f"{memoized} per {time.get('per') or 'sequence'}" + (f", exact {exact}" if exact != _NOTHING else "")


def _both_accuracies(result: Result) -> str:
    quality = _section(result, "quality")
    exact, memoized = _percent(quality.get("accuracy_exact")), _percent(quality.get("accuracy_memoized"))
    return _NOTHING if memoized == _NOTHING else f"{memoized}, exact {exact}"


def _summary(result: Result) -> Table:
    quality = _section(result, "quality")
    best = _section(result, "time").get("best_exact")
    source, lookup = result.get("threshold_source"), result.get("lookup")
    threshold = _decimal(".4g")(result.get("threshold"))
    cosine = _decimal(".4f")
    pairs = (
        ("Hit rate", _percent(result.get("hit_rate")), "share of lookups answered from the database"),
        ("Hit rate, ceiling", _percent(result.get("exhaustive_hit_rate")), "what an exhaustive search would find"),
        ("Speed-up", _speedup(result), f"against the best exact path ({best})" if best else "against exact"),
        ("Time", _times_per(result), "mean; lookup and misses included"),
        ("Same answer", _percent(quality.get("agreement")), "as the exact model"),
        ("Accuracy", _both_accuracies(result), "on the labels of the data"),
        ("Cosine, mean", cosine(quality.get("cosine_mean")), "between memoized and exact outputs"),
        ("Cosine, lowest 1%", cosine(quality.get("cosine_p1")), "1 sequence in 100 lies below"),
        ("Cosine, lowest", cosine(quality.get("cosine_min")), "the worst sequence"),
        ("Logit distance, mean", cosine(quality.get("logit_distance_mean")), "between memoized and exact outputs"),
        ("Logit distance, highest 1%", cosine(quality.get("logit_distance_p99")), "1 sequence in 100 lies above"),
        ("Threshold", threshold, str(source) if source else "of similarity, between 0 and 1"),
        ("Lookup", f"per {lookup}" if lookup else _NOTHING, "one search each"),
        ("Not eligible", _plain(result.get("ineligible")), "left to the exact path by rule"),
    )
    return _pairs_table("Summary", "", pairs)


def make_tables(result: Result) -> list[Table]:
    """Lay out the result's numbers as tables, as the page shows them.

    Parameters
    ----------
    result : mapping
        An evaluation's result.

    Returns
    -------
    list of Table
        Those that have a row, in reading order.
    """
    conditions = ((name, show(_section(result, part).get(key))) for part, key, name, show in _CONDITIONS)
    tables = (
        _summary(result),
        _rows_table(
            "Against the controls",
            "On the same data: what simpler stand-ins for the looked-up map would have given.",
            _entries(result, "controls"),
            _CONTROL_COLUMNS,
        ),
        _rows_table("By threshold", "", _sweep(result), _SWEEP_COLUMNS),
        _rows_table(
            "By layer",
            "Spent: lookup and fetch. Saved: the exact attention that hits made unnecessary.",
            _entries(result, "layers"),
            _LAYER_COLUMNS,
        ),
        _pairs_table("Conditions", "Numbers hold for these only.", conditions),
    )
    return [table for table in tables if table.rows]


# --- the page and the files ------------------------------------------------------------------------------


def _headline(result: Result) -> str:
    model = _section(result, "database").get("model")
    return f"Attention memoization: {model}" if model else "Attention memoization"


def _verdict(result: Result) -> str:
    """The result's own verdict, or its main numbers in a sentence."""
    verdict = result.get("verdict")
    if isinstance(verdict, str) and verdict.strip():
        return verdict
    hits, speed = _percent(result.get("hit_rate")), _times(_section(result, "time").get("speedup"))
    said = [f"{hits} of lookups hit"] * (hits != _NOTHING)
    said += [f"{speed} the speed of the best exact path"] * (speed != _NOTHING)
    return ", ".join(said) + "." if said else "This result holds no verdict."


def _tiles(result: Result) -> list[tuple[str, str]]:
    """The few numbers that a reader needs first."""
    quality = _section(result, "quality")
    tiles = (
        ("speed-up", _times(_section(result, "time").get("speedup"))),
        ("hit rate", _percent(result.get("hit_rate"))),
        ("same answer", _percent(quality.get("agreement"))),
        ("cosine, mean", _decimal(".4f")(quality.get("cosine_mean"))),
        ("threshold", _decimal(".4g")(result.get("threshold"))),
    )
    return [(name, value) for name, value in tiles if value != _NOTHING]


def _render_page(result: Result) -> str:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = resources.files("attmemo.profiler").joinpath("report.html.j2").read_text(encoding="utf-8")
    notes = result.get("notes")
    return environment.from_string(source).render(
        headline=_headline(result),
        verdict=_verdict(result),
        tiles=_tiles(result),
        tables=make_tables(result),
        panels=[(panel, base64.b64encode(_draw_alone(panel, result)).decode()) for panel in _present(result)],
        notes=[str(note) for note in notes if note] if isinstance(notes, (list, tuple)) else [],
    )


def _finite(value: Any) -> Any:
    """The value with null for numbers that JSON cannot write."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def write_report(result: Result, directory: Path) -> list[Path]:
    """Write `report.html`, `report.png` and `result.json`.

    Parameters
    ----------
    result : mapping
        An evaluation's result, `attmemo.evaluate/1`. What is absent, None or not finite is left out.
    directory : Path
        Where to write; made if it is not there. Files of the same names are replaced.

    Returns
    -------
    list of Path
        The three files, the page first. It needs no other file and no network.

    Raises
    ------
    AttmemoError
        The directory cannot be written.
    """
    contents = {
        "report.html": _render_page(result).encode(),
        "report.png": draw_overview(result),
        "result.json": (json.dumps(_finite(result), indent=2, ensure_ascii=False) + "\n").encode(),
    }
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (directory / name).write_bytes(content)
    except OSError as error:
        raise AttmemoError(
            f"{directory}: the report cannot be written: {error.strerror or error}",
            "name a directory that can be written, or make room on the disk",
        ) from error
    return [directory / name for name in contents]
