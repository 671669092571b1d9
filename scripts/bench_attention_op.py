"""Measure the attention operator against padded SDPA, and write docs/attention-op.json, a table and a plot.

    python scripts/bench_attention_op.py docs              # about three minutes on two cores
    python scripts/bench_attention_op.py docs --quick      # fewer repetitions, smaller batches

Heads as in Llama 3: 32 query heads on 8 key heads of 128 elements; one layer. *Decode*: one new token each.
*Mixed*: one sequence of the batch is a prompt of 512 tokens, behind 1024 in the cache, the others decode.

The other side is the best that torch has for such a batch: keys and values lie padded to the longest sequence in one
tensor [B, 8, longest, 128] (as a static cache has them, so nothing is copied but the new tokens, in place), and
`scaled_dot_product_attention` is given a mask of the lengths, only where lengths differ, and enable_gqa. In a mixed
batch the prompt and the tokens are two calls. Nothing is charged for the memory that padding takes.

Every time is the median of repetitions that take turns with the others in one run, after one that is not counted.
What is read is the bytes of live keys, values and scales; for GB/s they are divided by the time of the whole call.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from attmemo.fastseq.ops import cache_shape, cpu, multi_head_cache_attention, scale_shape

HEADS, KV_HEADS, WIDTH, PAGE = 32, 8, 128, 16
FORMS: dict[str, dict[str, Any]] = {  # what the cache holds
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"bits": 8, "group": 128},
    "int8, groups of 8": {"bits": 8, "group": 8},
    "int4": {"bits": 4, "group": 32},
}


def seconds(calls: dict[str, Callable[[], Any]], budget: float) -> dict[str, float]:
    """Median of each, taking turns, for about so long together."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    started = time.perf_counter()
    while time.perf_counter() - started < budget or len(next(iter(times.values()))) < 5:
        for name, call in calls.items():
            before = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - before)
    return {name: median(taken) for name, taken in times.items()}


