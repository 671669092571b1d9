"""The tests of a shared pool that take minutes: the functions of the quick ones, with larger numbers."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from children import end_of, in_child, start_child
from databases import memory_directory
from pools import (
    check_files,
    disk,
    entry,
    fill_until_killed,
    hit,
    is_right,
    killed_fillers,
    many_fillers,
    opened,
    read_state,
    state_of,
    tokens_of,
)

from attmemo.db.pools.pool import Entry

pytestmark = pytest.mark.slow

SECONDS = float(os.environ.get("ATTMEMO_TEST_SECONDS", "120"))
"""How long processes fill at once."""


def test_fillers_killed_five_hundred_times_lose_nothing_published() -> None:
    assert killed_fillers(500, seed=17) > 1000


def test_processes_that_fill_for_minutes_agree() -> None:
    print(many_fillers(4, SECONDS, max_bytes=8 << 20, most=40_000))


def _held() -> tuple[int, int]:
    """Descriptors and mappings of this process."""
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("\n")


def test_records_that_never_repeat_leave_disk_descriptors_and_mappings_flat() -> None:
    """60,000 records of some kilobytes through a pool of 32 MiB, with a reader beside: nothing grows."""
    bound = 32 << 20
    seen: list[tuple[int, int, int, int]] = []
    with memory_directory() as folder:
        path = folder / "pool"
        with opened(path, bound) as pool, opened(path, fills=False) as reader:
            for batch in range(6000):
                pool.add([entry(10 * batch + n, 1000 + (batch * 7919 + n * 104729) % 14000) for n in range(10)])
                if batch % 10 == 9:
                    reader.news()
                    for kept in list(reader.records.values())[:: max(1, len(reader) // 5)]:
                        assert is_right(kept)
                        hit(kept)
                if batch % 200 == 199:
                    catalogue = (path / "catalogue" / "data.mdb").stat().st_size
                    seen.append((disk(path), catalogue, *_held()))
            reader.news()
            assert state_of(reader) == state_of(pool)
            assert max(pool.records) == 59_999
        half = len(seen) // 2
        assert max(size for size, *_ in seen) <= bound
        for column, slack in ((1, 1.1), (2, 1.05), (3, 1.05)):  # the first half fills and settles
            early, late = (max(row[column] for row in rows) for rows in (seen[2:half], seen[half:]))
            assert late <= slack * early + 8, (column, early, late)
        check_files(path)


def test_a_hundred_thousand_records_open_in_bounded_memory() -> None:
    """All of them are there, their tokens too; what opening takes is a small multiple of what they are."""
    with memory_directory() as folder:
        path, count = folder / "pool", 100_000
        one = np.arange(64, dtype=np.uint8)
        with opened(path, 1 << 30) as pool:
            for first in range(0, count, 1000):
                pool.add([Entry(tokens_of(n, 64, 16), one, b"note") for n in range(first, first + 1000)])
            assert len(pool) == count
        catalogue = (path / "catalogue" / "data.mdb").stat().st_size

        def look() -> None:
            before, began = _resident(), time.perf_counter()
            with opened(path, fills=False) as pool:
                took, grown = time.perf_counter() - began, _resident() - before
                print(f"{len(pool)} records: {took:.2f} s, {grown >> 20} MiB, catalogue {catalogue >> 20} MiB")
                assert len(pool) == count
                assert sorted(int(kept.tokens[0]) for kept in pool.records.values()) == list(range(count))
                assert grown < 4 * catalogue + count * 1500
                assert all(kept.is_sound for kept in list(pool.records.values())[::97])

        assert in_child(look, seconds=300) == 0


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_pool_opened_beside_fillers_is_whole_each_time() -> None:
    """Opened two hundred times while another process fills: the first look is never an error."""
    with memory_directory() as folder:
        path, told = folder / "pool", folder / "told"
        with opened(path, 512 << 10):
            pass
        child = start_child(lambda: fill_until_killed(path, told, 3, 512 << 10), seconds=300)
        try:
            highest = 0
            for _ in range(200):
                highest = max(read_state(path), default=highest)
        finally:
            os.kill(child, 9)
            end_of(child)
        assert highest > 100
