"""A pool in a folder: what is added stays, what is removed goes, and readers learn of both."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from databases import MODEL
from db_tools import outcome
from pools import (
    SMALL,
    TOOLS,
    body_of,
    check_files,
    disk,
    entries,
    entry,
    files,
    hit,
    is_right,
    opened,
    read_state,
    refuse,
    state_of,
    tokens_of,
)

from attmemo.db.pools import shared_pool
from attmemo.db.pools.pool import Entry, Pool
from attmemo.db.pools.segment import Segment
from attmemo.errors import DatabaseCorruptError, StorageFullError

# -- what is kept


def test_a_record_is_as_it_was_added_after_it_is_opened_again(folder: Path) -> None:
    """Tokens, body, note, number, time and uses; and numbers go on."""
    before = time.time()
    with opened(folder) as pool:
        news = pool.add([entry(1), entry(2, 1), entry(3, 0), Entry(tokens_of(4, 9), body_of(tokens_of(4, 9)))])
        assert [kept.number for kept in news.added] == [0, 1, 2, 3]
        assert news.removed == []
        for _ in range(3):
            hit(pool.records[1])
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
            hit(pool.records[0])
        pool.rewrite()
        assert [pool.records[number].hits for number in (0, 1)] == [5, 0]
        hit(pool.records[0])
    with opened(folder) as pool:
        assert [pool.records[number].hits for number in (0, 1)] == [6, 0]


@pytest.mark.parametrize("max_bytes", [SMALL // 2, SMALL, 200_000, 1 << 20])
def test_a_pool_stays_within_its_bound_whatever_comes(folder: Path, max_bytes: int) -> None:
    """Random sizes and batches, uses, removals: the bound holds, the newest is there, a reader agrees."""
    generator = random.Random(max_bytes)
    with opened(folder, max_bytes) as pool, opened(folder, fills=False) as reader:
        memory = Pool(max_bytes)
        for round_ in range(120):
            for kept in list(pool.records.values()):
                if generator.random() < 0.3:
                    hit(kept)
                    hit(memory.records[kept.number])
            largest = generator.choice([64, 4000, max_bytes // 4, max_bytes])
            new = [entry(100 * round_ + n, generator.randrange(largest)) for n in range(generator.randrange(4))]
            if generator.random() < 0.1 and pool.records:
                gone = generator.sample(sorted(pool.records), 1)
                pool.remove(gone)
                memory.remove(gone)
            news, other = pool.add(new), memory.add(new)
            assert [kept.number for kept in news.added] == [kept.number for kept in other.added]
            assert sorted(news.removed) == sorted(other.removed)
            assert disk(folder) == pool.nbytes <= max_bytes
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
            hit(reader.records[number])
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
                    hit(kept)
            pool.add(entries([100 + batch]))
        news = reader.news()
        now = state_of(pool)
        assert 1 in now
        assert state_of(reader) == now
        assert sorted(kept.number for kept in news.added) == sorted(set(now) - {0, 1, 2})
        assert sorted(news.removed) == sorted({0, 1, 2} - set(now))


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
            hit(kept)
            kept.segment.check_whole()


def test_a_segment_that_goes_while_a_reader_learns_costs_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The filler drops a segment between a reader's look into the catalogue and its opening of the file."""
    opening = Segment.open
    with opened(folder, SMALL) as pool, opened(folder, fills=False) as reader:
        pool.add(entries([1, 2]))
        beside: list[int] = []

        def slow(path: Path, number: int, nbytes: int, *, marked: bool) -> Segment:
            if not beside:
                beside.append(number)
                code = "import sys; from pathlib import Path; from pools import entries, open_pool\n"
                code += f"pool = open_pool(Path({str(folder)!r}), {SMALL})\n"
                code += "for n in range(10):\n    pool.add(entries([10 + n, 50 + n]))\n"
                subprocess.run([sys.executable, "-c", code], cwd=TOOLS, check=True)
            return opening(path, number, nbytes, marked=marked)

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

    def fails(path: Path, number: int, nbytes: int, *, marked: bool) -> Segment:
        if broken:
            raise DatabaseCorruptError(f"{path} cannot be read: Too many open files.", "later")
        return opening(path, number, nbytes, marked=marked)

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
            patch.setattr(os, "pwrite", refuse(errno.ENOSPC))
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
