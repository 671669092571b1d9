"""`attmemo build-database` and `attmemo train-embedder`: make a database."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from attmemo.cli import options
from attmemo.cli.console import Output, cell, output, size
from attmemo.cli.files import check_directory
from attmemo.cli.filling import check_prepared
from attmemo.wording import counted

ALL: Any = "1/1"  # a default is parsed, and shown, like a value that is given


def parse_shard(text: str) -> tuple[int, int]:
    """``2/8``: the second of eight parts."""
    words = text.split("/")
    if len(words) == 2 and all(word.isdecimal() for word in words) and 1 <= int(words[0]) <= int(words[1]):
        return int(words[0]), int(words[1])
    raise typer.BadParameter(f"{text!r} is no part of a whole; write 1/8 to 8/8.")


def build_database(
    model: Annotated[
        str, typer.Option(metavar="PATH_OR_NAME", help="A model directory, or a name on the hub.", show_default=False)
    ],
    data: options.Data, more: options.MoreData = None,
    reuse: Annotated[Literal["maps", "rows"], typer.Option(
        help="What a record keeps. maps: attention maps. rows: K and V of every layer and the last hidden states, so "
        "that only the tokens that changed are computed; attmemo families lists the models."
    )] = "maps",
    destination: Annotated[Path | None, typer.Option(
        "--output", metavar="DB",
        help="Database directory to write, or to go on with.  [default: one for this model in the user's cache, "
        "where attmemo.memoize(model, database='auto') finds it]",
    )] = None,
    text_column: options.TextColumn = None,
    max_length: Annotated[
        int | None, options.count("Cut texts to this many tokens.  [default: what the model can take]", 2)
    ] = None,
    limit: options.Limit = None,
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16", "uint8", "int8"], typer.Option(
        help="How records are stored. auto: maps as float16, of a bfloat16 model as bfloat16; rows as int8 with a "
        "scale for each token and head. uint8 is for maps, int8 for rows: half the space of float16."
    )] = "auto",
    inputs: Annotated[Literal["auto", "all", "first"], typer.Option(
        help="Of maps: layers whose hidden states are kept: a lookup in each layer needs all, one for the whole "
        "sequence the first. auto: the first with --dtype uint8, else all."
    )] = "auto",
    admit: Annotated[float | None, typer.Option(
        metavar="SCORE", min=0.0, max=1.0,
        help="Leave out texts that a stored record stands for. Maps: it has every layer's map, at least this similar; "
        "0.98 is a good start. Rows: it supplies at least this share of the tokens; the very same tokens are never "
        "stored twice.  [default: store all]",
    )] = None,
    model_dtype: Annotated[
        options.Precision, options.precision("What the model computes in; serve it in the same precision.")
    ] = "float32",
    max_bytes: Annotated[int, typer.Option(
        metavar="SIZE", parser=options.parse_size, help="Stop before the database is larger: 8GiB, 500MB, …"
    )] = options.EIGHT_GIB,
    batch_size: options.BatchSize = 16,
    held_out: Annotated[float, typer.Option(
        metavar="SHARE", min=0.0, max=0.5,
        help="Share of the texts that the embedder is judged by, not trained on. They are stored, too.",
    )] = 0.15,
    shard: Annotated[Any, typer.Option(
        metavar="I/N", parser=parse_shard,
        help="Only every N-th text, from the I-th on: N machines build a database each, and attmemo merge puts them "
        "together.",
    )] = ALL,
    json: options.Json = None, quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Store records of your texts.

    Runs the model over every text and stores what its layers computed: attention maps, or rows. The texts should be
    like those that will be asked. Stopping is safe at any time: the same command goes on where it ended, and data
    given later is added.

    \b
    attmemo build-database --model ./model --data monday.log tuesday.log --output DB
    attmemo build-database --model org/name --data tickets.csv --text-column body --max-bytes 20GiB
    attmemo build-database --reuse rows --model ./model --data monday.log --output ROWS
    attmemo build-database --reuse rows --model ./model --data year.log --shard 3/8 --output SHARD-3
    """
    values = locals() | {"storage": dtype}
    with output(json, quiet, "interrupted before anything was stored; the same command starts again") as out:
        from attmemo.profiler.build import BuildOptions, check_place
        from attmemo.profiler.build import build_database as build
        from attmemo.profiler.data import read_texts
        from attmemo.profiler.models import load_model

        files = [*data, *(more or ())]
        next(read_texts(files, text_column=text_column, limit=limit))  # refuses bad files before anything is made
        chosen = options.choose(BuildOptions, values)
        check_place(destination, max_bytes)  # a large model takes minutes to load
        if destination is not None:
            check_directory("--output", destination)
        out.say(f"Loading {model}")
        loaded = load_model(model, model_dtype)

        def tell(done: int, total: int) -> None:
            out.interrupted = "interrupted; what was captured is published, the same command resumes"
            out.stages("capturing", done, total)

        done = build(loaded, files, destination, chosen, tell)
        out.say(str(done.path))
        out.say(
            f"  {counted(done.records, 'record')} ({done.added:,} new, {done.skipped:,} there before), "
            f"{size(done.bytes)}, {done.seconds:.1f} s"
        )
        if done.alike:
            known = "has nearly the same maps" if reuse == "maps" else "has the same tokens, or supplies most of them"
            out.say(f"  {done.alike:,} were not stored: a record {known}.")
        if done.stopped:
            out.say(f"  Stopped before the end of the data: {done.stopped}. More: a larger --max-bytes.")
        place = shlex.quote(str(done.path))
        following = f"evaluate {place} --data FILE --report DIR"
        if reuse == "maps":
            from attmemo.db import read_manifest

            trained = read_manifest(done.path).embedder is not None
            following = f"tune {place} --data FILE --budget 0.01" if trained else f"train-embedder {place}"
            following += "   (FILE: what was added now)" if trained and done.added else ""
        out.say(f"Next: attmemo {following}")
        out.result(asdict(done))


