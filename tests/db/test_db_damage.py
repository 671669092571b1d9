"""Missing, flipped, swapped and hostile files: a named error or a finding, never a signal, never a wrong number."""

from __future__ import annotations

import os
import pickle
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from children import in_child
from databases import LENGTHS, changed, fill, findings, train_by_hand
from db_tools import outcome, use

from attmemo.db import Database, read_manifest
from attmemo.db.slots import slot_checksum
from attmemo.errors import DatabaseCorruptError, DatabaseError, DatabaseTruncatedError

ROOT = Path(__file__).resolve().parents[2]


def _files(path: Path, pattern: str = "**/*") -> list[Path]:
    return sorted(file for file in path.glob(pattern) if file.is_file())


# -- missing


def test_a_missing_file_is_refused_by_name(whole: Path) -> None:
    """Each file missing in turn, or a directory in its place."""

    def lose() -> None:
        for file in _files(whole):
            away = file.with_name("away")
            file.rename(away)
            expected = "DatabaseCorruptError"
            if file.name in ("lock.mdb", "builder.lock"):
                expected = "fine"
            elif file.name == "MANIFEST.json":
                expected = "DatabaseNotFoundError"
            assert outcome(lambda: use(whole)) == expected, file
            if file.name not in ("lock.mdb", "builder.lock", "MANIFEST.json"):
                file.mkdir()
                assert outcome(lambda: use(whole)) == "DatabaseCorruptError", file
                file.rmdir()
            file.unlink(missing_ok=True)
            away.rename(file)

    assert in_child(lose) == 0
    assert findings(whole) == []


def test_an_unreadable_manifest_is_refused_by_name(copy: Path) -> None:
    """A directory called MANIFEST.json, or a database that is a file."""
    (copy / "MANIFEST.json").unlink()
    (copy / "MANIFEST.json").mkdir()
    with pytest.raises(DatabaseError, match="cannot read"):
        Database(copy)
    with pytest.raises(DatabaseError, match="is a file"):
        Database(copy / "builder.lock")
    with pytest.raises(DatabaseError, match="does not exist"):
        Database(copy / "nowhere")


# -- flipped bits


def test_check_names_the_slot(whole: Path) -> None:
    """What check finds says where: file, slot, record and layer."""
    manifest = read_manifest(whole)
    found = next(c for c in manifest.classes if c.name == "map-00008")
    slot = 2  # the second record of 8 tokens is number 6; its first layer
    with changed(whole / found.file, found.layout.offset(slot), b"\xff\xff\xff"):
        assert findings(whole) == [
            "arena/map-00008.slots, slot 2 (record 6, layer 0): the bytes do not match their checksum"
        ]
    with changed(whole / found.file, found.layout.offset(slot) + found.layout.nbytes, b"\x01"):
        assert findings(whole) == ["arena/map-00008.slots, slot 2: the padding behind the slot is not zero"]


