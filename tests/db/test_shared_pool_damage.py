"""Damaged files of a pool are errors by name, or cost one record, and are never a signal."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from children import end_of, in_child, start_child
from databases import MODEL, changed
from db_tools import outcome
from pools import (
    HISTORY,
    SMALL,
    check_files,
    entries,
    entry,
    files,
    go_on,
    hit,
    is_right,
    open_pool,
    opened,
    read_state,
    state_of,
    states,
    tokens_of,
    wait_for,
)

from attmemo.db.pools.filling import FILLING, Filling
from attmemo.errors import DatabaseError, DatabaseTruncatedError, FormatVersionError


@pytest.fixture
def filled(folder: Path) -> Path:
    """A pool with records in several segments, of which some were removed and carried."""
    with opened(folder) as pool:
        for batch in range(8):
            pool.add([entry(10 * batch + n, 2500, 200) for n in range(4)])
        pool.remove([3, 9])
    return folder


def test_a_garbled_filling_file_is_outcome(filled: Path) -> None:
    """Every byte changed, cuts, and garbage: an error by name, and never another file in its place."""
    file = filled / FILLING
    good, generator = file.read_bytes(), random.Random(0)
    flips = [good[:at] + bytes([good[at] ^ 1 << generator.randrange(8)]) + good[at + 1 :] for at in range(len(good))]
    cuts = [good[:at] for at in range(0, len(good), 7)]
    for bad in [*flips, *cuts, b"\xff\xfe\x00", b"{}\n\n", os.urandom(2000), good * 2]:
        file.write_bytes(bad)
        for fills in (True, False):
            assert outcome(lambda: open_pool(filled, fills=fills)) == "DatabaseCorruptError"  # noqa: B023
        assert file.read_bytes() == bad
    file.write_bytes(good)
    assert len(read_state(filled)) == 30


def test_a_pool_of_another_version_is_outcome(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attmemo.db.pools.filling.VERSION", 2)
    (filled / FILLING).unlink()
    Filling.of(MODEL, "float32").write(filled)
    monkeypatch.undo()
    with pytest.raises(FormatVersionError):
        open_pool(filled)


def test_records_without_their_filling_file_are_not_taken_for_those_of_another_model(filled: Path) -> None:
    """The file that says whose they are was lost: they are refused or gone, but never another model's."""
    (filled / FILLING).unlink()

    def use() -> None:
        with opened(filled) as pool:
            assert len(pool) == 0, "records of another model"

    assert outcome(use) in ("fine", "DatabaseCorruptError")


def test_a_segment_that_does_not_begin_as_it_should_is_outcome(filled: Path) -> None:
    """Number, magic, size or marks of its head: refused at once, and nothing else is lost by that."""
    names = {file.name for file in files(filled)}
    for at in (0, 15, 16, 17, 24, 25, 31, 32, 39):
        old = files(filled)[1].read_bytes()[at]
        with changed(files(filled)[1], at, bytes([old ^ 4])):
            for fills in (True, False):
                pool = open_pool(filled, fills=fills)
                assert outcome(pool.news) == "DatabaseCorruptError", at
                outcome(lambda: pool.add(entries(range(900, 910))))  # noqa: B023
                pool.close()
            assert names <= {file.name for file in files(filled)}
    assert set(range(10, 13)) <= set(read_state(filled).values())


def test_a_segment_that_is_cut_or_missing_is_outcome(filled: Path) -> None:
    """At any length, before it is opened: an error by name and no signal, and the other files stay."""
    file = files(filled)[1]
    whole = file.read_bytes()
    names = {one.name for one in files(filled) if one != file}

    def cut() -> None:
        for size in (None, 0, 1, 39, 4096, 8192, 8193, len(whole) - 4096, len(whole) - 1):
            if size is None:
                file.unlink()
            else:
                os.truncate(file, size)
            pool = open_pool(filled)
            assert outcome(pool.news) == ("DatabaseCorruptError" if size is None else "DatabaseTruncatedError"), size
            outcome(lambda: pool.add(entries(range(900, 910))))  # noqa: B023
            pool.close()
            assert names <= {file.name for file in files(filled)}
            file.write_bytes(whole)

    assert in_child(cut) == 0
    assert set(range(10, 13)) <= set(read_state(filled).values())


