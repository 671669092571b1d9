"""What the user sees: text, tables, progress, JSON and errors, each in its place.

Text and tables go to standard output, or to standard error when the JSON goes to standard output. Progress and errors
always go to standard error. A command works inside ``with output(…) as out:``.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from attmemo.cli.files import check_writable, write_whole
from attmemo.errors import ArgumentError, AttmemoError
from attmemo.system.json_fields import finite

if TYPE_CHECKING:
    from rich.console import Console

TRACEBACK: Final = "ATTMEMO_TRACEBACK"
COLUMNS: Final = 80
_PIPED_WIDTH = 140  # columns where neither a terminal nor the variable COLUMNS says how many there are
_PATIENCE = 2.0  # seconds before a bar appears in a log file; on a terminal it appears at once


class Stages:
    """A progress bar with the time left for each stage of the work."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._what: str | None = None
        self._bar: Any = None

    def __call__(self, what: str, done: int, total: int) -> None:
        """Say that `done` of `total` are done; another `what` begins another bar."""
        if self._quiet:
            return
        if what != self._what:
            self.close()
            self._begin(what, total)
        if self._bar is not None:
            self._bar.total = total
            self._bar.update(done - self._bar.n)
            if done >= total:
                self._bar.close()
                self._bar = None

    def close(self) -> None:
        """Leave the line of the bar."""
        if self._bar is not None:
            self._bar.close()
        self._what = self._bar = None

    def _begin(self, what: str, total: int) -> None:
        from tqdm import tqdm

        live = sys.stderr.isatty()
        self._what = what
        self._bar = tqdm(
            desc=what, total=total, file=sys.stderr, delay=0.0 if live else _PATIENCE,
            mininterval=0.1 if live else 10.0, dynamic_ncols=live,
            bar_format="{desc}: {percentage:3.0f}% |{bar:24}| {n_fmt}/{total_fmt}, {elapsed} gone, {remaining} left",
        )  # fmt: skip


class Output:
    """Where one command's words, tables and numbers go.

    `interrupted` says in a sentence what Ctrl-C leaves behind; a command says so anew when that changes.
    """

    def __init__(self, json_file: str | None, quiet: bool, interrupted: str = "interrupted") -> None:
        self.stages, self.interrupted = Stages(quiet), interrupted
        self._quiet, self._json = quiet, json_file
        self._console: Console | None = None

    def say(self, text: str = "") -> None:
        """Print a line as it is; a command or path in it can be copied."""
        self.stages.close()
        self._to().print(text, markup=False, highlight=False, soft_wrap=True)

    def paragraph(self, text: str) -> None:
        """Print a text in lines of 80 columns."""
        for line in wrapped(text):
            self.say(line)

    def notes(self, notes: Iterable[str]) -> None:
        """Print a line for each note."""
        for note in notes:
            self.say(f"Note: {note}")

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> None:
        """Print a table; one without columns is a list of names, values and remarks."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD if columns else box.SIMPLE, show_header=bool(columns), pad_edge=False)
        cells = [list(row) for row in rows]
        for place in range(max(map(len, cells), default=len(columns))):
            numbers = bool(columns) and all(_is_number(row[place]) for row in cells if place < len(row))
            name = columns[place] if place < len(columns) else ""
            table.add_column(Text(name), justify="right" if numbers else "left", overflow="fold")
        for row in cells:
            table.add_row(*map(Text, row))
        if note:
            self._to().print(f"{title}. {note}", markup=False, highlight=False)
        elif title:
            self.say(title)
        self._to().print(table)

    def result(self, value: Mapping[str, Any]) -> None:
        """Write the result where ``--json`` says, if it was given; an error leaves an older file whole."""
        if self._json is None:
            return
        self.stages.close()
        text = json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False)
        if self._json == "-":
            typer.echo(text)
        else:
            write_whole("--json", Path(self._json), f"{text}\n".encode())

    def _to(self) -> Console:
        if self._console is None:
            from rich.console import Console

            stream = sys.stderr if self._json == "-" else sys.stdout
            told = stream.isatty() or (os.environ.get("COLUMNS", "").isdigit() and int(os.environ["COLUMNS"]) > 0)
            width = None if told else _PIPED_WIDTH
            self._console = Console(file=stream, quiet=self._quiet, width=width, emoji=False)
        return self._console


@contextmanager
def output(json_file: str | None, quiet: bool, interrupted: str = "interrupted") -> Iterator[Output]:
    """Run a command's work: its `Output`, and for every error a message, a next step and an exit code."""
    out = Output(json_file, quiet, interrupted)
    try:
        if json_file is not None and json_file != "-":
            check_writable("--json", Path(json_file))  # before the work and not after it
        yield out
    except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
        raise
    except KeyboardInterrupt:
        out.stages.close()
        typer.echo(out.interrupted, err=True)
        raise typer.Exit(130) from None
    except Exception as error:
        out.stages.close()
        if os.environ.get(TRACEBACK):
            raise
        typer.echo(f"error: {describe(error)}", err=True)
        raise typer.Exit(2 if isinstance(error, ArgumentError) else 1) from None
    finally:
        out.stages.close()


@contextmanager
def live_line(quiet: bool) -> Iterator[Callable[[str], None]]:
    """The last line of standard error, as what is yielded writes it; nothing where it is no terminal."""
    from tqdm import tqdm

    off = quiet or not sys.stderr.isatty()
    with tqdm(bar_format="{desc}", file=sys.stderr, leave=False, dynamic_ncols=True, disable=off) as line:
        yield lambda text: line.set_description_str(text[: shutil.get_terminal_size().columns - 1])


def describe(error: Exception) -> str:
    """What went wrong and what to do next, without a traceback."""
    lines = str(error).strip().splitlines()
    what = f"unexpected {type(error).__name__}" + (f": {lines[0]}" if lines else "")
    following = f"run it again with {TRACEBACK}=1 and report what it shows; nothing already published is lost"
    if isinstance(error, AttmemoError):
        what, following = error.what, error.hint or "see --help of this command"
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" at {error.filename}" if error.filename else ""
        what, following = f"the disk is full{where}; what was published stays.", "free space and run it again"
    elif isinstance(error, OSError) and error.strerror:
        what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        following = f"check the path and its permissions; {TRACEBACK}=1 shows where it happened"
    return f"{what}\n  Next: {following}"


def wrapped(text: str, name: str = "", indent: str = "") -> list[str]:
    """Return a text in lines of 80 columns: the first behind `name`, the others behind `indent`."""
    return textwrap.wrap(
        text, COLUMNS, initial_indent=name, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )  # fmt: skip


def size(count: float) -> str:
    """Bytes in a unit that a person reads."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def cell(value: object) -> str:
    """A value as a table shows it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else "–"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(cell, value))
    return str(value)


def _is_number(text: str) -> bool:
    return text[:1].isdigit() or text[:1] in "-–.+" or not text
