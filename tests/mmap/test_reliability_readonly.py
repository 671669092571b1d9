"""No process writes what is served."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from children import run_child
from databases import fill
from mmap_tools import SLOTS, make_arena, pretend_huge

from attmemo.db import KIND_INPUT, KIND_MAP, Database
from attmemo.mmap import Arena, MapFetcher, SlotLayout


def writable(entry: str) -> bool:
    """Whether a paragraph of smaps allows a store, now or after mprotect."""
    flags = re.search(r"^VmFlags: (.*)$", entry, re.M)
    assert flags is not None
    return "w" in entry.split()[1] or bool({"wr", "mw"} & set(flags[1].split()))


def file_mappings(*names: str) -> list[str]:
    """The paragraphs of smaps whose file has one of these in its name."""
    text = Path("/proc/self/smaps").read_text(errors="replace")
    entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.M)
    return [entry for entry in entries if any(name in entry.split("\n", 1)[0] for name in names)]


def test_no_mapping_of_an_arena_a_window_or_a_copy_in_memory_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_huge(monkeypatch)
    layout = SlotLayout.paged((2, 27, 27), torch.float32, slots=SLOTS)
    plain = make_arena(tmp_path / "arena.bin", layout)
    huge = Arena(tmp_path / "arena.bin", layout, "hugepages")
    assert huge.residency == "hugepages"
    fetcher, other = MapFetcher(), MapFetcher()
    with fetcher.fetch(plain, [1, 3, 5]) as batch, other.fetch(huge, [1, 3, 5]) as copied:
        assert fetcher.fallbacks == other.fallbacks == 0
        assert torch.equal(batch[1], copied[1])
        found = file_mappings(str(tmp_path), "memfd:attmemo-arena")
        assert len(found) >= 8  # each arena, and three slots of each in a window
        assert not any(map(writable, found))


def test_a_slot_of_a_database_may_be_written_and_the_file_stays_as_it_was(tmp_path: Path) -> None:
    path = fill(tmp_path / "db")
    # All but the table of who reads at the moment, which LMDB keeps for every reader.
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != "lock.mdb")
    before = {file: file.read_bytes() for file in files}
    with Database(path) as database:
        for kind in (KIND_MAP, KIND_INPUT):
            view = database.view(kind, 0, 1)
            for store in (lambda v=view: v.zero_(), lambda v=view: v.masked_fill_(v > 0, 1.0)):
                assert run_child(store, signals=["SIGSEGV"]).signal == "SIGSEGV"
            copy = database.slot(kind, 0, 1)
            original = copy.clone()
            copy.zero_()
            assert torch.equal(database.view(kind, 0, 1), original)
        found = file_mappings(".slots")
        assert found
        assert not any(map(writable, [entry for entry in found if str(path) in entry]))
        assert {file: file.read_bytes() for file in files} == before
