"""The controls that a similarity search has to beat: the mean map of the length, a random map of the length.

Served to the very sequences and layers that memoization serves, so that only the map differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from torch import Tensor

from attmemo.db import Database
from attmemo.forward.engine import Engine
from attmemo.maps.serve import Maps
from attmemo.maps.source import Ints, MapSource, StoredMaps
from attmemo.mmap import Batch

MEAN_OF = 64  # records that a mean map averages


class MeanMaps(MapSource):
    """For every record the mean map of its length."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._means: dict[tuple[int, int], Tensor] = {}

    def fetch(self, layer: int, length: int, records: Ints) -> AbstractContextManager[Batch]:
        if (layer, length) not in self._means:
            there = np.flatnonzero(self._database.records.lengths == length)
            some = there[np.linspace(0, len(there) - 1, min(MEAN_OF, len(there))).round().astype(int)]
            maps = [self._database.map(layer, int(record)).float() for record in some]
            self._means[layer, length] = torch.stack(maps).mean(0)
        return Batch(None, [self._means[layer, length]] * len(records))

    def close(self) -> None:
        self._means.clear()


class RandomMaps(MapSource):
    """For every record the maps of another one of its length; the same stranger in every layer."""

    def __init__(self, database: Database) -> None:
        self._database, self._stored = database, StoredMaps(database)

    def fetch(self, layer: int, length: int, records: Ints) -> AbstractContextManager[Batch]:
        there = np.flatnonzero(self._database.records.lengths == length)
        # A multiplicative hash of the record instead of a generator: all layers must draw the same.
        places = (records * 2654435761 + 12345) % len(there)
        places[there[places] == records] += 1
        return self._stored.fetch(layer, length, there[places % len(there)])

    def close(self) -> None:
        self._stored.close()


CONTROLS: dict[str, Callable[[Database], MapSource]] = {"mean map": MeanMaps, "random map": RandomMaps}


@contextmanager
def serving_control(engine: Engine, name: str) -> Iterator[None]:
    """Serve a control's maps instead of the records' while inside; lookups stay real."""
    maps = engine.reuse
    assert isinstance(maps, Maps)
    before, maps.source = maps.source, CONTROLS[name](maps.database)
    try:
        yield
    finally:
        maps.source.close()
        maps.source = before
