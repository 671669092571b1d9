"""Truncated, flipped, swapped and hostile files: a named error or a finding, never a signal, never a wrong number."""

from __future__ import annotations

import os
import pickle
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from children import in_child
from databases import LENGTHS, MODEL, changed, contents, fill, findings, train_by_hand

from attmemo.db import SEQUENCE, Database, read_manifest
from attmemo.db.manifest import Manifest
from attmemo.db.slots import HEADER_BYTES, slot_checksum
from attmemo.embed.siamese import load_embedders
from attmemo.errors import DatabaseCorruptError, DatabaseError, DatabaseTruncatedError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small database with embedders and indexes. Tests put back what they change."""
    return train_by_hand(fill(tmp_path_factory.mktemp("damage") / "db"))


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged for good."""
    return Path(shutil.copytree(whole, tmp_path / "db"))


def _files(path: Path, pattern: str = "**/*") -> list[Path]:
    return sorted(file for file in path.glob(pattern) if file.is_file())


def _use(path: Path) -> None:
    """Everything a server and `check` do with a database."""
    with Database(path) as database:
        embedder = database.embedder_ref()
        load_embedders(database.derived(embedder.weights), database.manifest.model.hidden)
        for layer in range(SEQUENCE, database.manifest.model.layers):
            database.index(layer)
        for finding in database.check():
            raise DatabaseCorruptError(finding.where, "restore")


def _outcome(use: Callable[[], object]) -> str:
    seen: DatabaseError | None = None
    try:
        use()
    except DatabaseError as error:
        seen = error
    assert seen is None or seen.hint, f"no next step: {seen}"
    return "fine" if seen is None else type(seen).__name__


# -- truncation


