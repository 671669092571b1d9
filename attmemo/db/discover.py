"""Where databases are looked for when the user names none."""

from __future__ import annotations

import os
from pathlib import Path

from attmemo.db.files import MANIFEST, PREPARED
from attmemo.db.manifest import Manifest, read_manifest
from attmemo.db.pools.filling import Filling
from attmemo.errors import DatabaseError, DatabaseNotFoundError


def cache_directory() -> Path:
    """Where databases are looked for by fingerprint: ``$ATTMEMO_CACHE``, or the user's cache directory."""
    from platformdirs import user_cache_path

    chosen = os.environ.get("ATTMEMO_CACHE")
    return Path(chosen) if chosen else user_cache_path("attmemo", appauthor=False) / "databases"


def default_path(fingerprint: str, reuse: str = "maps") -> Path:
    """Where a database is built when the user names no place: found again by `find_database`.

    Rows have a place beside the maps of the same model: a database keeps one of the two.
    """
    return cache_directory() / (fingerprint[:16] if reuse == "maps" else f"{fingerprint[:16]}-{reuse}")


def filling_path(fingerprint: str) -> Path:
    """Where the database of a model fills itself when the user names no place."""
    return cache_directory() / f"{fingerprint[:16]}-filling"


def find_database(fingerprint: str, reuse: str = "auto") -> Path:
    """The database of a model in the cache directory.

    Parameters
    ----------
    fingerprint : str
        Of the model.
    reuse : {"auto", "maps", "rows"}
        What the database is to keep. ``"auto"``: rows if there are any, else maps. Rows are built only when a user
        asks for them by name, and they gain more.

    Returns
    -------
    Path
        Of several databases a trained one, else a tuned one, else the largest.

    Raises
    ------
    DatabaseNotFoundError
        There is none.
    """
    folder = cache_directory()
    best: tuple[tuple[bool, bool, bool, int], Path] | None = None
    names = {"maps": (MANIFEST,), "rows": (PREPARED,)}.get(reuse, (MANIFEST, PREPARED))
    for file in sorted(file for name in names for file in folder.glob(f"*/{name}")):
        try:
            found = read_manifest(file.parent) if file.name == MANIFEST else Filling.read(file.parent)
        except DatabaseError:  # damaged, or of another version: not the one we look for
            continue
        if found.model.fingerprint != fingerprint:
            continue
        rank = True, False, False, found.records
        if isinstance(found, Manifest):
            rank = False, found.embedder is not None, found.tuning is not None, found.records
        if best is None or rank > best[0]:
            best = rank, file.parent
    if best is None:
        what = "no database" if reuse == "auto" else f"no database of {reuse}"
        option = " --reuse rows" if reuse == "rows" else ""
        raise DatabaseNotFoundError(
            f"{what} for this model (fingerprint {fingerprint[:12]}…) in {folder}.",
            f"attmemo build-database{option} --model … --data …, or pass database=PATH",
        )
    return best[1]
