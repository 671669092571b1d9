"""Memory that is used again and again.

The first touch of a page takes a quarter of a microsecond, and up to ten of them in a virtual machine that gives
unused memory back to its host: a megabyte then takes 2.5 milliseconds, as long as a small model takes to fill it.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from attmemo.mmap import round_up

ALIGNED: Final = 64
"""Bytes: each part begins at a multiple."""


class Scratch:
    """Memory of which parts are taken, and come back when nothing refers to them any more.

    Any number of threads may take parts. Pages are asked of the system when they are first used.

    Parameters
    ----------
    nbytes : int
        What does not fit is memory of its own.
    """

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._address = int(np.frombuffer(self._memory, np.uint8).ctypes.data)
        self._gaps = [(0, nbytes)]  # rising, none beside another
        self._back: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Bytes ``[nbytes]`` of any content. No other part has them as long as the array, or a view, is there."""
        size = round_up(max(nbytes, 1), ALIGNED)
        if self._lock.acquire(blocking=False):  # in a forked child a thread of the parent may hold it for ever
            try:
                begin = self._find(size)
            finally:
                self._lock.release()
            if begin is not None:
                return np.asarray(_Part(self, begin, begin + size, nbytes))
        return np.empty(nbytes, np.uint8)

    def _find(self, size: int) -> int | None:
        """Take so many bytes from the first gap that has them, so that few pages are used; None: no gap has."""
        while self._back:
            self._join(*self._back.popleft())
        for place, (begin, end) in enumerate(self._gaps):
            if end - begin >= size:
                self._gaps[place : place + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        return None

    def _join(self, begin: int, end: int) -> None:
        """Add a gap, one with those that it touches."""
        beside = [gap for gap in self._gaps if gap[0] == end or gap[1] == begin]
        whole = min((begin, *(gap[0] for gap in beside))), max((end, *(gap[1] for gap in beside)))
        self._gaps = sorted([gap for gap in self._gaps if gap not in beside] + [whole])


class _Part:
    """What an array refers to; its bytes come back with it."""

    def __init__(self, scratch: Scratch, begin: int, end: int, nbytes: int) -> None:
        self._scratch, self._span = scratch, (begin, end)
        self.__array_interface__: dict[str, Any] = {
            "shape": (nbytes,), "typestr": "|u1", "data": (scratch._address + begin, False), "version": 3
        }  # fmt: skip

    def __del__(self) -> None:
        self._scratch._back.append(self._span)  # no lock: this may run inside of any call, in any thread
