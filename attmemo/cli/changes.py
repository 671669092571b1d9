"""`attmemo changes`: what is in a log of changed answers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from attmemo.cli.console import Output, output
from attmemo.cli.options import Json, Quiet
from attmemo.wording import counted


def changes(
    log: Annotated[Path, typer.Argument(
        metavar="FILE", show_default=False, help="What --log-changes of attmemo serve wrote."
    )],
    json: Json = None, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Show which verified answers had changed.

    How many, how many of them were given, and which slots of texts and which records were named most often: hashes.
    """
    with output(json, quiet) as out:
        from attmemo.guard.change_log import summary

        found = summary(log)
        _show(out, found)
        out.result(found)


def _show(out: Output, found: dict[str, Any]) -> None:
    out.say(f"{found['path']}: {counted(found['changed'], 'verified answer')} had changed")
    if not found["changed"]:
        return
    epochs = counted(len(found["epochs"]), "epoch")
    out.say(f"  {_day(found['first'])} to {_day(found['last'])}, {epochs} of the guard")
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(found["verdicts"].items()))
    out.say(f"  {found['given']} of them were given before they were verified; by verdict: {kinds}")
    for what, named in (("blamed slots", found["blamed"]), ("records", found["records"])):
        out.say(f"  {what} named most often: " + ", ".join(f"{name} ({count})" for name, count in named))


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
