"""What a guard has learned, in a file: it survives a restart, and processes that share the file share what they learn.

One file holds what all have learned. To sync is to lock the file, read it, add what this process has learned since its
last sync, and write it anew under another name, which then takes the file's place. Counts are sums, and known values
are sets, so the order of processes does not matter. After an alarm the epoch is another one: then only the newest
counts are kept.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from attmemo.guard.margin import CLASSES, WIDER
from attmemo.locking import locked

VERSION: Final = "4"
NO_SUMS: Final = {CLASSES.top: (max, 0.0), WIDER.top: (max, 0.0), "lowest": (min, 1.0)}
"""Counts that are no sums: how those of two processes are joined, and what they are at first."""
HASHES: Final[dict[str, tuple[int, ...]]] = {"changes": (), "harmful": (), "values": (3,), "harm": (2,)}
"""Arrays of a file, and the numbers of one entry."""


@dataclass(frozen=True, slots=True)
class Learned:
    """All that a guard has learned."""

    epoch: int = 0
    since: float = 0.0  # when the epoch began, seconds of the Unix epoch
    counts: Mapping[str, float] = field(default_factory=dict)
    hashes: Mapping[str, npt.NDArray[np.uint64]] = field(default_factory=dict)


class Ledger:
    """The file of one guard.

    Parameters
    ----------
    path : path
        Of the file; its folder is made.
    settings : mapping
        What the guard depends on, JSON-able. What was learned under other settings is not read.
    """

    def __init__(self, path: os.PathLike[str] | str, settings: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._settings = json.dumps(settings, sort_keys=True)

    def read(self) -> Learned | None:
        """What the file holds; None: nothing that can be used. A damaged file is no loss but time."""
        found = _read(self.path)
        return found[1] if found is not None and found[0] == self._settings else None

    def write(self, learned: Learned) -> None:
        """Put this in place of what the file holds. OSError: it cannot be written."""
        known = {"epoch": learned.epoch, "since": learned.since, "counts": dict(learned.counts)}
        told = {"version": VERSION, "settings": self._settings, "learned": json.dumps(known)}
        other = self.path.with_name(f"{self.path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            save_file(dict(learned.hashes), other, told)
            os.replace(other, self.path)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        finally:
            other.unlink(missing_ok=True)

    def lock(self) -> AbstractContextManager[None]:
        """Held while the file is read and written anew. OSError: the folder cannot be written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return locked(self.path.with_name(self.path.name + ".lock"))


def beyond(counts: Mapping[str, float], known: Mapping[str, float]) -> dict[str, float]:
    """What was counted beyond what is known."""
    return {name: count if name in NO_SUMS else count - known.get(name, 0.0) for name, count in counts.items()}


def joined(counts: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
    """What two processes have counted."""
    found = {name: count + others.get(name, 0.0) for name, count in counts.items()}
    return found | {name: join(counts[name], others.get(name, first)) for name, (join, first) in NO_SUMS.items()}


def all_in(folder: os.PathLike[str] | str) -> list[tuple[dict[str, Any], Learned]]:
    """Settings and what was learned under them, of every guard with a file in a folder."""
    files = sorted(Path(folder).glob("*.safetensors"))
    found = [read for file in files if (read := _read(file)) is not None]
    return [(json.loads(settings), learned) for settings, learned in found]


def _read(path: Path) -> tuple[str, Learned] | None:
    try:
        with safe_open(path, "numpy") as file:
            told = file.metadata() or {}
            if told.get("version") != VERSION:
                return None
            known = json.loads(told["learned"])
            hashes = {name: file.get_tensor(name).astype(np.uint64) for name in HASHES}
            if any(hashes[name].shape[1:] != entry or not hashes[name].ndim for name, entry in HASHES.items()):
                return None
            learned = Learned(int(known["epoch"]), float(known["since"]), dict(known["counts"]), hashes)
            return told["settings"], learned
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return None
