"""Records that are written before they are published: what others see, and what a kill or a full disk leaves."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from children import end_of, in_child, start_child
from pools import MODEL, check_files, entries, entry, is_right, open_pool, opened, read_state, serves, state_of
from rows_tools import fetched, find, layout, numbers, offers_of, record

from attmemo.db.pools.filling import Filling
from attmemo.db.pools.pool import Entry, Kept, Pool
from attmemo.db.pools.segment import PIECE, rounded
from attmemo.db.pools.shared_pool import SharedPool
from attmemo.errors import DatabaseError, StorageFullError
from attmemo.rows import filler
from attmemo.rows import live_store as growing
from attmemo.rows.live_store import GrowingRows
from attmemo.rows.throttle import Pace

EACH = rounded(3000)


def write(pool: SharedPool, *identities: int) -> list[Kept]:
    """Write ahead; there is room."""
    found = [pool.write(one) for one in entries(identities)]
    assert None not in found
    return [kept for kept in found if kept is not None]


def begun(pool: SharedPool, identity: int = 0) -> SharedPool:
    """Let a pool hold room: the first record is added, since there is none."""
    assert pool.write(entry(identity)) is None
    pool.add([entry(identity)])
    return pool


def fail(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class TestPool:
    def test_what_is_written_is_right_at_once_and_there_for_others_once_published(self, folder: Path) -> None:
        with opened(folder) as pool, opened(folder, fills=False) as other:
            written = write(begun(pool), 1, 2)
            assert all(serves(kept) and is_right(kept) for kept in written)
            assert len(pool) == 1
            assert len(other.news().added) == 1
            news = pool.add(entries([3]))
            assert [int(kept.tokens[0]) for kept in news.added] == [1, 2, 3]
            assert [kept.number for kept in news.added] == [1, 2, 3]
            assert [(kept.offset, kept.place) for kept in news.added[:2]] == [(k.offset, k.place) for k in written]
            assert [int(kept.tokens[0]) for kept in other.news().added] == [1, 2, 3]
            assert state_of(pool) == state_of(other) == read_state(folder)

    def test_a_record_is_written_in_pieces_and_is_there_with_the_last_one(self, folder: Path) -> None:
        pool, paused = SharedPool(folder, 1 << 26, Filling.of(MODEL, "float32")), list[int]()
        large = Entry(np.arange(9, dtype=np.int32), np.random.default_rng(0).integers(0, 256, 5 * PIECE + 1, np.uint8))
        assert pool.write(large) is None
        pool.add([large], lambda: paused.append(0))
        assert not paused, "others wait for the lease"
        (file,) = (folder / "segments").iterdir()
        kept = pool.write(large, lambda: paused.append(file.read_bytes().count(large.body.tobytes())))
        assert kept is not None
        assert paused == [1] * 5 + [2], "beside the record before"
        assert kept.is_sound
        assert np.array_equal(kept.body, large.body)
        pool.add([])
        assert len(pool) == 2
        pool.close()

    def test_two_that_write_ahead_do_not_write_over_each_other(self, folder: Path) -> None:
        with opened(folder) as one, opened(folder) as other:
            begun(one)
            begun(other, 1)
            for number in range(10, 60, 4):
                for pool, first in ((one, number), (other, number + 2)):
                    rest = [new for new in entries([first, first + 1]) if pool.write(new) is None]
                    if rest:
                        pool.add(rest)
            one.add([])
            other.add([])
            one.news()
            assert sorted(state_of(one).values()) == [0, 1, *range(10, 62)]
            assert state_of(one) == state_of(other)

    def test_room_that_was_not_used_is_used_by_the_next(self, folder: Path) -> None:
        with opened(folder) as pool:
            write(begun(pool), 1)
        with opened(folder) as pool:
            last = pool.records[1]
            assert [kept.offset for kept in pool.add(entries([2])).added] == [last.offset + EACH]
            assert list(state_of(pool).values()) == [0, 1, 2]

    def test_closing_publishes_what_was_written(self, folder: Path) -> None:
        with opened(folder) as pool:
            write(begun(pool), 1, 2)
        assert list(read_state(folder).values()) == [0, 1, 2]
        check_files(folder)

    def test_room_of_a_process_that_was_killed_is_used_again_once_no_other_fills(self, folder: Path) -> None:
        def fill() -> None:
            pool = open_pool(folder)
            pool.news()
            write(begun(pool), 1, 2)
            os.kill(os.getpid(), signal.SIGKILL)

        open_pool(folder).close()
        assert in_child(fill, quiet=True) == -signal.SIGKILL
        with opened(folder) as pool:
            first = next(iter(pool.records.values()))
            assert [kept.offset for kept in pool.add(entries([3])).added] == [first.offset + EACH]
            assert list(state_of(pool).values()) == [0, 3]

    def test_room_of_a_process_that_lives_is_not_used_by_another(self, folder: Path) -> None:
        def fill() -> None:
            pool = open_pool(folder)
            pool.news()
            write(begun(pool), 1)
            (folder / "written").touch()
            while not (folder / "go").exists():
                time.sleep(0.005)
            pool.add([])
            pool.close()

        open_pool(folder).close()
        child = start_child(fill)
        while not (folder / "written").exists():
            time.sleep(0.005)
        with opened(folder) as pool:
            pool.add(entries([2]))
            (folder / "go").touch()
            assert end_of(child) == 0
            pool.news()
            assert sorted(state_of(pool).values()) == [0, 1, 2]

    def test_what_went_before_it_was_published_is_lost_and_nothing_else(self, folder: Path) -> None:
        bound = 64 << 10
        with opened(folder, bound) as slow, opened(folder, bound) as fast:
            (written,) = write(begun(slow), 1)
            for number in range(10, 60):
                fast.add(entries([number]))
            assert is_right(written)
            news = slow.add(entries([2]))
            assert 1 not in state_of(slow).values()
            assert 2 in [int(kept.tokens[0]) for kept in news.added]
            assert state_of(slow) == read_state(folder)
        check_files(folder)

    def test_a_batch_that_fails_loses_what_was_written_and_its_bytes_stay(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with opened(folder) as pool:
            written = write(begun(pool), 1, 2)
            with monkeypatch.context() as patch:
                patch.setattr(os, "fdatasync", fail)
                with pytest.raises(StorageFullError):
                    pool.add([])
            assert list(state_of(pool).values()) == [0]
            write(pool, 3)
            pool.add(entries([4]))
            assert all(is_right(kept) for kept in written)
            assert list(state_of(pool).values()) == list(read_state(folder).values()) == [0, 3, 4]

    def test_a_disk_that_refuses_a_write_is_an_error_by_name(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with opened(folder) as pool:
            begun(pool)
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwrite", fail)
                with pytest.raises(StorageFullError):
                    pool.write(entry(1))
            write(pool, 2)
            pool.add([])
            assert list(read_state(folder).values()) == [0, 2]

    def test_without_a_descriptor_to_spare_everything_is_added(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with opened(folder) as pool:
            monkeypatch.setattr("attmemo.db.pools.prewrite.Hold", fail)
            begun(pool)
            assert pool.write(entry(1)) is None
            pool.add(entries([1]))
            assert list(read_state(folder).values()) == [0, 1]

    def test_a_folder_made_anew_is_not_written_to(self, folder: Path) -> None:
        with opened(folder) as pool:
            begun(pool)
            folder.rename(folder.with_name("old"))
            with opened(folder) as new:
                new.add(entries([7, 8]))
                write(pool, 1)
                with pytest.raises(DatabaseError):
                    pool.add([])
                assert list(state_of(new).values()) == [7, 8]

    def test_a_forked_child_publishes_nothing_of_its_parent(self, folder: Path) -> None:
        with opened(folder, 16 << 20) as pool:
            write(begun(pool), 1)

            def child() -> None:
                pool.leave_to_parent()
                pool.news()
                assert list(state_of(pool).values()) == [0]
                begun(pool, 5)
                write(pool, 6)
                pool.close()

            assert in_child(child) == 0
            write(pool, 2)
            pool.add([])
            assert sorted(read_state(folder).values()) == [0, 1, 2, 5, 6]


def store_in(folder: Path, **options: bool) -> GrowingRows:
    return GrowingRows(open_pool(folder), layout(), **options)


def numbers_of(*stores: GrowingRows) -> list[list[bool]]:
    """Which of the first records each can find."""
    return [[bool(find(store, record(seed)[0])[0] >= 0) for seed in range(4)] for store in stores]


class TestStore:
    """Records of requests."""

    @pytest.fixture(autouse=True)
    def _by_hand(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is published unless a test flushes, and the thread works at once."""
        monkeypatch.setattr(growing, "GATHERED", 1e9)
        monkeypatch.setattr("attmemo.rows.throttle.Pace.share", 1.0)

    def offer(self, store: GrowingRows, seed: int) -> None:
        """Offer, and wait until it is found."""
        store.offer(offers_of(record(seed), notes=b"n"))
        until = time.monotonic() + 30
        while find(store, record(seed)[0])[0] < 0:
            assert time.monotonic() < until
            time.sleep(0.001)

    def begin(self, store: GrowingRows) -> None:
        self.offer(store, 0)
        assert store.flush()

    def test_a_record_serves_before_it_is_published(self, folder: Path) -> None:
        store = store_in(folder)
        self.begin(store)
        self.offer(store, 1)
        assert (len(store.pool), len(store)) == (1, 2)
        (own,) = find(store, record(1)[0])
        rows, last = fetched(store.fetch(numbers(own)), 0)
        assert torch.equal(rows, record(1)[1])
        assert torch.equal(last, record(1)[2])
        assert store.notes_of([int(own)]) == [b"n"]
        other = store_in(folder, fills=False)
        assert numbers_of(other) == [[True, False, False, False]]
        assert store.flush()
        assert other.flush()
        assert numbers_of(store, other) == 2 * [[True, True, False, False]]
        assert find(store, record(1)[0]) == [own]
        assert torch.equal(fetched(store.fetch(numbers(own)), 0)[0], record(1)[1])
        assert store.done == {"kept": 2}
        store.close()
        other.close()

    def test_what_is_written_is_not_written_again(self, folder: Path) -> None:
        store = store_in(folder)
        self.begin(store)
        self.offer(store, 1)
        store.offer(offers_of(record(1), record(2)))
        assert store.flush()
        assert store.done == {"kept": 3, growing.KNOWN: 1}
        store.close()

    def test_records_of_two_processes_serve_both(self, folder: Path) -> None:
        one, other = store_in(folder), store_in(folder)
        self.begin(one)
        self.offer(one, 1)
        self.offer(other, 2)
        assert other.flush()
        assert one.flush()
        assert other.flush()
        assert numbers_of(one, other) == 2 * [[True, True, True, False]]
        for store in (one, other):
            for seed in range(3):
                assert torch.equal(fetched(store.fetch(find(store, record(seed)[0])), 0)[0], record(seed)[1])
        one.close()
        other.close()

    def test_what_could_not_be_published_serves_no_more(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = store_in(folder)
        self.begin(store)
        self.offer(store, 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            assert store.flush()
        assert numbers_of(store) == [[True, False, False, False]]
        assert store.done == {"kept": 1, "StorageFullError": 1}
        assert [one.message for one in caplog.records if "new records are not kept" in one.message]
        self.offer(store, 1)
        assert store.flush()
        assert numbers_of(store) == [[True, True, False, False]]
        store.close()

    def test_what_went_before_it_was_published_serves_no_more(self, folder: Path) -> None:
        store = GrowingRows(open_pool(folder, 64 << 10), layout())
        self.begin(store)
        self.offer(store, 1)
        with opened(folder, 64 << 10) as fast:
            for number in range(10, 60):
                fast.add(entries([number]))
        assert store.flush()
        assert not numbers_of(store)[0][1]
        assert len(store) == len(store.pool)
        store.close()

    def test_a_forked_child_finds_what_was_published_and_its_own(self, folder: Path) -> None:
        store = store_in(folder)
        self.begin(store)
        self.offer(store, 1)

        def child() -> None:
            self.offer(store, 2)
            assert store.flush()
            assert numbers_of(store) == [[True, False, True, False]]
            store.close()

        assert in_child(child) == 0
        assert store.flush()
        assert numbers_of(store) == [[True, True, True, False]]
        for seed in range(3):
            assert torch.equal(fetched(store.fetch(find(store, record(seed)[0])), 0)[0], record(seed)[1])
        store.close()


def test_a_fork_while_a_record_is_half_written_leaves_both_processes_able_to_store(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(folder)
    store.offer(offers_of(record(0)))
    assert store.flush()
    monkeypatch.setattr(filler, "PIECE", 0.0)
    monkeypatch.setattr(Pace, "rest", lambda _, worked, __=0.0: 1e6 if worked else 0.0)
    with store._filler._changed:
        store._filler._rests_until = 0.0
    store.offer(offers_of(record(1)))
    until = time.monotonic() + 30
    while not store._filler._busy or store._filler._rest() < 1e5:
        assert time.monotonic() < until
        time.sleep(0.001)

    def child() -> None:
        store.offer(offers_of(record(2)))
        assert store.flush(30)
        assert numbers_of(store) == [[True, False, True, False]]
        store.close()

    assert in_child(child) == 0
    assert store.flush(30)
    assert numbers_of(store) == [[True, True, True, False]]
    store.close()


def test_a_store_rests_while_it_writes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, rested = store_in(folder), list[bool]()
    monkeypatch.setattr(store._filler, "breathe", lambda: rested.append(True))
    for seed in range(3):
        store.offer(offers_of(record(seed)))
        assert store.flush()
    assert len(rested) >= 2, "the first record is added in a transaction"
    store.close()
    in_memory = GrowingRows(Pool(1 << 20), layout())
    monkeypatch.setattr(in_memory._filler, "breathe", rested.clear)
    in_memory.offer(offers_of(record(0)))
    assert in_memory.flush()
    assert not rested
    in_memory.close()


def read_numbers(folder: Path) -> list[int]:
    with opened(folder, fills=False) as pool:
        assert all(kept.is_sound for kept in pool.records.values())
        return sorted(pool.records)


def test_what_was_written_is_published_soon_without_a_flush(folder: Path) -> None:
    store = store_in(folder)
    store.offer(offers_of(*map(record, range(3))))  # at once: after the first one alone the thread may rest for long
    until = time.monotonic() + 30
    while len(read_numbers(folder)) < 3:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert store.flush()  # they are counted behind the transaction
    assert store.done == {"kept": 3}
    store.close()
