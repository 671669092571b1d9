"""Measuring reuse of rows: numbers that add up, controls that serve through the same path, and honest words."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from attmemo import memoize, unmemoize
from attmemo.db.pools.filling import Filling
from attmemo.db.pools.prepared import open_prepared
from attmemo.errors import AttmemoError, DatabaseError, TuningError
from attmemo.profiler.answers import ask, prepare
from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.evaluate import EvaluateOptions, evaluate
from attmemo.profiler.logs import generate_log
from attmemo.profiler.models import collate, load_model, tokenize
from attmemo.profiler.open import stored_texts
from attmemo.profiler.plots import present_panels
from attmemo.profiler.report import write_report
from attmemo.profiler.row_trial import (
    CONTROLS,
    MeanRows,
    RandomRecord,
    RowTrial,
    ZeroedRows,
    serving_rows,
)
from attmemo.profiler.tables import make_tables
from attmemo.profiler.train import train_database
from attmemo.profiler.tune import TuneOptions, tune

QUICK = EvaluateOptions(repeats=1, limit=48, batch_size=16, gate=False, threshold=0.3)


@pytest.fixture(scope="module", params=["bert", "deberta"])
def rows_database(request: pytest.FixtureRequest, service_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows in 8 bits of a tiny model over `service_log`."""
    path = tmp_path_factory.mktemp("rows") / "db"
    loaded = load_model(request.getfixturevalue(f"tiny_{request.param}"))
    build_database(loaded, [service_log], path, BuildOptions(max_length=48, reuse="rows"))
    return path


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lines of the same services that are not in the database."""
    file = tmp_path_factory.mktemp("later") / "ask.log"
    file.write_text("".join(f"{line}\n" for line in list(generate_log(700, seed=5))[500:600]))
    return file


@pytest.fixture(scope="module")
def result(rows_database: Path, later: Path) -> dict[str, Any]:
    return evaluate(rows_database, [later], QUICK)


# -- what an evaluation says


def test_the_result_is_complete_and_can_be_written_as_json(result: dict[str, Any]) -> None:
    found = json.loads(json.dumps(result, allow_nan=False))
    assert (found["schema"], found["reuse"]) == ("attmemo.evaluate/1", "rows")
    assert 0.0 < found["share_computed"] < 1.0
    assert found["share_computed"] == found["rows_computed"] / found["tokens"]
    assert 0.3 < found["hit_rate"] <= 1.0
    assert found["data"]["tokens"] == found["tokens"]
    assert found["threshold"] == 0.3
    assert found["conditions"]["storage_dtype"] == "int8"
    assert found["ineligible"] == 0
    assert {"agreement", "cosine_mean", "cosine_p1", "logit_distance_mean"} <= found["quality"].keys()


def test_the_guard_is_played_live(result: dict[str, Any], rows_database: Path) -> None:
    """48 texts prove nothing, so none is served from a record: all are exact."""
    guard = result["guard"]
    assert sum(guard["done"].values()) == 48
    assert guard["done"]["learned"] > 0
    assert (guard["state"], guard["reused"], guard["changed"]) == ("learning", 0.0, 0.0)
    assert guard["share_computed"] > 1.0, "verification is part of it"
    assert not (rows_database / "guard").exists(), "nothing of it is stored"


def test_time_stands_against_both_exact_paths(result: dict[str, Any]) -> None:
    time = result["time"]
    assert time["exact_ms"].keys() == time["speedups"].keys() == {"stock", "packed"}
    assert time["speedup"] == time["speedups"][time["best_exact"]]
    assert time["parts_ms"].keys() == {"lookup", "plan", "fetch", "blocks", "other"}
    assert all(part > 0.0 for name, part in time["parts_ms"].items() if name != "other")


def test_the_timed_passes_of_packed_blocks_are_counted_apart(rows_database: Path, later: Path) -> None:
    """Or the parts would hold time that no record served."""
    with closing(open_prepared(rows_database)) as database:
        loaded = load_model(database.filling.model.name)
        trial = RowTrial(loaded, database, QUICK)
        handle = trial.serve()
        paths = trial.paths(handle)
        prepared = prepare(loaded, tokenize(loaded, later.read_text().splitlines()[:16], 48), 16)
        for name, served in (("memoized", True), ("packed", False), ("memoized", True)):
            paths[name]()
            before = handle.stats()["sequences"]
            ask(loaded, prepared)
            stats = handle.stats()
            assert stats["sequences"] == before + 16
            assert (stats["reused"] > 0) == served
            assert (stats["rows_computed"] < stats["tokens"]) == served
        paths["stock"]()
        assert not handle.enabled
        unmemoize(loaded.model)


def test_fewer_rows_are_computed_at_a_lower_threshold(result: dict[str, Any]) -> None:
    sweep = result["sweep"]
    assert [row["threshold"] for row in sweep] == [0.3, 0.5, 0.7, 0.9]
    shares = [row["share_computed"] for row in sweep]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]
    assert all(row["speedup"] > 0.0 and row["speedup_packed"] > 0.0 for row in sweep)


def test_every_control_is_asked_at_the_share_of_the_records(result: dict[str, Any]) -> None:
    memoized, *others = result["controls"]
    assert [row["name"] for row in others] == [*CONTROLS, "duplicate cache"]
    for row in others[:-1]:
        assert row["share_computed"] == memoized["share_computed"] == result["share_computed"]
        assert row["cosine_mean"] != memoized["cosine_mean"]


def test_no_record_of_the_very_text_serves(
    rows_database: Path, service_log: Path, later: Path, tmp_path: Path
) -> None:
    """Texts that the database holds are left out, whatever file they are in."""
    mixed = tmp_path / "mixed.log"
    mixed.write_text("\n".join(service_log.read_text().splitlines()[:30] + later.read_text().splitlines()[:20]))
    found = evaluate(rows_database, [mixed], replace(QUICK, limit=None, controls=False, sweep=False))
    assert found["data"]["in_database"] >= 30
    assert found["data"]["sequences"] <= 20
    assert "were left out" in found["notes"][0]
    with closing(open_prepared(rows_database)) as database:
        loaded = load_model(database.filling.model.name)
        tokens = tokenize(loaded, mixed.read_text().splitlines(), 48)
        assert set(range(30)) <= stored_texts(loaded, database, tokens)


def test_a_threshold_of_one_is_exact_and_the_verdict_says_that_it_does_not_pay(
    rows_database: Path, later: Path
) -> None:
    found = evaluate(rows_database, [later], replace(QUICK, threshold=1.0, controls=False, sweep=False))
    assert found["share_computed"] == 1.0
    assert found["hit_rate"] == 0.0
    assert found["quality"]["agreement"] == 1.0
    assert found["quality"]["logit_distance_p99"] < 1e-3
    assert "does not pay" in found["verdict"]


def test_the_order_of_the_data_changes_the_batches_and_not_the_answers(
    rows_database: Path, later: Path, result: dict[str, Any]
) -> None:
    """Each sequence has its own record, whatever else is in its batch."""
    found = evaluate(rows_database, [later], replace(QUICK, sort=False, controls=False, sweep=False))
    assert found["conditions"]["batches"] == "in the order of the data"
    assert found["rows_computed"] == result["rows_computed"]
    assert found["quality"]["cosine_mean"] == pytest.approx(result["quality"]["cosine_mean"], abs=1e-4)


def test_how_far_a_token_may_move_is_a_setting(rows_database: Path, later: Path, result: dict[str, Any]) -> None:
    options = replace(QUICK, most_moved=0, controls=False, sweep=False)
    found = evaluate(rows_database, [later], options)
    assert found["conditions"]["most_moved"] == 0
    assert found["share_computed"] > result["share_computed"]


def test_the_model_is_left_as_it_was(rows_database: Path, later: Path) -> None:
    """And the warning that says what to measure is not given by what measures it."""
    loaded = load_model(Filling.read(rows_database).model.name)
    with closing(open_prepared(rows_database)) as database:
        RowTrial(loaded, database, QUICK).serve_at_will()
        assert loaded.model.attmemo.enabled  # type: ignore[union-attr]
        unmemoize(loaded.model)
    assert all("forward" not in module.__dict__ for module in loaded.model.modules())


def test_serving_warns_that_answers_are_not_guarded_and_measuring_does_not(
    rows_database: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(open_prepared(rows_database)) as database:
        loaded = load_model(database.filling.model.name)
        RowTrial(loaded, database, QUICK).serve()
        assert "nothing guards" not in caplog.text
        memoize(loaded.model, database=rows_database, budget=None)
        assert "nothing guards" in caplog.text


# -- controls


def test_controls_give_what_they_say(rows_database: Path) -> None:
    with closing(open_prepared(rows_database)) as database:
        kinds = ZeroedRows(database), MeanRows(database), RandomRecord(database)
        own = kinds[0].record(3)
        zeros, means, stranger = (kind.instead(3) for kind in kinds)
        for found in (zeros, means, stranger):
            assert found.rows.shape == own.rows.shape
            assert found.last.shape == own.last.shape
            assert found.rows.dtype == own.rows.dtype
        assert not zeros.rows.any()
        assert not zeros.last.any()
        assert torch.equal(means.rows, means.rows[:, :, :1].expand_as(means.rows))
        assert not torch.equal(stranger.rows, own.rows)


@pytest.mark.parametrize("name", CONTROLS)
def test_the_rows_of_records_are_nearer_to_exact_than_those_of_a_control(
    rows_database: Path, later: Path, name: str
) -> None:
    """The last hidden states of all tokens, through the path that serves. The weights are random, so a position
    counts as much as a word: only tokens at their old places are served."""
    with closing(open_prepared(rows_database)) as database:
        loaded = load_model(database.filling.model.name)
        inputs = collate(loaded, tokenize(loaded, later.read_text().splitlines()[:16], 48))
        valid = inputs["attention_mask"].bool()
        model: Any = loaded.model
        memoize(model, 0.1, rows_database, most_moved=0, gate=False, budget=None)
        engine, host = model.attmemo.engine, model.attmemo.host
        with torch.inference_mode():
            given = host(**inputs).last_hidden_state
            with serving_rows(engine, database, name):
                control = host(**inputs).last_hidden_state
            assert model.attmemo.stats()["reused"] > 8
            unmemoize(model)
            exact = host(**inputs).last_hidden_state
        near, far = ((exact - found)[valid].norm(dim=1).mean() for found in (given, control))
        assert 0.0 < near < 0.9 * far


@pytest.mark.parametrize("name", CONTROLS)
def test_the_records_are_back_after_a_control(rows_database: Path, name: str) -> None:
    """After an error too; and inside, another number is served."""
    with closing(open_prepared(rows_database)) as database:
        loaded = load_model(database.filling.model.name)
        model: Any = loaded.model
        memoize(model, database=rows_database, budget=None)
        store = model.attmemo.engine.reuse.store
        with serving_rows(model.attmemo.engine, database, name):
            assert model.attmemo.engine.reuse.store is not store
        with pytest.raises(RuntimeError), serving_rows(model.attmemo.engine, database, name):
            raise RuntimeError
        assert model.attmemo.engine.reuse.store is store


# -- report


def test_a_report_has_plots_by_share(result: dict[str, Any], tmp_path: Path) -> None:
    panels = {panel.title: panel for panel in present_panels(result)}
    for title in ("Speed", "Same answers", "Cosine"):
        axes = Figure().subplots()
        panels[title].draw(axes, result)
        assert axes.get_xlabel() == "share of tokens recomputed"
    page = write_report(result, tmp_path)[0].read_text(encoding="utf-8")
    for part in ("Tokens recomputed", "Sequences reused", "Speed-up on original", "zeroed rows", "Reuse of rows"):
        assert part in page, part
    assert json.loads((tmp_path / "result.json").read_text()) == result


def test_plots_by_share_stand_numbers_that_are_missing(result: dict[str, Any]) -> None:
    """No controls, or answers that are classes alone and have no cosine."""
    rows = [row | {"cosine_mean": None, "cosine_p1": None} for row in result["sweep"]]
    for less in (result | {"controls": []}, result | {"sweep": rows}):
        for panel in present_panels(less):
            panel.draw(Figure().subplots(), less)


def test_the_speed_plot_shows_the_limit(result: dict[str, Any]) -> None:
    axes = Figure().subplots()
    next(panel for panel in present_panels(result) if panel.title == "Speed").draw(axes, result)
    (limit,) = [line for line in axes.get_lines() if line.get_label() == "limit: 1 / share"]
    for share, speed in zip(limit.get_xdata(), limit.get_ydata(), strict=True):  # type: ignore[arg-type]
        assert speed == pytest.approx(1.0 / share)


def test_tables_have_no_columns_of_maps(result: dict[str, Any]) -> None:
    titles = {table.title: table for table in make_tables(result)}
    assert "By layer" not in titles
    assert "tokens recomputed" in titles["By threshold"].columns
    assert "Hit rate, ceiling" not in [row[0] for row in titles["Summary"].rows]


# -- refused by name


def test_what_only_maps_have_is_refused(rows_database: Path, later: Path) -> None:
    with pytest.raises(AttmemoError, match="leave --lookup out"):
        evaluate(rows_database, [later], replace(QUICK, lookup="layer"))
    with pytest.raises(ValueError, match="one share of tokens"):
        evaluate(rows_database, [later], replace(QUICK, threshold=[0.5, 0.6]))
    with pytest.raises(DatabaseError, match="there is no embedder to train"):
        train_database(rows_database)
    with pytest.raises(TuningError, match="thresholds of maps only"):
        tune(rows_database, [later], TuneOptions())


def test_the_database_of_an_evaluation_is_untouched(rows_database: Path, later: Path) -> None:
    before = {file: file.read_bytes() for file in rows_database.rglob("*") if file.is_file()}
    evaluate(rows_database, [later], replace(QUICK, controls=False, sweep=False))
    after = {file: file.read_bytes() for file in rows_database.rglob("*") if file.is_file()}
    assert {name for name in before | after if before.get(name) != after.get(name)} <= {
        rows_database / "catalogue/lock.mdb"
    }
