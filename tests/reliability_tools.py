"""What the reliability tests of the database share."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from test_db_tools import fill, train_by_hand

from attmemo.db import SEQUENCE, Database, file_digest, read_manifest
from attmemo.db.catalogue import Catalogue, Record, add_to_digest, read_records
from attmemo.db.files import MANIFEST
from attmemo.embed.siamese import load_embedders
from attmemo.errors import AttmemoError, DatabaseCorruptError

Body = dict[str, Any]


GOLDEN = Path(__file__).with_name("golden")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small database with embedders and indexes. Tests put back what they change."""
    return train_by_hand(fill(tmp_path_factory.mktemp("reliability") / "db"))


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged for good."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def use(path: Path) -> None:
    """Everything a server and `check` do with a database: open, embed, search, read."""
    with Database(path) as database:
        if database.manifest.embedder is not None:
            ref = database.embedder_ref()
            embedders = load_embedders(database.derived(ref.weights), database.manifest.model.hidden)
            for layer in range(SEQUENCE, database.manifest.model.layers):
                index = database.index(layer)
                if layer not in embedders:
                    raise DatabaseCorruptError("an embedder is missing", "train")
                for length in sorted(index.lengths & set(database.lengths)):
                    if length <= embedders[layer].longest:
                        hidden = torch.zeros((1, length, database.manifest.model.hidden))
                        vector = embedders[layer].embed(hidden, [length]).numpy()
                        if vector.shape[1] == ref.report.get("dimension", 128):
                            ids, _ = index.search(length, vector, 2)
                            assert set(ids.ravel().tolist()) <= {-1, *range(len(database))}
        for finding in database.check():
            raise DatabaseCorruptError(finding.where, "restore")


def outcome(work: Callable[[], object]) -> str:
    """What a use ends with: "fine", or the name of an error of this library, which says what to do next."""
    seen: AttmemoError | None = None
    try:
        work()
    except AttmemoError as error:
        seen = error
    assert seen is None or seen.hint, f"no next step: {seen}"
    return "fine" if seen is None else type(seen).__name__


def body_of(path: Path) -> Body:
    """The manifest as JSON."""
    found: Body = json.loads((path / MANIFEST).read_text().rsplit("\n", 2)[0])
    return found


def seal(path: Path, body: object) -> None:
    """Write a manifest with a checksum that fits, whatever it says."""
    text = body if isinstance(body, str) else json.dumps(body, indent=1, sort_keys=True)
    (path / MANIFEST).write_bytes(f"{text}\n{xxhash.xxh3_64_hexdigest(text.encode())}\n".encode())


def reseal(path: Path) -> None:
    """Make the manifest's digests those of the derived files as they are now."""
    body = body_of(path)
    for ref in (body["embedder"]["weights"], *body["embedder"]["indexes"].values()):
        ref["digest"] = file_digest(path / ref["file"])
    seal(path, body)


def records_of(path: Path) -> list[Record]:
    """The catalogue's records."""
    found = read_records(path, read_manifest(path))
    return [found.record(number) for number in range(len(found))]


def rewrite(path: Path, records: list[Record], ids: list[int] | None = None) -> None:
    """Put other entries into the catalogue, under the ids 0, 1, … by default; count and digest fit."""
    body = body_of(path)
    entries = [(number, record.dump()) for number, record in zip(ids or range(len(records)), records, strict=True)]
    with closing(Catalogue(path, write=True)) as catalogue:
        catalogue.delete()
        catalogue.put(entries)
    body |= {"records_digest": add_to_digest(None, entries), "records": len(entries)}
    body["next_id"] = max([body["next_id"], *(number + 1 for number, _ in entries)])
    seal(path, body)
