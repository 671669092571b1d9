"""`attmemo advise`: what reuse would give on the user's own texts, and when to use something else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from attmemo.cli import options
from attmemo.cli.console import Output, output, size
from attmemo.wording import counted


def advise(
    model: options.Model,
    data: Annotated[list[Path], typer.Argument(
        metavar="FILE…", show_default=False,
        help="Texts in the order in which they came, 100 or more: .txt or .log, .csv, .tsv, .jsonl or .parquet.",
    )],
    limit: Annotated[int, options.count("Read at most this many texts.", 100)] = 4000,
    batch_size: Annotated[int, options.count("Texts that come at once.")] = 16,
    max_length: options.MaxLength = None,
    budget: options.Budget = 0.01,
    threshold: Annotated[float, options.share("Share of its tokens that a record must supply.")] = 0.5,
    near: options.Near = None, most_moved: options.MostMoved = None,
    dtype: options.LoadedIn = "float32",
    seconds: Annotated[float, typer.Option(metavar="S", min=0.0, help="How long the model is timed, about.")] = 12.0,
    text_column: options.TextColumn = None, json: options.Json = None, quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Say what reuse would give on your texts.

    Plays their tokens in order, with nothing stored at first, through the library's own lookup and guard, and times
    the model on this machine for some seconds. No database is made. Takes less than a minute.

    \b
    attmemo advise MODEL today.log
    """
    values = locals()
    with output(json, quiet) as out:
        from attmemo.profiler import advise as adviser

        found = adviser.advise(model, data, options.choose(adviser.AdviseOptions, values), out.stages)
        show(out, found)
        out.result(found)


def show(out: Output, found: dict[str, Any]) -> None:
    """The numbers in a table, and the recommendation."""
    mean, ms = found["tokens"] / found["texts"], found["ms"]
    texts = counted(found["texts"], "text")
    about = f"{texts}, {mean:.0f} tokens on average, {found['batch_size']} at once, {found['dtype']}"
    out.paragraph(f"{about}; {100 * found['duplicates']:.0f} % are exact duplicates of earlier ones.")
    both = [found["guarded"], found["unguarded"]]
    lines = [
        ("tokens recomputed, first half", *(f"{100 * kind['rows_first_half']:.0f} %" for kind in both)),
        ("tokens recomputed, second half", *(f"{100 * kind['rows_second_half']:.0f} %" for kind in both)),
        ("expected speed, exact = 1", *(f"{kind['over_packed']:.2f}" for kind in both)),
        ("expected speed, original model = 1", *(f"{kind['over_stock']:.2f}" for kind in both)),
        ("records", *(f"{kind['records']:,}" for kind in both)),
        ("bytes of the records", *(size(kind["bytes"]) for kind in both)),
    ]
    out.table("", ("", "guarded", "no guard"), lines)
    out.paragraph(
        f"A text takes {ms['stock']:.2f} ms with the original model, {ms['packed']:.2f} ms in exact mode, and "
        f"{ms['int8']:.2f} ms with 8-bit layers. "
        "Speeds are those of the second half: timed for so many tokens, lookups included, reading of records not. "
        f"guarded: if no answer changes, with a budget of {100 * found['budget']:g} %; where answers change, less is "
        "reused.",
    )
    out.say()
    for advice in found["advice"]:
        out.paragraph(advice)
