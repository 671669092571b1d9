"""Lossless fast generation for transformers models: shared beam caches, EL-attention, finished rows leave.

from attmemo import fastseq
fast = fastseq.wrap(model)
tokens = fast.generate(**inputs, num_beams=4)   # what model.generate takes and returns
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attmemo.fastseq.prefixlm import PrefixLM
    from attmemo.fastseq.wrap import FastModel, wrap

# Where each public name lives. A module is imported when a name of it is first used, so that one that needs an
# optional package (Triton, a tokenizer) costs nothing to those who do not use it.
_HOMES = {
    "FastModel": "wrap",
    "PrefixLM": "prefixlm",
    "wrap": "wrap",
    "NoRepeatNGram": "ngram",
    "EncoderNoRepeatNGram": "ngram",
    "Pipeline": "pipeline",
}

__all__ = ["FastModel", "PrefixLM", "wrap"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name != "wrap":  # importing the module of the same name has already bound `wrap` to the module
        globals()[name] = value
        return value
    globals()["wrap"] = value
    return value
