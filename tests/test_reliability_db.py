"""What may happen to a database on a disk: cut, replaced, torn by a power cut, forked, forged, read while it grows.

Each test is named after what would go wrong. What takes minutes is in `slow/test_slow_db.py`, which calls the same
functions with larger numbers.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from helpers import SHORT, Write, check_published, intercept_writes, run_child
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from test_db_crash import _need_tmpfs as need_tmpfs
from test_db_tools import (
    LENGTHS,
    MODEL,
    changed,
    contents,
    end_of,
    fill,
    findings,
    in_child,
    memory_directory,
    sequence,
    start_child,
    train_by_hand,
)

from attmemo import memoize
from attmemo.db import KIND_INPUT, KIND_MAP, SEQUENCE, Database, DatabaseWriter, Provenance, read_manifest
from attmemo.db import index as db_index
from attmemo.db import writer as writer_module
from attmemo.db.catalogue import Catalogue, Record, extend_digest
from attmemo.db.format import (
    HEADER_BYTES,
    KINDS,
    MANIFEST,
    Manifest,
    SlotClass,
    arena_header,
    check_arena,
    file_digest,
    slot_shape,
)
from attmemo.embed import siamese
from attmemo.embed.calibration import Calibration
from attmemo.embed.siamese import load_embedders
from attmemo.embed.train import TrainOptions, train
from attmemo.errors import (
    AttmemoError,
    DatabaseCorruptError,
    DatabaseError,
    DatabaseLockedError,
    DatabaseNotFoundError,
    ForkedHandleError,
    GenerationMismatchError,
    PageSizeError,
    StaleDatabaseError,
    StorageFullError,
)
from attmemo.profiler.models import load_model
from attmemo.profiler.open import open_model
from attmemo.profiler.train import train_database

Body = dict[str, Any]
GOLDEN = Path(__file__).with_name("golden") / "v1"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small database with embedders and indexes. Tests put back what they change."""
    return train_by_hand(fill(tmp_path_factory.mktemp("reliability") / "db"))


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged for good."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def use(path: Path) -> None:
    """Everything a server and `check` do with a database: open, embed, search, read."""
    with Database(path) as database:
        if database.trained:
            ref = database.embedder_ref()
            embedders = load_embedders(database.derived(ref.weights), database.manifest.model.hidden)
            for layer in range(SEQUENCE, database.manifest.model.layers):
                index = database.index(layer)
                if layer not in embedders:
                    raise DatabaseCorruptError("an embedder is missing", "train")
                for length in sorted(index.lengths & set(database.lengths)):
                    if length <= embedders[layer].longest:
                        hidden = torch.zeros((1, length, database.manifest.model.hidden))
                        vector = embedders[layer].embed(hidden, [length]).numpy()
                        if vector.shape[1] == ref.report.get("dimension", 128):
                            ids, _ = index.search(length, vector, 2)
                            assert set(ids.ravel().tolist()) <= {-1, *range(len(database))}
        for finding in database.check():
            raise DatabaseCorruptError(finding.where, "restore")


def outcome(work: Callable[[], object]) -> str:
    """What a use ends with: "fine", or the name of an error of this library, which says what to do next."""
    seen: AttmemoError | None = None
    try:
        work()
    except AttmemoError as error:
        seen = error
    assert seen is None or seen.hint, f"no next step: {seen}"
    return "fine" if seen is None else type(seen).__name__


def body_of(path: Path) -> Body:
    """The manifest as JSON."""
    found: Body = json.loads((path / MANIFEST).read_text().rsplit("\n", 2)[0])
    return found


def seal(path: Path, body: object) -> None:
    """Write a manifest with a checksum that fits, whatever it says."""
    text = body if isinstance(body, str) else json.dumps(body, indent=1, sort_keys=True)
    (path / MANIFEST).write_bytes(f"{text}\n{xxhash.xxh3_64_hexdigest(text.encode())}\n".encode())


def reseal(path: Path) -> None:
    """Make the manifest's digests those of the derived files as they are now."""
    body = body_of(path)
    for ref in (body["embedder"]["weights"], *body["embedder"]["indexes"].values()):
        ref["digest"] = file_digest(path / ref["file"])
    seal(path, body)


