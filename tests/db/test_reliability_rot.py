"""Every bit, slots that change places, and a database that an earlier build of this library wrote."""

from __future__ import annotations

import dataclasses
import json
import mmap
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
from databases import MODEL, add_maps, changed, contents, fill, findings, memory_directory, sequence, train_by_hand
from db_tools import GOLDEN, outcome, reseal, use

from attmemo.db import Database, DatabaseWriter, Provenance, read_manifest
from attmemo.db.files import MANIFEST
from attmemo.db.manifest import Manifest
from attmemo.db.slots import HEADER_BYTES, check_arena
from attmemo.embed.siamese import load_embedders
from attmemo.errors import DatabaseCorruptError

# -- every bit


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "BF16", "F64", "C64", "BOOL", "U4"])
def test_numbers_of_an_unknown_type_are_refused(copy: Path, kind: str) -> None:
    """safetensors knows more types of numbers than numpy, and than older versions of torch: found by forging."""
    for file in sorted(copy.glob("*.safetensors")) + sorted(copy.glob("index-*/*")):
        good = file.read_bytes()
        size = struct.unpack("<Q", good[:8])[0]
        head = json.loads(good[8 : 8 + size])
        name = next(name for name in head if name != "__metadata__" and not name.endswith("ids"))
        first, end = head[name]["data_offsets"]
        width = {"F64": 8, "C64": 8, "BF16": 2, "F4": 0.5, "U4": 0.5}.get(kind, 1)
        head[name] |= {"dtype": kind, "shape": [int((end - first) / width)]}
        body = json.dumps(head).encode()
        file.write_bytes(struct.pack("<Q", len(body)) + body + good[8 + size :])
        reseal(copy)
        assert outcome(lambda: use(copy)) in ("DatabaseCorruptError", "StaleDatabaseError"), file.name
        file.write_bytes(good)
    reseal(copy)
    assert outcome(lambda: use(copy)) == "fine"


def flip_every(path: Path, bits: Callable[[int], list[int]]) -> int:
    """Flip bits of every byte of all arenas and of the manifest, one at a time; all must be found. How many."""
    count = 0
    raw = (path / MANIFEST).read_bytes()
    for at in range(len(raw)):
        for bit in range(8):
            flipped = bytearray(raw)
            flipped[at] ^= 1 << bit
            with pytest.raises(DatabaseCorruptError):
                Manifest.parse(bytes(flipped), path)
            count += 1
    with Database(path) as database:
        assert list(database.check()) == []
        for found in database.manifest.classes:
            with (path / found.file).open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as memory:
                assert len(memory) == found.layout.file_bytes
                for at in range(len(memory)):
                    for bit in bits(at):
                        memory[at] ^= 1 << bit
                        seen = False
                        try:
                            if at < HEADER_BYTES:
                                check_arena(path, database.manifest.uuid, found)
                            else:
                                seen = database.check() != []
                        except DatabaseCorruptError:
                            seen = True
                        memory[at] ^= 1 << bit
                        assert seen, f"bit {bit} of byte {at} of {found.file}"
                        count += 1
        assert list(database.check()) == []
    return count


def tiny(path: Path) -> Path:
    """One record of one layer."""
    model = dataclasses.replace(MODEL, layers=1, heads=1, hidden=2)
    with DatabaseWriter(path, model, "float32") as writer:
        add_maps(writer, *sequence(0, 3, model), Provenance(writer.add_source("x", "0" * 32), 0))
        writer.publish()
    return path


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """Every byte of the arenas of a tiny database, and every bit of its manifest."""
    generator = random.Random(39)
    with memory_directory() as folder:
        assert flip_every(tiny(folder / "db"), lambda at: [generator.randrange(8)] if at % 8 < 2 else []) > 10_000


def test_two_exchanged_slots_are_found(copy: Path) -> None:
    """Of one class, each with its checksum: both are found; of the same record, or of two."""
    (found,) = (c for c in read_manifest(copy).classes if c.name == "map-00003")
    layout = found.layout
    body = (copy / found.file).read_bytes()
    for a, b in ((0, 1), (0, 2), (1, 5)):
        one, two = (body[layout.offset(s) : layout.offset(s) + layout.stride] for s in (a, b))
        with changed(copy / found.file, layout.offset(a), two), changed(copy / found.file, layout.offset(b), one):
            seen = findings(copy)
        assert [line.split(" (")[0] for line in seen] == [f"{found.file}, slot {s}" for s in (a, b)]
    assert findings(copy) == []


# -- a database that an earlier build of this library wrote


def make_golden(path: Path = GOLDEN / "v2") -> None:
    """Write the database that is kept in the repository. Only to be run for a new version of the format.

    Three records of random numbers, random embedders, exact indexes::

        PYTHONPATH=tests/tools:tests/db python -c "import test_reliability_rot as t; t.make_golden()"
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    train_by_hand(fill(path, (3, 5, 3)))
    for name in ("catalogue/lock.mdb", "builder.lock"):
        (path / name).unlink()


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A copy of the database in the repository."""
    if mmap.PAGESIZE > 4096:
        pytest.skip("the database was built for pages of 4096 bytes")
    return Path(shutil.copytree(GOLDEN / "v2", tmp_path / "v2"))


def digest_of(path: Path) -> str:
    """A digest of all that a reader sees."""
    state = xxhash.xxh3_128()
    for (source, row), (length, split, body) in sorted(contents(path).items()):
        state.update(f"{source} {row} {length} {split} {len(body)} ".encode() + body)
    with Database(path) as database:
        ref = database.embedder_ref()
        for layer, embedder in sorted(load_embedders(database.derived(ref.weights), MODEL.hidden).items()):
            for name, tensor in sorted(embedder.tensors().items()):
                state.update(f"{layer} {name} {tuple(tensor.shape)} ".encode() + tensor.numpy().tobytes())
            for length in sorted(database.index(layer).lengths):
                ids, _ = database.index(layer).search(length, np.zeros((1, 4), np.float32), 3)
                state.update(f"{length} {ids.tolist()} ".encode())
    return state.hexdigest()


def test_a_database_of_an_earlier_build_reads_as_it_was_written(golden: Path) -> None:
    """The files in the repository, opened by the code of today: every number as it was."""
    manifest = read_manifest(golden)
    assert (manifest.records, manifest.generation, manifest.storage) == (3, 3, "float32")
    assert digest_of(golden) == "fffac35cea8a310443021e95952ddb8c"
    assert findings(golden) == []
    assert sum(file.stat().st_size for file in golden.rglob("*") if file.is_file()) < 200_000


def test_a_builder_goes_on_with_it(golden: Path) -> None:
    fill(golden, (3, 5, 3, 8))
    assert len(contents(golden)) == 4
    assert findings(golden) == []


@pytest.mark.slow
def test_every_single_flipped_bit_is_found() -> None:
    """Every bit of the arenas and the manifest of a tiny database."""
    with memory_directory() as folder:
        assert flip_every(tiny(folder / "db"), lambda at: list(range(8))) > 130_000
