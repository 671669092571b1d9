"""Numbers of documentation pages: cells of tables, numbers of sentences, each at the precision that is printed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
NUMBER = re.compile(r"(?<![\w.])[-−]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?!\.?\d)(?!,\d{3})")
STORED = 0.005  # of the last digit's unit, beside a half: what a file holds may be rounded itself


def page(name: str) -> str:
    """The text of a page."""
    return (DOCS / name).read_text(encoding="utf-8")


@cache
def measured(name: str) -> Any:
    """What a JSON file beside the pages holds."""
    return json.loads((DOCS / name).read_text(encoding="utf-8"))


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


def shows(cell: str, value: float) -> bool:
    """If the first number printed in a cell is the value, at the precision that is printed."""
    found = numbers(cell)
    if not found:
        return False
    unit = 10.0 ** -len(found[0].partition(".")[2])
    return abs(float(found[0].replace(",", "").replace("−", "-")) - value) <= unit * (0.5 + STORED)


def agree(printed: Iterable[str], values: Iterable[float]) -> None:
    """Refuse printed numbers that are not the values, one after the other."""
    cells, found = list(printed), list(values)
    assert len(cells) == len(found), f"printed {cells}, measured {found}"
    pairs = zip(cells, found, strict=True)
    wrong = [f"printed {cell}, measured {value}" for cell, value in pairs if not shows(cell, value)]
    assert not wrong, "; ".join(wrong)


def says(text: str, template: str, *values: float) -> None:
    """Refuse a page that does not have the sentence once, with the values where the template has `#`."""
    pattern = re.escape(template).replace(r"\#", f"({NUMBER.pattern})")
    found = list(re.finditer(pattern, " ".join(text.split())))
    assert len(found) == 1, f"{len(found)} times on the page: {template}"
    agree(found[0].groups(), values)


def set_in(script: str, pattern: str, places: int = 1) -> list[float]:
    """Numbers that a script sets: the groups of a pattern, which it has in so many places, the same in all of them."""
    text = (DOCS.parent / "scripts" / script).read_text(encoding="utf-8")
    found = [one.groups() for one in re.finditer(pattern, text, re.MULTILINE)]
    assert len(found) == places, f"{script} has {found}"
    assert len(set(found)) == 1, f"{script} has {found}"
    return [float(number) for number in found[0]]


def release(version: str) -> float:
    """2.13 of 2.13.0+cpu."""
    return float(".".join(version.split(".")[:2]))


def having(rows: Iterable[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """The rows that have these values."""
    return [row for row in rows if wanted.items() <= row.items()]


def only(rows: Iterable[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """The one row that has these values."""
    (row,) = having(rows, **wanted)
    return row


def samples_needed(changed: int, budget: float = 0.01, confidence: float = 0.95) -> int:
    """Verified answers that certify a budget, if so many of them changed."""
    from attmemo.guard.certificate import highest_rate

    return next(same + changed for same in count(1) if highest_rate(changed, same, confidence) <= budget)


class RowsCase:
    """One case of docs/rows.json: the milliseconds of its ways, and how many times as fast one is as another."""

    def __init__(self, name: str, dtype: str = "bfloat16", storage: str = "", machine: str = "") -> None:
        cases = measured("rows.json")
        self.found = (cases[machine] if machine else cases)[f"{name}-{dtype}-{storage or dtype}"]
        self.paths = self.found["paths"]
        self.ms: dict[str, float] = {way: path["ms"] for way, path in self.paths.items()}
        others = {way: ms for way, ms in self.ms.items() if way not in ("packed", "rows")}
        exact = {way: ms for way, ms in others.items() if "int8" not in way}
        self.bases = self.ms | {"the best peer": min(others.values()), "the best exact path": min(exact.values())}
        self.bases["the best OpenVINO"] = min((ms for way, ms in exact.items() if "OpenVINO" in way), default=0.0)

    def over(self, way: str, base: str = "stock") -> float:
        """How many times as fast a way is as another one, or as the best of several."""
        return self.bases[base] / self.ms[way]

    def cosines(self, way: str = "rows") -> list[float]:
        """Mean and 1st percentile of a way; none if it was not measured."""
        return [self.paths[way]["cosine_mean"], self.paths[way]["cosine_p1"]] if way in self.paths else []

    def stats(self, name: str) -> float:
        """What the library counted in all rounds of rows."""
        return float(self.paths["rows"]["stats"][name])

    def overhead(self) -> float:
        """Lookup, plan and fetch in the time of packed blocks."""
        spent = sum(self.stats(f"ms_{part}") for part in ("lookup", "plan", "fetch"))
        return spent / (self.stats("sequences") * self.ms["packed"])


def spread(names: Iterable[str], way: str, base: str = "stock", dtype: str = "bfloat16") -> list[float]:
    """The least and the most times that a way is as fast as another one."""
    times = sorted(RowsCase(name, dtype).over(way, base) for name in names)
    return [times[0], times[-1]]


REPOSITORY = Path(__file__).parents[2]


README = REPOSITORY / "README.md"


DOCUMENTS = [README, *sorted((REPOSITORY / "docs").glob("**/*.md")), REPOSITORY / "attmemo" / "models" / "README.md"]


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