def records_of(path: Path) -> list[Record]:
    """The catalogue's entries."""
    manifest = read_manifest(path)
    catalogue = Catalogue(path, len(KINDS), manifest.model.layers)
    try:
        return [record for _, record in catalogue.entries(manifest.records)]
    finally:
        catalogue.close()


def rewrite(path: Path, records: list[Record]) -> None:
    """Put other entries into the catalogue, with a digest that fits."""
    body = body_of(path)
    catalogue = Catalogue(path, len(KINDS), body["model"]["layers"], write=True)
    try:
        catalogue.truncate(0)
        catalogue.append(0, records)
    finally:
        catalogue.close()
    body["records_digest"] = extend_digest("", records)
    seal(path, body)


# -- cut (T1)


def _boundaries(file: Path, path: Path) -> set[int]:
    """Where fields of a file begin and end."""
    data = file.read_bytes()
    if file.name == MANIFEST:
        return {at for at, byte in enumerate(data) if byte in b"\n,:"} | {len(data)}
    if file.suffix == ".safetensors":
        (header,) = struct.unpack_from("<Q", data)
        entries = json.loads(data[8 : 8 + header])
        ends = {8 + header + end for name, e in entries.items() if name != "__metadata__" for end in e["data_offsets"]}
        return {0, 8, 8 + header} | ends
    if file.suffix == ".slots":
        (found,) = (c for c in read_manifest(path).classes if Path(c.file).name == file.name)
        layout, name = found.layout, len(found.name)
        starts = {layout.offset(slot) for slot in range(found.slots + 1)}
        ends = {layout.offset(slot) + layout.nbytes for slot in range(found.slots)}
        return {0, 8, 12, 16, 32, 32 + name, 40 + name, HEADER_BYTES, found.header} | starts | ends
    fields = {0, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 88, 136, 144, 152}
    return {page + field for page in range(0, len(data), 4096) for field in fields}


def test_a_file_cut_at_a_field_is_read_as_if_it_were_whole(copy: Path) -> None:
    """Every file cut at every boundary of a field, and a byte beside it: an error by name, and never a signal."""
    expected = contents(copy)
    # A layer's index has the same fields as another's, and a class the same as another's.
    kinds = ["MANIFEST.json", "embedder-*", "index-*/sequence.*", "arena/map-00008.slots", "catalogue/data.mdb"]
    files = [file for kind in kinds for file in sorted(copy.glob(kind))]
    assert len(files) == len(kinds)

    def cut() -> None:
        for file in files:
            data = file.read_bytes()
            for point in sorted({b + d for b in _boundaries(file, copy) for d in (-1, 0, 1)}):
                if not 0 <= point < len(data):
                    continue
                os.truncate(file, point)
                seen = outcome(lambda: use(copy))
                where = f"{file.name} cut at {point} of {len(data)}: {seen}"
                if file.name == "data.mdb" and seen == "fine":
                    assert contents(copy) == expected, where  # a page that nothing refers to
                elif file.suffix == ".slots":
                    assert seen == "DatabaseTruncatedError", where
                else:
                    assert seen == "DatabaseCorruptError", where
                file.write_bytes(data)

    assert in_child(cut) == 0
    assert contents(copy) == expected


def test_a_cut_container_with_a_digest_that_fits_is_searched(copy: Path) -> None:
    """The same cuts of embedder and index, the manifest made to agree: what parses them tells."""

    def cut() -> None:
        for pattern in ("embedder-*", "index-*/sequence.*"):
            (file,) = copy.glob(pattern)
            data = file.read_bytes()
            for point in sorted({b + d for b in _boundaries(file, copy) for d in (-1, 0, 1)}):
                if 0 <= point < len(data):
                    file.write_bytes(data[:point])
                    reseal(copy)
                    assert outcome(lambda: use(copy)) == "DatabaseCorruptError", f"{file.name} cut at {point}"
            file.write_bytes(data)

    assert in_child(cut) == 0


# -- cut or replaced while it is open (T2)


