"""The command line: what it explains, what it refuses and how, and that its commands work together."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from command_line import MAIN, attmemo, refuse, succeed
from hypothesis import given
from hypothesis import strategies as st

from attmemo import memoize, unmemoize
from attmemo.cli import console
from attmemo.cli.app import app
from attmemo.cli.look import histogram
from attmemo.cli.options import parse_size, parse_threshold
from attmemo.db import Database, read_manifest
from attmemo.errors import AttmemoError, DataError
from attmemo.profiler.logs import generate_log
from attmemo.profiler.models import collate, load_model, tokenize

ROOT: Any = typer.main.get_command(app)


def commands(command: Any = ROOT, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it, the groups included."""
    yield path, command
    for name, sub in getattr(command, "commands", {}).items():
        yield from commands(sub, (*path, name))


COMMANDS = dict(commands())
LEAVES = {path: command for path, command in COMMANDS.items() if not hasattr(command, "commands")}


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory, service_log: Path) -> dict[str, Path]:
    """Lines to build from, and later ones of the same services to tune on and to ask."""
    folder = tmp_path_factory.mktemp("logs")
    lines = list(generate_log(700, seed=5))
    files = {"build": service_log}
    for name, part in (("tune", lines[300:500]), ("ask", lines[500:])):
        files[name] = folder / f"{name}.log"
        files[name].write_text("".join(f"{line}\n" for line in part))
    return files


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_bert: str, logs: dict[str, Path]) -> Path:
    """A database that was built and trained; tests that change one take a copy."""
    path = tmp_path_factory.mktemp("database") / "db"
    out = succeed("build-database", "--model", tiny_bert, "--data", logs["build"], "--output", path)
    assert f"attmemo train-embedder {path}" in out
    out = succeed("train-embedder", path, "--steps", "0", "--backend", "flat", "--no-profile")
    assert f"attmemo tune {path}" in out
    return path


