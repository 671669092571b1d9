"""A pool in a folder: what is added stays, what is removed goes, and no fault costs more than its own record."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import run_child
from reliability_tools import outcome
from shared_pool_tools import (
    HISTORY,
    PLAIN,
    SMALL,
    body_of,
    check_files,
    disk,
    entries,
    entry,
    files,
    go_on,
    is_right,
    open_pool,
    opened,
    read_state,
    state_of,
    states,
    tokens_of,
)
from test_db_crash import READ_ONLY, REMOUNT
from test_db_crash import _need_tmpfs as need_tmpfs
from test_db_tools import MODEL, changed, end_of, in_child, memory_directory, start_child

from attmemo.db import shared_pool
from attmemo.db.filling import FILLING, Filling
from attmemo.db.lease import LEASE
from attmemo.db.pool import Entry, Pool
from attmemo.db.segment import Segment
from attmemo.db.shared_pool import SharedPool
from attmemo.errors import (
    AttmemoError,
    DatabaseCorruptError,
    DatabaseError,
    DatabaseLockedError,
    DatabaseNotFoundError,
    DatabaseTruncatedError,
    FormatVersionError,
    StorageFullError,
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """The folder of a pool that is not made yet, in memory."""
    with memory_directory() as parent:
        yield parent / "pool"


# -- what is kept


def test_a_record_is_as_it_was_added_after_it_is_opened_again(folder: Path) -> None:
    """Tokens, body, note, number, time and uses; and numbers go on."""
    before = time.time()
    with opened(folder) as pool:
        news = pool.add([entry(1), entry(2, 1), entry(3, 0), Entry(tokens_of(4, 9), body_of(tokens_of(4, 9)))])
        assert [kept.number for kept in news.added] == [0, 1, 2, 3]
        assert news.removed == []
        for _ in range(3):
            pool.records[1].segment.hit(pool.records[1].place)
        made = [kept.made for kept in news.added]
        assert before <= min(made) <= max(made) <= time.time()
    with opened(folder) as pool:
        assert [int(kept.tokens[0]) for kept in pool.records.values()] == [1, 2, 3, 4]
        assert all(np.array_equal(kept.tokens, tokens_of(*kept.tokens[:2])) for kept in pool.records.values())
        assert all(is_right(pool.records[number]) for number in range(3))
        assert pool.records[3].note == b""
        assert np.array_equal(pool.records[3].body, body_of(tokens_of(4, 9)))
        assert [kept.made for kept in pool.records.values()] == made
        assert [kept.hits for kept in pool.records.values()] == [0, 3, 0, 0]
        pool.remove([3])
        assert [kept.number for kept in pool.add([entry(5)]).added] == [4]
    with opened(folder) as pool:
        assert [kept.number for kept in pool.add([entry(6)]).added] == [5]
        assert pool.filling.model == MODEL


def test_uses_are_carried_with_a_record(folder: Path) -> None:
    """A record that is written anew has as many uses as before."""
    with opened(folder) as pool:
        pool.add(entries([1, 2]))
        for _ in range(5):
            pool.records[0].segment.hit(pool.records[0].place)
        pool.rewrite()
        assert [pool.records[number].hits for number in (0, 1)] == [5, 0]
        pool.records[0].segment.hit(pool.records[0].place)
    with opened(folder) as pool:
        assert [pool.records[number].hits for number in (0, 1)] == [6, 0]


def test_the_files_of_dropped_records_are_gone(folder: Path) -> None:
    """After every batch the segments take what the pool says, and never more than its bound."""
    with opened(folder, 256 << 10) as pool:
        for batch in range(60):
            pool.add(entries(range(10 * batch, 10 * batch + batch % 7), 1 + 977 * batch % 12000))
            assert disk(folder) == pool.nbytes <= 256 << 10
        assert pool.counts["evicted"] > 100
        assert state_of(pool) == read_state(folder)
    check_files(folder)


def test_a_batch_larger_than_the_pool_leaves_no_file_behind(folder: Path) -> None:
    """What of a batch has to go for its own later entries leaves nothing on the disk."""
    with opened(folder, 256 << 10) as pool:
        pool.add(entries(range(400)))
        assert disk(folder) == pool.nbytes <= 256 << 10
        assert max(state_of(pool).values()) == 399


def test_an_entry_larger_than_the_pool_is_left_out(folder: Path) -> None:
    with opened(folder, SMALL) as pool:
        news = pool.add([entry(1), entry(2, SMALL), entry(3)])
        assert [int(kept.tokens[0]) for kept in news.added] == [1, 3]
        assert list(state_of(pool).values()) == [1, 3]


@pytest.mark.parametrize("max_bytes", [SMALL // 2, SMALL, 200_000, 1 << 20])
def test_a_pool_stays_within_its_bound_whatever_comes(folder: Path, max_bytes: int) -> None:
    """Random sizes and batches, uses, removals: the bound holds, the newest is there, a reader agrees."""
    generator = random.Random(max_bytes)
    with opened(folder, max_bytes) as pool, opened(folder, fills=False) as reader:
        memory = Pool(max_bytes)
        for round_ in range(120):
            for kept in list(pool.records.values()):
                if generator.random() < 0.3:
                    kept.segment.hit(kept.place)
                    memory.records[kept.number].segment.hit(memory.records[kept.number].place)
            largest = generator.choice([64, 4000, max_bytes // 4, max_bytes])
            new = [entry(100 * round_ + n, generator.randrange(largest)) for n in range(generator.randrange(4))]
            if generator.random() < 0.1 and pool.records:
                gone = generator.sample(sorted(pool.records), 1)
                pool.remove(gone)
                memory.remove(gone)
            news, other = pool.add(new), memory.add(new)
            assert [kept.number for kept in news.added] == [kept.number for kept in other.added]
            assert sorted(news.removed) == sorted(other.removed)
            assert pool.nbytes <= max_bytes
            assert disk(folder) <= max_bytes
            if news.added:
                assert max(pool.records) == news.added[-1].number
            reader.news()
            assert state_of(reader) == state_of(pool)


def test_a_smaller_bound_holds_from_the_next_segment_on(folder: Path) -> None:
    with opened(folder, 1 << 20) as pool:
        pool.add(entries(range(200)))
        assert disk(folder) > 256 << 10
    with opened(folder, 256 << 10) as pool:
        pool.add(entries(range(200, 220)))
        assert disk(folder) == pool.nbytes <= 256 << 10
        assert max(state_of(pool).values()) == 219


def test_uses_in_one_pool_decide_what_another_keeps(folder: Path) -> None:
    """Two pools on a folder: what a reader uses outlives its segment when the filler needs room."""
    with opened(folder, 256 << 10) as pool, opened(folder, fills=False) as reader:
        pool.add(entries(range(8)))
        assert len(reader.news().added) == 8
        for number in (2, 5):
            reader.records[number].segment.hit(reader.records[number].place)
        assert [kept.hits for kept in pool.records.values()] == [0, 0, 1, 0, 0, 1, 0, 0]
        batch = 0
        while 7 in pool.records:
            batch += 1
            pool.add(entries(range(100 * batch, 100 * batch + 2)))
        assert [number for number in range(8) if number in pool.records] == [2, 5]
        assert pool.records[2].hits == 1
        assert {2, 5} <= state_of(pool).keys()


# -- what a reader learns


def test_news_tells_what_came_and_went(folder: Path) -> None:
    with opened(folder) as pool, opened(folder, fills=False) as reader:
        assert not reader.news()
        pool.add(entries([1, 2]))
        pool.add(entries([3]))
        pool.remove([1])
        news = reader.news()
        assert [int(kept.tokens[0]) for kept in news.added] == [1, 3]
        assert news.removed == []
        pool.add(entries([4]))
        pool.remove([0, 3])
        news = reader.news()
        assert (news.added, news.removed) == ([], [0])
        assert not reader.news()
        assert state_of(reader) == state_of(pool) == {2: 3}


def test_a_filler_is_told_what_others_have_added(folder: Path) -> None:
    """`add` tells its own records and those that came before them."""
    with opened(folder) as one, opened(folder) as two:
        one.add(entries([1, 2]))
        assert [int(kept.tokens[0]) for kept in two.add(entries([3])).added] == [1, 2, 3]
        assert [int(kept.tokens[0]) for kept in one.news().added] == [3]
        assert state_of(one) == state_of(two) == {0: 1, 1: 2, 2: 3}


def test_a_record_that_was_carried_is_no_news(folder: Path) -> None:
    """A reader finds its bytes at the new place, and is told neither that it came nor that it went."""
    with opened(folder) as pool, opened(folder, fills=False) as reader:
        pool.add(entries([1, 2, 3]))
        reader.news()
        old = reader.records[1]
        pool.rewrite()
        pool.remove([0])
        pool.rewrite()
        news = reader.news()
        assert (news.added, news.removed) == ([], [0])
        assert reader.records[1].segment is not old.segment
        assert state_of(reader) == {1: 2, 2: 3}


@pytest.mark.parametrize("behind", [4, 5, 6, 40])
def test_a_reader_learns_the_same_however_far_it_is_behind(
    folder: Path, behind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without the log: also of records that were carried, that came and went, and that are gone."""
    monkeypatch.setattr(shared_pool, "LOGGED", 5)
    with opened(folder, SMALL) as pool, opened(folder, fills=False) as reader:
        pool.add(entries(range(3)))
        reader.news()
        for batch in range(behind):
            for kept in pool.records.values():
                if kept.number in (1, 4):
                    kept.segment.hit(kept.place)
            pool.add(entries([100 + batch]))
        news = reader.news()
        now = state_of(pool)
        assert 1 in now
        assert state_of(reader) == now
        assert sorted(kept.number for kept in news.added) == sorted(set(now) - {0, 1, 2})
        assert sorted(news.removed) == sorted({0, 1, 2} - set(now))


