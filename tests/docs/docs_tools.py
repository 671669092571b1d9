"""Documents and what is read of them: commands, Python that runs, tables, and numbers at the printed precision."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
README = REPOSITORY / "README.md"
BESIDE = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "SECURITY.md", "attmemo/models/README.md")
DOCUMENTS = [*(REPOSITORY / name for name in BESIDE), *sorted(DOCS.glob("**/*.md"))]
NUMBER = re.compile(r"(?<![\w.])[-−]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?!\.?\d)(?!,\d{3})")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ENDS = {"|", "||", "&&", ";", ">", ">>", "<", "2>", "2>&1", "&"}


def page(name: str) -> str:
    """The text of a page."""
    return (DOCS / name).read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """A section of a page, with those below it."""
    start = text.index(f"\n## {heading}\n") + 1
    end = text.find("\n## ", start)
    return text[start : len(text) if end < 0 else end + 1]


@cache
def measured(name: str) -> Any:
    """What a JSON file beside the pages holds."""
    return json.loads((DOCS / name).read_text(encoding="utf-8"))


def shell_lines(text: str) -> Iterator[str]:
    """Lines of all code blocks of shell or of no language, without prompts; continued lines are joined."""
    for language, block in re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        if language in ("", "sh", "bash", "shell", "console", "text"):
            for line in block.replace("\\\n", " ").splitlines():
                yield line.strip().removeprefix("$ ")
    for line in re.findall(r"^(?: {4}|\t)(attmemo .*)$", text, re.MULTILINE):
        yield line


def inline(text: str) -> Iterator[str]:
    """All code in single backticks, outside fenced blocks."""
    outside = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([^`]+)`", outside):
        yield " ".join(code.split())


def calls(lines: Iterator[str]) -> Iterator[list[str]]:
    """The arguments of every call of attmemo, without redirections and pipes."""
    for line in lines:
        if not re.search(r"\battmemo [a-z-]", line):
            continue
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        call: list[str] | None = None
        for word in [*words, ";"]:
            ended = word in ENDS or word.endswith(";")
            if call is None:
                call = [] if word == "attmemo" else None
            elif ended:
                yield call + ([word[:-1]] if word not in ENDS else [])
                call = None
            else:
                call.append(word)


# -- Python that runs, in order, in one namespace


def blocks(text: str) -> Iterator[tuple[str, str | None]]:
    """Every block of Python with the output that the page shows right behind it, if it shows one."""
    found = [(match[1], match[2], match.start(), match.end()) for match in BLOCK.finditer(text)]
    for i, (language, code, _, end) in enumerate(found):
        if language == "python":
            behind = found[i + 1] if i + 1 < len(found) else None
            shows = behind is not None and behind[0] == "text" and not text[end : behind[2]].strip()
            yield code, behind[1] if shows and behind is not None else None


def run(name: str, names: dict[str, Any], part: str | None = None, **other: str) -> list[tuple[str, str | None]]:
    """What each block of a page, or of one `part` of it, printed, and what the page shows.

    `names` are there before the first block. The code of the page is changed by `other` only: text by other text.
    """
    outputs = []
    text = page(name)
    for code, shown in blocks(text if part is None else section(text, part)):
        for before, after in other.items():
            code = code.replace(before, after)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, name, "exec"), names)
        outputs.append((printed.getvalue(), shown))
    return outputs


# -- tables


def table_rows(text: str, header_start: str) -> list[list[str]]:
    """Cells of the first table at or after the text `header_start`, without its head."""
    lines = text[text.index(header_start) :].splitlines()
    start = next(number for number, line in enumerate(lines) if re.fullmatch(r"\|[-:| ]+\|", line)) + 1
    rows = list[list[str]]()
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")])
    return rows


def numbers(text: str) -> list[str]:
    """All numbers of a text as they are printed: "1,800 ms, .35" has "1,800" and ".35"."""
    return NUMBER.findall(text)