@pytest.mark.parametrize("pattern", ["embedder-*", "index-*/*"])
def test_a_flipped_bit_in_a_derived_file_is_found_before_it_is_parsed(whole: Path, pattern: str) -> None:
    """Embedder and index containers: the digest is wrong, so faiss and safetensors never see them; check tells."""
    generator = random.Random(3)
    files = _files(whole, pattern)
    assert files
    for file in files:
        size = file.stat().st_size
        for place in {0, 8, size // 2, size - 1, *(generator.randrange(size) for _ in range(12))}:
            old = file.read_bytes()[place]
            with changed(file, place, bytes([old ^ 1 << generator.randrange(8)])):
                assert any("has digest" in line for line in findings(whole)), f"{file.name} at {place}"
                assert outcome(lambda: use(whole)) == "DatabaseCorruptError"


def test_a_flipped_catalogue_never_ends_the_process(whole: Path) -> None:
    """LMDB trusts its file. Flips in data.mdb: refused, or harmless (every record as before), never a signal."""

    def flip() -> None:
        generator = random.Random(5)
        file = whole / "catalogue" / "data.mdb"
        body = file.read_bytes()
        with Database(whole) as database:
            original = database.records
        seen: Counter[str] = Counter()
        for trial in range(900):
            page = generator.randrange(len(body) // 4096)
            near = generator.randrange(160 if page < 2 else 64)
            place = page * 4096 + (near if trial % 3 else generator.randrange(4096))
            new = body[place] ^ 1 << generator.randrange(8) if trial % 2 else generator.choice((0, 1, 127, 128, 255))
            with changed(file, place, bytes([new])):
                try:
                    with Database(whole) as database:
                        for name in ("lengths", "sources", "rows", "splits", "places", "checksums"):
                            same = np.array_equal(getattr(database.records, name), getattr(original, name))
                            assert same, f"{name} changed by byte {place}, without an error"
                        seen["same"] += 1
                except DatabaseCorruptError:
                    seen["refused"] += 1
        assert seen["refused"] > 50, seen
        assert seen["same"] > 100, seen

    assert in_child(flip) == 0
    assert findings(whole) == []


def test_a_flipped_lock_file_stops_no_reader(whole: Path) -> None:
    """LMDB's lock file holds nothing worth keeping: without another process it is made anew."""

    def flip() -> None:
        generator = random.Random(6)
        file = whole / "catalogue" / "lock.mdb"
        for _ in range(40):
            file.write_bytes(generator.randbytes(generator.choice((0, 1, 100, 4096, 8192, 9000))))
            use(whole)

    assert in_child(flip) == 0


# -- swapped


def test_a_checksum_is_of_the_bytes_and_their_place() -> None:
    """The same bytes in another slot, class or database have another checksum."""
    places = [(u, n, s) for u in ("0" * 32, "1" * 32) for n in ("map-00003", "input-00003") for s in (0, 1, 10)]
    assert len({slot_checksum(*place, b"the same bytes") for place in places}) == len(places)


def test_two_swapped_arena_files_are_refused(copy: Path, whole: Path, tmp_path: Path) -> None:
    """Of two classes, or of two databases with the same classes: refused at open."""
    other = fill(tmp_path / "other")
    one, two = copy / "arena" / "map-00003.slots", copy / "arena" / "map-00005.slots"
    one.rename(tmp_path / "x")
    two.rename(one)
    (tmp_path / "x").rename(two)
    with pytest.raises((DatabaseCorruptError, DatabaseTruncatedError)):
        Database(copy)
    (copy / "arena" / "map-00003.slots").unlink()
    shutil.rmtree(copy / "arena")
    shutil.copytree(other / "arena", copy / "arena")
    with pytest.raises(DatabaseCorruptError, match="does not begin with the header"):
        Database(copy)


@pytest.mark.parametrize("what", ["catalogue", "index-000005", "MANIFEST.json", "embedder-000005.safetensors"])
def test_a_part_of_another_database_is_refused(copy: Path, tmp_path: Path, what: str) -> None:
    """Catalogue, indexes, embedder or manifest of a database with the same model and lengths, other rows."""
    other = train_by_hand(fill(tmp_path / "other", (5, *LENGTHS[1:])), seed=9)
    assert (copy / what).exists(), sorted(f.name for f in copy.iterdir())
    if (copy / what).is_dir():
        shutil.rmtree(copy / what)
        shutil.copytree(other / what, copy / what)
    else:
        shutil.copy(other / what, copy / what)
    assert outcome(lambda: use(copy)) in ("DatabaseCorruptError", "DatabaseTruncatedError")


def test_bytes_behind_the_end_are_no_error(copy: Path) -> None:
    """What lies behind the published slots belongs to no record: a builder may just be writing there."""
    for file in _files(copy, "arena/*"):
        with file.open("ab") as stream:
            stream.write(b"\xff" * 5000)
    assert findings(copy) == []
    fill(copy, (*LENGTHS, 3, 5))
    assert findings(copy) == []


# -- nothing runs


class _Payload:
    """Unpickled, it leaves a file behind."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.canary),)


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
def test_no_pickle_is_ever_run(whole: Path, tmp_path: Path, protocol: int) -> None:
    """A malicious pickle in place of each file: a named error, and the canary is not there."""
    canary = tmp_path / "canary"
    body = pickle.dumps(_Payload(canary), protocol)

    def serve() -> None:
        for file in _files(whole):
            before = file.read_bytes()
            file.write_bytes(body.ljust(len(before), b"."))
            seen = outcome(lambda: use(whole))
            file.write_bytes(body)
            short = outcome(lambda: use(whole))
            file.write_bytes(before)
            if file.name not in ("lock.mdb", "builder.lock"):
                assert seen == "DatabaseCorruptError", file
                assert short in ("DatabaseCorruptError", "DatabaseTruncatedError"), file

    assert in_child(serve) == 0
    assert not canary.exists()
    pickle.loads(body)
    assert canary.exists(), "the pickle would not have done anything anyway"


def test_the_sources_never_unpickle() -> None:
    """No pickle, no torch.load, no numpy objects, no eval, anywhere in the package."""
    forbidden = re.compile(
        r"^\s*(import|from)\s+(pickle|marshal|shelve|dill|joblib|cloudpickle)\b|pickle\.load|torch\.load\(|"
        r"allow_pickle\s*=\s*True|trust_remote_code\s*=\s*True|weights_only\s*=\s*False|(?<![\w.])(eval|exec)\(|"
        r"yaml\.(unsafe_)?load\(|shell\s*=\s*True",
        re.MULTILINE,
    )
    files = [*(ROOT / "attmemo").rglob("*.py"), *(ROOT / "profiler").rglob("*.py")]
    assert len(files) > 30
    found = [f"{f.relative_to(ROOT)}: {m.group()}" for f in files for m in forbidden.finditer(f.read_text())]
    assert found == []
    assert forbidden.search("x = eval(text)")
    assert not forbidden.search("model.eval()")
