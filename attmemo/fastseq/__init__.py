"""Lossless fast generation for transformers models; knows nothing of memoization.

    from attmemo import fastseq
    fast = fastseq.wrap(model)
    tokens = fast.generate(**inputs, num_beams=4)   # takes and returns what model.generate does

`attmemo.fastseq.ops` has the attention operator for serving ragged batches from a cache.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attmemo.fastseq.generate.accelerate import accelerate
    from attmemo.fastseq.generate.fastmodel import FastModel, wrap
    from attmemo.fastseq.generate.ngram import EncoderNoRepeatNGram, NoRepeatNGram, swap_ngram_processors
    from attmemo.fastseq.generate.prefixlm import PrefixLM
    from attmemo.fastseq.pipeline.pipeline import Pipeline
    from attmemo.fastseq.pipeline.planner import BatchPlanner

# Where each public name lives. A module is imported when a name of it is first used: importing torch and transformers
# takes seconds, and one that needs an optional package costs nothing to those who do not use it.
_HOMES = {
    "BatchPlanner": "pipeline.planner",
    "EncoderNoRepeatNGram": "generate.ngram",
    "FastModel": "generate.fastmodel",
    "NoRepeatNGram": "generate.ngram",
    "Pipeline": "pipeline.pipeline",
    "PrefixLM": "generate.prefixlm",
    "accelerate": "generate.accelerate",
    "swap_ngram_processors": "generate.ngram",
    "wrap": "generate.fastmodel",
}

__all__ = [
    "BatchPlanner",
    "EncoderNoRepeatNGram",
    "FastModel",
    "NoRepeatNGram",
    "Pipeline",
    "PrefixLM",
    "accelerate",
    "swap_ngram_processors",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name == "ops":
        return import_module(f"{__name__}.ops")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
