"""Building databases of rows: what is stored, interrupted, limited, repeated; nothing lost, nothing twice."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stored_rows import StoredRows
from transformers import GPT2Config, GPT2Model

from attmemo import memoize
from attmemo.db import default_path, find_database
from attmemo.db.pools.filling import Filling, is_sealed
from attmemo.errors import AttmemoError, DatabaseError, DataError, StorageFullError, UnsupportedModelError
from attmemo.profiler import row_recorder
from attmemo.profiler.build import BuildOptions, BuildResult, Progress, build_database, build_from_inputs
from attmemo.profiler.models import LoadedModel, collate, load_model, tokenize
from attmemo.rows.store import Record

LINES = 60
OPTIONS = BuildOptions(max_length=48, storage="float32", batch_size=8, held_out=0.3, reuse="rows")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory, log_lines: list[str]) -> Path:
    """Sixty different lines."""
    file = tmp_path_factory.mktemp("rows") / "short.log"
    file.write_text("\n".join(dict.fromkeys(log_lines[: 2 * LINES])) + "\n")
    file.write_text("".join(f"{line}\n" for line in file.read_text().splitlines()[:LINES]))
    return file


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, loaded: LoadedModel, log: Path) -> Path:
    """The database of an uninterrupted build."""
    path = tmp_path_factory.mktemp("straight") / "db"
    _build(loaded, [log], path)
    return path


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publish some records at a time."""
    monkeypatch.setattr(row_recorder, "usual_for", lambda nbytes: 64 << 10)


def _build(
    loaded: LoadedModel, files: Sequence[Path], path: Path | None, progress: Progress | None = None, **changes: Any
) -> BuildResult:
    return build_database(loaded, files, path, replace(OPTIONS, **changes), progress)


def _records(path: Path) -> dict[bytes, Record]:
    """Records by their tokens, in their order."""
    return StoredRows(path).records()


def _same(one: Path, two: Path) -> bool:
    """The same texts with the same numbers, but for the rounding of another batch."""
    a, b = _records(one), _records(two)
    for tokens, found in a.items():
        torch.testing.assert_close(found.rows, b[tokens].rows, atol=2e-5, rtol=2e-4)
        torch.testing.assert_close(found.last, b[tokens].last, atol=2e-5, rtol=2e-4)
    return a.keys() == b.keys()


# -- what is stored


def test_a_record_holds_what_the_model_computes(straight: Path, loaded: LoadedModel, log: Path) -> None:
    """Tokens, K and V of every layer, and the last hidden states, against the model's own for that line alone."""
    texts = log.read_text().splitlines()
    bare: Any = load_model(loaded.name).model.bert  # type: ignore[union-attr]
    seen: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(bare.encoder.layer):
        own = layer.attention.self
        own.key.register_forward_hook(lambda *a, n=number: seen.update({2 * n: a[2][0]}))
        own.value.register_forward_hook(lambda *a, n=number: seen.update({2 * n + 1: a[2][0]}))
    stored = _records(straight)
    assert len(stored) == LINES
    with torch.inference_mode():
        for text in texts[::11]:
            (item,) = tokenize(loaded, [text], 48)
            record = stored[np.array(item.ids, np.int32).tobytes()]
            last = bare(**collate(loaded, [item])).last_hidden_state[0]
            torch.testing.assert_close(record.last, last, atol=2e-5, rtol=1e-4)
            for layer in range(2):
                keys, values = record.rows[layer]
                torch.testing.assert_close(keys, seen[2 * layer], atol=2e-5, rtol=1e-4)
                torch.testing.assert_close(values, seen[2 * layer + 1], atol=2e-5, rtol=1e-4)


def test_eight_bits_are_stored_unless_another_type_is_asked_for(
    loaded: LoadedModel, log: Path, tmp_path: Path, straight: Path
) -> None:
    """And the numbers are those of float32, up to half a step of 127."""
    assert _build(loaded, [log], tmp_path / "db", storage="auto").storage == "int8"
    whole = _records(straight)
    for tokens, found in _records(tmp_path / "db").items():
        assert found.scales is not None
        assert (found.rows.dtype, found.last.dtype) == (torch.int8, torch.bfloat16)
        read = (found.rows.float().unflatten(-1, (4, -1)) * found.scales[..., None]).flatten(-2)  # type: ignore[no-untyped-call]
        steps = found.scales.repeat_interleave(8, -1)
        assert bool(((read - whole[tokens].rows).abs() <= 0.51 * steps + 1e-5).all())