def test_an_arena_cut_under_an_open_database_is_a_signal(copy: Path) -> None:
    """Truncated in place: every way to a slot says so."""

    def cut() -> None:
        with Database(copy) as database:
            reads: list[Callable[[], object]] = [
                lambda: database.view(KIND_MAP, 0, 3),
                lambda: database.slot(KIND_MAP, 1, 6),
                lambda: database.map(0, 6),
                lambda: database.input(1, 3),
                lambda: list(database.check()),
            ]
            for read in reads:
                read()
            for kind in KINDS:
                found = database.arena(kind, 8).layout
                file = copy / "arena" / f"{kind}-00008.slots"
                for size in (found.file_bytes - 1, found.offset(1), found.header, 0):
                    os.truncate(file, size)
                    mine = reads[3:] if kind == KIND_INPUT else [*reads[:3], reads[4]]
                    for number, read in enumerate(mine):
                        assert outcome(read) == "DatabaseTruncatedError", (kind, size, number)

    assert in_child(cut) == 0


def test_an_arena_that_was_replaced_gives_other_numbers(whole: Path, copy: Path) -> None:
    """Renamed over: who has it mapped reads what was; who opens it later is told that it is another file."""
    with Database(whole) as database:
        expected = {(k, n): database.slot(k, 1, n) for k in KINDS for n in range(len(database))}
    with Database(copy) as database:
        for kind in KINDS:
            database.arena(kind, 8)
        for file in sorted((copy / "arena").iterdir()):
            other = file.with_name("other")
            other.write_bytes(bytes(file.stat().st_size))
            other.replace(file)
        for (kind, record), body in expected.items():
            if LENGTHS[record] == 8:
                assert torch.equal(database.slot(kind, 1, record), body)
            else:
                with pytest.raises(DatabaseCorruptError, match="does not begin with the header"):
                    database.slot(kind, 1, record)
    with pytest.raises(DatabaseCorruptError):
        Database(copy)


def test_a_model_is_served_from_a_file_that_is_gone(
    bert_database: Path, tiny_bert: str, log_lines: list[str], tmp_path: Path
) -> None:
    """A memoized model over arenas that are replaced, then cut: the same answers bit for bit, then exact ones."""
    path = Path(shutil.copytree(bert_database, tmp_path / "db"))
    loaded = load_model(tiny_bert)
    inputs = loaded.tokenizer(log_lines[:6], truncation=True, max_length=48, padding=True, return_tensors="pt")

    def serve() -> None:
        with torch.inference_mode():
            exact = loaded.model(**inputs).logits
            model: Any = memoize(loaded.model, 0.0, path, gate=False)
            served = model(**inputs).logits
            assert model.attmemo.stats()["hit_rate"] == 1.0
            away = Path(shutil.copytree(path / "arena", tmp_path / "away"))
            for file in (path / "arena").iterdir():
                (away / file.name).write_bytes(bytes(file.stat().st_size))
                kept = file.rename(tmp_path / f"kept-{file.name}")
                (away / file.name).rename(file)
                assert kept.exists()
            assert torch.equal(model(**inputs).logits, served)
            for file in tmp_path.glob("kept-*"):
                os.truncate(file, 4096)
            model.attmemo.reset_stats()
            assert torch.equal(model(**inputs).logits, exact)
            assert model.attmemo.stats()["hit_rate"] == 0.0
            assert any("DatabaseTruncatedError" in reason for reason in model.attmemo.stats()["failures"])

    assert in_child(serve) == 0


# -- fork (T11)


def test_a_forked_writer_writes_over_its_parent(tmp_path: Path) -> None:
    """In the child add and publish are refused; it closes and exits, and the parent's lock and file are as before."""
    path = tmp_path / "db"
    expected = contents(fill(tmp_path / "straight", SHORT, every=len(SHORT)))
    with DatabaseWriter(path, MODEL, "float32") as writer:
        source = writer.add_source("synthetic.log", "d" * 32)
        for row, length in enumerate(SHORT):
            writer.add(*sequence(row, length), Provenance(source, row, row % 2))
            before = {f: f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()}

            def child() -> None:
                with pytest.raises(ForkedHandleError, match="is its fork"):
                    writer.add(*sequence(9, 5), Provenance(0, 9))
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


def test_a_forked_reader_reads_other_bytes(whole: Path) -> None:
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


# -- a disk that fails, or is full (T13, T14)


