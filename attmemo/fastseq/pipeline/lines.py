"""A file of texts, one a line, in UTF-8."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from attmemo.errors import DataError


def count_lines(source: Path, limit: int | None) -> tuple[int, str]:
    """Lines that will be read, and a digest of them.

    Raises
    ------
    DataError
        There are none, or they could not be read a second time.
    """
    if source.exists() and not source.is_file() and not source.is_dir():
        raise DataError(
            f"{source} is a pipe or a device, and is read twice: once to count its lines.",
            "write it to a file first, and name that",
        )
    hashed, lines = hashlib.blake2b(digest_size=12), 0
    for line in islice(_raw_lines(source), limit):
        hashed.update(line + b"\n")
        lines += 1
    if lines == 0:
        raise DataError(f"{source} is empty; expected a text a line.", "check how the file was written")
    return lines, hashed.hexdigest()


def _raw_lines(source: Path) -> Iterator[bytes]:
    try:
        with source.open("rb") as file:
            for number, line in enumerate(file):
                line = line.removesuffix(b"\n").removesuffix(b"\r")
                yield line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
    except FileNotFoundError:
        raise DataError(f"{source}: no such file.", "check the path") from None
    except IsADirectoryError:
        raise DataError(f"{source} is a directory; expected a file with a text a line.", "name a file") from None


def read_lines(source: Path) -> Iterator[str]:
    for number, line in enumerate(_raw_lines(source), 1):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{source}, line {number:,}: not UTF-8 ({error.reason} at byte {error.start}).",
                f"convert it: iconv -f latin1 -t utf-8 {source.name} > NEW.txt",
            ) from error
