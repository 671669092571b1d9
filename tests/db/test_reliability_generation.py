"""Parts of another database or generation, killed builders, power cuts."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import end_of, start_child
from databases import changed, contents, fill, memory_directory, train_by_hand
from db_tools import Write, build_and_tell, check_left, intercept_writes, use

from attmemo import memoize
from attmemo.db import Database, read_manifest
from attmemo.db.catalogue import Catalogue
from attmemo.embed.training import TrainOptions
from attmemo.errors import DatabaseCorruptError, DatabaseError, DatabaseNotFoundError, GenerationMismatchError
from attmemo.profiler.models import load_model
from attmemo.profiler.train import train_database

# -- parts of another database or generation


def test_an_index_of_another_database_is_refused(bert_database: Path, deberta_database: Path, tmp_path: Path) -> None:
    """Same lengths, same generation, same names: told apart by whose they say they are."""
    path = Path(shutil.copytree(bert_database, tmp_path / "db"))
    mine, other = read_manifest(path).embedder, read_manifest(deberta_database).embedder
    assert mine is not None
    assert other is not None
    for ref, theirs in [(mine.weights, other.weights), *((mine.indexes[k], other.indexes[k]) for k in mine.indexes)]:
        shutil.copy(deberta_database / theirs.file, path / ref.file)
        with Database(path) as database, pytest.raises(GenerationMismatchError, match="belongs to database") as caught:
            database.derived(ref)
        assert "train-embedder" in str(caught.value)


def test_an_index_of_another_generation_is_refused(bert_database: Path, tiny_bert: str, tmp_path: Path) -> None:
    """Trained again, and the files of before put in the place of the new ones: refused; and by `memoize` too."""
    path = Path(shutil.copytree(bert_database, tmp_path / "db"))
    train_database(path, TrainOptions(steps=0, seed=5), profile=False)
    mine, old = read_manifest(path).embedder, read_manifest(bert_database).embedder
    assert mine is not None
    assert old is not None
    pairs = [(mine.weights, old.weights), *((mine.indexes[key], old.indexes[key]) for key in mine.indexes)]
    for ref, before in pairs:
        kept = (path / ref.file).read_bytes()
        shutil.copy(path / before.file, path / ref.file)
        with Database(path) as database, pytest.raises(GenerationMismatchError, match="written for generation"):
            database.derived(ref)
        if ref is mine.weights:
            with pytest.raises(GenerationMismatchError):
                memoize(load_model(tiny_bert).model, 0.5, path)
        (path / ref.file).write_bytes(kept)
    use(path)
    # What is damaged is not called another generation's.
    with changed(path / mine.weights.file, len((path / mine.weights.file).read_bytes()) - 1, b"\x55"):
        with Database(path) as database, pytest.raises(DatabaseCorruptError, match="has digest") as caught:
            database.derived(mine.weights)
        assert not isinstance(caught.value, GenerationMismatchError)


# -- killed


def kill_cycles(cycles: int, seed: int) -> None:
    """A builder killed at random times, resumed by the next; what it acknowledged in a file is there and exact."""
    generator = random.Random(seed)
    lengths = [generator.randint(2, 9) for _ in range(60)]
    with memory_directory() as folder:
        expected = contents(fill(folder / "straight", lengths, every=1))
        path, oracle = folder / "db", folder / "told"
        for _ in range(cycles):
            pid = start_child(lambda: build_and_tell(path, oracle, lengths, every=1))
            time.sleep(generator.uniform(0.0, 0.05))
            os.kill(pid, signal.SIGKILL)
            assert end_of(pid) in (0, -signal.SIGKILL)
            if check_left(path, oracle, expected) == len(lengths):
                shutil.rmtree(path)
                oracle.unlink()
        fill(path, lengths, every=1)
        assert contents(path) == expected


def test_a_killed_builder_never_loses_what_it_acknowledged() -> None:
    """25 kills by the clock."""
    kill_cycles(25, seed=23)


# -- power loss


class _Drive:
    """What a disk holds: inodes and names, as they would be read now and as they would be after a power cut.

    Written by watching a builder. Content that it wrote without `os` (safetensors, buffered files) is noticed when it
    is synced, or when its directory is. LMDB syncs its own commits; they are taken as one durable write each.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events: list[tuple[Any, ...]] = []
        self.known: dict[int, bytes] = {}  # inode -> content as recorded
        self.names: dict[str, int] = {}  # path -> inode as recorded

    def notice(self) -> None:
        """Record what changed since: new names, and content that differs."""
        seen = {}
        for file in sorted(self.root.rglob("*")):
            if file.name in ("lock.mdb", "builder.lock"):
                continue
            status = file.stat()
            name = str(file.relative_to(self.root))
            seen[name] = status.st_ino
            if self.names.get(name) != status.st_ino:
                self.events.append(("name", name, None if file.is_dir() else status.st_ino))
            if not file.is_dir():
                content = file.read_bytes()
                if self.known.get(status.st_ino, b"") != content:
                    durable = file.name == "data.mdb"
                    self.events.append(("durable" if durable else "content", status.st_ino, content))
                    self.known[status.st_ino] = content
        for name in self.names.keys() - seen.keys():
            self.events.append(("gone", name))
        self.names = seen

    def call(self, write: Write) -> Any:
        """Before the effect of a call is durable, what was written up to it is recorded."""
        if write.name in ("fsync", "fdatasync"):
            self.notice()
            target = os.fstat(write.arguments[0])
            path = Path(os.readlink(f"/proc/self/fd/{write.arguments[0]}"))
            done = write.do()
            if path.is_dir():
                self.events.append(("sync names", "" if path == self.root else str(path.relative_to(self.root))))
            else:
                self.events.append(("sync", target.st_ino))
            return done
        done = write.do()
        self.notice()
        return done