@pytest.mark.parametrize("size", [0, 4096, 9000])
def test_a_segment_cut_under_an_open_pool_is_an_error_and_no_signal(folder: Path, size: int) -> None:
    """Reading says so; a filler that must carry its records, or drop it, is not ended."""

    def cut() -> None:
        with opened(folder, SMALL) as pool:
            pool.add(entries([1, 2]))
            for kept in pool.records.values():
                hit(kept)
            os.truncate(files(folder)[0], size)
            with pytest.raises(DatabaseTruncatedError):
                pool.records[0].segment.check_whole()
            for batch in range(6):
                outcome(lambda: pool.add(entries([10 + 2 * batch, 11 + 2 * batch])))  # noqa: B023
            outcome(pool.rewrite)

    assert in_child(cut) == 0


def test_a_flipped_bit_of_a_body_is_seen(filled: Path) -> None:
    """Of each record, at random places: its checksum does not fit, and the others are right."""
    generator = random.Random(5)
    with opened(filled, fills=False) as pool:
        for kept in pool.records.values():
            file = files(filled)[[file.name for file in files(filled)].index(f"{kept.segment.number:010d}")]
            at = kept.offset + generator.randrange(kept.nbytes)
            with changed(file, at, bytes([int(kept.body[at - kept.offset]) ^ 1 << generator.randrange(8)])):
                assert [other.number for other in pool.records.values() if not other.is_sound] == [kept.number]
        assert len(state_of(pool)) == 30


@pytest.mark.parametrize("part", ["tokens", "note"])
def test_a_flipped_bit_of_tokens_or_note_is_seen(filled: Path, part: str) -> None:
    """Tokens decide what a record is served for: with others its bytes would be wrong. The catalogue has them."""
    file = filled / "catalogue" / "data.mdb"
    tokens = tokens_of(21, 2500, 200)
    needle = tokens.tobytes()[400:440] if part == "tokens" else b"note 21" + tokens.tobytes()[:4]
    data = file.read_bytes()
    places = [at for at in range(len(data)) if data.startswith(needle, at)]
    assert places

    def use() -> None:
        with opened(filled, fills=False) as pool:
            for kept in pool.records.values():
                assert not kept.is_sound or (
                    kept.note == f"note {kept.tokens[0]}".encode()
                    and np.array_equal(kept.tokens, tokens_of(int(kept.tokens[0]), 2500, 200))
                ), f"record {kept.number} is served for other tokens"

    for at in places:
        with changed(file, at + 5, bytes([data[at + 5] ^ 2])):
            assert outcome(use) in ("fine", "DatabaseCorruptError")


