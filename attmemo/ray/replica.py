"""Local replicas of prepared databases: copied once for each node, checked, and never changed."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import fsspec  # type: ignore[import-untyped,unused-ignore]
import xxhash
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped,unused-ignore]

from attmemo.db import Database, Manifest, cache_directory, storing
from attmemo.db.files import CATALOGUE, FILLING, FULL, MANIFEST, PREPARED, sync
from attmemo.db.folder import GUARDS, SEGMENTS
from attmemo.db.pools.filling import Filling
from attmemo.db.pools.maintenance import check
from attmemo.db.pools.prepared import open_prepared
from attmemo.errors import DatabaseCorruptError, DatabaseError, DatabaseNotFoundError, StorageFullError
from attmemo.system.locking import locked

REPLICAS: Final = "replicas"
PART: Final = ".part"
TRIES: Final = 3
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def is_uri(place: str | os.PathLike[str]) -> bool:
    """Whether a place has a scheme: ``s3://…``, ``file://…``."""
    return _SCHEME.match(str(place)) is not None


def ensure_local(place: str | os.PathLike[str], cache: str | os.PathLike[str] | None = None) -> Path:
    """The replica on this machine of the newest generation of a prepared database.

    The first process that asks copies the files, reads every one of them (as `attmemo check` does), and gives the
    replica its name; others wait meanwhile. A copy that was interrupted has another name, and is begun anew. A replica
    has the name of its database, its generation and its manifest, so one that is being read is never changed: a new
    generation has a new folder. Only what guards learn is added, in the folder ``guard``.

    Parameters
    ----------
    place : path-like
        Database directory, or a URI: ``file://…``, or another that fsspec reads, with what it needs for that.
    cache : path-like, optional
        Directory of replicas, on a disk of this machine. Default: ``replicas`` in attmemo's cache directory.

    Returns
    -------
    Path
        Give it to `memoize` as ``database``.

    Raises
    ------
    DatabaseNotFoundError, DatabaseError
        There is no prepared database there.
    DatabaseCorruptError
        The copy is not whole, or the database is not; no replica was made.
    StorageFullError
        The disk has no room for it.
    """
    source = _Source(place)
    folder = Path(cache) if cache is not None else cache_directory() / REPLICAS
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for _ in range(TRIES):
        raw = source.manifest()
        name = source.name(raw)
        found = folder / name
        if found.is_dir():
            return found
        with ExitStack() as held:
            with storing(folder):
                held.enter_context(locked(folder / f"{name}.lock"))
            if found.is_dir() or _copy(source, raw, found):
                return found
    raise DatabaseError(
        f"{source.place} was published {TRIES} times while it was copied.", "wait until it is built, and ask again"
    )


