"""Time every family of attention, exact and served, and write docs/bench-families.{json,md,png}.

    python scripts/bench_families.py                      # everything: an hour on two cores
    python scripts/bench_families.py bert llama           # these anew; other rows of the record are kept
    python scripts/bench_families.py bert deberta-v2 --layers 12 --lengths 128 512 --long-lengths --batches 1 8 \
        --dtypes float32 --output docs/bench-twelve-layers

Family by family: stopped early, it keeps the families that are done.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from measured_at import write_record
from paper.parts.layer import bench_layer

from attmemo.errors import StorageFullError
from attmemo.models import ADAPTERS
from attmemo.profiler.plots import BLUE, INK, ORANGE, STYLE, png
from attmemo.wording import percent

LENGTHS = (128, 512)
LONG_LENGTHS = (1024, 2048)  # of decoders too
BATCHES = (1, 8, 32)
DTYPES = ("float32", "bfloat16")
MOST_TOKENS = 32 * 512  # maps of a long batch are many bytes; a server with few cores prefills less at once
OF_A_CASE = {"dtype", "storage_dtype", "batch_size", "max_length", "records", "attention", "page_bytes", "fetch"}

HEAD = """# Speed by family, {layers} layers

This page has one table of speeds and one table of costs, for one forward of a random model of base width (768, 12
heads, {layers} layers). Each speed is the exact time divided by the time with every sequence reused from a database,
with one lookup a forward.

* In brackets: the ceiling, the hit path on maps that are already in contiguous memory, without lookup and fetch.
  Reuse can be faster than that, because maps are stored in half precision, and those of decoders as lower
  triangles.
* The lookup is divided among the layers. With two layers it weighs six times as much as with twelve, above all at
  batch 1.
* Columns are tokens x batch; empty cells were not measured.
* The exact path is the family's best: fused attention (sdpa) where it exists.
* Below 1 (above all bfloat16 at one short sequence) reuse costs more than it saves. The gate leaves such calls
  alone; it is switched off in this measurement.

`scripts/bench_families.py` makes this page.

