"""Where databases are looked for when the user names none."""

from __future__ import annotations

import os
from pathlib import Path

from attmemo.db.files import MANIFEST
from attmemo.db.manifest import read_manifest
from attmemo.errors import DatabaseError, DatabaseNotFoundError


def cache_directory() -> Path:
    """Where databases are looked for by fingerprint: ``$ATTMEMO_CACHE``, or the user's cache directory."""
    from platformdirs import user_cache_path

    chosen = os.environ.get("ATTMEMO_CACHE")
    return Path(chosen) if chosen else user_cache_path("attmemo", appauthor=False) / "databases"


def default_path(fingerprint: str) -> Path:
    """Where a database is built when the user names no place: found again by `find_database`."""
    return cache_directory() / fingerprint[:16]


def find_database(fingerprint: str) -> Path:
    """The database of a model in the cache directory: of several a trained one, else a tuned one, else the largest."""
    folder = cache_directory()
    best: tuple[tuple[bool, bool, int], Path] | None = None
    for file in sorted(folder.glob(f"*/{MANIFEST}")):
        try:
            found = read_manifest(file.parent)
        except DatabaseError:  # damaged, or of another version: not the one we look for
            continue
        rank = found.embedder is not None, found.tuning is not None, found.records
        if found.model.fingerprint == fingerprint and (best is None or rank > best[0]):
            best = rank, file.parent
    if best is None:
        what = f"no database for this model (fingerprint {fingerprint[:12]}…) in {folder}."
        raise DatabaseNotFoundError(what, "attmemo build-database --model … --data …, or pass database=PATH")
    return best[1]
