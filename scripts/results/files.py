"""JSON files of numbers beside the pages, and numbers as pages print them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
NONE = "–"


@cache
def measured(name: str) -> Any:
    """What a JSON file beside the pages holds."""
    return json.loads((DOCS / name).read_text(encoding="utf-8"))


def only(rows: Iterable[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """The one row that has these values."""
    (row,) = (row for row in rows if wanted.items() <= row.items())
    return row


def share(value: float, digits: int = 3) -> str:
    """A share; all and none without digits behind the point."""
    return f"{value:.0f}" if value in (0.0, 1.0) else f"{value:.{digits}f}"


def short(value: float) -> str:
    """A number of two digits or three, with commas between thousands."""
    if value < 9.95:
        return f"{value:.1f}"
    return f"{value:,.0f}" if value < 1000 else f"{round(value, -1):,.0f}"


def standing(state: str) -> str:
    """The state of a guard in words."""
    return "collecting evidence" if state == "learning" else state
