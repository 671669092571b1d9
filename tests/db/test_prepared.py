"""Prepared databases of rows: builds alone write, and lose nothing that was published."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from children import end_of, start_child
from command_line import refuse, succeed
from databases import MODEL
from pools import damage, entries, entry, is_right, open_pool

from attmemo.db import Database
from attmemo.db.aside import open_to_fill
from attmemo.db.files import FILLING, PREPARED
from attmemo.db.pools.filling import Filling
from attmemo.db.pools.prepared import building, in_order, open_prepared, open_to_build
from attmemo.db.pools.shared_pool import SharedPool
from attmemo.errors import (
    DatabaseCorruptError,
    DatabaseError,
    DatabaseLockedError,
    DatabaseNotFoundError,
    DatabaseTruncatedError,
    StaleDatabaseError,
    StorageFullError,
)


@contextmanager
def writing(path: Path, storage: str = "float32", **changes: Any) -> Iterator[SharedPool]:
    filling = Filling.of(replace(MODEL, **changes), storage, sealed=True)
    with building(path, filling):
        pool = open_to_build(path, filling, 1 << 20)
        try:
            yield pool
        finally:
            pool.close()


def build(path: Path, *identities: int, at_once: int = 10) -> Path:
    with writing(path) as pool:
        for first in range(0, len(identities), at_once):
            pool.add(entries(identities[first : first + at_once]))
    return path


def identities(path: Path) -> list[int]:
    """Of all records in their order; each is right."""
    pool = open_prepared(path)
    assert all(kept.is_sound and is_right(kept) for kept in pool.records.values())
    return [int(kept.tokens[0]) for kept in in_order(pool)]


def state(path: Path) -> dict[Path, bytes]:
    """All files but LMDB's table of readers."""
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != "lock.mdb"}


# -- who writes


def test_serving_writes_nothing(tmp_path: Path) -> None:
    """Not even how often a record was used; and no catalogue stays open."""
    path = build(tmp_path / "db", *range(40))
    before = state(path)
    pool = open_prepared(path)
    for kept in pool.records.values():
        assert kept.is_sound
        assert kept.segment.marks is None
    with pytest.raises(DatabaseError, match="was closed"):
        pool.look()
    with pytest.raises(DatabaseError, match="opened to be read only"):
        pool.add([entry(99)])
    assert state(path) == before


def test_a_reader_keeps_what_it_has_read_while_others_write(tmp_path: Path) -> None:
    path = build(tmp_path / "db", *range(40))
    pool = open_prepared(path)
    build(path, *range(40, 60))
    succeed("forget", path, "--before", "2100-01-01")
    assert sorted(pool.records) == list(range(40))
    assert all(kept.is_sound and is_right(kept) for kept in pool.records.values())
    assert identities(path) == []


@pytest.mark.parametrize("cut", [None, PREPARED, "catalogue/data.mdb"])
def test_no_process_fills_it_and_nothing_is_set_aside(tmp_path: Path, cut: str | None) -> None:
    path = build(tmp_path / "db", *range(4))
    if cut is not None:
        os.truncate(path / cut, 100)
    before = state(path)
    with pytest.raises(DatabaseError, match="is a prepared database: no other database can be begun there"):
        open_to_fill(path, 1 << 20, lambda: Filling.of(MODEL, "float32"))
    assert state(path) == before


def test_each_publication_has_an_edition_of_its_own(tmp_path: Path) -> None:
    path, seen = tmp_path / "db", set()
    for first in (0, 4):
        build(path, *range(first, first + 4))
        seen.add(Filling.read(path).edition)
    assert Filling.read(path).records == 8
    succeed("forget", path, "--before", "2100-01-01")
    seen.add(Filling.read(path).edition)
    assert (len(seen), Filling.read(path).records) == (3, 0)


# -- builds


def test_one_build_at_a_time(tmp_path: Path) -> None:
    with (
        writing(tmp_path / "db"),
        pytest.raises(DatabaseLockedError, match="is being written by another process"),
        writing(tmp_path / "db"),
    ):
        pass
    assert identities(build(tmp_path / "db", 1)) == [1]