def test_a_reader_behind_the_real_log_learns_everything(folder: Path) -> None:
    """More than LOGGED batches behind, and the log is not longer than that."""
    with opened(folder) as pool, opened(folder, fills=False) as reader:
        pool.add(entries([0, 1], 64))
        reader.news()
        pool.remove([0])
        for batch in range(shared_pool.LOGGED + 10):
            pool.add(entries([batch + 2], 64))
        news = reader.news()
        assert news.removed == [0]
        assert len(news.added) == shared_pool.LOGGED + 10
        assert state_of(reader) == state_of(pool)


def test_bytes_that_a_reader_holds_stay_right_when_their_file_is_gone(folder: Path) -> None:
    with opened(folder, SMALL) as pool, opened(folder, fills=False) as reader:
        pool.add(entries([1, 2]))
        reader.news()
        held = list(reader.records.values())
        names = {file.name for file in files(folder)}
        for batch in range(20):
            pool.add(entries([10 + 2 * batch, 11 + 2 * batch]))
        assert names.isdisjoint(file.name for file in files(folder))
        reader.news()
        assert not {kept.number for kept in held} & reader.records.keys()
        assert all(kept.is_sound and is_right(kept) for kept in held)
        for kept in held:
            kept.segment.hit(kept.place)
            kept.segment.check_whole()


