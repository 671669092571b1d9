"""The machine that a measurement was made on: numbers of different machines cannot be compared."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch

CPUINFO: Final = Path("/proc/cpuinfo")
FEATURES: Final = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
"""Processor flags that decide how fast attention is, and whether bfloat16 is native; x86-64 and arm64 names."""


def conditions() -> dict[str, Any]:
    """Machine and versions, JSON-able; reads, and sets nothing.

    ``features`` are those of `FEATURES` that the processor has, ``cores`` those that this process may use, ``threads``
    those of torch, ``load`` the runnable processes (mean of the last minute: other work makes times worthless).
    """
    name, features = processor()
    return {
        "cpu": name, "features": features, "cores": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2), "kernel": platform.release(), "python": platform.python_version(),
        "torch": str(torch.__version__), "transformers": version("transformers"),
    }  # fmt: skip


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
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
