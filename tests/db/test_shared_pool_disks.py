"""Disks that are full, fail or may not be written cost a pool no more than the batch at hand."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import in_child
from databases import memory_directory
from db_tools import READ_ONLY, REMOUNT, need_tmpfs, outcome
from pools import PLAIN, SMALL, check_files, entries, entry, hit, open_pool, opened, read_state, state_of, states

from attmemo.errors import DatabaseError, DatabaseNotFoundError


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
            hit(kept)
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
