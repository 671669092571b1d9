"""An output file that an interruption cannot harm: written as a journal, put in order and in place at the end.

While it grows there is only ``OUTPUT.part``: a line of JSON that says what is being made, then a line for every batch
with the numbers of its rows and their texts. Batches come sorted by length, not in the order of the input, so that a
plain file could not hold what is done. A line that was cut off counts for nothing. When all rows are there they are
written to ``OUTPUT.new`` in order, which then takes the output's name: a reader of OUTPUT sees the old file or the
whole new one.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
from collections.abc import Container, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from attmemo.errors import AttmemoError

FORMAT: Final = 1
_RECORDS_KEPT = 1024  # batches that one window of the input may be spread over, when they are put in order


class JournalError(AttmemoError):
    """What an interrupted run left cannot be gone on with."""


class Journal:
    """The growing output of a run; a context manager.

    Parameters
    ----------
    output : Path
        The file that will stand there at the end.
    identity : mapping
        What decides the texts, JSON-able: a journal of another identity is not gone on with.
    resume : bool
        False: begin anew, whatever is there.
    notes : mapping, optional
        What a new journal is given to keep, JSON-able; of one that is gone on with, `notes` is what it was given then.

    Raises
    ------
    JournalError
        Another run writes this output; what is there was made from something else, or is damaged.
    AttmemoError
        The output is no regular file, or its directory does not exist.
    """

    def __init__(
        self,
        output: Path,
        identity: Mapping[str, Any],
        *,
        resume: bool = True,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        if output.is_symlink():
            output = output.resolve()  # the file it names is replaced, not the link
        self.output = output
        self.part = output.with_name(output.name + ".part")
        if not output.parent.is_dir():
            raise AttmemoError(f"{output}: there is no directory {output.parent}.", "make it, or name another output")
        if output.exists() and not stat.S_ISREG(output.stat().st_mode):
            raise AttmemoError(f"{output} is not a regular file; it would be replaced by one.", "name another output")
        self._identity = json.loads(json.dumps(identity))
        self.notes: dict[str, Any] = dict(notes or {})
        self._places: dict[int, tuple[int, int]] = {}  # of each row: where its record begins, and its place in it
        self._fd = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._lock()
            if not resume:
                os.ftruncate(self._fd, 0)
            self._load()
        except BaseException:
            os.close(self._fd)
            raise
        self._record = lru_cache(_RECORDS_KEPT)(self._read_record)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd >= 0:
            if not self._places:
                self.part.unlink(missing_ok=True)  # nothing was done: nothing for another run to stumble over
            os.close(self._fd)
            self._fd = -1

    def __len__(self) -> int:
        """Number of rows that are done."""
        return len(self._places)

    @property
    def done(self) -> Container[int]:
        """The rows that are done."""
        return self._places.keys()

    def append(self, rows: Sequence[int], lines: Sequence[str]) -> None:
        """Add what a batch gave. After an error or a kill it is there wholly, or not at all."""
        if len(rows) != len(lines) or any("\n" in line for line in lines):
            raise ValueError("a line for each row, none with a line break")
        body = json.dumps({"rows": list(rows), "lines": list(lines)}, ensure_ascii=False).encode(
            "utf-8", "surrogatepass"
        )
        self._write(body)
        for place, row in enumerate(rows):
            self._places.setdefault(row, (self._end, place))
        self._end += len(body) + 1

    def finish(self, rows: int) -> None:
        """Put rows 0 to `rows` in order, give the file its name, and take the journal away.

        Raises
        ------
        JournalError
            A row is missing.
        """
        missing = [row for row in range(rows) if row not in self._places][:3]
        if missing or len(self._places) != rows:
            raise JournalError(
                f"{self.part}: {len(self._places):,} of {rows:,} rows are there, missing {missing or 'none'}.",
                "run the same command again",
            )
        new = self.output.with_name(self.output.name + ".new")
        with new.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
            for row in range(rows):
                start, place = self._places[row]
                file.write(self._record(start)[place] + "\n")
            file.flush()
            os.fsync(file.fileno())
        if self.output.exists():
            shutil.copymode(self.output, new)
        os.replace(new, self.output)
        self.part.unlink()
        folder = os.open(self.output.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise JournalError(
                f"another run is writing {self.output}: {self.part} is locked.", "wait for it, or name another output"
            ) from None
        # Between opening and locking the other run may have finished and taken the file away.
        if not self.part.exists() or os.fstat(self._fd).st_ino != self.part.stat().st_ino:
            raise JournalError(f"another run has just finished {self.output}.", "run the command again if need be")

    def _load(self) -> None:
        """Read what is there, cut off a torn end, and begin a new journal if nothing is."""
        self._end = 0
        self._mismatch: JournalError | None = None
        with open(os.dup(self._fd), "rb") as file:
            file.seek(0)
            for number, raw in enumerate(file):
                if not raw.endswith(b"\n"):
                    break
                self._take(number, raw)
                self._end += len(raw)
        if self._mismatch is not None:
            if self._places:
                raise self._mismatch
            self._end = 0  # ended before its first batch
        os.ftruncate(self._fd, self._end)
        if self._end == 0:
            body = json.dumps({"journal": FORMAT, "made_from": self._identity, "notes": self.notes}).encode()
            self._write(body)
            self._end = len(body) + 1

    def _take(self, number: int, raw: bytes) -> None:
        try:
            record = json.loads(raw.decode("utf-8", "surrogatepass"))
            if number == 0:
                self._check_identity(record)
                return
            rows, lines = record["rows"], record["lines"]
            if len(rows) != len(lines) or not all(isinstance(row, int) and row >= 0 for row in rows):
                raise ValueError("rows and lines do not match")
        except (ValueError, KeyError, TypeError) as error:
            raise JournalError(
                f"{self.part}, line {number + 1}: not a record of an interrupted run.",
                f"remove {self.part}, or add --restart to begin anew",
            ) from error
        for place, row in enumerate(rows):
            self._places.setdefault(row, (self._end, place))

    def _check_identity(self, header: Mapping[str, Any]) -> None:
        if header["journal"] != FORMAT:
            raise ValueError("another format")
        found = header["made_from"]
        other = sorted(
            name for name in found.keys() | self._identity.keys() if found.get(name) != self._identity.get(name)
        )
        if other:
            shown = "; ".join(
                f"{name} {found.get(name)!r} then, {self._identity.get(name)!r} now" for name in other[:3]
            )
            self._mismatch = JournalError(
                f"{self.part} was left by a run that made something else: {shown}.",
                "give what was given then to go on, or add --restart to begin anew",
            )
            return
        self.notes = dict(header["notes"])

    def _write(self, body: bytes) -> None:
        view = memoryview(body + b"\n")
        start = self._end
        try:
            while view:
                start += (count := os.pwrite(self._fd, view, start))
                view = view[count:]
        except BaseException:
            os.ftruncate(self._fd, self._end)  # a full disk, Ctrl-C: half a record is none
            raise

    def _read_record(self, start: int) -> list[str]:
        with open(os.dup(self._fd), "rb") as file:
            file.seek(start)
            record = json.loads(file.readline().decode("utf-8", "surrogatepass"))
        lines: list[str] = record["lines"]
        return lines
