"""A database against a dict: whatever is done to it, in whatever order, readers see what was published, whole."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from children import in_child
from databases import MODEL, add_maps, contents, findings, sequence, train_by_hand
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from attmemo.db import KIND_INPUT, KIND_MAP, Database, DatabaseWriter, Provenance
from attmemo.errors import DatabaseLockedError, DatabaseNotFoundError
from attmemo.mmap import CopyFetcher, MapFetcher, ViewFetcher, page_size

Record = tuple[int, int]  # its number, from which it is made, and its length


class Against(RuleBasedStateMachine):
    """Builders that add, publish, give up, are killed, and train; readers that keep what they opened."""

    readers = Bundle("readers")

    @initialize()
    def begin(self) -> None:
        parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="attmemo-test-", dir=parent))
        self.path = self.folder / "db"
        self.writer: DatabaseWriter | None = None
        self.published: list[Record] = []
        self.pending: list[Record] = []
        self.generation = 0
        self.fetchers = (CopyFetcher(), ViewFetcher(), MapFetcher(strict=True))
        self.open: list[Database] = []

    def teardown(self) -> None:
        if self.writer is not None:
            self.writer.close()
        for fetcher in self.fetchers:
            fetcher.close()
        for database in self.open:
            database.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- the builder

    @precondition(lambda self: self.writer is None)
    @rule()
    def open_writer(self) -> None:
        self.writer = DatabaseWriter(self.path, MODEL, "float32")
        self.source = self.writer.add_source("synthetic.log", "d" * 32)
        assert self.writer.records == len(self.published)
        assert len(self.writer.stored_rows().get(self.source, set())) == len(self.published)

    @precondition(lambda self: self.writer is not None)
    @rule(number=st.integers(0, 30), length=st.integers(2, 6))
    def add(self, number: int, length: int) -> None:
        assert self.writer is not None
        row = len(self.published) + len(self.pending)
        assert add_maps(self.writer, *sequence(number, length), Provenance(self.source, row)) == row
        self.pending.append((number, length))

    @precondition(lambda self: self.writer is not None)
    @rule()
    def publish(self) -> None:
        assert self.writer is not None
        manifest = self.writer.publish()
        self.published += self.pending
        self.pending = []
        assert manifest.records == len(self.published)
        assert manifest.generation >= self.generation
        self.generation = manifest.generation

    @precondition(lambda self: self.writer is not None)
    @rule()
    def give_up(self) -> None:
        """What was not published is gone, and nothing else."""
        assert self.writer is not None
        self.writer.close()
        self.writer, self.pending = None, []

    @precondition(lambda self: self.writer is not None)
    @rule()
    def a_second_builder(self) -> None:
        with pytest.raises(DatabaseLockedError, match=str(os.getpid())):
            DatabaseWriter(self.path, MODEL, "float32")

    @precondition(lambda self: self.writer is None)
    @rule(more=st.lists(st.tuples(st.integers(0, 30), st.integers(2, 6)), max_size=3), told=st.booleans())
    def a_builder_is_killed(self, more: list[Record], told: bool) -> None:
        """Before or after it published."""
        first = len(self.published)

        def build() -> None:
            writer = DatabaseWriter(self.path, MODEL, "float32")
            source = writer.add_source("synthetic.log", "d" * 32)
            for row, record in enumerate(more, first):
                add_maps(writer, *sequence(*record), Provenance(source, row))
            if told:
                writer.publish()
            os.kill(os.getpid(), signal.SIGKILL)

        assert in_child(build) == -signal.SIGKILL
        if told:
            self.published += more

    @precondition(lambda self: self.writer is None and self.published)
    @rule(seed=st.integers(0, 3))
    def train(self, seed: int) -> None:
        train_by_hand(self.path, seed)

    # -- readers

    @rule(target=readers)
    def open_reader(self) -> tuple[Database, list[Record]] | None:
        try:
            database = Database(self.path)
        except DatabaseNotFoundError:
            assert not self.published
            return None
        assert len(database) == len(self.published)
        self.open.append(database)
        return database, list(self.published)

    @rule(reader=readers, order=st.lists(st.integers(0, 10**6), min_size=1, max_size=5), layer=st.integers(0, 1))
    def read(self, reader: tuple[Database, list[Record]] | None, order: list[int], layer: int) -> None:
        """An old reader sees its generation, to the bit, by every way of fetching."""
        if reader is None or not reader[1]:
            return
        database, records = reader
        for record in {number % len(records) for number in order}:
            maps, inputs = sequence(*records[record])
            assert torch.equal(database.slot(KIND_MAP, layer, record), maps[layer])
            assert torch.equal(database.slot(KIND_INPUT, layer, record), inputs[layer])
        length = records[order[0] % len(records)][1]
        alike = [record for record, (_, n) in enumerate(records) if n == length]
        asked = [alike[number % len(alike)] for number in order]
        slots = database.slots_of(KIND_MAP, layer, np.array(asked))
        for fetcher in self.fetchers:
            with fetcher.fetch(database.arena(KIND_MAP, length), slots) as batch:
                for place, record in enumerate(asked):
                    assert torch.equal(batch[place], sequence(*records[record])[0][layer]), fetcher.name

    @rule(reader=consumes(readers))
    def close_reader(self, reader: tuple[Database, list[Record]] | None) -> None:
        if reader is not None:
            self.open.remove(reader[0])
            reader[0].close()

    @precondition(lambda self: self.published)
    @rule()
    def check(self) -> None:
        """Everything, from the disk."""
        assert findings(self.path) == []
        seen = contents(self.path)
        assert [seen[0, row][0] for row in range(len(self.published))] == [length for _, length in self.published]

    @invariant()
    def no_window_is_left_mapped(self) -> None:
        windows = [window for fetcher in self.fetchers for window in getattr(fetcher, "_all", ())]
        for window in windows:
            with pytest.raises(ValueError, match=r"no slots"):
                window._native.show((1,), page_size(), 1, 8)
            window.darken()  # refused while a tensor is held


def test_a_database_behaves_like_a_dict() -> None:
    run_state_machine_as_test(
        Against,
        settings=settings(
            max_examples=25, stateful_step_count=25, deadline=None, derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
