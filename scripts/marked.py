"""Put measured tables into a document between two marks. The words around them outlive a new measurement."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def marks(name: str = "") -> tuple[str, str]:
    """The lines before and behind the tables of this name; without a name, before and behind all of a page."""
    return (f"<!-- measured {name}: begin -->", f"<!-- measured {name}: end -->") if name else (BEGIN, END)


def marked(text: str, name: str = "") -> str:
    """Return what stands between the marks of a page.

    Raises
    ------
    ValueError
        The page does not have both marks, once each.
    """
    begin, end = marks(name)
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"expected one line {begin} and one line {end}")
    return text.split(begin)[1].split(end)[0].strip()


def replace_measured(file: Path, tables: str, name: str = "") -> None:
    """Write `tables` between the marks of `file`. A file that is absent is made of them alone.

    Raises
    ------
    ValueError
        The file does not have both marks, once each.
    """
    begin, end = marks(name)
    body = file.read_text(encoding="utf-8") if file.is_file() else f"{begin}\n{end}\n"
    try:
        marked(body, name)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    before, rest = body.split(begin)
    _, after = rest.split(end)
    file.write_text(f"{before}{begin}\n\n{tables.strip()}\n\n{end}{after}", encoding="utf-8")


def table(head: str, rows: Iterable[Iterable[str]]) -> list[str]:
    """Lines of a table, and an empty one; `head`: names of columns, with ``|`` between them."""
    columns = head.count("|") + 1
    return [f"| {head} |", f"|{columns * '---|'}", *(f"| {' | '.join(row)} |" for row in rows), ""]
