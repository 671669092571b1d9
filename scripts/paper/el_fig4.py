"""EL-attention Fig. 3 and 4: the time of one step of attention, by length and beams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from matplotlib.figure import Figure as Plot

from attmemo.fastseq.generate.beam_attention import shared_attention
from attmemo.fastseq.generate.el_attention import el_cross_attention
from attmemo.profiler.turns import interleave
from paper.el_table1 import HEADS, WIDTH, build, parts
from paper.frame import Claim, Figure, Found, Run, judge, table, where
from paper.plots import legend, sheet

WAYS = ("no cache", "cache", "shared cache", "EL")


def measure(run: Run) -> Found:
    samples = 4
    rows = []
    for length in run.size((256, 1024), (8,)):
        for beams in run.size((1, 4, 8), (2,)):
            part = parts(length, samples, beams)
            with torch.inference_mode():
                stock, few = build(part, beams), build(part, 1)
                jobs: dict[str, Callable[[int], Any]] = {
                    "no cache": lambda _, p=part, b=beams: shared_attention(p["query"], *build(p, b), None, None),
                    "cache": lambda _, p=part, k=stock: shared_attention(p["query"], *k, None, None),
                    "shared cache": lambda _, p=part, k=few: shared_attention(p["query"], *k, None, None),
                    "EL": lambda _, p=part: el_cross_attention(p["query"], p["hidden"], p["projections"], None, None),
                }
                spent = interleave(jobs, run.size(5, 1))
            rows.append({"length": length, "beams": beams} | {name: one.ms for name, one in spent.items()})
    return {"samples": samples, "heads": HEADS, "width": WIDTH, "rows": rows}


def claims(found: Found) -> list[Claim]:
    fastest = [row["EL"] <= min(row["no cache"], row["cache"]) for row in found["rows"]]
    ratios = [row["cache"] / row["EL"] for row in found["rows"]]
    against = [row["no cache"] / row["EL"] for row in found["rows"]]
    return [
        Claim(
            "EL-attention is the fastest in every setting", "all lengths and beams",
            f"faster than a cache in {sum(ratio > 1 for ratio in ratios)} of {len(ratios)} settings "
            f"({min(ratios):.2f}x to {max(ratios):.2f}x), than no cache {min(against):.1f}x to {max(against):.1f}x",
            judge(all(fastest), all(ratio > 1 for ratio in against)), "a CPU has no arithmetic to spare",
        ),
    ]  # fmt: skip


def caption(found: Found) -> str:
    return (
        f"One step of cross-attention in one layer, {found['samples']} samples, {found['heads']} heads, width "
        f"{found['width']}, float32, medians. No cache: keys and values are built for each beam. Cache: they are "
        "kept for each beam, without the cost of reordering. Shared cache: kept once a sample. Paper: V100, "
        f"float16, 1,024 source tokens. {where(found)}."
    )


def rows(found: Found) -> str:
    lines = [
        (row["length"], row["beams"], *(f"{row[name]:.2f}" for name in WAYS), f"{row['cache'] / row['EL']:.2f}x")
        for row in found["rows"]
    ]
    return table(("source tokens", "beams", *(f"{name}, ms" for name in WAYS), "cache / EL"), lines)


def why(found: Found) -> str:
    last = found["rows"][-1]
    return (
        "Fig. 3 of the paper shows the same step as work against bytes: EL-attention has more of the first and "
        "less of the second (Table 1). A V100 in half precision waits for memory and has the arithmetic to spare; "
        f"two cores in float32 have not: with {last['beams']} beams and {last['length']:,} tokens EL-attention "
        f"takes {last['EL']:.1f} ms, a cache {last['cache']:.1f} ms, a shared cache {last['shared cache']:.1f} ms. "
        "The paper's picture holds against generation without a cache."
    )


def draw(found: Found) -> Plot:
    figure, axes = sheet(2, "One step of cross-attention, ms", 4.6)
    for own, length in zip(axes, sorted({row["length"] for row in found["rows"]}), strict=False):
        chosen = [row for row in found["rows"] if row["length"] == length]
        for name, style in zip(WAYS, ("^-", "s-", "o-", "D-"), strict=True):
            own.plot([row["beams"] for row in chosen], [row[name] for row in chosen], style, label=name)
        own.set(title=f"{length:,} source tokens", xlabel="beams", ylabel="ms", yscale="log")
        legend(own)
    return figure


FIGURE = Figure(
    "el_fig4", "EL-attention Fig. 3 and 4: time of attention", measure, claims, caption, rows, why, draw, quiet=True
)
