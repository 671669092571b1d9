"""Options that several commands share, and how their values are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast, get_args

import typer

from attmemo.errors import ArgumentError
from attmemo.system import sizes

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Options = TypeVar("Options", bound=DataclassInstance)

Lookup = Literal["sequence", "layer"]
Precision = Literal["float32", "bfloat16"]
EIGHT_GIB: Any = "8GiB"  # a default is parsed, and shown, like a value that is given


def parse_size(text: str) -> int:
    """Bytes of a size; see `attmemo.system.sizes.parse_size`."""
    try:
        return sizes.parse_size(text)
    except ArgumentError as error:
        raise typer.BadParameter(f"{error.what.rstrip('.')}; {error.hint}.") from None


def parse_threshold(text: str) -> float | list[float] | Literal["auto"]:
    """``auto``, a similarity score, or one score per layer separated by commas."""
    if text == "auto":
        return "auto"
    try:
        scores = [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a threshold; write auto, a similarity from 0 to 1, or one per layer: 0.9,0.95,…"
        ) from None
    if not all(0.0 <= score <= 1.0 for score in scores):
        raise typer.BadParameter(f"{text!r}: a threshold is a similarity, from 0 to 1.")
    return scores[0] if len(scores) == 1 else scores


def parse_share(text: str) -> float:
    """A share strictly between 0 and 1."""
    if not 0.0 < (share := _number(text)) < 1.0:
        raise typer.BadParameter(f"{text!r} is not a share above 0 and below 1; 1 % is 0.01.")
    return share


def parse_cosine(text: str) -> float:
    """A cosine above -1 and at most 1."""
    if not -1.0 < (cosine := _number(text)) <= 1.0:
        raise typer.BadParameter(f"{text!r} is not a cosine above -1 and at most 1.")
    return cosine


def parse_precision(text: str) -> Precision:
    """What a model computes in; ``auto``: the type in which this processor is fastest."""
    if text == "auto":
        from attmemo.system.precision import best_dtype

        return cast(Precision, str(best_dtype()).removeprefix("torch."))
    if text in get_args(Precision):
        return cast(Precision, text)
    if text == "float16":
        raise typer.BadParameter("CPUs compute float16 slowly; write bfloat16, which takes as much memory.")
    raise typer.BadParameter(f"{text!r} is not one of {', '.join(get_args(Precision))}, auto.")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def count(text: str, least: int = 1) -> Any:
    """An option that takes a whole number."""
    return typer.Option(metavar="N", min=least, help=text)


def share(text: str) -> Any:
    """An option that takes a share."""
    return typer.Option(metavar="SHARE", parser=parse_share, help=text)


def precision(text: str, **more: Any) -> Any:
    """An option that takes what a model computes in, auto the fastest here; `more` is as for `typer.Option`."""
    text += " auto: the fastest here."
    return typer.Option(metavar="float32|bfloat16|auto", parser=parse_precision, help=text, **more)


def choose(options: type[Options], values: Mapping[str, Any]) -> Options:
    """A dataclass of options from the values of a command's parameters that have the names of its fields."""
    return options(**{field.name: values[field.name] for field in fields(options) if field.name in values})


def parse_database(text: str) -> Path:
    """A database directory; a file in its place is mostly data that were given before it."""
    if not text:
        raise typer.BadParameter("an empty text would be the working directory; name the database.")
    if Path(text).is_file():
        raise typer.BadParameter(f"{text} is a file, a database is a directory. DB comes before the data files.")
    return Path(text)


Model = Annotated[str, typer.Argument(metavar="MODEL", help="Model directory or hub name.", show_default=False)]
LoadedIn = Annotated[Precision, precision("What the model is loaded in.")]
Budget = Annotated[float, share("Share of answers that may change.")]
MaxLength = Annotated[int | None, count("Cut texts to this many tokens.  [default: the model's most]")]
Near = Annotated[int | None, count(
    "Of rows: neighbours that are recomputed beside a token that the record lacks.  [default: 1; for guarded classes "
    "0 where only numbers changed]", 0,
)]  # fmt: skip
MostMoved = Annotated[int | None, count(
    "Of rows: how far a token may have moved between a record and a text.  [default: any distance]", 0
)]  # fmt: skip
DatabasePath = Annotated[
    Path, typer.Argument(metavar="DB", parser=parse_database, help="The database directory.", show_default=False)
]
Data = Annotated[list[Path], typer.Option(
    "--data", metavar="FILE", show_default=False,
    help="Texts: .txt or .log (a line each), .csv, .tsv, .jsonl, .json (lines) or .parquet. "
    "Several files: --data a.log b.log, or --data a.log --data b.log.",
)]  # fmt: skip
MoreData = Annotated[
    list[Path] | None, typer.Argument(metavar="FILE", help="More data files, after --data.", show_default=False)
]
TextColumn = Annotated[str | None, typer.Option(
    metavar="NAME",
    help="Column that holds the text.  [default: the only column of text, or one called text, sentence, …]",
)]  # fmt: skip
Limit = Annotated[int | None, count("Read at most this many texts.  [default: all]")]
BatchSize = Annotated[int, count("Texts in a batch.")]
ModelPlace = Annotated[str | None, typer.Option(
    "--model", metavar="PATH_OR_NAME",
    help="Where the model is now.  [default: where it was when the database was built]",
)]  # fmt: skip
MinCosine = Annotated[float, typer.Option(
    metavar="C", parser=parse_cosine,
    help="For a model that gives embeddings: an answer counts as changed when its cosine to the exact one "
    "is below this. Unused for a classifier, where the predicted class decides.",
)]  # fmt: skip
Pooling = Annotated[Literal["mean", "cls"] | None, typer.Option(
    show_default=False,
    help="For a model that gives embeddings: how your application makes one of the hidden states.  "
    "[default: as the model's own configuration says, else the mean]",
)]  # fmt: skip
Fetch = Annotated[Literal["auto", "direct", "map", "view", "copy"], typer.Option(
    help="How maps are read; answers are the same but for the order of sums. auto: by the kernel that reads them "
    "where they lie; for a bfloat16 model the fastest for the page size."
)]  # fmt: skip
Residency = Annotated[
    Literal["page-cache", "hugepages"],
    typer.Option(help="Where maps are read from: files in the page cache, or huge pages they are loaded into."),
]
Json = Annotated[str | None, typer.Option(
    "--json", metavar="FILE",
    help="Write the result as JSON; '-' is standard output, and all other text then goes to standard error.",
)]  # fmt: skip
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors (and --json).")]
