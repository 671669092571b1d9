"""Kinds of slots, and what a catalogue may hold beside records."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from databases import LENGTHS, contents, fill
from db_tools import body_of, records_of, rewrite, seal

from attmemo.db import Database, SlotKind, read_manifest
from attmemo.db.catalogue import add_to_digest


def test_a_shape_in_terms_of_n_is_a_shape_for_each_length() -> None:
    assert SlotKind("map", 1, "uint8", (12, "n(n+1)/2")).shape_for(5) == (12, 15)
    assert SlotKind("kv", 2, "bfloat16", (2, "n", 4)).shape_for(7) == (2, 7, 4)


# -- records


def test_the_digest_of_records_does_not_depend_on_their_order(tmp_path: Path) -> None:
    entries = [(n * n, random.Random(n).randbytes(40)) for n in range(20)]
    whole = add_to_digest(None, entries)
    assert add_to_digest(add_to_digest(None, entries[7:]), entries[:7]) == whole
    assert add_to_digest(None, [(n + 1, raw) for n, raw in entries]) != whole
    assert add_to_digest(None, [*entries[1:], entries[1]]) != whole
    assert add_to_digest(None, []) == "0" * 32


def test_entries_with_other_prefixes_are_ignored(tmp_path: Path) -> None:
    """Room for later: counters of use, say. A builder leaves them alone."""
    import lmdb

    path = fill(tmp_path / "db", LENGTHS[:4])
    before = contents(path)
    with lmdb.open(str(path / "catalogue"), map_size=1 << 28) as environment, environment.begin(write=True) as change:
        for key in (b"\0" * 8, b"a", b"s" + b"\0" * 8, b"zebra", b"q" * 511):
            change.put(key, b"something else")
    assert contents(path) == before
    fill(path)
    assert len(contents(path)) == len(LENGTHS)
    with lmdb.open(str(path / "catalogue"), map_size=1 << 28) as environment, environment.begin() as look:
        assert look.get(b"zebra") == look.get(b"q" * 511) == b"something else"


def test_a_reader_whose_catalogue_is_newer_reads_the_manifest_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its two reads a builder published: it opens the new generation, and does not call it damage."""
    path = fill(tmp_path / "db", LENGTHS[:4])
    later = Path(shutil.copytree(path, tmp_path / "later"))
    records = records_of(path)
    rewrite(path, [records[n] for n in (0, 3)])
    body = body_of(path)
    seal(path, body | {"generation": body["generation"] + 1})
    manifests = [read_manifest(later), read_manifest(path)]
    monkeypatch.setattr("attmemo.db.database.read_manifest", lambda _: manifests.pop(0))
    with Database(path) as database:
        assert database.records.rows.tolist() == [0, 3]
