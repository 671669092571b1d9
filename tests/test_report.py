"""The report: readable, complete, and never refused because something was not measured."""

from __future__ import annotations

import base64
import copy
import io
import json
import math
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import image
from matplotlib.figure import Figure

from attmemo.errors import AttmemoError
from attmemo.profiler import plots
from attmemo.profiler.plots import PANELS, Panel, draw_overview
from attmemo.profiler.report import make_tables, write_report

Result = dict[str, Any]
Key = tuple[str | int, ...]


def make_result(layers: int = 4) -> Result:
    """A result with every part."""
    rates = [0.9 - 0.1 * (layer % 5) for layer in range(layers)]
    return {
        "schema": "attmemo.evaluate/1",
        "verdict": "Memoization pays here.",
        "notes": ["Layer 1 was left alone."],
        "database": {
            "path": "db", "records": 1200, "bytes": 3_000_000, "model": "org/model-base", "family": "bert",
            "layers": layers, "heads": 12,
        },
        "data": {"files": ["a.log", "b.csv"], "sequences": 200, "tokens": 8000, "mean_length": 40.0},
        "conditions": {
            "cpu": "Example 1", "cores": 8, "threads": 8, "kernel": "6.1", "torch": "2.9", "transformers": "5.1",
            "dtype": "float32", "storage_dtype": "float16", "batch_size": 16, "max_length": 128, "fetch": "view",
            "page_bytes": 4096, "repeats": 5,
        },
        "threshold": 0.95,
        "threshold_source": "given",
        "lookup": "layer",
        "hit_rate": 0.75,
        "exhaustive_hit_rate": 0.8,
        "ineligible": 3,
        "layers": [
            {
                "layer": layer, "queries": 200, "hits": int(200 * rate), "hit_rate": rate,
                "mean_predicted_similarity": 0.93, "mean_true_similarity": 0.96, "exhaustive_hit_rate": rate + 0.05,
                "exhaustive_mean_similarity": 0.98, "gate": "off" if layer == 1 else "on", "ms_spent": 0.3,
                "ms_saved": 0.8,
            }
            for layer, rate in enumerate(rates)
        ],
        "time": {
            "exact_ms": {"stock": 18.0, "compile": 15.0}, "best_exact": "compile", "memoized_ms": 10.5,
            "speedup": 1.43, "speedup_low": 1.4, "speedup_high": 1.46, "per": "sequence",
            "parts_ms": {
                "lookup": 1.2, "fetch_and_av": 2.6, "misses_in_mixed_batches": 1.4, "other": 5.3,
            },
        },
        "quality": {
            "agreement": 0.994, "accuracy_exact": 0.931, "accuracy_memoized": 0.929, "logit_distance_mean": 0.04,
            "logit_distance_p99": 0.3, "cosine_mean": 0.998, "cosine_p1": 0.98, "cosine_min": 0.9,
        },
        "controls": [
            {
                "name": name, "hit_rate": 0.7, "agreement": 0.8, "accuracy": 0.75, "cosine_mean": cosine,
                "logit_distance_mean": 0.4,
            }
            for name, cosine in (
                ("memoized", 0.998),
                ("mean map", 0.9),
                ("random map", -0.2),
                ("duplicate cache", 1.0),
            )
        ],
        "sweep": [
            {
                "threshold": threshold, "hit_rate": 1.6 - threshold, "speedup": 2.4 - threshold,
                "agreement": threshold, "cosine_mean": 0.99, "changed": 1 - threshold,
            }
            for threshold in (0.9, 0.8, 0.95)
        ],
    }  # fmt: skip


