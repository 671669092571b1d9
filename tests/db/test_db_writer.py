"""The writer's promises: what is stored comes back bit for bit, and only what was published is seen."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import linecache
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from children import end_of, start_child
from databases import LENGTHS, MODEL, add_maps, contents, fill, findings, memory_directory, sequence
from db_tools import SHORT, Fails, Write, check_published, intercept_writes
from hypothesis import given, settings
from hypothesis import strategies as st

from attmemo.db import KIND_INPUT, KIND_MAP, Database, DatabaseWriter, Provenance, read_manifest
from attmemo.db import writer as writer_module
from attmemo.db.encodings import STORAGE, TYPES, pack
from attmemo.db.slot_kinds import kinds_of_maps
from attmemo.errors import DatabaseCorruptError, DatabaseError, DatabaseLockedError, StorageFullError

# -- round trip


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    storage=st.sampled_from(sorted(STORAGE)),
    lengths=st.lists(st.integers(1, 37), min_size=1, max_size=6),
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    hidden=st.integers(1, 9),
    every=st.integers(1, 3),
)
def test_a_stored_map_comes_back_bit_for_bit(
    storage: str, lengths: list[int], layers: int, heads: int, hidden: int, every: int
) -> None:
    """Any storage type, odd lengths, several records of one length: each slot is exactly what was given."""
    model = dataclasses.replace(MODEL, layers=layers, heads=heads, hidden=hidden)
    dtypes = {kind.name: kind.dtype for kind in kinds_of_maps(model, storage, {})}
    with memory_directory() as folder:
        with DatabaseWriter(folder / "db", model, storage) as writer:
            for row, length in enumerate(lengths):
                assert add_maps(writer, *sequence(row, length, model), Provenance(0, row)) == row
                if row % every == 0:
                    writer.publish()
            writer.publish()
        with Database(folder / "db") as database:
            assert database.records.lengths.tolist() == lengths
            for row, length in enumerate(lengths):
                maps, inputs = sequence(row, length, model)
                for layer in range(layers):
                    for kind, given_tensor in ((KIND_MAP, maps[layer]), (KIND_INPUT, inputs[layer])):
                        stored, name = database.slot(kind, layer, row), dtypes[kind]
                        plain = given_tensor.to(TYPES[name])
                        expected = pack(given_tensor, name, False) if kind == KIND_MAP else plain
                        assert stored.dtype == expected.dtype
                        assert torch.equal(stored.view(torch.uint8), expected.view(torch.uint8))
            assert list(database.check()) == []


def test_a_bfloat16_map_is_never_rounded_again(tmp_path: Path) -> None:
    """A map that already has the storage type is stored as it is, whatever its memory layout."""
    maps, inputs = sequence(0, 6)
    given_maps = [m.bfloat16().transpose(1, 2).contiguous().transpose(1, 2) for m in maps]
    with DatabaseWriter(tmp_path / "db", MODEL, "bfloat16") as writer:
        add_maps(writer, given_maps, [x.bfloat16() for x in inputs], Provenance(0, 0))
        writer.publish()
    with Database(tmp_path / "db") as database:
        assert all(torch.equal(database.slot(KIND_MAP, layer, 0), given_maps[layer]) for layer in range(2))


# -- visibility


def test_orphan_slots_are_overwritten_by_a_resumed_build(tmp_path: Path) -> None:
    """A killed builder left slots behind the published ones; the next one writes over them, and nothing is damaged."""
    path = fill(tmp_path / "db", LENGTHS[:4])
    with DatabaseWriter(path, MODEL, "float32") as writer:
        for row in range(4, 8):
            add_maps(writer, *sequence(100 + row, LENGTHS[row]), Provenance(0, row))
    sizes = {file.name: file.stat().st_size for file in (path / "arena").iterdir()}
    assert findings(path) == []
    fill(path)
    fill(tmp_path / "straight")
    assert contents(path) == contents(tmp_path / "straight")
    assert findings(path) == []
    assert {file.name: file.stat().st_size for file in (path / "arena").iterdir()} == sizes


def test_an_old_manifest_opens_its_generation(tmp_path: Path) -> None:
    """Published generations are immutable: put an old manifest back and its generation is there, whole."""
    path = tmp_path / "db"
    manifests = []
    for count in range(1, len(LENGTHS) + 1):
        fill(path, LENGTHS[:count], every=1)
        manifests.append((path / "MANIFEST.json").read_bytes())
    everything = contents(path)
    for count, manifest in enumerate(manifests, 1):
        (path / "MANIFEST.json").write_bytes(manifest)
        assert contents(path) == {key: everything[key] for key in sorted(everything)[:count]}
        assert findings(path) == []


def test_a_source_is_listed_once(tmp_path: Path) -> None:
    """A data file is known by its content, under whatever name it comes back."""
    with DatabaseWriter(tmp_path / "db", MODEL, "float32") as writer:
        assert [writer.add_source(n, d) for n, d in (("a", "1"), ("b", "2"), ("c", "1"))] == [0, 1, 0]


# -- what is refused


def _broken(maps: list[torch.Tensor], how: str) -> None:
    apm = maps[1]
    if how == "NaN":
        apm[1, 2, 0] = float("nan")
    elif how == "infinite":
        apm[0, 0, 0] = float("inf")
    elif how == "negative":
        apm[1, 0, 0] -= 2 * apm[1, 0, 0]
        apm[1, 0, 1] += 1 - apm[1, 0].sum()
    elif how == "row of zeros":
        apm[0, 1] = 0
    elif how == "row sums to 2":
        apm[0, 1] *= 2


@pytest.mark.parametrize("how", ["NaN", "infinite", "negative", "row of zeros", "row sums to 2"])
def test_a_map_that_is_none_is_never_stored(tmp_path: Path, how: str) -> None:
    """Overflow in the model must not become a record: refused with row and layer, and the counts stay."""
    path = fill(tmp_path / "db", LENGTHS[:2])
    with DatabaseWriter(path, MODEL, "float32") as writer:
        maps, inputs = sequence(7, 5)
        _broken(maps, how)
        with pytest.raises(DatabaseCorruptError, match=r"row 7 of the data, layer 1: .*nothing was stored"):
            add_maps(writer, maps, inputs, Provenance(0, 7))
        assert writer.records == 2
        writer.publish()
    assert sorted(contents(path)) == [(0, 0), (0, 1)]
    assert findings(path) == []


@pytest.mark.parametrize(("storage", "value"), [("float16", 1e6), ("float32", float("nan"))])
def test_a_hidden_state_never_becomes_infinite(tmp_path: Path, storage: str, value: float) -> None:
    """Large activations overflow float16: refused, not stored as infinity that spoils the embedder of the layer."""
    maps, inputs = sequence(0, 5)
    inputs[1][2, 3] = value
    with DatabaseWriter(tmp_path / "db", MODEL, storage) as writer:
        with pytest.raises(DatabaseCorruptError, match=rf"layer 1: the hidden states are not finite in {storage}"):
            add_maps(writer, maps, inputs, Provenance(0, 0))
        assert writer.records == 0


def test_a_wrong_shape_is_never_half_stored(tmp_path: Path) -> None:
    """A caller's mistake is a ValueError, and the next record lies where it should."""
    with DatabaseWriter(tmp_path / "db", MODEL, "float32") as writer:
        maps, inputs = sequence(0, 5)
        with pytest.raises(ValueError, match="shape"):
            add_maps(writer, maps, [x[:4] for x in inputs], Provenance(0, 0))
        with pytest.raises(ValueError, match="expected 2 slots of kind map"):
            add_maps(writer, maps[:1], inputs, Provenance(0, 0))
        add_maps(writer, maps, inputs, Provenance(0, 0))
        writer.publish()
    assert findings(tmp_path / "db") == []
    assert list(contents(tmp_path / "db")) == [(0, 0)]


