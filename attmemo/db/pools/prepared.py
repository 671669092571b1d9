"""Prepared databases of rows: pools that builds fill, and that processes which serve only read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from attmemo.db.files import DAMAGED, RESTORE, BuilderLock, storing
from attmemo.db.folder import make_folder
from attmemo.db.pools.filling import Filling, is_sealed
from attmemo.db.pools.maintenance import merge
from attmemo.db.pools.shared_pool import SharedPool
from attmemo.db.records import Kept
from attmemo.errors import DatabaseError, DatabaseNotFoundError


def open_prepared(path: Path) -> SharedPool:
    """Read a prepared database as it is now; what is added later does not come.

    Raises
    ------
    DatabaseNotFoundError
        There is none.
    DatabaseCorruptError, DatabaseTruncatedError
        It is damaged.
    """
    if not is_sealed(path):
        what = f"{path} is no prepared database of rows."
        raise DatabaseNotFoundError(what, "attmemo build-database --reuse rows --model … --data …")
    with _mended():
        pool = SharedPool(path, None, fills=False)
        try:
            pool.look()
        finally:
            pool.release()
    return pool


def open_to_build(path: Path, filling: Filling, expected: int) -> SharedPool:
    """Open a prepared database to add to it, or begin it; to be called under its `BuilderLock`.

    `filling` describes what will be added, `expected` is the most bytes that there will be.
    """
    with _mended():
        pool = SharedPool(path, None, filling)
        try:
            pool.look()
        except BaseException:
            pool.close()
            raise
    pool.expect(expected)
    return pool


@contextmanager
def building(path: Path, filling: Filling) -> Iterator[None]:
    """Hold the right of the one writer, where records that `filling` describes may be added.

    Raises
    ------
    DatabaseLockedError
        Another process writes.
    DatabaseError, StaleDatabaseError
        The folder holds something else; its records are another model's, or were made with other options.
    """
    if is_sealed(path):
        check_alike(path, Filling.read(path), filling)
    else:
        make_folder(path, filling)
    with storing(path):
        lock = BuilderLock(path)
    try:
        yield
    finally:
        lock.release()


def in_order(pool: SharedPool) -> list[Kept]:
    """List the records of a pool in the order in which they were stored."""
    return [pool.records[number] for number in sorted(pool.records)]


def check_alike(path: Path, mine: Filling, asked: Filling) -> None:
    """Check that records of `asked` fit to those in a folder. StaleDatabaseError, DatabaseError: they do not."""
    mine.model.check_same(path, asked.model)
    options = {
        "--dtype": (mine.storage, asked.storage), "--max-length": (mine.model.max_length, asked.model.max_length),
        "tokenizer": (mine.model.tokenizer, asked.model.tokenizer),
    }  # fmt: skip
    for name, (old, new) in options.items():
        if old != new:
            what = f"{path} was built with {name} {old}; asked: {new}."
            raise DatabaseError(what, "ask for the same, or choose another folder")


def merge_rows(into: Path, others: Sequence[Path]) -> tuple[int, int]:
    """Add the records of prepared databases to one, as `merge_prepared`; how many, and how many there are then."""
    with ExitStack() as open_now:
        pools = [open_prepared(path) for path in others]
        for pool in pools:
            open_now.callback(pool.close)
            with suppress(OSError):  # a read-only place has no builder
                open_now.callback(BuilderLock(pool.path).release)
            check_alike(pools[0].path, pools[0].filling, pool.filling)
        filling = Filling.of(pools[0].filling.model, pools[0].filling.storage, sealed=True)
        open_now.enter_context(building(into, filling))
        target = open_to_build(into, filling, sum(pool.nbytes for pool in pools))
        open_now.callback(target.close)
        return merge(target, pools), len(target)


@contextmanager
def _mended() -> Iterator[None]:
    """While inside, the next step of damage is that of a prepared database."""
    try:
        yield
    except DAMAGED as error:
        raise type(error)(error.what, RESTORE) from error