def test_a_segment_that_goes_while_a_reader_learns_costs_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The filler drops a segment between a reader's look into the catalogue and its opening of the file."""
    opening = Segment.open
    with opened(folder, SMALL) as pool, opened(folder, fills=False) as reader:
        pool.add(entries([1, 2]))
        beside: list[int] = []

        def slow(path: Path, number: int, nbytes: int) -> Segment:
            if not beside:
                beside.append(number)
                code = "import sys; from pathlib import Path; from shared_pool_tools import entries, open_pool\n"
                code += f"pool = open_pool(Path({str(folder)!r}), {SMALL})\n"
                code += "for n in range(10):\n    pool.add(entries([10 + n, 50 + n]))\n"
                subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)
            return opening(path, number, nbytes)

        monkeypatch.setattr(Segment, "open", slow)
        assert outcome(reader.news) == "fine"
        assert beside
        news = reader.news()
        pool.news()
        assert state_of(reader) == state_of(pool)
        assert not news.removed or set(news.removed).isdisjoint(reader.records)


def test_after_an_error_a_pool_learns_what_it_missed_and_deletes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that cannot be opened for a moment (no descriptors are left) costs no record, neither here nor there."""
    opening, broken = Segment.open, True

    def fails(path: Path, number: int, nbytes: int) -> Segment:
        if broken:
            raise DatabaseCorruptError(f"{path} cannot be read: Too many open files.", "later")
        return opening(path, number, nbytes)

    with opened(folder) as one, opened(folder) as two:
        one.add(entries(range(20)))
        monkeypatch.setattr(Segment, "open", fails)
        assert outcome(two.news) == "DatabaseCorruptError"
        broken = False
        assert len(two.news().added) == 20
        two.add(entries(range(100, 120)))
        one.news()
        assert state_of(one) == state_of(two) == read_state(folder)
        assert len(state_of(one)) == 40


def test_a_failed_batch_hides_no_news_of_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filler that the disk refused learns the next batch of another process."""
    with opened(folder) as one, opened(folder) as two:
        one.add(entries([1]))
        two.news()
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", _refuse(errno.ENOSPC))
            with pytest.raises(StorageFullError):
                two.add(entries([2]))
        one.add(entries([3]))
        assert [int(kept.tokens[0]) for kept in two.news().added] == [3]


