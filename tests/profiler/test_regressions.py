"""Each of these was wrong once."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from attmemo import DatabaseError, memoize
from attmemo.db import DatabaseWriter, read_manifest
from attmemo.embed.training import TrainOptions
from attmemo.errors import TuningError
from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.models import load_model
from attmemo.profiler.train import train_database
from attmemo.profiler.tune import TuneOptions, tune


def test_the_longest_text_may_be_held_out(tiny_bert: str, tmp_path: Path, log_lines: list[str]) -> None:
    """Lengths that no training record reaches were measured and indexed, and training ended in a ValueError."""
    lines = [line[:60] for line in log_lines[:160]]
    lines[125] = " ".join(log_lines[:3])  # rows 120-139 are held out
    file = tmp_path / "lines.log"
    file.write_text("\n".join(lines) + "\n")
    build_database(load_model(tiny_bert), [file], tmp_path / "db", BuildOptions(max_length=90))
    report = train_database(tmp_path / "db", TrainOptions(steps=0))
    assert report["profile"] is not None


def test_many_short_files_hold_out_their_share(tiny_bert: str, tmp_path: Path, log_lines: list[str]) -> None:
    """Only rows from 120 on were held out, in every file."""
    files = []
    for part in range(8):
        files.append(tmp_path / f"{part}.log")
        files[-1].write_text("\n".join(log_lines[part * 20 : part * 20 + 20]) + "\n")
    result = build_database(load_model(tiny_bert), files, tmp_path / "db", BuildOptions(max_length=48))
    assert result.held_out >= 20


def test_a_map_that_cannot_be_read_costs_time_and_no_request(
    tiny_bert: str, bert_database: Path, log_lines: list[str]
) -> None:
    """The engine promises the original code for whatever is not served, an error while serving included."""
    loaded = load_model(tiny_bert)
    inputs = loaded.tokenizer(log_lines[:2], truncation=True, max_length=48, padding=True, return_tensors="pt")
    with torch.inference_mode():
        exact = loaded.model(**inputs).logits
        model: Any = memoize(loaded.model, 0.0, bert_database, gate=False)

        def broken(*_: Any) -> Any:
            raise OSError(24, "Too many open files")

        model.attmemo.engine.reuse.source.multiply = broken
        assert torch.equal(model(**inputs).logits, exact)
    stats = model.attmemo.stats()
    assert stats["hit_rate"] == 0.0
    assert sum(stats["failures"].values()) > 0


def test_tuning_that_is_not_one_is_refused_with_what_to_run(
    tiny_bert: str, bert_database: Path, tmp_path: Path
) -> None:
    path = tmp_path / "db"
    shutil.copytree(bert_database, path)
    manifest = read_manifest(path)
    with DatabaseWriter(path, manifest.model, manifest.storage, manifest.settings) as writer:
        writer.publish(tuning={"lookup": "sequence", "thresholds": [0.5], "budget": 0.01})
    with pytest.raises(DatabaseError, match="attmemo tune"):
        memoize(load_model(tiny_bert).model, "auto", path)


def test_a_tuning_that_found_nothing_does_not_replace_one_that_did(
    tiny_bert: str, bert_database: Path, tmp_path: Path, log_lines: list[str]
) -> None:
    path = tmp_path / "db"
    shutil.copytree(bert_database, path)
    manifest = read_manifest(path)
    good = {"lookup": "sequence", "thresholds": [0.5, 0.5], "budget": 0.01}
    with DatabaseWriter(path, manifest.model, manifest.storage, manifest.settings) as writer:
        writer.publish(tuning=good)
    few = tmp_path / "few.log"
    few.write_text("\n".join(line + " x" for line in log_lines[:10]) + "\n")
    with pytest.raises(TuningError, match="allow-uncertified"):
        tune(path, [few], TuneOptions(budget=0.01, model=tiny_bert))
    assert read_manifest(path).tuning == good


def test_the_files_of_the_generation_before_stay_for_its_readers(bert_database: Path, tmp_path: Path) -> None:
    path = tmp_path / "db"
    shutil.copytree(bert_database, path)
    before = read_manifest(path).embedder
    assert before is not None
    train_database(path, TrainOptions(steps=0), profile=False)
    assert (path / before.weights.file).exists()
    assert dataclasses.asdict(before) != dataclasses.asdict(read_manifest(path).embedder)  # type: ignore[arg-type]