@pytest.fixture
def database(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained database."""
    return Path(shutil.copytree(trained, tmp_path / "db"))


def test_texts_that_are_added_after_the_training_tune_and_serve(
    database: Path, tiny_bert: str, logs: dict[str, Path]
) -> None:
    out = succeed("build-database", "--model", tiny_bert, "--data", logs["tune"], "--output", database)
    assert f"Next: attmemo tune {database} --data FILE" in out
    out = succeed("tune", database, "--data", logs["tune"], "--budget", "0.5")
    assert "200 texts are in the database; each was judged with the records before" in out
    assert "left out" not in out


class TestHelp:
    @pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
    def test_explains_every_parameter(self, path: tuple[str, ...]) -> None:
        shown = succeed(*path, "--help")
        letters = "".join(shown.split())  # lines are broken at hyphens too
        assert COMMANDS[path].help, "a command without a description"
        for parameter in COMMANDS[path].params:
            assert parameter.help, f"{parameter.name} is not described"
            assert "".join(parameter.help.split()) in letters
            for name in (*parameter.opts, *parameter.secondary_opts):
                if name.startswith("-"):
                    assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", shown), name

    @pytest.mark.parametrize("path", LEAVES, ids=" ".join)
    def test_shows_every_default(self, path: tuple[str, ...]) -> None:
        letters = "".join(succeed(*path, "--help").split())
        for parameter in LEAVES[path].params:
            if parameter.default not in (None, False) and not parameter.required:
                shown = parameter.default
                if shown is True:
                    shown = parameter.opts[0].lstrip("-")
                assert f"default:{shown}" in letters, parameter.name

    # A service has no result, and logs in JSON.
    @pytest.mark.parametrize("path", sorted(LEAVES.keys() - {("serve",)}), ids=" ".join)
    def test_every_command_is_quiet_and_gives_json_on_request(self, path: tuple[str, ...]) -> None:
        options = {name for parameter in LEAVES[path].params for name in parameter.opts}
        assert {"--json", "--quiet"} <= options

    def test_the_overview_has_every_command_once_in_the_order_of_the_groups(self) -> None:
        *_, overview = succeed("--help").partition("\nStart:\n")
        groups = re.findall(r"^(\S[^\n]*):$", "Start:\n" + overview, re.MULTILINE)
        assert groups[:4] == ["Start", "Serve", "Databases", "Databases of attention maps"]
        assert groups[4:] == ["Benchmarks", "Text generation"]
        shown = re.findall(r"^  ([a-z-]+)  ", overview, re.MULTILINE)
        assert sorted(shown) == sorted(ROOT.commands)
        assert shown[:5] == ["demo", "doctor", "advise", "families", "serve"]

    @pytest.mark.parametrize("columns", [60, 80, 200])
    def test_the_overview_shows_the_whole_first_sentence_of_every_command(self, columns: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", str(columns))
            shown = succeed("--help")
        assert "..." not in shown.partition("\nStart:\n")[2]
        for command in ROOT.commands.values():
            first, _, _ = command.help.partition("\n\n")
            assert " ".join(first.split()) in " ".join(shown.split()), command.name

    def test_no_command_shows_the_overview(self) -> None:
        assert "\nStart:\n" in attmemo().output

    def test_version(self) -> None:
        assert re.fullmatch(r"attmemo \d+\.\d+\.\d+\S*\n", succeed("--version"))

    def test_the_package_runs_as_a_program(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "attmemo", "--version"], capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stdout == succeed("--version")

    def test_answers_without_loading_torch(self) -> None:
        # The package's own __init__ is replaced, so that what is asked is what the command line itself imports.
        code = (
            "import sys, types, pathlib, importlib.util\n"
            "package = types.ModuleType('attmemo')\n"
            "package.__path__ = importlib.util.find_spec('attmemo').submodule_search_locations\n"
            "sys.modules['attmemo'] = package\n"
            "from attmemo.cli.app import app\n"
            "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
            "print({'torch', 'numpy', 'pandas', 'matplotlib', 'transformers'} & set(sys.modules), file=sys.stderr)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        assert done.stderr == "set()\n"

    def test_defaults_are_those_of_the_library(self) -> None:
        from attmemo.embed.training import TrainOptions
        from attmemo.profiler.build import BuildOptions
        from attmemo.profiler.evaluate import EvaluateOptions
        from attmemo.profiler.tune import TuneOptions

        elsewhere = {"max_bytes", "shard"}  # the library has no limit unless it is given one; a shard is written 1/1
        for name, options in (
            ("build-database", BuildOptions()),
            ("train-embedder", TrainOptions()),
            ("tune", TuneOptions()),
            ("evaluate", EvaluateOptions()),
        ):
            fields = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
            for parameter in LEAVES[name,].params:
                if parameter.name in fields.keys() - elsewhere:
                    assert parameter.default == fields[parameter.name], f"{name} --{parameter.name}"


class TestOptions:
    @pytest.mark.parametrize(
        ("text", "size"),
        [
            ("8GiB", 8 << 30), ("500MB", 500_000_000), ("500 mb", 500_000_000), ("1.5K", 1536), ("2m", 2 << 20),
            ("123", 123), ("7b", 7), (".5 KiB", 512), ("1TiB", 1 << 40), ("3.GB", 3_000_000_000),
        ],
    )  # fmt: skip
    def test_size(self, text: str, size: int) -> None:
        assert parse_size(text) == size

    @given(st.integers(1, 10**9), st.sampled_from(["", "K", "M", "G", "T"]))
    def test_whole_sizes_are_exact(self, number: int, unit: str) -> None:
        assert parse_size(f"{number}{unit}") == number * 1024 ** "KMGT".find(unit or "-").__add__(1)

    @pytest.mark.parametrize("text", ["", "GiB", "8 giga", "-3", "1e9", "0", "3iB", "nan", "8G8"])
    def test_no_size(self, text: str) -> None:
        with pytest.raises(typer.BadParameter, match="8GiB"):
            parse_size(text)

    @pytest.mark.parametrize(
        ("text", "threshold"), [("auto", "auto"), ("0.9", 0.9), ("1", 1.0), ("0", 0.0), ("0.9, 0.8", [0.9, 0.8])]
    )
    def test_threshold(self, text: str, threshold: object) -> None:
        assert parse_threshold(text) == threshold

    @pytest.mark.parametrize("text", ["", "Auto", "1.01", "-0.1", "nan", "0.9,", "0.9;0.8", "high"])
    def test_no_threshold(self, text: str) -> None:
        with pytest.raises(typer.BadParameter):
            parse_threshold(text)

    @pytest.mark.parametrize(
        ("args", "said"),
        [
            ("build-database --data a.log", "--model"),
            ("build-database --model m", "--data"),
            ("build-database --model m --data a --max-bytes lots", "--max-bytes"),
            ("build-database --model m --data a --max-length 1", "--max-length"),
            ("build-database --model m --data a --limit 0", "--limit"),
            ("build-database --model m --data a --dtype int4", "--dtype"),
            ("build-database --model m --data a --held-out 0.9", "--held-out"),
            ("build-database --model m --data a --batch-size none", "--batch-size"),
            ("build-database --model m --data a --colour", "--colour"),
            ("train-embedder", "DB"),
            ("train-embedder db --backend annoy", "--backend"),
            ("train-embedder db --steps -1", "--steps"),
            ("tune db", "--data"),
            ("tune db --data a --budget 1", "--budget"),
            ("tune db --data a --budget 1%", "--budget"),
            ("tune db --data a --budget 0", "above 0"),
            ("tune db --data a --pooling max", "--pooling"),
            ("tune db --data a --confidence 0", "--confidence"),
            ("tune db --data a --lookup both", "--lookup"),
            ("tune db --data a --min-cosine 2", "--min-cosine"),
            ("evaluate db --data a --threshold 95", "--threshold"),
            ("evaluate db --data a --repeats 0", "--repeats"),
            ("bench gather --length 0", "--length"),
            ("observe db", "observe"),
            ("inspect ''", "an empty text would be the working directory"),
        ],
    )
    def test_wrong_usage_is_named(self, args: str, said: str) -> None:
        result = attmemo(*shlex.split(args))
        assert result.exit_code == 2, result.output
        assert said in result.stderr
        assert "Traceback" not in result.output

    @pytest.mark.parametrize(
        "args", ["serve m", "advise m f", "bench peers m f", "bench layer", "build-database --model m --data f"]
    )
    def test_float16_is_answered_with_the_type_to_take(self, args: str) -> None:
        option = "--model-dtype" if args.startswith("build") else "--dtype"
        result = attmemo(*shlex.split(args), option, "float16")
        assert result.exit_code == 2
        assert "write bfloat16" in result.stderr
        assert "Value error" not in result.stderr

    def test_a_file_where_the_database_belongs(self, service_log: Path) -> None:
        result = attmemo("tune", "--data", service_log, service_log, "db")
        assert result.exit_code == 2
        assert "a database is a directory" in result.stderr


class TestBuild:
    def test_data_may_be_given_in_both_ways(self, tmp_path: Path, tiny_bert: str) -> None:
        files = []
        for number in range(4):
            files.append(tmp_path / f"{number}.log")
            files[-1].write_text("".join(f"{line}\n" for line in generate_log(5, seed=number)))
        common = ("build-database", "--model", tiny_bert, "--json", "-")
        data = ("--data", files[0], files[1], "--output", tmp_path / "db", "--data", files[2], files[3])
        assert json.loads(succeed(*common, *data))["records"] == 20
        assert {s.name for s in read_manifest(tmp_path / "db").sources} == {f"{n}.log" for n in range(4)}

    def test_without_a_place_it_goes_where_memoize_looks(
        self, tmp_path: Path, tiny_bert: str, service_log: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from attmemo.db import find_database

        monkeypatch.setenv("ATTMEMO_CACHE", str(tmp_path / "cache"))
        out = succeed("build-database", "--model", tiny_bert, "--data", service_log, "--limit", "10", "--json", "-")
        path = Path(json.loads(out)["path"])
        assert path.parent == tmp_path / "cache"
        assert find_database(read_manifest(path).model.fingerprint) == path

    def test_the_same_command_resumes(self, tmp_path: Path, tiny_bert: str, service_log: Path) -> None:
        common = ("build-database", "--model", tiny_bert, "--data", service_log, "--output", tmp_path / "db")
        succeed(*common, "--limit", "20")
        found = json.loads(succeed(*common, "--limit", "50", "--json", "-"))
        assert (found["records"], found["added"], found["skipped"]) == (50, 30, 20)

    def test_the_size_limit_stops_it_and_is_kept(self, tmp_path: Path, tiny_bert: str, service_log: Path) -> None:
        out = succeed(
            "build-database", "--model", tiny_bert, "--data", service_log, "--output", tmp_path / "db",
            "--max-bytes", "2MiB",
        )  # fmt: skip
        assert "--max-bytes" in out
        with Database(tmp_path / "db") as database:
            assert 0 < len(database) < 300
            assert database.bytes <= 2 << 20

    def test_a_full_disk_keeps_what_was_published(
        self, tmp_path: Path, tiny_bert: str, service_log: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from attmemo.db import files

        common = ("build-database", "--model", tiny_bert, "--data", service_log, "--output", tmp_path / "db")
        succeed(*common, "--limit", "20")
        real, left = files.write_all, [50]

        def fills(fd: int, body: bytes, offset: int) -> None:
            left[0] -= 1
            if left[0] < 0:
                real(fd, body[: len(body) // 2], offset)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(fd, body, offset)

        monkeypatch.setattr(files, "write_all", fills)
        assert "disk is full" in refuse(*common)
        monkeypatch.undo()
        assert succeed("check", tmp_path / "db").endswith("all checksums match\n")
        with Database(tmp_path / "db") as database:
            assert len(database) >= 20
        assert json.loads(succeed(*common, "--json", "-"))["records"] == 300

    def test_control_c_leaves_a_database_that_resumes(self, tmp_path: Path, tiny_bert: str) -> None:
        path, log = tmp_path / "db", tmp_path / "long.log"
        log.write_text("".join(f"{line}\n" for line in generate_log(20_000, seed=3)))
        args = ["build-database", "--model", tiny_bert, "--data", str(log), "--output", str(path)]
        # One text at a time: minutes of work, so that the signal comes long before the end.
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN, *args, "--batch-size", "1"], stderr=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            deadline = time.monotonic() + 120
            while len(list(path.glob("arena/map-*.slots"))) < 3:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            _, raw = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
        stderr = raw.decode()
        assert process.returncode == 130
        assert "interrupted; what was captured is published, the same command resumes" in stderr
        assert "Traceback" not in stderr
        assert "Exception ignored" not in stderr
        assert succeed("check", path).endswith("all checksums match\n")
        with Database(path) as database:
            before = len(database)
        assert before > 0
        # The rest would take long: more than was there is enough.
        found = json.loads(succeed(*args, "--limit", str(before + 300), "--json", "-"))
        assert found["skipped"] == before
        assert found["records"] == before + 300

    def test_control_c_before_anything_is_stored_says_so(
        self, tmp_path: Path, tiny_bert: str, service_log: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from attmemo.profiler import models

        def interrupt(*args: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(models, "load_model", interrupt)
        result = attmemo("build-database", "--model", tiny_bert, "--data", service_log, "--output", tmp_path / "db")
        assert result.exit_code == 130
        assert "interrupted before anything was stored" in result.stderr
        assert not (tmp_path / "db").exists()

    def test_a_second_control_c_does_not_spoil_the_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """While the interpreter ends, a library's farewell would show a traceback."""
        from attmemo.cli import app as module

        def interrupted() -> None:
            raise SystemExit(130)

        monkeypatch.setattr(module, "app", interrupted)
        before = signal.getsignal(signal.SIGINT)
        try:
            with pytest.raises(SystemExit):
                module.main()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGINT, before)

    @pytest.mark.parametrize("kind", ["file", "foreign", "bytes"])
    def test_a_place_that_cannot_be_is_refused_before_the_model_is_loaded(
        self, tmp_path: Path, service_log: Path, kind: str
    ) -> None:
        place = tmp_path / "place"
        if kind == "file":
            place.touch()
        elif kind == "foreign":
            place.mkdir()
            (place / "letter.txt").touch()
        said = refuse(
            "build-database", "--model", tmp_path / "no-model", "--data", service_log, "--output", place,
            "--max-bytes", "10" if kind == "bytes" else "1GiB",
        )  # fmt: skip
        assert "--max-bytes 10" in said if kind == "bytes" else "choose another --output" in said


