"""`attmemo migrate`: a database of version 1 becomes one of version 2, and is readable at every moment."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import lmdb
import pytest
from helpers import die_at
from reliability_tools import GOLDEN, body_of, seal, use
from test_db_tools import MODEL, contents, end_of, findings, in_child, memory_directory, start_child
from typer.testing import CliRunner

from attmemo.cli.app import app
from attmemo.db import Database, DatabaseWriter, migrate, read_manifest
from attmemo.db.catalogue import Catalogue
from attmemo.errors import (
    DatabaseCorruptError,
    DatabaseError,
    DatabaseLockedError,
    DatabaseNotFoundError,
    DatabaseTruncatedError,
)

pytestmark = pytest.mark.skipif(mmap.PAGESIZE > 4096, reason="the database was built for pages of 4096 bytes")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy of the database of version 1 in the repository."""
    return Path(shutil.copytree(GOLDEN / "v1", tmp_path / "v1"))


def test_tuning_a_database_that_cannot_be_written_is_refused_before_the_work(old: Path, tmp_path: Path) -> None:
    from attmemo.profiler.tune import TuneOptions, tune

    with pytest.raises(DatabaseError, match="attmemo migrate"):
        tune(old, [tmp_path / "no-such.log"], TuneOptions())


def _keys(path: Path) -> list[int]:
    """Lengths of the keys in the catalogue."""
    with (
        lmdb.open(str(path / "catalogue"), readonly=True, lock=False) as environment,
        environment.begin() as transaction,
    ):
        return [len(key) for key, _ in transaction.cursor()]


def test_every_slot_is_as_before_and_no_other_file_is_touched(old: Path) -> None:
    before = contents(old)
    kept = {f: f.read_bytes() for f in old.rglob("*") if f.suffix in (".slots", ".safetensors")}
    assert migrate(old)
    assert read_manifest(old).version == 2
    assert contents(old) == before
    assert {f: f.read_bytes() for f in kept} == kept
    use(old)
    assert _keys(old) == [9, 9, 9]
    assert not migrate(old)
    assert contents(old) == before


@pytest.mark.parametrize("after", [False, True], ids=["before", "half-way or after"])
def test_killed_at_any_call_the_database_is_readable_and_migration_goes_on(after: bool) -> None:
    with memory_directory() as folder:
        expected = contents(Path(shutil.copytree(GOLDEN / "v1", folder / "straight")))
        at, versions = 0, set()
        while True:
            path = Path(shutil.copytree(GOLDEN / "v1", folder / f"db{at}"))

            def convert(path: Path = path, at: int = at) -> None:
                die_at(at, after)
                migrate(path)

            code = in_child(convert)
            if code == 0:
                break
            assert code == -signal.SIGKILL
            versions.add(read_manifest(path).version)
            assert contents(path) == expected
            assert findings(path) == []
            migrate(path)
            assert read_manifest(path).version == 2
            assert contents(path) == expected
            assert _keys(path) == [9, 9, 9]
            at += 1
        assert versions == {1, 2}
        assert at >= 4


@pytest.mark.parametrize("step", ["put", "write_manifest", "delete"])
def test_killed_between_two_steps_the_database_is_readable(old: Path, step: str) -> None:
    """Right after the new entries, before the manifest, before the old entries are deleted."""
    expected = contents(old)

    def convert() -> None:
        patch = pytest.MonkeyPatch()
        if step == "write_manifest":
            patch.setattr("attmemo.db.migration.write_manifest", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        else:
            call = getattr(Catalogue, step)

            def last(self: Catalogue, *arguments: Any, **named: Any) -> None:
                if step == "put":
                    call(self, *arguments, **named)
                if step == "put" or named:
                    os.kill(os.getpid(), signal.SIGKILL)
                call(self, *arguments, **named)

            patch.setattr(Catalogue, step, last)
        migrate(old)

    assert in_child(convert) == -signal.SIGKILL
    assert read_manifest(old).version == (2 if step == "delete" else 1)
    assert _keys(old) == [8, 8, 8, 9, 9, 9]
    assert contents(old) == expected
    assert findings(old) == []
    migrate(old)
    assert contents(old) == expected
    assert _keys(old) == [9, 9, 9]


def test_a_database_that_is_being_written_is_not_migrated(old: Path) -> None:
    migrate(old)
    with DatabaseWriter(old, MODEL, "float32"), pytest.raises(DatabaseLockedError):
        migrate(old)
    migrate(old)


def test_a_damaged_database_is_not_migrated(old: Path) -> None:
    """An arena that is short: refused, and nothing is changed."""
    manifest = (old / "MANIFEST.json").read_bytes()
    os.truncate(old / "arena" / "map-00003.slots", 5000)
    with pytest.raises(DatabaseTruncatedError, match="bytes long"):
        migrate(old)
    assert (old / "MANIFEST.json").read_bytes() == manifest
    assert _keys(old) == [8, 8, 8]


def test_a_version_1_database_from_before_the_digest_reads_and_migrates(old: Path) -> None:
    body = body_of(old)
    del body["records_digest"]
    seal(old, body)
    expected = contents(old)
    assert read_manifest(old).records_digest is None
    migrate(old)
    assert read_manifest(old).records_digest is not None
    assert contents(old) == expected


def test_a_forged_manifest_of_version_1_is_refused_by_field(old: Path) -> None:
    """Each rule of version 1 is still checked."""
    body = body_of(old)
    for lie, words in (
        ({"records": 4}, "classes"),
        ({"storage": "float16"}, "dtype"),
        ({"classes": body["classes"][:-1]}, "classes"),
        ({"classes": [*body["classes"], body["classes"][0]]}, "each kind and length once"),
        ({"settings": {"inputs": "last"}}, "settings.inputs"),
        ({"model": body["model"] | {"heads": 4}}, "shape"),
        ({"records_digest": "0" * 32}, "digest"),
        ({"embedder": body["embedder"] | {"records": 4}}, "embedder.records"),
    ):
        seal(old, body | lie)
        with pytest.raises(DatabaseCorruptError, match=words):
            Database(old)


def test_the_command_says_what_it_did(old: Path, tmp_path: Path) -> None:
    first, second = (CliRunner().invoke(app, ["migrate", str(old), "--json", "-"]) for _ in range(2))
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert json.loads(first.stdout) == {"path": str(old), "changed": True, "version": 2}
    assert json.loads(second.stdout)["changed"] is False
    assert CliRunner().invoke(app, ["migrate", str(tmp_path / "nowhere")]).exit_code != 0
    with pytest.raises(DatabaseNotFoundError):
        migrate(tmp_path / "nowhere")


def test_a_reader_beside_a_migration_reads_every_record(old: Path) -> None:
    """Opened again and again while another process migrates."""
    expected = contents(old)
    pid = start_child(lambda: migrate(old))
    for _ in range(20):
        assert contents(old) == expected
    assert end_of(pid) == 0
    assert contents(old) == expected
