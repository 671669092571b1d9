"""A file that is cut, or replaced under those who have it open."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from children import in_child
from databases import LENGTHS, contents
from db_tools import outcome, reseal, use

from attmemo import memoize
from attmemo.db import KIND_INPUT, KIND_MAP, Database, read_manifest
from attmemo.db.files import MANIFEST
from attmemo.db.slots import HEADER_BYTES
from attmemo.errors import DatabaseCorruptError
from attmemo.profiler.models import load_model

# -- cut


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


def test_a_file_cut_at_a_field_is_refused(copy: Path) -> None:
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


def test_a_cut_container_is_refused_even_if_its_digest_fits(copy: Path) -> None:
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


# -- cut or replaced while it is open


def test_an_arena_cut_under_an_open_database_is_an_error_and_no_signal(copy: Path) -> None:
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
            for kind in (KIND_MAP, KIND_INPUT):
                found = database.arena(kind, 8).layout
                file = copy / "arena" / f"{kind}-00008.slots"
                for size in (found.file_bytes - 1, found.offset(1), found.header, 0):
                    os.truncate(file, size)
                    mine = reads[3:] if kind == KIND_INPUT else [*reads[:3], reads[4]]
                    for number, read in enumerate(mine):
                        assert outcome(read) == "DatabaseTruncatedError", (kind, size, number)

    assert in_child(cut) == 0


def test_a_replaced_arena_never_gives_other_numbers(whole: Path, copy: Path) -> None:
    """Renamed over: a reader that mapped the file reads the old numbers; a later open is refused."""
    with Database(whole) as database:
        expected = {(k, n): database.slot(k, 1, n) for k in (KIND_MAP, KIND_INPUT) for n in range(len(database))}
    with Database(copy) as database:
        for kind in (KIND_MAP, KIND_INPUT):
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


def test_a_model_over_arenas_that_are_cut_stays_exact(
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
