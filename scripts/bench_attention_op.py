"""Measure the attention operator against padded SDPA, and write docs/attention-op.json and a plot.

    python scripts/bench_attention_op.py docs                   # about ten minutes on two cores
    python scripts/bench_attention_op.py docs --quick           # fewer repetitions, smaller batches
    python scripts/bench_attention_op.py docs --device cuda     # on a GPU: docs/attention-op-gpu.json

`scripts/result_pages.py` puts the tables into docs/attention-op.md.

Heads as in Llama 3: 32 query heads on 8 key heads of 128 elements; one layer. *Decode*: one new token each.
*Mixed*: one sequence of the batch is a prompt of 512 tokens, behind 1024 in the cache, the others decode.
Everything is measured for queries in float32 and in bfloat16; the other side has keys and values of the same type.

There are three other sides. *Padded*: keys and values lie padded to the longest sequence in one resident tensor
[B, 8, longest, 128], in huge pages like our cache, and nothing is copied but the new tokens, in place; then the
fastest of the ways to call `scaled_dot_product_attention` with a mask of the lengths (only where they differ):
enable_gqa, or the query heads that share a key head as rows of one query; and, at ragged lengths, compiled
FlexAttention, whose block mask leaves out what is padding. In a mixed batch the prompt and the tokens are two calls; a
prompt with nothing before it is called with is_causal. Nothing is charged for the memory that padding takes. *One by
one*: no padding, a tensor and a call for each sequence; only for decoding. *transformers*: padded, as a model of
transformers does it with its own functions and its default cache, which copies all keys and values to append one; only
for decoding.

Every time is the median of repetitions that take turns with the others in one run, after one that is not counted.
transformers and FlexAttention take turns with padded SDPA in a run of their own, because what follows the copying of
gigabytes is slower for it; their times are given in the other run's measure, by what padded SDPA took in both. What is
read is the bytes of live keys, values and scales; for GB/s they are divided by the time of the whole call.

On a GPU a time is from the call in Python until the GPU is done, on both sides, and the operator is called with
`validate=False`, as a server calls it.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from measured_at import write_record
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from attmemo.fastseq.ops import cache_shape, multi_head_cache_attention, scale_shape
from attmemo.fastseq.serving.ops import cache_attention
from attmemo.kernels import pages
from attmemo.profiler.plots import GREY, STYLE, png
from attmemo.profiler.turns import Job, interleave

HEADS, KV_HEADS, WIDTH = 32, 8, 128
FORMS: dict[str, dict[str, Any]] = {  # what the cache holds
    "float32": {},
    "float32, pages of 16": {"page": 16},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"bits": 8, "group": 128},
    "int8, groups of 8": {"bits": 8, "group": 8},
    "int4": {"bits": 4, "group": 32},
}
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # of queries, and what caches they are measured with
FORMS_OF = {"float32": list(FORMS), "bfloat16": [name for name in FORMS if "float32" not in name]}


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Room on the device that is measured, in huge pages if that is a CPU."""
    return pages.zeros(shape, dtype, torch.get_default_device())


def done() -> None:
    """A GPU answers before the work is done: this waits."""
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()


def seconds(calls: dict[str, Callable[[], Any]], budget: float, clock: Callable[[], float]) -> dict[str, float]:
    """Median of each, taking turns, for about so long together."""
    jobs: dict[str, Job] = {name: lambda _, call=call: (call(), done()) for name, call in calls.items()}
    return {name: 1e-3 * times.ms for name, times in interleave(jobs, 5, seconds=budget, clock=clock).items()}


