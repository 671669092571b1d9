"""vLLM for processors: an embedder asked by token ids, its engine in the process of the path."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor, nn

from attmemo.profiler.models import Tokens

SETTINGS: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
}  # fmt: skip
"""Variables that vLLM reads: one process, threads where the system puts them, 1 GiB for keys and values."""


def vllm(model: str, dtype: str, pooling: str, longest: int) -> Callable[[Sequence[Tokens]], Tensor]:
    """A model directory ready to be asked for embeddings of up to `longest` tokens."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    library: Any = import_module("vllm")
    pooler = import_module("vllm.config").PoolerConfig(
        pooling_type={"mean": "MEAN", "cls": "CLS", "lasttoken": "LAST"}[pooling]
    )
    engine = library.LLM(
        model=model, runner="pooling", dtype=dtype, max_model_len=longest, pooler_config=pooler,
        enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip

    def way(texts: Sequence[Tokens]) -> Tensor:
        found = engine.embed([{"prompt_token_ids": text.ids} for text in texts], use_tqdm=False)
        return nn.functional.normalize(torch.tensor([one.outputs.embedding for one in found]), dim=-1)

    return way
