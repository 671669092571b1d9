"""A log of the verified answers that a record changed: one line of JSON for each. No text, no token ids."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from errno import ENOSPC
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from attmemo.errors import ArgumentError, DataError
from attmemo.guard.asking import Asking
from attmemo.guard.verdict import Verdict
from attmemo.kernels.changes import Tokens
from attmemo.rows.index import TokenIndex

_LOG = logging.getLogger("attmemo")

LARGEST: Final = 16 << 20
"""Bytes after which a file is renamed, with ``.1`` at its end, in place of the one that had this name."""


@dataclass(frozen=True, slots=True)
class Case:
    """An answer from a record, as the log names it."""

    tokens: str  # a hash
    record: int
    record_tokens: str  # a hash; empty: the record is gone
    evidence: str

    @classmethod
    def of(cls, asking: Asking, place: int, index: TokenIndex) -> Case:
        """The case of a sequence of a forward."""
        assert asking.plan is not None
        record = int(asking.plan.record[place])
        try:
            donor = digest(index.tokens_of(record)) if record in index else ""
        except KeyError:  # it went meanwhile
            donor = ""
        return cls(digest(asking.tokens_of(place)), record, donor, asking.evidence(place).name.lower())


class ChangeLog:
    """The file. Several processes may write it.

    Parameters
    ----------
    path : path-like
        Made if there is none; its folder must be there.
    largest : int
        Bytes of a file, about. There are two at most.

    Raises
    ------
    ArgumentError
        The file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], largest: int = LARGEST) -> None:
        self.path, self._largest, self._told = Path(path), largest, False
        try:
            os.close(self._open())
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            what = f"log_changes is {str(path)!r:.80}, which cannot be written: {why}."
            raise ArgumentError(what, "name a file in a folder that can be written") from error

    def note(
        self, case: Case, verdict: Verdict, margin: float | None, blamed: set[int], epoch: int, given: bool = False
    ) -> None:
        """Write a line; `given`: the answer was given. A file that cannot be written is told once."""
        line = {
            "time": round(time.time(), 3), "tokens": case.tokens, "record": case.record,
            "record_tokens": case.record_tokens, "margin": margin, "evidence": case.evidence,
            "verdict": verdict.name.lower(), "given": given, "blamed": [f"{slot:016x}" for slot in sorted(blamed)],
            "epoch": epoch,
        }  # fmt: skip
        try:
            self._write(json.dumps(line).encode() + b"\n")
        except OSError as error:
            if not self._told:
                self._told = True
                _LOG.warning("attmemo: the log of changed answers cannot be written: %s", error)

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def _write(self, line: bytes) -> None:
        while True:
            file = self._open()
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                size = os.fstat(file).st_size
                if size + len(line) <= self._largest or not size:
                    if os.write(file, line) < len(line):  # a full disk takes a part, and the next line would follow it
                        os.ftruncate(file, size)
                        raise OSError(ENOSPC, os.strerror(ENOSPC))
                    return
                if os.path.exists(self.path) and os.path.samestat(os.fstat(file), os.stat(self.path)):
                    os.replace(self.path, f"{self.path}.1")  # else another process did so
            finally:
                with suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile holds the file too
                os.close(file)


def digest(tokens: Tokens) -> str:
    """Return a hash of tokens: 64 bits as 16 digits, the same in every process."""
    return blake2b(tokens.astype("<i4").tobytes(), digest_size=8).hexdigest()


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a log, those of the renamed file first. A line that was cut off is left out.

    DataError: there is no such file, or it is no log of changes.
    """
    if not path.is_file():
        raise DataError(f"{path}: there is no such file.", "--log-changes of attmemo serve writes one")
    for file in (Path(f"{path}.1"), path):
        for number, raw in enumerate(file.read_bytes().splitlines(keepends=True) if file.is_file() else (), 1):
            try:
                line = json.loads(raw)
                line["verdict"], line["blamed"], line["record_tokens"], line["time"]
            except (ValueError, TypeError, KeyError) as error:
                if not raw.endswith(b"\n"):
                    continue
                what = f"{file}, line {number} is no line of a log of changed answers."
                raise DataError(what, "give the file that --log-changes wrote") from error
            yield line


def summary(path: Path, most: int = 5) -> dict[str, Any]:
    """What is in a log, JSON-able: counts, and the slots and records that were named most often."""
    verdicts, blamed, records, inputs = Counter[str](), Counter[str](), Counter[str](), set[str]()
    given, times, epochs = 0, list[float](), set[int]()
    for line in lines_of(path):
        verdicts[line["verdict"]] += 1
        blamed.update(line["blamed"])
        records[line["record_tokens"] or f"record {line['record']}"] += 1
        inputs.add(line["tokens"])
        given += line["given"]
        times.append(line["time"])
        epochs.add(line["epoch"])
    return {
        "path": str(path), "changed": len(times), "given": given, "inputs": len(inputs), "verdicts": dict(verdicts),
        "first": min(times, default=None), "last": max(times, default=None), "epochs": sorted(epochs),
        "blamed": blamed.most_common(most), "records": records.most_common(most),
    }  # fmt: skip
