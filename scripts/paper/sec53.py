"""AttMEMO section 5.3: search in 100,000 vectors of 128 dimensions."""

from __future__ import annotations

from matplotlib.figure import Figure as Plot

from paper.frame import Claim, Figure, Found, Run, judge, percent, table, where
from paper.parts.search import bench_search
from paper.plots import PAPER, bars, legend, sheet

LIMIT_MS = 0.5


def measure(run: Run) -> Found:
    records = run.size(100_000, 200)

    def make(queries: int) -> Found:
        return bench_search(records=records, queries=queries, repeats=run.size(30, 2))

    parts = [run.part(f"search-{records}-{queries}", lambda n=queries: make(n)) for queries in (1, 64)]
    return {"records": records, "dimension": 128, "rows": [row for part in parts for row in part["rows"]]}


def claims(found: Found) -> list[Claim]:
    (one,) = (row for row in found["rows"] if row["backend"] == "faiss" and row["queries"] == 1)
    (many,) = (row for row in found["rows"] if row["backend"] == "faiss" and row["queries"] == 64)
    return [
        Claim(
            "a search in 100,000 vectors takes less than 0.5 ms", "less than 0.5 ms",
            f"{one['search_ms']:.2f} ms for one query, {many['us_per_query'] / 1e3:.2f} ms a query in batches of 64 "
            f"(recall {percent(many['recall_at_1'], 1)})",
            judge(one["search_ms"] < LIMIT_MS, many["us_per_query"] < 1e3 * LIMIT_MS),
        ),
    ]  # fmt: skip


def caption(found: Found) -> str:
    return (
        f"{found['records']:,} clustered random vectors of {found['dimension']} dimensions, nearest one; HNSW of "
        f"faiss and of hnswlib, and a linear scan; medians. Paper: faiss HNSW, 48 cores. {where(found)}."
    )


def rows(found: Found) -> str:
    lines = [
        (
            row["backend"], row["queries"], f"{row['search_ms']:.3f}", f"{row['us_per_query']:.0f}",
            percent(row["recall_at_1"], 1), f"{row['build_seconds']:.1f}",
        )
        for row in found["rows"]
    ]  # fmt: skip
    return table(("index", "queries at once", "ms", "µs a query", "recall of the nearest", "build, s"), lines)


def why(found: Found) -> str:
    return (
        "The claim is about one number, which today's machines keep easily. In the library, indexes are per "
        "length, so that a search sees fewer vectors than the database has records."
    )


def draw(found: Found) -> Plot:
    figure, (axes,) = sheet(1, f"Search in {found['records']:,} vectors of {found['dimension']} dimensions")
    names = list(dict.fromkeys(row["backend"] for row in found["rows"]))
    series = {
        f"{queries} at once": [row["us_per_query"] / 1e3 for row in found["rows"] if row["queries"] == queries]
        for queries in (1, 64)
    }
    bars(axes, names, series)
    axes.axhline(LIMIT_MS, color=PAPER, label="paper: less than 0.5 ms")
    axes.set(ylabel="ms a query", yscale="log")
    legend(axes)
    return figure


FIGURE = Figure(
    "sec53", "AttMEMO section 5.3: the cost of search", measure, claims, caption, rows, why, draw, quiet=True
)
