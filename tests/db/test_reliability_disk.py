"""A disk that fails, is full, or takes only a part of a write."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import in_child
from databases import MODEL, add_maps, contents, fill, findings, memory_directory, sequence
from db_tools import SHORT, Fails, check_published, need_tmpfs, outcome, use
from safetensors import SafetensorError
from safetensors.numpy import save_file

from attmemo.db import Database, DatabaseWriter, Provenance
from attmemo.db import index as db_index
from attmemo.db.files import MANIFEST, named, storing, write_all
from attmemo.embed import siamese
from attmemo.embed.training import TrainOptions, train
from attmemo.errors import DatabaseError, StorageFullError
from attmemo.profiler.train import train_database


@pytest.mark.parametrize("forever", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EDQUOT, errno.ENOSPC], ids=errno.errorcode.get)
def test_a_failing_disk_never_costs_what_was_published(code: int, forever: bool) -> None:
    """At the i-th call, for every i: an error by name, the last generation whole, and it resumes."""
    with memory_directory() as folder:
        expected = contents(fill(folder / "straight", SHORT))
        at, seen = 0, Counter[str]()
        while True:
            path = folder / f"db{at}"
            with pytest.MonkeyPatch.context() as patch:
                disk = Fails(patch, at, code, forever)
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


def test_a_second_fsync_never_publishes_lost_pages(tmp_path: Path) -> None:
    """The kernel tells of a lost write once: after that the writer publishes nothing, however often it is asked."""
    path = fill(tmp_path / "db", SHORT[:2])
    with DatabaseWriter(path, MODEL, "float32") as writer, pytest.MonkeyPatch.context() as patch:
        add_maps(writer, *sequence(2, 3), Provenance(0, 2))
        Fails(patch, 0, errno.EIO)
        for _ in range(3):
            with pytest.raises(DatabaseError, match="Input/output error"):
                writer.publish()
        with pytest.raises(DatabaseError, match="Input/output error"):
            add_maps(writer, *sequence(3, 3), Provenance(0, 3))
    assert sorted(contents(path)) == [(0, 0), (0, 1)]


def test_a_disk_full_of_indexes_is_an_error_that_leaves_nothing_behind(
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


def test_a_full_disk_is_recognised_as_safetensors_reports_it(tmp_path: Path) -> None:
    """What `storing` recognises is what safetensors raises on a disk without room: a small tmpfs of a child's own.

    Never on /dev/full: safetensors renames over what it writes, and for root that would be the device.
    """
    tmpfs = need_tmpfs(tmp_path)

    def write() -> None:
        tmpfs.mount("size=64k")
        with pytest.raises(StorageFullError), storing(tmp_path):
            save_file({"x": np.zeros(1 << 20, np.uint8)}, str(tmp_path / "x.safetensors"))

    assert in_child(write, first=tmpfs.unshare) == 0


def test_a_full_device_is_an_error_at_once() -> None:
    """The real thing: /dev/full says ENOSPC at once."""
    fd = os.open("/dev/full", os.O_RDWR)
    try:
        with pytest.raises(OSError, match="No space left") as caught:
            write_all(fd, b"x" * 5000, 0)
        assert isinstance(named(caught.value, Path("/dev")), StorageFullError)
    finally:
        os.close(fd)


@pytest.mark.parametrize("most", [0x7FFFF000, (1 << 31) - 1, 1 << 29])
def test_a_write_above_two_gigabytes_leaves_no_hole(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
    write_all(3, body, first)  # type: ignore[arg-type]
    monkeypatch.undo()
    at = first
    for offset, count in written:
        assert offset == at
        at += count
    assert at == first + size
    assert len(written) == -(-size // most)
    body.close()