class TestBadInput:
    @pytest.mark.parametrize(
        ("name", "content", "options", "said"),
        [
            ("absent.log", None, (), "no such file"),
            ("empty.log", "", (), "empty"),
            ("blank.log", "\n \n", (), "no non-blank rows"),
            ("table.csv", "id,text\n1,one line\n", ("--text-column", "body"), "no column 'body'"),
            ("table.csv", "id,text\n1,one line\n2,another\n", ("--text-column", "id"), "expected text"),
            ("lines.log", "one line\n", ("--text-column", "text"), "no column"),
            ("picture.png", "\x89PNG", (), "unknown suffix"),
        ],
    )
    @pytest.mark.parametrize("command", ["build-database", "tune", "evaluate"])
    def test_data(
        self, command: str, name: str, content: str | None, options: tuple[str, ...], said: str, trained: Path,
        tiny_bert: str, tmp_path: Path,
    ) -> None:  # fmt: skip
        file = tmp_path / name
        if content is not None:
            file.write_text(content, encoding="latin-1")
        if command == "build-database":
            start: tuple[str | Path, ...] = (command, "--model", tiny_bert, "--output", tmp_path / "new")
        else:
            start = (command, trained, *(("--threshold", "0.9") if command == "evaluate" else ()))
        stderr = refuse(*start, "--data", file, *options)
        assert said in stderr
        assert name in stderr
        assert not (tmp_path / "new").exists()

    def test_data_from_standard_input(self, tmp_path: Path, tiny_bert: str) -> None:
        for name in ("-", "/dev/stdin"):
            said = refuse("build-database", "--model", tiny_bert, "--output", tmp_path / "db", "--data", name)
            assert "write the data to a file first" in said

    def test_a_directory_of_other_things_is_not_proposed_for_a_database(self, tmp_path: Path) -> None:
        (tmp_path / "letter.txt").touch()
        assert f"--output {tmp_path}\n" not in refuse("inspect", tmp_path)

    def test_a_missing_model(self, tmp_path: Path, service_log: Path) -> None:
        stderr = refuse("build-database", "--model", tmp_path / "none", "--data", service_log)
        assert "no model in" in stderr

    def test_a_model_of_an_unknown_family(self, tmp_path: Path, service_log: Path, tiny_bert: str) -> None:
        from transformers import AutoTokenizer, XLNetConfig, XLNetModel

        config = XLNetConfig(vocab_size=900, d_model=32, n_layer=2, n_head=2, d_inner=48)
        XLNetModel(config).save_pretrained(tmp_path / "xlnet")
        AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path / "xlnet")
        stderr = refuse(
            "build-database", "--model", tmp_path / "xlnet", "--data", service_log, "--output", tmp_path / "db"
        )
        assert "no adapter knows" in stderr
        assert not (tmp_path / "db").exists()

    @pytest.mark.parametrize("command", ["train-embedder", "tune", "evaluate", "inspect", "check"])
    @pytest.mark.parametrize("kind", ["missing", "empty", "truncated", "flipped"])
    def test_database(self, command: str, kind: str, database: Path, logs: dict[str, Path]) -> None:
        if kind == "missing":
            shutil.rmtree(database)
        elif kind == "empty":
            shutil.rmtree(database)
            database.mkdir()
        elif kind == "truncated":
            arena = max(database.glob("arena/map-*.slots"), key=lambda file: file.stat().st_size)
            os.truncate(arena, arena.stat().st_size - 1)
        else:
            raw = bytearray((database / "MANIFEST.json").read_bytes())
            raw[len(raw) // 2] ^= 1
            (database / "MANIFEST.json").write_bytes(raw)
        data = ("--data", logs["tune"]) if command in ("tune", "evaluate") else ()
        assert str(database) in refuse(command, database, *data)

    def test_a_damaged_map(self, database: Path) -> None:
        arena = max(database.glob("arena/map-*.slots"), key=lambda file: file.stat().st_size)
        with arena.open("r+b") as file:
            file.seek(read_manifest(database).page_size + 8)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 64]))
        result = attmemo("check", database, "--json", "-")
        assert result.exit_code == 1
        found = json.loads(result.stdout)
        assert not found["ok"]
        assert [arena.name in finding["where"] for finding in found["findings"]] == [True]
        assert "Next:" in result.stderr
        assert arena.name in attmemo("check", database).stdout

    def test_a_database_of_another_model(self, database: Path, logs: dict[str, Path], tiny_deberta: str) -> None:
        assert "built for another" in refuse("tune", database, "--data", logs["tune"], "--model", tiny_deberta)
        stderr = refuse("build-database", "--model", tiny_deberta, "--data", logs["tune"], "--output", database)
        assert "another model" in stderr

    def test_a_database_that_was_not_trained(self, tmp_path: Path, tiny_bert: str, logs: dict[str, Path]) -> None:
        path = tmp_path / "db"
        succeed("build-database", "--model", tiny_bert, "--data", logs["build"], "--limit", "30", "--output", path)
        assert f"attmemo train-embedder {path}" in refuse("tune", path, "--data", logs["tune"])

    def test_a_database_that_was_not_tuned(self, database: Path, logs: dict[str, Path]) -> None:
        assert f"attmemo tune {database}" in refuse("evaluate", database, "--data", logs["ask"])

    def test_the_data_it_was_built_from(self, database: Path, logs: dict[str, Path]) -> None:
        assert "not in the database" in refuse("tune", database, "--data", logs["build"])

    def test_thresholds_for_another_number_of_layers(self, database: Path, logs: dict[str, Path]) -> None:
        stderr = refuse("evaluate", database, "--data", logs["ask"], "--threshold", "0.9,0.9,0.9")
        assert "2 layers" in stderr

    def test_a_json_file_that_cannot_be_written_is_refused_first(self, database: Path, tmp_path: Path) -> None:
        assert "--json" in refuse("inspect", database, "--json", tmp_path / "none" / "x.json")
        assert "--json" in refuse("inspect", database, "--json", tmp_path)

    def test_a_report_that_cannot_be_written_is_refused_first(
        self, database: Path, logs: dict[str, Path], tmp_path: Path
    ) -> None:
        (tmp_path / "file").touch()
        for place in (tmp_path / "file", tmp_path / "file" / "below"):
            said = refuse("evaluate", database, "--data", logs["ask"], "--model", tmp_path / "none", "--report", place)
            assert "--report" in said


