"""`attmemo bench`: the cost of the parts on this machine, and of every way to the answers of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from attmemo.cli.console import Output, cell, output
from attmemo.cli.options import EIGHT_GIB, Json, Precision, Quiet, count, parse_size, precision
from attmemo.cli.peers import peers
from attmemo.errors import AttmemoError

app = typer.Typer(
    help="Time the parts on this machine.\n\nWith made-up records: no model and no data are needed, but for peers.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Hidden = Annotated[int, count("Width of the model.")]
Layers = Annotated[int, count("Layers of the model.")]
Computed = Annotated[Precision, precision("What the model computes in.")]
Heads = Annotated[int, count("Attention heads.")]
Length = Annotated[int, count("Tokens in a sequence.")]
Batch = Annotated[int, count("Sequences in a batch.")]
Repeats = Annotated[int, count("Timed repeats; the median counts.")]
MaxBytes = Annotated[
    int, typer.Option(metavar="SIZE", parser=parse_size, help="Refuse to take more disk or memory than this.")
]


@app.command()
def gather(
    heads: Heads = 12, length: Length = 512, batch: Batch = 32,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Storage of maps.")] = "bfloat16",
    width: Annotated[int, count("Width of a head.")] = 64,
    repeats: Repeats = 9, max_bytes: MaxBytes = EIGHT_GIB, json: Json = None, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Time the fetch of a batch of maps.

    Alone and with the product with V that follows: copied, remapped, where they lie, and already there.
    """
    _bench("gather", locals())


@app.command()
def search(
    records: Annotated[int, count("Embeddings in the index.")] = 10000,
    dimension: Annotated[int, count("Numbers in an embedding.")] = 128,
    queries: Annotated[int, count("Embeddings searched at once.")] = 64,
    backend: Annotated[
        Literal["faiss", "hnswlib", "flat"] | None,
        typer.Option(help="The one index to time.  [default: all]"),
    ] = None,
    repeats: Repeats = 9, max_bytes: MaxBytes = EIGHT_GIB, json: Json = None, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Time the search of an index.

    For the nearest embedding; and count how often the true nearest is found.
    """
    values = locals()
    if (chosen := values.pop("backend")) is not None:
        values["backends"] = (chosen,)
    _bench("search", values)


@app.command()
def layer(
    family: Annotated[str, typer.Option(help="Model family, as attmemo families lists them.")] = "bert",
    hidden: Hidden = 768,
    heads: Heads = 12, length: Length = 256, batch: Batch = 8,
    dtype: Computed = "float32",
    layers: Layers = 2,
    repeats: Repeats = 5, max_bytes: MaxBytes = EIGHT_GIB, json: Json = None, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Time attention layers, exact and served.

    A random model of this shape, exact and with every sequence served from memory: the most that can be saved.
    """
    _bench("layer", locals())


app.command("peers")(peers)


def _show_rows(out: Output, found: Mapping[str, Any]) -> None:
    """Many numbers of few variants: a column for each row of the result."""
    rows: list[dict[str, Any]] = found["rows"]
    named, *keys = dict.fromkeys(key for row in rows for key in row if key not in found["conditions"])
    lines = [(key, *(cell(row.get(key)) for row in rows)) for key in keys]
    names = [cell(row[named]) for row in rows]
    out.table("", ("", *("map + unmap" if name == "map" else name for name in names)), lines)


def _bench(name: str, values: dict[str, Any]) -> None:
    """Run a benchmark with the values of its command, and show its rows, notes and conditions."""
    with output(values.pop("json"), values.pop("quiet")) as out:
        from attmemo.profiler import bench

        try:
            found = getattr(bench, f"bench_{name}")(**values, progress=out.stages)
        except ValueError as error:
            raise AttmemoError(f"{error}.", "see --help for what the options take") from error
        _show_rows(out, found)
        out.notes(found["notes"])
        out.table("Conditions", (), [(name, cell(value)) for name, value in found["conditions"].items()])
