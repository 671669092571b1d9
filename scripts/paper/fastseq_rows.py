"""Rows of docs/fastseq-bench.json, which scripts/bench_fastseq.py measures, for several tables."""

from __future__ import annotations

from paper.frame import Found, document, table

NAMES = {
    "bart-large": "BART-large", "t5-base": "T5-base", "gpt2-medium": "GPT-2-medium", "marian-base": "Marian-base",
}  # fmt: skip
TYPES = {  # of scripts/bench_fastseq.py --types, and what they are called here
    "shared float32": "shared", "EL float32": "EL", "EL bfloat16": "EL, bfloat16", "float32": "packed layers",
    "bfloat16": "packed, bfloat16", "int8": "packed, int8", "bfloat16, int8": "packed, bfloat16 and int8",
}  # fmt: skip


def bench() -> Found:
    """The whole record."""
    return document("fastseq-bench")


def gpu() -> list[Found]:
    """Rows of docs/fastseq-gpu.json: an H100, float16, batches of 32 and 320."""
    rows: list[Found] = document("fastseq-gpu")["rows"]
    return rows


def speed(row: Found, rung: str) -> float | None:
    """Times as fast as the original generation."""
    seconds = row["seconds"]
    return None if rung not in seconds else float(seconds["stock"] / seconds[rung])


def setting(row: Found) -> str:
    return f"{row['length']} source, {row['new']} new, {row['beams']} beams, batch {row['batch']}"


def where(found: Found) -> str:
    """The conditions of that record, for a caption."""
    seen = found["conditions"]
    return (
        f"{seen['processor']}, {seen['threads']} threads, {seen['dtype']}, torch {seen['torch']}, transformers "
        f"{seen['transformers']}, random weights, n-gram 3, text in to text out (scripts/bench_fastseq.py, "
        "[fastseq in full](fastseq-bench.md))"
    )


def in_types(*shapes: str) -> list[Found]:
    """Beam search of docs/fastseq-types.json: times as fast as original float32, in processor time of one thread."""
    rows = []
    for row in document("fastseq-types")["rows"]:
        spent = row["cpu_seconds"]
        if row["shape"] in shapes and row["beams"] > 1 and "stock float32" in spent:
            speeds = {name: spent["stock float32"] / spent[name] for name in TYPES if name in spent}
            rows.append({"name": row["shape"], "setting": setting(row), "speeds": speeds})
    return rows


def table_of_types(rows: list[Found]) -> str:
    """Columns are the types that a row has."""
    shown = [name for name in TYPES if any(name in row["speeds"] for row in rows)]
    lines = [
        (NAMES[row["name"]], row["setting"], *(f"{row['speeds'][name]:.2f}x" if name in row["speeds"] else ""
                                               for name in shown))
        for row in rows
    ]  # fmt: skip
    head = (
        "In all types, times as fast as original float32, processor time of one thread "
        "([conditions](fastseq-types.md), random weights):"
    )
    return f"{head}\n\n" + table(("model", "setting", *(TYPES[name] for name in shown)), lines)
