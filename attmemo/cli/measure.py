"""`attmemo tune` and `attmemo evaluate`: what a database is worth on texts that are not in it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from attmemo.cli import options
from attmemo.cli.console import Output, cell, output
from attmemo.cli.files import check_directory
from attmemo.cli.filling import check_prepared
from attmemo.errors import AttmemoError
from attmemo.system.extras import check_installed
from attmemo.wording import counted


def tune(
    db: options.DatabasePath, data: options.Data, more: options.MoreData = None,
    budget: options.Budget = 0.01,
    confidence: Annotated[float, options.share("How sure of it you want to be.")] = 0.95,
    text_column: options.TextColumn = None, limit: options.Limit = None, batch_size: options.BatchSize = 32,
    lookup: Annotated[options.Lookup, typer.Option(
        help="One lookup per sequence, whose record is reused in all layers, or one in every layer."
    )] = "sequence",
    min_cosine: options.MinCosine = 0.98, pooling: options.Pooling = None, model: options.ModelPlace = None,
    allow_uncertified: Annotated[bool, typer.Option(
        "--allow-uncertified",
        help="With too few texts for the confidence asked for, choose by what was observed, and say so.",
    )] = False,
    seed: Annotated[int, options.count("Of the random split of the texts.", 0)] = 0,
    json: options.Json = None, quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Choose the threshold for a budget.

    Finds the one that reuses most while no more answers change than the budget allows. The texts should be
    like those that will be asked. A file that was added to the database after the training is judged in the order of
    time: each text with the records of the texts before it. Other texts that are in the database are left out. The
    choice is stored in the database: `attmemo evaluate` and attmemo.memoize(model, database=DB) use it as threshold
    auto.

    \b
    attmemo tune DB --data today.log --budget 0.01 --confidence 0.95
    """
    values = locals()
    with output(json, quiet, "interrupted; the database is as it was") as out:
        from attmemo.profiler import tune as tuner

        following = f"nothing: a guard collects evidence by itself; attmemo inspect {db} says how far"
        check_prepared(db, "tune is for maps", following)
        chosen = options.choose(tuner.TuneOptions, values)
        tuning = tuner.tune(db, [*data, *(more or ())], chosen, out.stages)
        show_tuning(out, tuning)
        if tuning["in_time"]:
            texts = counted(tuning["in_time"], "text is", "texts are")
            out.say(f"Note: {texts} in the database; each was judged with the records before")
        if tuning["in_database"]:
            out.say(f"Note: {counted(tuning['in_database'], 'more text')} in the database, left out")
        place = shlex.quote(str(db))
        if not tuning["certified"] and not allow_uncertified:
            out.say("Next: more texts, a larger --budget, or --allow-uncertified to go by what was observed")
        else:
            out.say(f"Next: attmemo evaluate {place} --data FILE --report DIR   (FILE: other texts than these)")
        out.result(tuning)


def show_tuning(out: Output, tuning: dict[str, Any]) -> None:
    """What was chosen, in the tuner's own sentence and by layer."""
    out.say(str(tuning["sentence"]))
    served = [f"{t:.3f}" if t < 1.0 else "exact" for t in map(float, tuning["thresholds"])]
    title = f"Thresholds by layer, lookup per {tuning['lookup']} (exact: the layer is never reused)"
    out.table(title, [str(layer) for layer in range(len(served))], [served])