class _Fails:
    """One system call fails with a code, or all from then on."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, code: int, forever: bool = False) -> None:
        self.calls, self.at, self.code, self.forever, self.failed = 0, at, code, forever, ""
        intercept_writes(patch, self._write)

    def _write(self, write: Write) -> Any:
        self.calls += 1
        if self.calls - 1 == self.at or (self.forever and self.calls > self.at):
            self.failed = self.failed or write.name
            raise OSError(self.code, os.strerror(self.code))
        return write.do()


@pytest.mark.parametrize("forever", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EDQUOT], ids=errno.errorcode.get)
def test_a_failing_disk_costs_what_was_published(code: int, forever: bool) -> None:
    """EIO or a quota at the i-th call, for every i: an error by name, the last generation whole, and it resumes."""
    with memory_directory() as folder:
        expected = contents(fill(folder / "straight", SHORT))
        at, seen = 0, Counter[str]()
        while True:
            path = folder / f"db{at}"
            with pytest.MonkeyPatch.context() as patch:
                disk = _Fails(patch, at, code, forever)
                told = outcome(lambda: fill(path, SHORT))  # noqa: B023
            if not disk.failed:
                assert told == "fine"
                break
            assert told == ("DatabaseError" if code == errno.EIO else "StorageFullError"), disk.failed
            seen[disk.failed] += 1
            if (path / MANIFEST).exists():
                check_published(path, expected)
            assert not (path / "MANIFEST.json.tmp").exists()
            fill(path, SHORT)
            assert contents(path) == expected
            assert findings(path) == []
            at += 1
        assert set(seen) == {"pwrite", "fdatasync", "fsync", "ftruncate", "replace"}


def test_a_second_fsync_makes_lost_pages_published(tmp_path: Path) -> None:
    """The kernel tells of a lost write once: after that the writer publishes nothing, however often it is asked."""
    path = fill(tmp_path / "db", SHORT[:2])
    with DatabaseWriter(path, MODEL, "float32") as writer, pytest.MonkeyPatch.context() as patch:
        writer.add(*sequence(2, 3), Provenance(0, 2))
        _Fails(patch, 0, errno.EIO)
        for _ in range(3):
            with pytest.raises(DatabaseError, match="Input/output error"):
                writer.publish()
        with pytest.raises(DatabaseError, match="Input/output error"):
            writer.add(*sequence(3, 3), Provenance(0, 3))
    assert sorted(contents(path)) == [(0, 0), (0, 1)]


def test_a_disk_full_of_indexes_is_a_traceback(
    bert_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No room while training writes embedder or an index: said so, nothing lost, nothing left lying about."""
    path = Path(shutil.copytree(bert_database, tmp_path / "db"))
    before = {f: f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file() and f.name != "lock.mdb"}
    calls, at = 0, 0

    def full(save: Callable[..., None]) -> Callable[..., None]:
        def saved(tensors: Any, file: str, owner: Any) -> None:
            nonlocal calls
            calls += 1
            if calls - 1 == at:
                Path(file).write_bytes(b"the first half")
                raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
            save(tensors, file, owner)

        return saved

    with Database(path) as database, monkeypatch.context() as patch:
        trained = train(database, TrainOptions(steps=0))
        patch.setattr(siamese, "save_file", full(siamese.save_file))
        patch.setattr(db_index, "save_file", full(db_index.save_file))
        patch.setattr("attmemo.profiler.train.train", lambda *_: trained)
        for at in range(4):  # noqa: B007
            calls = 0
            with pytest.raises(StorageFullError, match="the disk is full"):
                train_database(path, TrainOptions(steps=0), profile=False)
            left = {f: f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file() and f.name != "lock.mdb"}
            assert {f for f in left if f not in before} == set()
            assert all(left[f] == body for f, body in before.items() if f.name != "builder.lock")
        use(path)
        at = -1
        train_database(path, TrainOptions(steps=0), profile=False)
    use(path)


def test_safetensors_says_otherwise_that_a_disk_is_full(tmp_path: Path) -> None:
    """What `storing` recognises is what safetensors raises on a disk without room: a small tmpfs of a child's own.

    Never on /dev/full: safetensors renames over what it writes, and for root that would be the device.
    """
    tmpfs = need_tmpfs(tmp_path)

    def write() -> None:
        tmpfs.mount("size=64k")
        with pytest.raises(StorageFullError), writer_module.storing(tmp_path):
            save_file({"x": np.zeros(1 << 20, np.uint8)}, str(tmp_path / "x.safetensors"))

    assert in_child(write, first=tmpfs.unshare) == 0


