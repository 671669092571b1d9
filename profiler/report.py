"""Write what an evaluation found: a page to read, a figure to show, the numbers to compute with.

The page shows the figure's panels one by one between its tables. Whatever the result lacks (a key that is
absent, None, or a number that is not finite) is left out; a report is never refused for a missing part.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from attmemo.errors import AttmemoError
from attmemo.profiler.plots import (
    Result,
    as_number,
    draw_alone,
    draw_overview,
    entries_of,
    present_panels,
    section,
    sweep_points,
)

__all__ = ["Table", "make_tables", "write_report"]


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
    number = as_number(value)
    if number is None:
        return _NOTHING
    return f"{100 * number:.2f}%" if 0.99 <= number < 1 else f"{100 * number:.1f}%"


def _decimal(format_: str, unit: str = "") -> Show:
    def show(value: object) -> str:
        number = as_number(value)
        return _NOTHING if number is None else f"{number:{format_}}{unit}"

    return show


def _plain(value: object) -> str:
    if value is None or value == "" or (isinstance(value, float) and not math.isfinite(value)):
        return _NOTHING
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or _NOTHING
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _size(value: object) -> str:
    number = as_number(value)
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
    ("perplexity", "perplexity", _decimal(".4g")),
)
_SWEEP_COLUMNS: tuple[tuple[str, str, Show], ...] = (
    ("threshold", "threshold", _decimal(".4g")),
    ("hit_rate", "hit rate", _percent),
    ("speedup", "speed-up", _times),
    ("agreement", "same answer", _percent),
    ("changed", "changed answers", _percent),
    ("cosine_mean", "cosine, mean", _decimal(".4f")),
    ("perplexity", "perplexity", _decimal(".4g")),
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
    time = section(result, "time")
    low, high = _times(time.get("speedup_low")), _times(time.get("speedup_high"))
    interval = f" ({low} to {high})" if _NOTHING not in (low, high) else ""
    speedup = _times(time.get("speedup"))
    return speedup if speedup == _NOTHING else speedup + interval


def _times_per(result: Result) -> str:
    time = section(result, "time")
    exact = _milliseconds(section(time, "exact_ms").get(str(time.get("best_exact"))))
    memoized = _milliseconds(time.get("memoized_ms"))
    if memoized == _NOTHING:
        return _NOTHING
    return f"{memoized} per {time.get('per') or 'sequence'}" + (f", exact {exact}" if exact != _NOTHING else "")


def _both_accuracies(result: Result) -> str:
    quality = section(result, "quality")
    exact, memoized = _percent(quality.get("accuracy_exact")), _percent(quality.get("accuracy_memoized"))
    return _NOTHING if memoized == _NOTHING else f"{memoized}, exact {exact}"


def _same_means(quality: Mapping[str, Any]) -> str:
    return "the exact model's next token" if "perplexity_exact" in quality else "as the exact model"


def _both_perplexities(result: Result) -> str:
    quality, show = section(result, "quality"), _decimal(".4g")
    exact, memoized = show(quality.get("perplexity_exact")), show(quality.get("perplexity_memoized"))
    return _NOTHING if memoized == _NOTHING else f"{memoized}, exact {exact}"


def _summary(result: Result) -> Table:
    quality = section(result, "quality")
    best = section(result, "time").get("best_exact")
    compared = section(result, "time").get("exact_ms")
    tried = isinstance(compared, Mapping) and len(compared) > 1
    against = f"against the best exact path ({best})" if tried else "against the exact model; torch.compile not timed"
    source, lookup = result.get("threshold_source"), result.get("lookup")
    threshold = _decimal(".4g")(result.get("threshold"))
    cosine = _decimal(".4f")
    pairs = (
        ("Hit rate", _percent(result.get("hit_rate")), "share of lookups answered from the database"),
        ("Hit rate, ceiling", _percent(result.get("exhaustive_hit_rate")), "what an exhaustive search would find"),
        ("Speed-up", _speedup(result), against),
        ("Bytes per saved ms", _size(section(result, "time").get("bytes_per_saved_ms")), "of a sequence's time"),
        ("Time", _times_per(result), "mean; lookup and misses included"),
        ("Same answer", _percent(quality.get("agreement")), _same_means(quality)),
        ("Accuracy", _both_accuracies(result), "on the labels of the data"),
        ("Perplexity", _both_perplexities(result), "of the texts themselves, token by token"),
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
    conditions = ((name, show(section(result, part).get(key))) for part, key, name, show in _CONDITIONS)
    tables = (
        _summary(result),
        _rows_table(
            "Against the controls",
            "On the same data: what simpler stand-ins for the looked-up map would have given.",
            entries_of(result, "controls"),
            _CONTROL_COLUMNS,
        ),
        _rows_table("By threshold", "", sweep_points(result), _SWEEP_COLUMNS),
        _rows_table(
            "By layer",
            "Spent: lookup and fetch. Saved: the exact attention that hits made unnecessary.",
            entries_of(result, "layers"),
            _LAYER_COLUMNS,
        ),
        _pairs_table("Conditions", "Numbers hold for these only.", conditions),
    )
    return [table for table in tables if table.rows]


# --- the page and the files ------------------------------------------------------------------------------


def _headline(result: Result) -> str:
    model = section(result, "database").get("model")
    return f"Attention memoization: {model}" if model else "Attention memoization"


def _verdict(result: Result) -> str:
    """The result's own verdict, or its main numbers in a sentence."""
    verdict = result.get("verdict")
    if isinstance(verdict, str) and verdict.strip():
        return verdict
    hits, speed = _percent(result.get("hit_rate")), _times(section(result, "time").get("speedup"))
    said = [f"{hits} of lookups hit"] * (hits != _NOTHING)
    said += [f"{speed} the speed of the best exact path"] * (speed != _NOTHING)
    return ", ".join(said) + "." if said else "This result holds no verdict."


def _tiles(result: Result) -> list[tuple[str, str]]:
    """The few numbers that a reader needs first."""
    quality = section(result, "quality")
    tiles = (
        ("speed-up", _times(section(result, "time").get("speedup"))),
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
        panels=[(panel, base64.b64encode(draw_alone(panel, result)).decode()) for panel in present_panels(result)],
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
        "report.png": draw_overview(result, f"{_headline(result)}\n{_verdict(result)}"),
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
