"""Read the user's text, row by row, from lines, CSV, TSV, JSON lines or Parquet.

`read_texts` checks every file before the first row is read, then streams: memory does not grow with the size of a
file. Errors of pyarrow, csv and json become a `DataError` that names the file. Parquet needs the extra ``report``.
"""

from __future__ import annotations

import csv
import difflib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

from attmemo.db import file_digest
from attmemo.errors import DataError
from attmemo.system.extras import check_installed

# Column names taken as the text when several columns hold text, best first.
PREFERRED_NAMES = ("text", "sentence", "content", "line", "message")
_ALIKE = 0.7  # of names without their suffixes: from here on one may be meant by the other
_SAMPLE_ROWS = 1000
_CHUNK_ROWS = 4096

# What a text file must not begin with: the message of the first bad line would not say what it is.
_NOT_UTF8 = {
    b"\x1f\x8b": ("gzip data", "decompress it first: gunzip FILE"),
    b"\x28\xb5\x2f\xfd": ("zstd data", "decompress it first: unzstd FILE"),
    b"PK\x03\x04": ("a zip archive or a spreadsheet", "unzip it, or export the sheet as CSV"),
    b"PAR1": ("Parquet data", "give the file the suffix .parquet"),
    b"\xff\xfe": ("UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8 FILE"),
    b"\xfe\xff": ("UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8 FILE"),
}

_WHOLE_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})(\.0+)?")
Cells = Iterator[tuple[int, list[Any]]]  # row number (from 0), and the cells of the columns asked for, as stored


@dataclass(frozen=True, slots=True)
class Row:
    """One text of the user's data."""

    text: str  # never blank, always encodable as UTF-8
    label: str | int | None  # whole numbers are ints in every format, an empty cell is None
    source: str  # the file's name as the caller gave it
    row: int  # from 0: for lines and JSON lines the line number less one


@dataclass(frozen=True, slots=True)
class _Format:
    """How one suffix is read. `names` gives the columns; None: a row is a line."""

    cells: Callable[[Path, Sequence[str]], Cells]
    names: Callable[[Path], list[str]] | None = None
    header_lines: int = 0
    repair: str = "check that the file can be opened and is complete"


def read_texts(
    files: Sequence[str | Path], *, text_column: str | None = None, label_column: str | None = None,
    limit: int | None = None,
) -> Iterator[Row]:  # fmt: skip
    """Stream the non-blank texts of `files`, in order, no more than `limit` over all files.

    The suffix decides the format; a TSV has no quoting. The text column is by default the only column of text (the
    label's apart), else the first of `PREFERRED_NAMES` among them; without a label column labels are None.

    A `DataError` comes at the call for missing, empty or unknown files and for columns that are missing or not text;
    while iterating for a malformed row, bytes that are not UTF-8, a value that is not text, or no non-blank row.
    """
    names = _as_list(files)
    paths = [Path(name) for name in names]
    if limit is not None and limit < 1:
        raise DataError(f"the row limit is {limit}, expected 1 or more", "leave --limit out to read every row")
    formats = [_check_file(path) for path in paths]
    lines = [path for path, form in zip(paths, formats, strict=True) if form.names is None]
    named = f"label column {label_column!r}" if label_column is not None else f"column {text_column!r}"
    if (lines and label_column is not None) or (lines == paths and text_column is not None):
        raise DataError(
            f"{lines[0]}: each line is one text, so there is no {named}",
            "leave the column options out, or give files with columns: .csv, .tsv, .jsonl or .parquet",
        )
    plans = [
        (str(name), form, _choose_columns(path, form, text_column, label_column))
        for name, path, form in zip(names, paths, formats, strict=True)
    ]
    rows = (row for source, form, columns in plans for row in _rows(source, form, columns))
    return islice(rows, limit)


def count_rows(files: Sequence[str | Path], *, limit: int | None = None) -> int:
    """Count the rows of `files`, at most `limit`, without parsing them, as the total of a progress bar.

    The count is an upper bound: blank rows count, and so do newlines inside quoted cells.
    """
    total = 0
    for path in map(Path, _as_list(files)):
        form = _check_file(path)
        with _as_data_error(path, form.repair):
            if form is _PARQUET:
                with _parquet(path) as file:
                    total += file.metadata.num_rows
            else:
                most = None if limit is None else limit + form.header_lines
                total += max(0, sum(1 for _ in islice(_lines(path), most)) - form.header_lines)
    return total if limit is None else min(total, limit)


