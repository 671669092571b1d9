"""Where records lie: in a prepared database, and, where they come while a model serves, in memory or in a folder."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from attmemo.db import ModelInfo
from attmemo.db.aside import open_to_fill
from attmemo.db.encodings import row_types
from attmemo.db.files import DAMAGED
from attmemo.db.folder import NAMESPACES, SEGMENTS
from attmemo.db.pools.filling import Filling
from attmemo.db.pools.pool import Pool
from attmemo.db.pools.prepared import in_order
from attmemo.db.pools.shared_pool import SharedPool
from attmemo.errors import DatabaseError, DatabaseLockedError, StorageFullError
from attmemo.fingerprint import check_fields, tokenizer_digest
from attmemo.handle.description import describe
from attmemo.models import Adapter
from attmemo.packed.runner import Packed
from attmemo.rows.layout import RowLayout
from attmemo.rows.live_store import GrowingRows
from attmemo.system.memory import free_memory

_LOG = logging.getLogger("attmemo")


@dataclass(frozen=True, slots=True)
class Records:
    """Where records come from, and where new ones go."""

    prepared: SharedPool | None  # records that were built before; only read
    folder: Path | None  # of a database that fills itself; None: in memory
    fills: bool  # whether new records are kept
    max_bytes: int | None  # of new records, at most
    fields: Mapping[str, str]  # those of the model's fingerprint; needed with a folder

    @property
    def grow(self) -> bool:
        """Whether there may be more records than the prepared ones."""
        return self.fills or self.folder is not None


def growing_rows(
    encoder: nn.Module, adapter: Adapter, packed: Packed, records: Records, tokenizer: Any, undo: ExitStack, *,
    grows: bool,
) -> GrowingRows:  # fmt: skip
    """The store of records. `grows`: whether others may come than the prepared ones."""
    word = str(packed.dtype).removeprefix("torch.")
    prepared = [] if records.prepared is None else in_order(records.prepared)
    if records.prepared is not None:
        word = records.prepared.filling.storage
    blocks = packed.blocks

    def layout(word: str) -> RowLayout:
        return RowLayout(len(blocks.blocks), blocks.heads * blocks.width, blocks.heads, row_types(word))

    if not grows:
        return GrowingRows(None, layout(word), prepared)

    def describe() -> Filling:
        return Filling.of(model_info(encoder, adapter, records.fields, tokenizer), word)

    pool: Pool
    shared = None if records.folder is None else _shared_pool(records, records.folder, describe)
    if shared is None:
        most = bound_of(records.max_bytes)
        pool = Pool(most if records.folder is None else min(most, bound_of(None)))  # what was said is for a disk
    else:
        pool = shared
    undo.callback(pool.close)
    if shared is not None:
        check_fields(shared.filling.model.fields, records.fields, shared.path)
        if records.prepared is not None and word != shared.filling.storage:
            raise DatabaseError(
                f"{records.folder} keeps rows in {shared.filling.storage}, the prepared database in {word}.",
                "fill another folder",
            )
        word = shared.filling.storage
    return GrowingRows(pool, layout(word), prepared, fills=records.fills and (shared is None or shared.fills))


def _shared_pool(records: Records, folder: Path, describe: Callable[[], Filling]) -> SharedPool | None:
    """The pool of a folder. None: the disk takes nothing now, which is said; records are kept in memory then."""
    bound = bound_of(records.max_bytes, folder)
    if not records.fills:
        return SharedPool(folder, bound, fills=False)
    try:
        return open_to_fill(folder, bound, describe)
    except DatabaseError as error:
        read_only = _is_read_only(error)
        if not (read_only or isinstance(error, (StorageFullError, DatabaseLockedError, *DAMAGED))):
            raise
        found = _readable(folder, bound) if read_only else None
        where = "kept in memory only" if found is None else "not kept"
        _LOG.warning("attmemo: new records are %s: %s", where, error)
        return found


def _readable(folder: Path, bound: int) -> SharedPool | None:
    """The pool of a folder, only to be read; None: it cannot be."""
    with ExitStack() as undo, suppress(DatabaseError):
        pool = SharedPool(folder, bound, fills=False)
        undo.callback(pool.close)
        pool.look()
        undo.pop_all()
        return pool
    return None


def _is_read_only(error: BaseException) -> bool:
    """Whether the disk was mounted to be read only: the kernel does so after an error."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno == errno.EROFS


def bound_of(max_bytes: int | None, folder: Path | None = None) -> int:
    """Most bytes of new records.

    By default an eighth of the free memory, and if they lie in a folder also at most a tenth of the disk's free bytes;
    never less than the bytes that are in the folder already.
    """
    if max_bytes is None:
        free = free_memory() // 8
        while folder is not None and not folder.exists():
            folder = folder.parent
        if folder is None:
            return free
        own = 0
        for file in (*(folder / SEGMENTS).glob("*"), *folder.glob(f"{NAMESPACES}/*/{SEGMENTS}/*")):
            with suppress(FileNotFoundError):  # another process has dropped it
                own += file.stat().st_size
        return max(own, min(free, shutil.disk_usage(folder).free // 10))
    return max_bytes


def model_info(encoder: nn.Module, adapter: Adapter, fields: Mapping[str, str], tokenizer: Any = None) -> ModelInfo:
    """What a database that fills itself says about its model."""
    host = adapter.host(encoder)
    config: Any = host.config
    longest = getattr(config, "max_position_embeddings", None)
    longest = longest if isinstance(longest, int) and longest > 0 else 1 << 20
    words = None
    if tokenizer is not None:
        with suppress(Exception):  # a tokenizer of another make: it is not known then
            words = tokenizer_digest(tokenizer)
    return describe(encoder, adapter, adapter.sites(encoder), type(host).__name__, longest, words, fields)
