"""FastSeq Table 3: blocking repeated n-grams, from docs/ngram.json."""

from __future__ import annotations

from matplotlib.figure import Figure as Plot

from paper.frame import Claim, Figure, Found, Run, document, judge, table, where
from paper.plots import PAPER, bars, legend, sheet

PAPER_MS = {"baseline": 4477.1, "CPU kernel": 584.9, "GPU kernel": 7.8}
CASE = "BART, batch 32, beam 4, 140 tokens"


def measure(run: Run) -> Found:
    record = document("ngram")
    cases = {
        name: {way: times["median"] for way, times in case["milliseconds"].items()}
        for name, case in record["cases"].items()
    }
    gpu = {
        way: times["median"] for way, times in document("ngram-gpu")["cases"][CASE]["milliseconds"].items()
    }  # fmt: skip
    return {"conditions": record["conditions"], "cases": cases, "gpu": gpu}


def claims(found: Found) -> list[Claim]:
    ms, on_gpu = found["cases"][CASE], found["gpu"]
    loop, stock, kernel = ms["loop (≤ 5.14)"], ms["stock"], ms["kernel, in place"]
    return [
        Claim(
            "a kernel blocks n-grams 574 times as fast as the baseline", "4477.1 → 7.8 ms (GPU)",
            f"{loop:.0f} → {kernel:.1f} ms ({loop / kernel:.0f}x) against the loop of 2021, "
            f"{stock / kernel:.0f}x against the original today (CPU)", judge(loop / kernel >= 574, stock / kernel > 1),
        ),
        Claim(
            "the GPU kernel is 75 times as fast as the CPU kernel", "584.9 → 7.8 ms",
            f"{kernel:.1f} → {on_gpu['kernel, in place']:.1f} ms (H100; the original there: {on_gpu['stock']:.0f} ms)",
            judge(kernel / on_gpu["kernel, in place"] >= 75),
            f"the CPU kernel is {PAPER_MS['CPU kernel'] / kernel:.0f} times as fast as the paper's; a step on the GPU "
            f"takes {on_gpu['kernel, in place'] / 140:.2f} ms, a launch from Python",
        ),
    ]  # fmt: skip


def caption(found: Found) -> str:
    return (
        f"The sum over all steps of one generated batch, medians of {found['conditions']['repeats']}, vocabulary of "
        f"50,264; {where(found)} (scripts/bench_ngram.py). Paper: BART, batch 32, beam 4."
    )


def rows(found: Found) -> str:
    ways = list(dict.fromkeys(way for case in found["cases"].values() for way in case))
    lines: list[tuple[object, ...]] = [
        (name, *("" if way not in case else f"{case[way]:.1f}" for way in ways))
        for name, case in found["cases"].items()
    ]
    paper = ", ".join(f"{name} {ms:g}" for name, ms in PAPER_MS.items())
    lines.append((f"paper: {paper} ms", *("" for _ in ways)))
    return table(("case, ms", *(way.replace("stock", "original") for way in ways)), lines)


def why(found: Found) -> str:
    return (
        "The baseline of the paper moved tokens to the CPU one at a time. The loop that transformers had until "
        "5.14 is faster than that, and today's original is faster than the loop. The kernel here writes into the "
        "scores in place; most of the original's time is a new tensor of the size of all scores."
    )


def draw(found: Found) -> Plot:
    figure, (axes,) = sheet(1, "Blocking n-grams in one batch, ms", 6.4)
    ms = {f"here: {way}".replace("stock", "original"): value for way, value in found["cases"][CASE].items()}
    names = [*ms, *(f"paper: {name}" for name in PAPER_MS)]
    series: dict[str, list[float | None]] = {
        "here (CPU)": [*ms.values(), *[None] * 3], "paper (V100)": [*[None] * len(ms), *PAPER_MS.values()],
    }  # fmt: skip
    bars(axes, [name.split(": ")[1].replace(", ", ",\n") for name in names], series)
    axes.tick_params(axis="x", labelsize=7)
    axes.set(yscale="log", ylabel="ms")
    axes.axvline(len(ms) - 0.5, color=PAPER, linewidth=0.6)
    legend(axes)
    return figure


FIGURE = Figure("fastseq_table3", "FastSeq Table 3: n-gram blocking", measure, claims, caption, rows, why, draw)
