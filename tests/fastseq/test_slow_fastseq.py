"""A model that was trained: beams close to each other, sentences that end by themselves, and still stock's tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_data import shared

from attmemo import fastseq


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Any, list[str]]:
    data = shared("data/wmt16_enro")
    path = Path(__file__).resolve().parents[2] / "scripts" / "train_tiny_bart.py"
    spec = importlib.util.spec_from_file_location("train_tiny_bart", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train(data, 600)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["shared", "el"])
@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"num_beams": 4},
        {"num_beams": 4, "no_repeat_ngram_size": 3, "length_penalty": 2.0},
        {"num_beams": 8, "early_stopping": True, "num_return_sequences": 4},
        {"num_beams": 4, "early_stopping": "never", "length_penalty": 0.5},
        {"do_sample": True, "num_return_sequences": 2},
    ],
)
def test_a_trained_model_says_the_same(
    trained: tuple[Any, Any, list[str]], mode: str, setting: dict[str, Any]
) -> None:
    model, tokenizer, sentences = trained
    fast = fastseq.wrap(model, attention=mode)
    lengths, different = set(), set()
    for first in range(0, 48, 16):
        lines = sentences[first : first + 16]
        inputs = tokenizer(
            lines, return_tensors="pt", padding=True, truncation=True, max_length=100, return_token_type_ids=False
        )
        torch.manual_seed(1)
        expected = model.generate(**inputs, max_new_tokens=48, **setting)
        torch.manual_seed(1)
        got = fast.generate(**inputs, max_new_tokens=48, **setting)
        assert torch.equal(expected, got)
        lengths |= {int((row != 1).sum()) for row in got}
        different |= {tuple(row) for row in got.tolist()}
    assert len(different) >= 40, "the model says the same to much of it: it proves little"
    assert len(lengths) > 10, "hardly a sentence ended by itself"
    assert fast.stats()["calls"] == {"fast": 3, "stock": 0}