class TestErrors:
    def test_an_unexpected_error_is_shown_without_a_traceback(
        self, monkeypatch: pytest.MonkeyPatch, database: Path
    ) -> None:
        def fail(self: Database, path: Path) -> None:
            raise RuntimeError("the first line\nthe second line")

        monkeypatch.delenv(console.TRACEBACK, raising=False)
        monkeypatch.setattr(Database, "__init__", fail)
        result = attmemo("inspect", database)
        assert result.exit_code == 1
        assert "error: unexpected RuntimeError: the first line\n" in result.stderr
        assert console.TRACEBACK in result.stderr
        monkeypatch.setenv(console.TRACEBACK, "1")
        assert isinstance(attmemo("inspect", database).exception, RuntimeError)

    @pytest.mark.parametrize(
        ("error", "said", "following"),
        [
            (DataError("no rows", "give some"), "no rows", "give some"),
            (AttmemoError("odd"), "odd", "--help"),
            (OSError(errno.ENOSPC, "No space left on device", "db/x"), "disk is full at db/x", "free space"),
            (PermissionError(errno.EACCES, "Permission denied", "db"), "db: Permission denied", "permissions"),
            (KeyError("heads"), "unexpected KeyError", console.TRACEBACK),
            (ValueError(), "unexpected ValueError", console.TRACEBACK),
        ],
    )
    def test_every_error_has_a_next_step(self, error: Exception, said: str, following: str) -> None:
        what, _, hint = console.describe(error).partition("\n  Next: ")
        assert said in what
        assert following in hint

    def test_interrupted_anywhere(self, monkeypatch: pytest.MonkeyPatch, database: Path) -> None:
        def interrupt(self: Database, path: Path) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(Database, "__init__", interrupt)
        result = attmemo("check", database)
        assert result.exit_code == 130
        assert "interrupted" in result.stderr


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
        assert {file.name for file in (tmp_path / "report").iterdir()} == {"report.html", "report.png", "result.json"}
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

    @pytest.mark.parametrize(
        "args",
        [
            "gather --heads 2 --length 16 --batch 2 --width 8 --repeats 1 --dtype float32",
            "search --records 100 --dimension 8 --queries 4 --repeats 1 --backend flat",
            "layer --hidden 16 --heads 2 --length 16 --batch 2 --layers 1 --repeats 1",
            "rows --hidden 32 --heads 2 --length 20 --batch 2 --layers 1 --repeats 1 --dtype float32",
        ],
    )
    def test_bench(self, args: str) -> None:
        out = succeed("bench", *shlex.split(args))
        assert "Conditions" in out
        found = json.loads(succeed("bench", *shlex.split(args), "--json", "-"))
        assert found["rows"]
        named, *measured = [key for key in found["rows"][0] if key not in found["conditions"]]
        assert {*measured, *(row[named] for row in found["rows"])} <= set(out.split())

    def test_bench_of_rows_refuses_a_family_without_blocks(self) -> None:
        said = refuse("bench", "rows", "--family", "albert", "--hidden", "32", "--heads", "2", "--length", "16")
        assert "cannot run the blocks" in said

    def test_bench_of_a_shape_that_is_none(self) -> None:
        assert "multiple of heads" in refuse("bench", "layer", "--hidden", "100", "--heads", "12")


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
        assert "Rows computed" in out
        assert "zeroed rows" in out
        result = json.loads((tmp_path / "result.json").read_text())
        assert (result["reuse"], result["threshold"]) == ("rows", 0.3)
        assert json.loads((tmp_path / "report" / "result.json").read_text()) == result
        assert str(tmp_path / "report" / "report.html") in out

    def test_inspect_tells_what_a_record_takes(self, stored: Path) -> None:
        found = json.loads(succeed("inspect", stored, "--json", "-"))
        assert (found["reuse"], found["storage"]) == ("rows", "int8")
        kinds = {kind["kind"]: kind for kind in found["kinds"]}
        assert list(kinds) == ["tokens", "rows", "scales", "last"]
        assert [kind["slots"] for kind in kinds.values()] == [1, 2, 2, 1]
        assert sum(kind["bytes"] for kind in kinds.values()) == found["bytes"]
        assert kinds["rows"]["bytes_per_record"] > kinds["last"]["bytes_per_record"]
        out = succeed("inspect", stored)
        assert "by tokens, without training" in out
        assert "train-embedder" not in out

    def test_inspect_tells_where_a_guard_stands(self, stored: Path, logs: dict[str, Path], tiny_bert: str) -> None:
        loaded = load_model(tiny_bert)
        texts = logs["ask"].read_text().splitlines()[:24]
        memoize(loaded.model, 0.3, stored, tokenizer=loaded.tokenizer, gate=False)
        with torch.inference_mode():
            loaded.model(**collate(loaded, tokenize(loaded, texts, 48)))
        said = loaded.model.attmemo.stats()["guard"]["says"]
        unmemoize(loaded.model)
        found = json.loads(succeed("inspect", stored, "--json", "-"))
        assert [guard["says"] for guard in found["guards"]] == [said]
        assert "guard of answer=auto" in succeed("inspect", stored)
        succeed("check", stored)

    def test_inspect_tells_the_same_of_maps(self, database: Path) -> None:
        found = json.loads(succeed("inspect", database, "--json", "-"))
        assert found["reuse"] == "maps"
        assert [kind["kind"] for kind in found["kinds"]] == ["map", "input"]
        assert sum(kind["bytes"] for kind in found["kinds"]) == found["bytes"]

    def test_check_reads_every_slot(self, stored: Path, tmp_path: Path) -> None:
        found = json.loads(succeed("check", stored, "--json", "-"))
        assert found["ok"]
        assert found["slots"] == 6 * len(Database(stored))
        damaged = Path(shutil.copytree(stored, tmp_path / "db"))
        file = next((damaged / "arena").glob("rows-*"))
        body = bytearray(file.read_bytes())
        body[read_manifest(damaged).page_size + 3] ^= 1
        file.write_bytes(body)
        assert file.name in attmemo("check", damaged).output

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


