"""Opening a folder to fill it, whatever happened to it: what is damaged is set aside, and made anew.

A damaged segment costs its records. Without `FILLING.json` or the catalogue nothing says what the segments hold: all
of them are set aside. Files are moved within the folder and never removed. It is done under the lease, and only if the
folder is still the one that was found damaged: processes that begin at once do it once.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from attmemo.db.files import CATALOGUE, DAMAGED, FILLING, storing, sync
from attmemo.db.folder import ASIDE, SEGMENTS
from attmemo.db.pools.fill_lock import lease
from attmemo.db.pools.filling import Filling, is_filling
from attmemo.db.pools.shared_pool import PATIENCE, SharedPool
from attmemo.errors import DatabaseCorruptError, DatabaseError

_LOG = logging.getLogger("attmemo")
_MEETINGS: Final = 4
"""Times that another process may begin the folder anew meanwhile."""


def open_to_fill(path: Path, max_bytes: int, describe: Callable[[], Filling]) -> SharedPool:
    """Open a folder, or make it, within the bound; its news is not told yet.

    Parameters
    ----------
    path : Path
    max_bytes : int
    describe : callable
        Says what a new folder is made for.

    Raises
    ------
    DatabaseError
        The folder cannot be used, for another reason than damage; or what is damaged cannot be set aside.
    """
    for _ in range(_MEETINGS):
        seen = _identity(path)
        try:
            return _opened(path, max_bytes, describe)
        except DAMAGED as error:
            _begin_anew(path, seen, error)
        except DatabaseError:
            if _identity(path) == seen:
                raise  # else another process has begun the folder anew meanwhile
    return _opened(path, max_bytes, describe)


def set_aside(folder: Path, names: Iterable[str]) -> Path | None:
    """Move these files and folders of a folder to a place of their own in it; None: there is none of them. OSError."""
    found = [name for name in names if (folder / name).exists()]
    if not found:
        return None
    place = folder / ASIDE / f"{time.strftime('%Y-%m-%d-%H-%M-%S')}-{uuid.uuid4().hex[:8]}"
    places = {(place / name).parent for name in found}
    for one in (place.parent, place, *places):
        one.mkdir(mode=0o700, exist_ok=True)
    for name in found:
        os.rename(folder / name, place / name)
    for one in (*places, place, place.parent, folder):
        sync(one)
    return place


def _opened(path: Path, max_bytes: int, describe: Callable[[], Filling]) -> SharedPool:
    pool = SharedPool(path, max_bytes, None if is_filling(path) else describe())
    try:
        try:
            pool.look()
        except DAMAGED:
            _mend(pool)
        try:
            pool.trim()
        except DatabaseError as error:  # it is tried again with the next segment
            _LOG.warning("attmemo: %s is larger than max_bytes, and stays so for now: %s", path, error)
        return pool
    except BaseException:
        pool.close()
        raise


def _mend(pool: SharedPool) -> None:
    """Go on without segments that cannot be read."""
    places = []

    def move(names: Sequence[str]) -> None:
        with storing(pool.path):
            places.append(set_aside(pool.path, names))

    lost = pool.mend(move)
    if lost:
        what = f"Damaged segments ({len(lost):,}, of {sum(records for _, records in lost):,} records)"
        where = "are gone" if places[0] is None else f"are set aside in {places[0]}"
        _LOG.warning("attmemo: %s %s %s; all other records serve", lost[0][0].what, what, where)


def _begin_anew(path: Path, seen: object, error: DatabaseError) -> None:
    """Set all that was stored aside, unless another process has done so."""
    try:
        with storing(path), lease(path, PATIENCE):
            if _identity(path) != seen:
                return
            place = set_aside(path, (FILLING, CATALOGUE, SEGMENTS))
    except DatabaseError as refused:
        raise DatabaseCorruptError(f"{error.what} It cannot be set aside: {refused.what}", refused.hint) from error
    _LOG.warning("attmemo: %s All is set aside in %s, and the database begins anew", error.what, place)


def _identity(path: Path) -> tuple[tuple[int, ...] | None, ...]:
    """What tells one state of a folder from that after it was begun anew."""
    found: list[tuple[int, ...] | None] = []
    for name in (FILLING, CATALOGUE):
        try:
            seen = os.stat(path / name)
        except OSError:
            found.append(None)
        else:
            found.append((seen.st_dev, seen.st_ino) + ((seen.st_mtime_ns, seen.st_size) if name == FILLING else ()))
    return tuple(found)
