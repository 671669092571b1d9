"""How many Python calls one request makes in this package: they do not grow with the batch."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

import attmemo
from attmemo import memoize

ROOT = str(Path(attmemo.__file__).parent)
EXACT, REUSED = 38, 137
"""Most calls of one request. Fewer is progress: then lower these."""


def walked(work: Callable[[], Any]) -> Counter[tuple[str, str]]:
    """Python calls in this package, by file and function."""
    calls: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            calls[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def fewest(work: Callable[[], Any]) -> Counter[tuple[str, str]]:
    """Those of the one of three rounds with the fewest: in one of them what earlier tests left may be collected."""
    return min((walked(work) for _ in range(3)), key=Counter.total)


def model() -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )  # fmt: skip
    return BertModel(config).eval()


def batch(count: int) -> dict[str, Any]:
    ids = torch.randint(5, 99, (count, 20), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("count", [4, 32])
def test_an_exact_request_makes_few_calls(count: int) -> None:
    served, inputs = memoize(model(), reuse="none"), batch(count)
    with torch.inference_mode():
        served(**inputs)
        calls = fewest(lambda: served(**inputs))
    assert calls.total() <= EXACT, calls.most_common(9)


@pytest.mark.parametrize("count", [4, 32])
def test_a_guarded_request_from_records_makes_few_calls(count: int) -> None:
    served, inputs = memoize(model(), reuse="rows", database=":memory:", gate=False, budget=0.01), batch(count)
    with torch.inference_mode():
        served(**inputs)
        assert served.attmemo.flush()
        served(**inputs)
        calls = fewest(lambda: served(**inputs))
    assert served.attmemo.stats()["repeated"] == 4 * count
    assert calls.total() <= REUSED, calls.most_common(9)
