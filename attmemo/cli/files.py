"""The files of a command, looked at before its work and not after it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

from attmemo.errors import AttmemoError
from attmemo.system.extras import check_installed


def check_apart(written: Mapping[str, Path], read: Mapping[str, Path]) -> None:
    """Refuse a command that would write over a file of its own.

    Both mappings go from the name that the user knows to the file. An AttmemoError if two files that are written are
    the same, or if a file that is written is also read.
    """
    for (name, path), (other, another) in combinations(written.items(), 2):
        if _same(path, another):
            raise AttmemoError(f"{name} and {other} are the same file, {path}.", "name another file for one of them")
    for name, path in written.items():
        for other, another in read.items():
            if _same(path, another):
                raise AttmemoError(f"{name} {path} would replace {other}, which is read.", f"name another {name}")


def check_writable(name: str, path: Path) -> None:
    """Refuse a file that cannot be written: an AttmemoError that names it and says why."""
    if path.is_dir():
        raise _unwritable(name, path, "it is a directory")
    if not path.parent.is_dir():
        raise _unwritable(name, path, f"there is no directory {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise _unwritable(name, path, "permission denied")


def check_plot(path: Path) -> None:
    """Refuse a --plot that cannot be drawn there, before the work."""
    if path.suffix.lower() != ".png":
        raise AttmemoError(f"--plot {path} cannot be written: it is drawn as PNG.", "name a .png file")
    check_installed("report", "matplotlib")
    check_writable("--plot", path)


def check_directory(name: str, path: Path) -> None:
    """Refuse a directory that cannot be written, or cannot be made in the nearest of its parents that there is."""
    place = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not place.is_dir():
        raise _unwritable(name, path, f"{place} is no directory")
    if not os.access(place, os.W_OK):
        raise _unwritable(name, path, f"{place} may not be written")


def write_whole(name: str, path: Path, content: bytes) -> None:
    """Write a file beside its place and put it there, so that a full disk leaves the older one, and no part of it."""
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)  # a pipe, or /dev/null
            return
        path = path.resolve()  # a link stays a link
        fresh = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            fresh.write_bytes(content)
            os.replace(fresh, path)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(name, path, error.strerror or str(error)) from error


def _unwritable(name: str, path: Path, why: str) -> AttmemoError:
    return AttmemoError(f"{name} {path} cannot be written: {why}.", "name a file in a directory that can be written")


def _same(one: Path, other: Path) -> bool:
    if one.exists() and not one.is_file():
        return False  # /dev/null may be given twice
    # Of two hard links neither resolves to the other.
    return one.resolve() == other.resolve() or (one.exists() and other.exists() and one.samefile(other))
