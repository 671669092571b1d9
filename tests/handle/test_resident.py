"""Resident memory: what `memoize` needs for a while is given back, and weights are in memory at most twice."""

from __future__ import annotations

from typing import Any

import pytest
from children import run_child

MIB = 1 << 20
SLACK = 32 * MIB
"""Beside the weights, which are three times as much: scratch memory of the forwards, tables, an index, records."""
WAYS: dict[str, dict[str, Any]] = {
    "none": {"reuse": "none"},
    "int8": {"reuse": "none", "linear": "int8"},
    "rows": {"reuse": "rows", "database": ":memory:", "budget": 0.01, "linear": "exact"},
}

STEPS = r"""
import gc
from pathlib import Path

import torch
from transformers import BertConfig, BertModel

from attmemo import memoize, unmemoize
from attmemo.system.machine import trim

torch.manual_seed(0)
shape = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 2048}


def resident():
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


def serve(model):
    with torch.inference_mode():
        model(input_ids=torch.arange(5, 5 + 2 * 32).view(2, 32))


def measure(options):
    model = BertModel(BertConfig(vocab_size=2000, **shape)).eval()
    serve(model)
    gc.collect()
    trim()
    bare, found = resident(), {"weights": sum(weight.nbytes for weight in model.parameters())}
    for name in ("first", "again"):
        memoize(model, **options)
        serve(model)
        found[name] = resident() - bare, model.attmemo.stats()["weight_bytes"]
    unmemoize(model)
    found["bare"] = resident() - bare
    return found


gc.disable()  # nothing may wait for it
for options in ways.values():  # what the first use loads
    small = BertModel(BertConfig(vocab_size=2000, **{**shape, "hidden_size": 64, "num_hidden_layers": 1})).eval()
    serve(memoize(small, **options))
result = {name: measure(options) for name, options in ways.items()}
"""


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """Bytes by way, of a process with a team of threads: its memory lies in several heaps."""
    team = {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "0"}
    found: dict[str, Any] = run_child(STEPS, timeout=300, environment=team, ways=WAYS).result
    return found


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_resident_at_most_twice(way: str, measured: dict[str, Any]) -> None:
    seen = measured[way]
    for more, made_ready in (seen["first"], seen["again"]):
        assert 0 < made_ready <= seen["weights"]
        assert more < made_ready + SLACK, "what only memoize needed is still there"


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left_of_a_model_that_is_not_memoized_any_more(way: str, measured: dict[str, Any]) -> None:
    assert measured[way]["bare"] < SLACK
