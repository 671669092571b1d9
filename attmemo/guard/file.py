"""What a guard has learned, in a file: it survives a restart, and processes that share the file share what they learn.

One file holds what all have learned. To sync is to lock the file, read it, add what this process has learned since its
last sync, and write it anew under another name, which then takes the file's place. Counts are sums, and known values
are sets, so the order of processes does not matter. After an alarm the epoch is another one: then only the newest
counts are kept. The file has a checksum: a count with a wrong digit would certify what was never verified.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from attmemo.guard.margin import CLASSES
from attmemo.system.locking import locked

VERSION: Final = "6"
NO_SUMS: Final = {CLASSES.top: (max, 0.0), "lowest": (min, 1.0)}
"""Counts that are no sums: how those of two processes are joined, and what they are at first."""
HASHES: Final[dict[str, tuple[int, ...]]] = {"changes": (), "harmful": (), "values": (3,), "harm": (2,)}
"""Arrays of a file, and the numbers of one entry."""
DAMAGED: Final = ".damaged-"
"""In the name of a file that was set aside."""


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
        try:
            found = _read(self.path)
        except ValueError:
            return None
        return found[1] if found is not None and found[0] == self._settings else None

    def set_aside(self) -> Path | None:
        """Give a damaged file another name, which is returned. OSError: the folder cannot be written."""
        if not _is_damaged(self.path):
            return None
        with self.lock():
            if not _is_damaged(self.path):
                return None  # another process was first
            place = self.path.with_name(f"{self.path.stem}{DAMAGED}{time.strftime('%Y-%m-%d-%H-%M-%S')}-{os.getpid()}")
            os.rename(self.path, place)
        return place

    def write(self, learned: Learned) -> None:
        """Put this in place of what the file holds. OSError: it cannot be written."""
        known = {"epoch": learned.epoch, "since": learned.since, "counts": dict(learned.counts)}
        text, hashes = json.dumps(known), dict(learned.hashes)
        told = {
            "version": VERSION, "settings": self._settings, "learned": text,
            "checksum": _checksum(self._settings, text, hashes),
        }  # fmt: skip
        other = self.path.with_name(f"{self.path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            save_file(hashes, other, told)
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
    """Settings and what was learned under them, of every guard with a sound file in a folder."""
    found = []
    for file in sorted(Path(folder).glob("*.safetensors")):
        with suppress(ValueError):
            read = _read(file)
            if read is not None:
                found.append((json.loads(read[0]), read[1]))
    return found


def _is_damaged(path: Path) -> bool:
    try:
        _read(path)
    except ValueError:
        return True
    return False


def _read(path: Path) -> tuple[str, Learned] | None:
    """Settings, and what was learned; None: no file, or one of another version. ValueError: it is damaged."""
    try:
        with safe_open(path, "numpy") as file:
            told = file.metadata() or {}
            if told.get("version", VERSION) != VERSION:
                return None
            known = json.loads(told["learned"])
            hashes = {name: file.get_tensor(name).astype(np.uint64) for name in HASHES}
            if any(hashes[name].shape[1:] != entry or not hashes[name].ndim for name, entry in HASHES.items()):
                raise ValueError("arrays of other shapes")
            if told["checksum"] != _checksum(told["settings"], told["learned"], hashes):
                raise ValueError("another checksum")
            learned = Learned(int(known["epoch"]), float(known["since"]), dict(known["counts"]), hashes)
            return told["settings"], learned
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(str(error)) from error
    except OSError as error:
        if error.errno == errno.EIO:
            raise ValueError(str(error)) from error
        return None


def _checksum(settings: str, learned: str, hashes: Mapping[str, npt.NDArray[np.uint64]]) -> str:
    found = xxhash.xxh3_128(json.dumps([settings, learned]).encode())
    for name in sorted(hashes):
        found.update(f"{name} {hashes[name].shape}".encode())
        found.update(np.ascontiguousarray(hashes[name], np.uint64).data)
    return found.hexdigest()
