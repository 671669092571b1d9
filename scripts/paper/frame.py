"""What every figure is made of: what it measures, what the paper claims, and how the page shows it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from matplotlib.figure import Figure as Plot

from attmemo.system.machine import conditions
from attmemo.wording import percent as percent  # for the figures

Found = dict[str, Any]  # what a figure measured, JSON-able
Verdict = Literal["holds", "holds in part", "does not hold today", "not measured"]
Size = TypeVar("Size")
DOCS = Path(__file__).resolve().parents[2] / "docs"


class LaterError(Exception):
    """The time of this run is over; the parts that are measured are kept."""


@dataclass(frozen=True)
class Claim:
    """One row of the first table: what the paper says, what holds here."""

    what: str
    paper: str
    here: str
    verdict: Verdict
    why: str = ""


@dataclass(frozen=True)
class Run:
    """One run of the command: where data, results and databases lie."""

    shared: Path
    work: Path  # databases, and parts that were measured: a run that is cut off goes on behind them
    toy: bool = False
    until: float = float("inf")  # on the clock of time.monotonic: no part begins later

    def size(self, full: Size, toy: Size) -> Size:
        """The first of the two, or the second in a smoke test."""
        return toy if self.toy else full

    def part(self, name: str, make: Callable[[], Found]) -> Found:
        """A part of a figure: measured once, with its conditions, and kept in the work folder."""
        file = self.work / f"part-{name}.json"
        if file.is_file():
            found: Found = json.loads(file.read_text(encoding="utf-8"))
            return found
        if time.monotonic() > self.until:
            raise LaterError(name)
        seen = conditions()
        found = {"conditions": seen} | make()
        file.write_text(json.dumps(found), encoding="utf-8")
        self.tell(f"{name}, at load {seen['load']:g}")
        return found

    def tell(self, what: str) -> None:
        """A line about the progress."""
        print(f"  {time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Figure:
    """One figure or table of a paper.

    `caption` names the conditions; `why` is the paragraph on the difference to the paper. Both, the claims, the table
    and the plot are made of what `measure` gave, and of the paper's own values.
    """

    name: str
    title: str
    measure: Callable[[Run], Found]
    claims: Callable[[Found], Sequence[Claim]]
    caption: Callable[[Found], str]
    table: Callable[[Found], str]
    why: Callable[[Found], str]
    draw: Callable[[Found], Plot] | None = None
    quiet: bool = field(default=False, kw_only=True)  # times: no other work on the machine


def measured(figure: Figure, run: Run) -> Found:
    """Measure a figure, with the conditions and the seconds that it took."""
    start, where = time.monotonic(), conditions()
    found = figure.measure(run)
    kept = {key: value for key, value in where.items() if key != "kernel"}
    return {"figure": figure.name, "conditions": kept, "seconds": round(time.monotonic() - start, 1)} | found


def document(name: str) -> Found:
    """What another script measured and keeps in docs."""
    found: Found = json.loads((DOCS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def judge(*held: bool) -> Verdict:
    """All parts of a claim hold, some of them, or none."""
    if all(held):
        return "holds"
    return "holds in part" if any(held) else "does not hold today"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def where(found: Found) -> str:
    """The conditions in words, for a caption."""
    seen = found["conditions"]
    threads = f"{seen['threads']} thread{'s' if seen['threads'] > 1 else ''}"
    return f"{threads} on {seen['cores']} cores, torch {seen['torch']}, load {seen['load']:g} before"
