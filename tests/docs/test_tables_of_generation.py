"""Tables about attention, generation and scale have the numbers of the JSON files beside the pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from docs_tools import Row, check_table, measured, only, page, table_rows

SHAPES = {"BART-large": "bart-large", "T5-base": "t5-base", "GPT-2-medium": "gpt2-medium"}
FORMS = ("bfloat16", "int8", "int8, groups of 8", "int4")


def setting(record: str, shape: str, length: int, new: int = 100, beams: int = 4, lines: int = 4) -> dict[str, Any]:
    """A row of fastseq-bench.json or fastseq-gpu.json."""
    return only(measured(record)["rows"], shape=shape, length=length, new=new, beams=beams, lines=lines)


def count(cell: str) -> int:
    return int(cell.replace(",", ""))


def attention() -> Iterator[Row]:
    for row in measured("attention-op-gpu.json")["rows"]["bfloat16"]:
        ms, over = row["milliseconds"], row["speedup over"]
        values = [ms[way] for way in ("padded SDPA", "one by one", "transformers") if way in ms]
        values += [over[form][way] for form in FORMS for way in ("padded SDPA", "transformers") if way in over[form]]
        yield [str(row["batch"]), row["lengths"], row["kind"]], values


def exactness() -> Iterator[Row]:
    for row in measured("attention-op.json")["accuracy"]:
        digits, exponent = f"{row['nmse']:.1e}".split("e-")
        yield [str(row["bits"]), str(row["group"])], [row["bytes of an element"], float(digits), int(exponent)]


def glance() -> Iterator[Row]:
    for label, shape in SHAPES.items():
        long, short = (setting("fastseq-bench.json", shape, length)["ratio"] for length in (1024, 128))
        yield [label], [long["+pipeline"], long["ctranslate2"], short["+pipeline"]]


def settings() -> Iterator[Row]:
    for shape, length, new, beams, *_ in table_rows(page("fastseq-measured.md"), "## When it pays"):
        row = setting("fastseq-bench.json", shape, count(length), int(new), int(beams))
        seconds, ratio = row["seconds"], row["ratio"]
        stock, own = (seconds[way] + row["load_seconds"][way] for way in ("stock", "+pipeline"))
        values = [seconds["stock"], ratio["+pipeline"], stock / own, ratio["el"]]
        yield [shape, length, new, beams], values + [ratio[way] for way in ("ctranslate2",) if way in ratio]


def steps() -> Iterator[Row]:
    ratio = setting("fastseq-bench.json", "bart-large", 512, 50, lines=16)["ratio"]
    for rung in ("shared", "+ngram", "+pipeline", "+batch"):
        yield [""], [ratio[rung]]


def on_a_gpu() -> Iterator[Row]:
    for name, length, *_ in table_rows(page("fastseq-measured.md"), "**On a GPU**"):
        row = setting("fastseq-gpu.json", SHAPES[name], count(length), lines=32)
        rungs = [row["ratio"][rung] for rung in ("shared", "+ngram", "+pipeline", "el") if rung in row["ratio"]]
        yield [name, length], [row["seconds"]["stock"], *rungs]


def against_a_gpu() -> Iterator[Row]:
    speeds, other = measured("gpu-embed.json")["lines_per_second"], measured("rows.json")["another machine"]
    ms = {way: path["ms"] for way, path in other["lines-OpenSSH-bfloat16-bfloat16"]["paths"].items()}
    yield ["H100, from tokens"], [speeds[f"tokens to embeddings, {count} at once"] for count in (1, 32, 1024)]
    yield ["H100, from text"], [speeds["text to embeddings, 1024 at once"]]
    for label, way, digits in (("", "stock, sorted", -1), ("", "packed", -1), ("", "rows", -2)):
        yield [label], [round(1e3 / ms[way], digits)]


def cores() -> Iterator[Row]:
    paths = measured("rows.json")["lines-OpenSSH-bfloat16-bfloat16"]["paths"]
    share = paths["rows"]["stats"]["share_computed"]
    labels = {"stock": "original model", "packed": "packed blocks", "rows": f"rows, {100 * share:.0f} %"}
    for way, label in labels.items():
        ms = paths[way]["ms"]
        yield [label], [ms, 1e3 / ms / 2, 2e3 * ms / 3600]


TABLES: list[tuple[str, str, Iterator[Row]]] = [
    ("attention-op.md", "## On a GPU", attention()),
    ("attention-op.md", "## Exactness", exactness()),
    ("fastseq.md", "## At a glance", glance()),
    ("fastseq-measured.md", "## When it pays", settings()),
    ("fastseq-measured.md", "| step | speed |", steps()),
    ("fastseq-measured.md", "**On a GPU**", on_a_gpu()),
    ("scale-measured.md", "**Against a GPU.**", against_a_gpu()),
    ("scale-measured.md", "**Cores.**", cores()),
]


@pytest.mark.parametrize(("name", "head", "expected"), TABLES, ids=[f"{name}: {head}" for name, head, _ in TABLES])
def test_each_number_of_a_table_was_measured(name: str, head: str, expected: Iterator[Row]) -> None:
    check_table(name, head, expected)
