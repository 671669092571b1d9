"""The commands work together: build, train, tune, evaluate, look, check."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from command_line import attmemo, refuse, succeed
from pools import damage

from attmemo import memoize, unmemoize
from attmemo.db.pools.filling import Filling
from attmemo.db.pools.prepared import open_prepared
from attmemo.profiler.models import collate, load_model, tokenize


def test_texts_that_are_added_after_the_training_tune_and_serve(
    database: Path, tiny_bert: str, logs: dict[str, Path]
) -> None:
    out = succeed("build-database", "--model", tiny_bert, "--data", logs["tune"], "--output", database)
    assert f"Next: attmemo tune {database} --data FILE" in out
    out = succeed("tune", database, "--data", logs["tune"], "--budget", "0.5")
    assert "200 texts are in the database; each was judged with the records before" in out
    assert "left out" not in out


class TestWork:
    def test_the_whole_way(self, database: Path, logs: dict[str, Path], tmp_path: Path) -> None:
        tuned = json.loads(
            succeed("tune", database, "--data", logs["tune"], "--budget", "0.2", "--allow-uncertified", "--json", "-")
        )
        assert len(tuned["thresholds"]) == 2
        out = succeed(
            "evaluate", database, "--data", logs["ask"], "--report", tmp_path / "report", "--repeats", "1",
            "--json", tmp_path / "result.json", "--exhaustive", "20", "--limit", "40",
        )  # fmt: skip
        assert "Summary" in out
        assert str(tmp_path / "report" / "report.html") in out
        result = json.loads((tmp_path / "result.json").read_text())
        assert result["threshold_source"].startswith("tuned")
        assert {file.name for file in (tmp_path / "report").iterdir()} == {"report.html", "result.json"}
        assert json.loads((tmp_path / "report" / "result.json").read_text()) == result

    def test_parts_can_be_left_out(self, database: Path, logs: dict[str, Path]) -> None:
        out = succeed(
            "evaluate", database, "--data", logs["ask"], "--threshold", "0.5,0.5", "--lookup", "layer",
            "--limit", "20", "--repeats", "1", "--no-controls", "--no-sweep", "--no-gate", "--exhaustive", "0",
            "--json", "-",
        )  # fmt: skip
        result = json.loads(out)
        assert result["lookup"] == "layer"
        assert result["data"]["sequences"] == 20
        assert not result.get("controls")
        assert not result.get("sweep")

    def test_inspect(self, database: Path, logs: dict[str, Path], tiny_bert: str) -> None:
        found = json.loads(succeed("inspect", database, "--json", "-"))
        assert found["model"]["family"] == "bert"
        assert found["records"] == 300
        assert sum(found["lengths"].values()) == 300
        assert 0 < found["held_out"] < 100
        assert found["not_indexed"] == 0
        assert found["embedder"]["backend"] == "flat"
        assert found["tuning"] is None
        assert found["reuse"] == "maps"
        assert [kind["kind"] for kind in found["kinds"]] == ["map", "input"]
        assert sum(kind["bytes"] for kind in found["kinds"]) == found["bytes"]
        out = succeed("inspect", database)
        assert logs["build"].name in out
        assert found["model"]["fingerprint"] in out
        succeed("build-database", "--model", tiny_bert, "--data", logs["tune"], "--output", database, "--limit", "7")
        assert json.loads(succeed("inspect", database, "--json", "-"))["not_indexed"] == 7
        assert f"attmemo tune {database} --data FILE" in succeed("inspect", database)

    def test_check(self, database: Path) -> None:
        assert succeed("check", database) == f"{database}: 1,200 slots, all checksums match\n"
        found = json.loads(succeed("check", database, "--json", "-"))
        assert found == {"path": str(database), "slots": 1200, "ok": True, "findings": []}

    def test_json_leaves_other_text_to_standard_error(self, database: Path) -> None:
        result = attmemo("inspect", database, "--json", "-")
        json.loads(result.stdout)
        assert "fingerprint" in result.stderr

    def test_quiet_says_nothing(self, database: Path, tmp_path: Path) -> None:
        result = attmemo("check", database, "--quiet", "--json", tmp_path / "check.json")
        assert (result.exit_code, result.output) == (0, "")
        assert json.loads((tmp_path / "check.json").read_text())["ok"]
        assert "Next:" in refuse("check", tmp_path / "none", "--quiet")

    def test_training_measures_unless_told_not_to(self, tmp_path: Path, tiny_bert: str, logs: dict[str, Path]) -> None:
        path = tmp_path / "db"
        succeed("build-database", "--model", tiny_bert, "--data", logs["build"], "--limit", "60", "--output", path)
        report = json.loads(succeed("train-embedder", path, "--steps", "2", "--json", "-"))
        assert report["backend"] == "faiss"
        assert report["profile"] is not None
        assert "measured on" in succeed("inspect", path)
        report = json.loads(succeed("train-embedder", path, "--steps", "2", "--no-profile", "--json", "-"))
        assert report["profile"] is None
        assert "not measured" in succeed("inspect", path)


class TestRows:
    """The way of a database of rows: no training, no tuning."""

    @pytest.fixture(scope="class")
    def stored(self, tmp_path_factory: pytest.TempPathFactory, tiny_bert: str, logs: dict[str, Path]) -> Path:
        path = tmp_path_factory.mktemp("rows") / "db"
        out = succeed(
            "build-database", "--reuse", "rows", "--model", tiny_bert, "--data", logs["build"], "--max-length", "48",
            "--admit", "0.5", "--output", path,
        )  # fmt: skip
        assert f"Next: attmemo evaluate {path}" in out
        assert "were not stored: a record has the same tokens, or supplies most of them" in out
        return path

    def test_evaluate(self, stored: Path, logs: dict[str, Path], tmp_path: Path) -> None:
        out = succeed(
            "evaluate", stored, "--data", logs["ask"], "--report", tmp_path / "report", "--repeats", "1",
            "--limit", "40", "--threshold", "0.3", "--most-moved", "8", "--json", tmp_path / "result.json",
        )  # fmt: skip
        assert "Tokens recomputed" in out
        assert "zeroed rows" in out
        result = json.loads((tmp_path / "result.json").read_text())
        assert (result["reuse"], result["threshold"]) == ("rows", 0.3)
        assert json.loads((tmp_path / "report" / "result.json").read_text()) == result
        assert str(tmp_path / "report" / "report.html") in out

    def test_inspect_tells_what_records_take(self, stored: Path) -> None:
        found = json.loads(succeed("inspect", stored, "--json", "-"))
        assert (found["reuse"], found["storage"], found["prepared"]) == ("rows", "int8", True)
        assert sum(found["lengths"].values()) == found["records"] > 0
        assert found["record_bytes"] < found["bytes"] < found["record_bytes"] + found["segments"] * (32 << 20) // 256
        out = succeed("inspect", stored)
        assert "rows, stored as int8; prepared" in out
        assert "Records by tokens" in out
        assert "train-embedder" not in out

    def test_inspect_tells_where_a_guard_stands(self, stored: Path, logs: dict[str, Path], tiny_bert: str) -> None:
        loaded = load_model(tiny_bert)
        texts = logs["ask"].read_text().splitlines()[:24]
        memoize(loaded.model, 0.3, stored, tokenizer=loaded.tokenizer, gate=False, budget=0.01)
        with torch.inference_mode():
            loaded.model(**collate(loaded, tokenize(loaded, texts, 48)))
        said = loaded.model.attmemo.stats()["guard"]["says"]
        unmemoize(loaded.model)
        found = json.loads(succeed("inspect", stored, "--json", "-"))
        assert [guard["says"] for guard in found["guards"]] == [said]
        assert "guard of answer=auto" in succeed("inspect", stored)
        succeed("check", stored)

    def test_check_reads_every_record(self, stored: Path, tmp_path: Path) -> None:
        found = json.loads(succeed("check", stored, "--json", "-"))
        assert found["ok"]
        assert found["records"] == Filling.read(stored).records
        damage(open_prepared(shutil.copytree(stored, tmp_path / "db")).records[3])
        assert "segments/0000000000, record 3: the bytes do not match" in attmemo("check", tmp_path / "db").output

    @pytest.mark.parametrize(("command", "said"), [
        ("train-embedder {db}", "there is no embedder to train"),
        ("tune {db} --data {ask}", "thresholds of maps only"),
        ("evaluate {db} --data {ask} --threshold 0.5,0.6", "rows have one"),
        ("evaluate {db} --data {ask} --lookup layer", "once per sequence"),
        ("build-database --model {model} --data {ask} --output {db}", "keeps rows; asked: maps"),
        ("build-database --reuse rows --model {model} --data {ask} --output {db}/x --dtype uint8", "not stored as"),
        ("build-database --model {model} --data {ask} --output {db}/x --dtype int8", "not stored as int8"),
    ])  # fmt: skip
    def test_what_belongs_to_maps_is_refused_by_name(
        self, stored: Path, tiny_bert: str, logs: dict[str, Path], command: str, said: str
    ) -> None:
        assert said in refuse(*shlex.split(command.format(db=stored, ask=logs["ask"], model=tiny_bert)))
