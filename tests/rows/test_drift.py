"""A model serves rows that follow the computed ones of their own sequence. `test_rows_supply` has the numbers."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from packed_models import MODELS, last, rows_database
from packed_models import batch as inputs_of

from attmemo import memoize
from attmemo.rows import serve as rows
from attmemo.rows.serve import DRIFT


def test_a_model_serves_rows_that_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = MODELS["BERT"]()
    stored = inputs_of([30, 24], 3)
    own = {name: value.clone() for name, value in stored.items()}
    own["input_ids"][:, 9] = 5 + (own["input_ids"][:, 9] + 7) % 90
    path = rows_database(bare, [stored], tmp_path / "db")
    model = memoize(copy.deepcopy(bare), 0.5, path, gate=False, budget=None)
    records = last(memoize(copy.deepcopy(bare), reuse="none"), stored)
    seen = last(model, own)
    for number, n in enumerate((30, 24)):
        known, reused = [0, 8, 10, n - 1], [1, 7, 11, n - 2]
        moves = seen[number, known] - records[number, known]
        within = float(moves.var(0).sum())
        common = max(0.0, float(moves.mean(0).square().sum()) - within / 4)
        expected = DRIFT * common / (common + within) * moves.mean(0)
        torch.testing.assert_close(
            seen[number, reused] - records[number, reused], expected.expand(4, -1), rtol=1e-3, atol=1e-5
        )
        assert float(expected.abs().max()) > 1e-3, "else nothing was seen"
    monkeypatch.setattr(rows, "DRIFT", 0.0)
    assert torch.equal(last(model, own)[0, [1, 7]].round(decimals=4), records[0, [1, 7]].round(decimals=4))
