"""`bench_layer` over all families, precisions, lengths and batches: where memoization pays at most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attmemo import models
from attmemo.errors import StorageFullError
from attmemo.profiler.bench.layer import bench_layer
from attmemo.profiler.bench.limits import MAX_BYTES
from attmemo.profiler.turns import Progress, silent

LENGTHS = (128, 512)
LONG_LENGTHS = (1024, 2048)  # of decoders too
BATCHES = (1, 8, 32)
DTYPES = ("float32", "bfloat16")
MOST_TOKENS = 32 * 512  # maps of a long batch are many bytes; a server with few cores prefills less at once


def bench_families(
    *, families: Sequence[str] | None = None, dtypes: Sequence[str] = DTYPES, lengths: Sequence[int] = LENGTHS,
    long_lengths: Sequence[int] = LONG_LENGTHS, batches: Sequence[int] = BATCHES, hidden: int = 768, heads: int = 12,
    layers: int = 2, repeats: int = 3, most_tokens: int = MOST_TOKENS, max_bytes: int = MAX_BYTES,
    progress: Progress = silent,
) -> dict[str, Any]:  # fmt: skip
    """One forward with every sequence served, against the exact one, for every family.

    `families` are all by default; `long_lengths` are measured of decoders besides `lengths`; batches of more than
    `most_tokens` are left out. The one lookup of a forward is divided among `layers`, so few layers make it look dear.
    The others are those of `bench_layer`.

    Returns
    -------
    dict
        ``rows``: ``family``, ``dtype``, ``length``, ``batch``; ``exact_ms``, ``served_ms`` and ``ceiling_ms`` of a
        forward; ``speedup`` and ``ceiling`` (exact over served, exact over ceiling); ``share_of_ceiling``;
        ``overhead`` (lookup and fetch, as a share of the exact attention's time). ``conditions``, ``notes``.
    """
    cases = [
        (adapter.family, dtype, length, batch)
        for adapter in models.ADAPTERS
        if families is None or adapter.family in families
        for dtype in dtypes
        for length in (*lengths, *(long_lengths if adapter.causal else ()))
        for batch in batches
        if batch * length <= most_tokens
    ]
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    where: dict[str, Any] = {}
    for done, (family, dtype, length, batch) in enumerate(cases):
        progress(f"{family}, {dtype}", done, len(cases))
        try:
            found = bench_layer(
                family=family, dtype=dtype, length=length, batch=batch, hidden=hidden, heads=heads, layers=layers,
                repeats=repeats, lookups=("sequence",), max_bytes=max_bytes,
            )  # fmt: skip
        except StorageFullError as error:
            notes.append(f"{family}, {dtype}, {batch} x {length} is left out: {error.what}")
            continue
        rows.append(_row(found["rows"], family, dtype, length, batch))
        # Conditions of one case are in its row.
        of_all = {key: value for key, value in found["conditions"].items() if key not in _OF_A_CASE}
        where = of_all if not where else {key: value for key, value in where.items() if of_all.get(key) == value}
        known = {gist(note) for note in notes}
        notes += [note for note in found["notes"] if gist(note) not in known and "ceiling saves nothing" not in note]
    progress("families", len(cases), len(cases))
    return {"rows": rows, "conditions": where | {"layers": layers, "hidden": hidden, "heads": heads}, "notes": notes}


_OF_A_CASE = {"dtype", "storage_dtype", "batch_size", "max_length", "records", "attention", "page_bytes", "fetch"}


def gist(note: str) -> str:
    """A note without its numbers, so that one about a busy machine is given once."""
    return note.split(" (")[0]


def _row(variants: Sequence[Mapping[str, Any]], family: str, dtype: str, length: int, batch: int) -> dict[str, Any]:
    by_name = {str(row["variant"]): row for row in variants}
    exact, served, ceiling = (by_name[name] for name in ("exact", "memoized-sequence", "ceiling"))
    return {
        "family": family, "dtype": dtype, "length": length, "batch": batch,
        "exact_ms": exact["ms"], "served_ms": served["ms"], "ceiling_ms": ceiling["ms"],
        "speedup": exact["ms"] / served["ms"], "ceiling": exact["ms"] / ceiling["ms"],
        "share_of_ceiling": served["share_of_ceiling"], "overhead": served["overhead_of_attention"],
        "attention": exact["attention"],
    }  # fmt: skip