def evaluate(
    db: options.DatabasePath, data: options.Data, more: options.MoreData = None,
    text_column: options.TextColumn = None,
    label_column: Annotated[str | None, typer.Option(
        metavar="NAME", help="Column that holds the true label: adds accuracy.  [default: none]"
    )] = None,
    threshold: Annotated[Any, typer.Option(
        metavar="T", parser=options.parse_threshold,
        help="Similarity that a record must have to be reused, 0 to 1; one for all layers, or one for each separated "
        "by commas. Rows: share of its tokens that a record must supply to a text. auto: what attmemo tune chose; "
        "0.5 for rows.",
    )] = "auto",
    lookup: Annotated[options.Lookup | None, typer.Option(
        help="Of maps: one lookup per sequence, or one in every layer.  [default: as tuned, else sequence]"
    )] = None,
    near: options.Near = None, most_moved: options.MostMoved = None,
    report: Annotated[Path | None, typer.Option(
        metavar="DIR", help="Write report.html and result.json here.  [default: no report]"
    )] = None,
    batch_size: options.BatchSize = 32, limit: options.Limit = None,
    sort: Annotated[bool, typer.Option(
        help="Make batches of texts of similar length, as a careful server does; else in the order of the data."
    )] = True,
    repeats: Annotated[int, options.count("Timed passes; the median counts.")] = 3,
    compile: Annotated[
        bool, typer.Option(help="Also time torch.compile, an exact method; takes minutes and a C++ compiler.")
    ] = False,
    controls: Annotated[bool, typer.Option(
        help="Also ask with means, zeros or a random record in place of the record found, and of a duplicate cache: "
        "what the lookup is worth."
    )] = True,
    sweep: Annotated[bool, typer.Option(help="Also measure speed and quality at other thresholds.")] = True,
    exhaustive: Annotated[
        int, options.count("Of maps: texts on which to find the best record there is; 0: none.", 0)
    ] = 200,
    budget: Annotated[float, options.share(
        "Of rows: share of answers that may change, for the guard that plays the texts live."
    )] = 0.01,
    confidence: Annotated[float, options.share("Of rows: how sure the guard keeps the budget.")] = 0.95,
    min_cosine: options.MinCosine = 0.98, pooling: options.Pooling = None,
    gate: Annotated[bool, typer.Option(help="Let the performance model leave alone what would not pay.")] = True,
    fetch: options.Fetch = "auto", residency: options.Residency = "page-cache", model: options.ModelPlace = None,
    json: options.Json = None, quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Measure hits, speed and quality.

    Asks texts that are not in the database, of the exact and of the memoized model. The two are timed in turn on the
    same batches; lookups, fetches and misses are included. A database of rows is compared with packed blocks too.

    \b
    attmemo evaluate DB --data tomorrow.log --report report
    attmemo evaluate DB --data test.csv --text-column body --label-column class --threshold 0.95
    """
    values = locals()
    with output(json, quiet, "interrupted; the database is as it was, no report was written") as out:
        from attmemo.db import read_manifest
        from attmemo.db.pools.filling import is_sealed
        from attmemo.profiler import evaluate as asking

        check_prepared(
            db, "evaluate is for prepared databases",
            f"attmemo inspect {db} says what its guard has verified; attmemo advise MODEL FILE, what to expect",
        )  # fmt: skip
        if report is not None:
            check_directory("--report", report)
            check_installed("report", "jinja2", "matplotlib")
        several = len(threshold) if isinstance(threshold, list) else 0
        if several and is_sealed(db):
            raise AttmemoError("--threshold gives several shares; rows have one.", "give one, or auto")
        if several and several != (layers := read_manifest(db).model.layers):
            wrong = f"--threshold gives {several} scores, the model has {layers} layers."
            raise AttmemoError(wrong, f"give one, or {layers}")
        chosen = options.choose(asking.EvaluateOptions, values)
        result = asking.evaluate(db, [*data, *(more or ())], chosen, out.stages)
        if report is not None:
            from attmemo.profiler.report import write_report

            write_report(result, report)
        show_result(out, result)
        if report is not None:
            out.say(f"Report: {report / 'report.html'}")
        out.result(result)


def show_result(out: Output, result: dict[str, Any]) -> None:
    """The report's tables, and last its verdict."""
    from attmemo.profiler.tables import make_tables

    for table in make_tables(result):
        out.table(table.title, table.columns, table.rows, table.note)
    out.notes(result.get("notes") or ())
    if result.get("verdict"):
        out.say(cell(result["verdict"]))
