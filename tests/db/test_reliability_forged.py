"""Files that lie: numbers that do not fit, and everything changed at random."""

from __future__ import annotations

import dataclasses
import json
import mmap
import random
import resource
import shutil
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from children import run_child
from databases import fill, memory_directory, train_by_hand
from db_tools import body_of, outcome, records_of, reseal, rewrite, seal, use
from safetensors.numpy import load_file, save_file

from attmemo.db import SEQUENCE, Database, read_manifest
from attmemo.db import index as db_index
from attmemo.db.catalogue import Record
from attmemo.db.slots import HEADER_BYTES
from attmemo.embed.calibration import Calibration
from attmemo.errors import DatabaseCorruptError

# -- numbers that do not fit


def _changed_record(number: int, **values: Any) -> Callable[[list[Record]], None]:
    def change(records: list[Record]) -> None:
        records[number] = dataclasses.replace(records[number], **values)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_changed_record(2, place=0), "two records have the same place of length 3"),
        (_changed_record(0, place=3), "beyond the 3 places of length 3"),
        (_changed_record(0, place=(1 << 62) - 1), "beyond the 3 places of length 3"),
        (_changed_record(0, place=1 << 62), "impossible row or place"),
        (_changed_record(0, place=(1 << 64) - 1), "impossible row or place"),
        (_changed_record(0, row=1 << 62), "impossible row or place"),
        (_changed_record(0, length=6), "has 6 tokens"),
        (_changed_record(0, length=0), "has 0 tokens"),
        (_changed_record(0, length=(1 << 32) - 1), "has 4294967295 tokens"),
        (_changed_record(0, source=1), "data source that is not listed"),
        (_changed_record(0, checksums=(0,) * 6), "bytes, expected"),
        (_changed_record(0, checksums=(0,) * 2), "bytes, expected"),
    ],
)
def test_a_forged_record_never_reads_anothers_slots(
    copy: Path, change: Callable[[list[Record]], object], words: str
) -> None:
    """Places taken twice, places, sources and lengths that are none, values of another size: refused at open."""
    records = records_of(copy)
    change(records)
    rewrite(copy, records)
    with pytest.raises(DatabaseCorruptError, match=words) as caught:
        Database(copy)
    assert caught.value.hint


def _container(path: Path, change: Callable[[dict[str, Any]], None], name: str = "sequence") -> None:
    """Change the arrays of an index container, the digest made to fit."""
    (file,) = path.glob(f"index-*/{name}.safetensors")
    arrays: dict[str, Any] = load_file(str(file))
    change(arrays)
    save_file(arrays, str(file))
    reseal(path)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([0, 0, 2], "names a record of length 3 twice"),
        ([0, 2, 1], "names a record of another length than 3"),
        ([6, 3, 1], "names a record of another length than 3"),
        ([0, 2, 8], "names record 8 of 8"),
        ([0, 2, -1], "names record"),
        ([0, 2, -(1 << 63)], "names record"),
        ([0, 2, (1 << 63) - 1], "names record"),
        ([0, 2], "3 vectors of length 3 for 2 records"),
    ],
)
def test_an_index_that_names_records_without_such_a_map_is_refused(copy: Path, ids: list[int], words: str) -> None:
    """Ids twice, of another length, or of no record: refused when it is loaded."""
    _container(copy, lambda arrays: arrays.update({"3.ids": np.array(ids, np.int64)}))
    with Database(copy) as database:
        with pytest.raises(DatabaseCorruptError, match=words):
            database.index(SEQUENCE)
        database.index(0)


# -- forged


_ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 3, 255, 4096, 1 << 31, 1 << 32, 1 << 48, 1 << 62, 1 << 63, 1 << 64, -(1 << 63), 0.5,
    1e308, "", "x", "map", "input", "../x", "-1", "0", "flat", "faiss", "hnswlib", "uint8", "causal", "first",
    "\ud800", [], {}, [1], {"a": 1},
)  # fmt: skip


