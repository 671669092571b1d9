"""What the benchmarks refuse before anything is allocated, and what they say about the machine."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from attmemo.errors import StorageFullError
from attmemo.mmap import Arena, FetcherName, choose_fetcher
from attmemo.system.memory import available_memory

MAX_BYTES: Final = 8 << 30  # that a benchmark writes or allocates, by default
SEED: Final = 20240229


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


def fetcher_name(fetch: FetcherName, arena: Arena) -> str:
    """The fetcher that "auto", or another choice, is for this arena."""
    fetcher = choose_fetcher(fetch, arena.window_page_bytes)
    fetcher.close()
    return fetcher.name


def check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: {value!r} is not one of {', '.join(allowed)}")


@contextmanager
def temporary_folder(on_disk: int, in_memory: int, max_bytes: int) -> Iterator[Path]:
    """A temporary folder with enough room, or a StorageFullError that names what is missing."""
    if on_disk > max_bytes:
        raise _too_large(on_disk, f"the limit is {_mib(max_bytes)}")
    check_memory(in_memory, None)
    with tempfile.TemporaryDirectory(prefix="attmemo-bench-") as name:
        free = shutil.disk_usage(name).free
        if on_disk > free:
            raise _too_large(on_disk, f"{_mib(free)} are free in the folder for temporary files")
        yield Path(name)


def check_memory(nbytes: int, max_bytes: int | None) -> None:
    if max_bytes is not None and nbytes > max_bytes:
        raise _too_large(nbytes, f"the limit is {_mib(max_bytes)}")
    room = available_memory()
    if room is not None and nbytes > room:
        raise _too_large(nbytes, f"{_mib(room)} of memory are available")


def _too_large(nbytes: int, why: str) -> StorageFullError:
    return StorageFullError(f"the benchmark needs {_mib(nbytes)}; {why}.", "ask for smaller sizes, or more max_bytes")


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"
