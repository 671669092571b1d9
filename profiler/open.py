"""Open what a command needs: the model a database was built for, and texts that are not in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attmemo.adapters import adapter_for
from attmemo.db import Database, ModelInfo
from attmemo.errors import DataError, StaleDatabaseError
from attmemo.fingerprint import check_fields, model_fields, tokenizer_digest
from attmemo.profiler.data import Row, digest, read_texts
from attmemo.profiler.models import LoadedModel, Tokens, load_model, tokenize


@dataclass
class Asked:
    """Texts to ask a model, tokenized; ``tokens[i].row == i``."""

    rows: list[Row]
    tokens: list[Tokens]


def open_model(info: ModelInfo, name: str | None = None) -> LoadedModel:
    """The model of a database, in the precision it was built in, checked against the fingerprint.

    Raises
    ------
    DataError
        It is not where it was at the build.
    StaleDatabaseError
        It, or its tokenizer, is another one.
    """
    try:
        loaded = load_model(name or info.name, info.dtype)
    except DataError as error:
        raise DataError(error.what, "give its place with --model") from error
    adapter, _ = adapter_for(loaded.model)
    check_fields(info.fields, model_fields(adapter.host(loaded.model)), "the database")
    if info.tokenizer is not None and tokenizer_digest(loaded.tokenizer) != info.tokenizer:
        raise StaleDatabaseError(
            "the database was built for another tokenizer than the one beside this model.",
            "load the tokenizer of the build, or build a database: attmemo build-database --model … --data …",
        )
    return loaded


def open_texts(
    loaded: LoadedModel,
    database: Database,
    files: Sequence[str | Path],
    text_column: str | None,
    label_column: str | None,
    limit: int | None,
) -> Asked:
    """Texts to ask, refused if they are the very file that the database was built from.

    Raises
    ------
    DataError
        The data cannot be read, or was already stored: a record would find itself, and every number would flatter.
    """
    known = {source.digest: source.name for source in database.manifest.sources}
    for file in files:
        if Path(file).is_file() and digest(file) in known:
            raise DataError(
                f"{file} is what the database was built from; every text would find itself.",
                "give data that is not in the database",
            )
    rows = list(read_texts(files, text_column=text_column, label_column=label_column, limit=limit))
    return Asked(rows, tokenize(loaded, [row.text for row in rows], database.manifest.model.max_length))