# -- removing for good


def test_nothing_is_left_of_what_was_removed_and_scrubbed(folder: Path) -> None:
    """Neither its bytes nor its note nor its tokens are in any file."""
    secret = tokens_of(987654, 3000, 200)
    body, note = body_of(secret), b"a note that no process may read"
    parts = [body.tobytes()[at : at + 16] for at in range(0, 2900, 100)] + [note, secret.tobytes()[8:40]]
    with opened(folder) as pool:
        pool.add([*entries(range(3)), Entry(secret, body, note), *entries(range(10, 40))])
        everything = b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())
        assert all(part in everything for part in parts), "the test does not see what it looks for"
        pool.remove([3])
        pool.scrub()
        assert 3 not in pool.records
        assert len(state_of(pool)) == 33
    left = {
        (name, file.name)
        for file in folder.rglob("*")
        if file.is_file()
        for name, found in (("body", parts[:-2]), ("note", parts[-2:-1]), ("tokens", parts[-1:]))
        if any(part in file.read_bytes() for part in found)
    }
    assert left == set()
    assert len(read_state(folder)) == 33
    check_files(folder)


def test_removing_leaves_the_other_segments_alone(folder: Path) -> None:
    """Only what lies beside a removed record is written anew."""
    with opened(folder) as pool:
        pool.add(entries(range(20)))
        before = {number: kept.segment.number for number, kept in pool.records.items()}
        assert pool.remove([0, 777]).removed == [0]
        moved = {number for number, kept in pool.records.items() if kept.segment.number != before[number]}
        assert moved == {number for number in before if before[number] == before[0]} - {0}
        assert len(state_of(pool)) == 19
    assert len(read_state(folder)) == 19
    check_files(folder)


# -- disks that refuse


def _refuse(code: int) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return call