def digest(path: str | Path) -> str:
    """Digest a file's bytes, as `file_digest`, to recognise the same source when a build is resumed."""
    with _as_data_error(Path(path), "check the path and its permissions"):
        return file_digest(Path(path))


def _as_list(files: Sequence[str | Path]) -> list[str | Path]:
    # A lone string is a sequence of its letters: without this, 26 missing files.
    names: list[str | Path] = [files] if isinstance(files, (str, Path)) else list(files)
    if not names:
        raise DataError("no data files were given, expected at least one", "pass one with --data FILE")
    return names


@contextmanager
def _as_data_error(path: Path, repair: str) -> Iterator[None]:
    """Turn what a reader raises about a file into a `DataError` about it."""
    try:
        yield
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}", repair) from error
    except (ValueError, csv.Error) as error:
        raise DataError(f"{path}: malformed {path.suffix} file: {str(error).strip()}", repair) from error


def _check_file(path: Path) -> _Format:
    """The format of a file that exists, is not empty and does not hold something else."""
    with _as_data_error(path, "check the path and its permissions"):
        if path.is_dir():
            raise DataError(f"{path}: is a directory, expected a file", f"pass its files, e.g. {path / '*.jsonl'}")
        if str(path) == "-" or (path.exists() and not path.is_file()):
            raise DataError(
                f"{path}: standard input and pipes are not supported, expected a file: it is read more than once",
                "write the data to a file first: … > data.log",
            )
        if not path.exists():
            raise DataError(f"{path}: no such file", _similar_file(path))
        form = FORMATS.get(path.suffix.lower())
        if form is None:
            raise DataError(
                f"{path}: unknown suffix {path.suffix!r}, expected one of {', '.join(FORMATS)}",
                "rename or convert the file; plain text, one text a line, is .txt",
            )
        with path.open("rb") as file:
            start = file.read(4)
    if not start:
        raise DataError(f"{path}: the file is empty (0 bytes), expected at least one row", "check how it was written")
    for magic, (seen, repair) in _NOT_UTF8.items():
        if form is not _PARQUET and start.startswith(magic):
            raise DataError(f"{path}: holds {seen}, expected UTF-8 text in a {path.suffix} file", repair)
    return form


def _similar_file(path: Path) -> str:
    siblings = os.listdir(path.parent) if path.parent.is_dir() else []
    for close in difflib.get_close_matches(path.name, siblings, n=9):
        # The suffix alone makes short names look alike: x.log and apt.log.
        if difflib.SequenceMatcher(None, path.stem, Path(close).stem).ratio() >= _ALIKE:
            return f"did you mean {path.parent / close}?"
    return "check the path"


def _choose_columns(path: Path, form: _Format, text: str | None, label: str | None) -> list[str]:
    """The text column of one file, given or guessed, and perhaps the label's; none if a row is a line."""
    if form.names is None:
        return []
    with _as_data_error(path, form.repair):
        holds = _layout(path, form)
    # No column is named by a number, nor by something as long as a sentence.
    data_on_top = form.header_lines > 0 and any(
        _WHOLE_NUMBER.fullmatch(name.strip()) or len(name.split()) >= 5 or len(name) > 80 for name in holds
    )
    for option, name in (("--text-column", text), ("--label-column", label)):
        if name is not None and name not in holds:
            raise _no_column(path, holds, option, name, data_on_top)
    if text is None:
        text = _guess_text_column(path, holds, label, data_on_top)
    if holds[text] not in ("text", "nothing", "mixed values"):
        raise DataError(
            f"{path}: column {text!r} holds {holds[text]}, expected text; the columns are {_listing(holds)}",
            "name the column that holds the text: --text-column NAME",
        )
    return [text] if label is None else [text, label]


def _layout(path: Path, form: _Format) -> dict[str, str]:
    """What each column holds, as far as the first rows tell."""
    assert form.names is not None
    names, rows = form.names(path), 0
    seen: dict[str, set[str]] = {name: set() for name in names}
    for rows, (_, cells) in enumerate(islice(form.cells(path, names), _SAMPLE_ROWS), 1):  # noqa: B007
        for name, cell in zip(names, cells, strict=True):
            seen[name].add(_kind_in_words(cell) if form.header_lines else _kind(cell))
    if not rows or not any(names):
        raise DataError(f"{path}: no non-blank rows, expected at least one", "check how the file was written")
    others = "text" if form.header_lines else "mixed values"  # all is text in a table of characters
    kinds = {name: found - {"nothing"} or found for name, found in seen.items()}
    return {name: next(iter(found)) if len(found) == 1 else others for name, found in kinds.items()}


