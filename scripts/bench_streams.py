"""Streams of log lines through all ways, in turns: docs/streams-measured.md.

    python scripts/bench_streams.py ../shared docs/streams.json                  # four logs, two to three minutes each
    python scripts/bench_streams.py ../shared docs/streams.json OpenSSH HDFS     # some of them; the others stay
    python scripts/bench_streams.py ../shared docs/streams.json --draw           # only the plot, beside the JSON
    python scripts/bench_streams.py ../shared streams.json --dtype float32       # the model's precision

The first lines of each log, in order of time, nothing stored at first, MiniLM: original, exact packed, rows
with the guard, a cache of exact duplicates, and OpenVINO and ONNX Runtime where they are installed. The ways take
turns on the same batches (`attmemo.profiler.race`), and every answer is compared with the exact one.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from measured_at import write_record
from results.files import standing
from torch import Tensor

from attmemo.memoization import memoize
from attmemo.profiler.answers import changed
from attmemo.profiler.demo import BUDGET, MODEL, in_batches, model_path, read_log
from attmemo.profiler.models import LoadedModel, Tokens, load_model, own_pooling, tokenize
from attmemo.profiler.peers.paths import MIN_COSINE, Ask, Cache, another, memoize_rows, timed, way_of
from attmemo.profiler.peers.table import measured_under
from attmemo.profiler.plots import GREY, STYLE, png
from attmemo.profiler.race import CACHE, ONNX, OPENVINO, PACKED, ROWS, STOCK, Race, other_runtimes
from attmemo.profiler.way_plots import color_of
from attmemo.system.machine import conditions

STREAMS = ("OpenSSH", "HDFS", "BGL", "Apache")
LINES = 1600
BATCH = 16  # lines at once
LONGEST = 256  # tokens
LATE = "last third"
BARS = (OPENVINO, ONNX, PACKED, CACHE, ROWS)


class Streams(Race):
    """The original model and its peers, packed blocks alone and behind a cache, and guarded rows of embeddings."""

    def __init__(self, loaded: LoadedModel, peers: Mapping[str, Ask]) -> None:
        packed, rows = another(loaded), another(loaded)
        memoize(packed.model, reuse="none")
        exact = timed(way_of(packed))
        self.cache = Cache(exact)
        handle = memoize_rows(rows, BUDGET)
        super().__init__(
            {STOCK: timed(way_of(loaded)), **peers, PACKED: exact, CACHE: self.cache, ROWS: timed(way_of(rows))},
            lambda exact, seen: int(changed(loaded.kind, exact, seen, MIN_COSINE).sum()),
            often=(PACKED, ROWS), handle=handle,
        )  # fmt: skip

    def answered(self, texts: Sequence[Tokens], given: Mapping[str, Tensor], whole: bool) -> None:
        """The cache knows what others computed."""
        if not whole:
            self.cache.learn(texts, given[PACKED])


def measure(shared: Path, name: str, dtype: str) -> dict[str, Any]:
    """One log."""
    loaded = load_model(model_path(), dtype)
    loaded.pooling = own_pooling(loaded.name)
    lines = itertools.islice(read_log(shared / "data" / "loghub_2k" / f"{name}_2k.log", LINES), LINES)
    batches = [tokenize(loaded, batch, LONGEST) for batch in in_batches(lines, BATCH)]
    with other_runtimes(loaded, batches[0]) as (peers, notes):
        race = Streams(loaded, peers)
        race.warm_up(batches[0])
        race.run_all(batches, seconds=1e9)
    found = race.result() | {"duplicates": race.cache.share, "min_cosine": MIN_COSINE}
    del found["laps"]
    tokens = sum(map(len, itertools.chain(*batches)))
    return found | {"notes": notes, "tokens": tokens, "dtype": dtype, "conditions": conditions()}


def draw(streams: dict[str, Any]) -> bytes:
    """Speed of the ways on each stream, all lines and the last third, and changed answers under the names. A PNG."""
    names = [name for name in STREAMS if name in streams]
    with mpl.rc_context(STYLE):
        figure = Figure((9.0, 3.9), dpi=130, layout="constrained")
        axes = figure.subplots()
        ways = [way for way in BARS if any(way in streams[name]["parts"]["all"]["speed"] for name in names)]
        bars = [(way, "all") for way in ways] + [(ROWS, LATE)]
        width = 0.84 / len(bars)
        for number, (way, part) in enumerate(bars):
            heights = [streams[name]["parts"][part]["speed"].get(way, np.nan) for name in names]
            places = np.arange(len(names)) + (number - (len(bars) - 1) / 2) * width
            late = part == LATE
            label = f"{way}, {LATE} of the lines" if late else f"{way}, all lines" if way == ROWS else way
            alpha = 1.0 if late or way != ROWS else 0.55
            axes.bar(places, heights, 0.92 * width, color=color_of(way), alpha=alpha,
                     label=label.replace("rows", "reuse"))  # fmt: skip
            for place, height in zip(places, heights, strict=True):
                if not np.isnan(height):
                    axes.text(place, height + 0.02, f"{height:.2f}", ha="center", fontsize=7.5)
        axes.axhline(1.0, color=GREY, linestyle="--", linewidth=1, label="original model")
        texts = []
        for name in names:
            found = streams[name]
            changed = 100 * found["parts"]["all"]["changed"][ROWS]
            state = standing(found["guard"]["state"])
            texts.append(f"{name}\nanswers changed: {changed:.2f} %\nguard: {state}")
        axes.set_xticks(range(len(names)), texts)
        axes.set_ylabel("speed, original model = 1")
        first = streams[names[0]]
        lines, threads = first["parts"]["all"]["texts"], first["conditions"]["threads"]
        axes.set_title(
            f"{MODEL}, {first['dtype']}, {threads} threads: the first {lines:,} lines of a log, nothing stored before"
        )
        figure.legend(loc="outside lower center", ncols=3)
        return png(figure)


def table(streams: dict[str, Any]) -> str:
    """The same numbers in Markdown."""
    lines = [
        f"| original = 1 | {OPENVINO} | {ONNX} | {PACKED} | {CACHE} | reuse, all lines | reuse, {LATE} | changed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in (name for name in STREAMS if name in streams):
        parts = streams[name]["parts"]
        speeds = [parts["all"]["speed"].get(way) for way in (OPENVINO, ONNX, PACKED, CACHE, ROWS)]
        cells = ["–" if speed is None else f"{speed:.2f}" for speed in (*speeds, parts[LATE]["speed"][ROWS])]
        lines.append(f"| {name} | {' | '.join(cells)} | {100 * parts['all']['changed'][ROWS]:.2f} % |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("stream", nargs="*", metavar="STREAM")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--draw", action="store_true")
    args = parser.parse_args()
    result = json.loads(args.output.read_text()) if args.output.exists() else {"streams": {}}
    for name in [] if args.draw else args.stream or STREAMS:
        result["streams"][name] = measure(args.shared, name, args.dtype)
        result |= {
            "model": MODEL, "lines": LINES, "batch": BATCH, "budget": BUDGET,
            "packages": measured_under()["packages"],
        }  # fmt: skip
        write_record(args.output, result)
        speeds = {part: result["streams"][name]["parts"][part]["speed"] for part in ("all", LATE)}
        print(name, json.dumps(speeds), result["streams"][name]["guard"]["says"], flush=True)
    args.output.with_suffix(".png").write_bytes(draw(result["streams"]))
    print(table(result["streams"]))


if __name__ == "__main__":
    main()
