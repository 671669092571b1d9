"""`attmemo bench peers`: every method for the same answers, on the user's own model and texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from attmemo.cli import options
from attmemo.cli.console import Output, output
from attmemo.cli.files import check_apart, check_plot, write_whole
from attmemo.wording import counted

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def bench() -> None:
    """Time every method for the answers of a model."""


def parse_batch(text: str) -> tuple[int, ...]:
    """Batch sizes separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of batch sizes; write 1,8,32.")
    return tuple(map(int, parts))


def parse_names(text: str) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


_SIZES: Any = "1,8,32"  # a default is parsed, and shown, like a value that is given


@app.command()
def peers(
    model: options.Model,
    data: Annotated[list[Path], typer.Argument(
        metavar="FILE…", show_default=False,
        help="Texts in the order in which they came: .txt or .log, .csv, .tsv, .jsonl or .parquet.",
    )],
    batch: Annotated[Any, typer.Option(
        metavar="N,N,…", parser=parse_batch, help="Texts that come at once; a part of the table for each."
    )] = _SIZES,
    lines: Annotated[int, options.count("Read at most this many texts.", 10)] = 2000,
    sample: Annotated[int, options.count(
        "Texts that every method answers, in windows over the stream; attmemo reuse answers all texts."
    )] = 384,
    dtype: options.LoadedIn = "float32",
    budget: options.Budget = 0.01,
    max_length: options.MaxLength = None,
    paths: Annotated[Any, typer.Option(
        metavar="NAME,NAME,…", parser=parse_names, show_default=False,
        help="Only these: stock, compile, zentorch, openvino-f32, openvino-bf16, openvino-int8, onnx, onnx-int8, "
        "llama-f16, llama-q8, vllm, genai, fastembed, model2vec, none, maps, rows, none-int8, rows-int8, cache.  "
        "[default: all that are installed]",
    )] = None,
    database: Annotated[Path | None, typer.Option(
        metavar="DB", help="A trained and tuned database of maps of this model; without one, maps are left out."
    )] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw the table in this PNG.")] = None,
    text_column: options.TextColumn = None,
    json: Annotated[str | None, typer.Option(
        "--output", "--json", metavar="FILE",
        help="Write the result as JSON; '-' is standard output, and all other text then goes to standard error.",
    )] = None,
    quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Time every method for the same answers, on your model and texts.

    The original model, other runtimes where they are installed, attmemo, and a cache of exact duplicates:
    time, quality, memory and set-up in one run. Takes minutes. The first fifth of the texts prepares 8-bit forms; all
    others are asked.

    \b
    attmemo bench peers MODEL today.log
    """
    values = locals()
    with output(json, quiet) as out:
        _check_files(data, json, plot)
        from attmemo.loading import load_config
        from attmemo.profiler.data import read_texts
        from attmemo.profiler.peers import CellOptions, measure

        load_config(model)  # a model that is none is told before its texts are read
        texts = [row.text for row in read_texts(data, text_column=text_column, limit=lines)]
        source = ", ".join(file.name for file in data)
        found = measure(model, texts, source, options.choose(CellOptions, values), out.stages)
        if plot is not None:
            from attmemo.profiler.way_plots import draw_table

            write_whole("--plot", plot, draw_table(found))
        show(out, found)
        if plot is not None:
            out.say(f"Plot: {plot}")
        out.result(found)


def _check_files(data: list[Path], json: str | None, plot: Path | None) -> None:
    """Refuse files before the work."""
    written = {} if json is None or json == "-" else {"--output": Path(json)}
    if plot is not None:
        check_plot(plot)
        written["--plot"] = plot
    check_apart(written, {f"FILE {number}": file for number, file in enumerate(data, 1)})


def show(out: Output, found: Mapping[str, Any]) -> None:
    """Who wins, the table, what was left out, and the conditions; 80 columns."""
    from attmemo.profiler.peers import sentences

    for sentence in sentences(found):
        out.paragraph(sentence)
    encoder = found["model"]["kind"] == "encoder"
    for size in found["batch"]:
        columns = (f"batches of {size}", "ms", "speed", "changed", *(("cosine", "lowest") if encoder else ()), "MiB")
        cells = (cell for cell in found["cells"] if cell["batch"] == size and "speed" in cell)
        out.table("", columns, [_row(cell, encoder) for cell in cells])
    ready = (path for path in found["paths"].values() if "loading_s" in path)
    lines = [(path["title"], f"{path['converting_s']:.1f}", f"{path['loading_s']:.1f}") for path in ready]
    out.table("", ("set-up, seconds", "convert", "load"), lines)
    for text in (*_left_out(found), *_remarks(found)):
        out.paragraph(text)


def _row(cell: Mapping[str, Any], encoder: bool) -> tuple[str, ...]:
    from attmemo.profiler.peers import title_of

    quality = cell["quality"]
    near = [f"{quality[key]:.4f}" for key in ("cosine_mean", "cosine_p1")] if encoder else []
    return (
        title_of(cell), f"{cell['ms']:.2f}", f"{cell['speed']:.2f}", f"{100 * quality['changed']:.1f} %", *near,
        f"{cell['memory'] / (1 << 20):.0f}",
    )  # fmt: skip


def _left_out(found: Mapping[str, Any]) -> Iterator[str]:
    """Paths without a number, each with its reason."""
    from attmemo.profiler.peers import title_of

    for path in found["paths"].values():
        if "left_out" in path:
            yield f"Left out: {path['title']}: {path['left_out']}."
    for cell in found["cells"]:
        if "left_out" in cell and "left_out" not in found["paths"].get(cell["path"], {}):
            yield f"Left out: {title_of(cell)} at batch {cell['batch']}: {cell['left_out']}."


def _remarks(found: Mapping[str, Any]) -> Iterator[str]:
    stream, runs = found["stream"], found["conditions"]["runs"]
    threads = counted(found["conditions"]["threads"], "thread")
    yield (
        f"{found['model']['dtype']}, {threads}. {stream['texts']:,} texts of "
        f"{stream['name']} with {stream['tokens_mean']:.0f} tokens on average, {100 * stream['duplicates']:.0f} % "
        f"exact duplicates; every method answered {stream['asked_of_all']:,}, attmemo reuse answered all. Other work "
        f"took {100 * max(run['others'] for run in runs):.0f} % of the processors at most."
    )
    yield (
        "changed: answers unlike those of the original model in float32; a method that shows more than "
        f"{100 * found['budget']:g} % cannot win. sorted: a window of texts in the order of their lengths; only for "
        "work that can wait. MiB: the memory of the method with its model."
    )
    for cell in found["cells"]:
        guard = cell.get("counts", {}).get("guard")
        if guard and cell["batch"] == found["batch"][-1]:
            yield f"The guard of attmemo reuse at batch {cell['batch']}: {guard['says']}."
