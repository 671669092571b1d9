"""Kinds of slots: what a database may hold beside what this version writes."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from databases import LENGTHS, MODEL, add_maps, contents, fill, findings, sequence
from db_tools import body_of, records_of, rewrite, seal

from attmemo.db import KIND_INPUT, KIND_MAP, Database, DatabaseWriter, Provenance, SlotKind, read_manifest, slot_kinds
from attmemo.db.catalogue import add_to_digest
from attmemo.db.encodings import TYPES
from attmemo.db.slot_kinds import FORMS, Form, kinds_of_maps
from attmemo.errors import DatabaseCorruptError, DatabaseError

TOKENS = SlotKind("words", 1, "int32", ("n",))
KEYS = SlotKind("kv", 2, "bfloat16", (2, "n", 4))


def _plain(tensor: torch.Tensor, kind: SlotKind) -> torch.Tensor:
    return tensor.to(TYPES[kind.dtype])


@pytest.fixture
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    known = slot_kinds._known_kinds
    monkeypatch.setattr(slot_kinds, "_known_kinds", lambda model, storage: (*known(model, storage), TOKENS, KEYS))
    for kind in (TOKENS, KEYS):
        monkeypatch.setitem(FORMS, kind.name, Form(_plain))


def _slots(row: int, length: int) -> dict[str, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(row)
    maps, inputs = sequence(row, length)
    return {
        KIND_MAP: maps,
        KIND_INPUT: inputs,
        "words": [torch.randint(0, 70_000, (length,), generator=generator)],
        "kv": [torch.randn((2, length, 4), generator=generator) for _ in range(2)],
    }


def _fill(path: Path) -> Path:
    kinds = (TOKENS, *kinds_of_maps(MODEL, "float32", {}), KEYS)
    with DatabaseWriter(path, MODEL, "float32", kinds=kinds) as writer:
        for row, length in enumerate(LENGTHS):
            writer.add(_slots(row, length), length, Provenance(0, row))
        writer.publish()
    return path


def test_a_shape_in_terms_of_n_is_a_shape_for_each_length() -> None:
    assert SlotKind("map", 1, "uint8", (12, "n(n+1)/2")).shape_for(5) == (12, 15)
    assert KEYS.shape_for(7) == (2, 7, 4)


@pytest.mark.usefixtures("_known")
def test_more_kinds_are_stored_and_read_back_bit_for_bit(tmp_path: Path) -> None:
    """Another kind needs a place among the known ones and in the table of forms, and no change of the format."""
    path = _fill(tmp_path / "db")
    with Database(path) as database:
        for row, length in enumerate(LENGTHS):
            slots = _slots(row, length)
            assert torch.equal(database.slot("words", 0, row), slots["words"][0].to(torch.int32))
            assert torch.equal(database.slot("kv", 1, row), slots["kv"][1].bfloat16())
            assert torch.equal(database.map(1, row), slots[KIND_MAP][1])
    assert findings(path) == []
    with DatabaseWriter.reopen(path) as writer, pytest.raises(ValueError, match="expected slots of the kinds"):
        add_maps(writer, *sequence(9, 4), Provenance(0, 9))


def test_kinds_that_are_not_known_are_ignored_with_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database of a later version: its maps are served, whatever lies in the files of the other kinds."""
    with monkeypatch.context() as patch:
        for kind in (TOKENS, KEYS):
            patch.setitem(FORMS, kind.name, Form(_plain))
        path = _fill(tmp_path / "db")
    body = body_of(path)
    body["kinds"][0]["dtype"] = "int3_with_scales"
    seal(path, body)
    for file in path.glob("arena/tokens-*"):
        file.unlink()
    for file in path.glob("arena/kv-*"):
        file.write_bytes(b"")
    with Database(path) as database:
        assert [kind.name for kind in database.manifest.known_kinds] == [KIND_MAP, KIND_INPUT]
        assert all(torch.equal(database.map(1, r), sequence(r, n)[0][1]) for r, n in enumerate(LENGTHS))
        with pytest.raises(DatabaseError, match="no slots of kind 'words'"):
            database.slot("words", 0, 0)
    assert findings(path) == []
    with pytest.raises(DatabaseError, match="append with the version that wrote it"):
        DatabaseWriter.reopen(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "../x"}, "name' is"),
        ({"layers": 0}, "layers' is 0"),
        ({"shape": []}, "1 to 8 sizes"),
        ({"shape": ["m"]}, "one of n"),
        ({"shape": [-1]}, "is -1"),
        ({"dtype": 8}, "dtype' is 8"),
    ],
)
def test_the_structure_of_an_unknown_kind_is_checked(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = fill(tmp_path / "db", LENGTHS[:1])
    body = body_of(path)
    body["kinds"].append({"name": "later", "layers": 1, "dtype": "int3", "shape": ["n"]} | change)
    seal(path, body)
    with pytest.raises(DatabaseCorruptError, match=words):
        read_manifest(path)


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