@pytest.mark.parametrize(("changes", "error", "said"), [
    ({"fingerprint": "0" * 64}, StaleDatabaseError, "another model"),
    ({"max_length": 7}, DatabaseError, "--max-length"),
    ({"tokenizer": "another"}, DatabaseError, "tokenizer"),
    ({"storage": "int8"}, DatabaseError, "--dtype float32; asked: int8"),
])  # fmt: skip
def test_only_the_same_model_and_options_go_on(
    tmp_path: Path, changes: dict[str, Any], error: type[DatabaseError], said: str
) -> None:
    path = build(tmp_path / "db", 0)
    with pytest.raises(error, match=said), writing(path, **changes):
        pass
    assert identities(path) == [0]


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    open_pool(tmp_path / "fills").close()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    for name, said in (("fills", "fills itself"), ("other", "holds other files")):
        with pytest.raises(DatabaseError, match=f"{said}.*no other database can be begun"), writing(tmp_path / name):
            pass
    assert (tmp_path / "fills" / FILLING).exists()


def test_a_full_disk_keeps_what_was_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, pwrite = build(tmp_path / "db", *range(30)), os.pwrite

    def full(fd: int, body: bytes, offset: int) -> int:
        if offset > 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, body, offset)

    with monkeypatch.context() as patch, writing(path) as pool:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StorageFullError, match="the disk is full"):
            pool.add([entry(30)])
    assert identities(path) == list(range(30))
    assert identities(build(path, 30)) == list(range(31))


def _build_until_killed(path: Path, told: Path, first: int) -> None:
    with writing(path) as pool, told.open("a") as stream:
        for number in range(first, 1 << 20, 3):
            pool.add(entries(range(number, number + 3)))
            stream.write(f"{number + 3}\n")
            stream.flush()


def test_a_killed_build_never_loses_what_it_published(tmp_path: Path) -> None:
    """At random moments; the next one goes on."""
    generator, path, told, first = random.Random(5), tmp_path / "db", tmp_path / "told", 0
    told.touch()
    for _ in range(12):
        lines = told.read_text().count("\n")
        child = start_child(lambda first=first: _build_until_killed(path, told, first))  # type: ignore[misc]
        until = time.monotonic() + 300
        while told.read_text().count("\n") == lines and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(generator.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        end_of(child)
        found, published = identities(path), int(told.read_text().split("\n")[-2])
        assert found == list(range(len(found)))
        assert len(found) in (published, published + 3)
        first = len(found)
    assert identities(build(path, *range(first, first + 3))) == list(range(first + 3))
    names = {file.name for file in (path / "segments").iterdir()}
    assert names == {f"{kept.segment.number:010d}" for kept in open_prepared(path).records.values()}


# -- damage


@pytest.mark.parametrize(("name", "left"), [
    (PREPARED, 20), ("catalogue/data.mdb", 5000), ("catalogue/data.mdb", 0), ("segments/0000000001", 100),
    ("segments/0000000001", None), ("catalogue/data.mdb", None),
])  # fmt: skip
def test_what_is_cut_or_gone_is_refused_and_left_as_it_is(tmp_path: Path, name: str, left: int | None) -> None:
    path = build(tmp_path / "db", *range(40))
    if left is None:
        (path / name).unlink()
    else:
        os.truncate(path / name, left)
    before = state(path)
    with pytest.raises((DatabaseCorruptError, DatabaseTruncatedError, DatabaseNotFoundError)) as caught:
        open_prepared(path)
    assert "set aside" not in str(caught.value)
    assert state(path) == before


def test_check_finds_every_damaged_record(tmp_path: Path) -> None:
    path = build(tmp_path / "db", *range(40))
    for number in (3, 29):
        damage(open_prepared(path).records[number])
    assert "2 findings in 40 records" in (said := refuse("check", path))
    assert "restore the database from a copy" in said


def test_a_database_of_maps_is_asked_for_in_vain(tmp_path: Path) -> None:
    with pytest.raises(DatabaseNotFoundError, match="keeps rows; a database of maps is asked for"):
        Database(build(tmp_path / "db", 1))


def test_a_pool_that_fills_itself_is_no_prepared_one(tmp_path: Path) -> None:
    open_pool(tmp_path / "db").close()
    with pytest.raises(DatabaseNotFoundError, match="no prepared database"):
        open_prepared(tmp_path / "db")
