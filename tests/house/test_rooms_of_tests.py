"""The tests lie in rooms, as the package does, and share nothing but tools."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
MODULES = sorted(TESTS.glob("*/*.py"))
ROOM = {file.stem: file.parent.name for file in MODULES if file.stem != "conftest"}
BESIDE = {"scripts", "docs", "house", "tools"}
"""Rooms that are none of the package: what they test lies elsewhere, and the last one holds what several rooms use."""


def imports(file: Path) -> Iterator[str]:
    """Modules of tests that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (name for name in names if name in ROOM or name == "conftest")


def test_every_test_lies_in_a_room() -> None:
    assert [file.name for file in TESTS.glob("*.py")] == ["conftest.py"]
    assert set(TESTS.rglob("*.py")) == {TESTS / "conftest.py", *MODULES}
    rooms = {folder.name for folder in (ROOT / "attmemo").iterdir() if folder.is_dir()}
    assert set(ROOM.values()) <= rooms | BESIDE


def test_no_two_modules_have_one_name() -> None:
    """Rooms are no packages: a second module of a name would not be found."""
    counts = Counter(file.stem for file in MODULES if file.stem != "conftest")
    assert not [name for name, count in counts.items() if count > 1]


def test_no_test_imports_another_test() -> None:
    found = {(file.name, name) for file in MODULES for name in imports(file)}
    assert len(found) > 100
    assert not [pair for pair in sorted(found) if pair[1].startswith("test_") or pair[1] == "conftest"]


def test_tools_of_a_room_are_used_in_that_room_only() -> None:
    """Only these folders are on the path where a room is tested alone."""
    wrong = []
    for file in MODULES:
        for name in imports(file):
            if ROOM.get(name) not in (file.parent.name, "tools"):
                wrong.append(f"{file.parent.name}/{file.name} imports {ROOM.get(name)}/{name}")
    assert not wrong
