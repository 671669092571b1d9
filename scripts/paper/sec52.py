"""AttMEMO section 5.2: the time of embedders: linear layers, a CNN, a transformer layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from matplotlib.figure import Figure as Plot
from torch import Tensor, nn

from attmemo.embed.siamese import CHANNELS, DIMENSION, SiameseEmbedder
from attmemo.profiler.turns import interleave
from paper.frame import Claim, Figure, Found, Run, judge, table, where
from paper.plots import bars, legend, sheet

PAPER_MS = {"linear layers": 5.0, "CNN": 100.0, "transformer": 150.0}


def measure(run: Run) -> Found:
    batch, length, hidden = run.size((64, 128, 768), (2, 8, 24))
    torch.manual_seed(0)
    states = torch.randn(batch, length, hidden)
    ways = _embedders(length, hidden)
    with torch.inference_mode():
        jobs = {name: lambda _turn, way=way: way(states) for name, way in ways.items()}
        spent = interleave(jobs, run.size(7, 1))
    return {"batch": batch, "length": length, "hidden": hidden, "ms": {name: one.ms for name, one in spent.items()}}


def _embedders(length: int, hidden: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Ours; the MLP of the paper's lab; a CNN of two layers; a transformer of one layer. Random weights.

    The paper gives no widths of the last two. The lab's code pools 2 x 2, flattens, and has two linear layers.
    """
    own = SiameseEmbedder(
        torch.randn(hidden, CHANNELS), torch.zeros(CHANNELS), torch.randn(length * CHANNELS, DIMENSION),
        torch.randn(DIMENSION, DIMENSION),
    )  # fmt: skip
    flat = (length // 2) * (hidden // 2)
    mlp = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(flat, DIMENSION), nn.Linear(DIMENSION, DIMENSION))
    wide = hidden // 3
    cnn = nn.Sequential(
        nn.Conv1d(hidden, wide, 3, padding=1), nn.ReLU(), nn.Conv1d(wide, wide, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(wide, DIMENSION),
    )  # fmt: skip
    heads = 12 if hidden % 12 == 0 else 1
    layer = nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, batch_first=True).eval()
    last = nn.Linear(hidden, DIMENSION)
    return {
        "linear layers": lambda states: own.embed(states, [states.shape[1]] * len(states)),
        "linear layers, the lab's": lambda states: mlp(states[:, None]),
        "CNN": lambda states: cnn(states.transpose(1, 2)),
        "transformer": lambda states: last(layer(states).mean(1)),
    }


def claims(found: Found) -> list[Claim]:
    ms = found["ms"]
    least = ms["linear layers"]
    ratios = {name: ms[name] / least for name in ("CNN", "transformer")}
    return [
        Claim(
            "linear layers embed 64 sequences of 128 tokens in 5 ms", "5 ms on 24 cores",
            f"{least:.1f} ms on {found['conditions']['threads']} threads (the lab's: "
            f"{ms['linear layers, the lab' + chr(39) + 's']:.1f} ms)", judge(least <= 5.0),
        ),
        Claim(
            "a CNN or a transformer layer takes 20 and 30 times as long", "100 and 150 ms",
            f"{ms['CNN']:.0f} and {ms['transformer']:.0f} ms: "
            f"{ratios['CNN']:.0f} and {ratios['transformer']:.0f} times",
            judge(ratios["CNN"] >= 20, ratios["transformer"] >= 30),
        ),
    ]  # fmt: skip


def caption(found: Found) -> str:
    return (
        f"{found['batch']} sequences of {found['length']} tokens, {found['hidden']} wide, to {DIMENSION} numbers; "
        "float32, random weights, medians of turns. CNN: two convolutions of width 3 to a third of the channels. "
        f"Transformer: one encoder layer. Paper: 24 cores. {where(found)}."
    )


def rows(found: Found) -> str:
    lines = [(name, f"{ms:.2f}", PAPER_MS.get(name, "")) for name, ms in found["ms"].items()]
    return table(("embedder", "here, ms", "paper, ms"), lines)


def why(found: Found) -> str:
    return (
        "The order is the paper's. The library's embedder projects each token to a few channels and multiplies these "
        "with one folded matrix: no layer between is computed at serving. The paper's MLP flattens the whole input."
    )


def draw(found: Found) -> Plot:
    figure, (axes,) = sheet(1, "Time of an embedder, 64 sequences of 128 tokens", 6.2)
    names = list(found["ms"])
    bars(axes, names, {"here": list(found["ms"].values()), "paper (24 cores)": [PAPER_MS.get(name) for name in names]})
    axes.set_yscale("log")
    axes.tick_params(axis="x", labelsize=7)
    axes.set(ylabel="ms")
    legend(axes)
    return figure


FIGURE = Figure(
    "sec52", "AttMEMO section 5.2: the cost of embedding", measure, claims, caption, rows, why, draw, quiet=True
)