@pytest.mark.parametrize(
    ("change", "storage", "given", "words"),
    [
        ({}, "bfloat16", {}, "built with --dtype float32; asked: bfloat16"),
        ({}, "uint8", {"inputs": "first"}, "built with --dtype float32; asked: uint8"),  # the cause, not what follows
        ({}, "float32", {"inputs": "first"}, "built with --inputs all; asked: first"),
        ({}, "float32", {"windows": 5}, "windows None; asked: 5"),
        ({"max_length": 32}, "float32", {}, "built with --max-length 64; asked: 32"),
        ({"name": "other", "fingerprint": "e" * 64}, "float32", {}, "another model.*synthetic.*other"),
        (
            {"fields": MODEL.fields | {"config": '{"hidden_size": 9}'}, "fingerprint": "e" * 64},
            "float32",
            {},
            "another model; config.hidden_size: database 8, model 9",
        ),
    ],
)
def test_a_resumed_build_never_mixes_settings(
    tmp_path: Path, change: dict[str, Any], storage: str, given: dict[str, Any], words: str
) -> None:
    """Half a database of one model or type and half of another would serve wrong maps."""
    path = fill(tmp_path / "db", LENGTHS[:2])
    before = (path / "MANIFEST.json").read_bytes()
    with pytest.raises(DatabaseError, match=words):
        DatabaseWriter(path, dataclasses.replace(MODEL, **change), storage, given)
    assert (path / "MANIFEST.json").read_bytes() == before
    fill(path)  # the lock was given back


