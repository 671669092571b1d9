"""Building from real text with a real model: interrupted, killed, limited, repeated; nothing lost, nothing twice."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from children import in_child
from databases import contents, findings
from torch import nn

from attmemo.db import KIND_INPUT, KIND_MAP, SPLIT_HELD_OUT, SPLIT_TRAIN, Database
from attmemo.errors import AttmemoError, DatabaseCorruptError, DatabaseError, DataError, StorageFullError
from attmemo.profiler import build as build_module
from attmemo.profiler.build import BuildOptions, BuildResult, Progress, build_database, check_place
from attmemo.profiler.models import LoadedModel, collate, load_model, tokenize

LINES = 60


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory, log_lines: list[str]) -> Path:
    """Sixty lines, a blank one among them."""
    file = tmp_path_factory.mktemp("build") / "short.log"
    file.write_text("\n".join([*log_lines[:20], "", *log_lines[20 : LINES - 1]]) + "\n")
    return file


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, loaded: LoadedModel, log: Path) -> Path:
    """The database of an uninterrupted build."""
    path = tmp_path_factory.mktemp("straight") / "db"
    _build(loaded, [log], path)
    return path


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publish after every batch."""
    monkeypatch.setattr(build_module, "PUBLISH_SECONDS", -1.0)


def _build(
    loaded: LoadedModel,
    files: Sequence[Path],
    output: Path,
    progress: Progress | None = None,
    max_bytes: int | None = None,
    storage: str = "float32",
    max_length: int = 48,
    limit: int | None = None,
) -> BuildResult:
    options = BuildOptions(
        max_length=max_length, storage=storage, batch_size=8, max_bytes=max_bytes, limit=limit, held_out=0.3
    )
    return build_database(loaded, files, output, options, progress)


def _same(one: Path, two: Path) -> bool:
    """The same rows with the same lengths, splits and numbers, but for the rounding of another batch."""
    with Database(one) as a, Database(two) as b:
        rows = [
            {(int(s), int(r)): n for n, (s, r) in enumerate(zip(d.records.sources, d.records.rows, strict=True))}
            for d in (a, b)
        ]
        assert len(rows[0]) == len(a), "a row is stored twice"
        assert rows[0].keys() == rows[1].keys()
        for key, m in rows[0].items():
            n = rows[1][key]
            assert a.records.lengths[m] == b.records.lengths[n]
            assert a.records.splits[m] == b.records.splits[n]
            for kind in (KIND_MAP, KIND_INPUT):
                for layer in range(a.manifest.model.layers):
                    torch.testing.assert_close(a.slot(kind, layer, m), b.slot(kind, layer, n), atol=2e-5, rtol=2e-4)
    return findings(one) == findings(two) == []


# -- what is stored


def test_what_is_stored_is_what_the_model_does(straight: Path, loaded: LoadedModel, log: Path) -> None:
    """Every record, layer and head against the model's own attentions for that line alone."""
    texts = log.read_text().split("\n")
    eager = load_model(loaded.name)
    eager.model.set_attn_implementation("eager")  # type: ignore[operator]
    with Database(straight) as database, torch.inference_mode():
        assert len(database) == LINES - 1
        assert 20 not in database.records.rows  # the blank line
        for record in range(0, len(database), 7):
            text = texts[int(database.records.rows[record])]
            inputs = collate(eager, tokenize(eager, [text], 48))
            output = eager.model(**inputs, output_attentions=True, output_hidden_states=True)
            for layer in range(2):
                stored = database.slot(KIND_MAP, layer, record)
                torch.testing.assert_close(stored, output.attentions[layer][0], atol=2e-5, rtol=1e-4)
                hidden = database.slot(KIND_INPUT, layer, record)
                torch.testing.assert_close(hidden, output.hidden_states[layer][0], atol=2e-5, rtol=1e-4)


def test_no_padding_is_stored(straight: Path, loaded: LoadedModel, log: Path) -> None:
    """A record has the length of its tokens, whatever batch it was in."""
    texts = log.read_text().split("\n")
    with Database(straight) as database:
        rows = database.records.rows.tolist()
        tokens = tokenize(loaded, [texts[row] for row in rows], 48)
        assert database.records.lengths.tolist() == [len(t) for t in tokens]
        assert max(database.lengths) <= 48


