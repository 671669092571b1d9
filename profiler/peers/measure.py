"""Measure all cells of one model and one stream in one run."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from attmemo.errors import AttmemoError, UnsupportedModelError
from attmemo.profiler.models import greatest_length, load_model, own_pooling
from attmemo.profiler.peers.paths import CACHE, MIN_COSINE, PATHS, Order
from attmemo.profiler.peers.process import Processes
from attmemo.profiler.peers.stream import make_stream
from attmemo.profiler.peers.table import Table
from attmemo.profiler.turns import Progress, silent

FORMAT: Final = "attmemo.peers/1"


@dataclass(frozen=True, slots=True)
class CellOptions:
    """What is measured, and on how much."""

    batch: tuple[int, ...] = (1, 8, 32)  # texts that come at once; each gives a cell for every path
    lines: int = 2000  # that are read
    sample: int = 384  # texts that every path answers; they lie in windows spread over the stream
    paths: tuple[str, ...] | None = None  # names of `PATHS`; None: all. The original model is always one of them
    dtype: str = "float32"  # of the model
    max_length: int | None = None  # tokens of a text at most
    budget: float = 0.01  # share of the answers that rows may change
    database: Path | None = None  # of maps, trained and tuned; None: maps are left out
    calibration: int = 128  # texts of the first part that 8-bit forms see
    text_column: str | None = None


def measure(
    model: str, texts: Sequence[str], source: str, options: CellOptions | None = None, tell: Progress = silent
) -> dict[str, Any]:
    """Measure every path at every batch size, on texts in the order in which they came.

    Returns
    -------
    dict
        JSON-able: ``model``, ``stream`` (named `source`), ``conditions``, ``paths`` with their set-up or why they were
        left out, and ``cells``.

    Raises
    ------
    AttmemoError
        A path has no such name, or the original model fails.
    DataError, UnsupportedModelError
        There are too few texts; the model gives next tokens.
    """
    options = options or CellOptions()
    names, sizes = _known(options.paths), tuple(sorted(set(options.batch)))
    if options.database is not None and not options.database.is_dir():
        what = f"--database {options.database}: there is no such directory, expected a trained database of maps."
        raise AttmemoError(what, f"attmemo build-database --model {model} --data FILE --output DB")
    loaded = load_model(model, options.dtype)
    if loaded.kind == "language-model":
        raise UnsupportedModelError(f"{model} gives next tokens.", "give an encoder or a classifier")
    if loaded.kind == "encoder":
        loaded.pooling = own_pooling(model)
    modules = ("transformers", type(loaded.model).__module__)
    loaded.model = loaded.model.to("meta")
    length = greatest_length(loaded, options.max_length)
    stream = make_stream(loaded, texts, length, sizes[-1], options.sample)
    with tempfile.TemporaryDirectory() as folder:
        order = Order(
            model, options.dtype, loaded.pooling, torch.get_num_threads(), Path(folder),
            stream.first[: options.calibration], sizes, options.budget, options.database, modules,
            loaded.kind, length,
        )  # fmt: skip
        with Processes(order) as processes:
            found = Table(processes, loaded.kind, stream, names, tell).result()
    lengths = [len(text) for text in stream.texts]
    return {
        "format": FORMAT,
        "model": {"name": model, "kind": loaded.kind, "dtype": options.dtype, "pooling": loaded.pooling},
        "stream": {
            "name": source, "first": len(stream.first), "texts": len(stream.texts), "window": stream.window,
            "asked_of_all": stream.asked_of_all, "tokens_mean": sum(lengths) / len(lengths),
            "tokens_most": max(lengths), "max_length": length, "duplicates": stream.duplicates(),
        },
        "budget": options.budget, "min_cosine": MIN_COSINE, "batch": list(sizes), **found,
    }  # fmt: skip


def _known(names: Sequence[str] | None) -> tuple[str, ...]:
    known = (*PATHS, CACHE)
    for name in names or ():
        if name not in known:
            what = f"--paths: there is no path {name!r}, expected some of {','.join(known)}."
            raise AttmemoError(what, "leave --paths out to measure all of them")
    return tuple(names or known)
