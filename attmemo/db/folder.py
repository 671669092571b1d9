"""The folder of a database of rows, as it begins: what may lie there, and what says that a part is lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from attmemo.db.environments import is_whole
from attmemo.db.files import ANEW, CATALOGUE, FILLING, LOCK, MANIFEST, PREPARED, storing
from attmemo.db.pools.fill_lock import LEASE, PRESENCE
from attmemo.db.pools.filling import Filling, is_pool
from attmemo.db.scrub import DUE
from attmemo.errors import DatabaseCorruptError, DatabaseError

SEGMENTS: Final = "segments"
"""Folder for the bytes of records."""
GUARDS: Final = "guard"
"""Folder for what guards have learned."""
ASIDE: Final = "set-aside"
"""Folder for what was found damaged."""
NAMESPACES: Final = "namespaces"
"""Folder with a folder for each namespace: a database of its own."""
NAMED: Final = "NAMESPACE.json"
"""File with the name of a namespace."""
_OWN: Final = (CATALOGUE, SEGMENTS, GUARDS, ASIDE, LEASE, LOCK, PRESENCE, DUE, NAMESPACES, NAMED)


def make_folder(path: Path, filling: Filling) -> None:
    """Make the folder of a new database. DatabaseError: something else is in it, or it cannot be made."""
    try:
        found = sorted(file.name for file in path.iterdir() if not file.name.startswith((filling.file, *_OWN)))
    except OSError:
        found = []  # there is no such folder, or what comes next says why it cannot be read
    if found:
        known = {MANIFEST: "is a prepared database", PREPARED: "is a prepared database", FILLING: "fills itself"}
        what = known.get(found[0], f"holds other files ({found[0]})")
        hint = f"give {'--output' if filling.sealed else 'fill='} an empty folder"
        raise DatabaseError(f"{path} {what}: no other database can be begun there.", hint)
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)  # it holds what inputs say


def check_parts(path: Path) -> None:
    """DatabaseCorruptError: something else is where a folder belongs."""
    for part in (path / CATALOGUE, path / SEGMENTS):
        if part.exists() and not part.is_dir():
            raise DatabaseCorruptError(f"{part} is no folder.", ANEW)


def is_begun(path: Path) -> bool:
    """Whether the folder says whose records it holds, and has a catalogue."""
    return is_pool(path) and is_whole(path)


def begin(path: Path, filling: Filling | None) -> None:
    """Begin the database, unless another process was first. Called under the lease.

    DatabaseCorruptError: it was begun before, and has lost its catalogue. OSError: the disk refuses.
    """
    if filling is not None and not is_pool(path):
        filling.write(path)
    if is_whole(path):
        return
    catalogue, segments = path / CATALOGUE, path / SEGMENTS
    if (catalogue / "data.mdb").is_dir() or (segments.is_dir() and any(segments.iterdir())):
        raise DatabaseCorruptError(f"{catalogue} is cut or missing, and there are segments.", ANEW)
    shutil.rmtree(catalogue, ignore_errors=True)  # a process died while it made this
