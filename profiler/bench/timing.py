"""Shared by the benchmarks: timing in turns, and the checks before anything is allocated."""

from __future__ import annotations

import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from attmemo.errors import StorageFullError
from attmemo.memory import available_memory
from attmemo.mmap import Arena, FetcherName, choose_fetcher

Progress = Callable[[str, int, int], None]
Job = Callable[[int], object]

MAX_BYTES: Final = 8 << 30  # that a benchmark writes or allocates, by default
SEED: Final = 20240229


@dataclass
class Times:
    """One variant: milliseconds and page faults of the whole process, turn by turn."""

    milliseconds: list[float] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)

    def take(self, job: Job, turn: int, major: bool = False) -> None:
        """Time a turn of a job; its major page faults count on demand."""
        faults, start = _faults(major), time.perf_counter()
        result = job(turn)
        spent = time.perf_counter() - start
        faults = _faults(major) - faults
        self.milliseconds.append(1e3 * spent)
        self.faults.append(faults)
        del result  # freed outside the time

    @property
    def ms(self) -> float:
        return median(self.milliseconds)

    @property
    def faults_median(self) -> int:
        return int(median(self.faults))


def _faults(major: bool) -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + (usage.ru_majflt if major else 0)


def interleave(
    jobs: Mapping[str, Job], repeats: int, *, tell: Progress, before: Callable[[int], None] = lambda _turn: None,
    after: Callable[[str, int], None] = lambda _name, _turn: None,
) -> dict[str, Times]:  # fmt: skip
    """Time jobs in turns: ``1 + repeats`` turns of all of them, the first not counted.

    Jobs are called with the number of the turn. Not timed: `before` a turn, with its number; `after` a job, with its
    name and the turn.
    """
    names = list(jobs)
    times = {name: Times() for name in names}
    for turn in range(1 + repeats):
        tell("measure", turn, 1 + repeats)
        before(turn)
        # Rotated and turned round: each variant leaves the caches to another one in each turn.
        first = turn % max(1, len(names))
        order = names[first:] + names[:first]
        for name in reversed(order) if turn % 2 else order:
            (times[name] if turn > 0 else Times()).take(jobs[name], turn)
            after(name, turn)
    tell("measure", 1 + repeats, 1 + repeats)
    return times


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


def silent(_what: str, _done: int, _total: int) -> None:
    pass


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
