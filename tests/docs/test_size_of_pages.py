"""How long pages may be, and that they tell what is, not what was."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from docs_tools import DOCS, DOCUMENTS, README, REPOSITORY

FIRST, MENU = 450, 26_000
"""Words of the first page, and of all pages in the menu with it, at most."""
HISTORY = re.compile(
    r"(?i)\b(?:(?:earlier|former|older|previous) (?:version|code|guard|kernel)s?|"
    r"a version before|versions before|present version|in that version|measured before|"
    r"is older: |the guard before|came after this run)\b"
)
MAY = {"guard-measured.md"}
"""Its table has names of what was taken away."""


def words(path: Path) -> int:
    """Words of a page as `wc -w` counts them."""
    return len(path.read_text(encoding="utf-8").split())


@pytest.fixture
def menu(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The pages in the menu of the site."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install '.[docs]'")
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts" / "site"))
    hook: Any = import_module("hook")
    index = hook.sections((DOCS / "README.md").read_text(encoding="utf-8"))
    return [REPOSITORY / path for heading, pages in index.items() if heading != hook.RESULTS for _, path in pages]


def test_the_first_page_is_read_in_two_minutes() -> None:
    assert words(README) <= FIRST


def test_the_menu_is_read_in_two_hours(menu: list[Path]) -> None:
    assert len(menu) > 20
    counted = {path: words(path) for path in (README, DOCS / "README.md", *menu)}
    assert sum(counted.values()) <= MENU, sorted(counted.items(), key=lambda pair: -pair[1])


def lines_of_history(text: str) -> Iterator[str]:
    """Sentences that tell how an earlier version was."""
    flat = " ".join(text.split())
    for found in HISTORY.finditer(flat):
        yield flat[max(0, found.start() - 60) : found.end() + 40]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_page_tells_what_is_and_the_changelog_what_was(path: Path) -> None:
    if path.name not in MAY:
        assert not list(lines_of_history(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "text", ["measured with an earlier\nversion", "earlier versions of it", "with versions before", "The guard before"]
)
def test_history_is_found(text: str) -> None:
    assert list(lines_of_history(text))
