"""Where the lines of a stream come from: invented ones, a file, or a descriptor such as standard input."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from attmemo.errors import DataError
from attmemo.wording import counted

WAIT: Final = 1.0  # seconds that a batch waits for more lines
_PIECE: Final = 1 << 16


def read_log(log: Path, fewest: int) -> Iterator[str]:
    """The lines of a file that are not blank, without ends; DataError: no text, or fewer lines than that."""
    try:
        with log.open("rb") as stream:
            if b"\0" in stream.read(4096):
                raise DataError(f"{log}: is not text, expected a log with one entry a line.", "decompress it")
        with log.open(encoding="utf-8", errors="replace") as stream:
            count = sum(1 for line in islice((line for line in stream if line.strip()), fewest))
        if count < fewest:
            raise DataError(
                f"{log} has {counted(count, 'line that is', 'lines that are')} not blank; the demo needs {fewest}, "
                "better thousands.",
                "give a longer log, or none: attmemo demo",
            )
    except OSError as error:
        raise DataError(f"{log}: cannot be read: {error.strerror or error}", "check the path") from error
    return _lines(log)


def _lines(log: Path) -> Iterator[str]:
    with log.open(encoding="utf-8", errors="replace") as stream:
        yield from (line.strip() for line in stream if line.strip())


def in_batches(lines: Iterator[str], size: int) -> Iterator[Sequence[str]]:
    """So many lines at a time; the last batch may be smaller."""
    while batch := list(islice(lines, size)):
        yield batch


def read_batches(descriptor: int, size: int, wait: float = WAIT) -> Iterator[Sequence[str]]:
    """Batches of what is written to a descriptor, as it comes.

    A batch that is not full goes on after `wait` seconds without anything new. Blank lines are left out.
    """
    # No thread and no sys.stdin: a thread that waits in a buffered read keeps Python from ending.
    rest, lines, ended = b"", list[str](), False
    while not ended or lines:
        ready = ended or select.select([descriptor], [], [], wait if lines else None)[0]
        if ready and not ended and len(lines) < size:
            piece = os.read(descriptor, _PIECE)
            ended = not piece
            *whole, rest = (rest + (piece or b"\n")).split(b"\n")
            lines += [text for line in whole if (text := line.decode("utf-8", "replace").strip())]
        if len(lines) >= size or (lines and (ended or not ready)):
            yield lines[:size]
            lines = lines[size:]
