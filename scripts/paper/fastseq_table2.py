"""FastSeq Table 2: BART-large step by step, and generation without a cache."""

from __future__ import annotations

import time
from typing import Any

import torch
from fastseq_shapes import SHAPES
from matplotlib.figure import Figure as Plot

from paper.fastseq_rows import bench, in_types, setting, speed, table_of_types, where
from paper.frame import Claim, Figure, Found, Run, judge, table
from paper.plots import PAPER, legend, sheet

# batch, GB of cache, samples a second
PAPER_ROWS = {
    "no cache": (32, 0.0, 1.8), "stock": (32, 6.3, 2.4), "+ pipeline": (32, 6.3, 3.6), "+ n-gram": (32, 6.3, 5.6),
    "+ shared cache": (32, 1.8, 8.1), "+ larger batch": (128, 7.2, 18.4),
}  # fmt: skip
HERE = {"no cache": "no cache", "stock": "stock", "+ shared cache": "shared", "+ n-gram": "+ngram",
        "+ pipeline": "+pipeline", "+ larger batch": "+batch"}  # fmt: skip


def measure(run: Run) -> Found:
    record = bench()
    (row,) = (row for row in record["rows"] if "+batch" in row["seconds"] and row["shape"] == "bart-large")
    (paper_like,) = (
        row
        for row in record["rows"]
        if (row["shape"], row["length"], row["new"], row["beams"]) == ("bart-large", 1024, 50, 4)
    )
    without = run.part("no-cache", lambda: _no_cache(run))
    speeds = {name: speed(row, rung) for name, rung in HERE.items() if rung in row["seconds"]}
    return {
        "conditions": record["conditions"], "setting": setting(row), "lines": row["lines"],
        "stock_seconds": row["seconds"]["stock"], "speeds": speeds, "no_cache": without,
        "types": in_types("bart-large"),
        "cache_bytes": {"stock, by the formula": paper_like["formula_bytes"]["stock"],
                        "shared, allocated": sum(paper_like["cache_bytes"].values())},
    }  # fmt: skip


def _no_cache(run: Run) -> Found:
    """The original generation with its cache and without it: fewer tokens, for it takes long."""
    shape, length, new = run.size(("bart-large", 256, 12), ("tiny", 8, 3))
    torch.manual_seed(0)
    model: Any = SHAPES[shape]().eval()
    ids = torch.randint(10, model.config.vocab_size, (1, length))
    seconds = {}
    for name, cached in (("stock", True), ("no cache", False)):
        start = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=4, max_new_tokens=new, min_new_tokens=new,
            do_sample=False, use_cache=cached,
        )  # fmt: skip
        seconds[name] = time.perf_counter() - start
    return {"length": length, "new": new, "beams": 4, "batch": 1, "seconds": seconds}


def _ratio(found: Found) -> float:
    return float(found["no_cache"]["seconds"]["stock"] / found["no_cache"]["seconds"]["no cache"])


