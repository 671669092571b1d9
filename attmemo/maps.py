"""Where the engine gets a record's maps from: the arena, or a stand-in that a measurement puts in its place."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Protocol, get_args

import numpy as np
import numpy.typing as npt

from attmemo.db import KIND_MAP, Database
from attmemo.mmap import Batch, Fetcher, FetcherName, choose_fetcher

Ints = npt.NDArray[np.int64]


class MapSource(Protocol):
    """Gives maps for records of one token length."""

    def fetch(self, layer: int, length: int, records: Ints) -> AbstractContextManager[Batch]:
        """Maps ``[h, n, n]`` of these records in this layer, to be read inside the ``with`` block."""

    def close(self) -> None:
        """Give everything back."""


class StoredMaps:
    """The records' own maps, where they lie in the arena: no copy.

    Parameters
    ----------
    database : Database
    fetch : {"auto", "map", "view", "copy"}
        "auto" takes what measures fastest for the pages that the arena got.
    """

    def __init__(self, database: Database, fetch: FetcherName = "auto") -> None:
        if fetch not in get_args(FetcherName):
            raise ValueError(f"fetch must be one of {', '.join(get_args(FetcherName))}, got {fetch!r}")
        self._database, self._name = database, fetch
        self._fetchers: dict[int, Fetcher] = {}
        self._lock = threading.Lock()

    def fetch(self, layer: int, length: int, records: Ints) -> AbstractContextManager[Batch]:
        arena = self._database.arena(KIND_MAP, length)
        slots = self._database.slots_of(KIND_MAP, layer, records)
        return self._fetcher(arena.window_page_bytes).fetch(arena, slots)

    def close(self) -> None:
        for fetcher in self._fetchers.values():
            fetcher.close()
        self._fetchers.clear()

    def _fetcher(self, page_bytes: int) -> Fetcher:
        fetcher = self._fetchers.get(page_bytes)
        if fetcher is None:
            with self._lock:
                fetcher = self._fetchers.setdefault(page_bytes, choose_fetcher(self._name, page_bytes))
        return fetcher
