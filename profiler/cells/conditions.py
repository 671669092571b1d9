"""Under which conditions a table was measured."""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from attmemo.machine import CPUINFO, conditions

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
    """How much of the machine's processor time other work takes.

    Parameters
    ----------
    own : callable
        Seconds that the child processes of this one have used so far.
    """

    def __init__(self, own: Callable[[], float]) -> None:
        self._own = own
        self._start = self._now()

    def share(self) -> float:
        """Seconds that other work used since the beginning, over those of all processors."""
        wall, busy, own = (now - before for now, before in zip(self._now(), self._start, strict=True))
        return max(0.0, busy - own) / (wall * (os.cpu_count() or 1))

    def _now(self) -> tuple[float, float, float]:
        use = resource.getrusage(resource.RUSAGE_SELF)
        fields = [int(field) for field in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
        busy = (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")  # neither idle nor waiting for a disk
        return time.monotonic(), busy, use.ru_utime + use.ru_stime + self._own()
