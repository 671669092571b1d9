"""Heads that give no class: taggers are evaluated by their spans, rerankers by how far a score moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from attmemo.profiler.answers import changed, harm
from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.evaluate import EvaluateOptions, evaluate
from attmemo.profiler.models import load_model

ROWS = BuildOptions(max_length=48, storage="float32", batch_size=8, held_out=0.3, reuse="rows")


def saved(kind: Any, folder: Path, tiny_bert: str, **settings: Any) -> str:
    """A random model with another head than `tiny_bert` has, and its tokenizer."""
    torch.manual_seed(0)
    config = hf.AutoConfig.from_pretrained(tiny_bert, architectures=None, id2label=None, label2id=None, **settings)
    kind(config).eval().save_pretrained(folder)
    hf.AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(folder)
    return str(folder)


def evaluated(model: str, log_lines: list[str], folder: Path) -> dict[str, Any]:
    for name, lines in (("first", log_lines[:60]), ("second", log_lines[60:90])):
        (folder / f"{name}.log").write_text("\n".join(f"{line} {name}" for line in lines))
    build_database(load_model(model), [folder / "first.log"], folder / "db", ROWS)
    options = EvaluateOptions(repeats=1, sweep=False, controls=False, gate=False, batch_size=8)
    return evaluate(folder / "db", [folder / "second.log"], options)


def test_a_tagger_is_evaluated_by_its_spans(tiny_bert: str, log_lines: list[str], tmp_path: Path) -> None:
    model = saved(hf.BertForTokenClassification, tmp_path / "model", tiny_bert, num_labels=5)
    result = evaluated(model, log_lines, tmp_path)
    assert result["quality"]["changed_means"] == "other spans"
    assert 0.0 <= result["quality"]["agreement"] <= 1.0
    assert result["guard"]["done"]["whole"] > 0
    assert load_model(model).kind == "encoder", "elsewhere its embeddings are asked for"


def test_a_reranker_is_evaluated_by_its_scores(tiny_bert: str, log_lines: list[str], tmp_path: Path) -> None:
    model = saved(hf.BertForSequenceClassification, tmp_path / "model", tiny_bert, num_labels=1)
    result = evaluated(model, log_lines, tmp_path)
    assert result["quality"]["changed_means"] == "a score that moved by more than 0.05"
    assert result["quality"]["score_distance_mean"] < 0.05
    assert result["guard"]["done"]["whole"] > 0


@pytest.mark.parametrize(("moved", "differ"), [(0.0, False), (0.049, False), (0.051, True), (-0.2, True)])
def test_a_score_changes_where_it_moves_by_more_than_a_step(moved: float, differ: bool) -> None:
    exact, given = (torch.logit(torch.tensor([[0.4 + by], [0.7]])) for by in (0.0, moved))
    assert changed("classifier", exact, given, 0.98).tolist() == [differ, False]
    assert harm("classifier", exact, given).tolist() == pytest.approx([abs(moved), 0.0], abs=1e-6)
