"""The documents: commands that parse, links and tests that exist, plain words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from docs_tools import (
    DOCUMENTS,
    README,
    REPOSITORY,
    ROOT,
    calls,
    check_options,
    check_parse,
    inline,
    shell_lines,
)


def collect(how: str) -> list[Any]:
    found = []
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        lines = shell_lines(text) if how == "blocks" else inline(text)
        for words in calls(lines):
            found.append(pytest.param(words, id=f"{path.name}: {' '.join(words)}"))
    assert found
    return found


@pytest.mark.parametrize("words", collect("blocks"))
def test_commands_to_copy_parse(words: list[str]) -> None:
    if any(mark in word for word in words for mark in ("…", "...", "[")):
        check_options(words)
    else:
        check_parse(words)


@pytest.mark.parametrize("words", collect("inline"))
def test_commands_in_the_text_exist(words: list[str]) -> None:
    check_options(words)


def test_the_page_of_commands_has_every_command() -> None:
    text = (REPOSITORY / "docs" / "commands.md").read_text(encoding="utf-8")
    for name, command in ROOT.commands.items():
        for sub in getattr(command, "commands", {"": None}):
            assert re.search(rf"{name}\b.*\b{sub}\b" if sub else rf"\b{name}\b", text), f"{name} {sub}"


def test_commands_in_the_help_parse() -> None:
    texts = [ROOT.help, *(command.help for command in ROOT.commands.values())]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    shown = list(calls(line for line in lines if line.startswith("attmemo ")))
    assert len(shown) >= 8
    for words in shown:
        check_parse(words)


@pytest.mark.parametrize(
    "line",
    [
        "attmemo build --model m", "attmemo tune DB --data x --bugdet 1", "attmemo bench all",
        "attmemo evaluate DB --thresholds 1",
    ],
)  # fmt: skip
def test_this_test_finds_what_is_wrong(line: str) -> None:
    (words,) = calls(iter([line]))
    with pytest.raises(AssertionError):
        check_options(words)


@pytest.mark.parametrize("line", ["attmemo tune D --data x --budget 2", "attmemo train-embedder", "attmemo check a b"])
def test_this_test_finds_what_cannot_be_parsed(line: str) -> None:
    (words,) = calls(iter([line]))
    with pytest.raises(Exception, match=r"(?i)invalid|missing|unexpected|share"):
        check_parse(words)
    (words,) = calls(shell_lines("```\n$ X=1 attmemo tune DB \\\n  --data x y # why\n```"))
    check_parse(words)
    assert words == ["tune", "DB", "--data", "x", "y"]


def test_every_test_that_a_document_names_exists() -> None:
    named = {
        (file, test)
        for document in DOCUMENTS
        for file, test in re.findall(r"`(\w+/test_\w+\.py)::(\w+)`", document.read_text())
    }
    assert named
    for file, test in named:
        assert f"def {test}(" in (REPOSITORY / "tests" / file).read_text(), f"{file}::{test}"


def anchors(text: str) -> set[str]:
    """The anchors that a renderer makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link


def test_the_index_lists_every_document() -> None:
    index = (REPOSITORY / "docs" / "README.md").read_text(encoding="utf-8")
    for document in sorted((REPOSITORY / "docs").glob("*.md")):
        assert document.name == "README.md" or f"]({document.name})" in index, document.name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_words_are_plain(document: Path) -> None:
    """These words are hard to read for most readers; a plain word exists for each."""
    text = " ".join(document.read_text(encoding="utf-8").split())
    assert not re.findall(r"(?i)\b(?:nobody|whoever|somebody|but for|told by)\b", text)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_user_meets_one_word_for_one_thing(document: Path) -> None:
    """The glossary's words: original model, method, tokens recomputed, evidence; a number begins with a digit."""
    text = re.sub(r"`[^`]*`", "", " ".join(document.read_text(encoding="utf-8").split()))
    other = r"stock|(?:each|every|exact|fastest of its) ways?|rows computed|guards? learn(?:s|ing)?"
    assert not re.findall(rf"(?i)\b(?:{other})\b|(?<![\w.])\.\d", text)


def test_the_words_of_the_code_are_plain() -> None:
    for place in ("attmemo", "profiler", "native", "scripts", "tests", "examples"):
        for file in sorted((REPOSITORY / place).rglob("*")):
            if file.suffix in (".py", ".pyi", ".c", ".h") and file != Path(__file__):
                text = file.read_text(encoding="utf-8")
                found = re.findall(r"(?i)\b(?:nobody|whoever|somebody|anybody|brain)\b", text)
                assert not found, (file, found)


def test_sources_are_papers_that_a_reader_can_find() -> None:
    """References are arXiv ids, not names of local files."""
    rooms = ("attmemo", "profiler", "scripts", "tests", "native", "docs")
    files = [
        file for room in rooms for file in (REPOSITORY / room).rglob("*") if file.suffix in (".py", ".md", ".c", ".h")
    ]
    assert len(files) > 200
    for file in [README, *files]:
        assert not re.search(r"\b\d{3}_[0-9a-f]{16}\b", file.read_text(encoding="utf-8")), file


def test_no_placeholder_is_left() -> None:
    for document in DOCUMENTS:
        assert not re.search(r"@[A-Z]+@|TODO|FIXME", document.read_text()), document
