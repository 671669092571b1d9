"""Readers beside a builder and a trainer."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from children import end_of, start_child
from databases import LENGTHS, MODEL, add_maps, contents, fill, findings, memory_directory, sequence

from attmemo import memoize
from attmemo.db import KIND_INPUT, KIND_MAP, SEQUENCE, Database, DatabaseWriter, Provenance, read_manifest
from attmemo.embed.training import TrainOptions
from attmemo.errors import DatabaseCorruptError
from attmemo.profiler.models import load_model
from attmemo.profiler.train import train_database

LEAST = 10
"""Records that are built, however slow the machine is."""


def readers_beside_a_builder(readers: int, seconds: float) -> None:
    """One process builds; others open, compare every slot with what it must be, and see counts that only grow."""
    with memory_directory() as folder:
        path, stop = fill(folder / "db", LENGTHS[:1]), folder / "stop"

        def build() -> None:
            with DatabaseWriter(path, MODEL, "float32") as writer:
                row = writer.records
                while not stop.exists() or row <= LEAST:
                    length = LENGTHS[row % len(LENGTHS)]
                    add_maps(writer, *sequence(row % 64, length), Provenance(0, row))
                    row += 1
                    writer.publish()
                    time.sleep(0.002)

        def read() -> None:
            before, rounds = (0, 0), 0
            while not stop.exists() or rounds == 0:
                with Database(path) as database:
                    now = database.manifest.generation, len(database)
                    assert now >= before
                    assert database.records.rows.tolist() == list(range(now[1]))
                    for record in {0, now[1] // 2, now[1] - 1}:
                        maps, inputs = sequence(record % 64, LENGTHS[record % len(LENGTHS)])
                        assert torch.equal(database.slot(KIND_MAP, 1, record), maps[1])
                        assert torch.equal(database.slot(KIND_INPUT, 0, record), inputs[0])
                    if rounds % 8 == 0:
                        assert list(database.check()) == []
                before, rounds = now, rounds + 1

        limit = int(seconds) + 600
        builder = start_child(build, limit)
        children = [start_child(read, limit) for _ in range(readers)]
        time.sleep(seconds)
        stop.touch()
        assert [end_of(pid) for pid in (builder, *children)] == [0] * (readers + 1)
        assert len(contents(path)) > LEAST
        assert findings(path) == []


def test_a_reader_beside_a_builder_never_reads_a_torn_slot() -> None:
    """One builder and four readers, each a process."""
    readers_beside_a_builder(4, 4.0)


def test_a_reader_keeps_its_index_through_a_second_training(
    bert_database: Path, tiny_bert: str, tmp_path: Path
) -> None:
    """A model that is served while its database is trained twice answers as before, bit for bit."""
    path = Path(shutil.copytree(bert_database, tmp_path / "db"))
    files = read_manifest(path).embedder
    assert files is not None
    model: Any = memoize(load_model(tiny_bert).model, 0.0, path, gate=False)
    inputs = {"input_ids": torch.arange(5, 15).view(1, 10), "attention_mask": torch.ones((1, 10), dtype=torch.long)}
    with Database(path) as reader, torch.inference_mode():
        before, rows = model(**inputs).logits, [reader.slot(KIND_MAP, 1, r) for r in range(3)]
        reader.index(SEQUENCE)
        for seed in (1, 2):
            with torch.inference_mode(False):
                train_database(path, TrainOptions(steps=0, seed=seed), profile=False)
            assert torch.equal(model(**inputs).logits, before)
            assert all(torch.equal(reader.slot(KIND_MAP, 1, r), row) for r, row in enumerate(rows))
            assert reader.index(SEQUENCE).lengths
        assert not (path / files.weights.file).exists()
        with pytest.raises(DatabaseCorruptError, match="cannot be read"):
            reader.index(0)  # of the generation that is gone, and never loaded


@pytest.mark.slow
def test_readers_beside_a_builder_for_a_minute_never_read_a_torn_slot() -> None:
    readers_beside_a_builder(4, 60.0)
