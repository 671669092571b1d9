"""Every measured number of a sentence is compared with a file by a test, or is named here with the reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from docs_tools import DOCS, NUMBER

TESTS = Path(__file__).parent
MADE = {"bench-families.md", "bench-twelve-layers.md", "fastseq-bench.md", "paper.md", "peers.md"}
"""Pages whose numbers a test makes again from a JSON, those of sentences too: see `WHOLE` of test_docs_traced.py."""
PAGES = ("../README.md", *sorted(path.name for path in DOCS.glob("*.md") if path.name not in MADE))
SHOWN = re.compile(
    r"(?<![\w.,/:-])(?:\d{1,3}(?:,\d{3})+|\d*\.\d+|\d+)(?![\w/:-]|\.\d|,\d{3})"
    r"(?: ?(?:%|times\b|ms\b|MiB|milliseconds))?"
)
VERSION = re.compile(r"(?:arXiv|Python|[Tt]orch|transformers|OpenVINO|Runtime|Linux|GCC|section|TEI)s? $")
LEAST = 8  # characters of a template
PAPER = "cited from arXiv 2301.09262"

UNTRACED: dict[str, dict[str, str]] = {
    "guard.md": {
        "The aims for lines were .75 served, .85 in the second half, and .50 of the rows computed":
            "aims, set before it was measured",
        "The aims for embeddings were .80 served of OpenSSH, HDFS and Apache, and at most 1 % changed in "
        "each log": "aims, set before it was measured",
    },
    "study-decoder.md": {
        "In Fig. 15 of the paper (arXiv 2301.09262; LLaMA-7B, SST-2 at 2,048 tokens) layer 0 is above .6 throughout, "
        "and layer 15 above .5 for 24 %": PAPER,
        "sentences of some twenty words fill 2,048 tokens": PAPER,
    },
    "study-pruned.md": {
        "three models pruned by more than 85 % keep their accuracy within 1 % at the conservative level": PAPER,
    },
}  # fmt: skip
"""By page: a part of a sentence, as it stands there in one line, and why its numbers are no measurements."""


def prose(name: str) -> str:
    """The sentences of a page in one line, without code and tables."""
    text = (DOCS / name).read_text(encoding="utf-8")
    text = re.sub(r"```.*?```", " ", text, flags=re.DOTALL)
    return " ".join(re.sub(r"^\|.*$", " ", text, flags=re.MULTILINE).split())


@cache
def templates() -> frozenset[str]:
    """What tests give to `says`; a part that a test puts in is any text."""
    found = set[str]()
    for path in TESTS.glob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if "says" not in text or path.name == Path(__file__).name:
            continue
        for node in ast.walk(ast.parse(text)):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [part.value if isinstance(part, ast.Constant) else "\0" for part in parts]
            if all(isinstance(part, str) for part in texts) and "#" in (whole := "".join(map(str, texts))):
                found.add(whole)
    return frozenset(template for template in found if len(template) >= LEAST)


def spans(name: str) -> Iterator[tuple[int, int]]:
    """Where tests look for sentences, and where numbers are known to have no file."""
    text = prose(name)
    for template in templates():
        pattern = re.escape(template).replace(r"\#", f"(?:{NUMBER.pattern})").replace("\0", ".{0,120}?")
        yield from (found.span() for found in re.finditer(pattern, text))
    for part in UNTRACED.get(name, {}):
        yield from (found.span() for found in re.finditer(re.escape(part), text))


def is_measurement(text: str, found: re.Match[str]) -> bool:
    """Whether a number looks like one: no count in words, no version, no name of a section."""
    looks = re.search(r"\.\d|,\d|%|times|ms|MiB|milliseconds", found[0])
    return looks is not None and not VERSION.search(text[: found.start()])


def uncovered(name: str) -> list[str]:
    """Parts of sentences whose numbers no test looks for."""
    text, known = prose(name), list(spans(name))
    return [
        text[max(0, found.start() - 60) : found.end() + 20]
        for found in SHOWN.finditer(text)
        if is_measurement(text, found) and not any(start <= found.start() < end for start, end in known)
    ]


@pytest.mark.parametrize("name", PAGES)
def test_every_measured_number_of_a_sentence_is_compared_or_named_here(name: str) -> None:
    unknown = uncovered(name)
    assert not unknown, f"no test compares these numbers of {name} with a file: {unknown}"


def test_what_is_named_here_is_still_on_its_page() -> None:
    for name, parts in UNTRACED.items():
        text = prose(name)
        gone = [part for part in parts if part not in text]
        assert not gone, f"not on {name} any more"


def test_what_is_cited_names_its_paper_in_the_same_section() -> None:
    for name, parts in UNTRACED.items():
        sections = prose(name).split(" ## ")
        for part, reason in parts.items():
            if reason.startswith("cited from "):
                assert all(reason.removeprefix("cited from ") in section for section in sections if part in section)
