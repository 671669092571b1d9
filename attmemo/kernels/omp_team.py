"""Which OpenMP library torch computes with: the kernels in `native/` share work with its threads.

A second pool of threads would fight with the first for the cores, and linking libgomp would load a second copy beside
the one in torch's wheel. So the library is looked for in the process, by its path.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

_OPENMP = re.compile(r"/lib(gomp|iomp5|omp)\b[^/]*$")
_MKL = re.compile(r"/libtorch_cpu\b[^/]*$")  # has MKL inside, or depends on it


def join_torch(use_team: Callable[[str], bool]) -> bool:
    """Give an extension the OpenMP library in torch's wheel, or the only one there is; False: one thread works.

    `use_team` is the extension's: it takes a path and tells whether the library is loaded and of use.
    """
    return any(use_team(path) for path in _libraries())


def leave_team() -> None:
    """The calling thread computes alone from now on.

    OpenMP keeps a team of threads for each thread that computes. Once these are more than the cores, libgomp has them
    all sleep between two operations and not spin, those of requests too: a request of 15 rows, made of 40 operations,
    took 20 ms in place of 10 while a second thread had a team. `torch.set_num_threads` would change the number for
    every thread that begins later.

    MKL, which torch multiplies float32 with, has a number of its own, and starts such a team, too.
    """
    torch.get_num_threads()  # torch sets the number of a thread once: before we do
    for paths, name in ((_libraries(), "omp_set_num_threads"), (_loaded(_MKL), "MKL_Set_Num_Threads_Local")):
        for path in paths:
            with suppress(OSError):  # its file was replaced meanwhile
                change = getattr(ctypes.CDLL(path, os.RTLD_NOLOAD), name, None)
                if change is not None:
                    change(1)


def _loaded(names: re.Pattern[str]) -> list[str]:
    """Paths of libraries of these names in the process; none if they are not known."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    parts = [line.split(maxsplit=5) for line in lines]
    return sorted({found[5] for found in parts if len(found) == 6 and names.search(found[5])})


def _libraries() -> list[str]:
    """Paths of the OpenMP library that torch uses; none if it is not known."""
    teams = _loaded(_OPENMP)
    home = str(Path(torch.__file__).parent)
    # A wheel brings its own; a distribution's torch uses the system's. Others (numpy's, faiss's) are other pools.
    torchs = [path for path in teams if path.startswith((home + "/", home + ".libs/"))]
    return torchs or teams[:1]