def test_a_damaged_catalogue_is_an_error_or_right_and_never_a_signal(filled: Path) -> None:
    """Bits flipped at random in LMDB's file: an error by name, or only right bytes are served."""
    file = filled / "catalogue" / "data.mdb"
    good, generator = file.read_bytes(), random.Random(11)
    used = [page for page in range(len(good) // 4096) if any(good[4096 * page : 4096 * page + 4096])]

    def use(path: Path) -> None:
        with opened(path) as pool:
            for kept in pool.records.values():
                fits = np.array_equal(kept.tokens, tokens_of(int(kept.tokens[0]), 2500, 200))
                assert not kept.is_sound or (fits and is_right(kept)), f"record {kept.number} is wrong"
            pool.add(entries([500, 501]))

    def damage() -> None:
        seen: list[str] = []
        for trial in range(80):
            copy = Path(shutil.copytree(filled, filled.parent / f"copy{trial}"))
            data = bytearray(good)
            for _ in range(generator.choice([1, 1, 1, 8])):
                data[4096 * generator.choice(used) + generator.randrange(4096)] ^= 1 << generator.randrange(8)
            (copy / "catalogue" / "data.mdb").write_bytes(data)
            seen.append(outcome(lambda: use(copy)))  # noqa: B023
            shutil.rmtree(copy)
        assert {"fine", "DatabaseCorruptError"} <= set(seen) <= {"fine", "DatabaseCorruptError", "DatabaseError"}

    assert in_child(damage) == 0


@pytest.mark.parametrize("what", ["cut", "garbage", "gone", "folder"])
def test_a_catalogue_that_is_no_catalogue_is_outcome(filled: Path, what: str) -> None:
    """A reader is told; a filler too, and no segment is removed by that."""
    file, names = filled / "catalogue" / "data.mdb", {file.name for file in files(filled)}
    if what == "cut":
        os.truncate(file, 10000)
    elif what == "garbage":
        file.write_bytes(random.Random(3).randbytes(40000))
    elif what == "gone":
        file.unlink()
    else:
        file.unlink()
        file.mkdir()

    def use() -> None:
        for fills in (False, True):
            pool = None
            try:
                pool = open_pool(filled, fills=fills)
                pool.news()
            except DatabaseError:
                continue
            finally:
                if pool is not None:
                    pool.close()
            assert what == "gone"
            assert fills, "a reader took a folder without catalogue for an empty pool"

    assert in_child(use) == 0
    assert names == {file.name for file in files(filled)}


@pytest.mark.parametrize("size", [0, 4096])
def test_a_pool_whose_maker_died_before_its_catalogue_was_written_is_filled(folder: Path, size: int) -> None:
    """Between making the file and writing its first two pages: nothing was published, and the next filler begins."""
    open_pool(folder).close()
    os.truncate(folder / "catalogue" / "data.mdb", size)
    assert outcome(lambda: open_pool(folder, fills=False).close()) in ("fine", "DatabaseNotFoundError")
    with opened(folder) as pool:
        pool.add(entries([1]))
        assert state_of(pool) == read_state(folder) == {0: 1}


def test_a_folder_made_anew_under_an_open_pool_is_not_overwritten(folder: Path) -> None:
    """Removed and begun anew, as a hint says, while a process has the old one open: the new one stays whole."""
    with opened(folder) as old:
        old.add(entries(range(20)))
        shutil.rmtree(folder)
        ready, go = folder.parent / "ready", folder.parent / "go"

        def anew() -> None:
            with opened(folder) as pool:
                pool.add(entries(range(1000, 1040)))
                ready.touch()
                wait_for(go)
                assert len(state_of(pool)) == 40

        child = start_child(anew)
        wait_for(ready)
        for batch in range(20):
            outcome(lambda: old.add(entries(range(100 + 2 * batch, 102 + 2 * batch))))  # noqa: B023
        go.touch()
        assert end_of(child) == 0
    assert in_child(lambda: _exactly(folder, range(1000, 1040))) == 0


def _exactly(path: Path, identities: range) -> None:
    assert list(read_state(path).values()) == list(identities)


@pytest.mark.usefixtures("patient")
def test_processes_that_make_a_pool_at_once_make_one(folder: Path) -> None:
    """None fails, and all fill the same: twelve times."""

    def make(path: Path, number: int, start: float) -> None:
        time.sleep(max(0.0, start - time.monotonic()))
        with opened(path) as pool:
            pool.add(entries([number]))
            assert Filling.read(path).uuid == pool.filling.uuid

    for round_ in range(12):
        path, start = folder.parent / f"pool{round_}", time.monotonic() + 0.1
        children = [start_child(lambda n=n: make(path, n, start)) for n in range(4)]  # type: ignore[misc] # noqa: B023
        assert [end_of(child) for child in children] == [0] * 4
        assert sorted(read_state(path).values()) == list(range(4))


def test_a_history_that_is_done_in_pieces_ends_as_one_done_at_once(folder: Path) -> None:
    """What the tests of killed processes build on."""
    expected = states(folder)
    assert len({str(state) for state in expected}) == len(HISTORY) - 0  # rewriting changes no record
    go_on(folder.parent / "other", expected)
    assert read_state(folder.parent / "other") == expected[-1]
    check_files(folder)
