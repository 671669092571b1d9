"""`attmemo bench`: the cost of reading maps, searching and serving a layer on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from attmemo.cli.console import Output, cell, output
from attmemo.cli.options import Fetch, Json, Quiet, Residency, parse_size
from attmemo.errors import AttmemoError

app = typer.Typer(
    help="Time the parts on this machine.\n\nWith made-up maps: no model and no data are needed.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Heads = Annotated[int, typer.Option(metavar="N", min=1, help="Attention heads.")]
Length = Annotated[int, typer.Option(metavar="N", min=1, help="Tokens in a sequence.")]
Batch = Annotated[int, typer.Option(metavar="N", min=1, help="Sequences in a batch.")]
Repeats = Annotated[int, typer.Option(metavar="N", min=1, help="Timed repeats; the median counts.")]
MaxBytes = Annotated[
    int, typer.Option(metavar="SIZE", parser=parse_size, help="Refuse to take more disk or memory than this.")
]
EIGHT_GIB: Any = "8GiB"  # a default is parsed, and shown, like a value that is given


@app.command()
def gather(
    heads: Heads = 12,
    length: Length = 512,
    batch: Batch = 32,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "uint8"], typer.Option(help="Storage of maps.")
    ] = "bfloat16",
    residency: Residency = "page-cache",
    width: Annotated[int, typer.Option(metavar="N", min=1, help="Width of a head.")] = 64,
    repeats: Repeats = 9,
    plot: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Also sweep batch sizes and lengths, and draw them in this PNG; minutes."),
    ] = None,
    max_bytes: MaxBytes = EIGHT_GIB,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Time the fetch of a batch of maps.

    Alone and with the product with V that follows, warm and cold: copied, remapped, as views, where they lie, and
    already there.
    """

    def run(**common: Any) -> dict[str, Any]:
        from attmemo.profiler.bench import bench_gather
        from attmemo.profiler.bench.sweep import sweep_gather

        _check_plot(plot)
        sizes: dict[str, Any] = {
            "heads": heads, "length": length, "batch": batch, "dtype": dtype, "residency": residency, "width": width,
        }  # fmt: skip
        found = bench_gather(**sizes, **common)
        if plot is not None:
            from attmemo.profiler.bench.plots import draw_gather

            found["sweep"], left_out = sweep_gather(**sizes, **common)
            found["notes"] += left_out
            found["plot"] = _write_plot(plot, draw_gather(found))
        return found

    _bench(run, repeats, max_bytes, json, quiet, {"map": "map + unmap"}, _ratios)


def _ratios(found: Mapping[str, Any]) -> str:
    """The table of `gather` in a sentence."""
    said = [
        f"{found['fetcher']!r}, the choice here, takes {found['chosen_over_contiguous']:.3g} times as long as A·V of "
        f"maps already there",
        f"a fresh copy {found['copy_over_map']:.3g} times as long as map + unmap",
    ]
    if found["map_matmul_over_contiguous"] is not None:
        said.insert(1, f"map + A·V + unmap {found['map_matmul_over_contiguous']:.3g} times")
    return f"{'; '.join(said)}."


