"""The time of blocking repeated n-grams in one generated batch: FastSeq's Table 3, against today's original.

    python scripts/bench_ngram.py --output docs/ngram

FastSeq (arXiv 2106.04718, Table 3) compares with the Python loops that transformers had until 5.14. Those are gone:
5.15 and later make a mask with torch. The loop is timed here only to show the paper's comparison; the ratio to the
original of today counts. For n-grams of the source it still loops.

A row is the sum over all steps of one batch. All ways do each step in turn, on the same scores, so that changes of the
machine's speed hit all. The batch is repeated, and the median of its sums is taken. Writes OUTPUT.json and .png;
`scripts/result_pages.py` makes the tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import matplotlib as mpl
import torch
import transformers
from matplotlib.figure import Figure
from measured_at import write_record
from torch import Tensor
from transformers.generation import logits_process as stock

from attmemo.fastseq.generate.ngram import EncoderNoRepeatNGram, NoRepeatNGram
from attmemo.profiler.plots import GREEN, GREY, ORANGE, PURPLE, STYLE, png
from attmemo.system.machine import conditions

Way = Callable[[Tensor, Tensor], Tensor]

LOOP, STOCK, COPY, KERNEL = "loop (≤ 5.14)", "stock", "kernel, new tensor", "kernel, in place"

# rows, vocabulary, n-gram, first and last length, distance of the lengths timed, n-grams of the source?
CASES: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "BART, batch 32, beam 4, 50 tokens": (128, 50264, 3, 1, 50, 1, False),
    "BART, batch 32, beam 4, 140 tokens": (128, 50264, 3, 1, 140, 1, False),
    "BART, batch 4, beam 4, 100 tokens": (16, 50264, 3, 1, 100, 1, False),
    "GPT-2, batch 8, beam 4, 1024 + 50 tokens": (32, 50257, 3, 1024, 1073, 1, False),
    "one step, 128 rows of 4096 tokens": (128, 50264, 3, 4096, 4096, 1, False),
    "source n-grams, batch 32, beam 4, N 1024, 50 tokens": (128, 50264, 3, 1, 50, 1, True),
}


def loop(size: int) -> Way:
    """The processor as it was until 5.14, of two helpers that the original still has."""

    def block(tokens: Tensor, scores: Tensor) -> Tensor:
        result = scores.clone()
        if tokens.shape[1] + 1 >= size:
            tables = stock._get_ngrams(size, tokens, tokens.shape[0])
            for row, table in enumerate(tables):
                result[row, stock._get_generated_ngrams(table, tokens[row], size, tokens.shape[1])] = -float("inf")
        return result

    return block


def ways(size: int, source: Tensor | None) -> dict[str, Way]:
    """What is compared."""
    if source is None:
        return {
            LOOP: loop(size),
            STOCK: stock.NoRepeatNGramLogitsProcessor(size),
            COPY: NoRepeatNGram(size),
            KERNEL: NoRepeatNGram(size, in_place=True),
        }
    return {
        STOCK: stock.EncoderNoRepeatNGramLogitsProcessor(size, source),
        COPY: EncoderNoRepeatNGram(size, source),
        KERNEL: EncoderNoRepeatNGram(size, source, in_place=True),
    }


def history(rows: int, length: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Tokens with the frequencies of a text (Zipf), so that n-grams do repeat."""
    weights = 1 / torch.arange(10, vocabulary + 10, dtype=torch.float64)
    return torch.multinomial(weights, rows * length, replacement=True, generator=generator).view(rows, length)


def measure(name: str, repeats: int, device: str = "cpu") -> dict[str, Any]:
    """Milliseconds of each way in one batch: medians and extremes over the repeats."""
    rows, vocabulary, size, first, last, stride, encoder = CASES[name]
    generator = torch.Generator().manual_seed(0)
    tokens = history(rows, last, vocabulary, generator).to(device)
    source = history(rows // 4, 1024, vocabulary, generator).to(device) if encoder else None
    compared = ways(size, source)
    scores = torch.randn(rows, vocabulary, generator=generator).to(device)
    wait = torch.cuda.synchronize if scores.is_cuda else lambda: None  # a GPU answers before it is done
    for length in {first, last}:  # not one step is timed that was not shown to give the same
        given = {way: block(tokens[:, :length], scores.clone()) for way, block in compared.items()}
        assert all(torch.equal(result, given[STOCK]) for result in given.values()), name
    sums: dict[str, list[float]] = {way: [] for way in compared}
    for _ in range(repeats):
        totals = dict.fromkeys(compared, 0.0)
        for length in range(first, last + 1, stride):
            said = tokens[:, :length].contiguous()
            for way, block in compared.items():
                wait()
                begin = perf_counter()
                block(said, scores)
                wait()
                totals[way] += perf_counter() - begin
        for way, seconds in totals.items():
            sums[way].append(1e3 * seconds)
    return {
        "rows": rows, "vocabulary": vocabulary, "ngram": size, "lengths": [first, last],
        "source": 1024 if encoder else None,
        "milliseconds": {way: {"median": median(v), "least": min(v), "most": max(v)} for way, v in sums.items()},
        "ratio_to_stock": {way: median(sums[STOCK]) / median(v) for way, v in sums.items()},
    }  # fmt: skip


def _shown(way: str) -> str:
    return "original" if way == STOCK else way


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results in Markdown."""
    columns = [LOOP, STOCK, COPY, KERNEL]
    head = "| one batch, ms | " + " | ".join(map(_shown, columns)) + " | original / in place |"
    lines = [head, "|---" * (len(columns) + 2) + "|"]
    for name, result in results.items():
        cells = [
            f"{result['milliseconds'][way]['median']:,.2f}" if way in result["milliseconds"] else "–"
            for way in columns
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {result['ratio_to_stock'][KERNEL]:,.0f}x |")
    return "\n".join(lines) + "\n"


def draw(results: dict[str, dict[str, Any]], file: Path, device: str) -> None:
    """Bars by case, on a logarithmic scale: they are four orders of magnitude apart."""
    with mpl.rc_context(STYLE | {"text.parse_math": True}):  # powers of ten on the axis
        file.write_bytes(png(_drawn(results, device)))


def _drawn(results: dict[str, dict[str, Any]], device: str) -> Figure:
    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    axes = figure.subplots()
    colors = {LOOP: GREY, STOCK: ORANGE, COPY: PURPLE, KERNEL: GREEN}
    for number, way in enumerate(colors):
        places = [place + 0.2 * number for place, r in enumerate(results.values()) if way in r["milliseconds"]]
        values = [r["milliseconds"][way]["median"] for r in results.values() if way in r["milliseconds"]]
        axes.barh(places, values, 0.2, color=colors[way], label=_shown(way))
    axes.set_yticks([place + 0.3 for place in range(len(results))], list(results))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("ms in one generated batch (median), logarithmic")
    axes.set_title(f"Blocking repeated n-grams, transformers {transformers.__version__}, {device}")
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/ngram"), help="where to write, without suffix")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="cuda: with another --output")
    arguments = parser.parse_args()
    results = {name: measure(name, arguments.repeats, arguments.device) for name in CASES}
    made_on = {name: value for name, value in conditions().items() if name != "kernel"}
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    made_on["device"] = device
    found = {"conditions": {**made_on, "repeats": arguments.repeats}, "cases": results}
    write_record(arguments.output.with_suffix(".json"), found)
    draw(results, arguments.output.with_suffix(".png"), device)
    print(table(results))


if __name__ == "__main__":
    main()
