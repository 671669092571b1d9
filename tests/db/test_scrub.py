"""What was forgotten is in no byte of the catalogue, nothing else is touched, and the catalogue stays as large."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from children import end_of, in_child, start_child
from databases import memory_directory
from db_tools import outcome
from db_tools import write_entries as write
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import entries, opened, read_beside, read_state, state_of, wait_for

from attmemo.db.lmdbfile import check_environment, unread
from attmemo.db.records import Entry


def contents(path: Path) -> list[tuple[bytes, bytes]]:
    with lmdb.open(str(path), map_size=1 << 28) as environment, environment.begin() as transaction:
        return [(bytes(key), bytes(value)) for key, value in transaction.cursor()]


def tokens(identity: int, length: int) -> Any:
    """Tokens of which any four tell the record."""
    return np.random.default_rng(identity).integers(1 << 20, 1 << 24, length).astype(np.int32)


def names(data: bytes, identity: int, length: int) -> bool:
    """Whether four of its tokens stand somewhere, those at any of ten places."""
    own = tokens(identity, length).tobytes()
    return any(own[at : at + 16] in data for at in range(0, max(len(own) - 15, 1), max(16, len(own) // 160 * 16)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    batches=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(0, 500)), min_size=1, max_size=6),
    nbytes=st.sampled_from([1, 17, 40, 401, 1999, 2033, 2050, 4096, 9000]),
)
def test_bytes_that_nothing_reads_can_be_written_over(batches: list[tuple[int, int, int]], nbytes: int) -> None:
    """Ones in place of zeros: what is stored stays, and the file can be written on."""
    with memory_directory() as folder:
        write(folder, batches, nbytes)
        file, before = folder / "data.mdb", contents(folder)
        data = bytearray(file.read_bytes())
        for begin, end in unread(file):
            data[begin:end] = b"\xff" * (end - begin)
        file.write_bytes(data)
        check_environment(file)
        assert contents(folder) == before
        write(folder, [(0, 300, 200)], nbytes)
        check_environment(file)


@pytest.mark.parametrize("length", [8, 40, 100, 300, 600])
def test_no_token_of_what_was_forgotten_is_left_and_the_catalogue_does_not_grow(folder: Path, length: int) -> None:
    """Also not beside entries in pages that are in use: a page that shrank keeps copies of what moved."""
    generator, file = random.Random(length), folder / "catalogue" / "data.mdb"
    with opened(folder) as pool:
        for start in range(0, 120, 10):
            bodies = [Entry(tokens(start + n, length), np.zeros(100, np.uint8)) for n in range(10)]
            pool.add(bodies)
    sizes, left = [], set(range(120))
    for count in (40, 1, 1, 1, 1, 20, 1, 1):
        gone = generator.sample(sorted(left), count)
        with opened(folder) as pool:
            pool.remove(gone)
            assert pool.needs_scrub
            pool.scrub()
            assert not pool.needs_scrub
        left -= set(gone)
        data = file.read_bytes()
        assert [one for one in range(120) if names(data, one, length)] == sorted(left)
        sizes.append(len(data))
    assert max(sizes[1:]) <= 1.2 * sizes[0], sizes
    check_environment(file)


@pytest.mark.usefixtures("patient")
def test_readers_beside_see_every_record_as_it_is(folder: Path) -> None:
    with opened(folder) as pool:
        pool.add(entries(range(30)))
        with read_beside(folder, 2):
            for batch in range(25):
                numbers = [kept.number for kept in pool.add(entries(range(100 + 4 * batch, 104 + 4 * batch))).added]
                pool.remove([numbers[0], min(pool.records)])
                pool.scrub()
        assert read_state(folder) == state_of(pool)


def test_a_reader_that_looks_at_removed_records_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it reads stays as it was; the scrub is still due, and is done once it has gone."""
    with opened(folder) as pool:
        pool.add([Entry(tokens(n, 500), np.zeros(100, np.uint8)) for n in range(10)])
    ready, go = folder.parent / "ready", folder.parent / "go"

    def look() -> None:
        catalogue = str(folder / "catalogue")
        with lmdb.open(catalogue, readonly=True) as environment, environment.begin() as transaction:
            before = [(bytes(key), bytes(value)) for key, value in transaction.cursor()]
            ready.touch()
            wait_for(go)
            assert [(bytes(key), bytes(value)) for key, value in transaction.cursor()] == before
            assert any(names(value, 3, 500) for _, value in before)

    reader = start_child(look)
    wait_for(ready)
    monkeypatch.setattr("attmemo.db.pools.shared_pool.PATIENCE", 0.05)
    with opened(folder) as pool:
        pool.remove([3])
        assert outcome(pool.scrub) == "DatabaseLockedError"
        assert pool.needs_scrub
        go.touch()
        assert end_of(reader) == 0
        pool.scrub()
        assert not pool.needs_scrub
    assert not names((folder / "catalogue" / "data.mdb").read_bytes(), 3, 500)


def test_killed_at_any_write_the_catalogue_is_whole_and_the_next_scrub_ends_it(folder: Path) -> None:
    with opened(folder) as pool:
        pool.add([Entry(tokens(n, 300), np.zeros(100, np.uint8)) for n in range(40)])
        pool.remove(range(0, 40, 3))
    expected = {n for n in range(40) if n % 3}
    calls = at = 0

    def kill() -> None:
        write_all, seen = os.pwrite, 0

        def call(*arguments: Any) -> int:
            nonlocal seen
            seen += 1
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return write_all(*arguments)

        with pytest.MonkeyPatch.context() as patch, opened(folder) as pool:
            patch.setattr(os, "pwrite", call)
            pool.scrub()

    while True:
        at = 1 + 3 * calls
        ended = in_child(kill)
        with opened(folder, fills=False) as pool:
            assert set(pool.records) == expected
            assert all(np.array_equal(kept.tokens, tokens(n, 300)) for n, kept in pool.records.items())
            assert pool.needs_scrub == (ended != 0)
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
        calls += 1
    assert calls > 3
    data = (folder / "catalogue" / "data.mdb").read_bytes()
    assert {n for n in range(40) if names(data, n, 300)} == expected


def test_a_scrub_needs_the_right_to_fill(folder: Path) -> None:
    with opened(folder) as pool:
        pool.add(entries([1]))
    with opened(folder, fills=False) as pool:
        assert outcome(pool.scrub) == "DatabaseError"
