"""Many records, and the pages of another machine."""

from __future__ import annotations

import dataclasses
import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from databases import MODEL, contents, fill, findings
from db_tools import SHORT

from attmemo.db import Database, DatabaseWriter, read_manifest
from attmemo.db.catalogue import Catalogue, Record, add_to_digest
from attmemo.db.files import MANIFEST
from attmemo.db.manifest import Manifest
from attmemo.db.slot_kinds import kinds_of_maps
from attmemo.db.slots import SlotClass, arena_header
from attmemo.errors import DatabaseError, PageSizeError


def synthetic(path: Path, records: int) -> Path:
    """A database of so many records of two lengths whose arenas are holes, made without a model."""
    model = dataclasses.replace(MODEL, layers=1, heads=1, hidden=2)
    path.mkdir()
    (path / "arena").mkdir()
    lengths, kinds = (3, 5), kinds_of_maps(model, "float32", {})
    classes = []
    for kind in kinds:
        for length in lengths:
            found = dataclasses.replace(SlotClass.make(kind, length), places=records // 2)
            classes.append(found)
            file = path / found.file
            file.write_bytes(arena_header("7" * 32, found))
            os.truncate(file, found.layout.file_bytes)
    entries = [(n, Record(lengths[n % 2], 0, n, n // 2, 0, (0, 0)).dump()) for n in range(records)]
    catalogue = Catalogue(path, write=True)
    catalogue.put(entries)
    catalogue.close()
    manifest = Manifest(
        uuid="7" * 32,
        generation=1,
        page_size=mmap.PAGESIZE,
        model=model,
        storage="float32",
        kinds=kinds,
        records=records,
        records_digest=add_to_digest(None, entries),
        places=dict.fromkeys(lengths, records // 2),
        classes=tuple(classes),
    )
    (path / MANIFEST).write_bytes(manifest.dump())
    return path


def test_a_hundred_thousand_records_need_no_more_maps_and_descriptors(tmp_path: Path) -> None:
    """What a reader holds depends on the number of lengths, not of records."""
    few, many = synthetic(tmp_path / "few", 100), synthetic(tmp_path / "many", 100_000)

    def held(path: Path) -> tuple[int, int]:
        def count() -> tuple[int, int]:
            lines = Path("/proc/self/maps").read_text().splitlines()
            return sum(str(path) in line for line in lines), len(os.listdir("/proc/self/fd"))

        gc.collect()  # what an earlier test has left may hold descriptors
        before = count()
        with Database(path) as database:
            rows = np.linspace(0, len(database) - 1, 50).astype(int).tolist()
            for record in rows:
                assert database.map(0, record).shape == (1, 3 + 2 * (record % 2), 3 + 2 * (record % 2))
                assert not database.input(0, record).any()
            during = count()
        return during[0] - before[0], during[1] - before[1]

    assert held(few) == held(many) == (4, 8)  # Python keeps a descriptor of its own beside each map


def test_slots_of_small_pages_are_refused_on_a_machine_with_large_ones(
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