class _Fails:
    """From the at-th on, `times` calls that change a file fail."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, code: int, times: int) -> None:
        self.calls, self.failed = 0, 0

        def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                self.calls += 1
                if at < self.calls <= at + times:
                    self.failed += 1
                    raise OSError(code, os.strerror(code))
                return real(*arguments, **options)

            return call

        for name in ("pwrite", "posix_fallocate", "fdatasync", "fsync"):
            patch.setattr(os, name, wrapped(getattr(os, name)))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_a_disk_that_fails_at_any_call_costs_only_its_own_batch(code: int) -> None:
    """Every call in turn: an error by name, what was published whole, no file left, and the same pool goes on."""
    with memory_directory() as parent:
        expected = states(parent / "straight", PLAIN)
        at = 0
        while True:
            path = parent / f"pool{at}"
            with opened(path, SMALL) as pool, pytest.MonkeyPatch.context() as patch:
                disk_ = _Fails(patch, at, code, 1)
                told, number = [], 0
                while number < len(PLAIN):
                    before = state_of(pool)
                    seen = outcome(lambda: PLAIN[number](pool))  # noqa: B023
                    if seen == "fine":
                        number += 1
                        continue
                    told.append(seen)
                    assert state_of(pool) == before == read_state(path) == expected[number], at
                    check_files(path)
                assert state_of(pool) == read_state(path) == expected[-1], at
                check_files(path)
            if not disk_.failed:
                break
            assert told == ["StorageFullError" if code == errno.ENOSPC else "DatabaseError"], at
            at += 1
        assert at > 40


def test_a_really_full_disk_costs_only_what_was_not_published(tmp_path: Path) -> None:
    """A small tmpfs: segments until it is full, then the catalogue: named errors; with more room the pool goes on."""
    tmpfs = need_tmpfs(tmp_path)

    def write() -> None:
        tmpfs.mount("size=600k")
        path = tmp_path / "pool"
        with opened(path, 8 << 20) as pool:
            for batch in range(1000):
                seen = outcome(lambda: pool.add(entries(range(2 * batch, 2 * batch + 2), 200)))  # noqa: B023
                if seen != "fine":
                    break
            assert seen == "StorageFullError", seen
            before = state_of(pool)
            assert len(before) == 2 * batch > 0
            check_files(path)
            for size in (600, 1400):
                tmpfs.mount(f"size={size}k", REMOUNT)
                for again in range(3):
                    outcome(lambda: pool.add(entries(range(5000 + 100 * again, 5040 + 100 * again))))  # noqa: B023
                    assert {n: one for n, one in state_of(pool).items() if n in before} == before
                    check_files(path)
            tmpfs.mount("size=8m", REMOUNT)
            pool.add(entries([7000]))
            assert 7000 in state_of(pool).values()
            assert read_state(path) == state_of(pool)

    assert in_child(write, first=tmpfs.unshare) == 0


def test_a_catalogue_that_finds_no_room_costs_only_its_own_batch(tmp_path: Path) -> None:
    """The disk is full when LMDB commits, segments had room: no file of the batch is left, and the pool goes on."""
    tmpfs = need_tmpfs(tmp_path)

    def write() -> None:
        tmpfs.mount("size=2m")
        path, filler = tmp_path / "pool", tmp_path / "filler"
        with opened(path, 1 << 20) as pool:
            pool.add(entries(range(2)))
            before = state_of(pool)
            long = [entry(100 + n, 100, 30000) for n in range(8)]  # its tokens take a megabyte of the catalogue
            room = os.statvfs(tmp_path)
            filler.write_bytes(bytes(room.f_bavail * room.f_frsize - (200 << 10)))
            assert outcome(lambda: pool.add(long)) == "StorageFullError"
            assert state_of(pool) == before == read_state(path)
            check_files(path)
            filler.unlink()
            pool.add(long)
            assert len(state_of(pool)) == 10
            assert read_state(path) == state_of(pool)

    assert in_child(write, first=tmpfs.unshare) == 0


def test_a_folder_that_may_not_be_written_is_read(tmp_path: Path) -> None:
    """On a read-only mount: a reader reads, uses are not counted, and a filler is refused by name."""
    tmpfs = need_tmpfs(tmp_path)

    def read() -> None:
        tmpfs.mount("size=4m")
        path = tmp_path / "pool"
        with opened(path) as pool:
            pool.add(entries(range(5)))
        tmpfs.mount("", REMOUNT | READ_ONLY)
        with opened(path, fills=False) as pool:
            assert len(state_of(pool)) == 5
            kept = pool.records[0]
            kept.segment.hit(kept.place)
            assert kept.hits == 0
            assert not pool.news()
            assert outcome(lambda: pool.add(entries([9]))) == "DatabaseError"
        assert outcome(lambda: open_pool(path).add(entries([9]))) == "DatabaseError"
        assert outcome(lambda: open_pool(tmp_path / "other")) == "DatabaseError"

    assert in_child(read, first=tmpfs.unshare) == 0


def test_a_reader_changes_nothing(folder: Path) -> None:
    with opened(folder) as pool:
        pool.add(entries(range(5)))
    with opened(folder, fills=False) as pool:
        before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file() and file.name != "lock.mdb"}
        changes: list[Callable[[], object]] = [lambda: pool.add(entries([9])), lambda: pool.remove([0]), pool.rewrite]
        for change in changes:
            with pytest.raises(DatabaseError, match="read only"):
                change()
        pool.news()
        assert len(state_of(pool)) == 5
        assert {file: file.read_bytes() for file in before} == before


def test_a_folder_that_is_no_pool_is_outcome(folder: Path) -> None:
    with pytest.raises(DatabaseNotFoundError):
        open_pool(folder, fills=False)
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(DatabaseNotFoundError):
        open_pool(folder, fills=False)
    assert [file.name for file in folder.iterdir()] == ["notes.txt"]


# -- the lease


def _hold(path: Path, ready: Path) -> None:
    fd = os.open(path / LEASE, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    ready.touch()
    signal.pause()


def _wait_for(file: Path) -> None:
    until = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < until, f"{file.name} did not come"
        time.sleep(0.002)


def test_a_lease_that_is_held_is_an_error_until_its_holder_dies(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_pool, "PATIENCE", 0.05)
    open_pool(folder).close()
    ready = folder.parent / "ready"
    holder = start_child(lambda: _hold(folder, ready))
    _wait_for(ready)
    with opened(folder) as pool:
        with pytest.raises(DatabaseLockedError, match="being filled by another process"):
            pool.add(entries([1]))
        assert not pool.news()
        os.kill(holder, signal.SIGKILL)
        end_of(holder)
        pool.add(entries([2]))
        assert state_of(pool) == read_state(folder) == {0: 2}


def test_two_fillers_whose_lock_file_was_deleted_do_not_overwrite_each_other(folder: Path) -> None:
    """A filler is in the middle of a batch; the file of its lease goes; another adds: both batches are there."""
    open_pool(folder).close()
    ready = folder.parent / "ready"

    def slow() -> None:
        store = SharedPool._store

        def stored(*arguments: Any) -> None:
            ready.touch()
            time.sleep(0.2)
            store(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SharedPool, "_store", stored)
            with opened(folder) as pool:
                pool.add(entries([1, 2, 3]))

    other = start_child(slow)
    _wait_for(ready)
    (folder / LEASE).unlink()
    with opened(folder) as pool:
        pool.add(entries([4, 5]))
        assert end_of(other) == 0
        pool.news()
        assert sorted(state_of(pool).values()) == [1, 2, 3, 4, 5]
        assert read_state(folder) == state_of(pool)
    check_files(folder)


# -- one process


def test_two_pools_in_a_process_are_one_folder_and_closing_one_leaves_the_other(folder: Path) -> None:
    """LMDB may be opened only once in a process: under another name of the folder too."""
    one = open_pool(folder)
    link = folder.parent / "link"
    link.symlink_to(folder)
    two = open_pool(link)
    one.add(entries([1]))
    assert len(two.news().added) == 1
    one.close()
    two.add(entries([2]))
    assert state_of(two) == {0: 1, 1: 2}
    two.close()
    assert list(read_state(folder).values()) == [1, 2]


def test_threads_that_fill_through_two_pools_lose_nothing(folder: Path) -> None:
    wrong: list[BaseException] = []

    def work(pool: SharedPool, first: int) -> None:
        try:
            for number in range(first, first + 40):
                pool.add(entries([number], 500))
                pool.news()
        except BaseException as error:
            wrong.append(error)

    with opened(folder) as one, opened(folder) as two:
        threads = [threading.Thread(target=work, args=(pool, 100 * n)) for n, pool in enumerate([one, one, two])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        one.news()
        two.news()
        assert state_of(one) == state_of(two)
        assert sorted(state_of(one).values()) == sorted(100 * n + k for n in range(3) for k in range(40))


def test_a_pool_that_was_closed_harms_nothing_that_was_published(folder: Path) -> None:
    """What a thread does that goes on after `close` (add, news, close again) costs no record."""
    pool = open_pool(folder)
    pool.add(entries(range(20)))
    pool.close()
    outcome(pool.news)
    outcome(lambda: pool.add(entries(range(100, 120))))
    pool.close()
    pool.close()
    assert [number for number in read_state(folder) if number < 20] == list(range(20))


def test_a_closed_pool_gives_files_and_mappings_back(folder: Path) -> None:
    def held() -> list[str]:
        names = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
        maps = Path("/proc/self/maps").read_text().split("\n")
        return [name for name in [*names, *maps] if str(folder) in name]

    with opened(folder, SMALL) as pool:
        pool.add(entries(range(30)))
        assert held()
    assert held() == []


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_a_pool_of_many_segments_fits_the_usual_limit_of_descriptors(folder: Path) -> None:
    """1024 files is what a process may usually open: a pool of 600 segments is filled and read."""

    def few(pool: Callable[[], object]) -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
        pool()

    def fill() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("attmemo.db.pool.LARGEST", 16 << 10)
            patch.setattr("attmemo.db.pool.MOST_SEGMENTS", 1 << 20)
            with opened(folder, 64 << 20) as pool:
                pool.add(entries(range(1200)))
                assert len(files(folder)) == 600
                assert len(state_of(pool)) == 1200

    assert in_child(lambda: few(fill)) == 0
    assert in_child(lambda: few(lambda: read_state(folder))) == 0


# -- fork


FORKED = r"""
import os, traceback
from pathlib import Path
from shared_pool_tools import entries, open_pool, read_state, state_of