def operator_call(
    lengths: list[int], keys: list[int], *, bits: int = 0, group: int = 8, dtype: torch.dtype = torch.float32
) -> tuple[Callable[[], Any], int]:
    """A call on a paged cache, pages in random order; and the bytes of the live rows."""
    pages = [-(-count // PAGE) for count in keys]
    rows = sum(pages) * PAGE
    shape = cache_shape(3, rows, 1, KV_HEADS, WIDTH, bits)
    scale = None
    if bits:
        cache = torch.randint(-127, 128, shape, dtype=torch.int8)
        scale = torch.rand(scale_shape(3, rows, 1, KV_HEADS, WIDTH, group)) * 0.02
    else:
        cache = torch.randn(shape, dtype=dtype)
    order, at = torch.randperm(sum(pages)) * PAGE, 0
    starts = torch.full((len(keys), max(pages)), -1)
    for b, count in enumerate(pages):
        starts[b, :count] = order[at : at + count]
        at += count
    new = sum(lengths)
    arguments = {
        "query": torch.randn(new, HEADS, WIDTH),
        "current_key": torch.randn(new, KV_HEADS, WIDTH),
        "current_value": torch.randn(new, KV_HEADS, WIDTH),
        "seqstarts": torch.tensor([0, *lengths]).cumsum(0),
        "kvstarts": torch.tensor([0, *keys]).cumsum(0),
        "cachestarts": starts,
        "start_pos": torch.tensor(keys) - torch.tensor(lengths),
        "decoding_batches": sum(length == 1 for length in lengths),
        "max_seqlen": max(lengths),
        "max_kvlen": max(keys),
        "cache": cache,
        "scale": scale,
        "attn_mask": None,
    }
    attributes = {"num_heads": HEADS, "head_dim": WIDTH, "num_kv_heads": KV_HEADS, "quant_bit": bits}
    attributes |= {"quant_group": group, "cache_mode": 1, "cache_layout": 3, "page_size": PAGE}
    item = cache.element_size() * cache[0, 0, 0, 0].numel() + (4 * WIDTH // group if bits else 0)
    return lambda: multi_head_cache_attention(**arguments, **attributes), 2 * KV_HEADS * sum(keys) * item


def padded_call(lengths: list[int], keys: list[int], dtype: torch.dtype = torch.float32) -> Callable[[], Any]:
    """Attention of the same batch over padded keys and values: decoding sequences in one call, prompts one by one."""
    longest = max(keys)
    cache = torch.randn(2, len(keys), KV_HEADS, longest, WIDTH, dtype=dtype)
    decoding = [b for b, length in enumerate(lengths) if length == 1]
    prompts = [b for b, length in enumerate(lengths) if length > 1]
    assert decoding == list(range(len(decoding))), "decoding sequences come first"
    count = len(decoding)
    query = torch.randn(count, HEADS, 1, WIDTH, dtype=dtype)
    fresh = torch.randn(2, count, KV_HEADS, WIDTH, dtype=dtype)
    batch, place = torch.arange(count), torch.tensor([keys[b] - 1 for b in decoding], dtype=torch.int64)
    mask = None
    if len({keys[b] for b in decoding}) > 1:
        mask = (torch.arange(longest) <= place[:, None])[:, None, None]
    chunks = []
    for b in prompts:
        length, total = lengths[b], keys[b]
        new = torch.randn(2, KV_HEADS, length, WIDTH, dtype=dtype)
        causal = torch.ones(length, total, dtype=torch.bool).tril(total - length)
        chunks.append((b, torch.randn(1, HEADS, length, WIDTH, dtype=dtype), new, causal))

    def call() -> None:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        if count:
            for plane in (0, 1):
                cache[plane][batch, :, place] = fresh[plane]
            top = int(place.max()) + 1
            key, value = cache[0, :count, :, :top], cache[1, :count, :, :top]
            sdpa(query, key, value, attn_mask=None if mask is None else mask[..., :top], enable_gqa=True)
        for b, queries, new, causal in chunks:
            total = keys[b]
            cache[:, b, :, total - queries.shape[2] : total] = new
            key, value = cache[0, b : b + 1, :, :total], cache[1, b : b + 1, :, :total]
            sdpa(queries, key, value, attn_mask=causal, enable_gqa=True)

    return call


def ragged(count: int, seed: int) -> list[int]:
    """Lengths uniform in 128 to 4096."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(128, 4097, (count,), generator=generator).tolist()


def cases(quick: bool) -> list[dict[str, Any]]:
    """What is measured."""
    found: list[dict[str, Any]] = []
    for context in (128, 512, 2048, 8192):
        for batch in (1, 8, 64):
            if batch * context <= (16384 if quick else 65536):
                found.append(
                    {"kind": "decode", "lengths": f"all {context}", "new": [1] * batch, "keys": [context] * batch}
                )
    for batch in (4, 16) if quick else (4, 8, 16, 32, 64):
        keys = ragged(batch, batch)
        found.append({"kind": "decode", "lengths": "128-4096", "new": [1] * batch, "keys": keys})
    for batch in (8,) if quick else (8, 32):
        keys = [*ragged(batch - 1, batch), 1536]
        found.append({"kind": "mixed", "lengths": "128-4096", "new": [1] * (batch - 1) + [512], "keys": keys})
    for length in (512, 2048):
        found.append({"kind": "prefill", "lengths": f"all {length}", "new": [length], "keys": [length]})
    return found


def measure(case: dict[str, Any], budget: float) -> dict[str, Any]:
    """One row of the table."""
    calls: dict[str, Callable[[], Any]] = {"padded SDPA": padded_call(case["new"], case["keys"])}
    read: dict[str, int] = {}
    for name, options in FORMS.items():
        calls[name], read[name] = operator_call(case["new"], case["keys"], **options)
    times = seconds(calls, budget)
    return {
        "kind": case["kind"],
        "lengths": case["lengths"],
        "batch": len(case["keys"]),
        "keys": sum(case["keys"]),
        "longest": max(case["keys"]),
        "milliseconds": {name: round(taken * 1e3, 4) for name, taken in times.items()},
        "speedup": {name: round(times["padded SDPA"] / times[name], 3) for name in FORMS},
        "gigabytes_per_second": {name: round(read[name] / times[name] / 1e9, 2) for name in FORMS},
        "bytes": read,
        "gpu": "not measured",
    }


def accuracy() -> list[dict[str, Any]]:
    """What quantisation costs in exactness and saves in bytes: prefill of 512 random tokens, against float32."""
    found = []
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(512, HEADS, WIDTH, generator=generator)
    key, value = torch.randn(2, 512, KV_HEADS, WIDTH, generator=generator)
    starts = torch.tensor([0, 512])

    def output(bits: int, group: int) -> torch.Tensor:
        shape = cache_shape(3, 512, 1, KV_HEADS, WIDTH, bits)
        cache = torch.zeros(shape, dtype=torch.int8 if bits else torch.float32)
        scale = torch.zeros(scale_shape(3, 512, 1, KV_HEADS, WIDTH, group), dtype=torch.float16) if bits else None
        return multi_head_cache_attention(
            query, key, value, starts, starts, starts[:1], starts[:1], 0, None, None, cache, scale, None, HEADS, WIDTH,
            num_kv_heads=KV_HEADS, quant_bit=bits, quant_group=group, cache_layout=3,
        )  # fmt: skip

    exact = output(0, 8)
    for bits in (8, 4):
        for group in (8, 32, 128):
            error = float((output(bits, group) - exact).square().sum() / exact.square().sum())
            bytes_each = bits / 8 + 2 / group
            found.append(
                {"bits": bits, "group": group, "bytes of an element": bytes_each, "nmse": float(f"{error:.2g}")}
            )
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: milliseconds of SDPA, and how many times as fast each form of the cache is."""
    lines = [
        "| batch | lengths | kind | padded SDPA, ms | " + " | ".join(FORMS) + " | GPU |",
        "|---:|---|---|---:|" + "---:|" * len(FORMS) + "---|",
    ]
    for row in rows:
        cells = [f"{row['speedup'][name]:.1f}x" for name in FORMS]
        taken = f"{row['milliseconds']['padded SDPA']:.2f}"
        cells = [str(row["batch"]), row["lengths"], row["kind"], taken, *cells, row["gpu"]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Speedup by batch at ragged lengths; and by context, int8 against float32 of our own."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    mixed = [row for row in rows if row["kind"] == "decode" and row["lengths"] == "128-4096"]
    for name in FORMS:
        left.plot([row["batch"] for row in mixed], [row["speedup"][name] for row in mixed], marker="o", label=name)
    left.axhline(1, color="grey", linewidth=0.8)
    left.axhline(3, color="grey", linewidth=0.8, linestyle=":")
    left.set(xscale="log", xlabel="sequences", ylabel="times as fast as padded SDPA", title="decode, lengths 128-4096")
    left.set_xticks([row["batch"] for row in mixed], [str(row["batch"]) for row in mixed])
    left.set_ylim(bottom=0)
    left.legend(fontsize=8)
    even = [row for row in rows if row["kind"] == "decode" and row["lengths"] != "128-4096"]
    for batch in sorted({row["batch"] for row in even}):
        some = [row for row in even if row["batch"] == batch]
        ratio = [row["milliseconds"]["float32"] / row["milliseconds"]["int8"] for row in some]
        right.plot([row["longest"] for row in some], ratio, marker="o", label=f"batch {batch}")
    right.axhline(1, color="grey", linewidth=0.8)
    right.set(
        xscale="log", xlabel="keys of each sequence", ylabel="float32 time / int8 time", title="int8 against float32"
    )
    contexts = sorted({row["longest"] for row in even})
    right.set_xticks(contexts, [str(context) for context in contexts])
    right.set_ylim(bottom=0)
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder for attention-op.json and attention-op.png")
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each row of the table")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = []
    with torch.inference_mode():
        for case in cases(options.quick):
            rows.append(measure(case, 1.0 if options.quick else options.seconds))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    uneven = [row for row in rows if row["kind"] == "decode" and row["lengths"] == "128-4096"]
    long = [row for row in rows if row["kind"] == "decode" and row["lengths"] in ("all 2048", "all 8192")]
    result = {
        "conditions": {
            "threads": options.threads,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "instruction_set": cpu.instruction_sets()[0],
            "heads": [HEADS, KV_HEADS, WIDTH],
            "page_size": PAGE,
            "cache_layout": 3,
            "query": "float32",
            "padded SDPA": "float32, static padded cache, boolean mask of lengths, enable_gqa",
        },
        "summary": {
            "speedup at ragged lengths, geometric mean": {
                name: round(math.exp(sum(math.log(row["speedup"][name]) for row in uneven) / len(uneven)), 2)
                for name in FORMS
            },
            "float32 time / int8 time at 2048 keys and more": [
                round(row["milliseconds"]["float32"] / row["milliseconds"]["int8"], 2) for row in long
            ],
            "int8 bytes / float32 bytes": round(rows[0]["bytes"]["int8"] / rows[0]["bytes"]["float32"], 4),
        },
        "accuracy": accuracy(),
        "rows": rows,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "attention-op.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(rows, options.output / "attention-op.png")
    print(table(rows))
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
