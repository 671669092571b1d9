"""Write what an evaluation found: a page to read, a figure to show, the numbers to compute with.

A part or a number that the result does not have is left out of the page.
"""

from __future__ import annotations

import base64
import json
import math
import tempfile
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path, PurePath
from typing import Any, Final, NamedTuple

import jinja2

from attmemo.errors import AttmemoError
from attmemo.profiler.plots import Result, draw_panels, present_panels

_NOTHING: Final = "–"
_ANSWERED: Final = "share of lookups answered from the database"
_PERCENT, _BYTES, _TIMES, _MS, _FOUR = "%", "bytes", "{:.2f}×", "{:.3g} ms", "{:.4f}"

# Of the rows of all tables: the title of a key's column, and its format.
_COLUMNS: Final = {
    "layer": ("layer", "{}"), "name": ("method", "{}"), "threshold": ("threshold", "{:.4g}"),
    "queries": ("queries", "{:,}"), "hits": ("hits", "{:,}"), "hit_rate": ("hit rate", _PERCENT),
    "share_computed": ("rows computed", _PERCENT),
    "exhaustive_hit_rate": ("ceiling", _PERCENT), "speedup": ("speed-up", _TIMES),
    "speedup_packed": ("speed-up on packed", _TIMES),
    "agreement": ("same answer", _PERCENT), "changed": ("changed answers", _PERCENT),
    "accuracy": ("accuracy", _PERCENT), "cosine_mean": ("cosine, mean", _FOUR),
    "cosine_p1": ("cosine, lowest 1%", _FOUR),
    "logit_distance_mean": ("logit distance, mean", _FOUR), "perplexity": ("perplexity", "{:.4g}"),
    "mean_predicted_similarity": ("similarity, predicted", "{:.3f}"),
    "mean_true_similarity": ("similarity, true", "{:.3f}"),
    "exhaustive_mean_similarity": ("similarity, best", "{:.3f}"), "gate": ("gate", "{}"), "ms_spent": ("spent", _MS),
    "ms_saved": ("saved", _MS),
}  # fmt: skip
# Conditions are shown under their own names, except these.
_NAMES: Final = {
    "path": "database", "bytes": "database size", "files": "data", "mean_length": "tokens per sequence, mean",
    "length_stored": "sequences of a stored length", "cpu": "processor", "dtype": "computed in",
    "storage_dtype": "stored as", "max_length": "longest sequence, tokens", "page_bytes": "page size",
    "repeats": "timing repeats",
}  # fmt: skip
_FORMATS: Final = {"bytes": _BYTES, "page_bytes": _BYTES, "mean_length": "{:.1f}", "length_stored": _PERCENT}


class Table(NamedTuple):
    """One table of the report, as text."""

    title: str
    note: str  # a line under the title, or nothing
    columns: tuple[str, ...]  # empty for a table of names and values
    rows: tuple[tuple[str, ...], ...]