folder = Path(path)
pool = open_pool(folder)
pool.add(entries([1, 2]))
pids = []
for child in range(2):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            pool.leave_to_parent()
            assert {0, 1} <= state_of(pool).keys()
            for number in range(10):
                pool.add(entries([100 * (child + 1) + number]))
                pool.news()
            assert len(state_of(pool)) >= 12
            pool.close()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    pids.append(pid)
for number in range(10):
    pool.add(entries([1000 + number]))
ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
pool.news()
result = [ends, sorted(state_of(pool).values()), sorted(read_state(folder).values())]
"""


def test_a_forked_child_and_its_parent_both_fill(folder: Path) -> None:
    found = run_child(FORKED, path=str(folder)).result
    expected = sorted([1, 2, *(base + number for base in (100, 200, 1000) for number in range(10))])
    assert found == [[0, 0], expected, expected]


LEASE_FORKED = r"""
import os, signal, time
from pathlib import Path
from attmemo.db.shared_pool import SharedPool
from shared_pool_tools import entries, open_pool, read_state, state_of

folder, pids = Path(path), []
pool = open_pool(folder)
store = SharedPool._store

def stored(*arguments):
    pid = os.fork()  # as another thread would, that knows nothing of the pool
    if pid == 0:
        signal.pause()
    pids.append(pid)
    store(*arguments)

