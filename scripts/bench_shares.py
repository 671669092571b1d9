"""Time of guarded rows over the share of the rows that they compute: docs/row-shares.json and docs/row-shares.png.

    python scripts/bench_shares.py ../shared docs/row-shares.json now       # "now" is the name of the run
    python scripts/bench_shares.py ../shared docs/row-shares.json --draw    # only the plot, beside the JSON

A run measures the attmemo that Python imports: with PYTHONPATH another commit. Texts come in the order of time; behind
the first ones, whose answers prove the budget, batches of 32 are drawn from the next ones by the share that they need.
Each is asked once with reuse, and twice exactly, before and behind. Rows that verify answers count as computed. One
thread, its processor time; bfloat16.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
import torch
from loghub_windows import windows
from matplotlib.figure import Figure
from measured_at import measured_at, processor_of
from workloads import lines_of

from attmemo import memoize
from attmemo.profiler.plots import BLUE, GREY, ORANGE, STYLE, png
from attmemo.system.machine import conditions

BATCH, LEARNED, BUDGET = 32, 1056, 0.01
PLACES: Final = (0.0, 0.6, 0.2, 0.8, 0.4, 1.0)
"""Of a batch among the texts that are left, by the share that they need."""
CASES: Final = {"MiniLM, log lines": "minilm-sst2", "DeBERTa, windows of lines": "deberta-loghub"}
STREAMS: Final = ("OpenSSH", "BGL")
TEXTS: Final = 1664  # of each stream


def texts_of(shared: Path, model: str) -> dict[str, list[str]]:
    """Streams for a model by name."""
    if model != "deberta-loghub":
        return {name: lines_of(shared / "data", name)[:TEXTS] for name in STREAMS}
    found = [window["text"] for window in windows(shared / "data/loghub_2k", 0, 1)]
    return {"windows": random.Random(0).sample(found, TEXTS)}


def measure(folder: Path, texts: Sequence[str]) -> list[list[float]]:
    """Share of the rows and time over exact of each batch."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    exact, rows = (
        AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.bfloat16).eval() for _ in range(2)
    )
    memoize(exact, reuse="none", linear="exact")
    memoize(rows, reuse="rows", linear="exact", budget=BUDGET, tokenizer=tokenizer, gate=False)
    handle: Any = rows.attmemo

    def inputs(asked: Sequence[str]) -> dict[str, Any]:
        return dict(tokenizer(list(asked), return_tensors="pt", padding=True, truncation=True, max_length=128))

    def taken(call: Callable[..., object], given: dict[str, Any]) -> float:
        begin = time.thread_time()
        call(**given)
        return time.thread_time() - begin

    for at in range(0, LEARNED, BATCH):
        rows(**inputs(texts[at : at + BATCH]))
        handle.flush()
    left, points = list(texts[LEARNED:]), []
    for turn in range(len(left) // BATCH):
        ids = tokenizer(left, truncation=True, max_length=128)["input_ids"]
        needs = np.array(handle.rows_to_compute(ids)) / np.array([len(one) for one in ids])
        begin = round(PLACES[turn % len(PLACES)] * (len(left) - BATCH))
        chosen = np.argsort(needs, kind="stable")[begin : begin + BATCH].tolist()
        given = inputs([left[place] for place in sorted(chosen)])
        left = [text for place, text in enumerate(left) if place not in set(chosen)]
        exact(**given)  # other work has filled the caches
        times = [taken(exact, given)]
        with handle.observe() as seen:
            reused = taken(rows, given)
        times.append(taken(exact, given))
        handle.flush()
        points.append([(sum(seen.rows) + seen.extra) / sum(seen.tokens), reused / statistics.mean(times)])
    return points


def run(shared: Path) -> dict[str, Any]:
    """All cases, and what they were measured on."""
    torch.set_num_threads(1)
    seen = conditions()
    found: dict[str, Any] = measured_at() | {
        "processor": processor_of(seen["features"]), "conditions": seen, "points": {},
    }  # fmt: skip
    gc.disable()
    with torch.inference_mode():
        for title, model in CASES.items():
            streams = texts_of(shared, model)
            found["points"][title] = {
                name: [[round(part, 4) for part in point] for point in measure(shared / "models" / model, texts)]
                for name, texts in streams.items()
            }
            gc.collect()
            print(title, found["points"][title], flush=True)
    return found


def middles(points: Sequence[Sequence[float]]) -> list[list[float]]:
    """Medians of shares, and of times, of points in tenths of the share that have at least two."""
    tenths: dict[int, list[Sequence[float]]] = {}
    for point in points:
        tenths.setdefault(int(10 * point[0]), []).append(point)
    kept = [own for _, own in sorted(tenths.items()) if len(own) > 1]
    return [[statistics.median(point[part] for point in own) for own in kept] for part in (0, 1)]


def draw(runs: dict[str, Any]) -> bytes:
    """A panel for each case, a line for each run. A PNG."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.6, 4.0), dpi=130, layout="constrained")
        for axes, title in zip(figure.subplots(1, len(CASES), sharey=True), CASES, strict=True):
            axes.plot([0, 1.2], [0, 1.2], "--", color=GREY, label="time = share")
            for (name, found), color in zip(runs.items(), (ORANGE, BLUE), strict=False):
                points = [point for own in found["points"][title].values() for point in own]
                axes.plot(*zip(*points, strict=True), ".", color=color, alpha=0.25)
                axes.plot(*middles(points), "o-", color=color, label=f"{name} ({found['commit']})")
            axes.set_title(title)
            axes.set_xlabel("share of tokens recomputed")
            axes.set_xlim(0, 1.2)
            axes.set_ylim(0, 1.6)
        figure.axes[0].set_ylabel("time, exact blocks = 1; lower is better")
        figure.axes[0].legend()
        return png(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("name", nargs="?", help="of the run; a run of this name goes")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    options = parser.parse_args()
    runs = json.loads(options.output.read_text(encoding="utf-8"))["runs"] if options.output.exists() else {}
    if not options.draw:
        runs[options.name] = run(options.shared)
        options.output.write_text(json.dumps({"runs": runs}, indent=1) + "\n", encoding="utf-8")
    options.output.with_suffix(".png").write_bytes(draw(runs))


if __name__ == "__main__":
    main()