def test_a_full_device_is_written_to_for_ever() -> None:
    """The real thing: /dev/full says ENOSPC at once."""
    fd = os.open("/dev/full", os.O_RDWR)
    try:
        with pytest.raises(OSError, match="No space left") as caught:
            writer_module._write_all(fd, b"x" * 5000, 0)
        assert isinstance(writer_module._named(caught.value, Path("/dev")), StorageFullError)
    finally:
        os.close(fd)


@pytest.mark.parametrize("most", [0x7FFFF000, (1 << 31) - 1, 1 << 29])
def test_a_write_above_two_gigabytes_leaves_a_hole(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux writes at most 2 GiB less a page at once: the rest follows, from where it stopped."""
    size, first = (5 << 30) + 12345, 8192
    written: list[tuple[int, int]] = []

    def pwrite(_: int, body: memoryview, offset: int) -> int:
        written.append((offset, min(len(body), most)))
        return written[-1][1]

    try:
        body = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, mmap.PROT_READ)  # MAP_NORESERVE
    except (OSError, ValueError) as error:
        pytest.skip(f"no address range of {size} bytes: {error}")
    monkeypatch.setattr(os, "pwrite", pwrite)
    writer_module._write_all(3, body, first)  # type: ignore[arg-type]
    monkeypatch.undo()
    at = first
    for offset, count in written:
        assert offset == at
        at += count
    assert at == first + size
    assert len(written) == -(-size // most)
    body.close()


# -- many records (T17), other pages (T21)


def synthetic(path: Path, records: int) -> Path:
    """A database of so many records of two lengths whose arenas are holes, made without a model."""
    model = dataclasses.replace(MODEL, layers=1, heads=1, hidden=2)
    path.mkdir()
    (path / "arena").mkdir()
    lengths = (3, 5)
    classes = {}
    for kind in KINDS:
        for length in lengths:
            empty = SlotClass.make(kind, length, slot_shape(kind, length, model), "float32")
            found = classes[kind, length] = dataclasses.replace(empty, slots=records // 2)
            file = path / found.file
            file.write_bytes(arena_header("7" * 32, found))
            os.truncate(file, found.layout.file_bytes)
    entries = [
        Record(lengths[n % 2], 0, n, 0, np.full((2, 1), n // 2, np.uint64), np.zeros((2, 1), np.uint64))
        for n in range(records)
    ]
    catalogue = Catalogue(path, len(KINDS), 1, write=True)
    catalogue.append(0, entries)
    catalogue.close()
    manifest = Manifest(
        uuid="7" * 32,
        generation=1,
        page_size=mmap.PAGESIZE,
        model=model,
        storage="float32",
        records=records,
        records_digest=extend_digest("", entries),
        classes=tuple(classes.values()),
    )
    (path / MANIFEST).write_bytes(manifest.dump())
    return path


def test_a_hundred_thousand_records_are_as_many_maps_and_descriptors(tmp_path: Path) -> None:
    """What a reader holds depends on the number of lengths, not of records."""
    few, many = synthetic(tmp_path / "few", 100), synthetic(tmp_path / "many", 100_000)

    def held(path: Path) -> tuple[int, int]:
        def count() -> tuple[int, int]:
            lines = Path("/proc/self/maps").read_text().splitlines()
            return sum(str(path) in line for line in lines), len(os.listdir("/proc/self/fd"))

        before = count()
        with Database(path) as database:
            rows = np.linspace(0, len(database) - 1, 50).astype(int).tolist()
            for record in rows:
                assert database.map(0, record).shape == (1, 3 + 2 * (record % 2), 3 + 2 * (record % 2))
                assert not database.input(0, record).any()
            during = count()
        return during[0] - before[0], during[1] - before[1]

    assert held(few) == held(many) == (4, 8)  # Python keeps a descriptor of its own beside each map


def test_slots_of_small_pages_are_mapped_on_a_machine_with_large_ones(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 KiB pages: a database of 4 KiB ones is refused with what to do, one built there opens; here it opens too."""
    sysconf, page = os.sysconf, mmap.PAGESIZE
    if page >= 65536:
        pytest.skip("these are large pages")
    large = tmp_path / "large"
    with monkeypatch.context() as patch:
        patch.setattr(os, "sysconf", lambda name: 65536 if name == "SC_PAGE_SIZE" else sysconf(name))
        with pytest.raises(PageSizeError, match=rf"built for pages of {page} bytes; these have 65536") as caught:
            Database(whole)
        assert "build it again" in str(caught.value)
        with pytest.raises(DatabaseError, match="built for pages of"):
            DatabaseWriter(whole, MODEL, "float32")
        fill(large, SHORT)
        assert all(c.stride % 65536 == c.header % 65536 == 0 for c in read_manifest(large).classes)
        assert findings(large) == []
    assert contents(large) == contents(fill(tmp_path / "small", SHORT))
    with pytest.raises(DatabaseError, match="built for pages of 65536"):
        fill(large)


# -- parts of another database or generation (T26)


def test_an_index_of_another_database_is_searched(bert_database: Path, deberta_database: Path, tmp_path: Path) -> None:
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


def test_an_index_of_another_generation_is_searched(bert_database: Path, tiny_bert: str, tmp_path: Path) -> None:
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


# -- numbers that do not fit (T32)


def _changed_record(number: int, **values: Any) -> Callable[[list[Record]], None]:
    def change(records: list[Record]) -> None:
        records[number] = dataclasses.replace(records[number], **values)

    return change


def _slot(number: int, kind: int, layer: int, value: int) -> Callable[[list[Record]], None]:
    def change(records: list[Record]) -> None:
        slots = records[number].slots.copy()
        slots[kind, layer] = value
        records[number] = dataclasses.replace(records[number], slots=slots)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_slot(2, 0, 0, 0), "two records name the same slot of map-00003"),
        (_slot(2, 1, 1, 2), "two records name the same slot of input-00003"),
        (_slot(0, 0, 0, 1), "name the same slot"),  # of its own second layer
        (_slot(0, 0, 0, 6), "beyond the 6 of map-00003"),
        (_slot(0, 1, 1, (1 << 62) - 1), "beyond the 6 of input-00003"),
        (_slot(0, 0, 0, 1 << 62), "impossible row or slot"),
        (_slot(0, 0, 0, 1 << 63), "impossible row or slot"),
        (_slot(0, 0, 0, (1 << 64) - 1), "impossible row or slot"),
        (_changed_record(0, row=1 << 62), "impossible row or slot"),
        (_changed_record(0, length=6), "has 6 tokens"),
        (_changed_record(0, length=0), "has 0 tokens"),
        (_changed_record(0, length=(1 << 32) - 1), "has 4294967295 tokens"),
        (_changed_record(0, source=1), "data source that is not listed"),
        (_changed_record(0, slots=np.zeros((2, 3), np.uint64), checksums=np.zeros((2, 3), np.uint64)), "bytes, exp"),
        (_changed_record(0, slots=np.zeros((2, 1), np.uint64), checksums=np.zeros((2, 1), np.uint64)), "bytes, exp"),
        (list.pop, "records, the manifest says"),
    ],
)
def test_a_forged_record_reads_anothers_slots(
    copy: Path, change: Callable[[list[Record]], object], words: str
) -> None:
    """Slots named twice, slots, sources and lengths that are none, values of another size: refused at open."""
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
def test_an_index_names_records_that_have_no_such_map(copy: Path, ids: list[int], words: str) -> None:
    """Ids twice, of another length, or of no record: refused when it is loaded."""
    _container(copy, lambda arrays: arrays.update({"3.ids": np.array(ids, np.int64)}))
    with Database(copy) as database:
        with pytest.raises(DatabaseCorruptError, match=words):
            database.index(SEQUENCE)
        database.index(0)


