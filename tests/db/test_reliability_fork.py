"""A process that forks with a database open, or with a model that is served."""

from __future__ import annotations

import copy
import os
import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from children import in_child
from databases import LENGTHS, MODEL, add_maps, contents, fill, findings, sequence
from db_tools import SHORT
from packed_models import batch

from attmemo import memoize
from attmemo.db import KIND_MAP, Database, DatabaseWriter, Provenance
from attmemo.errors import DatabaseLockedError, ForkedHandleError
from attmemo.profiler.models import LoadedModel
from attmemo.system.locking import thread_lock


def test_a_forked_writer_is_refused(tmp_path: Path) -> None:
    """In the child add and publish are refused; it closes and exits, and the parent's lock and file are as before."""
    path = tmp_path / "db"
    expected = contents(fill(tmp_path / "straight", SHORT, every=len(SHORT)))
    with DatabaseWriter(path, MODEL, "float32") as writer:
        source = writer.add_source("synthetic.log", "d" * 32)
        for row, length in enumerate(SHORT):
            add_maps(writer, *sequence(row, length), Provenance(source, row, row % 2))
            before = {f: f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()}

            def child() -> None:
                with pytest.raises(ForkedHandleError, match="is its fork"):
                    add_maps(writer, *sequence(9, 5), Provenance(0, 9))
                with pytest.raises(ForkedHandleError, match="is its fork"):
                    writer.publish()
                writer.close()

            assert in_child(child) == 0
            assert {f: f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()} == before
            with pytest.raises(DatabaseLockedError, match=str(os.getpid())):
                DatabaseWriter(path, MODEL, "float32")
        writer.publish()
    assert contents(path) == expected
    assert findings(path) == []


def test_a_forked_reader_reads_the_same_bytes(whole: Path) -> None:
    """A reader that was opened before the fork, its arenas mapped or not yet: exact in child and parent."""
    expected = contents(whole)
    with Database(whole) as database:
        database.arena(KIND_MAP, 3)
        near = database.index(0).search(5, np.zeros((1, 4), np.float32), 2)

        def child() -> None:
            for record in range(len(database)):
                maps, inputs = sequence(record, LENGTHS[record])
                for layer in range(MODEL.layers):
                    assert torch.equal(database.slot(KIND_MAP, layer, record), maps[layer])
                    assert torch.equal(database.input(layer, record), inputs[layer])
            again = database.index(0).search(5, np.zeros((1, 4), np.float32), 2)
            assert np.array_equal(near[0], again[0])
            database.index(1)
            database.close()
            assert contents(whole) == expected  # opened again, LMDB and all

        assert in_child(child) == 0
        assert list(database.check()) == []


@pytest.mark.parametrize("reuse", ["rows", "maps"])
def test_a_forked_child_answers_whatever_locks_threads_of_its_parent_held(
    reuse: str, loaded: LoadedModel, bert_database: Path
) -> None:
    """Counters, gate and guard: a lock that is held at the fork is held for ever in the child."""
    database = ":memory:" if reuse == "rows" else bert_database
    threshold = "auto" if reuse == "rows" else 0.5
    model = memoize(
        copy.deepcopy(loaded.model), threshold, database,
        reuse=reuse, gate=False, budget=0.01 if reuse == "rows" else 0,  # type: ignore[arg-type]
    )  # fmt: skip
    handle, inputs = model.attmemo, batch([5, 9], 1)
    engine = handle.engine
    locks = [engine._counting, engine.counters._lock, engine.planner.gate._lock]
    if reuse == "rows":
        locks.append(handle.guarded.guard._lock)
    else:
        locks += [engine.reuse.source._lock, handle.database._opening]
        engine.reuse.source._fetchers.clear()  # the child chooses one itself

    def child() -> None:
        before = handle.stats()
        with torch.inference_mode():
            model(**inputs)
        assert handle.stats() != before
        assert engine.wait(30.0)  # for forwards of other threads: those of the parent are not here

    with torch.inference_mode():
        model(**inputs)
    engine._inside[-1] += 1  # a thread of the parent is inside of a forward
    with ExitStack() as held:
        for lock in locks:
            held.enter_context(lock)
        assert in_child(child, seconds=30) == 0
    del engine._inside[-1]
    model.attmemo.undo()


def test_a_lock_of_threads_is_free_in_a_forked_child() -> None:
    lock, holds, ends = thread_lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            holds.set()
            ends.wait(60)

    def child() -> None:
        with lock:
            pass

    other = threading.Thread(target=hold)
    other.start()
    assert holds.wait(30)
    assert in_child(child, seconds=30) == 0
    assert not lock.acquire(blocking=False), "the parent's lock was touched"
    ends.set()
    other.join()
    child()


def test_a_fork_inside_of_the_lock_leaves_the_child_a_lock_that_locks() -> None:
    lock = thread_lock()

    def child() -> None:
        lock.__exit__()  # the end of the statement that the child was forked in
        with lock:
            taken = threading.Thread(target=lock.__enter__, daemon=True)
            taken.start()
            taken.join(0.2)
            assert taken.is_alive()

    with lock:
        assert in_child(child, seconds=30) == 0