class _Source:
    """A database in a directory of this machine, or behind a URI, as fsspec reads it."""

    def __init__(self, place: str | os.PathLike[str]) -> None:
        path = re.sub("^file://", "", str(place), flags=re.IGNORECASE)
        if is_uri(path):
            self.place: Any = str(place)
            try:
                self._files, root = fsspec.core.url_to_fs(self.place)
            except (ImportError, ValueError) as error:
                what = f"{place} cannot be opened: {error}."
                raise DatabaseError(what, "check the URI, or install what it needs") from error
            self._root = str(root).rstrip("/")
        else:
            self.place, self._files = Path(path), LocalFileSystem()
            self._root = str(self.place.absolute())

    def manifest(self) -> bytes:
        """The file that is another one with each publication; `head` is its name."""
        for self.head in (MANIFEST, PREPARED):
            try:
                return bytes(self._files.cat_file(f"{self._root}/{self.head}"))
            except FileNotFoundError:
                continue
            except OSError as error:
                what = f"{self.place}/{self.head} cannot be read: {error.strerror or error}."
                raise DatabaseError(what, "check the place, and who may read it") from error
        if self._files.exists(f"{self._root}/{FILLING}"):
            raise DatabaseError(
                f"{self.place} fills itself: every node has its own. Replicas are made of prepared databases.",
                "attmemo build-database, or database='auto' with a budget: each node then fills its own",
            )
        hint = "name a prepared database: attmemo build-database makes one"
        raise DatabaseNotFoundError(f"{self.place} has no {MANIFEST}: it is no database.", hint)

    def name(self, raw: bytes) -> str:
        """Name of a replica. Copies of one database may each be gone on with: it tells such generations apart."""
        place = Path(f"{self.place}/{self.head}")
        if self.head == PREPARED:
            filling = Filling.parse(raw, place, sealed=True)
            return f"{filling.uuid}-{filling.edition}"
        manifest = Manifest.parse(raw, place)
        return f"{manifest.uuid}-{manifest.generation:08d}-{xxhash.xxh3_64_hexdigest(raw)}"

    def names(self, raw: bytes) -> list[str]:
        """The files to copy, but for the one that says what is published."""
        found = [f"{CATALOGUE}/data.mdb", *self._listed(GUARDS, ".safetensors")]
        if self.head == PREPARED:
            return found + self._listed(SEGMENTS)
        manifest = Manifest.parse(raw, Path(f"{self.place}/{MANIFEST}"))
        if manifest.embedder is not None:
            found += [ref.file for ref in (manifest.embedder.weights, *manifest.embedder.indexes.values())]
        return found + [known.file for known in manifest.classes]

    def size(self, name: str) -> int:
        return int(self._files.size(f"{self._root}/{name}"))

    def _listed(self, folder: str, suffix: str = "") -> list[str]:
        try:
            found = self._files.ls(f"{self._root}/{folder}", detail=False)
        except FileNotFoundError:
            return []
        return sorted(f"{folder}/{Path(name).name}" for name in found if str(name).endswith(suffix))

    def get(self, name: str, target: Path) -> None:
        self._files.get_file(f"{self._root}/{name}", str(target))


def _copy(source: _Source, raw: bytes, target: Path) -> bool:
    """Copy a generation, check the copy, and then give it its name; False: another one was published meanwhile."""
    part = target.with_name(target.name + PART)
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed: this one holds the lock
    try:
        with storing(target.parent, f"free space, or give another cache than {target.parent}"):
            names = source.names(raw)
            try:
                _check_room(part.parent, sum(map(source.size, names)))
                for name in names:
                    (part / name).parent.mkdir(parents=True, exist_ok=True)
                    source.get(name, part / name)
                    sync(part / name)
            except FileNotFoundError as error:
                if source.manifest() != raw:
                    return False
                what = f"{source.place} has no file that its manifest names: {error}."
                raise DatabaseCorruptError(what, f"attmemo check {source.place}") from error
            except OSError as error:
                if error.errno in FULL:
                    raise
                raise DatabaseError(f"{source.place} cannot be copied: {error}.", "ask again") from error
            if source.manifest() != raw:
                return False
            (part / source.head).write_bytes(raw)
            sync(part / source.head)
            try:
                _check(part, source)
            except DatabaseCorruptError:
                if source.manifest() != raw:
                    return False
                raise
            for folder in {part, *((part / name).parent for name in names)}:
                sync(folder)
            part.rename(target)
            sync(target.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return True


def _check(part: Path, source: _Source) -> None:
    try:
        if source.head == PREPARED:
            with closing(open_prepared(part)) as pool:
                findings = check(pool)
        else:
            with Database(part) as copy:
                findings = copy.check()
    except DatabaseError as error:
        raise DatabaseCorruptError(f"a copy of {source.place} is not whole: {error.what}", _mend(source)) from error
    if findings:
        first = findings[0]
        what = f"a copy of {source.place} is damaged in {len(findings)} places. {first.where}: {first.what}."
        raise DatabaseCorruptError(what, _mend(source))


def _mend(source: _Source) -> str:
    return f"ask again if the way to it may be at fault; else build it anew: attmemo check {source.place}"


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StorageFullError(
            f"{folder}: a replica needs {needed:,} bytes, {free:,} are free.", "free space, or give another cache"
        )
