"""Folders of namespaces in the folder of a database: each is a database of its own that fills itself."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from attmemo.db.folder import NAMED, NAMESPACES, SEGMENTS
from attmemo.db.pools.filling import is_filling


def folder_of(place: Path, name: str) -> Path:
    """The folder of a namespace in the folder of a database; its name does not show."""
    return place / NAMESPACES / hashlib.sha256(name.encode()).hexdigest()[:32]


def write_name(folder: Path, name: str) -> None:
    """Note in its folder whose it is, in a file that is whole at all times. Unwritten, it is missing in lists."""
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=folder, prefix=NAMED, delete=False) as stream:  # for its owner alone
            try:
                json.dump({"name": name}, stream)
                stream.close()
                os.replace(stream.name, folder / NAMED)
            except OSError:
                os.unlink(stream.name)  # on a full disk it would be the first thing in the way
                raise


def named_in(place: Path) -> dict[str, Path]:
    """The namespaces of a database by name, each with its folder."""
    found = {}
    for file in sorted(place.glob(f"{NAMESPACES}/*/{NAMED}")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            name = json.loads(file.read_text())["name"]
            if isinstance(name, str) and folder_of(place, name) == file.parent:
                found[name] = file.parent
    return found


def bytes_in(folder: Path) -> int:
    """Bytes of the records in a folder."""
    nbytes = 0
    for file in (folder / SEGMENTS).glob("*"):
        with suppress(OSError):  # another process has dropped it
            nbytes += file.stat().st_size
    return nbytes


def all_of(place: Path) -> list[Path]:
    """A database that fills itself, and the folders of its namespaces."""
    return [place, *(folder for folder in sorted(place.glob(f"{NAMESPACES}/*")) if is_filling(folder))]