def operator_call(
    lengths: list[int], keys: list[int], *, bits: int = 0, group: int = 8, dtype: torch.dtype = torch.float32,
    page: int = 128, query_type: torch.dtype = torch.float32,
) -> tuple[Callable[[], Any], int]:
    """A call on a paged cache, pages in random order; and the bytes of the live rows. Scales are float32."""
    counts = [-(-count // page) for count in keys]
    rows = sum(counts) * page
    shape = cache_shape(3, rows, 1, KV_HEADS, WIDTH, bits)
    scale = None
    if bits:
        cache = zeros(shape, torch.int8).random_(-127, 128)
        scale = zeros(scale_shape(3, rows, 1, KV_HEADS, WIDTH, group), torch.float32).uniform_(0, 0.02)
    else:
        cache = zeros(shape, dtype).normal_()
    order, at = torch.randperm(sum(counts)) * page, 0
    starts = torch.full((len(keys), max(counts)), -1)
    for b, count in enumerate(counts):
        starts[b, :count] = order[at : at + count]
        at += count
    new = sum(lengths)
    arguments = {
        "query": torch.randn(new, HEADS, WIDTH, dtype=query_type),
        "current_key": torch.randn(new, KV_HEADS, WIDTH, dtype=query_type),
        "current_value": torch.randn(new, KV_HEADS, WIDTH, dtype=query_type),
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
    attributes |= {"quant_group": group, "cache_mode": 1, "cache_layout": 3, "page_size": page}
    attributes["validate"] = torch.get_default_device().type == "cpu"
    item = cache.element_size() * cache[0, 0, 0, 0].numel() + (4 * WIDTH // group if bits else 0)
    return lambda: multi_head_cache_attention(**arguments, **attributes), 2 * KV_HEADS * sum(keys) * item


def padded_calls(
    lengths: list[int], keys: list[int], dtype: torch.dtype = torch.float32, flex: bool = False
) -> dict[str, Callable[[], Any]]:
    """Attention of the same batch over padded keys and values: decoding sequences in one call, prompts one by one."""
    longest = max(keys)
    cache = zeros((2, len(keys), KV_HEADS, longest, WIDTH), dtype).normal_()
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
        causal = None if length == total else torch.ones(length, total, dtype=torch.bool).tril(total - length)
        chunks.append((b, torch.randn(1, HEADS, length, WIDTH, dtype=dtype), new, causal))

    sdpa = torch.nn.functional.scaled_dot_product_attention

    def call(packed: bool) -> None:
        if count:
            for plane in (0, 1):
                cache[plane][batch, :, place] = fresh[plane]
            top = int(place.max()) + 1
            key, value = cache[0, :count, :, :top], cache[1, :count, :, :top]
            seen = None if mask is None else mask[..., :top]
            if packed:
                sdpa(query.view(count, KV_HEADS, HEADS // KV_HEADS, WIDTH), key, value, attn_mask=seen)
            else:
                sdpa(query, key, value, attn_mask=seen, enable_gqa=True)
        for b, queries, new, causal in chunks:
            total = keys[b]
            cache[:, b, :, total - queries.shape[2] : total] = new
            key, value = cache[0, b : b + 1, :, :total], cache[1, b : b + 1, :, :total]
            sdpa(queries, key, value, attn_mask=causal, is_causal=causal is None, enable_gqa=True)

    def one_by_one() -> None:
        for b, own in enumerate(alone):
            own[0][:, :, -1] = fresh[0][b]
            own[1][:, :, -1] = fresh[1][b]
            sdpa(query[b].view(1, KV_HEADS, HEADS // KV_HEADS, WIDTH), own[0], own[1])

    def as_transformers() -> None:
        layer = DynamicLayer()
        layer.lazy_initialization(fresh[0][:, :, None], fresh[1][:, :, None])
        layer.keys, layer.values = cache[0, :, :, : longest - 1], cache[1, :, :, : longest - 1]
        key, value = layer.update(fresh[0][:, :, None], fresh[1][:, :, None])
        sdpa_attention_forward(module, query, key, value, mask)

    module = torch.nn.Module()
    module.num_key_value_groups = HEADS // KV_HEADS
    calls = {"padded, enable_gqa": partial(call, False), "padded, packed": partial(call, True)}
    if prompts:
        return calls
    alone = [zeros((2, 1, KV_HEADS, total, WIDTH), dtype).normal_() for total in keys]
    calls |= {"one by one": one_by_one, "transformers": as_transformers}
    if flex and mask is not None:
        calls["padded, FlexAttention"] = flex_call(query, cache, keys)
    return calls


def flex_call(query: torch.Tensor, cache: torch.Tensor, keys: list[int]) -> Callable[[], Any]:
    """FlexAttention, compiled for these shapes, with a block mask made beforehand."""
    lengths = torch.tensor(keys)
    padding = -cache.shape[3] % 128
    key, value = torch.nn.functional.pad(cache, (0, 0, 0, padding))
    blocks = create_block_mask(
        lambda batch, head, row, column: column < lengths[batch], len(keys), None, 1, key.shape[2], device=cache.device
    )
    torch._dynamo.reset()  # else, of the ninth shape, it would no longer be compiled
    compiled = torch.compile(partial(flex_attention, enable_gqa=True), dynamic=False)
    return lambda: compiled(query, key, value, block_mask=blocks)


def ragged(count: int, seed: int) -> list[int]:
    """Lengths uniform in 128 to 4096."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(128, 4097, (count,), generator=generator, device="cpu").tolist()


def cases(quick: bool, largest: int) -> list[dict[str, Any]]:
    """What is measured, with batches up to `largest`."""
    found: list[dict[str, Any]] = []
    for context in (128, 512, 2048, 8192):
        for batch in (1, 8, 64):
            if batch * context <= (16384 if quick else 131072):
                found.append(
                    {"kind": "decode", "lengths": f"all {context}", "new": [1] * batch, "keys": [context] * batch}
                )
    for batch in (4, 16) if quick else (4, 8, 16, 32, 64):
        keys = ragged(batch, batch)
        found.append({"kind": "decode", "lengths": "128-4096", "new": [1] * batch, "keys": keys})
    for batch in (8,) if quick else (8, 32):
        keys = [*ragged(batch - 1, batch), 1536]
        found.append({"kind": "mixed", "lengths": "128-4096", "new": [1] * (batch - 1) + [512], "keys": keys})
    found = [case for case in found if len(case["keys"]) <= largest]
    for length in (512, 2048):
        found.append({"kind": "prefill", "lengths": f"all {length}", "new": [length], "keys": [length]})
    return found


def measure(
    case: dict[str, Any], kind: str, flex: bool, budget: float, clock: Callable[[], float]
) -> dict[str, Any]:
    """One row of the table for queries of type `kind`."""
    calls = padded_calls(case["new"], case["keys"], TYPES[kind], flex)
    read: dict[str, int] = {}
    for name in FORMS_OF[kind]:
        calls[name], read[name] = operator_call(case["new"], case["keys"], **FORMS[name], query_type=TYPES[kind])
    apart = {name: calls.pop(name) for name in ("transformers", "padded, FlexAttention") if name in calls}
    times = seconds(calls, budget, clock)
    if apart:
        common = "padded, packed"
        again = seconds(apart | {common: calls[common]}, budget / 2, clock)
        times |= {name: again[name] * times[common] / again[common] for name in apart}
    times["padded SDPA"] = min(taken for name, taken in times.items() if name.startswith("padded, "))
    others = ("padded SDPA", "one by one", "transformers")
    return {
        "queries": kind,
        "kind": case["kind"],
        "lengths": case["lengths"],
        "batch": len(case["keys"]),
        "keys": sum(case["keys"]),
        "longest": max(case["keys"]),
        "milliseconds": {name: round(taken * 1e3, 4) for name, taken in times.items()},
        "speedup over": {
            other: {name: round(times[other] / times[name], 3) for name in read} for other in others if other in times
        },
        "gigabytes_per_second": {name: round(read[name] / times[name] / 1e9, 2) for name in read},
        "bytes": read,
    }


def device_name(device: str) -> str:
    """The GPU, or the widest vectors that the processor has."""
    return torch.cuda.get_device_name() if device == "cuda" else cache_attention.instruction_sets()[0]


def read_speed() -> float:
    """What this machine's memory gives: GB/s of the fastest of several passes over 1 GiB."""
    numbers = zeros((1 << 28,), torch.float32).fill_(1)
    numbers.sum()
    times = []
    for _ in range(5):
        done()
        before = time.perf_counter()
        numbers.sum()
        done()
        times.append(time.perf_counter() - before)
    return round(numbers.numel() * 4 / min(times) / 1e9, 2)


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
    """Markdown, for one type of queries: milliseconds of the other sides, then how many times as fast each form of the
    cache is as padded SDPA, and in brackets as transformers."""
    forms = FORMS_OF[rows[0]["queries"]]
    others = ("padded SDPA", "one by one", "transformers")
    heads = ["batch", "lengths", "kind", *(f"{other}, ms" for other in others), *forms]
    lines = [
        "| " + " | ".join(heads) + " |",
        "|---:|---|---|---:|---:|---:|" + "---:|" * len(forms),
    ]
    for row in rows:
        cells = []
        for name in forms:
            over = row["speedup over"].get("transformers", {}).get(name)
            cells.append(f"{row['speedup over']['padded SDPA'][name]:.1f}x" + (f" ({over:.1f}x)" if over else ""))
        taken = [row["milliseconds"].get(name) for name in others]
        times = ["" if one is None else f"{one:.2f}" for one in taken]
        cells = [str(row["batch"]), row["lengths"], row["kind"], *times, *cells]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ragged_rows(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Those of decoding at ragged lengths."""
    return [
        row for row in rows if row["queries"] == kind and row["kind"] == "decode" and row["lengths"] == "128-4096"
    ]


WAYS = ("padded, enable_gqa", "padded, packed", "padded, FlexAttention", "one by one", "transformers")


def mean_speedups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Geometric means at ragged lengths, by types of queries and cache, over each way to do it in torch."""
    means: list[dict[str, Any]] = []
    for kind in TYPES:
        for name in FORMS_OF[kind]:
            mean: dict[str, Any] = {"queries": kind, "cache": name}
            for way in WAYS:
                times = [row["milliseconds"] for row in ragged_rows(rows, kind) if way in row["milliseconds"]]
                if times:
                    logs = [math.log(time[way] / time[name]) for time in times]
                    mean[way] = round(math.exp(sum(logs) / len(logs)), 2)
            means.append(mean)
    return means


def table_of_means(means: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| queries | cache | " + " | ".join(WAYS) + " |", "|---|---|" + "---:|" * len(WAYS)]
    for mean in means:
        cells = [f"{mean[way]:.1f}x" if way in mean else "" for way in WAYS]
        lines.append("| " + " | ".join([mean["queries"], mean["cache"], *cells]) + " |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Speedup by batch at ragged lengths over padded SDPA, for both types of queries; and int8 over float32."""
    with mpl.rc_context(STYLE):
        path.write_bytes(png(_drawn(rows)))


def _drawn(rows: list[dict[str, Any]]) -> Figure:
    figure = Figure((15, 4), dpi=110, layout="constrained")
    *lefts, right = figure.subplots(1, 3)
    top = max(max(row["speedup over"]["padded SDPA"].values()) for kind in TYPES for row in ragged_rows(rows, kind))
    for axes, kind in zip(lefts, TYPES, strict=True):
        some = ragged_rows(rows, kind)
        batches = [row["batch"] for row in some]
        for index, name in enumerate(FORMS):
            if name in FORMS_OF[kind]:
                values = [row["speedup over"]["padded SDPA"][name] for row in some]
                axes.plot(batches, values, marker="o", label=name, color=f"C{index}")
        axes.axhline(1, color=GREY, linewidth=0.8)
        axes.axhline(3, color=GREY, linewidth=0.8, linestyle=":")
        axes.set(
            xscale="log",
            xlabel="sequences",
            ylabel="times as fast as padded SDPA",
            title=f"decode, lengths 128-4096, queries in {kind}",
        )
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.set_ylim(0, 1.05 * top)
        axes.legend(loc="lower right")
    rows = [row for row in rows if row["queries"] == "float32"]
    even = [row for row in rows if row["kind"] == "decode" and row["lengths"] != "128-4096"]
    for batch in sorted({row["batch"] for row in even}):
        some = [row for row in even if row["batch"] == batch]
        ratio = [row["milliseconds"]["float32"] / row["milliseconds"]["int8"] for row in some]
        right.plot([row["longest"] for row in some], ratio, marker="o", label=f"batch {batch}")
    right.axhline(1, color=GREY, linewidth=0.8)
    right.set(
        xscale="log", xlabel="keys of each sequence", ylabel="float32 time / int8 time", title="int8 against float32"
    )
    contexts = sorted({row["longest"] for row in even})
    right.set_xticks(contexts, [str(context) for context in contexts])
    right.set_ylim(bottom=0)
    right.legend()
    for axes in (*lefts, right):
        axes.minorticks_off()
    return figure


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder for attention-op.json (attention-op-gpu.json) and a plot")
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--largest", type=int, default=64, help="sequences in a batch; 64 need 6 GB")
    parser.add_argument(
        "--clock",
        choices=("wall", "processor"),
        default="wall",
        help="processor: time that the threads worked, for a machine that has other things to do, too",
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="for each row of the table")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    if options.largest < 4:
        parser.error("--largest must be 4 or more: smaller batches are not measured at ragged lengths")
    torch.set_num_threads(options.threads)
    exactness = accuracy()
    torch.set_default_device(options.device)
    torch.manual_seed(0)
    rows = []
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    budget = min(1.0, options.seconds) if options.quick else options.seconds
    with torch.inference_mode():
        for kind in TYPES:
            for case in cases(options.quick, options.largest):
                rows.append(measure(case, kind, not options.quick, budget, clock))
                print(table(rows[-1:]).splitlines()[-1], flush=True)
    long = [
        row
        for row in rows
        if row["queries"] == "float32" and row["kind"] == "decode" and row["lengths"] in ("all 2048", "all 8192")
    ]
    result = {
        "conditions": {
            "threads": options.threads,
            "clock": options.clock,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": device_name(options.device),
            "heads": [HEADS, KV_HEADS, WIDTH],
            "page_size": 128,
            "memory": "huge pages on both sides" if options.device == "cpu" else "of the GPU",
            "gigabytes_per_second a sum of 1 GiB reads": read_speed(),
            "cache_layout": 3,
            "padded SDPA": "resident, boolean mask of lengths; enable_gqa, packed or FlexAttention, the fastest",
        },
        "summary": {
            "speedup at ragged lengths, geometric means": mean_speedups(rows),
            "float32 time / int8 time at 2048 keys and more": [
                round(row["milliseconds"]["float32"] / row["milliseconds"]["int8"], 2) for row in long
            ],
            "int8 bytes / float32 bytes": round(rows[0]["bytes"]["int8"] / rows[0]["bytes"]["float32"], 4),
        },
        "accuracy": exactness,
        "rows": rows,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    name = "attention-op" if options.device == "cpu" else "attention-op-gpu"
    write_record(options.output / f"{name}.json", result)
    plot(rows, options.output / f"{name}.png")
    tables = [table([row for row in rows if row["queries"] == kind]) for kind in TYPES]
    print("\n\n".join([*tables, table_of_means(mean_speedups(rows))]))
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