# -- every bit (T39)


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "BF16", "F64", "C64", "BOOL", "U4"])
def test_numbers_of_a_type_that_nobody_here_has_are_read(copy: Path, kind: str) -> None:
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
                                seen = next(database.check(), None) is not None
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
        writer.add(*sequence(0, 3, model), Provenance(writer.add_source("x", "0" * 32), 0))
        writer.publish()
    return path


def test_a_bit_is_flipped_and_nobody_sees(tmp_path: Path) -> None:
    """Every byte of the arenas of a tiny database, and every bit of its manifest."""
    generator = random.Random(39)
    with memory_directory() as folder:
        assert flip_every(tiny(folder / "db"), lambda at: [generator.randrange(8)] if at % 8 < 2 else []) > 10_000


def test_two_slots_change_places(copy: Path) -> None:
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


# -- killed (T23)


def kill_cycles(cycles: int, seed: int) -> None:
    """A builder killed at random times, resumed by the next; what it acknowledged in a file is there and exact."""
    generator = random.Random(seed)
    lengths = [generator.randint(2, 9) for _ in range(60)]
    with memory_directory() as folder:
        expected = contents(fill(folder / "straight", lengths, every=1))
        path, oracle, finished = folder / "db", folder / "told", 0

        def build() -> None:
            with DatabaseWriter(path, MODEL, "float32") as writer, oracle.open("a") as told:
                source = writer.add_source("synthetic.log", "d" * 32)
                for row, length in list(enumerate(lengths))[writer.records :]:
                    writer.add(*sequence(row, length), Provenance(source, row, row % 2))
                    manifest = writer.publish()
                    told.write(f"{manifest.generation} {manifest.records}\n")
                    told.flush()

        for _ in range(cycles):
            pid = start_child(build)
            time.sleep(generator.uniform(0.0, 0.05))
            os.kill(pid, signal.SIGKILL)
            assert end_of(pid) in (0, -signal.SIGKILL)
            lines = oracle.read_text().split("\n")[:-1] if oracle.exists() else []
            generation, records = map(int, lines[-1].split()) if lines else (0, 0)
            if (path / MANIFEST).exists():
                manifest = read_manifest(path)
                assert generation <= manifest.generation <= generation + 1
                assert records <= manifest.records <= records + 1
                assert check_published(path, expected) == manifest.records
            else:
                assert generation == 0
            if records == len(lengths):
                finished += 1
                shutil.rmtree(path)
                oracle.unlink()
        fill(path, lengths, every=1)
        assert contents(path) == expected


