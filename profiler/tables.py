"""The tables of an evaluation, as text: for the page of a report, and for a terminal.

A part or a number that the result does not have is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from attmemo.wording import percent

Result = Mapping[str, Any]  # an evaluation's, `attmemo.evaluate/1`: shares between 0 and 1, times in ms
NOTHING: Final = "–"
_ANSWERED: Final = "share of lookups answered from the database"
PERCENT, HUNDREDTHS, BYTES, TIMES, _MS, FOUR = "%", "% to hundredths", "bytes", "{:.2f}×", "{:.3g} ms", "{:.4f}"

# Of the rows of all tables: the title of a key's column, and its format.
_COLUMNS: Final = {
    "layer": ("layer", "{}"), "name": ("method", "{}"), "threshold": ("threshold", "{:.4g}"),
    "queries": ("queries", "{:,}"), "hits": ("hits", "{:,}"), "hit_rate": ("hit rate", PERCENT),
    "share_computed": ("tokens recomputed", PERCENT),
    "exhaustive_hit_rate": ("ceiling", PERCENT), "speedup": ("speed-up", TIMES),
    "speedup_packed": ("speed-up on packed", TIMES),
    "agreement": ("same answer", PERCENT), "changed": ("changed answers", PERCENT),
    "accuracy": ("accuracy", PERCENT), "cosine_mean": ("cosine, mean", FOUR),
    "cosine_p1": ("cosine, lowest 1 %", FOUR),
    "logit_distance_mean": ("logit distance, mean", FOUR), "perplexity": ("perplexity", "{:.4g}"),
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
_FORMATS: Final = {"bytes": BYTES, "page_bytes": BYTES, "mean_length": "{:.1f}", "length_stored": PERCENT}


class Table(NamedTuple):
    """One table, as text."""

    title: str
    note: str  # a line under the title, or nothing
    columns: tuple[str, ...]  # empty for a table of names and values
    rows: tuple[tuple[str, ...], ...]


def show(value: Any, form: str = "{}") -> str:
    """A value as text; a dash for None, for nothing, and for a number that is not finite."""
    if isinstance(value, (list, tuple)):
        return ", ".join(show(item, form) for item in value) or NOTHING
    if value is None or value == "" or (isinstance(value, float) and not math.isfinite(value)):
        return NOTHING
    if form == PERCENT:  # just under 1 it keeps a digit more, so that it does not read as all
        return percent(min(value, 0.9999), 2) if 0.99 <= value < 1 else percent(value, 1)
    if form == HUNDREDTHS:
        return percent(value, 2)
    if form == BYTES:
        power = min(4, max(0, math.frexp(abs(value))[1] - 1) // 10)
        return f"{value / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
    return form.format(value)


def _table(title: str, note: str, rows: Iterable[Mapping[str, Any]] | None) -> Table:
    """A table without the columns that are empty throughout."""
    cells = {name: [show(row.get(key), form) for row in rows or ()] for key, (name, form) in _COLUMNS.items()}
    shown = {name: column for name, column in cells.items() if set(column) - {NOTHING}}
    return Table(title, note, tuple(shown), tuple(zip(*shown.values(), strict=True)))


def _pairs(title: str, note: str, rows: Iterable[tuple[str, ...]]) -> Table:
    """A table of names and values without the values that are missing."""
    return Table(title, note, (), tuple(row for row in rows if not row[1].startswith(NOTHING)))


def _summary(result: Result) -> Table:
    time, quality = result.get("time") or {}, result.get("quality") or {}
    exact = time.get("exact_ms") or {}
    best, ratios = time.get("best_exact"), time.get("speedups") or {}
    compared = f"the best exact path ({best})" if len(exact) > 1 else "the exact model; torch.compile not timed"
    rows_reused = result.get("reuse") == "rows"
    called = ("Sequences reused", "with rows of a record") if rows_reused else ("Hit rate", _ANSWERED)
    speed, low, high = (show(time.get(key), TIMES) for key in ("speedup", "speedup_low", "speedup_high"))
    spent = f"{show(time.get('memoized_ms'), _MS)} per {time.get('per')}, exact {show(exact.get(best), _MS)}"
    same = "the exact model's next token" if "perplexity_exact" in quality else "as the exact model"

    def both(name: str, form: str) -> str:
        return f"{show(quality.get(f'{name}_memoized'), form)}, exact {show(quality.get(f'{name}_exact'), form)}"

    def of(name: str) -> str:
        return show(quality.get(name), FOUR)

    rows = (
        ("Tokens recomputed", show(result.get("share_computed"), PERCENT), "the others are those of records"),
        (called[0], show(result.get("hit_rate"), PERCENT), called[1]),
        ("Hit rate, ceiling", show(result.get("exhaustive_hit_rate"), PERCENT), "that of an exhaustive search"),
        ("Speed-up", f"{speed} ({low} to {high})", f"against {compared}"),
        ("Speed-up on original", show(ratios.get("stock") if len(exact) > 1 else None, TIMES), "the original code"),
        ("Bytes per saved ms", show(time.get("bytes_per_saved_ms"), BYTES), "of a sequence's time"),
        ("Time", spent, "median pass; lookup and misses included"),
        ("Same answer", show(quality.get("agreement"), PERCENT), same),
        ("Accuracy", both("accuracy", PERCENT), "on the labels of the data"),
        ("Perplexity", both("perplexity", "{:.4g}"), "of the texts themselves, token by token"),
        ("Cosine, mean", of("cosine_mean"), "between memoized and exact outputs"),
        ("Cosine, lowest 1 %", of("cosine_p1"), "1 sequence in 100 lies below"),
        ("Cosine, lowest", of("cosine_min"), "the worst sequence"),
        ("Logit distance, mean", of("logit_distance_mean"), "between memoized and exact outputs"),
        ("Logit distance, highest 1 %", of("logit_distance_p99"), "1 sequence in 100 lies above"),
        ("Threshold", show(result.get("threshold"), "{:.4g}"), str(result.get("threshold_source") or "")),
        ("Memory beside the model", show(result.get("weight_bytes"), BYTES), "weights made ready"),
        ("Lookup", show(result.get("lookup"), "per {}"), "one search each"),
        ("Not eligible", show(result.get("ineligible"), "{:,}"), "left to the exact path by rule"),
    )
    return _pairs("Summary", "", rows)


def _live(guard: Result) -> Table:
    """What the guard would have done, or no rows."""
    if not guard:
        return _pairs("With the guard, live", "", ())
    rows = (
        ("Budget", show(guard.get("budget"), PERCENT), "share of answers that may change, at most"),
        ("Answers reused", show(guard.get("reused"), PERCENT), "from rows of records of other texts"),
        ("Answers repeated", show(guard.get("repeated"), PERCENT), "as they were, of texts that came before"),
        ("Tokens recomputed", show(guard.get("share_computed"), PERCENT), "verification included"),
        ("Changed answers", show(guard.get("changed"), HUNDREDTHS), "of all"),
        ("Verified", show(guard.get("verified"), "{:,}"), "answers that would have been reused"),
        ("At the end", str(guard.get("state")), str(guard.get("says"))),
    )
    return _pairs("With the guard, live", "The texts in the order of the data; the guard began with nothing.", rows)


def _conditions(result: Result) -> Table:
    rows = []
    for part in ("database", "data", "conditions"):
        for key, value in (result.get(part) or {}).items():
            form = _FORMATS.get(key, "{:,}" if isinstance(value, int) else "{}")
            rows.append((_NAMES.get(key, key.replace("_", " ")), show(value, form)))
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
