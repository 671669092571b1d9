"""`attmemo migrate`: convert a database of an earlier format, in place."""

from __future__ import annotations

from attmemo.cli.console import output
from attmemo.cli.options import DatabasePath, Json, Quiet


def migrate(db: DatabasePath, json: Json = None, quiet: Quiet = False) -> None:
    """Convert a database of format version 1 to version 2.

    Replaces the manifest and rewrites the catalogue. Maps, embedder and indexes stay as they are. If the command is
    interrupted, the database stays readable and the same command goes on.
    """
    with output(json, quiet) as out:
        from attmemo.db import migrate as convert

        changed = convert(db)
        out.result({"path": str(db), "changed": changed, "version": 2})
        out.say(f"{db}: converted to format version 2" if changed else f"{db}: has format version 2 already")
