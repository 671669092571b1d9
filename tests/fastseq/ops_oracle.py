"""Runs ppl.pmx's own operator in a process of its own: python ops_oracle.py CHECKOUT CALLS ANSWERS.

CALLS is a list of {"steps": [inputs], "cache", "scale", "attributes"}, saved by torch; so are the answers: for each
call its outputs and what then stands in cache and scale, or the error it raised. Of the checkout only four files are
loaded, as they are; its package's own ``__init__`` would want more.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import torch


def load(checkout: str) -> tuple[Any, Any]:
    """The fused operator, and the attention that it is made of."""
    package = types.ModuleType("oracle")
    package.__path__ = [str(Path(checkout) / "torch_function" / "dynamic_batching")]
    sys.modules["oracle"] = package
    fused = importlib.import_module("oracle.MultiHeadCacheAttention").multi_head_cache_attention
    return fused, importlib.import_module("oracle.MultiHeadAttention").multi_head_attention


def answer(fused: Any, attention: Any, call: dict[str, Any]) -> dict[str, Any]:
    """What it says to one call."""
    cache, scale = call.get("cache"), call.get("scale")
    try:
        with torch.inference_mode():
            if "plain" in call:
                return {"outputs": [attention(*call["plain"])]}
            outputs = [
                fused(*(step[name] for name in list(step)[:10]), cache, scale, step["attn_mask"], **call["attributes"])
                for step in call["steps"]
            ]
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"outputs": outputs, "cache": cache, "scale": scale}


def main() -> None:
    """Answer them all."""
    checkout, calls, answers = sys.argv[1:]
    fused, attention = load(checkout)
    torch.save([answer(fused, attention, call) for call in torch.load(calls, weights_only=True)], answers)


if __name__ == "__main__":
    main()
