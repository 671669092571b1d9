"""Fillers beside each other: a lease, threads, and processes that were forked."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from children import end_of, in_child, run_child, start_child
from db_tools import outcome
from pools import SMALL, check_files, entries, files, open_pool, opened, read_state, state_of, wait_for

from attmemo.db.pools import shared_pool
from attmemo.db.pools.fill_lock import LEASE
from attmemo.db.pools.shared_pool import SharedPool
from attmemo.errors import DatabaseLockedError

# -- the lease


def _hold(path: Path, ready: Path) -> None:
    fd = os.open(path / LEASE, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    ready.touch()
    signal.pause()


def test_a_lease_that_is_held_is_an_error_until_its_holder_dies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_pool, "PATIENCE", 0.05)
    open_pool(folder).close()
    ready = folder.parent / "ready"
    holder = start_child(lambda: _hold(folder, ready))
    wait_for(ready)
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
    wait_for(ready)
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


@pytest.mark.usefixtures("patient")
def test_threads_that_fill_through_two_pools_lose_nothing(folder: Path) -> None:
    def work(pool: SharedPool, first: int) -> None:
        for number in range(first, first + 40):
            pool.add(entries([number], 500))
            pool.news()

    with opened(folder) as one, opened(folder) as two:
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(work, (one, one, two), (0, 100, 200)))
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
            patch.setattr("attmemo.db.pools.pool.LARGEST", 16 << 10)
            patch.setattr("attmemo.db.pools.pool.MOST_SEGMENTS", 1 << 20)
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
from attmemo.db.pools import shared_pool
from pools import entries, open_pool, read_state, state_of

folder = Path(path)
shared_pool.PATIENCE = 60.0  # of three that fill without a pause
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
from attmemo.db.pools.shared_pool import SharedPool
from pools import entries, open_pool, read_state, state_of

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
os.register_at_fork(after_in_child=lambda: signal.alarm(60))  # before attmemo's own: these may hang
from attmemo.db.pools import shared_pool
from pools import entries, open_pool, read_state, state_of

folder = Path(path)
shared_pool.PATIENCE = 30.0  # of a child whose parent commits
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
from attmemo.db.pools.shared_pool import SharedPool
from pools import entries, open_pool, read_state, state_of

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
