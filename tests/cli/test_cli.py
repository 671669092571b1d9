"""The command line: what it explains, its options, what it prints where, and the families that it lists."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from command_line import attmemo, refuse, succeed
from hypothesis import given
from hypothesis import strategies as st

from attmemo.cli import console
from attmemo.cli.app import app
from attmemo.cli.look import histogram
from attmemo.cli.options import parse_size, parse_threshold

ROOT: Any = typer.main.get_command(app)


def commands(command: Any = ROOT, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it, the groups included."""
    yield path, command
    for name, sub in getattr(command, "commands", {}).items():
        yield from commands(sub, (*path, name))


COMMANDS = dict(commands())
LEAVES = {path: command for path, command in COMMANDS.items() if not hasattr(command, "commands")}


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

    def test_a_shell_completes_commands(self) -> None:
        asked = {"_ATTMEMO_COMPLETE": "complete_bash", "COMP_WORDS": "attmemo se", "COMP_CWORD": "1"}
        program = "from attmemo.cli.app import app; app(prog_name='attmemo')"
        found = subprocess.run(
            [sys.executable, "-c", program], env=os.environ | asked, capture_output=True, text=True, check=True
        )  # fmt: skip
        assert found.stdout.split() == ["serve"]

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
            ("bench peers m f --lines 0", "--lines"),
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
        "args", ["serve m", "advise m f", "bench peers m f", "build-database --model m --data f"]
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
        assert reuse["gpt2"] == ["maps"]
        assert reuse["bart"] == ["none", "maps"]
        assert reuse["llama"] == ["none", "maps"]

    def test_the_list_says_which_modes_a_family_has(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "200")
        lines = succeed("families").splitlines()
        (head,) = [line for line in lines if line.startswith(" family ")]
        assert re.findall(r"exact|rows|maps", head) == ["exact", "rows", "maps", "exact"]  # the last: left exact
        modes = {words[0]: re.findall(r"\b(?:yes|no)\b", " ".join(words)) for line in lines if (words := line.split())}
        assert modes["bert"][:3] == ["yes", "yes", "yes"]
        assert modes["opt"] == ["no", "no", "yes"]
        assert (Path(__file__).parents[2] / "docs" / "own-family.md").is_file()
        assert "docs/own-family.md" in " ".join(lines)

    def test_a_model_is_told_by_its_configuration_alone(self, tiny_deberta: str, tmp_path: Path) -> None:
        shutil.copy(Path(tiny_deberta) / "config.json", tmp_path)
        found = json.loads(succeed("families", tmp_path, "--json", "-"))
        assert (found["family"], found["layers"], found["heads"]) == ("deberta-v2", 2, 4)
        assert (found["reuse"], found["no_rows"]) == (["none", "rows", "maps"], None)
        assert "works: exact (packed blocks), rows, maps" in succeed("families", tmp_path)

    def test_a_family_says_whose_rows_are_equal(self, tmp_path: Path) -> None:
        from transformers import OpenAIPrivacyFilterConfig, Qwen3Config

        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
        OpenAIPrivacyFilterConfig(**sizes, num_local_experts=4, pad_token_id=0).save_pretrained(tmp_path)
        assert "reuse='local', tokens see 256 tokens to each side" in " ".join(succeed("families", tmp_path).split())
        Qwen3Config(**sizes).save_pretrained(tmp_path)
        assert "reuse='prefix', tokens see those before them" in " ".join(succeed("families", tmp_path).split())

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
        assert "unknown form" in found["no_rows"]

    def test_a_family_without_rows_says_why(self, tmp_path: Path) -> None:
        from transformers import Qwen3Config

        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99, "head_dim": 8}
        Qwen3Config(**sizes, num_key_value_heads=2).save_pretrained(tmp_path)
        found = json.loads(succeed("families", tmp_path, "--json", "-"))
        assert (found["reuse"], found["no_rows"]) == (["none", "maps"], "its blocks are causal")
        said = " ".join(succeed("families", tmp_path).split())
        assert "works: exact (packed blocks), maps" in said
        assert "no rows: its blocks are causal" in said

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
