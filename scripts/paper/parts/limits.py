"""What the benchmarks refuse before anything is allocated, and what they say about the machine."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch

from attmemo.errors import StorageFullError
from attmemo.system.memory import available_memory

SEED: Final = 20240229
PREFIX: Final = "attmemo-bench-"  # of temporary folders


def busy(where: Mapping[str, Any]) -> list[str]:
    """A note if the machine had other work: variants that wait for all threads often then lose most."""
    if where["load"] < where["cores"]:
        return []
    return [f"the machine was busy when this began (load {where['load']:g} on {where['cores']} cores): repeat it idle"]


@contextmanager
def threads_kept(notes: list[str] | None = None) -> Iterator[None]:
    """Put torch's number of threads back if something inside changed it, as loading an index may."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        after = torch.get_num_threads()
        if after != before:
            torch.set_num_threads(before)
            if notes is not None:
                notes.append(f"loading an index changed torch from {before} to {after} threads; {before} are measured")


def check_room(in_memory: int, on_disk: int = 0) -> None:
    """Raise a StorageFullError that names what is missing, before anything is allocated or written."""
    free = shutil.disk_usage(tempfile.gettempdir()).free
    for nbytes, room, where in ((in_memory, available_memory(), "of memory"), (on_disk, free, "on the disk")):
        if room is not None and nbytes > room:
            what = f"the benchmark needs {_mib(nbytes)}; {_mib(room)} {where} are free."
            raise StorageFullError(what, "ask for smaller sizes")


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"
