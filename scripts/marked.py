"""Put measured tables into a document between two marks. The words around them outlive a new measurement."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def replace_measured(file: Path, tables: str) -> None:
    """Write `tables` between the marks of `file`. A file that is absent is made of them alone.

    Raises
    ------
    ValueError
        The file does not have both marks, once each.
    """
    body = file.read_text(encoding="utf-8") if file.is_file() else f"{BEGIN}\n{END}\n"
    if body.count(BEGIN) != 1 or body.count(END) != 1:
        raise ValueError(f"{file}: expected one line {BEGIN} and one line {END}")
    before, rest = body.split(BEGIN)
    _, after = rest.split(END)
    file.write_text(f"{before}{BEGIN}\n\n{tables.strip()}\n\n{END}{after}", encoding="utf-8")


def table(head: str, rows: Iterable[Iterable[str]]) -> list[str]:
    """Lines of a table, and an empty one; `head`: names of columns, with ``|`` between them."""
    columns = head.count("|") + 1
    return [f"| {head} |", f"|{columns * '---|'}", *(f"| {' | '.join(row)} |" for row in rows), ""]
