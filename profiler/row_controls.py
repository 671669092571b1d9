"""The controls that reuse of rows has to beat: zeros, mean rows, and the rows of any other record.

They are served to the very sequences that a record serves, through the same plans: only the numbers differ.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attmemo.db import KIND_LAST, KIND_ROWS, KIND_SCALES, KIND_TOKENS, Database
from attmemo.forward.engine import Engine
from attmemo.rows.serve import Rows
from attmemo.rows.store import Held, Record, RowStore

MEAN_OF = 64  # records that mean rows average


class StandIn(RowStore):
    """Records of a database with the numbers of other ones. Nothing is held, so there is nothing to close."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def fetch(self, records: npt.NDArray[np.int64]) -> Held:
        return Held([None if record < 0 else self.instead(record) for record in records.tolist()])

    @abstractmethod
    def instead(self, record: int) -> Record:
        """What is served for a record, with as many tokens."""


class ZeroedRows(StandIn):
    """Zeros."""

    def instead(self, record: int) -> Record:
        found = read_record(self.database, record)
        return replace(found, rows=torch.zeros_like(found.rows), last=torch.zeros_like(found.last))


class MeanRows(StandIn):
    """For every token the mean over tokens and records, of each layer."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        numbers = np.linspace(0, len(database) - 1, min(MEAN_OF, len(database))).round().astype(int)
        found = [read_record(database, int(number)) for number in numbers]
        self._rows = torch.cat([_numbers(record) for record in found], 2).mean(2, keepdim=True)  # [layers, 2, 1, H]
        self._last = torch.cat([record.last.float() for record in found]).mean(0, keepdim=True)  # [1, H]

    def instead(self, record: int) -> Record:
        own = read_record(self.database, record)
        n, storage = len(own.tokens), (own.rows.dtype, own.last.dtype)
        rows, last = self._rows.expand(-1, -1, n, -1).contiguous(), self._last.expand(n, -1).contiguous()
        return Record.pack(own.tokens, rows, last, storage, self.database.manifest.model.heads)


class RandomRecord(StandIn):
    """The rows of another record; it begins again where it is shorter."""

    def instead(self, record: int) -> Record:
        count, n = len(self.database), int(self.database.records.lengths[record])
        stranger = (record * 2654435761 + 12345) % count  # a multiplicative hash in place of a generator
        found = read_record(self.database, stranger if stranger != record else (record + 1) % count)
        places = torch.arange(n) % len(found.tokens)
        return Record(
            found.tokens[places.numpy()], found.rows.index_select(2, places),
            None if found.scales is None else found.scales.index_select(2, places), found.last.index_select(0, places),
        )  # fmt: skip


CONTROLS: dict[str, Callable[[Database], StandIn]] = {
    "zeroed rows": ZeroedRows, "mean rows": MeanRows, "random record": RandomRecord,
}  # fmt: skip


def read_record(database: Database, number: int) -> Record:
    """A record of a database that keeps rows, in memory."""
    kinds = {kind.name: kind for kind in database.manifest.known_kinds}

    def layers(name: str) -> Tensor:
        return torch.stack([database.view(name, layer, number) for layer in range(kinds[name].layers)])

    return Record(
        database.slot(KIND_TOKENS, 0, number).numpy(), layers(KIND_ROWS),
        layers(KIND_SCALES) if KIND_SCALES in kinds else None, database.slot(KIND_LAST, 0, number),
    )  # fmt: skip


def _numbers(record: Record) -> Tensor:
    """K and V ``[layers, 2, n, H]`` of a record, float32."""
    if record.scales is None:
        return record.rows.float()
    parts = record.rows.float().unflatten(-1, (record.scales.shape[-1], -1))  # type: ignore[no-untyped-call]
    return (parts * record.scales[..., None]).flatten(-2)  # type: ignore[no-any-return]


@contextmanager
def serving_rows(engine: Engine, database: Database, name: str) -> Iterator[None]:
    """Serve a control's rows instead of the records' while inside."""
    rows = engine.reuse
    assert isinstance(rows, Rows)
    before, rows.store = rows.store, CONTROLS[name](database)
    try:
        yield
    finally:
        rows.store = before