def test_a_users_folder_is_never_taken_for_a_database(tmp_path: Path) -> None:
    """--output pointed at the user's own files: refused, and not a byte of them is changed."""
    mine = tmp_path / "thesis"
    mine.mkdir()
    (mine / "chapter.txt").write_text("mine")
    with pytest.raises(DatabaseError, match="not empty and is not a database"):
        DatabaseWriter(mine, MODEL, "float32")
    with pytest.raises(DatabaseError, match="is a file"):
        DatabaseWriter(mine / "chapter.txt", MODEL, "float32")
    assert [f.name for f in mine.iterdir()] == ["chapter.txt"]
    with pytest.raises(ValueError, match="storage must be one of"):
        DatabaseWriter(tmp_path / "db", MODEL, "int4")


def test_a_short_arena_is_never_filled_with_zeros(tmp_path: Path) -> None:
    """Resuming on a truncated file must not stretch it back: zeros would look like maps."""
    path = fill(tmp_path / "db", LENGTHS[:4])
    file = path / "arena" / "map-00003.slots"
    size = file.stat().st_size
    os.truncate(file, size - 1)
    with pytest.raises(DatabaseError, match="bytes long, the manifest says at least"):
        DatabaseWriter(path, MODEL, "float32")
    assert file.stat().st_size == size - 1


def test_a_lost_catalogue_is_never_made_anew(tmp_path: Path) -> None:
    """Resuming without the catalogue would publish an empty one over the records."""
    path = fill(tmp_path / "db", LENGTHS[:4])
    (path / "catalogue" / "data.mdb").unlink()
    with pytest.raises(DatabaseCorruptError, match="catalogue is missing"):
        DatabaseWriter(path, MODEL, "float32")


def test_a_build_that_died_at_its_beginning_starts_over(tmp_path: Path) -> None:
    """Killed before anything was published: whatever lies there, the same command starts over."""
    path = tmp_path / "db"
    (path / "catalogue").mkdir(parents=True)
    (path / "catalogue" / "data.mdb").write_bytes(b"\0" * 4096)
    (path / "MANIFEST.json.tmp").write_bytes(b"half")
    fill(path)
    fill(tmp_path / "straight")
    assert contents(path) == contents(tmp_path / "straight")


# -- one writer


def test_a_dead_builder_gives_its_lock_back(tmp_path: Path) -> None:
    """The holder is another process: its pid is named; after its death no cleaning up is needed."""
    path = fill(tmp_path / "db", LENGTHS[:2])
    ready, tell = os.pipe()

    def hold() -> None:
        add_maps(DatabaseWriter(path, MODEL, "float32"), *sequence(9, 5), Provenance(0, 9))
        os.write(tell, b"x")
        signal.pause()

    pid = start_child(hold)
    os.close(tell)
    try:
        assert os.read(ready, 1) == b"x"
        with pytest.raises(DatabaseLockedError, match=rf"pid {pid}\b"):
            DatabaseWriter(path, MODEL, "float32")
    finally:
        os.close(ready)
        os.kill(pid, signal.SIGKILL)
        assert end_of(pid) == -signal.SIGKILL
    fill(path)
    assert sorted(contents(path)) == [(0, row) for row in range(len(LENGTHS))]


def test_a_file_system_without_locks_is_not_called_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOLCK is not the pid of another process."""

    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(DatabaseError, match="No locks available") as caught:
        DatabaseWriter(tmp_path / "db", MODEL, "float32")
    assert not isinstance(caught.value, DatabaseLockedError)


# -- a full disk


def test_a_writer_that_goes_on_leaves_no_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk was full for a moment and the same writer tries the record again: no header, no slot is missing."""
    with memory_directory() as folder:
        expected = contents(fill(folder / "straight", SHORT))
        for at in range(40):
            path = folder / f"db{at}"
            with DatabaseWriter(path, MODEL, "float32") as writer, pytest.MonkeyPatch.context() as patch:
                source = writer.add_source("synthetic.log", "d" * 32)
                Fails(patch, at, errno.ENOSPC)
                for row, length in enumerate(SHORT):
                    for _ in range(3):
                        try:
                            if row == writer.records:
                                add_maps(writer, *sequence(row, length), Provenance(source, row, row % 2))
                            if row % 2:
                                writer.publish()
                            break
                        except StorageFullError:
                            continue
                writer.publish()
            assert contents(path) == expected
            assert findings(path) == []


