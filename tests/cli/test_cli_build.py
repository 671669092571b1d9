"""Building from the command line, and bad input: what is refused, how, and with which next step."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from command_line import attmemo, ended_by, refuse, succeed

from attmemo.cli import console
from attmemo.db import Database, read_manifest
from attmemo.errors import AttmemoError, DataError
from attmemo.profiler.logs import generate_log


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
        code, stderr = ended_by(
            signal.SIGINT, lambda: len(list(path.glob("arena/map-*.slots"))) > 2, *args, "--batch-size", "1"
        )
        assert code == 130
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
