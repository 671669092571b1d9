"""A folder that is damaged is filled on: what is damaged is set aside and kept, told once, and made anew."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from children import end_of, in_child, start_child
from databases import MODEL, memory_directory
from db_tools import REMOUNT, need_tmpfs, outcome
from pools import check_files, disk, entries, entry, files, opened, read_state, refuse, state_of, wait_for

from attmemo.db.aside import open_to_fill
from attmemo.db.folder import ASIDE
from attmemo.db.pools.fill_lock import LEASE
from attmemo.db.pools.filling import FILLING, Filling
from attmemo.db.pools.shared_pool import SharedPool
from attmemo.errors import DatabaseCorruptError, FormatVersionError

BOUND = 1 << 20
RECORDS = 40


@pytest.fixture(name="folder")
def _folder() -> Iterator[Path]:
    """A folder with records in several segments."""
    with memory_directory() as parent:
        with opened(parent / "pool") as pool:
            for batch in range(8):
                pool.add([entry(5 * batch + n, 6000) for n in range(5)])
        yield parent / "pool"


def describe() -> Filling:
    return Filling.of(MODEL, "float32")


def begin(path: Path, max_bytes: int = BOUND) -> SharedPool:
    """Open to fill; the news is told."""
    pool = open_to_fill(path, max_bytes, describe)
    pool.news()
    return pool


def fills(path: Path) -> dict[int, int]:
    """What is there for the next process that fills; and it can add."""
    pool = begin(path)
    try:
        before = state_of(pool)
        assert len(pool.add(entries([7000])).added) == 1
        return before
    finally:
        pool.close()


def contents(path: Path) -> list[bytes]:
    return sorted(file.read_bytes() for file in path.rglob("*") if file.is_file() and "lock" not in file.name)


def aside(path: Path) -> list[bytes]:
    """What lies aside."""
    return contents(path / ASIDE)


def _cut(size: int) -> Callable[[Path], object]:
    return lambda file: os.truncate(file, size)


def _folder_in_place(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": _cut(0), "cut": _cut(100), "one page": _cut(4096), "two pages": _cut(8192),
    "noise": lambda file: file.write_bytes(bytes(range(256)) * 100), "a folder": _folder_in_place, "gone": Path.unlink,
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [FILLING, "catalogue/data.mdb"])
def test_without_its_head_or_catalogue_a_folder_begins_anew_and_loses_no_file(
    folder: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = [file.read_bytes() for file in files(folder)]
    DAMAGES[damage](folder / name)
    bad = (folder / name).read_bytes() if (folder / name).is_file() else None
    assert fills(folder) == {}
    assert caplog.text.count("set aside") == 1
    assert damage == "gone" or name.split("/")[0] in caplog.text  # what is left names the other part
    assert all(body in aside(folder) for body in kept)
    assert bad is None or bad in aside(folder)
    caplog.clear()
    assert list(fills(folder).values()) == [7000]
    assert not caplog.records, "told once"
    check_files(folder)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_lock_file_of_the_catalogue_is_no_end(folder: Path, damage: str) -> None:
    kept = [file.read_bytes() for file in files(folder)]
    DAMAGES[damage](folder / "catalogue" / "lock.mdb")
    found = fills(folder)
    assert len(found) == (0 if damage == "a folder" else RECORDS)
    assert all(body in contents(folder) for body in kept if damage == "a folder")
    assert 7000 in fills(folder).values()


def test_a_folder_that_lost_its_catalogue_begins_anew_and_loses_no_file(folder: Path) -> None:
    kept = [file.read_bytes() for file in files(folder)]
    shutil.rmtree(folder / "catalogue")
    assert fills(folder) == {}
    assert all(body in aside(folder) for body in kept)
    assert list(fills(folder).values()) == [7000]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_segment_costs_its_own_records(
    folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, victim = read_state(folder), files(folder)[2]
    with opened(folder, fills=False) as reader:
        doomed = {n for n, kept in reader.records.items() if f"{kept.segment.number:010d}" == victim.name}
        assert 0 < len(doomed) < RECORDS
        rest = {number: identity for number, identity in before.items() if number not in doomed}
        DAMAGES[damage](victim)
        bad = victim.read_bytes() if victim.is_file() else None
        assert fills(folder) == rest
        assert sorted(reader.news().removed) == sorted(doomed), "who read it is told"
    assert caplog.text.count("Damaged segments") == 1
    assert victim.name in caplog.text
    assert f"of {len(doomed):,} records" in caplog.text
    assert bad is None or bad in aside(folder)
    caplog.clear()
    assert {number: one for number, one in fills(folder).items() if one != 7000} == rest
    assert not caplog.records, "told once"
    check_files(folder)


def test_all_segments_damaged_at_once_are_set_aside(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    count = len(files(folder))
    for file in files(folder):
        os.truncate(file, 4096)
    assert fills(folder) == {}
    assert len(aside(folder)) == count
    assert caplog.text.count("set aside") == 1
    with opened(folder, fills=False) as pool:
        assert pool.counts["damaged"] == RECORDS


def test_an_entry_of_the_catalogue_with_a_flipped_bit_is_no_end(folder: Path) -> None:
    """Wherever the bit is, a filler begins with right records or anew."""
    file = folder / "catalogue" / "data.mdb"
    good = file.read_bytes()

    def damage() -> None:
        for trial, at in enumerate(range(8192 + 40, len(good), len(good) // 40)):
            copy = Path(shutil.copytree(folder, folder.parent / f"copy{trial}"))
            data = bytearray(good)
            data[at] ^= 1 << trial % 8
            (copy / "catalogue" / "data.mdb").write_bytes(data)
            assert set(fills(copy).values()) <= set(range(RECORDS))
            assert 7000 in fills(copy).values()
            shutil.rmtree(copy)

    assert in_child(damage) == 0


# -- beside others


@pytest.mark.usefixtures("patient")
def test_processes_that_begin_at_once_set_aside_once_and_fill_the_same(folder: Path) -> None:
    """A head, a catalogue, a segment: four processes each time."""

    def work(path: Path, number: int, start: float) -> None:
        time.sleep(max(0.0, start - time.monotonic()))
        pool = begin(path)
        pool.add(entries([100 + number]))
        (path.parent / f"done{number}").touch()
        for other in range(4):
            wait_for(path.parent / f"done{other}")
        pool.news()
        assert set(state_of(pool).values()) >= {100, 101, 102, 103}
        pool.close()

    for name in (FILLING, "catalogue/data.mdb", f"segments/{files(folder)[1].name}"):
        path = folder.parent / "several" / "pool"
        shutil.copytree(folder, path)
        os.truncate(path / name, 5000 if name != FILLING else 50)
        start = time.monotonic() + 0.1
        children = [start_child(lambda n=n: work(path, n, start)) for n in range(4)]  # type: ignore[misc] # noqa: B023
        assert [end_of(child) for child in children] == [0] * 4, name
        assert len(list((path / ASIDE).iterdir())) == 1, name
        check_files(path)
        shutil.rmtree(path.parent)


def test_who_had_the_folder_open_writes_no_more_into_it(folder: Path) -> None:
    with opened(folder) as old:
        os.truncate(folder / FILLING, 10)
        new = begin(folder)
        new.add(entries(range(200, 210)))
        for batch in range(5):
            assert outcome(lambda: old.add(entries([300 + batch]))) == "DatabaseError"  # noqa: B023
        assert list(state_of(new).values()) == list(range(200, 210))
        new.close()
    assert list(read_state(folder).values()) == list(range(200, 210))


def test_a_process_killed_at_any_move_leaves_a_folder_that_is_filled(folder: Path) -> None:
    kept = [file.read_bytes() for file in files(folder)]
    os.truncate(folder / "catalogue" / "data.mdb", 9000)

    def kill(path: Path, at: int) -> None:
        rename, calls = os.rename, 0

        def call(*arguments: Any) -> None:
            nonlocal calls
            rename(*arguments)
            calls += 1
            if calls == at:
                os.kill(os.getpid(), signal.SIGKILL)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "rename", call)
            begin(path).close()

    for at in (1, 2, 3):
        path = folder.parent / f"pool{at}"
        shutil.copytree(folder, path)
        assert in_child(lambda: kill(path, at)) == -signal.SIGKILL  # noqa: B023
        assert fills(path) == {}
        assert all(body in contents(path) for body in kept), "no file is lost"
        assert list(fills(path).values()) == [7000]


def test_where_nothing_can_be_moved_all_stays_and_the_error_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.truncate(folder / FILLING, 10)
    before = contents(folder)
    for code, word in ((errno.ENOSPC, "the disk is full"), (errno.EACCES, "Permission denied")):
        with monkeypatch.context() as patch:
            patch.setattr("attmemo.db.aside.set_aside", refuse(code))
            with pytest.raises(DatabaseCorruptError, match=f"cannot be set aside.*{word}"):
                begin(folder)
        assert contents(folder) == before
    assert fills(folder) == {}


# -- what is no damage


def test_a_folder_of_another_version_is_refused_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attmemo.db.pools.filling.VERSION", 2)
    (folder / FILLING).unlink()
    describe().write(folder)
    monkeypatch.undo()
    before = contents(folder)
    with pytest.raises(FormatVersionError):
        begin(folder)
    assert contents(folder) == before


def test_a_file_that_cannot_be_opened_for_now_is_not_set_aside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptors are left, or another user's file: the segment may be sound."""
    before = contents(folder)
    opening = os.open

    for code in (errno.EMFILE, errno.EACCES):

        def call(path: Any, *arguments: Any, code: int = code, **options: Any) -> int:
            if "segments/" in str(path):
                raise OSError(code, os.strerror(code))
            return opening(path, *arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", call)
            assert outcome(lambda: begin(folder)) == "DatabaseError"
    assert contents(folder) == before


# -- its bound


def test_a_folder_above_its_bound_is_within_it_once_it_is_opened(folder: Path) -> None:
    assert disk(folder) > 128 << 10
    pool = begin(folder, 128 << 10)
    assert disk(folder) == pool.nbytes <= 128 << 10
    assert max(state_of(pool).values()) == RECORDS - 1, "the newest stay"
    assert len(pool) > 5
    pool.close()


def test_a_folder_whose_bound_cannot_be_held_now_is_filled_nevertheless(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("attmemo.db.pools.shared_pool.PATIENCE", 0.01)
    monkeypatch.setattr("attmemo.db.aside.PATIENCE", 0.01)
    holder = os.open(folder / LEASE, os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)
    pool = begin(folder, 128 << 10)
    assert "larger than max_bytes" in caplog.text
    assert len(state_of(pool)) == RECORDS
    os.close(holder)
    pool.close()


# -- a disk without room


def test_a_new_folder_on_a_full_disk_is_an_error_by_name_and_begins_once_there_is_room(tmp_path: Path) -> None:
    """A tmpfs of every size up to what a folder needs: no signal, the same error, and nothing in the way later."""
    tmpfs, path = need_tmpfs(tmp_path), tmp_path / "pool"

    def sizes() -> None:
        ends = []
        while not ends or ends[-1] != "fine":
            tmpfs.mount(f"size={4 * len(ends) + 4}k")
            ends.append(outcome(lambda: begin(path).close()))
            tmpfs.mount("size=8m", REMOUNT)
            assert list(fills(path)) == []
            assert list(fills(path).values()) == [7000]
            tmpfs.unmount()
        assert set(ends[:-1]) == {"StorageFullError"}
        assert len(ends) > 3

    assert in_child(sizes, first=tmpfs.unshare) == 0


def test_damage_on_a_full_disk_is_set_aside_or_stays(tmp_path: Path) -> None:
    tmpfs, path = need_tmpfs(tmp_path), tmp_path / "pool"

    def damage() -> None:
        tmpfs.mount("size=4m")
        with opened(path) as pool:
            pool.add(entries(range(20)))
        kept = [file.read_bytes() for file in files(path)]
        os.truncate(path / FILLING, 10)
        room = os.statvfs(tmp_path)
        (tmp_path / "ballast").write_bytes(bytes(room.f_bavail * room.f_frsize))
        assert outcome(lambda: begin(path).close()) in ("StorageFullError", "DatabaseCorruptError")
        assert all(body in contents(path) for body in kept)
        (tmp_path / "ballast").unlink()
        assert fills(path) == {}
        assert all(body in contents(path) for body in kept)

    assert in_child(damage, first=tmpfs.unshare) == 0