def _guess_text_column(path: Path, holds: Mapping[str, str], label: str | None, data_on_top: bool) -> str:
    if data_on_top:
        raise _no_header(path, holds)
    texts = [name for name, kind in holds.items() if kind == "text" and name != label]
    if len(texts) == 1:
        return texts[0]
    blank = [name for name, kind in holds.items() if kind == "nothing"]  # so far: text may come further down
    preferred = [name for known in PREFERRED_NAMES for name in texts or blank if name.lower() == known]
    if preferred:
        return preferred[0]
    if len(blank) == len(holds):
        raise DataError(f"{path}: no non-blank rows, expected at least one", "check how the file was written")
    seen = "several columns hold text" if texts else "no column holds text"
    raise DataError(
        f"{path}: {seen}, expected one; the columns are {_listing(holds)}",
        "name the column that holds the text: --text-column NAME",
    )


def _no_column(path: Path, holds: Mapping[str, str], option: str, name: str, data_on_top: bool) -> DataError:
    by_lower = {column.strip().lower(): column for column in holds}
    close = difflib.get_close_matches(name.strip().lower(), by_lower, n=1)
    if data_on_top and not close:
        return _no_header(path, holds)
    hint = f"did you mean {option} {by_lower[close[0]]!r}?" if close else f"name one of them: {option} NAME"
    return DataError(f"{path}: no column {name!r}; the columns are {_listing(holds)}", hint)


def _no_header(path: Path, holds: Mapping[str, str]) -> DataError:
    return DataError(
        f"{path}: the first line looks like data, expected column names; it reads {', '.join(map(_shorten, holds))}",
        "put a line of column names on top, or write the texts alone, one a line, to a .txt file",
    )


def _listing(holds: Mapping[str, str]) -> str:
    return ", ".join(f"{_shorten(name)} ({kind})" for name, kind in holds.items())


def _shorten(name: str) -> str:
    return repr(name if len(name) <= 60 else name[:57] + "...")


def _rows(source: str, form: _Format, columns: list[str]) -> Iterator[Row]:
    """The non-blank rows of one file."""
    path = Path(source)
    seen = kept = 0
    with _as_data_error(path, form.repair):
        for seen, (row, cells) in enumerate(form.cells(path, columns), start=1):  # noqa: B007  # for the error below
            text, *labels = cells
            if text is None or (isinstance(text, str) and not text.strip()):
                continue
            if not isinstance(text, str):
                raise DataError(
                    f"{path}, data row {row} (from 0): column {columns[0]!r} holds {_kind(text)} "
                    f"({_shorten(str(text))}), expected text",
                    "name the column that holds the text, --text-column NAME, or repair the row",
                )
            kept += 1
            if not text.isascii():  # JSON can escape lone surrogates, but no tokenizer takes them
                text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            yield Row(text, _as_label(path, row, labels[0]) if labels else None, source, row)
    if not kept:
        where = f" in column {columns[0]!r}" if columns else ""
        raise DataError(
            f"{path}: no non-blank rows, expected at least one; {seen} blank{where}",
            "check how the file was written" + (", or name another --text-column" if columns else ""),
        )


def _as_label(path: Path, row: int, value: object) -> str | int | None:
    """One label for the same cell in every format: CSV has '1' or '1.0' where JSON has 1 and Parquet 1.0."""
    if value is None or value == "" or value != value:  # the last: an empty cell in a column of floats
        return None
    if isinstance(value, int):
        return int(value)
    if isinstance(value, (str, float)):
        return int(str(value).split(".")[0]) if _WHOLE_NUMBER.fullmatch(str(value)) else str(value)
    raise DataError(
        f"{path}, data row {row} (from 0): the label is {_kind(value)}, expected a name or a whole number",
        "name another --label-column, or repair the row",
    )


def _kind(value: object) -> str:
    """What a value is, in a reader's words."""
    names: dict[type, str] = {
        str: "text", bool: "true/false", int: "numbers", float: "numbers", Decimal: "numbers", list: "lists",
        dict: "objects", bytes: "bytes", type(None): "nothing",
    }  # fmt: skip
    return names.get(type(value), type(value).__name__)