def keys_of(value: object, prefix: Key = ()) -> list[Key]:
    """The path of every part of a result."""
    items: list[tuple[str | int, object]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return [path for key, item in items for path in [(*prefix, key), *keys_of(item, (*prefix, key))]]


def without(result: Result, key: Key, how: str) -> Result:
    """The result with one part absent, None or NaN."""
    result = copy.deepcopy(result)
    parent: Any = result
    for step in key[:-1]:
        parent = parent[step]
    if how == "absent":
        del parent[key[-1]]
    else:
        parent[key[-1]] = None if how == "none" else math.nan
    return result


def lay_out(result: Result, panels: Sequence[Panel] = PANELS) -> None:
    """Everything of a report but the slow rendering to pixels."""
    make_tables(result)
    for panel in panels:
        panel.draw(Figure().subplots(), result)


def small_result() -> Result:
    """A result with every part, but one entry in each list."""
    result = make_result(layers=1)
    return {**result, "controls": result["controls"][:1], "sweep": result["sweep"][:1]}


def pixels(png: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(image.imread(io.BytesIO(png), format="png"))


def assert_not_blank(png: bytes) -> None:
    shown = pixels(png)[..., :3]
    assert min(shown.shape[:2]) > 200
    assert (shown < 0.6).any(axis=-1).mean() > 0.001


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_report(make_result(), tmp_path_factory.mktemp("reports") / "new" / "one")


def test_a_file_is_missing(written: list[Path]) -> None:
    assert [path.name for path in written] == ["report.html", "report.png", "result.json"]
    assert all(path.stat().st_size > 500 for path in written)


def test_the_figure_is_blank(written: list[Path]) -> None:
    assert_not_blank(written[1].read_bytes())


def test_the_page_needs_another_file_or_the_network(written: list[Path]) -> None:
    page = written[0].read_text(encoding="utf-8")
    assert not re.findall(r"<script|<link|@import|url\(|https?://", page)
    images = re.findall(r'<img src="([^"]*)"', page)
    assert len(images) == len(PANELS)
    for source in images:
        head, _, encoded = source.partition(",")
        assert head == "data:image/png;base64"
        assert_not_blank(base64.b64decode(encoded))


def test_the_page_lacks_what_a_reader_needs_first(written: list[Path]) -> None:
    page = written[0].read_text(encoding="utf-8")
    for part in (
        "Memoization pays here.", "1.43×", "1.43× (1.40× to 1.46×)", "75.0%", "99.40%", "0.9980", "0.95",
        "Example 1", "float16", "random map", "Layer 1 was left alone.", "org/model-base", "a.log, b.csv", "2.861 MiB",
    ):  # fmt: skip
        assert part in page, part


def test_the_numbers_are_not_those_of_the_result(written: list[Path]) -> None:
    assert json.loads(written[2].read_text(encoding="utf-8")) == make_result()


def test_text_of_the_result_becomes_markup_or_mathematics(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script> $\\frac{ & \"quoted\" 'too'"
    result = make_result()
    result.update(verdict=evil, notes=[evil], threshold_source=evil)
    result["database"]["model"] = result["data"]["files"][0] = result["controls"][0]["name"] = evil
    result["time"]["best_exact"], result["time"]["exact_ms"] = evil, {evil: 3.0}
    page = write_report(result, tmp_path)[0].read_text(encoding="utf-8")
    assert "<script>" not in page
    assert page.count("&lt;script&gt;") >= 5


@pytest.mark.parametrize("how", ["absent", "none", "nan"])
def test_a_missing_part_stops_the_report(how: str) -> None:
    drawn_from = {
        "layers": PANELS[:2],
        "threshold": PANELS[1:4],
        "sweep": PANELS[2:4],
        "controls": PANELS[4:5],
        "time": (PANELS[2], PANELS[5]),
    }
    result = small_result()
    for key in keys_of(result):
        lay_out(without(result, key, how), drawn_from.get(str(key[0]), ()))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.data())
def test_several_missing_parts_stop_the_report(data: st.DataObject) -> None:
    result = small_result()
    for _ in range(data.draw(st.integers(2, 12))):
        key = data.draw(st.sampled_from(keys_of(result)))
        result = without(result, key, data.draw(st.sampled_from(["absent", "none"])))
    lay_out(result)


@pytest.mark.parametrize("empty", [{}, dict.fromkeys(make_result()), {"layers": [], "controls": [], "sweep": [None]}])
def test_an_empty_result_stops_the_report(empty: Result, tmp_path: Path) -> None:
    page, figure, _ = write_report(empty, tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "<img" not in text
    assert "<table" not in text
    assert_not_blank(figure.read_bytes())


@pytest.mark.parametrize("part", ["layers", "time", "quality", "controls", "sweep"])
def test_one_part_alone_does_not_render(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "_DPI", 60)
    full = make_result()
    assert_not_blank(draw_overview({part: full[part]}, "A heading"))
    assert make_tables({part: full[part]})


def test_a_column_or_table_without_a_value_is_shown() -> None:
    result = make_result()
    for layer in result["layers"]:
        layer["exhaustive_hit_rate"] = None
    for control in result["controls"]:
        del control["accuracy"]
    result["sweep"] = []
    tables = {table.title: table for table in make_tables(result)}
    assert "ceiling" not in tables["By layer"].columns
    assert "accuracy" not in tables["Against the controls"].columns
    assert "By threshold" not in tables
    for table in tables.values():
        assert all(len(row) == len(table.columns or row) for row in table.rows)


def test_nearly_all_reads_as_all() -> None:
    result = make_result()
    result["quality"]["agreement"] = 0.9996
    (summary, *_) = make_tables(result)
    assert ("Same answer", "99.96%", "as the exact model") in summary.rows


def test_numbers_that_are_not_finite_make_the_json_unreadable(tmp_path: Path) -> None:
    path = write_report({"hit_rate": math.nan, "layers": [{"layer": 0, "ms_saved": math.inf}]}, tmp_path)[2]

    def refuse(name: str) -> None:
        raise AssertionError(name)

    read = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert read == {"hit_rate": None, "layers": [{"layer": 0, "ms_saved": None}]}


def test_sweep_points_out_of_order_cross_the_plot() -> None:
    axes = Figure().subplots()
    panel = next(panel for panel in PANELS if panel.title == "Speed against threshold")
    assert panel.draw(axes, make_result())
    assert np.asarray(axes.lines[0].get_xdata()).tolist() == [0.8, 0.9, 0.95]


@pytest.mark.parametrize("layers", [1, 12, 96])
def test_layer_numbers_overlap(layers: int) -> None:
    figure = Figure(figsize=(6.2, 3.7))
    axes = figure.subplots()
    assert PANELS[0].draw(axes, make_result(layers))
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
    assert len(boxes) >= min(layers, 5)
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_the_users_matplotlib_is_changed(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    write_report({"layers": make_result()["layers"]}, tmp_path)
    assert dict(mpl.rcParams) == before


def test_a_directory_that_cannot_be_written_gives_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(AttmemoError, match="cannot be written"):
        write_report({}, tmp_path / "file")
