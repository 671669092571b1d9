"""Many readers beside one builder, readers beside each other, and the search for a database in the cache."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import xxhash
from databases import LENGTHS, MODEL, add_maps, contents, fill, sequence, train_by_hand

from attmemo.db import (
    KIND_MAP,
    Database,
    DatabaseWriter,
    EmbedderRef,
    FileRef,
    Provenance,
    cache_directory,
    default_path,
    find_database,
    read_manifest,
)
from attmemo.errors import DatabaseError, DatabaseNotFoundError, EmbedderMissingError

# -- readers beside a builder


def _read(path: Path, before: tuple[int, int]) -> tuple[int, int]:
    """One reader: what it sees is whole, and not less than before."""
    with Database(path) as database:
        seen = database.manifest.generation, len(database)
        assert seen >= before, f"{seen} after {before}"
        assert len(database.records) == database.manifest.records
        assert list(database.check()) == []
        if len(database):
            last = len(database) - 1
            row = int(database.records.rows[last])
            assert torch.equal(
                database.slot(KIND_MAP, 1, last), sequence(row, int(database.records.lengths[last]))[0][1]
            )
    return seen


def _follow(path: Path, records: int) -> None:
    seen = (0, 0)
    while seen[1] < records:
        seen = _read(path, seen)


def test_threads_of_one_process_may_open_at_once(tmp_path: Path) -> None:
    """A server's threads and a builder's thread in one process: LMDB allows one open environment, they take turns."""
    path = fill(tmp_path / "db", LENGTHS[:1])
    lengths = LENGTHS * 3
    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(_follow, path, len(lengths)) for _ in range(3)]
        for one in (pool.submit(fill, path, lengths, every=1), *readers):
            one.result(600)
    assert sorted(contents(path)) == [(0, row) for row in range(len(lengths))]


def test_many_threads_open_each_part_once(tmp_path: Path) -> None:
    """Arenas and indexes open at their first use, by whichever thread comes first: once, and for all."""
    path = train_by_hand(fill(tmp_path / "db"))
    for _ in range(5):
        with Database(path) as database:
            start = threading.Barrier(4)

            def look(_: int, start: threading.Barrier = start, database: Database = database) -> list[int]:
                start.wait()
                ids = [id(database.index(layer)) for layer in (-1, 0, 1)]
                return [*ids, *(id(database.arena(kind, n)) for kind in ("map", "input") for n in database.lengths)]

            with ThreadPoolExecutor(4) as pool:
                seen = list(pool.map(look, range(4)))
            assert all(one == seen[0] for one in seen)


def test_serving_never_changes_the_database(tmp_path: Path) -> None:
    """Read-only means it: opening, searching and checking leave every byte of the records as it was."""
    path = train_by_hand(fill(tmp_path / "db"))
    files = [f for f in sorted(path.rglob("*")) if f.is_file() and f.name != "lock.mdb"]
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}
    with Database(path) as database:
        for layer in (-1, 0, 1):
            database.index(layer).search(5, torch.zeros((2, 4)).numpy(), 2)
        assert list(database.check()) == []
    assert {f: (f.read_bytes(), f.stat().st_mtime_ns) for f in files} == before


def test_a_database_tells_what_it_holds(tmp_path: Path) -> None:
    """Lengths, bytes, slots, representation; and what is not there is not made up."""
    path = fill(tmp_path / "db")
    with Database(path) as database:
        assert database.lengths == {3: 3, 4: 1, 5: 2, 8: 2}
        assert len(database) == 8
        assert "8 records, generation 4" in repr(database)
        assert database.manifest.embedder is None
        assert database.slots_of(KIND_MAP, 1, torch.arange(8).numpy()).tolist() == [1, 1, 3, 1, 3, 5, 3, 1]
        with pytest.raises(DatabaseError, match="no record of 6 tokens"):
            database.arena(KIND_MAP, 6)
        with pytest.raises(EmbedderMissingError, match="8 records but no trained embedder") as caught:
            database.index(0)
        assert f"attmemo train-embedder {path}" in str(caught.value)
        progress: list[tuple[int, int]] = []
        assert database.check(lambda done, total: progress.append((done, total))) == []
        assert progress == [(n, 32) for n in range(2, 33, 2)]


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda database: database.slot("x", 0, 0), "no slots of kind 'x' and layer 0"),
        (lambda database: database.slot(KIND_MAP, 2, 0), "no slots of kind 'map' and layer 2"),
        (lambda database: database.slot(KIND_MAP, -1, 0), "no slots of kind 'map' and layer -1"),
        (lambda database: database.slot(KIND_MAP, 0, 8), "no record 8"),
        (lambda database: database.slot(KIND_MAP, 0, -1), "no record -1"),
        (lambda database: database.slot(KIND_MAP, 99, 10**9), "no record 1000000000"),
        (lambda database: database.arena("x", 3), "no record of 3 tokens with slots of kind 'x'"),
    ],
)
def test_a_slot_that_does_not_exist_is_an_error_with_a_next_step(
    ask: Callable[[Database], object], words: str, tmp_path: Path
) -> None:
    with Database(fill(tmp_path / "db")) as database:
        with pytest.raises(DatabaseError, match=words) as caught:
            ask(database)
        assert caught.value.hint


def test_a_closed_database_says_so(tmp_path: Path) -> None:
    """Whether or not something was open before: an error of this library, which an engine can catch."""
    database = Database(train_by_hand(fill(tmp_path / "db")))
    database.index(0)
    database.view(KIND_MAP, 0, 0)
    database.close()
    asks: list[Callable[[], object]] = [
        lambda: database.index(0),
        lambda: database.index(-1),
        lambda: database.view(KIND_MAP, 0, 0),
        lambda: database.arena(KIND_MAP, 3),
        database.check,
    ]
    for ask in asks:
        with pytest.raises(DatabaseError, match="was closed"):
            ask()


def test_a_residency_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    path = fill(tmp_path / "db")
    with pytest.raises(ValueError, match="residency must be one of page-cache, hugepages; got 'x'"):
        Database(path, "x")  # type: ignore[arg-type]


# -- the cache


def _cached(name: str, records: int, fingerprint: str = MODEL.fingerprint) -> Path:
    path = cache_directory() / name
    with DatabaseWriter(path, dataclasses.replace(MODEL, fingerprint=fingerprint), "float32") as writer:
        for row in range(records):
            add_maps(writer, *sequence(row, 4), Provenance(0, row))
        writer.publish()
    return path


def _train(path: Path) -> Path:
    """Name an embedder that nothing reads."""
    ref = FileRef("embedder-000009.safetensors", "0" * 32)
    (path / ref.file).write_bytes(b"")
    with DatabaseWriter.reopen(path) as writer:
        writer.publish(embedder=EmbedderRef(ref, "flat", writer.records, {}, {}, {}))
    return path


def test_a_usable_database_is_found_before_a_larger_one() -> None:
    """Records that nothing can look up are of no use; a tuned database serves `memoize(model)` without a threshold."""
    _cached("a", 8)
    _train(_cached("b", 2))
    assert find_database(MODEL.fingerprint) == cache_directory() / "b"
    _train(_cached("c", 5))
    assert find_database(MODEL.fingerprint) == cache_directory() / "c"
    with DatabaseWriter.reopen(cache_directory() / "b") as writer:
        writer.publish(tuning={"thresholds": []})
    assert find_database(MODEL.fingerprint) == cache_directory() / "b"


def test_another_models_database_is_never_found() -> None:
    """In $ATTMEMO_CACHE: of this model's databases the one with most records, whatever the others hold."""
    _cached("a", 2)
    _cached("b", 5)
    _cached("c", 3)
    _cached("d", 8, "0" * 64)
    assert find_database(MODEL.fingerprint) == cache_directory() / "b"
    assert find_database("0" * 64) == cache_directory() / "d"


