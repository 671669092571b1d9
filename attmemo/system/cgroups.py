"""Control groups of this process, of both versions, and what is mounted where. Imports nothing of attmemo."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

PROC: Final = Path("/proc")
TOP: Final = Path("/sys/fs/cgroup")


class Mount(NamedTuple):
    """A line of ``/proc/self/mountinfo``.

    Attributes
    ----------
    root : str
        The directory of the file system that is mounted.
    place : str
        Where it is mounted.
    kind : str
        Type of the file system.
    options : list of str
        Of the file system.
    """

    root: str
    place: str
    kind: str
    options: list[str]


def mounts(proc: Path = PROC) -> Iterator[Mount]:
    """Read what this process sees mounted, in the order of mounting."""
    for line in read_text(proc / "self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, system = before.split(), after.split()
        if len(fields) >= 5 and system:
            root, place = (re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), name) for name in fields[3:5])
            yield Mount(root, place, system[0], system[-1].split(","))


def control_groups(controller: str, proc: Path = PROC, top: Path = TOP) -> Iterator[tuple[Path, int]]:
    """Find the control groups of this process that a controller rules, each before those above it.

    Parameters
    ----------
    controller : str
        ``"memory"``, ``"cpu"``, …
    proc, top : Path
        Where the kernel shows processes, and control groups that ``mountinfo`` does not name.

    Yields
    ------
    (Path, int)
        The directory of a group, and its version: 1 or 2.
    """
    found = [mount for mount in mounts(proc) if mount.kind in ("cgroup", "cgroup2")]
    for line in read_text(proc / "self/cgroup").splitlines():
        number, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if number != "0" and controller not in controllers.split(","):
            continue
        version = 2 if number == "0" else 1
        of_these = [
            mount for mount in found
            if mount.kind == ("cgroup2" if version == 2 else "cgroup")
            and (version == 2 or controller in mount.options)
        ]  # fmt: skip
        root, inside = (top if version == 2 else top / controllers), path
        if of_these:
            mount = next((one for one in of_these if _is_within(path, one.root)), of_these[0])
            root = proc.parent / mount.place.strip("/")
            inside = path[len(mount.root.rstrip("/")) :] if _is_within(path, mount.root) else ""
        group = root / inside.strip("/")
        if ".." in group.parts or not group.is_dir():  # a path of the host: the container's own group is the root
            group = root
        while group == root or root in group.parents:
            yield group, version
            group = group.parent


def read_number(file: Path) -> int | None:
    """The whole number in a file; None: there is another text (``max``: no limit), or no such file."""
    text = read_text(file).strip()
    return int(text) if text.isdigit() else None


def read_text(file: Path) -> str:
    """The text of a file; none if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _is_within(path: str, root: str) -> bool:
    return PurePosixPath(path).is_relative_to(root)