def test_a_truncated_file_is_refused_and_never_mapped(whole: Path) -> None:
    """Every file cut at many points: an error by name at open or at the first use, and no SIGBUS."""

    def cut() -> None:
        for file in _files(whole):
            body = file.read_bytes()
            size = len(body)
            points = {0, 1, size // 3, size // 2, size - 1, *range(0, size, max(1, size // 8)), *range(0, size, 4096)}
            for point in sorted(p for p in points if p < size):
                os.truncate(file, point)
                seen = _outcome(lambda: _use(whole))
                file.write_bytes(body)
                where = f"{file.name} cut at {point} of {size}: {seen}"
                if file.suffix == ".slots":
                    assert seen == "DatabaseTruncatedError", where
                elif file.name in ("lock.mdb", "builder.lock"):
                    assert seen == "fine", where  # they hold nothing
                elif file.name != "data.mdb" or seen != "fine":
                    assert seen == "DatabaseCorruptError", where

    before = contents(whole)
    assert in_child(cut) == 0
    assert contents(whole) == before


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
            assert _outcome(lambda: _use(whole)) == expected, file
            if file.name not in ("lock.mdb", "builder.lock", "MANIFEST.json"):
                file.mkdir()
                assert _outcome(lambda: _use(whole)) == "DatabaseCorruptError", file
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


def _positions(whole: Path, seed: int, count: int) -> Iterator[tuple[Path, int]]:
    """Positions in the arena files: the first and last byte of each, of a slot, of the padding, of the header."""
    generator = random.Random(seed)
    files = {file.name: file for file in _files(whole, "arena/*")}
    for found in read_manifest(whole).classes:
        layout, file = found.layout, files[Path(found.file).name]
        last = layout.offset(found.slots - 1)
        places = {0, HEADER_BYTES - 1, HEADER_BYTES, found.header - 1, found.header}
        places |= {last, last + layout.nbytes - 1, last + layout.nbytes, layout.file_bytes - 1}
        yield from ((file, place) for place in sorted(places) if place < layout.file_bytes)
    for _ in range(count):
        file = generator.choice(list(files.values()))
        yield file, generator.randrange(file.stat().st_size)


def test_a_flipped_bit_in_the_arena_is_found(whole: Path) -> None:
    """Slots, padding, headers and the gap behind them: every flip is refused at open or found by check."""
    generator = random.Random(1)
    tried = 0
    for file, place in _positions(whole, seed=2, count=200):
        old = file.read_bytes()[place]
        with changed(file, place, bytes([old ^ 1 << generator.randrange(8)])):
            assert _outcome(lambda: _use(whole)) == "DatabaseCorruptError", f"{file.name} at {place}"
        tried += 1
    assert tried >= 200
    assert findings(whole) == []


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
                assert _outcome(lambda: _use(whole)) == "DatabaseCorruptError"


def test_a_flipped_bit_in_the_manifest_is_refused(whole: Path) -> None:
    """Every byte of the manifest, a random bit of each; and every shorter manifest."""
    raw = (whole / "MANIFEST.json").read_bytes()
    generator = random.Random(4)
    for place in range(len(raw)):
        flipped = bytearray(raw)
        flipped[place] ^= 1 << generator.randrange(8)
        with pytest.raises(DatabaseCorruptError):
            Manifest.parse(bytes(flipped), whole)
    for length in [*range(0, len(raw), 7), len(raw) - 1]:
        with pytest.raises(DatabaseCorruptError):
            Manifest.parse(raw[:length], whole)


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
            _use(whole)

    assert in_child(flip) == 0


# -- swapped


def test_a_slot_copied_over_another_is_found(whole: Path) -> None:
    """A slot is bound to its place: another one's bytes, with a good checksum of their own, are found."""
    manifest = read_manifest(whole)
    for found in manifest.classes:
        file, layout = whole / found.file, found.layout
        body = file.read_bytes()
        for a, b in ((0, 1), (found.slots - 1, 0), (found.slots - 2, found.slots - 1)):
            with changed(file, layout.offset(b), body[layout.offset(a) : layout.offset(a) + layout.stride]):
                assert len(findings(whole)) == 1, (found.name, a, b)


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
    assert _outcome(lambda: _use(copy)) in ("DatabaseCorruptError", "DatabaseTruncatedError")


def test_two_swapped_indexes_are_refused(copy: Path) -> None:
    """An index belongs to a layer: the other layer's file has another digest."""
    one, two = copy / "index-000005" / "layer-000.safetensors", copy / "index-000005" / "layer-001.safetensors"
    a, b = one.read_bytes(), two.read_bytes()
    one.write_bytes(b)
    two.write_bytes(a)
    with Database(copy) as database:
        for layer in (0, 1):
            with pytest.raises(DatabaseCorruptError, match="has digest"):
                database.index(layer)
        database.index(SEQUENCE)


def test_bytes_behind_the_end_are_no_error(copy: Path) -> None:
    """What lies behind the published slots belongs to no record: a builder may just be writing there."""
    for file in _files(copy, "arena/*"):
        with file.open("ab") as stream:
            stream.write(b"\xff" * 5000)
    assert findings(copy) == []
    fill(copy, (*LENGTHS, 3, 5))
    assert findings(copy) == []


# -- a real database, with real maps


@pytest.mark.parametrize("family", ["bert", "deberta"])
def test_a_flip_in_a_real_database_is_found(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """A trained database of a transformers model: whole, and a flip in any of its files is found."""
    path = Path(shutil.copytree(request.getfixturevalue(f"{family}_database"), tmp_path / "db"))
    _use(path)
    generator = random.Random(7)
    files = [f for f in _files(path) if f.name not in ("builder.lock", "lock.mdb", "data.mdb")]
    for file in [*generator.sample(files, 12), *_files(path, "*.safetensors"), path / "MANIFEST.json"]:
        place = generator.randrange(file.stat().st_size)
        old = file.read_bytes()[place]
        with changed(file, place, bytes([old ^ 16])):
            assert _outcome(lambda: _use(path)) == "DatabaseCorruptError", f"{file} at {place}"
    _use(path)


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
            seen = _outcome(lambda: _use(whole))
            file.write_bytes(body)
            short = _outcome(lambda: _use(whole))
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


def test_the_model_of_the_tests_is_stored(whole: Path) -> None:
    """The manifest gives back the model it was given."""
    assert read_manifest(whole).model == MODEL