# -- Ctrl-C


def test_ctrl_c_between_two_lines_tears_no_record() -> None:
    """KeyboardInterrupt at every line of `add` and `publish` in turn; then, as the builder does, a publication."""
    watched = {getattr(writer_module.DatabaseWriter, name).__code__ for name in ("add", "copy", "publish", "_write")}
    with memory_directory() as folder:
        expected = contents(fill(folder / "straight", LENGTHS[:3]))
        at = 0
        while True:
            path, left = folder / f"db{at}", [at]

            def line(frame: FrameType, event: str, _: Any, left: list[int] = left) -> Any:
                text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
                # The end of a `with` is a line to the tracer, but no signal is handled there.
                if event == "line" and not text.strip().startswith("with "):
                    left[0] -= 1
                    if left[0] == -1:
                        raise KeyboardInterrupt
                return line

            def call(frame: FrameType, event: str, _: Any, line: Any = line) -> Any:
                return line if frame.f_code in watched else None

            done = False
            with DatabaseWriter(path, MODEL, "float32") as writer:
                source = writer.add_source("synthetic.log", "d" * 32)
                before = sys.gettrace()
                sys.settrace(call)
                try:
                    for row, length in enumerate(LENGTHS[:3]):
                        add_maps(writer, *sequence(row, length), Provenance(source, row, row % 2))
                        if row % 2:
                            writer.publish()
                    done = True
                except KeyboardInterrupt:
                    pass
                finally:
                    sys.settrace(before)
                writer.publish()
            check_published(path, expected)
            fill(path, LENGTHS[:3])
            assert contents(path) == expected
            if done:
                break
            at += 1
        assert at > 100


def test_the_size_is_counted_to_the_byte(tmp_path: Path) -> None:
    """`cost` is what one more record takes, to the byte: --max-bytes relies on it."""
    with DatabaseWriter(tmp_path / "db", MODEL, "float32") as writer:
        for row, length in enumerate(LENGTHS):
            before, cost = writer.stored_bytes, writer.cost(length)
            add_maps(writer, *sequence(row, length), Provenance(0, row))
            assert writer.stored_bytes == before + cost
        writer.publish()
        assert sum(f.stat().st_size for f in (tmp_path / "db" / "arena").iterdir()) == writer.stored_bytes
    with Database(tmp_path / "db") as database:
        assert database.bytes == sum(f.stat().st_size for f in (tmp_path / "db" / "arena").iterdir())


def test_a_publication_keeps_profile_and_tuning(tmp_path: Path) -> None:
    """A publication of new records keeps what an earlier one said about profile and tuning."""
    path = fill(tmp_path / "db", LENGTHS[:2])
    with DatabaseWriter(path, MODEL, "float32") as writer:
        writer.publish(profile={"a": 1}, tuning={"b": [0.5]})
    fill(path)
    manifest = read_manifest(path)
    assert (manifest.profile, manifest.tuning, manifest.records) == ({"a": 1}, {"b": [0.5]}, len(LENGTHS))


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOENT], ids=errno.errorcode.get)
def test_a_place_that_cannot_be_written_is_not_called_a_broken_disk(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step is another place, and nothing about dmesg."""

    def refused(write: Write) -> Any:
        raise OSError(code, os.strerror(code))

    intercept_writes(monkeypatch, refused)
    with pytest.raises(DatabaseError, match="cannot be written") as caught:
        fill(tmp_path / "db")
    assert "directory that exists" in str(caught.value)
    assert "dmesg" not in str(caught.value)


def test_a_full_disk_names_only_options_of_the_command_that_runs(tmp_path: Path) -> None:
    path = fill(tmp_path / "db", LENGTHS[:2])
    for when_full in (None, "or use --max-bytes"):
        options: dict[str, Any] = {} if when_full is None else {"when_full": when_full}
        with DatabaseWriter(path, MODEL, "float32", **options) as writer, pytest.MonkeyPatch.context() as patch:
            Fails(patch, 0, errno.ENOSPC, forever=True)
            with pytest.raises(StorageFullError) as caught:
                add_maps(writer, *sequence(9, 3), Provenance(0, 9))
        assert caught.value.hint == (when_full or "free space and run the same command again")