def train_embedder(
    db: options.DatabasePath, model: options.ModelPlace = None,
    steps: Annotated[int, options.count("Gradient steps; 0: principal components only.", 0)] = 300,
    backend: Annotated[Literal["faiss", "hnswlib", "flat"], typer.Option(
        help="Index of lengths with 2,000 records or more: faiss or hnswlib (HNSW both), or flat. Fewer "
        "records are searched exactly, as flat does."
    )] = "faiss",
    profile: Annotated[bool, typer.Option(
        help="Measure on this machine what attention and lookups cost, so that the gate leaves alone what would "
        "not pay. Loads the model."
    )] = True,
    json: options.Json = None, quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Learn to find similar records.

    Trains the embedder, indexes the records, and measures what a lookup costs on this machine. Run it after the first
    build; `attmemo tune` indexes what later builds add. It replaces the embedder, the index and the profile; a
    threshold chosen by `attmemo tune` is dropped, because it belongs to the embedder.
    """
    stopped = "interrupted; the database is as it was, the same command starts the training again"
    with output(json, quiet, stopped) as out:
        from attmemo.embed.training import TrainOptions
        from attmemo.profiler.train import train_database

        check_prepared(db, "train-embedder is for maps", "nothing: rows are found by their tokens")
        chosen = TrainOptions(steps=steps, backend=backend)
        report = train_database(db, chosen, model=model, profile=profile, progress=out.stages)
        out.say(
            f"{counted(report['records'], 'record')} of {counted(report['lengths'], 'length')} indexed with "
            f"{report['backend']}, {report['seconds']:.1f} s"
        )
        show_layers(out, report["layers"])
        out.notes(report.get("notes", ()))
        out.say(f"Next: attmemo tune {shlex.quote(str(db))} --data FILE --budget 0.01")
        out.say("  FILE: texts that are not in the database")
        out.result(report)


def show_layers(out: Output, layers: dict[str, dict[str, Any]]) -> None:
    """The embedders' quality: how similar what they find is, on held-out texts."""
    rows = []
    for layer, report in sorted(layers.items(), key=lambda item: int(item[0])):
        kept = "trained" if report.get("trained_kept") else "principal"
        name = "per sequence" if layer == "-1" else layer
        mean, texts = report.get(f"held_out_similarity_{kept}"), int(report.get("held_out", 0))
        rows.append((name, cell(mean), kept, cell(texts)))
    out.table("Similarity of the record found", ("layer", "mean", "embedder", "held-out texts"), rows)