def test_a_damaged_neighbour_hides_no_database() -> None:
    """Other things in the cache, damaged or of a later version: passed over."""
    good = _cached("good", 2)
    flipped = _cached("a", 8) / "MANIFEST.json"
    body = flipped.read_bytes()
    flipped.write_bytes(body.replace(b'"records": 8', b'"records": 9'))
    (cache_directory() / "b").mkdir()
    (cache_directory() / "b" / "MANIFEST.json").write_bytes(b"")
    (cache_directory() / "c" / "MANIFEST.json").mkdir(parents=True)
    (cache_directory() / "file").write_text("x")
    later = _cached("later", 8) / "MANIFEST.json"
    text = later.read_text().rsplit("\n", 2)[0].replace('"version": 2', '"version": 3')
    later.write_text(f"{text}\n{xxhash.xxh3_64_hexdigest(text.encode())}\n")
    with pytest.raises(DatabaseError, match="format version 3"):
        read_manifest(later.parent)
    assert find_database(MODEL.fingerprint) == good


def test_no_database_is_an_error_with_a_next_step() -> None:
    """Nothing in the cache, or no cache: told which command makes one, and where it was looked for."""
    for _ in range(2):
        with pytest.raises(DatabaseNotFoundError, match="no database for this model") as caught:
            find_database(MODEL.fingerprint)
        assert "attmemo build-database" in str(caught.value)
        assert str(cache_directory()) in str(caught.value)
        cache_directory().mkdir(exist_ok=True)


def test_a_default_build_is_found_again() -> None:
    """Where a database goes by default is where it is looked for."""
    path = fill(default_path(MODEL.fingerprint))
    assert find_database(MODEL.fingerprint) == path


def test_the_default_cache_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without $ATTMEMO_CACHE: the user's cache directory of this platform."""
    monkeypatch.delenv("ATTMEMO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_directory() == Path("/somewhere/attmemo/databases")
