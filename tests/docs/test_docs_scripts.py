"""Programs of the repository on the pages: each takes the words that a page gives it, and pytest finds tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from docs_tools import REPOSITORY, TEXTS, every_command, inline

PLACES = re.compile(r"(?:attmemo|deploy|docs|examples|native|profiler|scripts|tests)/[\w./-]*")
CASES = {"cases": "CASES", "figures": "NAMES"}
"""Arguments that name what a script measures, and what has these names there."""
NUMBERS = {"N": "8"}
"""What a page has in the place of a number."""
FEW = {("-m", "slow"): "tests/mmap/test_slow_windows.py"}
"""Where tests are looked for, by the options of pytest: in all rooms it takes half a minute."""


class Parsed(Exception):
    """Raised in the place of what a script would do with its arguments."""


def source_of(script: str) -> Path:
    """The file that python runs when it is given a path."""
    path = REPOSITORY / script
    return path / "__main__.py" if path.is_dir() else path


def of_scripts() -> dict[tuple[str, ...], str]:
    """What stands behind `python` where a page runs a script or an example, with the page."""
    found = {words[1:]: page for words, page in every_command().items() if words[0] == "python"}
    return {words: page for words, page in found.items() if re.match(r"(?:examples|scripts)/", " ".join(words))}


def parses(script: str) -> bool:
    """Whether it reads words behind its name."""
    return "ArgumentParser(" in source_of(script).read_text(encoding="utf-8")


def stopped(parse: Callable[..., Namespace]) -> Callable[..., Namespace]:
    """The same, and then the script goes no further."""

    def parse_and_stop(*words: Any, **more: Any) -> Namespace:
        raise Parsed(parse(*words, **more))

    return parse_and_stop


@pytest.mark.parametrize("words", of_scripts(), ids=" ".join)
def test_a_script_takes_the_words_that_a_page_gives_it(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    script, *given = words
    folder, name = Path(script).parts
    assert source_of(script).is_file(), f"{of_scripts()[words]} runs {script}"
    if not parses(script):
        assert not given
        return
    monkeypatch.syspath_prepend(str(REPOSITORY / folder))
    module = import_module(f"{name}.__main__" if (REPOSITORY / script).is_dir() else Path(name).stem)
    monkeypatch.setattr(sys, "argv", [script, *(NUMBERS.get(word, word) for word in given)])
    for method in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(ArgumentParser, method, stopped(getattr(ArgumentParser, method)))
    with pytest.raises(Parsed) as reached:
        module.main()
    for argument, known in CASES.items():
        named = getattr(reached.value.args[0], argument, None) or ()
        assert set(named) <= set(getattr(module, known, ()))


def test_words_that_a_script_does_not_know_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["script", "--lenght", "3"])
    monkeypatch.setattr(ArgumentParser, "parse_args", stopped(ArgumentParser.parse_args))
    parser = ArgumentParser()
    parser.add_argument("--length")
    with pytest.raises(SystemExit):
        parser.parse_args()


def test_files_and_folders_that_a_page_names_are_there() -> None:
    user = {"attmemo/databases"}  # in the cache directory
    named = {(page, code) for page, text in TEXTS.items() for code in inline(text) if PLACES.fullmatch(code)}
    named |= {
        (page, word) for words, page in every_command().items() for word in words
        if word.startswith(("docs/", "examples/", "scripts/", "tests/"))
    }  # fmt: skip
    assert len(named) > 40
    assert not [(page, path) for page, path in sorted(named) if path not in user and not (REPOSITORY / path).exists()]


def python(*words: str) -> str:
    """What Python prints in the repository, without the settings of a pytest that runs these tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, *words], cwd=REPOSITORY, env=kept, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PYTESTS = {words[3:]: page for words, page in every_command().items() if words[1:3] == ("-m", "pytest")}


@pytest.mark.parametrize("words", PYTESTS, ids=" ".join)
def test_a_call_of_pytest_finds_tests(words: tuple[str, ...]) -> None:
    few = [FEW[words]] if words in FEW else []
    found = python("-m", "pytest", *words, *few, "--collect-only", "-p", "no:cacheprovider")
    assert re.search(r"::test_\w+", found), found


def test_the_command_that_compiles_in_place_has_its_options() -> None:
    (page,) = (page for words, page in every_command().items() if words[1:] == ("setup.py", "build_ext", "--inplace"))
    assert page == "CONTRIBUTING.md"
    assert "--inplace" in python("setup.py", "build_ext", "--inplace", "--help")


def test_the_names_above_still_stand_on_a_page() -> None:
    words = {word for given in of_scripts() for word in given}
    assert NUMBERS.keys() <= words
    assert FEW.keys() <= PYTESTS.keys()