def test_a_killed_builder_loses_what_it_acknowledged() -> None:
    """25 kills by the clock."""
    kill_cycles(25, seed=23)


# -- power loss (T25)


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


def test_a_power_cut_leaves_half_a_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prefix of a build's writes, the unsynced ones dropped, kept, torn or mixed: what was published opens."""
    lengths = (3, 5, 3)
    with memory_directory() as folder:
        root = folder / "db"
        root.mkdir()
        drive, told = _Drive(root), []
        append = Catalogue.append

        def appended(self: Catalogue, first: int, records: Any) -> None:
            drive.notice()
            append(self, first, records)
            drive.notice()

        with monkeypatch.context() as patch:
            patch.setattr(Catalogue, "append", appended)
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


# -- another model (T27, T28)


def _trained_one_step(model: Any) -> None:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.arange(12).view(2, 6)
    model(input_ids=inputs, labels=torch.tensor([0, 1])).loss.backward()
    optimizer.step()
    model.zero_grad()
    model.eval()


def test_a_fine_tuned_model_is_served_old_maps(bert_database: Path, tiny_bert: str) -> None:
    """One step of SGD: refused, and the weights are named."""
    model: Any = load_model(tiny_bert).model
    _trained_one_step(model)
    with pytest.raises(StaleDatabaseError, match="weights: database sha256"):
        memoize(model, 0.5, bert_database)


def test_another_mask_is_served(bert_database: Path, tiny_bert: str, tmp_path: Path) -> None:
    """Family, mask kind and number of layers are of the model: each is named."""
    for change, words in (({"mask_kind": "window"}, "mask kind: database window, model"), ({"family": "x"}, "family")):
        path = Path(shutil.copytree(bert_database, tmp_path / next(iter(change))))
        body = body_of(path)
        body["model"].update(change)
        seal(path, body)
        with pytest.raises(StaleDatabaseError, match=words):
            memoize(load_model(tiny_bert).model, 0.5, path)