def claims(found: Found) -> list[Claim]:
    speeds, sizes = found["speeds"], found["cache_bytes"]
    stock, shared = sizes["stock, by the formula"], sizes["shared, allocated"]
    alone = speeds["+ n-gram"] / speeds["+ shared cache"]
    piped = speeds["+ pipeline"] / speeds["+ n-gram"]
    return [
        Claim("without a cache generation is slower", "0.7x",
        f"{_ratio(found):.2f}x (original, 256 source tokens, 12 new)",
              judge(_ratio(found) < 1.0)),
        Claim(
            "the shared cache makes generation faster", "5.6 → 8.1 samples/s (1.4x)",
            f"{speeds['+ shared cache']:.2f}x",
            judge(speeds["+ shared cache"] >= 1.4),
        ),
        Claim(
            "the shared cache takes a third of the memory", "6.3 → 1.8 GB (3.5x)",
            f"{stock / 1e6:.0f} → {shared / 1e6:.0f} MB ({stock / shared:.2f}x)", judge(stock / shared > 3.4),
            "1,024 source tokens, 50 new ones, batch 4",
        ),
        Claim(
            "the n-gram kernel makes generation faster", "3.6 → 5.6 samples/s (1.6x)", f"{alone:.2f}x more",
            judge(alone > 1.05), "the original's own blocking is vectorised",
        ),
        Claim(
            "the asynchronous pipeline makes generation faster", "2.4 → 3.6 samples/s (1.5x)", f"{piped:.2f}x more",
            judge(piped > 1.05), "generation keeps both cores busy: no idle time to hide in",
        ),
        Claim(
            "a larger batch makes generation faster", "8.1 → 18.4 samples/s (2.3x)",
            f"{speeds['+ larger batch'] / speeds['+ pipeline']:.2f}x more",
            judge(speeds["+ larger batch"] > 1.05 * speeds["+ pipeline"],
                  speeds["+ larger batch"] >= 2 * speeds["+ pipeline"]),
            "two cores are near their arithmetic limit",
        ),
        Claim("all steps together", "7.7x", f"{speeds['+ larger batch']:.2f}x",
              judge(speeds["+ larger batch"] > 2.0, speeds["+ larger batch"] >= 7.0)),
    ]  # fmt: skip


def caption(found: Found) -> str:
    part = found["no_cache"]
    return (
        f"BART-large, {found['setting']}, {found['lines']} texts; {where(found)}. Without a cache: the original "
        f"alone, {part['length']} source tokens, {part['new']} new ones, {part['beams']} beams, batch "
        f"{part['batch']}, {part['conditions']['threads']} threads, load {part['conditions']['load']:g}. Paper: V100, "
        "1,024 source tokens, the steps in another order."
    )


def rows(found: Found) -> str:
    base = found["lines"] / found["stock_seconds"]
    lines = []
    for name, (batch, size, rate) in PAPER_ROWS.items():
        gain = _ratio(found) if name == "no cache" else found["speeds"].get(name)
        here = "" if gain is None or name == "no cache" else f"{base * gain:.2f}"
        shown = name.replace("stock", "original")
        lines.append((shown, batch, size, rate, f"{rate / 2.4:.1f}x", here, "" if gain is None else f"{gain:.2f}x"))
    over = "over the original"
    head = ("step", "paper: batch", "cache, GB", "samples/s", over, "here: samples/s", over)
    order = "Here the order is: shared cache, n-gram, pipeline, larger batch."
    return f"{table(head, lines)}\n\n{order}\n\n{table_of_types(found['types'])}"


def why(found: Found) -> str:
    return (
        "On a CPU the cache is the step that counts: states that are computed, stored and read once a sample in "
        "the place of once a beam. The other steps remove waiting between CPU and GPU, which a CPU does not have. "
        "The n-gram kernel itself is much faster than the original's (Table 3), but that is no longer a quarter of "
        "the time."
    )


def draw(found: Found) -> Plot:
    figure, (axes,) = sheet(1, "BART-large, step by step: times as fast as the original", 6.8)
    names = ["stock", "+ shared cache", "+ n-gram", "+ pipeline", "+ larger batch"]
    axes.plot(names, [found["speeds"].get(name) for name in names], "o-", label="here, two cores")
    paper = {name: row[2] / 2.4 for name, row in PAPER_ROWS.items() if name != "no cache"}
    order = ["stock", "+ pipeline", "+ n-gram", "+ shared cache", "+ larger batch"]
    axes.plot(range(5), [paper[name] for name in order], "D--", color=PAPER, label="paper, V100, in its own order")
    for place, name in enumerate(order):
        axes.annotate(name, (place, paper[name]), fontsize=7, color=PAPER, ha="right", va="bottom")
    axes.set_ylabel("times as fast")
    legend(axes)
    return figure


FIGURE = Figure("fastseq_table2", "FastSeq Table 2: step by step", measure, claims, caption, rows, why, draw)