def test_the_same_tokens_are_stored_once(loaded: LoadedModel, log: Path, tmp_path: Path) -> None:
    twice = tmp_path / "twice.log"
    twice.write_text(2 * log.read_text())
    done = _build(loaded, [twice], tmp_path / "db")
    assert (done.added, done.alike) == (LINES, LINES)
    assert len(_records(tmp_path / "db")) == LINES


def test_admit_leaves_out_what_a_record_supplies(loaded: LoadedModel, log: Path, tmp_path: Path) -> None:
    """Fewer records for a smaller share, and every text is counted."""
    counts = []
    for admit in (0.95, 0.7, 0.4):
        done = _build(loaded, [log], tmp_path / str(admit), admit=admit)
        assert done.added + done.alike == LINES
        counts.append(done.added)
    assert counts == sorted(counts, reverse=True)
    assert LINES > counts[1] > counts[2] > 0


def test_the_model_is_as_before_and_a_memoized_one_is_refused(tiny_bert: str, log: Path, tmp_path: Path) -> None:
    loaded = load_model(tiny_bert)
    _build(loaded, [log], tmp_path / "db", limit=8)
    assert not hasattr(loaded.model, "attmemo")
    assert all("forward" not in module.__dict__ for module in loaded.model.modules())
    memoize(loaded.model, reuse="none")
    with pytest.raises(AttmemoError, match="the model is memoized"):
        _build(loaded, [log], tmp_path / "db")
    assert loaded.model.attmemo.enabled  # type: ignore[union-attr]


def test_token_types_are_part_of_a_record(tiny_bert: str, tmp_path: Path) -> None:
    """Two texts with the same ids and other types are two texts."""
    model: Any = load_model(tiny_bert).model
    ids = torch.arange(5, 17)[None]
    batch = {"input_ids": ids.repeat(2, 1), "attention_mask": torch.ones(2, 12, dtype=torch.long)}
    batch["token_type_ids"] = torch.tensor([[0] * 12, [0] * 6 + [1] * 6])
    path = build_from_inputs(model, [batch], tmp_path / "db", reuse="rows")
    found = [kept.tokens for kept in StoredRows(path).kept]
    np.testing.assert_array_equal(found[0], ids[0].numpy())
    np.testing.assert_array_equal(found[1] - found[0], np.repeat([0, 1 << 24], 6))


# -- interrupted, limited, repeated


def test_an_interrupted_build_resumes_to_the_same(
    loaded: LoadedModel, log: Path, tmp_path: Path, straight: Path, often: None
) -> None:
    def stop(done: int, total: int) -> None:
        assert total == LINES
        if done >= 24:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _build(loaded, [log], tmp_path / "db", stop)
    assert 24 <= len(_records(tmp_path / "db")) < LINES
    assert not hasattr(loaded.model, "attmemo")
    done = _build(loaded, [log], tmp_path / "db")
    assert done.added + done.skipped == LINES
    assert _same(tmp_path / "db", straight)


def test_a_second_build_adds_nothing_and_a_later_file_is_added(
    loaded: LoadedModel, log: Path, tmp_path: Path, log_lines: list[str]
) -> None:
    _build(loaded, [log], tmp_path / "db")
    again = _build(loaded, [log], tmp_path / "db")
    assert (again.added, again.skipped, again.records) == (0, LINES, LINES)
    later = tmp_path / "later.log"
    later.write_text(f"{log.read_text().splitlines()[0]}\nquite another line than any before\n")
    more = _build(loaded, [later], tmp_path / "db")
    assert (more.added, more.skipped, more.records) == (1, 1, LINES + 1)


