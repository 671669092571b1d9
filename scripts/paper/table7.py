"""AttMEMO Table 7: selective memoization, on and off."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from matplotlib.figure import Figure as Plot

from attmemo import memoize, unmemoize
from attmemo.db import Database
from attmemo.profiler.answers import prepare
from attmemo.profiler.models import answers, load_model
from attmemo.profiler.turns import interleave
from paper import levels
from paper.frame import Claim, Figure, Found, Run, judge, percent, table, where
from paper.plots import PAPER, bars, legend, sheet

# time reduction, difference of the memoization rate, by batch 1, 32, 64
PAPER_ROWS = {
    "BERT": ((0.05, -0.068), (0.036, -0.114), (0.087, -0.095)),
    "RoBERTa": ((0.081, -0.0054), (0.123, -0.0078), (0.053, -0.0091)),
    "DeBERTa": ((0.03, -0.011), (0.061, -0.022), (0.042, -0.022)),
    "GPT-2": ((0.062, 0.026), (0.063, 0.063), (0.03, 0.018)),
}
CASES = {"minilm-sst2": 0.7, "deberta-loghub": 0.6}  # thresholds
WAYS = ("exact", "gate off", "gate on")


def measure(run: Run) -> Found:
    rows = []
    for name in run.size(tuple(CASES), tuple(CASES)[:1]):
        threshold = CASES[name]
        for batch in run.size((1, 32, 64), (2,)):
            part = run.part(f"gate-{name}-{batch}", lambda n=name, t=threshold, b=batch: _cell(run, n, t, b))
            rows.append(
                {"model": name, "threshold": threshold, "batch": batch, "load": part["conditions"]["load"]} | part
            )
    return {"rows": rows}


def _cell(run: Run, name: str, threshold: float, batch: int) -> Found:
    """Milliseconds a sequence and memoization rates: lookups in every layer, with the gate of Eq. 3 and without."""
    loaded = load_model(str(run.shared / "models" / name))
    tokens, _ = levels.asked(run, name, loaded, run.size(max(96, 2 * batch), 6))
    inputs = [given for _, given in prepare(loaded, tokens, batch)]
    with Database(levels.database(run, name, profile=True)) as opened:
        ways: dict[str, Any] = {"exact": loaded}
        for way in WAYS[1:]:
            ways[way] = own = copy.deepcopy(loaded)
            memoize(own.model, threshold, opened, lookup="layer", gate=way == "gate on")

        def once(way: str) -> Callable[[int], None]:
            def job(_turn: int) -> None:
                for given in inputs:
                    answers(ways[way], given)

            return job

        with torch.inference_mode():
            once("gate on")(0)  # the gate learns from the first batches, and the hit rates are of what follows
            for way in WAYS[1:]:
                ways[way].model.attmemo.reset_stats()
            spent = interleave({way: once(way) for way in WAYS}, run.size(3, 1))
        rates = {way: ways[way].model.attmemo.stats()["hit_rate"] for way in WAYS[1:]}
        for way in WAYS[1:]:
            unmemoize(ways[way].model)
    return {"asked": len(tokens), "ms": {way: one.ms / len(tokens) for way, one in spent.items()}, "rates": rates}


def _reduction(row: Found) -> float:
    return float(1.0 - row["ms"]["gate on"] / row["ms"]["gate off"])


def claims(found: Found) -> list[Claim]:
    reductions = [_reduction(row) for row in found["rows"]]
    differences = [row["rates"]["gate on"] - row["rates"]["gate off"] for row in found["rows"]]
    never = [row["ms"]["gate on"] / row["ms"]["exact"] for row in found["rows"]]
    return [
        Claim(
            "selective memoization saves time in every model", "3.0 % to 12.3 %",
            f"{percent(min(reductions), 1)} to {percent(max(reductions), 1)}",
            judge(min(reductions) >= 0.0, max(reductions) >= 0.03),
        ),
        Claim(
            "memoization then serves a little less", "-11.4 to +6.3 points",
            f"{100 * min(differences):+.1f} to {100 * max(differences):+.1f} points",
            judge(max(differences) <= 0.001, min(differences) >= -0.114),
        ),
        Claim(
            "with the gate nothing becomes slower", "“no performance loss”",
            f"{min(never):.2f} to {max(never):.2f} times the exact time", judge(max(never) <= 1.02, min(never) <= 1.0),
            "the gate tries again from time to time",
        ),
    ]  # fmt: skip


def caption(found: Found) -> str:
    loads = [row["load"] for row in found["rows"]]
    cases = ", ".join(f"{name} at a threshold of {value:g}" for name, value in CASES.items())
    return (
        f"{cases}; a lookup in every layer as in the paper, valid tokens, sorted by length, float32; medians of "
        "turns. The gate leaves a layer exact if Eq. 3 with a profile of this machine says that a lookup does not "
        f"pay. Paper: 512 tokens, eager. {where(found)}; load {min(loads):g} to {max(loads):g} before a cell."
    )


def rows(found: Found) -> str:
    lines: list[tuple[object, ...]] = [
        (
            row["model"], row["batch"], *(f"{row['ms'][way]:.2f}" for way in WAYS), percent(_reduction(row), 1),
            *(percent(row["rates"][way], 1) for way in WAYS[1:]),
        )
        for row in found["rows"]
    ]  # fmt: skip
    for name, cells in PAPER_ROWS.items():
        lines += [
            (f"paper: {name}", batch, "", "", "", percent(saved, 1), "", f"{100 * change:+.1f} points")
            for batch, (saved, change) in zip((1, 32, 64), cells, strict=True)
        ]
    head = (
        "model",
        "batch",
        "exact, ms a text",
        "gate off",
        "gate on",
        "time saved by the gate",
        "rate, gate off",
        "gate on",
    )
    return table(head, lines)


def why(found: Found) -> str:
    off = [row["ms"]["gate off"] / row["ms"]["exact"] for row in found["rows"]]
    return (
        f"Without the gate the memoized model takes {min(off):.2f} to {max(off):.2f} times as long as the exact "
        "one: a lookup in every layer costs more than the few hits save, since fused attention over short texts is "
        "cheap. The gate finds this and leaves most layers exact. Its gain is larger than the paper's wherever "
        "memoization itself does not pay. Eq. 3 is used with a cost model that is quadratic in the length; the "
        "paper scales linearly."
    )


def draw(found: Found) -> Plot:
    figure, (axes,) = sheet(1, "Time saved by selective memoization, %", 7.0, 4.0)
    here = [f"{row['model'].split('-')[0]}\nbatch {row['batch']}" for row in found["rows"]]
    paper = [f"{name}\nbatch {batch}" for name in PAPER_ROWS for batch in (1, 32, 64)]
    saved = [100 * cell[0] for cells in PAPER_ROWS.values() for cell in cells]
    mine: list[float | None] = [100 * _reduction(row) for row in found["rows"]]
    series: dict[str, list[float | None]] = {
        "here": mine + [None] * len(paper), "paper": [None] * len(here) + [float(value) for value in saved],
    }  # fmt: skip
    bars(axes, here + paper, series)
    axes.tick_params(axis="x", labelsize=8)
    axes.set(ylabel="% of the time without the gate")
    axes.axhline(0, color=PAPER, linewidth=0.6)
    legend(axes)
    return figure


FIGURE = Figure(
    "table7", "AttMEMO Table 7: selective memoization", measure, claims, caption, rows, why, draw, quiet=True
)
