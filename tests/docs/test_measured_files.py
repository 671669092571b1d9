"""The JSON files of numbers: each says when, on what and with which versions it was measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docs_tools import DOCS, DOCUMENTS

FILES = sorted(DOCS.rglob("*.json"))
UNSAVED = {"fastseq-types.json"}
"""Files with a number of code that was not in a commit. No file may join them."""
UNKNOWN = {"fastseq-upstream.json", "guard-ablations.json", "rows.json"}
"""Files whose processor or versions were not recorded. No file may join them."""


def facts(found: Any) -> Iterator[tuple[str, Any]]:
    """Every value that is no dict, under its name, at any depth."""
    if isinstance(found, dict):
        for name, value in found.items():
            if isinstance(value, dict):
                yield from facts(value)
            else:
                yield name, value
                yield from facts(value)
    elif isinstance(found, list):
        for value in found:
            yield from facts(value)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(DOCS)))
def test_a_file_of_numbers_names_commit_day_processor_and_versions(file: Path) -> None:
    known: dict[str, set[str]] = {}
    for name, value in facts(json.loads(file.read_text(encoding="utf-8"))):
        if value:
            known.setdefault(name, set()).add(str(value))
    commits = set().union(*(known.get(name, set()) for name in ("commit", "version", "recorded_in")))
    assert commits, "no commit"
    assert file.name in UNSAVED or not [one for one in commits if one.endswith("-dirty")]
    assert any(re.fullmatch(r"\d{4}-\d\d-\d\d", day) for day in known["date"])
    assert "torch" in known
    assert known.keys() & {"processor", "features", "cpu", "device"}
    unknown = {name for name in ("torch", "processor") if "not recorded" in known.get(name, set())}
    assert not unknown or file.name in UNKNOWN


def test_a_commit_beside_a_file_on_a_page_is_one_of_the_file() -> None:
    claims = 0
    for page in DOCUMENTS:
        text = " ".join(page.read_text(encoding="utf-8").split())
        claim = r"\]\((?:docs/)?([\w/-]+\.json)\)[^.()]{0,20}commits? ([0-9a-f]{7,}(?:, [0-9a-f]{7,})*)"
        for name, commits in re.findall(claim, text):
            for commit in commits.split(", "):
                claims += 1
                assert f'"{commit}"' in (DOCS / name).read_text(encoding="utf-8"), (page.name, name, commit)
    assert claims >= 2
