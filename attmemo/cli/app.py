"""The command `attmemo`: its subcommands and what they have in common.

Nothing here or in the modules imported here loads torch: commands import what they need when they run, so that
`attmemo --help` answers at once.
"""

from __future__ import annotations

import os
import signal
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from attmemo.cli import advise, build, changes, demo, doctor, drill, families, filling, generate, look, measure, peers
from attmemo.cli.serve import serve

HELP = """Faster transformer encoders on CPU servers: no padding, and what was computed before is not computed
again.

\b
  attmemo demo                      # see it at work on a small model
  attmemo doctor                    # what this machine has, what to change
  attmemo advise MODEL today.log    # what reuse would give on your texts
  attmemo serve MODEL               # a service behind HTTP

In Python: model = attmemo.memoize(model) is exact; budget=0.01 reuses too. A database is made while a model serves;
build-database makes one before, of rows or of attention maps. One of maps is then trained, tuned and evaluated.
"""
EPILOG = (
    "Exit codes: 0 done; 1 an error, or a check that found damage; 2 wrong usage; 130 interrupted. "
    "ATTMEMO_TRACEBACK=1 shows the traceback of an error. ATTMEMO_CACHE is where databases without a given place go."
)

OWN_THREADS: Final = ("serve", "doctor")
"""Commands that no number of threads is set for: the service splits its cores, the doctor shows what torch takes."""
START, SERVE, DATABASES, MAPS = "Start", "Serve", "Databases", "Databases of attention maps"
BENCHMARKS, GENERATION = "Benchmarks", "Text generation"


class Grouped(TyperGroup):
    """Commands under the names of their groups: typer alone groups them only where rich draws the help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group."""
        commands: list[Any] = [self.get_command(ctx, name) for name in self.list_commands(ctx)]
        width = max(len(command.name) for command in commands)
        for group in (START, SERVE, DATABASES, MAPS, BENCHMARKS, GENERATION):
            with formatter.section(group):
                # The whole first sentence: what is too long for a line goes on below.
                formatter.write_dl([
                    (command.name.ljust(width), command.get_short_help_str(limit=1000))
                    for command in commands
                    if command.rich_help_panel == group
                ])  # fmt: skip


app = typer.Typer(
    name="attmemo", cls=Grouped, help=HELP, epilog=EPILOG, no_args_is_help=True,
    rich_markup_mode=None, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)  # fmt: skip


def _show_version(wanted: bool) -> None:
    if wanted:
        from attmemo import __version__

        typer.echo(f"attmemo {__version__}")
        raise typer.Exit


@app.callback()
def common(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """What holds for every command; the text shown is `HELP`."""
    if context.invoked_subcommand not in OWN_THREADS:
        _bound_threads()


def _bound_threads() -> None:
    """Have what is loaded from now on start no more threads than a quota of the container has cores.

    torch, OpenMP and BLAS count the cores of the affinity and read this variable when they are loaded.
    """
    from attmemo.system.machine import cores

    if (count := cores()) < len(os.sched_getaffinity(0)):
        os.environ.setdefault("OMP_NUM_THREADS", str(count))


app.command("demo", rich_help_panel=START)(demo.demo)
app.command("doctor", rich_help_panel=START)(doctor.doctor)
app.command("advise", rich_help_panel=START)(advise.advise)
app.command("families", rich_help_panel=START)(families.families)
app.command("serve", rich_help_panel=SERVE)(serve)
app.command("drill", rich_help_panel=SERVE)(drill.drill)
app.command("changes", rich_help_panel=SERVE)(changes.changes)
app.command("inspect", rich_help_panel=DATABASES)(look.inspect)
app.command("check", rich_help_panel=DATABASES)(look.check)
app.command("forget", rich_help_panel=DATABASES)(filling.forget)
app.command("compact", rich_help_panel=DATABASES)(filling.compact)
app.command("merge", rich_help_panel=DATABASES)(filling.merge)
app.command("build-database", rich_help_panel=DATABASES)(build.build_database)
app.command("evaluate", rich_help_panel=DATABASES)(measure.evaluate)
app.command("train-embedder", rich_help_panel=MAPS)(build.train_embedder)
app.command("tune", rich_help_panel=MAPS)(measure.tune)
app.add_typer(peers.app, name="bench", rich_help_panel=BENCHMARKS)
app.command("generate", rich_help_panel=GENERATION, context_settings=generate.CONTEXT)(generate.generate)


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