def _kind_in_words(cell: str) -> str:
    """What a cell of a table of characters says."""
    if not cell.strip():
        return "nothing"
    with suppress(ValueError):
        return "text" if math.isnan(float(cell)) else "numbers"
    return "true/false" if cell.lower() in ("true", "false") else "text"


def _lines(path: Path, ends: bool = False) -> Iterator[str]:
    """The lines of a text file, with their ends or without.

    Not with ``errors="replace"``: a file of noise would give rows of noise, and a database of them.
    """
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}, line {number:,}: not UTF-8 ({error.reason} at byte {error.start})",
                    f"convert it: iconv -f LATIN1 -t UTF-8 {path.name} > NEW{path.suffix}; "
                    "or leave such bytes out: iconv -c -f UTF-8 -t UTF-8",
                ) from error
            if "\0" in line:
                raise DataError(f"{path}, line {number:,}: holds a zero byte, so it is not text", "check the file")
            yield line if ends else line.removesuffix("\n").removesuffix("\r")


def _table(path: Path) -> Iterator[list[str]]:
    """The rows of a CSV or TSV, its header first; all as wide as the header, a longer one is refused."""
    csv.field_size_limit(sys.maxsize)  # its default refuses cells of more than 128 KiB
    rows: Iterator[list[str]] = (line.split("\t") for line in _lines(path))
    if path.suffix.lower() == ".csv":
        # strict: without it a quote that is never closed takes the rest of the file into one cell.
        rows = csv.reader(_lines(path, ends=True), strict=True)
    width = None
    for line, cells in enumerate(rows, 1):
        width = len(cells) if width is None else width
        if len(cells) > width:
            raise ValueError(f"Expected {width} fields in line {line}, saw {len(cells)}")
        yield cells + [""] * (width - len(cells))


def _table_names(path: Path) -> list[str]:
    return list(dict.fromkeys(next(_table(path), [])))


def _table_cells(path: Path, columns: Sequence[str]) -> Cells:
    rows = _table(path)
    header = next(rows)
    places = [header.index(name) for name in columns]
    return ((row, [cells[place] for place in places]) for row, cells in enumerate(rows))


def _json_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    repair = "write one object a line; an array becomes lines with: jq -c '.[]' OLD > NEW.jsonl"
    for row, line in enumerate(_lines(path)):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {row + 1}: malformed JSON: {error}", repair) from error
        if not isinstance(value, dict):
            raise DataError(f"{path}, line {row + 1}: holds {_kind(value)}, expected one JSON object", repair)
        yield row, value


def _json_names(path: Path) -> list[str]:
    return list(dict.fromkeys(name for _, value in islice(_json_objects(path), _SAMPLE_ROWS) for name in value))


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """A Parquet file; an AttmemoError if pyarrow is not installed, a ValueError for what it raises."""
    check_installed("report", "pyarrow")
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            yield file
    except pyarrow.ArrowException as error:
        raise ValueError(str(error)) from error


def _parquet_names(path: Path) -> list[str]:
    with _parquet(path) as file:
        return list(dict.fromkeys(file.schema_arrow.names))


def _parquet_cells(path: Path, columns: Sequence[str]) -> Cells:
    row = 0
    with _parquet(path) as file:
        for batch in file.iter_batches(batch_size=_CHUNK_ROWS, columns=columns):
            found = [batch.column(batch.schema.names.index(name)).to_pylist() for name in columns]
            yield from ((row + place, list(cells)) for place, cells in enumerate(zip(*found, strict=True)))
            row += len(batch)


_LINES = _Format(lambda path, _: ((row, [line]) for row, line in enumerate(_lines(path))))
_JSON = _Format(
    lambda path, columns: ((row, [value.get(name) for name in columns]) for row, value in _json_objects(path)),
    _json_names,
)
_PARQUET = _Format(_parquet_cells, _parquet_names, repair="check that the file is complete, or write it again")

FORMATS: Mapping[str, _Format] = {
    ".txt": _LINES,
    ".log": _LINES,
    ".csv": _Format(
        _table_cells, _table_names, 1,
        'put texts that hold a comma, a quote or a newline in "..."; if tabs separate the cells, name the file .tsv',
    ),
    ".tsv": _Format(
        _table_cells, _table_names, 1,
        "a TSV cell holds no tab and no newline; keep such texts in .csv or .jsonl",
    ),
    ".jsonl": _JSON,
    ".json": _JSON,
    ".parquet": _PARQUET,
}  # fmt: skip
