"""Putting prepared databases together: records are copied as they are stored, each one checked, none of them twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from attmemo.db.database import Database
from attmemo.db.files import MANIFEST, BuilderLock
from attmemo.db.manifest import Manifest
from attmemo.db.pools.filling import Filling, is_sealed
from attmemo.db.pools.prepared import merge_rows
from attmemo.db.slot_kinds import KIND_INPUT
from attmemo.db.slots import slot_checksum
from attmemo.db.writer import DatabaseWriter, Provenance
from attmemo.errors import DatabaseCorruptError, DatabaseError

Progress = Callable[[int, int], None]
PUBLISH_RECORDS = 4096  # copied records that a crash may cost
_WHEN_FULL = "free space and run the same command again: records that are there are not copied twice"


@dataclass(frozen=True, slots=True)
class Merged:
    """What `merge_prepared` did."""

    added: int
    doubled: int  # left out, since they are there
    records: int


def merge_prepared(into: Path, others: Sequence[Path], progress: Progress | None = None) -> Merged:
    """Add the records of prepared databases to one, which is made if there is none.

    Of records of rows with the same tokens one is kept; of maps one for each row of the data. The index of a database
    of maps does not know the new records: tune it, or train it again. After an interruption the same call goes on.

    Parameters
    ----------
    into : Path
    others : sequence of Path
        They stay as they are. None of them may be being built.
    progress : callable, optional
        Called with (records looked at, records in all), of maps.

    Raises
    ------
    DatabaseError
        They do not belong together: another model, storage, length of texts, or kind of records; one is being built.
    DatabaseCorruptError
        A record does not match its checksum. What was copied before is published; of rows nothing is copied.
    """
    others = list({path.resolve(): path for path in others}.values())
    if into.resolve() in (path.resolve() for path in others):
        raise DatabaseError(f"{into} would be merged into itself.", "name other databases")
    of_rows = [is_sealed(path) for path in (into, *others) if path.exists()]
    if any(of_rows):
        if not all(of_rows):
            raise DatabaseError("some of these keep rows, others maps.", "merge databases of one sort")
        added, records = merge_rows(into, others)
        return Merged(added, sum(Filling.read(path).records for path in others) - added, records)
    with ExitStack() as open_now:
        sources = []
        for path in others:
            sources.append(open_now.enter_context(Database(path)))
            with suppress(OSError):  # a read-only place has no builder
                open_now.callback(BuilderLock(path).release)
        keys: set[bytes] = set()
        first, place = sources[0].manifest, others[0]
        if (into / MANIFEST).exists():
            with Database(into) as present:
                first, place = present.manifest, into
                keys.update(_key(present, record) for record in range(len(present)))
        for source in sources:
            _check_alike(first, place, source)
        writer = open_now.enter_context(
            DatabaseWriter(into, first.model, first.storage, first.settings, when_full=_WHEN_FULL)
        )
        return _copy(writer, sources, keys, progress)


def _copy(writer: DatabaseWriter, sources: Sequence[Database], keys: set[bytes], progress: Progress | None) -> Merged:
    total, before, doubled = sum(map(len, sources)), writer.records, 0
    try:
        for source, record in _records(sources):
            key = _key(source, record)
            if key in keys:
                doubled += 1
            else:
                _add(writer, source, record)
                keys.add(key)
            done = writer.records - before + doubled
            if not done % PUBLISH_RECORDS:
                writer.publish()
            if progress is not None:
                progress(done, total)
    finally:
        if writer.records > writer.manifest.records:
            writer.publish()
    return Merged(writer.records - before, doubled, writer.records)


def _records(sources: Sequence[Database]) -> Iterator[tuple[Database, int]]:
    for source in sources:
        for record in range(len(source)):
            yield source, record


def _add(writer: DatabaseWriter, source: Database, record: int) -> None:
    records, manifest = source.records, source.manifest
    length = int(records.lengths[record])
    payloads, number = [], 0
    for kind in manifest.kinds:
        arena, name = source.arena(kind.name, length), f"{kind.name}-{length:05d}"
        bodies = []
        for layer in range(kind.layers):
            slot = int(records.places[record]) * kind.layers + layer
            arena.mapping.check_whole()
            body = bytes(arena.slot_bytes(slot))
            if slot_checksum(manifest.uuid, name, slot, body) != int(records.checksums[record, number]):
                what = f"{source.path}, record {record}, {kind.name} of layer {layer}: not as it was written."
                raise DatabaseCorruptError(what, f"attmemo check {source.path}, and build it again")
            bodies.append(body)
            number += 1
        payloads.append(bodies)
    listed, own = manifest.sources, int(records.sources[record])
    known = writer.add_source(listed[own].name, listed[own].digest) if listed else 0
    writer.copy(payloads, length, Provenance(known, int(records.rows[record]), int(records.splits[record])))


def _key(database: Database, record: int) -> bytes:
    """What a record stands for. The same text in two rows of the data has maps twice, as a build stores them."""
    records, listed = database.records, database.manifest.sources
    own = int(records.sources[record])
    arena = database.arena(KIND_INPUT, int(records.lengths[record]))
    slot = int(database.slots_of(KIND_INPUT, 0, np.array(record)))
    digest = listed[own].digest if listed else ""
    return f"{digest} {int(records.rows[record])} ".encode() + xxhash.xxh3_128_digest(arena.slot_bytes(slot))


def _check_alike(first: Manifest, place: Path, other: Database) -> None:
    """DatabaseError: what one stores, the other could not have stored."""

    def said(manifest: Manifest) -> dict[str, str]:
        model = manifest.model
        return {
            "model": model.fingerprint, "storage": manifest.storage, "tokenizer": str(model.tokenizer),
            "--max-length": str(model.max_length), "kinds": ", ".join(kind.name for kind in manifest.kinds),
            "settings": str(manifest.settings), "page size": str(manifest.page_size),
        }  # fmt: skip

    mine, theirs = said(first), said(other.manifest)
    for what in mine:
        if mine[what] != theirs[what]:
            raise DatabaseError(
                f"{other.path} has {what} {theirs[what]}, {place} has {mine[what]}.",
                "merge databases that were built with the same model and options",
            )
    if first.kinds != other.manifest.kinds:
        raise DatabaseError(
            f"{other.path} and {place} keep other kinds of records.", "merge databases of one version of attmemo"
        )