def test_held_out_rows_are_whole_stretches(straight: Path) -> None:
    """Stretches of 20 rows, decided by the row alone: a resumed build agrees, and no near copy is on both sides."""
    with Database(straight) as database:
        for row, split in zip(database.records.rows.tolist(), database.records.splits.tolist(), strict=True):
            assert split == (SPLIT_HELD_OUT if 40 <= row < 60 else SPLIT_TRAIN)


def test_auto_storage_follows_the_models_precision(tiny_bert: str, log: Path, tmp_path: Path) -> None:
    """float16 for a float32 model, bfloat16 for a bfloat16 one."""
    for dtype, storage in (("float32", "float16"), ("bfloat16", "bfloat16")):
        path = tmp_path / dtype
        _build(load_model(tiny_bert, dtype), [log], path, storage="auto", limit=8)
        with Database(path) as database:
            assert database.manifest.storage == storage
            assert database.slot(KIND_MAP, 0, 0).dtype == getattr(torch, storage)
        assert findings(path) == []


# -- interrupted


@pytest.mark.parametrize("at", [1, 2, 5])
def test_ctrl_c_publishes_what_was_computed(
    loaded: LoadedModel, log: Path, straight: Path, tmp_path: Path, at: int
) -> None:
    """KeyboardInterrupt from the progress bar: all that was stored is published, and the same command completes."""
    path, calls = tmp_path / "db", 0

    def interrupt(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _build(loaded, [log], path, interrupt)
    assert len(contents(path)) == 8 * at
    assert findings(path) == []
    result = _build(loaded, [log], path)
    assert (result.records, result.added, result.skipped) == (LINES - 1, LINES - 1 - 8 * at, 8 * at)
    assert result.stopped is None
    assert _same(path, straight)


def test_ctrl_c_again_and_again_still_completes(
    loaded: LoadedModel, log: Path, straight: Path, tmp_path: Path
) -> None:
    """Interrupted after every single batch: each run gets a little further, and the end is the same."""
    path, runs = tmp_path / "db", 0

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    while True:
        runs += 1
        assert runs < 20
        with pytest.raises(KeyboardInterrupt):
            _build(loaded, [log], path, interrupt)
        if len(contents(path)) == LINES - 1:
            break
    assert _build(loaded, [log], path).added == 0
    assert _same(path, straight)


def test_any_failure_publishes_what_was_computed(
    loaded: LoadedModel, log: Path, straight: Path, tmp_path: Path
) -> None:
    """An unexpected error, in the middle: published like Ctrl-C, and raised on."""
    path, calls = tmp_path / "db", 0

    def fail(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("the terminal went away")

    with pytest.raises(RuntimeError, match="went away"):
        _build(loaded, [log], path, fail)
    assert len(contents(path)) == 24
    _build(loaded, [log], path)
    assert _same(path, straight)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("at", [1, 4])
def test_a_killed_build_goes_on_from_what_was_published(
    loaded: LoadedModel, log: Path, straight: Path, tmp_path: Path, at: int
) -> None:
    """SIGKILL in the middle: the batches published before are there, and are not computed again."""
    path = tmp_path / "db"

    def die() -> None:
        calls = 0

        def kill(done: int, total: int) -> None:
            nonlocal calls
            calls += 1
            if calls == at + 1:
                os.kill(os.getpid(), signal.SIGKILL)

        _build(loaded, [log], path, kill)

    assert in_child(die) == -signal.SIGKILL
    assert len(contents(path)) == 8 * at
    assert findings(path) == []
    assert _build(loaded, [log], path).skipped == 8 * at
    assert _same(path, straight)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("at", [0, 1, 40, 120])
def test_a_full_disk_keeps_what_was_published(
    loaded: LoadedModel, log: Path, straight: Path, tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSPC at some write: said so, and what to do; the batches published before open; the same command resumes."""
    path, writes = tmp_path / "db", 0
    pwrite = os.pwrite

    def full(fd: int, body: bytes, offset: int) -> int:
        nonlocal writes
        writes += 1
        if writes > at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, body, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StorageFullError, match="the disk is full") as caught:
            _build(loaded, [log], path)
    assert "run the same command again" in str(caught.value)
    if (path / "MANIFEST.json").exists():
        assert len(contents(path)) % 8 == 0
        assert findings(path) == []
    _build(loaded, [log], path)
    assert _same(path, straight)


# -- more data


def test_the_same_command_again_adds_nothing(loaded: LoadedModel, log: Path, straight: Path, tmp_path: Path) -> None:
    """Run again on the same file, under whatever name: nothing is added, nothing is computed."""
    path = Path(shutil.copytree(straight, tmp_path / "db"))
    before = contents(path)
    again = Path(shutil.copy(log, tmp_path / "renamed.log"))
    result = _build(loaded, [again], path)
    assert (result.added, result.skipped, result.records) == (0, LINES - 1, LINES - 1)
    assert contents(path) == before


def test_one_file_given_twice_is_stored_once(loaded: LoadedModel, log: Path, straight: Path, tmp_path: Path) -> None:
    """A file and its copy in one command: each row once."""
    again = Path(shutil.copy(log, tmp_path / "renamed.log"))
    result = _build(loaded, [log, log, again], tmp_path / "db")
    assert (result.added, result.skipped) == (LINES - 1, 2 * (LINES - 1))
    assert _same(tmp_path / "db", straight)


def test_a_second_file_is_added_to_the_first(
    loaded: LoadedModel, log: Path, straight: Path, tmp_path: Path, log_lines: list[str]
) -> None:
    """Appending: only the new file's rows, under their own source; the old records keep every byte."""
    path = Path(shutil.copytree(straight, tmp_path / "db"))
    before = contents(path)
    more = tmp_path / "more.log"
    more.write_text("\n".join(log_lines[100:130]))
    result = _build(loaded, [log, more], path)
    assert (result.added, result.skipped, result.records) == (30, LINES - 1, LINES + 29)
    after = contents(path)
    assert {key: after[key] for key in before} == before
    assert after.keys() - before.keys() == {(1, row) for row in range(30)}
    with Database(path) as database:
        assert [s.name for s in database.manifest.sources] == ["short.log", "more.log"]
    assert findings(path) == []


def test_a_limit_is_of_the_data_and_not_of_a_run(
    loaded: LoadedModel, log: Path, straight: Path, tmp_path: Path
) -> None:
    """--limit is of the data, not of a run: a larger one later adds the rest."""
    path = tmp_path / "db"
    assert _build(loaded, [log], path, limit=10).added == 10
    assert _build(loaded, [log], path, limit=10).added == 0
    assert _build(loaded, [log], path, limit=25).added == 15
    assert sorted(row for _, row in contents(path)) == [*range(20), *range(21, 26)]
    _build(loaded, [log], path)
    assert _same(path, straight)


# -- other settings


def test_a_build_with_other_settings_is_refused(
    loaded: LoadedModel, tiny_deberta: str, tiny_bert: str, log: Path, straight: Path, tmp_path: Path
) -> None:
    """Another storage type, length, model or precision: refused by name, and the database stays as it was."""
    path = Path(shutil.copytree(straight, tmp_path / "db"))
    before = contents(path)
    with pytest.raises(DatabaseError, match="built with --dtype float32; asked: bfloat16"):
        _build(loaded, [log], path, storage="bfloat16")
    with pytest.raises(DatabaseError, match="built with --max-length 48; asked: 32"):
        _build(loaded, [log], path, max_length=32)
    for other in (load_model(tiny_deberta), load_model(tiny_bert, "bfloat16")):
        with pytest.raises(DatabaseError, match="built for another model"):
            _build(other, [log], path)
    assert contents(path) == before


def test_more_positions_than_the_model_has_are_refused(loaded: LoadedModel, log: Path, tmp_path: Path) -> None:
    """--max-length beyond the model: an error, not an index error deep inside it."""
    with pytest.raises(AttmemoError, match="--max-length 4096 is more than the model's 96 positions"):
        _build(loaded, [log], tmp_path / "db", max_length=4096)
    assert not (tmp_path / "db").exists()


def test_a_very_long_line_is_cut_before_it_is_tokenized(loaded: LoadedModel) -> None:
    """20 MB in one line took half a minute. Blanks and endless words are no tokens, or few: then more is read."""
    words, seen = "error in block 17 ", []
    inner = loaded.tokenizer

    class Watched:
        truncation_side, bos_token_id, eos_token_id = "right", None, None

        def __call__(self, texts: list[str], **options: Any) -> Any:
            seen.append(max(map(len, texts)))
            return inner(texts, **options)

    watched = replace(loaded, tokenizer=Watched())
    texts = [words * 100_000, "short", " " * 9_000 + words, "x" * 9_000 + " " + words]
    expected = [inner(text[:20_000], truncation=True, max_length=16)["input_ids"] for text in texts]
    assert [item.ids for item in tokenize(watched, texts, 16)] == expected
    assert max(seen) < 20_000


# -- the limit in bytes


@pytest.mark.parametrize("share", [0.2, 0.5, 0.99])
def test_the_byte_limit_is_kept(loaded: LoadedModel, log: Path, straight: Path, tmp_path: Path, share: float) -> None:
    """--max-bytes: stops before it, says so, leaves a whole database that goes on with more room."""
    with Database(straight) as database:
        most = int(database.bytes * share)
    path = tmp_path / "db"
    result = _build(loaded, [log], path, max_bytes=most)
    assert result.stopped == f"--max-bytes {most} reached"
    assert 0 < result.bytes <= most
    assert sum(f.stat().st_size for f in (path / "arena").iterdir()) == result.bytes
    assert 0 < len(contents(path)) == result.records == result.added < LINES - 1
    assert findings(path) == []
    assert _build(loaded, [log], path, max_bytes=most).added == 0
    result = _build(loaded, [log], path, max_bytes=1 << 30)
    assert result.stopped is None
    assert _same(path, straight)


def test_a_limit_below_one_record_is_refused(loaded: LoadedModel, log: Path, straight: Path, tmp_path: Path) -> None:
    """Nothing fits: an error, nothing is published, and the same folder takes a build with more room."""
    path = tmp_path / "db"
    with pytest.raises(StorageFullError, match="--max-bytes 5000 does not hold a single record"):
        _build(loaded, [log], path, max_bytes=5000)
    assert not (path / "MANIFEST.json").exists()
    _build(loaded, [log], path)
    assert _same(path, straight)


@pytest.mark.parametrize("kind", ["file", "foreign", "bytes"])
def test_an_impossible_place_or_size_is_refused_without_a_model(tmp_path: Path, kind: str) -> None:
    """Loading a large model takes minutes. A database that was begun, or is not there yet, is a place."""
    place = tmp_path / "db"
    check_place(place, 1 << 20)
    (place / "arena").mkdir(parents=True)
    check_place(place, 1 << 20)
    if kind == "foreign":
        (place / "arena").rename(place / "photos")
    elif kind == "file":
        place = tmp_path / "a.txt"
        place.touch()
    with pytest.raises(DatabaseError, match={"bytes": "--max-bytes 10"}.get(kind, "--output")):
        check_place(place, 10 if kind == "bytes" else None)


# -- what cannot be built


def test_a_broken_model_is_refused(tiny_bert: str, log: Path, tmp_path: Path) -> None:
    """Weights that overflow to NaN: the model is refused, nothing is stored."""
    broken = load_model(tiny_bert)
    weights: nn.Parameter = broken.model.get_parameter("bert.encoder.layer.1.attention.self.query.weight")
    weights.data[0, 0] = float("nan")
    with pytest.raises(AttmemoError) as caught:
        _build(broken, [log], tmp_path / "db")
    assert isinstance(caught.value, DatabaseCorruptError) or "layer 1" in str(caught.value)
    assert not (tmp_path / "db" / "MANIFEST.json").exists()


def test_a_file_without_text_makes_no_database(loaded: LoadedModel, tmp_path: Path) -> None:
    """Missing, empty, blank: a DataError, before a database is begun or with none published."""
    for name, body in (("empty.log", ""), ("blank.log", "\n \n\n")):
        (tmp_path / name).write_text(body)
        with pytest.raises(DataError):
            _build(loaded, [tmp_path / name], tmp_path / "db")
    with pytest.raises(DataError, match="nowhere"):
        _build(loaded, [tmp_path / "nowhere.log"], tmp_path / "db")
    assert not (tmp_path / "db" / "MANIFEST.json").exists()


def test_the_model_is_left_as_it_was(loaded: LoadedModel, log: Path, tmp_path: Path) -> None:
    """Capturing hooks into the model and asks it for its maps: afterwards, also after Ctrl-C, it is as before."""
    inputs = collate(loaded, tokenize(loaded, ["error in block 17", "ok"], 48))
    before = [(name, len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in loaded.model.named_modules()]
    with torch.inference_mode():
        expected = loaded.model(**inputs).logits

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _build(loaded, [log], tmp_path / "db", interrupt)
    after = [(name, len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in loaded.model.named_modules()]
    assert after == before
    with torch.inference_mode():
        assert torch.equal(loaded.model(**inputs).logits, expected)
