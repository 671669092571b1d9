"""Runs the Python blocks of a document, in order, in one namespace."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> Iterator[tuple[str, str | None]]:
    """Every block of Python with the output that the page shows right behind it, if it shows one."""
    found = [(match[1], match[2], match.start(), match.end()) for match in BLOCK.finditer(text)]
    for i, (language, code, _, end) in enumerate(found):
        if language == "python":
            behind = found[i + 1] if i + 1 < len(found) else None
            shows = behind is not None and behind[0] == "text" and not text[end : behind[2]].strip()
            yield code, behind[1] if shows and behind is not None else None


def run(page: str, names: dict[str, Any], **other: str) -> list[tuple[str, str | None]]:
    """What each block of a page printed, and what the page shows.

    `names` are there before the first block. The code of the page is changed by `other` only: text by other text.
    """
    outputs = []
    for code, shown in blocks((DOCS / page).read_text(encoding="utf-8")):
        for before, after in other.items():
            code = code.replace(before, after)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), names)
        outputs.append((printed.getvalue(), shown))
    return outputs
