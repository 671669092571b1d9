"""AttMEMO Fig. 1: the share of self-attention in a model's time."""

from __future__ import annotations

from matplotlib.figure import Figure as Plot

from paper.frame import Claim, Figure, Found, Run, judge, percent, table, where
from paper.layers import LAYERS, cell, eager
from paper.plots import PAPER, bars, legend, sheet

RANGE = (0.43, 0.80)  # of all bars; the text has "up to 83 %" as well
FAMILIES = {"bert": "BERT (and RoBERTa)", "albert": "ALBERT"}


def measure(run: Run) -> Found:
    rows = []
    for family in FAMILIES:
        for length in (256, 512):
            found = cell(run, family, length, 8, served=False)
            for name, row in (("eager", eager(found)), ("fused", found["rows"]["exact"])):
                share = LAYERS * row["attention_ms_per_layer"] / row["ms"]
                rows.append({"family": family, "length": length, "attention": name, "ms": row["ms"], "share": share})
    return {"batch": 8, "layers": LAYERS, "rows": rows}


def _shares(found: Found, attention: str, length: int) -> list[float]:
    return [row["share"] for row in found["rows"] if row["attention"] == attention and row["length"] == length]


def _both(found: Found, attention: str) -> str:
    parts = (_shares(found, attention, length) for length in sorted({row["length"] for row in found["rows"]}))
    return ", ".join(f"{percent(min(part))} to {percent(max(part))}" for part in parts)


def claims(found: Found) -> list[Claim]:
    lengths = sorted({row["length"] for row in found["rows"]})
    eagers, fused = ([_shares(found, name, length) for length in lengths] for name in ("eager", "fused"))
    flat = [share for part in eagers for share in part]
    best = [share for part in fused for share in part]
    return [
        Claim(
            "self-attention takes 43 % to 80 % of a model's time", "43 % to 80 % at 256 and 512 tokens",
            f"eager: {_both(found, 'eager')}; fused: {_both(found, 'fused')} (256, 512)",
            judge(min(flat) >= RANGE[0], min(best) >= RANGE[0]),
            "projections and FFN weigh more on a fast matrix unit; fused attention takes less",
        ),
        Claim(
            "the share grows with the length", "at 512 more than at 256",
            f"eager {percent(sum(eagers[0]) / 2)} → {percent(sum(eagers[-1]) / 2)}; "
            f"fused {percent(sum(fused[0]) / 2)} → {percent(sum(fused[-1]) / 2)} (means)",
            judge(sum(eagers[-1]) > sum(eagers[0]), sum(fused[-1]) > sum(fused[0])),
        ),
    ]  # fmt: skip


def caption(found: Found) -> str:
    return (
        f"Random weights of base size (768 wide, 12 heads), {found['layers']} layers, batch {found['batch']}, "
        "float32, all tokens valid. Self-attention: projections of Q, K and V, maps, A·V; in ALBERT the output "
        "projection too. Eager: attention without a fused kernel, as in the paper (PyTorch 1.11, 24 cores); fused: "
        f"today's default. RoBERTa has the layers of BERT. Medians. {where(found)}."
    )


def rows(found: Found) -> str:
    lines = [
        (FAMILIES[row["family"]], row["length"], row["attention"], f"{row['ms']:.0f}", percent(row["share"]))
        for row in found["rows"]
    ]
    return table(("model", "tokens", "attention", "forward, ms", "share of self-attention"), lines)


def why(found: Found) -> str:
    return (
        "Eager attention writes the scores and the maps to memory, and computes the softmax between; a fused "
        "kernel does not. The paper's share comes from eager attention on 24 cores, where the matrix products of "
        "the other parts are fast and passes over memory are not. Here the two cores compute the projections and "
        "the FFN more slowly in proportion, so that even eager attention weighs less. What memoization can save is "
        "therefore smaller than the paper's bars suggest."
    )


def draw(found: Found) -> Plot:
    figure, (axes,) = sheet(1, "Share of self-attention in the time of a forward", 6.4)
    groups = [f"{FAMILIES[family]}\n{length}" for family in FAMILIES for length in (256, 512)]
    series = {
        name: [100 * row["share"] for row in found["rows"] if row["attention"] == name] for name in ("eager", "fused")
    }
    bars(axes, groups, series)
    axes.axhspan(100 * RANGE[0], 100 * RANGE[1], color=PAPER, alpha=0.12, label="paper: 43 to 80 %")
    axes.set(ylabel="% of the time", ylim=(0, 100))
    legend(axes, loc="upper left", ncols=3)
    return figure


FIGURE = Figure("fig01", "AttMEMO Fig. 1: the time of a model", measure, claims, caption, rows, why, draw, quiet=True)
