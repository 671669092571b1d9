"""Columns of a batch: which texts are read from it, and how answers become columns beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from scipy.special import expit, softmax

from attmemo.errors import ArgumentError, DataError
from attmemo.serve.model import Answer, Task

Column = npt.NDArray[Any]
Batch = dict[str, Column]
Text = str | tuple[str, str]

COLUMNS: Final[dict[Task, tuple[str, ...]]] = {
    "embedding": ("embedding",), "classifier": ("class", "score"), "reranker": ("score",),
}  # fmt: skip
"""What a model gives by default; a column has the name of what it holds."""
COSTS: Final = ("tokens", "rows")
"""What every model gives too: tokens of a text, and rows computed for it."""


def choose(task: Task, outputs: Mapping[str, str] | None) -> dict[str, str]:
    """What is asked for, with the names of its columns; ArgumentError if the model does not give it."""
    if task not in COLUMNS:
        raise ArgumentError("the model tags tokens: it has no answer that fits a column.", "attmemo serve, /spans")
    if outputs is None:
        return {what: what for what in COLUMNS[task]}
    known = [*COLUMNS[task], *(["scores"] if task == "classifier" else []), *COSTS]
    for what in outputs:
        if what not in known:
            raise ArgumentError(f"outputs has {what!r}; this model gives {', '.join(known)}.", "ask for one of these")
    if len(set(outputs.values())) < len(outputs) or not outputs:
        raise ArgumentError(f"outputs is {dict(outputs)}; expected one name of a column for each.", "name each once")
    return dict(outputs)


def read_texts(batch: Batch, columns: Sequence[str]) -> list[Text | None]:
    """The texts of a batch, or pairs of texts; None where one is missing. DataError: no such column, or no text."""
    if not isinstance(batch, Mapping):
        raise DataError(
            f"a batch is a {type(batch).__name__}; expected columns as arrays of NumPy.",
            "map_batches(…, batch_format='numpy')",
        )
    found = []
    for name in columns:
        if name not in batch:
            seen = ", ".join(map(repr, batch)) or "none"
            raise DataError(f"the data has no column {name!r}; its columns: {seen}.", "Encoder(…, text=…)")
        found.append([_text(cell, name, row) for row, cell in enumerate(np.asarray(batch[name]).tolist())])
    if len(found) == 1:
        return list(found[0])
    pairs = zip(*found, strict=True)
    return [None if first is None or second is None else (first, second) for first, second in pairs]


def make_columns(
    answers: Sequence[Answer | None], outputs: Mapping[str, str], task: Task, width: int, labels: Sequence[str],
    *, normalize: bool,
) -> Batch:  # fmt: skip
    """Answers as columns; a text that is missing has NaN, the class None, and costs nothing.

    `width`: numbers of an embedding, or classes.
    """
    values = np.full((len(answers), width), np.nan, np.float32)
    for row, answer in enumerate(answers):
        if answer is not None:
            values[row] = answer.value
    made: Batch = {
        "tokens": np.array([0 if answer is None else answer.tokens for answer in answers], np.int32),
        "rows": np.array([0 if answer is None else answer.rows for answer in answers], np.int32),
    }
    if task == "embedding":
        norms = np.linalg.norm(values, axis=1, keepdims=True)
        made["embedding"] = values / np.maximum(norms, np.finfo(np.float32).tiny) if normalize else values
    elif task == "reranker":
        made["score"] = expit(values[:, 0])
    else:
        shares = softmax(values, axis=1) if len(values) else values
        best = np.zeros(len(values), np.intp) if not len(values) else shares.argmax(1)
        made["scores"], made["score"] = shares, shares[np.arange(len(values)), best]
        names = [None if answer is None else labels[place] for answer, place in zip(answers, best, strict=True)]
        made["class"] = np.array(names, object)
    return {name: made[what] for what, name in outputs.items()}


def _text(cell: object, column: str, row: int) -> str | None:
    if isinstance(cell, str):
        return cell
    if cell is None or cell != cell:  # NaN: so pandas writes a text that is missing
        return None
    raise DataError(
        f"column {column!r}, row {row} of a batch (from 0): holds {type(cell).__name__}, expected text.",
        "cast the column to text first, or name another one",
    )
