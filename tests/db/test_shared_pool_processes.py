"""A shared pool whose processes are killed, lose power, or fill all at once: nothing published is lost or torn."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import run_child
from databases import memory_directory
from db_tools import killer_in
from pools import HISTORY, SMALL, State, killed_fillers, many_fillers, opened, read_state, state_of, states
from refused_calls import preloaded

from attmemo.db.pools.segment import Segment
from attmemo.db.pools.shared_pool import SEGMENTS

EVERYWHERE = r"""
import contextlib, ctypes, signal
from pathlib import Path
from children import end_of, start_child
from attmemo.errors import DatabaseError
from db_tools import killer_in
from pools import SMALL, check_files, go_on, opened, read_beside, read_state, states

shim, folder = ctypes.CDLL(killer), Path(folder)
expected = states(folder / "straight")
counted = folder / "counted"
result = {"kills": 0, "untold": 0, "calls": 0, "lmdb": 0}
for after in (0, 1, 2):
    at = 1
    while True:
        path, told = folder / f"pool-{after}-{at}", folder / f"told-{after}-{at}"
        if after == 2:
            with opened(path, SMALL):
                pass

        def fill():
            shim.arm(at, after, lmdb.encode())
            go_on(path, expected, told)
            calls, foreign = shim.count(), shim.count_foreign()
            counted.write_text(f"{calls} {foreign}")

        with read_beside(path) if after == 2 else contextlib.nullcontext():
            code = end_of(start_child(fill))
            if code == 0:
                break
            assert code == -signal.SIGKILL, (after, at, code)
            done = len(told.read_text()) if told.exists() else 0
            try:
                found = read_state(path)
            except DatabaseError:
                assert done == 0, "a filler has published, but the pool does not open"
                found = {}
            assert found in expected[done : done + 2], (after, at, done, found)
            with opened(path, SMALL) as pool:
                env = pool._environment()
                with env.begin() as transaction:
                    result["untold"] += transaction.id() < env.info()["last_txnid"]
                pool.add([])  # readers may learn only from the next writer what the last one published as it died
            go_on(path, expected)
            assert read_state(path) == expected[-1], (after, at)
            with opened(path, SMALL) as pool:
                pool.rewrite()  # makes a segment: what the dead have left is swept
        assert read_state(path) == expected[-1], (after, at)
        check_files(path)
        result["kills"] += 1
        at += stride if after < 2 else 1
result["calls"], result["lmdb"] = map(int, counted.read_text().split())
"""


def killed_everywhere(folder: Path, stride: int) -> dict[str, int]:
    """Kill a filler at every `stride`-th call that changes a file, LMDB's too: before it, and within or behind it.

    And behind every call, with a reader beside: a few of these are behind the page that publishes, before LMDB tells
    readers.
    """
    killer, lmdb = killer_in(folder)
    with memory_directory() as memory:
        found = run_child(
            EVERYWHERE,
            timeout=800,
            environment=preloaded(killer),
            killer=str(killer),
            folder=str(memory),
            lmdb=lmdb,
            stride=stride,
        ).result
    assert found["lmdb"] > 20, "LMDB's own calls were not seen"
    assert found["calls"] > found["lmdb"] + 60
    assert found["kills"] >= 2 * (found["calls"] - 4 * stride) // stride - 20 + found["calls"] - 4
    assert found["untold"] > 2
    return dict(found)


def test_a_filler_killed_at_any_call_loses_nothing_published_and_the_next_goes_on(tmp_path: Path) -> None:
    """Every seventh call, LMDB's among them; a slow test takes each."""
    killed_everywhere(tmp_path, 7)


def test_fillers_killed_at_random_lose_nothing_published_and_readers_see_nothing_torn() -> None:
    assert killed_fillers(20, seed=41) > 40


def test_processes_that_fill_and_read_at_once_agree() -> None:
    """No error; every number is one record; in the end all know the same, and the files are those of its segments."""
    assert many_fillers(4, 4.0)["batches"] > 100


# -- power cuts


