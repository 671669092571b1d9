"""Lines a second through MiniLM on a GPU, for the comparison in docs/scale.md.

    python scripts/bench_gpu_embed.py ../shared docs/gpu-embed.json

The original model in float16 with SDPA; lines of OpenSSH, sorted by length, pooled and copied back. From tokens: token
ids in the host's memory. From text: the tokenizer comes first, in its own threads, and nothing overlaps. Medians.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measured_at import write_record
from transformers import AutoModel, AutoTokenizer

from attmemo.profiler.demo import model_path
from attmemo.profiler.turns import interleave
from attmemo.system.machine import conditions

LINES, ROUNDS = 40_000, 5
BATCHES = (1, 32, 1024)


def texts_of(shared: Path) -> list[str]:
    """Lines of a log, repeated until there are enough: a GPU gains nothing from the repetition."""
    lines = (shared / "data" / "loghub_2k" / "OpenSSH_2k.log").read_text(errors="replace").splitlines()
    return (lines * (LINES // len(lines) + 1))[:LINES]


def embedder(model: Any, batch: int) -> Callable[[list[list[int]]], torch.Tensor]:
    """Token ids of any number of texts to pooled rows [N, H] in the host's memory."""

    def embed(ids: list[list[int]]) -> torch.Tensor:
        order = sorted(range(len(ids)), key=lambda place: len(ids[place]))
        found = torch.empty(len(ids), model.config.hidden_size)
        for first in range(0, len(order), batch):
            chosen = order[first : first + batch]
            longest = max(len(ids[place]) for place in chosen)
            padded = torch.tensor([ids[place] + [0] * (longest - len(ids[place])) for place in chosen])
            mask = torch.tensor([[1] * len(ids[place]) + [0] * (longest - len(ids[place])) for place in chosen])
            padded, mask = padded.pin_memory().cuda(non_blocking=True), mask.pin_memory().cuda(non_blocking=True)
            rows = model(input_ids=padded, attention_mask=mask).last_hidden_state  # [B, L, H]
            pooled = (rows * mask[..., None]).sum(1, dtype=torch.float32) / mask.sum(1, keepdim=True)
            found[torch.tensor(chosen)] = pooled.cpu()
        return found

    return embed


def usual(call: Callable[[], object]) -> float:
    """Seconds of a call: the median of rounds, after one that is not counted."""
    return 1e-3 * interleave({"call": lambda _: call()}, ROUNDS)["call"].ms


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    model = AutoModel.from_pretrained(model_path(), dtype=torch.float16, attn_implementation="sdpa").eval().cuda()
    seen = {name: value for name, value in conditions().items() if name != "kernel"}
    found: dict[str, Any] = {
        "conditions": {**seen, "device": torch.cuda.get_device_name(), "dtype": "float16", "lines": LINES},
        "lines_per_second": {},
    }
    with torch.inference_mode():
        texts = texts_of(options.shared)
        ids = tokenizer(texts, truncation=True, max_length=128)["input_ids"]
        found["tokens_a_line"] = sum(map(len, ids)) / len(ids)
        for batch in BATCHES:
            count = min(LINES, 256 * batch)
            found["lines_per_second"][f"tokens to embeddings, {batch} at once"] = count / usual(
                partial(embedder(model, batch), ids[:count])
            )
        embed = embedder(model, BATCHES[-1])
        found["lines_per_second"][f"text to embeddings, {BATCHES[-1]} at once"] = LINES / usual(
            lambda: embed(tokenizer(texts, truncation=True, max_length=128)["input_ids"])
        )
    print(json.dumps(found, indent=1))
    write_record(options.output, found)


if __name__ == "__main__":
    main()
