"""Commands on the pages that are not attmemo's: curl is sent to a service; of others, what they name is there."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from docs_tools import DOCUMENTS, REPOSITORY, inline, page, shell_lines, table_rows
from services import ask, living, tiny

from attmemo.cli.app import app
from attmemo.system.extras import install

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = set(PROJECT["optional-dependencies"])
TARGETS = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
OF_MAKE = re.compile(r"^(?:[A-Z]+=\S+ )*make(?: [A-Z]+=\S+)* ([a-z][a-z-]*)")
BLOCK = re.compile(r"^ *```(?:sh|bash)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def commands(start: str) -> Iterator[tuple[Path, str]]:
    """Command lines that begin so, of blocks and of the text."""
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for line in (*shell_lines(text), *inline(text)):
            if line.startswith(start):
                yield path, line


def files_of(folder: str) -> list[Path]:
    """Its files that are text."""
    found = [path for path in (REPOSITORY / folder).rglob("*") if path.is_file()]
    return [path for path in found if path.suffix not in (".so", ".pyc", ".png")]


def curls() -> list[list[str]]:
    """The words of each call of curl in a block; its body may take several lines."""
    found = []
    for path in DOCUMENTS:
        for block in BLOCK.findall(path.read_text(encoding="utf-8")):
            lines = block.splitlines()
            for first, line in enumerate(lines):
                if line.startswith("curl "):
                    parts = ("\n".join(lines[first:end]) for end in range(first + 1, len(lines) + 1))
                    found.append(next(words for part in parts if (words := split(part))))
    return found


def split(command: str) -> list[str]:
    """The words of a command; none while a quote is open."""
    try:
        return shlex.split(command)
    except ValueError:
        return []


def test_calls_of_curl_get_an_answer_from_a_service(tmp_path: Path) -> None:
    found = curls()
    assert len(found) >= 3
    with living(tiny(tmp_path, None)) as live:
        for words in found:
            (place,) = (word for word in words if "localhost:" in word)
            body = words[words.index("-d") + 1] if "-d" in words else None
            reply = ask(live.url + "/" + place.split("/", 1)[1], None if body is None else body.encode())
            assert reply.status == 200, f"{words}: {reply.body!r}"


def test_what_pip_installs_is_an_extra_of_the_project() -> None:
    found = [(path, name) for path, line in commands("pip install") for name in re.findall(r"\[([a-z,]+)\]", line)]
    assert found
    unknown = [(path.name, name) for path, names in found for name in names.split(",") if name not in EXTRAS]
    assert not unknown, f"pyproject.toml has {sorted(EXTRAS)}"


def test_nothing_that_a_user_reads_installs_attmemo_from_an_index() -> None:
    """It is on none, and the name there is free."""
    sources = [path for part in ("attmemo", "profiler", "scripts", "examples", "deploy") for path in files_of(part)]
    for path in (*DOCUMENTS, *sources):
        text = " ".join(path.read_text(encoding="utf-8", errors="replace").split())
        assert not re.search(r"pip install (?:-\S+ )*[\"' ]*attmemo\b", text), path


def test_the_command_for_an_extra_can_be_copied() -> None:
    for name in EXTRAS:
        assert shlex.split(install(name), comments=True) == ["pip", "install", f".[{name}]"]


def test_every_extra_is_on_the_page_of_installing_or_for_developers() -> None:
    text = (REPOSITORY / "docs" / "install.md").read_text(encoding="utf-8")
    missing = [name for name in EXTRAS - {"dev", "docs"} if f"[{name}]" not in text]
    assert not missing, missing


def test_jobs_of_make_are_in_the_makefile() -> None:
    found = [(path.name, match[1]) for path, line in commands("") if (match := OF_MAKE.match(line))]
    assert len(found) > 3
    unknown = [(name, target) for name, target in found if target not in TARGETS]
    assert not unknown, f"the Makefile has {sorted(TARGETS)}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_scripts_that_a_page_runs_exist_and_know_the_options(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for line in (*shell_lines(text), *inline(text)):
        match = re.match(r"(?:[A-Z_]+=\S+ )*python (scripts/\S+)(.*)", line)
        if match is None:
            continue
        script = REPOSITORY / match[1]
        assert script.exists(), line
        files = [script] if script.is_file() else sorted(script.glob("*.py"))
        source = "".join(file.read_text(encoding="utf-8") for file in files)
        for option in re.findall(r"(?<=\s)--[a-z-]+", match[2].partition("#")[0]):
            assert f'"{option}"' in source, f"{match[1]} knows no {option}"


def test_the_page_shows_options_with_their_variables_and_defaults() -> None:
    group: Any = typer.main.get_command(app)
    known = {one.opts[0]: one for one in group.commands["serve"].params}
    for option, variable, default, _ in table_rows(page("service.md"), "| option | variable |"):
        one = known[option.strip("`")]
        assert one.envvar == variable.strip("`")
        assert default == ("" if one.default is None else str(one.default))
