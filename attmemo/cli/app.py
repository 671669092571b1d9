"""The command `attmemo`: its subcommands and what they have in common.

Nothing here or in the modules imported here loads torch: commands import what they need when they run, so that
`attmemo --help` answers at once.
"""

from __future__ import annotations

import os
import signal
from typing import Annotated

import typer

from attmemo.cli import advise, bench, build, demo, doctor, families, filling, generate, look, measure
from attmemo.cli.serve import serve

HELP = """Serve a transformer from what it has computed before: attention maps, or rows of similar inputs.

\b
A database belongs to one model and is made from texts like those you serve:
  attmemo build-database --model MODEL --data yesterday.log --output DB
  attmemo train-embedder DB
  attmemo tune DB --data today.log --budget 0.01
  attmemo evaluate DB --data tomorrow.log --report report

\b
Rows of similar inputs need no training; only the tokens that changed are computed:
  attmemo build-database --reuse rows --model MODEL --data yesterday.log --output ROWS
  attmemo evaluate ROWS --data tomorrow.log --report report

In Python: attmemo.memoize(model, database="DB"). To see it all at work on a small model: attmemo demo.
"""
EPILOG = (
    "Exit codes: 0 done; 1 an error, or a check that found damage; 2 wrong usage; 130 interrupted. "
    "ATTMEMO_TRACEBACK=1 shows the traceback of an error. ATTMEMO_CACHE is where databases without a given place go."
)

app = typer.Typer(
    name="attmemo", help=HELP, epilog=EPILOG, no_args_is_help=True, add_completion=False, rich_markup_mode=None,
    pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)  # fmt: skip


def _show_version(wanted: bool) -> None:
    if wanted:
        from attmemo import __version__

        typer.echo(f"attmemo {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """What holds for every command; the text shown is `HELP`."""


app.command("build-database")(build.build_database)
app.command("train-embedder")(build.train_embedder)
app.command("tune")(measure.tune)
app.command("evaluate")(measure.evaluate)
app.command("families")(families.families)
app.command("inspect")(look.inspect)
app.command("check")(look.check)
app.command("forget")(filling.forget)
app.command("compact")(filling.compact)
app.command("merge")(filling.merge)
app.add_typer(bench.app, name="bench")
app.command("generate", context_settings=generate.CONTEXT)(generate.generate)
app.command("serve")(serve)
app.command("advise")(advise.advise)
app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)


def main() -> None:
    """Entry point of the console script."""
    # By default a waiting OpenMP thread spins for a millisecond. On cores that another program wants too, small
    # operations then took up to 40 times as long. After 30,000 rounds, some 100 microseconds, the thread sleeps: it
    # is awake between two operations of a forward, and asleep between two requests. Read when torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    try:
        app()
    except SystemExit as ended:
        if ended.code == 130:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second Ctrl-C would only spoil the farewell
        raise
