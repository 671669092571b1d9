"""The machinery of the studies: pruning that stays, hits that do not depend on the batch, tables between marks."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from attmemo import memoize, unmemoize
from attmemo.db import Database
from attmemo.profiler.models import load_model, tokenize

SCRIPTS = str(Path(__file__).resolve().parents[2] / "scripts")


@pytest.fixture(scope="module")
def pruned() -> Iterator[ModuleType]:
    sys.path.insert(0, SCRIPTS)
    yield importlib.import_module("study_pruned")
    sys.path.remove(SCRIPTS)


@pytest.fixture(scope="module")
def marked(pruned: ModuleType) -> ModuleType:
    return importlib.import_module("marked")


class TestPruning:
    def test_takes_the_smallest_of_every_matrix_and_the_share_that_was_asked(self, pruned: ModuleType) -> None:
        torch.manual_seed(0)
        weights = {"a": torch.nn.Parameter(torch.randn(20, 30)), "b": torch.nn.Parameter(torch.ones(10, 10))}
        masks = pruned.masks_of(weights, 0.85)
        assert {name: float(mask.mean()) for name, mask in masks.items()} == pytest.approx({"a": 0.15, "b": 0.15})
        kept = weights["a"].abs()[masks["a"] == 1]
        assert kept.min() > weights["a"].abs()[masks["a"] == 0].max()
        assert all((mask == 1).all() for mask in pruned.masks_of(weights, 0.0).values())

    def test_grows_from_nothing_to_all_and_ever_slower(self, pruned: ModuleType) -> None:
        shares = [pruned.sparsity_at(step, 10, 110, 0.85) for step in range(0, 130, 10)]
        assert shares[:2] == [0.0, 0.0]
        assert shares[-2:] == [0.85, 0.85]
        grown = np.diff(shares[1:12])
        assert (grown > 0).all()
        assert (np.diff(grown) < 0).all()

    def test_what_was_pruned_stays_zero_through_training_and_saving(
        self, pruned: ModuleType, tiny_bert: str, log_lines: list[str], tmp_path: Path
    ) -> None:
        home = Path(shutil.copytree(tiny_bert, tmp_path / "dense"))
        loaded = load_model(str(home))
        before = loaded.model.bert.encoder.layer[0].attention.self.query.bias.clone()
        rows = pd.DataFrame({"sentence": log_lines[:120], "label": [n % 5 for n in range(120)]})
        said = pruned.prune(loaded, rows, 12, size=16)
        assert said["sparsity"] == pytest.approx(0.85, abs=2e-3)
        assert not torch.equal(loaded.model.bert.encoder.layer[0].attention.self.query.bias, before), "not trained"
        model: Any = loaded.model
        model.save_pretrained(tmp_path / "pruned")
        loaded.tokenizer.save_pretrained(tmp_path / "pruned")
        again = load_model(str(tmp_path / "pruned"))
        shares = [float((w == 0).float().mean()) for w in pruned.linear_weights(again.model).values()]
        assert shares == pytest.approx([0.85] * len(shares), abs=2e-3)
        assert "classifier.weight" not in pruned.linear_weights(again.model)


def test_which_record_serves_which_layer_never_depends_on_the_batch(
    pruned: ModuleType, tiny_bert: str, bert_database: Path, log_lines: list[str]
) -> None:
    loaded = load_model(tiny_bert)
    tokens = tokenize(loaded, [line.replace("1", "7") for line in log_lines[:60]], 48)
    with Database(bert_database) as database:
        model: Any = memoize(loaded.model, 0.5, database, gate=False)
        found = {}
        for size in pruned.BATCH_SIZES:
            model.attmemo.reset_stats()
            found[size] = pruned.decide(loaded, database, tokens, size)
            stats = model.attmemo.stats()
            assert (found[size]["served"] >= 0).sum() == stats["hits"], "what was watched is not what was served"
        unmemoize(model)
    assert 0 < (found[1]["served"] >= 0).mean() < 1
    for size in pruned.BATCH_SIZES:
        assert np.array_equal(found[size]["served"], found[1]["served"])
        assert torch.equal(found[size]["answers"].argmax(1), found[1]["answers"].argmax(1))


def test_measured_tables_take_the_place_of_older_ones_and_of_nothing_else(marked: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "study.md"
    marked.replace_measured(file, "| a |")
    file.write_text("# Words\n\n" + file.read_text() + "\nmore words\n")
    marked.replace_measured(file, "| b |\n")
    assert file.read_text() == f"# Words\n\n{marked.BEGIN}\n\n| b |\n\n{marked.END}\n\nmore words\n"
    marked.replace_measured(file, "| c |")
    file.write_text(file.read_text() + "".join(f"{line}\n" for line in marked.marks("other")))
    marked.replace_measured(file, "| d |", "other")
    assert marked.marked(file.read_text()) == "| c |"
    assert marked.marked(file.read_text(), "other") == "| d |"
    file.write_text("no marks")
    with pytest.raises(ValueError, match="expected one line"):
        marked.replace_measured(file, "| c |")
    assert file.read_text() == "no marks"
