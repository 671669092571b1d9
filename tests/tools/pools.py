"""What the tests of a shared pool share: records whose bytes follow from their tokens, and what must hold of a folder.

A record's tokens begin with its identity and its size; note and bytes follow from them. So bytes of another record,
or of none, are seen without an oracle.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from children import end_of, start_child
from databases import MODEL, memory_directory

from attmemo.db.pools.filling import Filling
from attmemo.db.pools.pool import Entry, Kept, News
from attmemo.db.pools.shared_pool import SEGMENTS, SharedPool
from attmemo.errors import DatabaseLockedError

TOOLS = Path(__file__).parent

Tokens = npt.NDArray[np.int32]
State = dict[int, int]  # number to identity

SMALL: Final = 64 << 10
"""Bytes of a pool of three segments, each with room for two records of 3000 bytes."""


def tokens_of(identity: int, nbytes: int, length: int = 8) -> Tokens:
    """Tokens like no other record's."""
    return np.array([identity, nbytes, *(identity * 1000 + place for place in range(length - 2))], np.int32)


def body_of(tokens: Tokens) -> npt.NDArray[np.uint8]:
    """The only right bytes for these tokens."""
    return np.random.default_rng(tokens.tolist()).integers(0, 256, int(tokens[1]), np.uint8)


def note_of(tokens: Tokens) -> bytes:
    """The only right note for these tokens."""
    return f"note {int(tokens[0])}".encode()


def entry(identity: int, nbytes: int = 3000, length: int = 8) -> Entry:
    """What is to become a record."""
    tokens = tokens_of(identity, nbytes, length)
    return Entry(tokens, body_of(tokens), note_of(tokens))


