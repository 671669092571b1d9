"""Lossless fast generation for transformers models; knows nothing of memoization."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "BatchPlanner": "planner",
    "EncoderNoRepeatNGram": "ngram",
    "NoRepeatNGram": "ngram",
    "Pipeline": "pipeline",
    "swap_ngram_processors": "ngram",
}

__all__ = ["BatchPlanner", "EncoderNoRepeatNGram", "NoRepeatNGram", "Pipeline", "swap_ngram_processors"]


def __getattr__(name: str) -> Any:
    # Loaded at the first use: importing torch and transformers takes seconds.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