def _check_plot(file: str | None) -> None:
    """Refuse a picture that cannot be written, before the work."""
    if file is None:
        return
    path = Path(file)
    if path.suffix.lower() != ".png":
        raise _no_plot(file, "it is drawn as PNG")
    if path.is_dir():
        raise _no_plot(file, "it is a directory")
    if not path.parent.is_dir():
        raise _no_plot(file, f"there is no directory {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise _no_plot(file, "permission denied")


def _write_plot(file: str, picture: bytes) -> str:
    from attmemo.db.files import write_durably

    try:
        write_durably(Path(file), picture)
    except OSError as error:
        raise _no_plot(file, error.strerror or str(error)) from error
    return file


def _no_plot(file: str, why: str) -> AttmemoError:
    return AttmemoError(
        f"--plot {file} cannot be written: {why}.", "name a .png file in a directory that can be written"
    )


@app.command()
def search(
    records: Annotated[int, typer.Option(metavar="N", min=1, help="Embeddings in the index.")] = 10000,
    dimension: Annotated[int, typer.Option(metavar="N", min=1, help="Numbers in an embedding.")] = 128,
    queries: Annotated[int, typer.Option(metavar="N", min=1, help="Embeddings searched at once.")] = 64,
    backend: Annotated[
        Literal["faiss", "hnswlib", "flat"] | None,
        typer.Option(help="The one index to time.  [default: all that are installed]"),
    ] = None,
    repeats: Repeats = 9,
    max_bytes: MaxBytes = EIGHT_GIB,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Time the search of an index.

    For the nearest embedding; and count how often the true nearest is found.
    """

    def run(**common: Any) -> dict[str, Any]:
        from attmemo.db import BACKENDS
        from attmemo.profiler.bench import bench_search

        backends = BACKENDS if backend is None else (backend,)
        return bench_search(records=records, dimension=dimension, queries=queries, backends=backends, **common)

    _bench(run, repeats, max_bytes, json, quiet)


@app.command()
def layer(
    family: Annotated[str, typer.Option(help="Model family, as attmemo families lists them.")] = "bert",
    hidden: Annotated[int, typer.Option(metavar="N", min=1, help="Width of the model.")] = 768,
    heads: Heads = 12,
    length: Length = 256,
    batch: Batch = 8,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="What the model computes in.")] = "float32",
    layers: Annotated[int, typer.Option(metavar="N", min=1, help="Layers of the model.")] = 2,
    repeats: Repeats = 5,
    compile: Annotated[bool, typer.Option(help="Also time torch.compile of the exact model; takes minutes.")] = False,
    storage: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="How maps are stored; auto is what build-database takes."),
    ] = "auto",
    fetch: Fetch = "auto",
    residency: Residency = "page-cache",
    all_families: Annotated[
        bool,
        typer.Option(
            "--all-families",
            help="Every family in both precisions, 128 and 512 tokens, batches of 1, 8 and 32; decoders up to 2048 "
            "tokens. Takes half an hour.",
        ),
    ] = False,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="With --all-families: also draw the result in this PNG.")
    ] = None,
    max_bytes: MaxBytes = EIGHT_GIB,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Time attention layers, exact and served.

    A random model of this shape, exact and with every sequence served from memory: the most that can be saved.
    """
    if all_families:
        _bench_families(hidden, heads, layers, repeats, plot, max_bytes, json, quiet)
        return

    def run(**common: Any) -> dict[str, Any]:
        from attmemo.profiler.bench import bench_layer

        return bench_layer(
            family=family, hidden=hidden, heads=heads, length=length, batch=batch, dtype=dtype, layers=layers,
            compile=compile, storage=storage, fetch=fetch, residency=residency, **common,
        )  # fmt: skip

    _bench(run, repeats, max_bytes, json, quiet)


def _bench_families(
    hidden: int, heads: int, layers: int, repeats: int, plot: str | None, max_bytes: int, json: str | None, quiet: bool
) -> None:
    """The table over all families: a line for each case, since there are too many for columns."""
    with output(json, quiet) as out:
        from attmemo.profiler.bench.families import bench_families

        _check_plot(plot)
        found = bench_families(
            hidden=hidden, heads=heads, layers=layers, repeats=repeats, max_bytes=max_bytes, progress=out.stages
        )
        names = [key for key in found["rows"][0] if key != "attention"] if found["rows"] else []
        lines = [[cell(row[name]) for name in names] for row in found["rows"]]
        out.table("Exact forward over the served one", [name.replace("_", " ") for name in names], lines)
        if plot is not None:
            from attmemo.profiler.bench.plots import draw_families

            found["plot"] = _write_plot(plot, draw_families(found))
        _end(out, found)


def _bench(
    run: Callable[..., dict[str, Any]],
    repeats: int,
    max_bytes: int,
    json: str | None,
    quiet: bool,
    titles: Mapping[str, str] | None = None,
    more: Callable[[Mapping[str, Any]], str] | None = None,
) -> None:
    """Run a benchmark and show its rows, notes and conditions; `titles` name rows in full, `more` says the rest."""
    with output(json, quiet) as out:
        try:
            found = run(repeats=repeats, max_bytes=max_bytes, progress=out.stages)
        except ValueError as error:
            raise AttmemoError(f"{error}.", "see --help for what the options take") from error
        # Many numbers of few variants: a column for each row of the result.
        rows: list[dict[str, Any]] = found["rows"]
        named, *keys = dict.fromkeys(key for row in rows for key in row if key not in found["conditions"])
        lines = [(key, *(cell(row.get(key)) for row in rows)) for key in keys]
        names = [cell(row[named]) for row in rows]
        out.table("", ("", *((titles or {}).get(name, name) for name in names)), lines)
        if more is not None:
            out.say(more(found))
        _end(out, found)


def _end(out: Output, found: dict[str, Any]) -> None:
    if "plot" in found:
        out.say(f"Plot: {found['plot']}")
    for note in found["notes"]:
        out.say(f"Note: {note}")
    out.table("Conditions", (), [(name, cell(value)) for name, value in found["conditions"].items()])
    out.result(found)