def _after_power_cut(events: list[tuple[Any, ...]], keep: Callable[[str], Any], folder: Path) -> None:
    """Lay out what a disk holds after these events. Of what was not synced, `keep` says what got there.

    ``keep("names")``: whether a name did. ``keep("content")``: how much of the content did, 0 to 1.
    """
    stable: dict[int, bytes] = {}
    fresh: dict[int, bytes] = {}
    names: dict[str, int | None] = {}
    waiting: list[tuple[Any, ...]] = []

    def apply(event: tuple[Any, ...]) -> None:
        if event[0] == "gone":
            names.pop(event[1], None)
        else:
            names[event[1]] = event[2]

    for event in events:
        if event[0] == "content":
            fresh[event[1]] = event[2]
        elif event[0] in ("durable", "sync"):
            stable[event[1]] = event[2] if event[0] == "durable" else fresh.get(event[1], stable.get(event[1], b""))
        elif event[0] == "sync names":
            here = [e for e in waiting if str(Path(e[1]).parent) == (event[1] or ".")]
            waiting = [e for e in waiting if e not in here]
            for one in here:
                apply(one)
        else:
            waiting.append(event)
    for event in waiting:
        if keep("names"):
            apply(event)
    for name, inode in sorted(names.items()):
        file = folder / name
        if not all(str(parent) in names for parent in Path(name).parents if str(parent) != "."):
            continue  # its directory's name was lost
        if inode is None:
            file.mkdir()
            continue
        old, new = stable.get(inode, b""), fresh.get(inode, b"")
        if inode in fresh and new != old and name != "catalogue/data.mdb":
            part = int(len(new) * keep("content")) // 512 * 512 if keep("content") < 1 else len(new)
            # The file may have its new size before it has its new bytes: zeros stand there until then.
            size = len(new) if keep("names") else max(part, len(old))
            old = (new[:part] + old[part:].ljust(max(0, size - part), b"\0"))[:size] if part or keep("names") else old
        file.write_bytes(old)


def test_a_power_cut_never_leaves_half_a_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prefix of a build's writes, the unsynced ones dropped, kept, torn or mixed: what was published opens."""
    lengths = (3, 5, 3)
    with memory_directory() as folder:
        root = folder / "db"
        root.mkdir()
        drive, told = _Drive(root), []
        put = Catalogue.put

        def noticed(self: Catalogue, entries: Any) -> None:
            drive.notice()
            put(self, entries)
            drive.notice()

        with monkeypatch.context() as patch:
            patch.setattr(Catalogue, "put", noticed)
            intercept_writes(patch, drive.call)
            for step in range(len(lengths) + 1):
                fill(root, lengths[: min(step + 1, 2)] if step < 3 else lengths, every=1)
                if step == 2:
                    train_by_hand(root)
                told.append((len(drive.events), read_manifest(root).generation))
        expected = contents(root)
        generation = read_manifest(root).generation
        assert generation == 4
        assert len(drive.events) > 60
        generator = random.Random(25)
        ways: list[Callable[[str], Any]] = [
            lambda what: False if what == "names" else 0.0,
            lambda what: True if what == "names" else 0.0,  # names before what they name: the usual hole
            lambda what: False if what == "names" else 1.0,
            lambda what: True if what == "names" else 0.5,
            lambda what: generator.random() < 0.5 if what == "names" else generator.random(),
            lambda what: generator.random() < 0.8 if what == "names" else generator.random(),
        ]
        seen = Counter[int]()
        for end in range(len(drive.events) + 1):
            for number, way in enumerate(ways):
                state = folder / "state"
                shutil.rmtree(state, ignore_errors=True)
                state.mkdir()
                _after_power_cut(drive.events[:end], way, state)
                acknowledged = max((g for at, g in told if at <= end), default=0)
                where = f"after {end} of {len(drive.events)} events, way {number}"
                try:
                    use(state)
                except DatabaseNotFoundError:
                    assert acknowledged == 0, where
                    seen[0] += 1
                    continue
                except DatabaseError as error:
                    raise AssertionError(f"{where}: {error}") from error
                found = read_manifest(state).generation
                assert found >= acknowledged, where
                seen[found] += 1
                left = contents(state)
                assert left == {key: expected[key] for key in sorted(expected)[: len(left)]}, where
        assert set(seen) == set(range(generation + 1))


@pytest.mark.slow
def test_a_builder_killed_five_hundred_times_never_loses_what_it_acknowledged() -> None:
    kill_cycles(500, seed=523)
