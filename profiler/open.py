"""Open what a command needs: the model a database was built for, and texts to ask it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attmemo.db import KIND_INPUT, Database, ModelInfo
from attmemo.db.pools.filling import is_sealed
from attmemo.db.pools.prepared import open_prepared
from attmemo.db.pools.shared_pool import SharedPool
from attmemo.embed.indexing import learned_below
from attmemo.embed.lookup import places_in_time
from attmemo.errors import DataError, StaleDatabaseError
from attmemo.fingerprint import check_fields, model_fields, tokenizer_digest
from attmemo.models import adapter_for
from attmemo.profiler.data import Row, digest, read_texts
from attmemo.profiler.models import GIVES, Answer, LoadedModel, Tokens, collate, load_model, own_pooling, tokenize
from attmemo.profiler.row_recorder import row_tokens

_OTHER_DATA = "give data that is not in the database"
_LAST: Final = 1 << 22  # behind every file that a database holds
_CHANNELS: Final = 8  # of every token, compared with all records; the few that agree are compared in full
_BATCH: Final = 64
Ints = npt.NDArray[np.int64]


def open_database(path: Path) -> Database | SharedPool:
    """A prepared database, of maps or of rows."""
    return open_prepared(path) if is_sealed(path) else Database(path)


def model_of(database: Database | SharedPool) -> ModelInfo:
    """The model of a database."""
    return database.filling.model if isinstance(database, SharedPool) else database.manifest.model


@dataclass
class Asked:
    """Texts to ask a model, tokenized; ``tokens[i].row == i``."""

    rows: list[Row]
    tokens: list[Tokens]
    in_database: int = 0  # texts that were left out, because the database holds them
    before: Ints = field(default_factory=lambda: np.empty(0, np.int64))  # [Q]: see `LookupInTime`
    in_time: int = 0  # texts that the database holds, and that are asked as if they came when they were stored


def open_model(
    info: ModelInfo, name: str | None = None, pooling: str | None = None, answer: Answer | None = None, *,
    answers: bool = True,
) -> LoadedModel:  # fmt: skip
    """The model of a database, in the precision it was built in, checked against the fingerprint.

    It is loaded from `name`, by default from where it was at the build. For `pooling` and `answer` see `LoadedModel`;
    the pooling of an encoder is known afterwards, unless no `answers` will be asked for. Another model or tokenizer is
    a `StaleDatabaseError`; none there, or one whose configuration asks for a pooling that is not computed here, a
    `DataError`.
    """
    try:
        tags = answers and pooling is None and answer is None
        loaded = load_model(name or info.name, info.dtype, pooling=pooling, answer=answer, tags=tags)
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
    loaded: LoadedModel, database: Database | SharedPool, files: Sequence[str | Path], text_column: str | None,
    label_column: str | None, limit: int | None,
) -> Asked:  # fmt: skip
    """Texts to ask, without those that the database holds: a record would find itself, and every number would flatter.

    Data that cannot be read, or that holds nothing new, is a `DataError`.
    """
    known = set() if isinstance(database, SharedPool) else {one.digest for one in database.manifest.sources}
    for file in files:
        if Path(file).is_file() and digest(file) in known:
            raise DataError(f"{file} is what the database was built from; every text would find itself.", _OTHER_DATA)
    return _asked(loaded, database, files, (text_column, label_column, limit), {})


def added(database: Database, files: Sequence[str | Path]) -> dict[str, int]:
    """Files that were added to the database after its training, and their numbers there.

    A file that the embedder has learned from is a `DataError`.
    """
    numbers = {source.digest: number for number, source in enumerate(database.manifest.sources)}
    learned = database.records.sources[: learned_below(database.embedder_ref())]
    found = {}
    for file in files:
        number = numbers.get(digest(file)) if Path(file).is_file() else None
        if number is None:
            continue
        if number in learned:
            what = f"{file} is what the embedder was trained on; every text would find itself."
            raise DataError(what, "give data that is not in the database, or that was added after the training")
        found[str(file)] = number
    return found


def open_in_time(
    loaded: LoadedModel, database: Database, files: Sequence[str | Path], text_column: str | None, limit: int | None
) -> Asked:
    """Texts to ask, each as if it came when the file was stored that it is from: `Asked.before` says when.

    Files that the database does not hold come last. Texts that are in a file that was stored before theirs are left
    out. Data that cannot be read, or that holds nothing new, or that the embedder has learned from, is a `DataError`.
    """
    return _asked(loaded, database, files, (text_column, None, limit), added(database, files))


def _asked(
    loaded: LoadedModel, database: Database | SharedPool, files: Sequence[str | Path],
    columns: tuple[str | None, str | None, int | None], stored: Mapping[str, int],
) -> Asked:  # fmt: skip
    """Texts of all files; `stored`: numbers of those that the database holds."""
    text_column, label_column, limit = columns
    rows = list(read_texts(files, text_column=text_column, label_column=label_column, limit=limit))
    tokens = tokenize(loaded, [row.text for row in rows], model_of(database).max_length)
    number_of = [stored.get(row.source, _LAST) for row in rows]
    inside = set[int]()
    for number in sorted(set(number_of)):
        inside |= stored_texts(loaded, database, [item for item in tokens if number_of[item.row] == number], number)
    if inside and len(inside) == len(rows):
        raise DataError(f"all {len(rows):,} texts are in the database; each would find itself.", _OTHER_DATA)
    kept = [item for item in tokens if item.row not in inside]
    renumbered = [replace(item, row=place) for place, item in enumerate(kept)]
    found = [rows[item.row] for item in kept]
    if isinstance(database, SharedPool):
        return Asked(found, renumbered, len(inside))
    before = places_in_time([number_of[item.row] for item in kept], [row.row for row in found])
    records = set(places_in_time(database.records.sources, database.records.rows).tolist())
    return Asked(found, renumbered, len(inside), before, sum(time in records for time in before.tolist()))


class _Entered(Exception):
    """The first layer was reached; the rest of the model need not run."""


def stored_texts(
    loaded: LoadedModel, database: Database | SharedPool, tokens: Sequence[Tokens], sources: int | None = None
) -> set[int]:
    """Rows of the texts that are in the database; `sources`: in the first so many files of it.

    Each would find itself, and every number would flatter. A database of rows keeps tokens. One of maps keeps no text,
    but the hidden states that entered the first layer: they tell texts apart as the model sees them, as tokens, cut to
    the greatest length. A digest of each text would be faster, but older databases have none.
    """
    if isinstance(database, SharedPool):
        known = {kept.tokens.tobytes() for kept in database.records.values()}
        return {item.row for item in tokens if row_tokens(loaded, item).tobytes() in known}
    among = database.records.sources < (len(database.manifest.sources) if sources is None else sources)
    found = set()
    for length, items in by_length(tokens).items():
        records = np.flatnonzero((database.records.lengths == length) & among)
        if not len(records):
            continue
        some = torch.stack([database.input(0, int(record))[:, :_CHANNELS] for record in records])  # [R, n, c]
        for item, hidden in zip(items, first_inputs(loaded, items), strict=True):
            alike = _near(database, some, hidden[:, :_CHANNELS]).flatten(1).all(1)
            if any(_near(database, database.input(0, int(r)), hidden).all() for r in records[alike.numpy()]):
                found.add(item.row)
    return found


def by_length(tokens: Iterable[Tokens]) -> dict[int, list[Tokens]]:
    """Texts by how many tokens they have."""
    found: dict[int, list[Tokens]] = defaultdict(list)
    for item in tokens:
        found[len(item)].append(item)
    return found


def first_inputs(loaded: LoadedModel, items: Sequence[Tokens]) -> Iterator[Tensor]:
    """Hidden states ``[n, H]`` that enter the first layer, of texts of one length."""
    adapter, sites = adapter_for(loaded.model)
    module = sites[0].module
    entered: list[Tensor] = []

    def keep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered.append(adapter.named(args, kwargs)["hidden_states"])
        raise _Entered

    hook = module.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        for start in range(0, len(items), _BATCH):
            with torch.inference_mode(), suppress(_Entered):
                adapter.host(loaded.model)(**collate(loaded, items[start : start + _BATCH]))
            yield from entered.pop().float()
    finally:
        hook.remove()


def _near(database: Database, stored: Tensor, hidden: Tensor) -> Tensor:
    """Which numbers are equal, but for the rounding of storage and of another batch."""
    kept = database.view(KIND_INPUT, 0, 0).dtype
    scale = float(hidden.abs().mean())
    return torch.isclose(stored, hidden, rtol=max(torch.finfo(kept).eps, 2.0**-9), atol=2.0**-7 * scale)