def _leaves(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of nested JSON: what holds it, and under which key."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield data, key
        yield from _leaves(value)


def _forge_manifest(path: Path, generator: random.Random) -> None:
    body = body_of(path)
    for _ in range(generator.choice((1, 1, 2, 4))):
        holder, key = generator.choice(list(_leaves(body)))
        how = generator.random()
        if how < 0.15:
            del holder[key]
        elif how < 0.3 and isinstance(holder[key], int):
            holder[key] += generator.choice((-1, 1, 1 << 32))
        elif how < 0.4 and isinstance(holder, list):
            holder.append(holder[key])
        else:
            holder[key] = generator.choice(_ODD)
    seal(path, body)


def _forge_bytes(data: bytes, generator: random.Random, ends: tuple[int, int] | None = None) -> bytes:
    body = bytearray(data)
    for _ in range(generator.choice((1, 1, 2, 4))):
        if not body:
            break
        first, last = ends or (0, len(body))
        at = min(generator.randrange(first, last), len(body) - 1)
        how, width = generator.random(), generator.choice((4, 8))
        if how < 0.4:
            body[at] ^= 1 << generator.randrange(8)
        elif how < 0.85:
            number = generator.choice([value for value in _ODD if isinstance(value, int)])
            body[at : at + width] = (number & ((1 << 8 * width) - 1)).to_bytes(width, "little")
        elif how < 0.95:
            del body[at : at + generator.randrange(1, 9)]
        else:
            body[at:at] = generator.randbytes(width)
    return bytes(body)


def _forge_arena(path: Path, generator: random.Random) -> None:
    file = generator.choice(sorted((path / "arena").iterdir()))
    data = file.read_bytes()
    body = bytearray(_forge_bytes(data[:HEADER_BYTES], generator, (0, 56)).ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES])
    (name,) = struct.unpack_from("<I", body, 12)
    end = 32 + min(name, 400)
    body[end : end + 8] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(body[:end])))
    file.write_bytes(bytes(body) + data[HEADER_BYTES:])


