"""Shards of a build, put together: what one build stores, each record once, each one checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import attmemo, refuse, succeed
from pools import damage, entry, opened
from stored_rows import StoredRows
from tiny_models import make_database

from attmemo.db import KIND_INPUT, KIND_MAP, Database
from attmemo.db.files import BuilderLock
from attmemo.db.pools import merging, pool
from attmemo.db.pools.filling import Filling
from attmemo.db.pools.segment import Segment
from attmemo.errors import DatabaseCorruptError, DatabaseError, DatabaseLockedError
from attmemo.profiler.build import BuildOptions, BuildResult, build_database
from attmemo.profiler.models import LoadedModel, load_model
from attmemo.rows.store import Record

OPTIONS: dict[str, Any] = {"storage": "int8", "reuse": "rows", "batch_size": 8}
SHARDS = 3


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory, log_lines: list[str]) -> Path:
    """Lines, some of them twice, and blank ones between."""
    file = tmp_path_factory.mktemp("log") / "all.log"
    file.write_text("\n".join([*log_lines[:90], "", *log_lines[:20]]) + "\n")
    return file


def build(loaded: LoadedModel, log: Path, path: Path, **options: Any) -> BuildResult:
    return build_database(loaded, [log], path, BuildOptions(**(OPTIONS | options)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, loaded: LoadedModel, log: Path) -> Path:
    path = tmp_path_factory.mktemp("whole") / "db"
    build(loaded, log, path)
    return path


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, loaded: LoadedModel, log: Path) -> list[Path]:
    folder = tmp_path_factory.mktemp("shards")
    for number in range(1, SHARDS + 1):
        build(loaded, log, folder / str(number), shard=(number, SHARDS))
    return [folder / str(number) for number in range(1, SHARDS + 1)]


def records(path: Path) -> dict[bytes, Record]:
    """All records of rows, by their tokens."""
    return StoredRows(path).records()


def rows_of(path: Path) -> list[int]:
    with Database(path) as database:
        return sorted(database.records.rows.tolist())


def merged(*words: str | Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(succeed("merge", *words, "--quiet", "--json", "-"))
    return result


def test_shards_hold_each_text_once(
    shards: list[Path], whole: Path, log: Path, tmp_path: Path, loaded: LoadedModel
) -> None:
    texts = [line for line in log.read_text().splitlines() if line]
    for number, path in enumerate(shards):
        (own := tmp_path / f"{number}.log").write_text("\n".join(texts[number::SHARDS]))
        build(loaded, own, tmp_path / str(number))
        assert records(path).keys() == records(tmp_path / str(number)).keys()
    assert records(whole).keys() == {tokens for path in shards for tokens in records(path)}


def test_merged_shards_are_the_database_of_one_build(shards: list[Path], whole: Path, tmp_path: Path) -> None:
    done = merged(tmp_path / "db", *shards)
    found, expected = records(tmp_path / "db"), records(whole)
    assert done["added"] == done["records"] == len(expected)
    assert done["added"] + done["doubled"] == sum(len(records(path)) for path in shards)
    assert found.keys() == expected.keys()
    for tokens, other in expected.items():  # a shard has other batches: sums in another order
        for name in ("rows", "last"):
            a, b = getattr(found[tokens], name).float(), getattr(other, name).float()
            assert (a - b).abs().max() <= 1 + 1e-4 * b.abs().max()
    assert Filling.read(tmp_path / "db").model == Filling.read(whole).model


def test_copied_records_are_byte_for_byte_those_of_the_shard(shards: list[Path], tmp_path: Path) -> None:
    merged(tmp_path / "db", shards[0])
    for found, expected in zip(StoredRows(tmp_path / "db").kept, StoredRows(shards[0]).kept, strict=True):
        assert found.tokens.tobytes() == expected.tokens.tobytes()
        assert found.body.tobytes() == expected.body.tobytes()
        assert found.made == expected.made


def test_merging_again_adds_nothing(shards: list[Path], tmp_path: Path) -> None:
    first = merged(tmp_path / "db", *shards)
    again = merged(tmp_path / "db", *shards, shards[0])
    assert (again["added"], again["records"]) == (0, first["records"])


def test_a_build_over_the_same_data_finds_all_of_it_in_merged_shards(
    shards: list[Path], tmp_path: Path, loaded: LoadedModel, log: Path
) -> None:
    merged(tmp_path / "db", *shards)
    assert build(loaded, log, tmp_path / "db").added == 0


def test_merging_goes_on_where_it_was_interrupted(
    shards: list[Path], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, count = Segment.write, 0

    def stop(self: Segment, *given: Any) -> None:
        nonlocal count
        count += 1
        if count == 60:
            raise KeyboardInterrupt
        write(self, *given)

    with monkeypatch.context() as once:
        once.setattr(pool, "LARGEST", 64 << 10)
        once.setattr(Segment, "write", stop)
        assert attmemo("merge", tmp_path / "db", *shards).exit_code == 130
    copied = len(records(tmp_path / "db"))
    assert 30 < copied < 60
    done = merged(tmp_path / "db", *shards)
    assert done["added"] == len(records(whole)) - copied
    assert records(tmp_path / "db").keys() == records(whole).keys()


def test_a_damaged_record_is_named_and_not_copied(shards: list[Path], tmp_path: Path) -> None:
    merged(tmp_path / "damaged", shards[0])
    damage(StoredRows(tmp_path / "damaged").kept[-1])
    with pytest.raises(DatabaseCorruptError, match=r"damaged, record \d+: not as it was written"):
        merging.merge_prepared(tmp_path / "db", [tmp_path / "damaged"])
    assert records(tmp_path / "db").keys() < records(shards[0]).keys()


def test_a_shard_that_is_being_built_is_refused(shards: list[Path], tmp_path: Path) -> None:
    merged(tmp_path / "half", shards[0])
    lock = BuilderLock(tmp_path / "half")
    try:
        with pytest.raises(DatabaseLockedError, match="half is being written by another process"):
            merging.merge_prepared(tmp_path / "db", [shards[1], tmp_path / "half"])
    finally:
        lock.release()
    assert not (tmp_path / "db").exists()


def test_maps_of_shards_are_put_together_too(tmp_path: Path, loaded: LoadedModel, log: Path, tiny_bert: str) -> None:
    options = {"reuse": "maps", "storage": "float32", "max_length": 48}
    for number in (1, 2):
        build(loaded, log, tmp_path / str(number), shard=(number, 2), **options)
    build(loaded, log, tmp_path / "whole", **options)
    done = merged(tmp_path / "db", tmp_path / "1", tmp_path / "2")
    assert (done["records"], done["doubled"]) == (110, 0), "of maps a text is stored as often as it comes"
    assert merged(tmp_path / "db", tmp_path / "1")["added"] == 0
    assert rows_of(tmp_path / "db") == rows_of(tmp_path / "whole")
    with Database(tmp_path / "db") as one, Database(tmp_path / "whole") as other:
        assert not one.check()
        place = {row: record for record, row in enumerate(other.records.rows.tolist())}
        for record, row in enumerate(one.records.rows.tolist()):
            for kind in (KIND_MAP, KIND_INPUT):
                torch.testing.assert_close(one.slot(kind, 1, record), other.slot(kind, 1, place[row]))


def test_databases_that_do_not_belong_together_are_refused(
    shards: list[Path], tmp_path: Path, loaded: LoadedModel, log: Path, tiny_deberta: str
) -> None:
    build(loaded, log, tmp_path / "float32", storage="float32", limit=5)
    build(loaded, log, tmp_path / "short", max_length=16, limit=5)
    build(load_model(tiny_deberta), log, tmp_path / "deberta", limit=5)
    make_database(loaded.name, log, tmp_path / "maps", limit=20)
    with opened(tmp_path / "fills") as pool:
        pool.add([entry(0)])
    for name, why in (
        ("float32", "--dtype int8; asked: float32"), ("short", "asked: 16"), ("deberta", "another model"),
        ("maps", "one sort"), ("fills", "fill themselves"), ("nothing", "is no prepared database of rows"),
    ):  # fmt: skip
        assert why in refuse("merge", tmp_path / "db", shards[0], tmp_path / name)
        assert why in refuse("merge", shards[0], tmp_path / name)
    assert "into itself" in refuse("merge", shards[0], shards[0])
    assert not (tmp_path / "db").exists()
    with pytest.raises(DatabaseError):
        merging.merge_prepared(tmp_path / "db", [shards[0], tmp_path / "short"])


def test_the_command_builds_a_shard(tiny_bert: str, log: Path, tmp_path: Path, shards: list[Path]) -> None:
    words = ("build-database", "--reuse", "rows", "--model", tiny_bert, "--data", log, "--quiet", "--json", "-")
    done = json.loads(succeed(*words, "--shard", "2/3", "--output", tmp_path / "db"))
    assert done["records"] == len(records(shards[1]))
    assert records(tmp_path / "db").keys() == records(shards[1]).keys()
    nothing = refuse(*words, "--shard", "200/300", "--output", tmp_path / "x")
    assert "shard 200/300 of the data holds no text" in nothing


@pytest.mark.parametrize("shard", ["0/3", "4/3", "1", "a/b", "1/2/3", "-1/3"])
def test_a_shard_that_is_no_part_of_a_whole_is_refused(shard: str, tmp_path: Path) -> None:
    result = attmemo("build-database", "--model", "m", "--data", "x.log", f"--shard={shard}")
    assert result.exit_code == 2
    assert "1/8 to 8/8" in result.stderr