class TestConsole:
    def test_a_full_disk_leaves_the_json_that_was_there(
        self, tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place = tmp_path / "x.json"
        place.write_text("before")
        real = Path.write_bytes

        def full(self: Path, content: bytes) -> int:
            real(self, content[:5])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(Path, "write_bytes", full)
        assert "No space left" in refuse("inspect", database, "--json", place)
        assert place.read_text() == "before"
        assert {file.name for file in tmp_path.iterdir()} == {"x.json", "db"}

    def test_numbers_that_json_does_not_have(self, capsys: pytest.CaptureFixture[str]) -> None:
        with console.output("-", quiet=True) as out:
            out.result({"a": [float("nan"), 1.5, {"b": float("inf")}], 3: Path("x")})
        assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5, {"b": None}], "3": "x"}

    def test_markup_in_names_is_left_alone(self, capsys: pytest.CaptureFixture[str]) -> None:
        with console.output(None, quiet=False) as out:
            out.say("a [bold]file[/bold].log and :smile:")
            out.table("[red]title", ("[b]x",), [("[/]",), ("1",)])
        shown = capsys.readouterr().out
        for text in ("a [bold]file[/bold].log and :smile:", "[red]title", "[b]x", "[/]"):
            assert text in shown

    def test_a_long_line_is_not_broken(self, capsys: pytest.CaptureFixture[str]) -> None:
        with console.output(None, quiet=False) as out:
            out.say("attmemo train-embedder " + "x" * 500)
        assert capsys.readouterr().out.count("\n") == 1

    @pytest.mark.parametrize(("columns", "most"), [("60", 60), ("80", 80), ("100", 100), ("", 140), ("0", 140)])
    def test_a_table_is_as_wide_as_columns_says_also_in_a_pipe(
        self, columns: str, most: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", columns)
        with console.output(None, quiet=False) as out:
            out.table("Title", ("a name", "words"), [("x", "word " * 60)], "A note. " * 30)
        lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert most - 10 < max(map(len, lines)) <= most

    def test_progress_stays_out_of_standard_output(self, capsys: pytest.CaptureFixture[str]) -> None:
        with console.output(None, quiet=False) as out:
            for done in range(4):
                out.stages("first", done, 3)
            out.stages("second", 0, 0)
            out.stages("third", 1, 9)  # left unfinished, as by an error
        assert capsys.readouterr().out == ""

    @given(st.dictionaries(st.integers(1, 4096), st.integers(1, 10**6), min_size=1))
    def test_histogram_loses_no_record(self, lengths: dict[int, int]) -> None:
        rows = histogram(lengths)
        assert len(rows) <= 8
        assert sum(int(count.replace(",", "")) for *_, count in rows) == sum(lengths.values())


class TestFamilies:
    def test_all_of_them_are_listed(self) -> None:
        from attmemo.models import ADAPTERS

        found = json.loads(succeed("families", "--json", "-"))
        assert [row["family"] for row in found["families"]] == [adapter.family for adapter in ADAPTERS]
        assert all(row["models"] for row in found["families"])
        reuse = {row["family"]: row["reuse"] for row in found["families"]}
        assert reuse["bert"] == ["none", "rows", "maps"]
        assert reuse["albert"] == ["maps"]

    def test_the_list_says_which_modes_a_family_has(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "200")
        lines = succeed("families").splitlines()
        (head,) = [line for line in lines if line.startswith(" family ")]
        assert re.findall(r"exact|rows|maps", head) == ["exact", "rows", "maps", "exact"]  # the last: left exact
        modes = {words[0]: re.findall(r"\b(?:yes|no)\b", " ".join(words)) for line in lines if (words := line.split())}
        assert modes["bert"][:3] == ["yes", "yes", "yes"]
        assert modes["albert"] == ["no", "no", "yes"]
        assert (Path(__file__).parents[2] / "docs" / "own-family.md").is_file()
        assert "docs/own-family.md" in " ".join(lines)

    def test_a_model_is_told_by_its_configuration_alone(self, tiny_deberta: str, tmp_path: Path) -> None:
        shutil.copy(Path(tiny_deberta) / "config.json", tmp_path)
        found = json.loads(succeed("families", tmp_path, "--json", "-"))
        assert (found["family"], found["layers"], found["heads"]) == ("deberta-v2", 2, 4)
        assert (found["reuse"], found["no_rows"]) == (["none", "rows", "maps"], None)
        assert "works: exact (packed blocks), rows, maps" in succeed("families", tmp_path)

    def test_a_lookalike_is_promised_to_work(self, tmp_path: Path) -> None:
        """OLMo 2 is built as Llama is and norms all of K at once, which only its weights at work tell."""
        from transformers import Olmo2Config

        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
        Olmo2Config(**sizes).save_pretrained(tmp_path)
        said = " ".join(succeed("families", tmp_path).split())
        assert "looks like llama; memoize proves it on the weights" in said
        found = json.loads(succeed("families", tmp_path, "--json", "-"))
        assert "memoize proves it" in found["known_by"]
        assert found["reuse"] == ["maps"]
        assert "no packed blocks; only maps" in found["no_rows"]

    def test_a_model_that_is_refused_says_why(self, tmp_path: Path) -> None:
        from transformers import LlamaConfig, XLNetConfig

        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        LlamaConfig(**sizes, rope_parameters=rope).save_pretrained(tmp_path / "llama")
        XLNetConfig(d_model=32, n_layer=2, n_head=2).save_pretrained(tmp_path / "xlnet")
        for name, reason in (("llama", "depend on the length of the batch"), ("xlnet", "none of its modules")):
            done = attmemo("families", tmp_path / name)
            assert done.exit_code == 1
            assert reason in done.stdout.replace("\n", " ")

    def test_what_is_no_model_is_an_error(self, tmp_path: Path) -> None:
        assert "no model in" in refuse("families", tmp_path)
