"""Layers of base size with random weights, exact and served: one measurement for Fig. 1, Fig. 10 and Table 4."""

from __future__ import annotations

from paper.frame import Found, Run
from paper.parts.layer import bench_layer

LAYERS = 2


def cell(run: Run, family: str, length: int, batch: int, *, served: bool = True) -> Found:
    """Rows of `bench_layer` by variant, float32: eager attention, today's best path, and all sequences served."""
    hidden, heads, length = run.size((768, 12, length), (32, 2, length // 16))
    batch = run.size(batch, min(batch, 3))

    def make() -> Found:
        result = bench_layer(
            family=family, hidden=hidden, heads=heads, length=length, batch=batch, layers=LAYERS,
            repeats=run.size(3 if batch < 16 else 2, 1), eager=True, lookups=("sequence", "layer") if served else (),
        )  # fmt: skip
        return {"rows": {row["variant"]: row for row in result["rows"]}, "notes": result["notes"]}

    return run.part(f"layers-{family}-{length}-{batch}{'' if served else '-exact'}", make)


def eager(cell: Found) -> Found:
    """The row of eager attention: of a family without a fused kernel it is the exact one."""
    rows = cell["rows"]
    found: Found = rows.get("exact-eager", rows["exact"])
    return found
