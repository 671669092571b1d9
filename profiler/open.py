"""Open what a command needs: the model a database was built for, and texts that are not in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from attmemo.adapters import adapter_for
from attmemo.db import Database, ModelInfo
from attmemo.errors import DataError, StaleDatabaseError
from attmemo.fingerprint import check_fields, model_fields, tokenizer_digest
from attmemo.profiler.data import Row, digest, read_texts
from attmemo.profiler.models import GIVES, Answer, LoadedModel, Tokens, load_model, tokenize
from attmemo.profiler.pooling import own_pooling
from attmemo.profiler.stored import stored_texts

_OTHER_DATA = "give data that is not in the database"


@dataclass
class Asked:
    """Texts to ask a model, tokenized; ``tokens[i].row == i``."""

    rows: list[Row]
    tokens: list[Tokens]
    in_database: int = 0  # texts that were left out, because the database holds them


def open_model(
    info: ModelInfo,
    name: str | None = None,
    pooling: str | None = None,
    answer: Answer | None = None,
    *,
    answers: bool = True,
) -> LoadedModel:
    """The model of a database, in the precision it was built in, checked against the fingerprint.

    It is loaded from `name`, by default from where it was at the build. For `pooling` and `answer` see `LoadedModel`;
    the pooling of an encoder is known afterwards, unless no `answers` will be asked for. Another model or tokenizer is
    a `StaleDatabaseError`; none there, or one whose configuration asks for a pooling that is not computed here, a
    `DataError`.
    """
    try:
        loaded = load_model(name or info.name, info.dtype, pooling=pooling, answer=answer)
    except DataError as error:
        raise DataError(error.what, "give its place with --model") from error
    adapter, _ = adapter_for(loaded.model)
    check_fields(info.fields, model_fields(adapter.host(loaded.model)), "the database")
    if info.tokenizer is not None and tokenizer_digest(loaded.tokenizer) != info.tokenizer:
        raise StaleDatabaseError(
            "the database was built for another tokenizer than the one beside this model.",
            "load the tokenizer of the build, or build a database: attmemo build-database --model … --data …",
        )
    if loaded.kind == "encoder" and answers:
        loaded.pooling = loaded.pooling or own_pooling(loaded.name)
    elif pooling is not None:
        raise DataError(f"the model gives {GIVES[loaded.kind]}, so there is nothing to pool.", "leave --pooling out")
    return loaded


def open_texts(
    loaded: LoadedModel,
    database: Database,
    files: Sequence[str | Path],
    text_column: str | None,
    label_column: str | None,
    limit: int | None,
) -> Asked:
    """Texts to ask, without those that the database holds: a record would find itself, and every number would flatter.

    Data that cannot be read, or that holds nothing new, is a `DataError`.
    """
    known = {source.digest for source in database.manifest.sources}
    for file in files:
        if Path(file).is_file() and digest(file) in known:
            raise DataError(f"{file} is what the database was built from; every text would find itself.", _OTHER_DATA)
    rows = list(read_texts(files, text_column=text_column, label_column=label_column, limit=limit))
    tokens = tokenize(loaded, [row.text for row in rows], database.manifest.model.max_length)
    inside = stored_texts(loaded, database, tokens)
    if inside and len(inside) == len(rows):
        raise DataError(f"all {len(rows):,} texts are in the database; each would find itself.", _OTHER_DATA)
    kept = [item for item in tokens if item.row not in inside]
    renumbered = [replace(item, row=place) for place, item in enumerate(kept)]
    return Asked([rows[item.row] for item in kept], renumbered, len(inside))
