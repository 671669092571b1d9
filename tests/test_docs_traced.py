"""Every table of measurements on a page is compared with a JSON by a test."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from docs_tools import DOCS

TESTS = Path(__file__).parent
README = DOCS.parent / "README.md"
PAGES = sorted([README, *DOCS.glob("*.md")])
MEASURED = re.compile(r"(?<![\w.])(?:\d*\.\d+|\d{1,3},\d{3})(?![\w.])|\| *\d\d+(?:, \d+)* *\|")
LEAST = 6  # characters of a text that names a table

WHOLE = {
    "attention-op.md": "test_docs_numbers_more.py", "bench-families.md": "test_docs_numbers_more.py",
    "bench-twelve-layers.md": "test_docs_numbers_more.py", "fastseq-bench.md": "test_docs_numbers_more.py",
    "study-decoder.md": "test_docs_numbers_more.py", "study-pruned.md": "test_docs_numbers_more.py",
    "generate.md": "test_docs_numbers_more.py", "paper.md": "test_paper.py", "peers.md": "test_peers_table.py",
}  # fmt: skip
"""Pages whose tables are made from a JSON, and the test that makes them again."""

SAID = {("service.md", "| under load"), ("service.md", "| | bound"), ("README.md", "| stock = 1 | OpenVINO |")}
"""Tables that tests find in another way: sentence by sentence, and in test_docs.py."""
NONE = {
    ("commands.md", "| command |"), ("guard.md", "| model | answer |"), ("python.md", "| name | purpose |"),
    ("use.md", "| `memoize("), ("install.md", "| command | installs"), ("service.md", "| | TEI 1.9.3"),
    ("service.md", "| option | variable |"),
}  # fmt: skip
"""Tables whose numbers are settings."""


def tables(path: Path) -> list[tuple[int, int, str]]:
    """Where each table with measurements begins and ends, and its head."""
    found, text = list[tuple[int, int, str]](), path.read_text(encoding="utf-8")
    for table in re.finditer(r"^(\|.*)\n\|[-:| ]+\|\n((?:\|.*\n?)*)", text, re.MULTILINE):
        if MEASURED.search(table[2]):
            found.append((table.start(), table.end(), table[1].strip()))
    return found


@cache
def named() -> frozenset[tuple[str, str]]:
    """Pages, and what the tests of numbers look for on them in front of a table.

    The page is "" where a test names it apart from the table.
    """
    found = set[tuple[str, str]]()
    for path in (*TESTS.glob("test_docs_numbers*.py"), *TESTS.glob("test_docs_said_*.py"), TESTS / "test_readme.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            calls = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "table_rows"
            lists = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("TABLES", "STREAMS_TABLES")
            inside = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            texts = [text for text in inside if isinstance(text, str) and len(text) >= LEAST]
            page = next((text for text in texts if text.endswith(".md")), "") if calls else ""
            kept = texts if calls or lists else [text for text in texts if text.startswith("| ")]
            found |= {(page, text) for text in kept if not text.endswith((".md", ".json"))}
    return frozenset(found)


def is_compared(page: str, text: str, start: int, before: int) -> bool:
    """Whether a text of the tests lies between the end of the table before and the end of this head."""
    end = text.index("\n", start)
    return any(text.find(name, before, end) >= 0 for of, name in named() if of in ("", page))


def listed(page: str, head: str) -> list[tuple[str, str]]:
    return [key for key in [*SAID, *NONE] if key[0] == page and head.startswith(key[1])]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_table_of_numbers_is_compared_or_named_here(path: Path) -> None:
    if path.name in WHOLE:
        assert (TESTS / WHOLE[path.name]).exists()
        return
    text, before, unknown = path.read_text(encoding="utf-8"), 0, []
    for start, end, head in tables(path):
        if not is_compared(path.name, text, start, before) and not listed(path.name, head):
            unknown.append(head)
        before = end
    assert not unknown, f"no test compares these tables of {path.name} with a JSON"


def test_what_is_named_here_is_still_on_its_page() -> None:
    there = {key for path in PAGES for _, _, head in tables(path) for key in listed(path.name, head)}
    assert there == {*SAID, *NONE}