class _Disk:
    """What of a folder outlives a power cut now: of segments, only what was synced; of names, those synced too.

    LMDB's file is durable as it is between the calls of Python: its commit syncs data before the page that names it.
    """

    def __init__(self, path: Path, patch: pytest.MonkeyPatch, cut: Callable[[], None]) -> None:
        self.path, self.cut = path, cut
        self.synced: dict[int, bytes] = {}  # by inode
        self.names: dict[str, int] = {}  # of segments
        self.cuts = 0
        self.busy = False
        for name in ("pwrite", "posix_fallocate", "fdatasync", "fsync", "unlink"):
            patch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.busy:
                return real(*arguments, **options)
            self._look()
            found = real(*arguments, **options)
            if name in ("fsync", "fdatasync"):
                self._sync(arguments[0])
            self._look()
            return found

        return call

    def _sync(self, fd: int) -> None:
        file = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if file == self.path / SEGMENTS:
            self.names = {one.name: one.stat().st_ino for one in file.iterdir()}
        elif file.parent == self.path / SEGMENTS:
            self.synced[os.fstat(fd).st_ino] = file.read_bytes()

    def _look(self) -> None:
        self.cuts += 1
        self.busy = True
        try:
            self.cut()
        finally:
            self.busy = False

    def left(self, copy: Path) -> None:
        """Write what a power cut leaves to another folder."""
        shutil.copytree(self.path, copy, ignore=shutil.ignore_patterns(SEGMENTS, "lock.mdb"))
        (copy / SEGMENTS).mkdir(exist_ok=True)
        for name, inode in self.names.items():
            (copy / SEGMENTS / name).write_bytes(self.synced.get(inode, bytes(1 << 14)))


def _power_cuts(folder: Path) -> tuple[int, int]:
    """Cut the power at every call of a history: how many cuts, and after how many of them something was lost."""
    expected = states(folder / "straight")
    path, lost, done = folder / "pool", 0, 0
    allowed: list[State] = []

    def cut() -> None:
        nonlocal lost
        if not (path / "catalogue" / "data.mdb").exists():
            return
        copy = folder / "copy"
        disk.left(copy)
        try:
            lost += read_state(copy) not in allowed
        except Exception:
            lost += 1
        shutil.rmtree(copy)

    with opened(path, SMALL) as pool, pytest.MonkeyPatch.context() as patch:
        disk = _Disk(path, patch, cut)
        for done, step in enumerate(HISTORY):
            allowed = expected[done : done + 2]
            step(pool)
            allowed = expected[done + 1 : done + 2]
            disk._look()
        assert state_of(pool) == expected[-1]
    return disk.cuts, lost


def test_a_power_cut_at_any_call_loses_nothing_published() -> None:
    """What was not synced is zeros, what has no synced name is gone: every record of the catalogue is right."""
    with memory_directory() as folder:
        cuts, lost = _power_cuts(folder)
    assert cuts > 120
    assert lost == 0


@pytest.mark.parametrize("what", ["bytes", "names"])
def test_a_sync_that_is_left_out_would_be_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the simulated power cut lost nothing without syncs, the test above would prove nothing."""
    if what == "bytes":
        monkeypatch.setattr(Segment, "sync", lambda _: None)
    else:
        monkeypatch.setattr("attmemo.db.pools.shared_pool.sync", lambda _: None)
    with memory_directory() as folder:
        assert _power_cuts(folder)[1] > 0


def test_random_parts_of_unsynced_bytes_do_no_harm_either() -> None:
    """After a cut some pages behind the catalogue's end were written and some were not: the next filler goes on."""
    generator = random.Random(9)
    with memory_directory() as folder:
        expected = states(folder / "straight")
        path = folder / "pool"
        with opened(path, SMALL) as pool:
            for step in HISTORY[:4]:
                step(pool)
            ends = {kept.segment.number: kept.offset + kept.nbytes for kept in pool.records.values()}
        for file in (path / SEGMENTS).iterdir():
            with file.open("r+b") as stream:
                stream.seek(-(-ends[int(file.name)] // 64) * 64)
                rest = file.stat().st_size - stream.tell()
                stream.write(generator.randbytes(rest))
        assert read_state(path) == expected[4]
        with opened(path, SMALL) as pool:
            for step in HISTORY[4:]:
                step(pool)
        assert read_state(path) == expected[-1]


@pytest.mark.slow
def test_a_filler_killed_at_every_call_loses_nothing_published(tmp_path: Path) -> None:
    print(killed_everywhere(tmp_path, 1))
