"""Tables of text generation and of the attention operator."""

from __future__ import annotations

from typing import Any

import bench_attention_op
import bench_ngram
from marked import table

from results.files import NONE, measured, only

SHAPES = {"bart-large": "BART-large", "t5-base": "T5-base", "gpt2-medium": "GPT-2-medium"}
FORMS = ("bfloat16", "int8", "int8, groups of 8", "int4")


def setting(shape: str, length: int, new: int = 100, beams: int = 4, lines: int = 4) -> dict[str, Any]:
    """A row of fastseq-bench.json."""
    return only(
        measured("fastseq-bench.json")["rows"], shape=shape, length=length, new=new, beams=beams, lines=lines
    )  # fmt: skip


def times(ratio: float | None) -> str:
    """How many times as fast."""
    return NONE if ratio is None else f"{ratio:.2f}x"


def glance() -> list[str]:
    rows = []
    for shape, label in SHAPES.items():
        long, brief = (setting(shape, length)["ratio"] for length in (1024, 128))
        rows.append((label, times(long["+pipeline"]), times(long["ctranslate2"]), times(brief["+pipeline"])))
    return table("shape of | 1,024 source tokens | CTranslate2 in the same run | 128 source tokens", rows)


def settings() -> list[str]:
    rows = []
    for row in measured("fastseq-bench.json")["rows"]:
        if row["lines"] == 4:
            seconds, ratio = row["seconds"], row["ratio"]
            stock, own = (seconds[rung] + row["load_seconds"][rung] for rung in ("stock", "+pipeline"))
            rows.append((
                SHAPES[row["shape"]], f"{row['length']:,}", str(row["new"]), str(row["beams"]),
                f"{seconds['stock']:.1f}", times(ratio["+pipeline"]), times(stock / own), times(ratio["el"]),
                times(ratio.get("ctranslate2")),
            ))  # fmt: skip
    return table("shape | source | new | beams | original, s | fastseq | with loading | EL | CTranslate2", rows)


def steps() -> list[str]:
    ratio = setting("bart-large", 512, 50, lines=16)["ratio"]
    labels = {
        "shared": "shared states", "+ngram": "with the n-gram kernel (the original's own is vectorised)",
        "+pipeline": "in the pipeline (generation keeps both cores busy, so there is no idle time to hide in)",
        "+batch": "with the planner's batch instead of 4",
    }  # fmt: skip
    return table("step | speed", ((label, times(ratio[rung])) for rung, label in labels.items()))


def on_a_gpu() -> list[str]:
    rows = []
    for row in measured("fastseq-gpu.json")["rows"]:
        if "ratio" in row:
            ratios = (times(row["ratio"].get(rung)) for rung in ("shared", "+ngram", "+pipeline", "el"))
            seconds = f"{row['seconds']['stock']:.2f} s"
            rows.append((SHAPES[row["shape"]], f"{row['length']:,}", seconds, *ratios))
    return table("shape | source tokens | original | shared | with the n-gram kernel | pipeline | EL-attention", rows)


def ngrams(file: str) -> list[str]:
    return bench_ngram.table(measured(file)["cases"]).splitlines()


def operator(queries: str) -> list[str]:
    rows = [row for row in measured("attention-op.json")["rows"] if row["queries"] == queries]
    return bench_attention_op.table(rows).splitlines()


def operator_means() -> list[str]:
    means = bench_attention_op.mean_speedups(measured("attention-op.json")["rows"])
    return bench_attention_op.table_of_means(means).splitlines()


def operator_on_a_gpu() -> list[str]:
    ways, rows = ("padded SDPA", "one by one", "transformers"), []
    for row in measured("attention-op-gpu.json")["rows"]["bfloat16"]:
        ms = (f"{row['milliseconds'][way]:.3g}" if way in row["milliseconds"] else NONE for way in ways)
        cells = []
        for form in FORMS:
            over = row["speedup over"][form]
            beside = f" ({over['transformers']:.1f}x)" if "transformers" in over else ""
            cells.append(f"{over['padded SDPA']:.1f}x{beside}")
        rows.append((str(row["batch"]), row["lengths"], row["kind"], *ms, *cells))
    return table(f"batch | lengths | kind | {' | '.join(f'{way}, ms' for way in ways)} | {' | '.join(FORMS)}", rows)


def exactness() -> list[str]:
    rows = (
        (str(row["bits"]), str(row["group"]), f"{row['bytes of an element']:.4g}", f"{row['nmse']:.1e}")
        for row in measured("attention-op.json")["accuracy"]
    )
    return table("bits | group | bytes of an element, float16 scales | squared error", rows)
