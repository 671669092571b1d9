"""Time every family of attention, exact and served, and write docs/bench-families.{json,md,png}.

    python scripts/bench_families.py                      # everything: an hour on two cores
    python scripts/bench_families.py bert llama           # these anew; other rows of the record are kept
    python scripts/bench_families.py bert deberta-v2 --layers 12 --lengths 128 512 --long-lengths --batches 1 8 \
        --dtypes float32 --output docs/bench-twelve-layers

The same as `attmemo bench layer --all-families`, family by family: stopped early, it keeps the families that are done.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attmemo.models import ADAPTERS
from attmemo.profiler.bench.families import BATCHES, DTYPES, LENGTHS, LONG_LENGTHS, MOST_TOKENS, bench_families, gist
from attmemo.profiler.bench.plots import draw_families

HEAD = """# Speed by family, {layers} layers

This page has one table of speeds and one table of costs, for one forward of a random model of base width (768, 12
heads, {layers} layers). Each speed is the exact time divided by the time with every sequence served from a database,
with one lookup a forward.

* In brackets: the ceiling, the hit path on maps that are already in contiguous memory, without lookup and fetch.
  Serving can be faster than that, because maps are stored in half precision, and those of decoders as lower
  triangles.
* The lookup is divided among the layers. With two layers it weighs six times as much as with twelve, above all at
  batch 1.
* Columns are tokens x batch; empty cells were not measured.
* The exact path is the family's best: fused attention (sdpa) where it exists.
* Below 1 (above all bfloat16 at one short sequence) serving costs more than it saves. The gate leaves such calls
  alone; it is switched off in this measurement.

`scripts/bench_families.py` makes this page; `attmemo bench layer --all-families` measures the same.

"""


def speedups(row: Mapping[str, Any]) -> str:
    """Times as fast as exact and, in brackets, the ceiling."""
    return f"{row['speedup']:.2f} ({row['ceiling']:.2f})"


def overheads(row: Mapping[str, Any]) -> str:
    """Lookup and fetch as a share of exact attention's time and, in brackets, the share of the ceiling's saving."""
    share = row["share_of_ceiling"]  # None: it saves nothing
    return f"{row['overhead']:.1%}" + ("" if share is None else f" ({share:.0%})")


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


def write(found: dict[str, Any], place: Path) -> None:
    """The record, its table and its picture."""
    order = [adapter.family for adapter in ADAPTERS]
    found["rows"].sort(key=lambda row: (order.index(row["family"]), row["dtype"] != "float32", row["length"]))
    place.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
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
    known = [adapter.family for adapter in ADAPTERS]
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