@pytest.mark.parametrize("at", [0, 3, 30, 60])
def test_a_full_disk_keeps_what_was_published(
    loaded: LoadedModel, log: Path, straight: Path, tmp_path: Path, at: int, often: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Said so, and what to do; the model is as before; the same command resumes."""
    path, writes, pwrite = tmp_path / "db", 0, os.pwrite

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
    assert not hasattr(loaded.model, "attmemo")
    if is_sealed(path):
        assert len(_records(path)) == Filling.read(path).records < LINES
    _build(loaded, [log], path)
    assert _same(path, straight)


def test_segments_are_full(loaded: LoadedModel, log: Path, tmp_path: Path, often: None) -> None:
    done = _build(loaded, [log], tmp_path / "db")
    pool = StoredRows(tmp_path / "db").pool
    sizes = sorted({kept.segment.number: kept.segment.nbytes for kept in pool.records.values()}.values())
    assert sum(sizes) == pool.nbytes == done.bytes
    assert len(sizes) > 3
    assert all(32 << 10 < size <= 64 << 10 for size in sizes[1:])


def test_progress_counts_every_text(loaded: LoadedModel, log: Path, tmp_path: Path) -> None:
    """Those that are left out too, also if nothing else is in a chunk."""
    many = tmp_path / "many.log"
    many.write_text(10 * log.read_text())
    told: list[tuple[int, int]] = []
    _build(loaded, [many], tmp_path / "db", lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1] == (10 * LINES, 10 * LINES)


def test_the_size_limit_holds_and_says_so(loaded: LoadedModel, log: Path, tmp_path: Path) -> None:
    done = _build(loaded, [log], tmp_path / "db", max_bytes=400_000)
    assert done.stopped == "--max-bytes 400000 reached"
    assert 0 < done.bytes <= 400_000
    assert 0 < done.records < LINES
    with pytest.raises(StorageFullError, match="a single record"):
        _build(loaded, [log], tmp_path / "small", max_bytes=5000)


def test_data_without_text_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    empty = tmp_path / "empty.log"
    empty.write_text("\n\n")
    with pytest.raises(DataError):
        _build(loaded, [empty], tmp_path / "db")
    assert not is_sealed(tmp_path / "db"), "a database begins with the first record"


# -- refused by name


def test_a_database_keeps_one_kind(loaded: LoadedModel, log: Path, straight: Path, bert_database: Path) -> None:
    with pytest.raises(DatabaseError, match="keeps rows; asked: maps") as caught:
        _build(loaded, [log], straight, reuse="maps", storage="auto")
    assert "--reuse rows" in str(caught.value)
    with pytest.raises(DatabaseError, match="keeps maps; asked: rows"):
        _build(loaded, [log], bert_database)


@pytest.mark.parametrize(("changes", "said"), [
    ({"storage": "uint8"}, "rows are not stored as uint8"),
    ({"reuse": "maps", "storage": "int8"}, "maps are not stored as int8"),
    ({"inputs": "first"}, "leave --inputs out"),
])  # fmt: skip
def test_options_of_the_other_kind_are_refused(
    loaded: LoadedModel, log: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(AttmemoError, match=said):
        _build(loaded, [log], tmp_path / "db", **changes)
    assert not (tmp_path / "db").exists()


def test_a_family_without_blocks_is_refused(tmp_path: Path) -> None:
    model, ids = GPT2Model(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=100)).eval(), torch.ones(2, 16).long()
    inputs = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]
    with pytest.raises(UnsupportedModelError, match="reuse='rows' cannot run the blocks of GPT2"):
        build_from_inputs(model, inputs, tmp_path / "db", reuse="rows")
    assert not (tmp_path / "db").exists()


def test_an_unknown_kind_is_refused(loaded: LoadedModel, log: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reuse must be one of maps, rows"):
        _build(loaded, [log], tmp_path / "db", reuse="columns")


# -- where databases are looked for


def test_rows_and_maps_of_a_model_lie_beside_each_other(loaded: LoadedModel, log: Path, tmp_path: Path) -> None:
    """`memoize` finds the one it asks for by name, and rows first."""
    rows = _build(loaded, [log], None).path
    key = Filling.read(rows).model.fingerprint
    assert find_database(key) == rows == default_path(key, "rows")
    with pytest.raises(DatabaseError, match="no database of maps"):
        find_database(key, "maps")
    maps = _build(loaded, [log], None, reuse="maps", storage="auto").path
    assert maps == default_path(key) != rows
    assert find_database(key) == find_database(key, "rows") == rows
    assert find_database(key, "maps") == maps


def test_memoize_serves_the_rows_that_were_built(tiny_bert: str, log: Path) -> None:
    """Without naming a kind or a place; a text of the database takes its own record and gives the same answer."""
    loaded = load_model(tiny_bert)
    _build(loaded, [log], None)
    texts = log.read_text().splitlines()[:12]
    inputs = collate(loaded, tokenize(loaded, texts, 48))
    model: Any = loaded.model
    with torch.inference_mode():
        exact = model(**inputs).logits
        memoize(model, database="auto", budget=0.01)
        given = model(**inputs).logits
    stats = model.attmemo.stats()
    assert stats["reuse"] == "rows"
    assert stats["repeated"] == 12
    assert stats["rows_computed"] < 0.5 * stats["tokens"]
    torch.testing.assert_close(given, exact, atol=1e-3, rtol=1e-3)