def test_another_tokenizer_cuts_the_texts(bert_database: Path, tiny_bert: str, tmp_path: Path) -> None:
    """The weights of the build beside another vocabulary: what the command line opens is refused."""
    info = read_manifest(bert_database).model
    assert open_model(info).name == info.name
    folder = Path(shutil.copytree(tiny_bert, tmp_path / "model"))
    body = json.loads((folder / "tokenizer.json").read_text())
    words = sorted(body["model"]["vocab"].items(), key=lambda item: -item[1])
    body["model"]["vocab"][words[0][0]], body["model"]["vocab"][words[1][0]] = words[1][1], words[0][1]
    (folder / "tokenizer.json").write_text(json.dumps(body))
    with pytest.raises(StaleDatabaseError, match="another tokenizer"):
        open_model(info, str(folder))


# -- forged (T31)

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
    raw = bytearray(records[number].dump())
    at = generator.randrange(len(raw) - 8)
    raw[at : at + 8] = struct.pack("<Q", generator.choice((0, 1, 5, 6, 8, (1 << 62) - 1, 1 << 63)))
    records[number] = Record.parse(bytes(raw), len(KINDS), MODEL.layers)
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
            from test_reliability_db import forge_backend
            forge_backend(Path(folder), backend, seed, trials, seconds)
            """,
            timeout=240 + (int(seconds) if seconds < 1e9 else 0),
            environment={"OMP_NUM_THREADS": "1"},
            folder=str(folder), backend=backend, seed=seed, trials=trials, seconds=seconds,
        )  # fmt: skip


@pytest.mark.parametrize("backend", ["faiss", "hnswlib", "flat"])
def test_a_forged_database_ends_the_process(backend: str) -> None:
    """Fields of manifest, header, catalogue, embedder and index changed, digests made to fit: an error by name."""
    if backend == "hnswlib":
        pytest.importorskip("hnswlib", reason="hnswlib is an extra")
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
def test_a_graph_is_followed_out_of_its_memory(field: str, place: int | None, value: int, words: str) -> None:
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


# -- readers beside a builder and a trainer (T35, T37)


def readers_beside_a_builder(readers: int, seconds: float) -> None:
    """One process builds; others open, compare every slot with what it must be, and see counts that only grow."""
    with memory_directory() as folder:
        path, stop = fill(folder / "db", LENGTHS[:1]), folder / "stop"

        def build() -> None:
            with DatabaseWriter(path, MODEL, "float32") as writer:
                row = writer.records
                while not stop.exists():
                    length = LENGTHS[row % len(LENGTHS)]
                    writer.add(*sequence(row % 64, length), Provenance(0, row))
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

        limit = int(seconds) + 60
        builder = start_child(build, limit)
        children = [start_child(read, limit) for _ in range(readers)]
        time.sleep(seconds)
        stop.touch()
        assert [end_of(pid) for pid in (builder, *children)] == [0] * (readers + 1)
        assert len(contents(path)) > 10
        assert findings(path) == []


def test_a_reader_beside_a_builder_reads_a_torn_slot() -> None:
    """One builder and four readers, each a process."""
    readers_beside_a_builder(4, 4.0)


def test_a_reader_loses_its_index_to_a_second_training(bert_database: Path, tiny_bert: str, tmp_path: Path) -> None:
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


# -- a database that was written by version 1 of the format


def make_golden(path: Path = GOLDEN) -> None:
    """Write the database that is kept in the repository. Only to be run for a new version of the format.

    Three records of random numbers, random embedders, exact indexes::

        python -c "import sys; sys.path.insert(0, 'tests'); import test_reliability_db as t; t.make_golden()"
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    train_by_hand(fill(path, (3, 5, 3)))
    for name in ("catalogue/lock.mdb", "builder.lock"):
        (path / name).unlink()


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


def test_a_database_of_version_1_reads_as_something_else(tmp_path: Path) -> None:
    """The files in the repository, opened by the code of today."""
    if mmap.PAGESIZE > 4096:
        pytest.skip("the database was built for pages of 4096 bytes")
    path = Path(shutil.copytree(GOLDEN, tmp_path / "v1"))
    manifest = read_manifest(path)
    assert (manifest.records, manifest.generation, manifest.storage) == (3, 3, "float32")
    assert digest_of(path) == "fffac35cea8a310443021e95952ddb8c"
    assert findings(path) == []
    assert sum(file.stat().st_size for file in GOLDEN.rglob("*") if file.is_file()) < 200_000
    fill(path, (3, 5, 3, 8))  # and a builder goes on with it
    assert findings(path) == []
