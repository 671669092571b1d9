"""The machine that a measurement was made on: numbers of different machines cannot be compared."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import platform
import re
from pathlib import Path
from typing import Any, Final

from attmemo.system.cgroups import control_groups, read_text

ROOT: Final = Path("/")
CPUINFO: Final = Path("/proc/cpuinfo")
FEATURES: Final = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
"""Processor flags that decide how fast attention is, and whether bfloat16 is native; x86-64 and arm64 names."""


def conditions() -> dict[str, Any]:
    """Machine and versions, JSON-able; reads, and sets nothing.

    ``features`` are those of `FEATURES` that the processor has, ``cores`` those that this process may use, ``threads``
    those of torch, ``load`` the runnable processes (mean of the last minute: other work makes times worthless).
    """
    from importlib.metadata import version  # here: the command line asks for `cores` before it loads anything

    import torch

    name, features = processor()
    return {
        "cpu": name, "features": features, "cores": cores(), "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2), "kernel": platform.release(), "python": platform.python_version(),
        "torch": str(torch.__version__), "transformers": version("transformers"),
    }  # fmt: skip


def cores(root: Path = ROOT) -> int:
    """Return how many cores this process may keep busy: those of its affinity, at most those of its `quota`.

    A part of a core counts as one. With more threads than that, the kernel stops all of them for the rest of each
    period of the quota, and requests wait. Reads files below `root`.
    """
    allowed, most = len(os.sched_getaffinity(0)), quota(root)
    return allowed if most is None else max(1, min(allowed, math.ceil(most)))


def quota(root: Path = ROOT) -> float | None:
    """Return the cores that control groups grant: the least of this process's and those above it; None: no limit."""
    found = (
        _granted(group, version) for group, version in control_groups("cpu", root / "proc", root / "sys/fs/cgroup")
    )
    return min((cores for cores in found if cores is not None), default=None)


def _granted(group: Path, version: int) -> float | None:
    if version == 2:
        words = read_text(group / "cpu.max").split()
    else:
        words = [read_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(words) != 2 or not all(word.isdigit() for word in words) or not int(words[1]):  # "max", or -1
        return None
    return int(words[0]) / int(words[1])


def processor(cpuinfo: Path = CPUINFO) -> tuple[str, list[str]]:
    """The processor's name, and what it has of `FEATURES`; reads a file such as ``/proc/cpuinfo``."""
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else ""
    name = re.search(r"^(?:model name|Model|cpu)\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    known = set(flags[1].split()) if flags else set()
    # arm64 kernels name no model there: the architecture is then all that is known.
    return (name[1].strip() if name else platform.machine()), [f for f in FEATURES if f in known]


def trim() -> None:
    """Give memory that was freed back to the system. The C library keeps much of it; others than glibc cannot be told.

    Some milliseconds, up to twenty after much work; no other thread gets or frees memory meanwhile.
    """
    give_back = _malloc_trim()
    if give_back is not None:
        give_back(0)


@functools.cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