@pytest.fixture
def folder() -> Iterator[Path]:
    """The folder of a pool that is not made yet, in memory."""
    with memory_directory() as parent:
        yield parent / "pool"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for others gives up late: on a busy machine they may hold for seconds what it waits for."""
    monkeypatch.setattr("attmemo.db.pools.shared_pool.PATIENCE", 60.0)
    monkeypatch.setattr("attmemo.db.aside.PATIENCE", 60.0)


def entries(identities: Iterable[int], nbytes: int = 3000) -> list[Entry]:
    return [entry(identity, nbytes) for identity in identities]


def open_pool(path: Path, max_bytes: int = 1 << 20, *, fills: bool = True) -> SharedPool:
    """Open a pool, or make one; to be asked for its news."""
    return SharedPool(path, max_bytes, Filling.of(MODEL, "float32") if fills else None, fills=fills)


@contextmanager
def opened(path: Path, max_bytes: int = 1 << 20, *, fills: bool = True) -> Iterator[SharedPool]:
    """A pool whose news is known; closed afterwards."""
    pool = open_pool(path, max_bytes, fills=fills)
    try:
        pool.news()
        yield pool
    finally:
        pool.close()


def serves(kept: Kept) -> bool:
    """Whether a server would take the record: its bytes fit its checksum."""
    return kept.is_sound


def is_right(kept: Kept) -> bool:
    """Whether bytes and note are those that belong to its tokens."""
    if len(kept.tokens) < 2 or kept.nbytes != kept.tokens[1]:
        return False
    return kept.note == note_of(kept.tokens) and bool(np.array_equal(kept.body, body_of(kept.tokens)))


def hit(kept: Kept) -> None:
    """Count a use, as a request that the record serves."""
    if kept.segment.marks is not None:
        kept.segment.marks[kept.place] += 1


def damage(kept: Kept) -> None:
    """Change the last byte of a record on the disk."""
    assert kept.segment.path is not None
    with kept.segment.path.open("r+b") as stream:
        stream.seek(kept.offset + kept.nbytes - 1)
        stream.write(bytes([255 - int(kept.body[-1])]))


def state_of(pool: SharedPool) -> State:
    """All records, each of them sound and right."""
    wrong = [kept.number for kept in pool.records.values() if not (serves(kept) and is_right(kept))]
    assert not wrong, f"records {wrong[:5]} are wrong, {len(wrong)} of {len(pool)}"
    return {kept.number: int(kept.tokens[0]) for kept in sorted(pool.records.values(), key=lambda kept: kept.number)}


def read_state(path: Path) -> State:
    """What a fresh reader finds."""
    with opened(path, fills=False) as pool:
        return state_of(pool)


def files(path: Path) -> list[Path]:
    """Files of segments."""
    return sorted((path / SEGMENTS).iterdir())


def disk(path: Path) -> int:
    """Bytes that the segments take on the disk."""
    return sum(max(file.stat().st_size, 512 * file.stat().st_blocks) for file in files(path))


def check_files(path: Path) -> None:
    """Every file of a segment is named by the catalogue, and no byte more is taken."""
    with opened(path, fills=False) as pool:
        assert disk(path) == pool.nbytes, "a file is left over, or is missing"


# -- a history of changes, the same at every run


Step = Callable[[SharedPool], News]


def _add(*identities: int) -> Step:
    return lambda pool: pool.add(entries(identities))


def _write(*identities: int) -> Step:
    """Records that are written ahead, if there is room, and then published."""
    return lambda pool: pool.add([one for one in entries(identities) if pool.write(one) is None])


def _add_used(used: int, *identities: int) -> Step:
    """Before records are added, some are used: these are carried when their segment goes."""

    def step(pool: SharedPool) -> News:
        for kept in pool.records.values():
            if kept.tokens[0] % 4 == used:
                hit(kept)
        return pool.add(entries(identities))

    return step


def _remove(nth: int) -> Step:
    return lambda pool: pool.remove([sorted(pool.records)[nth]])


HISTORY: Final[tuple[Step, ...]] = (
    _add(1, 2), _write(3), _add_used(1, 4, 5), _write(6), _add_used(1, 7, 8, 9), _remove(1),
    lambda pool: pool.rewrite(), _add_used(2, 10, 11), _write(12),
)  # fmt: skip
"""Adds, writes ahead, evicts, carries, removes and rewrites in a pool of `SMALL` bytes."""


PLAIN: Final[tuple[Step, ...]] = (
    _add(1, 2), _add(3), _add_used(1, 4, 5), _add(6), _add_used(1, 7, 8, 9), *HISTORY[5:8], _add(12),
)  # fmt: skip
"""The same without a write ahead."""


def states(path: Path, history: Iterable[Step] = HISTORY) -> list[State]:
    """What is there before the first step of the history, and after each."""
    with opened(path, SMALL) as pool:
        found = [state_of(pool)]
        for step in history:
            step(pool)
            found.append(state_of(pool))
    return found


def go_on(path: Path, expected: list[State], told: Path | None = None) -> None:
    """Do the steps that are not done yet, and tell a file that outlives the process after each."""
    with opened(path, SMALL) as pool:
        for number in range(expected.index(state_of(pool)), len(HISTORY)):
            HISTORY[number](pool)
            if told is not None:
                with told.open("a") as stream:
                    stream.write("x")


# -- processes that die, and readers beside them


def fill_until_killed(path: Path, told: Path, seed: int, max_bytes: int) -> None:
    """Add records until killed, and tell what was published."""
    generator = random.Random(seed)
    with opened(path, max_bytes) as pool, told.open("a") as stream:
        pool.add([])  # what the last one published as it died is known from now on
        stream.write(json.dumps(["is", list(state_of(pool).items())]) + "\n")
        stream.flush()
        while True:
            for kept in generator.sample(sorted(pool.records.values(), key=lambda kept: kept.number), len(pool) // 8):
                hit(kept)
            new = [entry(generator.randrange(1 << 20), generator.randrange(1, 9000)) for _ in range(3)]
            news = pool.add([one for one in new if pool.write(one) is None])
            added = [(kept.number, int(kept.tokens[0])) for kept in news.added]
            stream.write(json.dumps(["came", added, news.removed]) + "\n")
            stream.flush()


def _reading(path: Path, stop: Path, report: Path) -> None:
    """Learn and read until told to stop: what is known is what was told, and right."""
    known: State = {}
    looks, longest = 0, 0.0
    with opened(path, fills=False) as pool:
        report.write_text("begun")
        known = {kept.number: int(kept.tokens[0]) for kept in pool.records.values()}
        while not stop.exists():
            before = time.perf_counter()
            news = pool.news()
            longest = max(longest, time.perf_counter() - before)
            looks += 1
            for kept in news.added:
                assert kept.number not in known
                assert is_right(kept), f"record {kept.number} is torn"
                assert kept.is_sound
                known[kept.number] = int(kept.tokens[0])
            for number in news.removed:
                del known[number]
            if looks % 8 == 0:
                assert state_of(pool) == dict(sorted(known.items()))
            time.sleep(0.001)
        for number in (news := pool.news()).removed:
            del known[number]
        known |= {kept.number: int(kept.tokens[0]) for kept in news.added}
        assert state_of(pool) == dict(sorted(known.items()))
    report.write_text(json.dumps([looks, longest]))


@contextmanager
def read_beside(path: Path, readers: int = 1) -> Iterator[None]:
    """Other processes learn and read; in the end all know what is there."""
    stop = path.with_name(f"{path.name}-stop")
    reports = [path.with_name(f"{path.name}-report{n}") for n in range(readers)]
    beside = [start_child(lambda own=own: _reading(path, stop, own), seconds=3600) for own in reports]  # type: ignore[misc]
    try:
        for reader, report in zip(beside, reports, strict=True):
            while not report.exists():
                ended = os.waitid(os.P_PID, reader, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                assert ended is None, "a reader failed; its standard error says why"
                time.sleep(0.001)
        yield
    finally:
        stop.touch()
        ends = [end_of(reader) for reader in beside]
    assert ends == [0] * readers, "a reader failed; its standard error says why"


def _told(told: Path) -> State:
    """What the last filler knew to be published when it died."""
    state: State = {}
    for line in told.read_text().split("\n")[:-1]:
        kind, *rest = json.loads(line)
        if kind == "is":
            state = dict(rest[0])
        else:
            state |= dict(rest[0])
            for number in rest[1]:
                state.pop(number, None)
    return state


def killed_fillers(kills: int, seed: int, max_bytes: int = 512 << 10, readers: int = 2) -> int:
    """Kill one filler after the other at random moments beside readers; returns how many records were published."""
    generator = random.Random(seed)
    with memory_directory() as folder:
        path, told = folder / "pool", folder / "told"
        open_pool(path, max_bytes).close()
        told.touch()
        highest = 0
        with read_beside(path, readers):
            for kill in range(kills):
                wanted = told.read_text().count("\n") + 1 + kill % 4  # what it finds, and up to three batches
                child = start_child(lambda kill=kill: fill_until_killed(path, told, seed + kill, max_bytes))  # type: ignore[misc]
                until = time.monotonic() + 300
                while told.read_text().count("\n") < wanted and time.monotonic() < until:
                    time.sleep(0.001)
                time.sleep(generator.uniform(0.0, 0.04))
                _kill(child)
                before, after = _told(told), read_state(path)
                came = {number for number in after if number > max(before, default=-1)}
                assert {number: before[number] for number in after if number in before} == {
                    number: after[number] for number in after if number not in came
                }
                assert before.keys() <= after.keys() or came, "a published record is gone, and none came for it"
                assert len(came) <= 3, "more than one batch was published that was not told"
                highest = max(after, default=highest)
        with opened(path, max_bytes) as pool:
            for batch in range(20):  # brings new segments, and so a sweep
                pool.add(entries([2000 + 2 * batch, 2001 + 2 * batch]))
            assert disk(path) == pool.nbytes <= max_bytes
        check_files(path)
    return highest


def _kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    assert end_of(child) == -signal.SIGKILL, "the filler ended before it was killed"


# -- processes that all add, evict and read


LEAST: Final = 30
"""Batches that each process adds, however slow the machine is."""


def _working(path: Path, number: int, seconds: float, max_bytes: int, folder: Path, most: int) -> None:
    generator = random.Random(7000 + number)
    known: State = {}
    ever: State = {}
    looks: list[tuple[float, float]] = []  # seconds, and those of the processor
    locked = adds = 0

    def learn(news: News) -> None:
        for kept in news.added:
            assert kept.number not in ever, f"record {kept.number} came twice"
            assert kept.is_sound
            assert is_right(kept), f"record {kept.number} is wrong"
            known[kept.number] = ever[kept.number] = int(kept.tokens[0])
        for gone in news.removed:
            del known[gone]

    until = time.monotonic() + seconds
    pool = open_pool(path, max_bytes)
    try:
        while time.monotonic() < until or adds < LEAST:
            before, worked = time.perf_counter(), time.thread_time()
            news = pool.news()
            looks.append((time.perf_counter() - before, time.thread_time() - worked))
            learn(news)
            assert pool.records.keys() == known.keys()
            for kept in generator.sample(list(pool.records.values()), min(4, len(pool))):
                assert is_right(kept), f"record {kept.number} changed"
                hit(kept)
            new = [entry(generator.randrange(1 << 20), generator.randrange(1, most)) for _ in range(2)]
            try:
                chance = generator.random()
                if chance < 0.02 and known:
                    learn(pool.remove([generator.choice(list(known))]))
                elif chance < 0.03:
                    learn(pool.rewrite())
                else:
                    rest = [one for one in new if pool.write(one) is None]
                    if rest or chance < 0.5:
                        learn(pool.add(rest))
                    adds += 1
            except DatabaseLockedError:
                locked += 1
            time.sleep(generator.uniform(0.0, 0.004))
        while True:
            try:
                learn(pool.add([]))
                break
            except DatabaseLockedError:  # the others were faster for too long
                locked += 1
        (folder / f"done{number}").touch()
        while len(list(folder.glob("done*"))) < len(list(folder.glob("order*"))):
            time.sleep(0.01)
        learn(pool.news())
        assert state_of(pool) == dict(sorted(known.items()))
    finally:
        (folder / f"done{number}").touch()
        pool.close()
    report = {"state": list(known.items()), "ever": list(ever.items()), "look": max(looks), "locked": locked}
    (folder / f"report{number}").write_text(json.dumps(report | {"adds": adds}))


def many_fillers(processes: int, seconds: float, max_bytes: int = 512 << 10, most: int = 9000) -> dict[str, Any]:
    """Processes that all add, use, remove, rewrite and read; in the end all know the same. What was measured."""
    with memory_directory() as folder:
        path = folder / "pool"
        for number in range(processes):
            (folder / f"order{number}").touch()

        def begin(number: int) -> int:
            return start_child(
                lambda: _working(path, number, seconds, max_bytes, folder, most), seconds=int(seconds) + 600
            )

        ends = [end_of(child) for child in [begin(number) for number in range(processes)]]
        assert ends == [0] * processes, "a process failed; its standard error says why"
        reports = [json.loads((folder / f"report{number}").read_text()) for number in range(processes)]
        ever: State = {}
        for report in reports:
            for number, identity in report["ever"]:
                assert ever.setdefault(number, identity) == identity, f"two records have the number {number}"
        final = read_state(path)
        assert all(dict(report["state"]) == final for report in reports), "the processes know different records"
        check_files(path)
        assert disk(path) <= max_bytes
    return {
        "longest look, its seconds of the processor": max(report["look"] for report in reports),
        "locked out": sum(report["locked"] for report in reports),
        "batches": sum(report["adds"] for report in reports),
    }


def refuse(code: int) -> Callable[..., Any]:
    """A call of the system that fails."""

    def call(*_: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return call


def wait_for(file: Path) -> None:
    """Until another process has made it."""
    until = time.monotonic() + 300
    while not file.exists():
        assert time.monotonic() < until, f"{file.name} did not come"
        time.sleep(0.002)
