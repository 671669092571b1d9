"""Under which conditions a table was measured."""

from __future__ import annotations

import os
import re
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from attmemo.system.machine import CPUINFO, conditions

PACKAGES: Final = ("attmemo", "torch", "transformers", "openvino", "nncf", "onnxruntime", "onnx", "onnxscript")
_INT8: Final = ("avx512_vnni", "avx_vnni", "amx_int8")  # for products of 8-bit numbers
_STAT: Final = Path("/proc/stat")


def measured_under() -> dict[str, Any]:
    """Machine, versions of what is installed, instruction sets and load, JSON-able."""
    found = conditions()
    text = CPUINFO.read_text(encoding="utf-8", errors="replace") if CPUINFO.exists() else ""
    found["features"] += [name for name in _INT8 if re.search(rf"^flags\b.*\b{name}\b", text, re.MULTILINE)]
    found["packages"] = {}
    for name in PACKAGES:
        try:
            found["packages"][name] = version(name)
        except PackageNotFoundError:
            continue
    return found


class Others:
    """How much of the machine's processor time other work takes than this process and its descendants."""

    def __init__(self) -> None:
        self._start = _now()

    def share(self) -> float:
        """Seconds that other work used since the beginning, over those of all processors."""
        wall, busy, own = (now - before for now, before in zip(_now(), self._start, strict=True))
        return max(0.0, busy - own) / (wall * (os.cpu_count() or 1))


def _now() -> tuple[float, float, float]:
    """Clock, processor seconds of the machine and of this process with its descendants."""
    fields = [int(field) for field in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    busy = (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")  # neither idle nor waiting for a disk
    return time.monotonic(), busy, _own_seconds()


def _own_seconds() -> float:
    """Of descendants that have ended too: a server that forks, a compiler. Each counts what it has waited for.

    One that outlives its parent is no descendant any more, and counts as other work.
    """
    ticks: dict[int, int] = {}
    parents: dict[int, int] = {}
    for place in _STAT.parent.glob("[0-9]*/stat"):
        try:
            fields = place.read_bytes().rsplit(b")", 1)[1].split()  # names of processes may be no text
        except OSError:  # it has ended
            continue
        process = int(place.parent.name)
        parents[process], ticks[process] = int(fields[1]), sum(map(int, fields[11:15]))
    own, found = [os.getpid()], 0
    while own:
        found += sum(ticks.get(process, 0) for process in own)
        own = [process for process, parent in parents.items() if parent in own]
    return found / os.sysconf("SC_CLK_TCK")
