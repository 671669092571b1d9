"""Rows of docs/fastseq-bench.json, which scripts/bench_fastseq.py measures, for several tables."""

from __future__ import annotations

from paper.frame import Found, document

NAMES = {"bart-large": "BART-large", "t5-base": "T5-base", "gpt2-medium": "GPT-2-medium"}


def bench() -> Found:
    """The whole record."""
    return document("fastseq-bench")


def gpu() -> list[Found]:
    """Rows of docs/fastseq-gpu.json: an H100, float16, batches of 32 and 320."""
    rows: list[Found] = document("fastseq-gpu")["rows"]
    return rows


def speed(row: Found, rung: str) -> float | None:
    """Times as fast as stock generation."""
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
        "[fastseq-bench.md](fastseq-bench.md))"
    )
