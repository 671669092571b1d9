"""Commands on the pages that ask a service or install something: they are sent to one; what they name is there."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from docs_tools import DOCUMENTS, REPOSITORY, ROOT, TEXTS, every_command, page, table_rows, typed
from services import ask, living, minilm, tiny

from attmemo.system.extras import install

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = set(PROJECT["optional-dependencies"])
PLACE = "localhost:3000"
CURLS = [command for text in TEXTS.values() for command in typed(text) if command.startswith("curl ")]


def files_of(folder: str) -> list[Path]:
    """Its files that are text."""
    found = [path for path in (REPOSITORY / folder).rglob("*") if path.is_file()]
    return [path for path in found if path.suffix not in (".so", ".pyc", ".png")]


def request_of(command: str) -> tuple[str, bytes | None]:
    """The path that a call of curl asks, and the body that it sends."""
    words = shlex.split(command)
    (place,) = (word for word in words if word.startswith(PLACE))
    return place.removeprefix(PLACE), words[words.index("-d") + 1].encode() if "-d" in words else None


def in_a_shell(command: str) -> str:
    """What a command prints that is typed in the repository, where `python` is this one."""
    here = f"PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH\n{command}"
    done = subprocess.run(
        ["bash", "-c", here], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_calls_of_curl_get_an_answer_from_a_service(tmp_path: Path) -> None:
    assert len(CURLS) >= 5
    with living(tiny(tmp_path, None)) as live:
        for command in CURLS:
            path, body = request_of(command)
            reply = ask(live.url + path, body)
            assert reply.status == 200, f"{command}: {reply.body!r}"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_a_shell_takes_the_calls_of_curl_as_they_are_typed(tmp_path: Path) -> None:
    with living(tiny(tmp_path, None)) as live:
        for command in CURLS:
            here = command.replace(PLACE, live.url.removeprefix("http://"))
            said = in_a_shell(here.replace("curl ", "curl --silent --show-error --fail --noproxy '*' ", 1))
            assert json.loads(said.splitlines()[-1]), command


def test_the_service_of_the_tutorial_answers_what_the_page_shows() -> None:
    (command,) = (command for command in typed(page("tutorial.md")) if command.startswith("curl "))
    (shown,) = re.findall(r"^```text\n(x-attmemo-.*?)^```", page("tutorial.md"), re.MULTILINE | re.DOTALL)
    headers, scores = shown.strip().split("\n\n")
    path, body = request_of(command)
    with living(minilm(), row_headers=True) as live:
        reply = ask(live.url + path, body)
    for name, value in (line.split(": ") for line in headers.splitlines()):
        assert reply.headers[name] == value
    assert reply.json == pytest.approx(json.loads(scores), abs=2e-3)


def test_the_tutorial_finds_the_model_of_the_package() -> None:
    model = minilm()
    (command,) = (command for command in typed(page("tutorial.md")) if command.startswith("MODEL="))
    assert in_a_shell(f'{command}\nprintf %s "$MODEL"') == model


def test_an_audit_of_a_service_on_this_machine_runs_as_the_page_says(tmp_path: Path) -> None:
    (words,) = (words for words in every_command() if "scripts/audit_service.py" in words)
    assert words == ("python", "scripts/audit_service.py", "URL", "N")
    with living(tiny(tmp_path, None), database=None, budget=0) as live:
        said = in_a_shell(f"python scripts/audit_service.py {live.url} 8")
    assert "0 of 8 answers changed" in said


def test_what_pip_installs_is_an_extra_of_the_project() -> None:
    lines = {" ".join(words): where for words, where in every_command().items() if "pip" in words}
    found = [(where, names) for line, where in lines.items() for names in re.findall(r"\[([a-z,]+)\]", line)]
    assert found
    unknown = [(where, name) for where, names in found for name in names.split(",") if name not in EXTRAS]
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


def test_the_page_shows_options_with_their_variables_and_defaults() -> None:
    known = {one.opts[0]: one for one in ROOT.commands["serve"].params}
    for option, variable, default, _ in table_rows(page("service.md"), "| option | variable |"):
        one = known[option.strip("`")]
        assert one.envvar == variable.strip("`")
        assert default == ("" if one.default is None else str(one.default))
