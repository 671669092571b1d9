"""Saved checkpoints of every family of text: built, trained with a profile, tuned, evaluated, and served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from test_saved_families import LONGEST, checkpoint, go_all_the_way

from attmemo import Database, memoize, unmemoize
from attmemo.profiler.logs import generate_log
from attmemo.profiler.models import answers, collate, load_model, tokenize

# A BART encoder alone is nothing that transformers loads again.
TEXT = [name for name, family in FAMILIES.items() if family.kind == "tokens" and name != "BART encoder"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXT)
def test_every_checkpoint_comes_all_the_way(name: str, tmp_path: Path, log_lines: list[str]) -> None:
    checkpoint(name, tmp_path / "model", log_lines)
    path, profile = go_all_the_way(tmp_path, log_lines)
    loaded = load_model(str(tmp_path / "model"))
    with Database(path) as database:
        assert len(profile["costs"]) == database.manifest.model.layers
        assert database.manifest.tuning is not None
    model: Any = memoize(loaded.model, 0.0, path, gate=False)
    stored = collate(loaded, tokenize(loaded, list(generate_log(60, seed=1))[:4], LONGEST))
    with torch.inference_mode():
        served = answers(loaded, stored)
        assert model.attmemo.stats()["hits"] > 0
        unmemoize(model)
        assert torch.allclose(served, answers(loaded, stored), atol=0.05 * float(served.abs().max())), "float16 maps"