def _forge_container(path: Path, generator: random.Random) -> None:
    file = generator.choice(sorted(path.rglob("*.safetensors")))
    data = file.read_bytes()
    (header,) = struct.unpack_from("<Q", data)
    how = generator.random()
    if how < 0.2:
        file.write_bytes(_forge_bytes(data, generator, (0, min(len(data) - 8, 8 + header))))
    elif how < 0.4:
        entries = json.loads(data[8 : 8 + header])
        holder, key = generator.choice(list(_leaves(entries)))
        holder[key] = generator.choice((*_ODD, "F32", "I64", "U8", "BF16", "F8_E4M3", [0, 1 << 40], [2, 2]))
        text = json.dumps(entries).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + header :])
    else:
        arrays = load_file(str(file))
        name = generator.choice(sorted(arrays))
        raw, how = arrays[name], generator.random()
        if how < 0.7:
            until = max(1, min(raw.nbytes, generator.choice((60, 1 << 40))))
            body = _forge_bytes(raw.tobytes(), generator, (0, until))
            whole = len(body) // raw.itemsize * raw.itemsize
            forged = np.frombuffer(body[:whole], raw.dtype)
            arrays[name] = forged.reshape(raw.shape) if forged.size == raw.size else forged
        elif how < 0.8:
            other = generator.choice(("7.ids", "3.index", "x.flat", "99999999999999999999.flat", "²."))
            arrays[other] = arrays.pop(name)
        elif how < 0.9:
            arrays[name] = raw[: len(raw) // 2]
        else:
            arrays[name] = np.stack([raw, raw])
        save_file(arrays, str(file))
    reseal(path)


def _forge_catalogue(path: Path, generator: random.Random) -> None:
    records = records_of(path)
    number = generator.randrange(len(records))
    value = generator.choice((0, 1, 2, 5, 6, 8, (1 << 32) - 1))
    name = generator.choice(("length", "source", "row", "place", "split", "checksums"))
    forged: Any = (value,) * 4 if name == "checksums" else value % 256 if name == "split" else value
    records[number] = dataclasses.replace(records[number], **{name: forged})
    rewrite(path, records)


def _use_all(path: Path) -> None:
    """`use`, and what the manifest says of calibration and tuning."""
    use(path)
    ref = read_manifest(path).embedder
    if ref is not None:
        for curves in ref.calibration.values():
            for curve in curves.values() if isinstance(curves, dict) else ():
                Calibration.from_dict(curve, str(path))


def forge(whole: Path, folder: Path, seed: int, trials: int, seconds: float = 1e9) -> Counter[str]:
    """Forge something in a copy of a database and use it, in this process; what it ended with, how often."""
    generator, seen, end = random.Random(seed), Counter[str](), time.monotonic() + seconds
    ways = [_forge_manifest, _forge_arena, _forge_container, _forge_container, _forge_catalogue]
    for trial in range(trials):
        if time.monotonic() > end:
            break
        path = folder / "forged"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(whole, path)
        way = generator.choice(ways)
        way(path, generator)
        try:
            seen[outcome(lambda: _use_all(path))] += 1  # noqa: B023
        except Exception as error:
            raise AssertionError(f"seed {seed}, trial {trial}, {way.__name__}: {type(error).__name__}") from error
    return seen


def forge_backend(folder: Path, backend: str, seed: int, trials: int, seconds: float) -> None:
    """`forge` a database whose indexes are of this backend; from here on the process may take 1 GiB more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(db_index, "EXACT_BELOW", 0)  # graphs, however few the vectors
        whole = train_by_hand(fill(folder / "whole"))
        if backend != "faiss":
            body = body_of(whole)
            body["embedder"]["backend"] = backend
            seal(whole, body)
            for file in whole.glob("index-*/*"):
                arrays = {}
                for name, raw in load_file(str(file)).items():
                    part = "ids" if name.endswith("ids") else "index" if backend == "hnswlib" else "flat"
                    vectors = len(raw) if part == "ids" else db_index.FaissIndex.load(raw, 4)._index.ntotal
                    random_ = np.random.default_rng(vectors).normal(size=(vectors, 4)).astype(np.float32)
                    arrays[f"{name.split('.')[0]}.{part}"] = (
                        raw if part == "ids" else np.frombuffer(random_.tobytes(), np.uint8)
                    )
                save_file(arrays, str(file))
            reseal(whole)
        _use_all(whole)
        used = int(Path("/proc/self/statm").read_text().split()[5]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_DATA, (used + (1 << 30), used + (1 << 30)))
        seen = forge(whole, folder, seed, trials, seconds)
        assert sum(seen[name] for name in seen if name != "fine") > sum(seen.values()) // 3, seen


def forged_in_a_child(backend: str, seed: int, trials: int, seconds: float = 1e9) -> None:
    """`forge_backend` in a process of its own, which must not end by a signal.

    Not a fork of this one: faiss and torch compute with pools of threads, which stay behind in the parent. Where a
    test before had made use of one, the child waits for it for ever.
    """
    with memory_directory() as folder:
        run_child(
            """
            from pathlib import Path
            from test_reliability_forged import forge_backend
            forge_backend(Path(folder), backend, seed, trials, seconds)
            """,
            timeout=600 + (int(seconds) if seconds < 1e9 else 0),
            environment={"OMP_NUM_THREADS": "1"},
            folder=str(folder), backend=backend, seed=seed, trials=trials, seconds=seconds,
        )  # fmt: skip


@pytest.mark.parametrize("backend", ["faiss", "hnswlib", "flat"])
def test_a_forged_database_never_ends_the_process(backend: str) -> None:
    """Fields of manifest, header, catalogue, embedder and index changed, digests made to fit: an error by name."""
    forged_in_a_child(backend, seed=31, trials=800)


@pytest.mark.parametrize(
    ("field", "place", "value", "words"),
    [
        ("entry_point", None, 60, "entered where it has no vector"),
        ("entry_point", None, -1, "entered where it has no vector"),
        ("max_level", None, 9, "levels that do not exist"),
        ("levels", 3, 9, "levels that do not exist"),
        ("levels", 3, 0, "levels that do not exist"),
        ("levels", 3, 2, "lie in their places"),
        ("offsets", 3, 1 << 40, "lie in their places"),
        ("neighbors", 5, 60, "links to a vector that it does not have"),
        ("neighbors", 5, -2, "links to a vector that it does not have"),
        ("neighbors", -1, 1 << 30, "links to a vector that it does not have"),
        ("cum_nneighbor_per_level", 1, 1 << 20, "levels of another size"),
    ],
)
def test_a_graph_is_never_followed_out_of_its_memory(field: str, place: int | None, value: int, words: str) -> None:
    """faiss does not ask where a link leads: every part of a graph that lies is refused before faiss sees it."""
    import faiss

    vectors = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    graph = db_index.FaissIndex.build(vectors)._index
    good = np.array(faiss.serialize_index(graph))
    assert len(db_index.load_index(good, 4, "faiss")) == 60
    if place is None:
        setattr(graph.hnsw, field, value)
    elif field == "neighbors":
        links = faiss.vector_to_array(graph.hnsw.neighbors)
        links[place] = value
        whole = np.frombuffer(good.tobytes(), np.uint8).tobytes()
        old = faiss.vector_to_array(graph.hnsw.neighbors).tobytes()
        good = np.frombuffer(whole.replace(old, links.tobytes()), np.uint8)
    else:
        part = faiss.vector_to_array(getattr(graph.hnsw, field))
        part[place] = value
        faiss.copy_array_to_vector(part, getattr(graph.hnsw, field))
    forged = good if field == "neighbors" else np.array(faiss.serialize_index(graph))
    with pytest.raises(ValueError, match=words):
        db_index.load_index(forged, 4, "faiss")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["faiss", "hnswlib", "flat"])
def test_a_database_forged_for_minutes_never_ends_the_process(backend: str) -> None:
    """Ten minutes in all."""
    for part in range(4):
        forged_in_a_child(backend, seed=3100 + part, trials=1 << 30, seconds=50.0)