SharedPool._store = stored
pool.add(entries([1]))
SharedPool._store = store
try:
    pool.add(entries([2]))
    result = sorted(state_of(pool).values())
finally:
    os.kill(pids[0], signal.SIGKILL)
"""


def test_a_child_that_was_forked_during_a_batch_does_not_keep_the_lease(folder: Path) -> None:
    """A server forks while its filler writes: parent and others go on filling as long as the child lives."""
    assert run_child(LEASE_FORKED, path=str(folder)).result == [1, 2]


INSIDE_FORKED = r"""
import os, signal, threading, time, traceback
from pathlib import Path
os.register_at_fork(after_in_child=lambda: signal.alarm(10))  # before attmemo's own: these may hang
from shared_pool_tools import entries, open_pool, read_state, state_of

folder = Path(path)
open_pool(folder).add(entries([1]))
other = os.fork()
if other == 0:  # another process writes for a second
    try:
        with open_pool(folder)._environment().begin(write=True):
            (folder / "entered").touch()
            time.sleep(1.0)
    finally:
        os._exit(0)
while not (folder / "entered").exists():
    time.sleep(0.01)
pool = open_pool(folder)
thread = threading.Thread(target=lambda: pool.add(entries([2])))
thread.start()  # waits inside of LMDB
time.sleep(0.2)
pid = os.fork()
if pid == 0:
    code = 1
    try:
        pool.leave_to_parent()
        pool.news()
        pool.add(entries([3]))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
thread.join()
os.waitpid(other, 0)
end = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
pool.news()
result = [end, sorted(state_of(pool).values()), sorted(read_state(folder).values())]
"""


def test_a_child_that_was_forked_while_a_thread_was_inside_of_lmdb_does_not_hang(folder: Path) -> None:
    """The child of a server whose filler is committing: it learns and adds, and so does the parent."""
    assert run_child(INSIDE_FORKED, path=str(folder)).result == [0, [1, 2, 3], [1, 2, 3]]


LEARNING_FORKED = r"""
import os, traceback
from pathlib import Path
from attmemo.db.shared_pool import SharedPool
from shared_pool_tools import entries, open_pool, read_state, state_of