def _show(value: Any, form: str = "{}") -> str:
    """A value as text; a dash for None, for nothing, and for a number that is not finite."""
    if isinstance(value, (list, tuple)):
        return ", ".join(_show(item, form) for item in value) or _NOTHING
    if value is None or value == "" or (isinstance(value, float) and not math.isfinite(value)):
        return _NOTHING
    if form == _PERCENT:  # just under 1 it keeps a digit more, so that it does not read as all
        return f"{min(value, 0.9999):.2%}" if 0.99 <= value < 1 else f"{value:.1%}"
    if form == _BYTES:
        power = min(4, max(0, math.frexp(abs(value))[1] - 1) // 10)
        return f"{value / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
    return form.format(value)


def _table(title: str, note: str, rows: Iterable[Mapping[str, Any]] | None) -> Table:
    """A table without the columns that are empty throughout."""
    cells = {name: [_show(row.get(key), form) for row in rows or ()] for key, (name, form) in _COLUMNS.items()}
    shown = {name: column for name, column in cells.items() if set(column) - {_NOTHING}}
    return Table(title, note, tuple(shown), tuple(zip(*shown.values(), strict=True)))


def _pairs(title: str, note: str, rows: Iterable[tuple[str, ...]]) -> Table:
    """A table of names and values without the values that are missing."""
    return Table(title, note, (), tuple(row for row in rows if not row[1].startswith(_NOTHING)))


def _summary(result: Result) -> Table:
    time, quality = result.get("time") or {}, result.get("quality") or {}
    exact = time.get("exact_ms") or {}
    best, ratios = time.get("best_exact"), time.get("speedups") or {}
    compared = f"the best exact path ({best})" if len(exact) > 1 else "the exact model; torch.compile not timed"
    rows_reused = result.get("reuse") == "rows"
    called = ("Sequences served", "with rows of a record") if rows_reused else ("Hit rate", _ANSWERED)
    speed, low, high = (_show(time.get(key), _TIMES) for key in ("speedup", "speedup_low", "speedup_high"))
    spent = f"{_show(time.get('memoized_ms'), _MS)} per {time.get('per')}, exact {_show(exact.get(best), _MS)}"
    same = "the exact model's next token" if "perplexity_exact" in quality else "as the exact model"

    def both(name: str, form: str) -> str:
        return f"{_show(quality.get(f'{name}_memoized'), form)}, exact {_show(quality.get(f'{name}_exact'), form)}"

    def of(name: str) -> str:
        return _show(quality.get(name), _FOUR)

    rows = (
        ("Rows computed", _show(result.get("share_computed"), _PERCENT), "the others are those of records"),
        (called[0], _show(result.get("hit_rate"), _PERCENT), called[1]),
        ("Hit rate, ceiling", _show(result.get("exhaustive_hit_rate"), _PERCENT), "that of an exhaustive search"),
        ("Speed-up", f"{speed} ({low} to {high})", f"against {compared}"),
        ("Speed-up on stock", _show(ratios.get("stock") if len(exact) > 1 else None, _TIMES), "the original code"),
        ("Bytes per saved ms", _show(time.get("bytes_per_saved_ms"), _BYTES), "of a sequence's time"),
        ("Time", spent, "median pass; lookup and misses included"),
        ("Same answer", _show(quality.get("agreement"), _PERCENT), same),
        ("Accuracy", both("accuracy", _PERCENT), "on the labels of the data"),
        ("Perplexity", both("perplexity", "{:.4g}"), "of the texts themselves, token by token"),
        ("Cosine, mean", of("cosine_mean"), "between memoized and exact outputs"),
        ("Cosine, lowest 1%", of("cosine_p1"), "1 sequence in 100 lies below"),
        ("Cosine, lowest", of("cosine_min"), "the worst sequence"),
        ("Logit distance, mean", of("logit_distance_mean"), "between memoized and exact outputs"),
        ("Logit distance, highest 1%", of("logit_distance_p99"), "1 sequence in 100 lies above"),
        ("Threshold", _show(result.get("threshold"), "{:.4g}"), str(result.get("threshold_source") or "")),
        ("Memory beside the model", _show(result.get("weight_bytes"), _BYTES), "weights made ready"),
        ("Lookup", _show(result.get("lookup"), "per {}"), "one search each"),
        ("Not eligible", _show(result.get("ineligible"), "{:,}"), "left to the exact path by rule"),
    )
    return _pairs("Summary", "", rows)


def _live(guard: Result) -> Table:
    """What the guard would have done, or no rows."""
    if not guard:
        return _pairs("With the guard, live", "", ())
    rows = (
        ("Budget", _show(guard.get("budget"), _PERCENT), "share of answers that may change, at most"),
        ("Answers reused", _show(guard.get("reused"), _PERCENT), "from rows of records of other texts"),
        ("Answers repeated", _show(guard.get("repeated"), _PERCENT), "as they were, of texts that came before"),
        ("Rows computed", _show(guard.get("share_computed"), _PERCENT), "verification included"),
        ("Changed answers", _show(guard.get("changed"), "{:.2%}"), "of all"),
        ("Verified", _show(guard.get("verified"), "{:,}"), "answers that would have been reused"),
        ("At the end", str(guard.get("state")), str(guard.get("says"))),
    )
    return _pairs("With the guard, live", "The texts in the order of the data; the guard began with nothing.", rows)


def _conditions(result: Result) -> Table:
    rows = []
    for part in ("database", "data", "conditions"):
        for key, value in (result.get(part) or {}).items():
            form = _FORMATS.get(key, "{:,}" if isinstance(value, int) else "{}")
            rows.append((_NAMES.get(key, key.replace("_", " ")), _show(value, form)))
    return _pairs("Conditions", "Numbers hold for these only.", rows)


def make_tables(result: Result) -> list[Table]:
    """The tables of the page, as text; those that have a row, in reading order."""
    controls = "On the same data: what simpler stand-ins for the record that was found would have given."
    layers = (
        "Spent: lookup, V, fetch and A·V. Saved: exact attention by the cost model, less the time that the batches "
        "with hits really took; below zero, serving cost more."
    )
    tables = (
        _summary(result),
        _live(result.get("guard") or {}),
        _table("Against the controls", controls, result.get("controls")),
        _table("By threshold", "", result.get("sweep")),
        _table("By layer", layers, result.get("layers")),
        _conditions(result),
    )
    return [table for table in tables if table.rows]


def _render_page(result: Result, headline: str) -> bytes:
    time, quality = result.get("time") or {}, result.get("quality") or {}
    threshold = result.get("threshold")
    tiles = {
        "speed-up": _show(time.get("speedup"), _TIMES),
        "rows computed": _show(result.get("share_computed"), _PERCENT),
        "hit rate": _show(result.get("hit_rate"), _PERCENT),
        "same answer": _show(quality.get("agreement"), _PERCENT),
        "cosine, mean": _show(quality.get("cosine_mean"), _FOUR),
        "threshold": "per layer" if isinstance(threshold, list) else _show(threshold, "{:.4g}"),
    }
    strict = jinja2.StrictUndefined
    environment = jinja2.Environment(autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True)
    source = resources.files("attmemo.profiler").joinpath("report.html.j2").read_text(encoding="utf-8")
    page = environment.from_string(source).render(
        headline=headline,
        verdict=result.get("verdict") or "",
        notes=result.get("notes") or [],
        tiles={name: value for name, value in tiles.items() if value != _NOTHING},
        tables=make_tables(result),
        panels=[(panel, base64.b64encode(draw_panels([panel], result)).decode()) for panel in present_panels(result)],
    )
    return page.encode()


def _finite(value: Any) -> Any:
    """The value with null for numbers that JSON cannot write."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def write_report(result: Result, directory: Path) -> list[Path]:
    """Write `report.html`, `report.png` and `result.json` into a directory, made if absent; gives their paths.

    The page needs no other file and no network. Files of the same names are replaced when all three are written: a
    full disk leaves an older report whole. A directory that cannot be written is an `AttmemoError`.
    """
    model = PurePath((result.get("database") or {}).get("model") or "")
    short = PurePath(*model.parts[-2:])  # an id of a hub has two parts; a path would fill the line
    about = "Reuse of rows" if result.get("reuse") == "rows" else "Attention memoization"
    headline = f"{about}: {short}" if model.parts else about
    contents = {
        "report.html": _render_page(result, headline),
        "report.png": draw_panels(present_panels(result), result, f"{headline}\n{result.get('verdict') or ''}"),
        "result.json": (json.dumps(_finite(result), indent=2, ensure_ascii=False) + "\n").encode(),
    }
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".report-", dir=directory) as beside:
            for name, content in contents.items():
                (Path(beside) / name).write_bytes(content)
            for name in contents:
                (Path(beside) / name).replace(directory / name)
    except OSError as error:
        raise AttmemoError(
            f"{directory}: the report cannot be written: {error.strerror or error}",
            "name a directory that can be written, or make room on the disk",
        ) from error
    return [directory / name for name in contents]
