"""Converting a database of version 1 of the format, in place."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from attmemo.db import files, version1
from attmemo.db.catalogue import Catalogue, add_to_digest
from attmemo.db.database import Database
from attmemo.db.manifest import VERSION, read_manifest, write_manifest


def migrate(path: Path) -> bool:
    """Convert manifest and catalogue to the current version; False if the database had that version.

    The new entries of the catalogue are written beside the old ones, then the manifest is replaced, then the old
    entries are deleted. Killed at any time, the database is readable in one of the two versions; the same call goes
    on from there. DatabaseLockedError if another process writes to it; after any DatabaseError it is as it was.
    """
    read_manifest(path)  # before a lock file is made in a directory that is no database
    with files.storing(path):
        lock = files.BuilderLock(path)
        try:
            with Database(path) as database:
                manifest, records = database.manifest, database.records
            if manifest.version != VERSION:
                entries = [(record, records.record(record).dump()) for record in range(len(records))]
                with closing(Catalogue(path, write=True)) as catalogue:
                    catalogue.delete()  # of an attempt that was killed
                    catalogue.put(entries)
                files.sync(path / files.CATALOGUE)
                digest = add_to_digest(None, entries)
                write_manifest(path, replace(manifest, version=VERSION, records_digest=digest))
            with closing(Catalogue(path, write=True)) as catalogue:
                catalogue.delete(prefix=version1.PREFIX)
        finally:
            lock.release()
    return manifest.version != VERSION