folder, ends = Path(path), []
one, two = open_pool(folder), open_pool(folder)
one.add(entries([1]))
two.news()
one.add(entries(range(10, 20)))
reading = SharedPool._read_segments

def read(pool, *arguments):
    SharedPool._read_segments = reading
    pid = os.fork()  # as another thread would
    if pid == 0:
        code = 1
        try:
            pool.leave_to_parent()
            pool.add(entries(range(100, 110)))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    ends.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return reading(pool, *arguments)

SharedPool._read_segments = read
two.news()
two.news()
result = [ends, sorted(state_of(two).values()), sorted(read_state(folder).values())]
"""


def test_a_child_that_was_forked_while_its_parent_learned_deletes_nothing(folder: Path) -> None:
    expected = [1, *range(10, 20), *range(100, 110)]
    assert run_child(LEARNING_FORKED, path=str(folder)).result == [[0], expected, expected]


# -- damage


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
    monkeypatch.setattr("attmemo.db.filling.VERSION", 2)
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


def test_a_segment_that_is_cut_is_outcome(filled: Path) -> None:
    """At any length, before it is opened: an error by name and no signal, and the other files stay."""
    file = files(filled)[1]
    whole = file.read_bytes()
    names = {file.name for file in files(filled)}

    def cut() -> None:
        for size in (0, 1, 39, 4096, 8192, 8193, len(whole) - 4096, len(whole) - 1):
            os.truncate(file, size)
            pool = open_pool(filled)
            assert outcome(pool.news) == "DatabaseTruncatedError", size
            outcome(lambda: pool.add(entries(range(900, 910))))  # noqa: B023
            pool.close()
            assert names <= {file.name for file in files(filled)}
            file.write_bytes(whole)

    assert in_child(cut) == 0
    assert set(range(10, 13)) <= set(read_state(filled).values())


def test_a_segment_that_is_missing_is_refused_and_the_others_stay(filled: Path) -> None:
    file = files(filled)[1]
    file.rename(filled.parent / "away")
    names = {file.name for file in files(filled)}
    pool = open_pool(filled)
    assert outcome(pool.news) == "DatabaseCorruptError"
    outcome(lambda: pool.add(entries(range(900, 910))))
    pool.close()
    assert names <= {file.name for file in files(filled)}


@pytest.mark.parametrize("size", [0, 4096, 9000])
def test_a_segment_cut_under_an_open_pool_is_an_error_and_no_signal(folder: Path, size: int) -> None:
    """Reading says so; a filler that must carry its records, or drop it, is not ended."""

    def cut() -> None:
        with opened(folder, SMALL) as pool:
            pool.add(entries([1, 2]))
            for kept in pool.records.values():
                kept.segment.hit(kept.place)
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

    def use() -> None:
        with opened(filled) as pool:
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
            seen.append(outcome(lambda: _with(f"trial {trial}", lambda: _use_of(copy, use, filled))))  # noqa: B023
            shutil.rmtree(copy)
        assert {"fine", "DatabaseCorruptError"} <= set(seen) <= {"fine", "DatabaseCorruptError", "DatabaseError"}

    def _use_of(copy: Path, work: Callable[[], None], original: Path) -> None:
        nonlocal filled
        filled = copy
        try:
            work()
        finally:
            filled = original

    assert in_child(damage) == 0


def _with(name: str, work: Callable[[], None]) -> None:
    try:
        work()
    except AttmemoError:
        raise
    except BaseException as error:
        error.add_note(name)
        raise


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
                _wait_for(go)
                assert len(state_of(pool)) == 40

        child = start_child(anew)
        _wait_for(ready)
        for batch in range(20):
            outcome(lambda: old.add(entries(range(100 + 2 * batch, 102 + 2 * batch))))  # noqa: B023
        go.touch()
        assert end_of(child) == 0
    assert in_child(lambda: _exactly(folder, range(1000, 1040))) == 0


def _exactly(path: Path, identities: range) -> None:
    assert list(read_state(path).values()) == list(identities)


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
