"""EL-attention Table 4: memory of the states of the input."""

from __future__ import annotations

from matplotlib.figure import Figure as Plot

from paper.el_table3 import BART
from paper.fastseq_rows import bench
from paper.frame import Claim, Figure, Found, Run, judge, table
from paper.plots import PAPER, legend, sheet

# GB by batch and length: multi-head, EL
PAPER_ROWS = {
    (32, 256): (1.5, 0.02), (32, 1024): (6.0, 0.06), (64, 256): (3.0, 0.03), (64, 1024): (12.0, 0.13),
    (320, 256): (15.0, 0.15), (320, 1024): (60.0, 0.63),
}  # fmt: skip


def measure(run: Run) -> Found:
    rows = [
        {"batch": batch, "length": length, "multi-head": BART.cache_bytes(batch, 4, length, 0, "stock"),
         "el": BART.cache_bytes(batch, 4, length, 0, "el")}
        for batch, length in PAPER_ROWS
    ]  # fmt: skip
    record = bench()
    chosen = (row for row in record["rows"] if row["shape"] == "bart-large" and row["el_cache_bytes"] is not None)
    row = next(chosen)
    allocated = {
        "batch": row["batch"], "length": row["length"], "el": row["el_cache_bytes"]["shared"],
        "shared": row["cache_bytes"]["shared"],
    }  # fmt: skip
    return {"conditions": record["conditions"], "rows": rows, "allocated": allocated}


def claims(found: Found) -> list[Claim]:
    close = [
        abs(row["multi-head"] / 2**30 - PAPER_ROWS[row["batch"], row["length"]][0]) < 0.05
        and abs(row["el"] / 2**30 - PAPER_ROWS[row["batch"], row["length"]][1]) < 0.008
        for row in found["rows"]
    ]
    last, own = found["rows"][-1], found["allocated"]
    return [
        Claim(
            "EL-attention needs 1/96 of the memory for the states of the input", "60 GB → 0.63 GB",
            f"{last['multi-head'] / 2**30:.0f} → {last['el'] / 2**30:.3f} GiB "
            f"(1/{last['multi-head'] / last['el']:.0f}); "
            f"{sum(close)} of {len(close)} cells as in the paper", judge(all(close)),
        ),
        Claim(
            "so many bytes are really allocated", "not told",
            f"float32, batch {own['batch']}: {own['el'] / 1e6:.1f} MB with EL-attention, {own['shared'] / 1e6:.0f} "
            f"MB with shared keys and values (1/{own['shared'] / own['el']:.0f}: no beams in either)",
            judge(own["el"] == 4 * own["batch"] * own["length"] * 1024),
        ),
    ]  # fmt: skip


def caption(found: Found) -> str:
    own = found["allocated"]
    return (
        "BART-large, float16, 4 beams, cross-attention states alone, by the planner's formula; the allocated bytes "
        f"are those of a run in float32 with batch {own['batch']} and {own['length']:,} source tokens "
        "(scripts/bench_fastseq.py, [fastseq in full](fastseq-bench.md))."
    )


def rows(found: Found) -> str:
    lines = [
        (
            row["batch"], row["length"], *PAPER_ROWS[row["batch"], row["length"]], f"{row['multi-head'] / 2**30:.2f}",
            f"{row['el'] / 2**30:.3f}",
        )
        for row in found["rows"]
    ]  # fmt: skip
    return table(("batch", "tokens", "paper: multi-head, GB", "EL, GB", "here: multi-head, GiB", "EL, GiB"), lines)


def why(found: Found) -> str:
    last, own = found["rows"][-1], found["allocated"]
    whole, tensors = last["multi-head"] / last["el"], own["shared"] / own["el"]
    return (
        "The table counts the states of the input and leaves the decoder's own cache out. Of the factor of "
        f"{whole:.0f} any shared cache has {whole / tensors:.0f}, the beams; the other {tensors:.0f} are two tensors "
        f"in each of {tensors / 2:.0f} layers in the place of one for all."
    )


def draw(found: Found) -> Plot:
    figure, (axes,) = sheet(1, "States of the input, BART-large, 1,024 tokens")
    chosen = [row for row in found["rows"] if row["length"] == 1024]
    batches = [row["batch"] for row in chosen]
    for name, key, place in (("multi-head", "multi-head", 0), ("EL-attention", "el", 1)):
        axes.loglog(batches, [row[key] / 2**30 for row in chosen], "o-", label=name)
        axes.plot(batches, [PAPER_ROWS[batch, 1024][place] for batch in batches], "x", color=PAPER, markersize=8)
    axes.plot([], [], "x", color=PAPER, label="paper")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.set(xlabel="batch", ylabel="GiB")
    legend(axes)
    return figure


FIGURE = Figure("el_table4", "EL-attention Table 4: memory", measure, claims, caption, rows, why, draw)
