"""The long demo: it builds, trains, tunes and evaluates a database of maps on a log."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attmemo.cli.app import app
from attmemo.db import Database
from attmemo.profiler import demo
from attmemo.profiler.logs import generate_log


def run(*args: str | Path) -> Any:
    return CliRunner().invoke(app, ["demo", "--maps", *map(str, args)], prog_name="attmemo")


@contextmanager
def shortened(model: str) -> Iterator[None]:
    """A demo of seconds: another model, fewer lines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "LINES", 300)
        patch.setattr(demo, "model_path", lambda: model)
        yield


@pytest.fixture
def small(tiny_bert: str) -> Iterator[None]:
    with shortened(tiny_bert):
        yield


@pytest.fixture(scope="module")
def made(tiny_bert: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What a demo leaves behind, and what it says."""
    output = tmp_path_factory.mktemp("demo") / "out"
    with shortened(tiny_bert):
        result = run("--output", output, "--json", output.parent / "result.json")
    assert result.exit_code == 0, result.output
    return output, result.stdout


class TestRun:
    def test_ends_with_a_table_a_report_and_what_to_do_next(self, made: tuple[Path, str]) -> None:
        output, said = made
        for shown in ("Hit rate", "Speed-up", "Cosine, mean", "Same answer", "Threshold", "mean map"):
            assert shown in said
        assert f"Report: {output / 'report' / 'report.html'}" in said
        assert (output / "report" / "report.html").stat().st_size > 10_000
        last = said.splitlines()[-5:]
        for command in ("build-database --model", "train-embedder", "tune DB", "evaluate DB"):
            assert any(f"attmemo {command}" in line for line in last)

    def test_asks_later_lines_than_it_stores(self, made: tuple[Path, str]) -> None:
        output, _ = made
        found = json.loads((output.parent / "result.json").read_text())
        parts = [(output / f"{name}.log").read_text().splitlines() for name in ("build", "tune", "ask")]
        assert [len(part) for part in parts] == [141, 105, 54]
        assert list(chain(*parts)) == list(generate_log(300, seed=0, services=("login",)))
        assert found["evaluation"]["data"]["sequences"] == 54
        assert found["evaluation"]["threshold_source"].startswith("tuned")
        with Database(output / "database") as database:
            assert len(database) == 141
            assert database.manifest.tuning is not None

    @pytest.mark.usefixtures("small")
    def test_takes_the_users_log_and_replaces_an_earlier_demo(self, made: tuple[Path, str], tmp_path: Path) -> None:
        log = tmp_path / "messages"  # no suffix, blank lines, bytes that are not UTF-8, longer than is used
        lines = list(generate_log(310, seed=9))
        log.write_bytes(b"\n\n".join(line.encode() for line in lines) + b" \xff\n")
        output = Path(shutil.copytree(made[0], tmp_path / "out"))
        with Database(output / "database") as database:
            before = database.manifest.uuid
        assert run(log, "--output", output).exit_code == 0
        kept = (output / "service.log").read_text().splitlines()
        assert kept[:-1] == lines[10:-1]
        with Database(output / "database") as database:
            assert len(database) == 141
            assert database.manifest.uuid != before


def test_the_lines_are_enough_to_certify_the_budget() -> None:
    from attmemo.perfmodel.tuner import sequences_needed

    assert round(demo._PARTS["tune"] * demo.LINES) >= 2 * sequences_needed(demo.BUDGET) - 1
    assert sum(demo._PARTS.values()) == pytest.approx(1)