"""


def bench_families(
    *, families: Sequence[str] | None = None, dtypes: Sequence[str] = DTYPES, lengths: Sequence[int] = LENGTHS,
    long_lengths: Sequence[int] = LONG_LENGTHS, batches: Sequence[int] = BATCHES, hidden: int = 768, heads: int = 12,
    layers: int = 2, repeats: int = 3, most_tokens: int = MOST_TOKENS,
) -> dict[str, Any]:  # fmt: skip
    """One forward with every sequence served, against the exact one, for every family.

    `families` are all by default; `long_lengths` are measured of decoders besides `lengths`; batches of more than
    `most_tokens` are left out. The one lookup of a forward is divided among `layers`, so few layers make it look dear.
    The others are those of `bench_layer`. ``speedup`` and ``ceiling`` are exact over served, and over the ceiling;
    ``overhead`` is lookup and fetch, as a share of the exact attention's time.
    """
    cases = [
        (adapter.family, dtype, length, batch)
        for adapter in ADAPTERS
        if adapter.has_maps and (families is None or adapter.family in families)
        for dtype in dtypes
        for length in (*lengths, *(long_lengths if adapter.causal else ()))
        for batch in batches
        if batch * length <= most_tokens
    ]
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    where: dict[str, Any] = {}
    for family, dtype, length, batch in cases:
        try:
            found = bench_layer(
                family=family, dtype=dtype, length=length, batch=batch, hidden=hidden, heads=heads, layers=layers,
                repeats=repeats, lookups=("sequence",),
            )  # fmt: skip
        except StorageFullError as error:
            notes.append(f"{family}, {dtype}, {batch} x {length} is left out: {error.what}")
            continue
        rows.append(_row(found["rows"], family, dtype, length, batch))
        # Conditions of one case are in its row.
        of_all = {key: value for key, value in found["conditions"].items() if key not in OF_A_CASE}
        where = of_all if not where else {key: value for key, value in where.items() if of_all.get(key) == value}
        known = {gist(note) for note in notes}
        notes += [note for note in found["notes"] if gist(note) not in known and "ceiling saves nothing" not in note]
    return {"rows": rows, "conditions": where | {"layers": layers, "hidden": hidden, "heads": heads}, "notes": notes}


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


def speedups(row: Mapping[str, Any]) -> str:
    """Times as fast as exact and, in brackets, the ceiling."""
    return f"{row['speedup']:.2f} ({row['ceiling']:.2f})"


def overheads(row: Mapping[str, Any]) -> str:
    """Lookup and fetch as a share of exact attention's time and, in brackets, the share of the ceiling's saving."""
    share = row["share_of_ceiling"]  # None: it saves nothing
    return percent(row["overhead"], 1) + ("" if share is None else f" ({percent(share)})")


def as_markdown(found: Mapping[str, Any], cell: Callable[[Mapping[str, Any]], str] = speedups) -> str:
    """The rows as a table: a line for each family and precision, a column for each shape."""
    rows = found["rows"]
    shapes = sorted({(row["length"], row["batch"]) for row in rows})
    at = {(row["family"], row["dtype"], row["length"], row["batch"]): row for row in rows}
    lines = [
        "| family | type | exact attention | " + " | ".join(f"{length} x {batch}" for length, batch in shapes) + " |",
        "|---" * (3 + len(shapes)) + "|",
    ]
    for family, dtype in dict.fromkeys((row["family"], row["dtype"]) for row in rows):
        cells = []
        kind = ""
        for length, batch in shapes:
            row = at.get((family, dtype, length, batch))
            if row is None:
                cells.append("")
                continue
            kind = row["attention"]
            cells.append(cell(row))
        lines.append(f"| {family} | {dtype} | {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw_families(result: Mapping[str, Any]) -> bytes:
    """Draw how much faster a forward is with every sequence served, and at most could be, family by family.

    `result` is that of `bench_families`. Gives a PNG: a panel for each family; a pair of bars, served and ceiling, for
    each shape and precision.
    """
    rows, where = result["rows"], result["conditions"]
    families = list(dict.fromkeys(str(row["family"]) for row in rows))
    columns = max(2, min(4, len(families)))
    lines = max(1, -(-len(families) // columns))
    highest = max([1.0, *(row[key] for row in rows for key in ("speedup", "ceiling"))])
    with mpl.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
        figure = Figure(figsize=(3.9 * columns, 0.9 + 2.9 * lines), dpi=130, layout=layout)
        heading = (
            f"{where['layers']} layers of width {where['hidden']}, every sequence reused: speed over exact forwards\n"
            "filled: as measured; outlined: without lookup and fetch"
        )
        figure.suptitle(heading, fontsize=12, x=0.01, ha="left")
        for place, family in enumerate(families, start=1):
            axes = figure.add_subplot(lines, columns, place)
            own = [row for row in rows if row["family"] == family]
            shapes = sorted({(row["length"], row["batch"]) for row in own})
            for shift, (dtype, color) in enumerate((("float32", BLUE), ("bfloat16", ORANGE))):
                there = [row for row in own if row["dtype"] == dtype]
                xs = [shapes.index((row["length"], row["batch"])) + 0.4 * shift - 0.2 for row in there]
                for key, fill in (("ceiling", "none"), ("speedup", color)):
                    heights = [row[key] - 1.0 for row in there]
                    label = dtype if key == "speedup" and there else None
                    axes.bar(xs, heights, 0.36, 1.0, color=fill, edgecolor=color, linewidth=1.0, label=label)
            axes.axhline(1.0, color=INK, linewidth=0.9)
            axes.set_yscale("log", base=2)
            axes.set_ylim(0.75, 1.2 * highest)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.set_title(family, fontsize=10.5)
            axes.set_xticks(range(len(shapes)), [f"{n}\nx {batch}" for n, batch in shapes], fontsize=7.5)
            if place == 1:
                axes.legend(fontsize=8, loc="upper left", ncols=2)
        return png(figure)


def write(found: dict[str, Any], place: Path) -> None:
    """The record, its table and its picture."""
    order = [adapter.family for adapter in ADAPTERS]
    found["rows"].sort(key=lambda row: (order.index(row["family"]), row["dtype"] != "float32", row["length"]))
    write_record(place.with_suffix(".json"), found)
    facts = {name: value for name, value in found["conditions"].items() if name not in ("load", "repeats")}
    notes = "".join(f"* {note}\n" for note in found["notes"])
    text = HEAD.format(layers=facts["layers"]) + as_markdown(found) + f"\n![{place.stem}]({place.stem}.png)\n\n"
    text += "Cost of lookup and fetch, as a share of the exact attention's time. In brackets: the saving reached, as "
    text += "a share of the\nceiling's saving.\n\n" + as_markdown(found, overheads) + f"\n{notes}\n"
    text += "Conditions: " + ", ".join(f"{name} {value}" for name, value in facts.items()) + "; medians of turns.\n"
    place.with_suffix(".md").write_text(text)
    place.with_suffix(".png").write_bytes(draw_families(found))


def _case(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["family"], row["dtype"], row["length"], row["batch"]


def main() -> None:
    """Parse, measure family by family, and write after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=[], help="default: all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--long-lengths", type=int, nargs="*", default=LONG_LENGTHS, help="of decoders besides")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--dtypes", nargs="*", default=DTYPES)
    parser.add_argument("--most-tokens", type=int, default=MOST_TOKENS, help="leave larger batches out")
    parser.add_argument("--output", type=Path, default=Path("docs/bench-families"), help="without an ending")
    options = parser.parse_args()
    known = [adapter.family for adapter in ADAPTERS if adapter.has_maps]
    if unknown := set(options.families) - set(known):
        parser.error(f"no such family: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    record = options.output.with_suffix(".json")
    found = json.loads(record.read_text()) if record.exists() else {"rows": [], "conditions": {}, "notes": []}
    for family in options.families or known:
        fresh = bench_families(
            families=[family], repeats=options.repeats, most_tokens=options.most_tokens, layers=options.layers,
            lengths=options.lengths, long_lengths=options.long_lengths, batches=options.batches, dtypes=options.dtypes,
        )  # fmt: skip
        anew = {_case(row) for row in fresh["rows"]}
        found["rows"] = [row for row in found["rows"] if _case(row) not in anew] + fresh["rows"]
        known_conditions = {**fresh["conditions"], **found["conditions"]}
        for name, value in fresh["conditions"].items():
            if name not in ("load", "repeats", "kernel") and known_conditions[name] != value:
                parser.error(f"{record} was measured with {name} {known_conditions[name]}, this is {value}: --output")
        found["conditions"] = fresh["conditions"]
        known_notes = {gist(note) for note in found["notes"]}
        found["notes"] += [note for note in fresh["notes"] if gist(note) not in known_notes]
        write(found, options.output)
        print(as_markdown(fresh), flush=True)


if __name__ == "__main__":
    main()
