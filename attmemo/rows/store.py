"""Where rows of records come from: a database's arenas, or memory.

A record keeps the tokens of a sequence, K and V of every layer, and the last hidden states. K and V are read where
they lie: a store only says where.

Shapes: n tokens of a record, hidden size H, h heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attmemo.db import KIND_LAST, KIND_ROWS, KIND_SCALES, KIND_TOKENS, Database
from attmemo.db.encodings import TYPES, quantize
from attmemo.kernels.row_attention import Stored
from attmemo.rows.index import TokenIndex

Ints = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Record:
    """One record in memory, as a database stores it."""

    tokens: npt.NDArray[np.int32]  # [n]
    rows: Tensor  # [layers, 2, n, H]
    scales: Tensor | None  # [layers, 2, n, h] of rows in 8 bits
    last: Tensor  # [n, H]

    @classmethod
    def pack(
        cls, tokens: npt.NDArray[np.int32], rows: Tensor, last: Tensor, storage: tuple[torch.dtype, torch.dtype],
        heads: int,
    ) -> Record:  # fmt: skip
        """A record of computed rows ``[layers, 2, n, H]`` in the types of a choice of storage."""
        of_rows, of_last = storage
        if of_rows is torch.int8:
            codes, scales = quantize(rows, heads)
            return cls(tokens, codes, scales, last.to(of_last))
        return cls(tokens, rows.to(of_rows), None, last.to(of_last))

    @property
    def nbytes(self) -> int:
        """Bytes of its rows and last hidden states."""
        scales = 0 if self.scales is None else self.scales.nbytes
        return self.rows.nbytes + self.last.nbytes + scales + self.tokens.nbytes

    @property
    def slots(self) -> dict[str, Sequence[Tensor]]:
        """Tensors of each kind of slot, by layer."""
        found: dict[str, Sequence[Tensor]] = {
            KIND_TOKENS: [torch.from_numpy(self.tokens)], KIND_ROWS: list(self.rows), KIND_LAST: [self.last],
        }  # fmt: skip
        return found if self.scales is None else found | {KIND_SCALES: list(self.scales)}


def records_of(
    lengths: list[int], rows: Tensor, last: Tensor, storage: tuple[torch.dtype, torch.dtype], heads: int,
    tokens: list[Any] | None = None,
) -> list[Record]:  # fmt: skip
    """Records of the sequences of one exactly computed batch, from what `Stack.keep` gets."""
    found, start = [], 0
    for number, n in enumerate(lengths):
        own = np.zeros(n, np.int32) if tokens is None else tokens[number]
        part = slice(start, start + n)
        found.append(Record.pack(own, rows[:, :, part].clone(), last[part].clone(), storage, heads))
        start += n
    return found


class Fetched(Protocol):
    """Rows of the records of one batch; what they lie in is held as long as this object is."""

    def layer(self, number: int) -> Stored:
        """K and V of one layer."""

    def last(self) -> tuple[Addresses, torch.dtype]:
        """Where the last hidden states of each record begin, ``[B]`` (0: no record), and their type."""


class RowStore(Protocol):
    """A collection of records."""

    def fetch(self, records: Ints) -> Fetched:
        """Rows of these records, ``[B]``; -1: none."""

    def close(self) -> None:
        """Give everything back."""


class DatabaseRows(RowStore):
    """Records of a database, read where they lie in its arenas.

    Parameters
    ----------
    database : Database
        One that keeps rows.

    Attributes
    ----------
    index : TokenIndex
        Finds records by tokens.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._kinds = {kind.name: kind for kind in database.manifest.kinds}
        self._slots: dict[str, _Slots] = {
            kind: _Slots(database, kind) for kind in (KIND_ROWS, KIND_LAST, KIND_SCALES) if kind in self._kinds
        }
        self.index = TokenIndex()
        for record in range(len(database)):
            self.index.add(database.view(KIND_TOKENS, 0, record).numpy())

    @property
    def storage(self) -> tuple[torch.dtype, torch.dtype]:
        """Types of K and V, and of the last hidden states."""
        return TYPES[self._kinds[KIND_ROWS].dtype], TYPES[self._kinds[KIND_LAST].dtype]

    def fetch(self, records: Ints) -> _Mapped:
        return _Mapped(self._database, self._slots, self._kinds, records)

    def close(self) -> None:
        """Nothing is held: the database is its owner's."""


class _Slots:
    """Where the slots of one kind lie: found out for all records of a length when one of them is first asked for."""

    def __init__(self, database: Database, kind: str) -> None:
        self._database, self._kind = database, kind
        self._known: WeakValueDictionary[int, Any] = WeakValueDictionary()  # mappings by length
        self._begins = np.zeros(len(database), np.uint64)  # addresses of layer 0
        self._steps = np.zeros(len(database), np.uint64)  # bytes to the next layer's

    def of(self, records: Ints, lengths: Sequence[int]) -> tuple[Addresses, Addresses, list[Any]]:
        """Addresses and steps of records that have these lengths, ``[B]``, and the mappings to be held meanwhile."""
        held = []
        for length in lengths:
            mapping = self._database.arena(self._kind, length).mapping
            mapping.check_whole()
            if self._known.get(length) is not mapping:
                self._learn(length, mapping)
            held.append(mapping)
        there = records >= 0
        return self._begins[records] * there, self._steps[records] * there, held

    def _learn(self, length: int, mapping: Any) -> None:
        there = np.flatnonzero(self._database.records.lengths == length)
        slots = mapping.indices(self._database.slots_of(self._kind, 0, there))
        self._begins[there] = (mapping.address + mapping.offsets(slots)).astype(np.uint64)
        self._steps[there] = mapping.layout.stride
        self._known[length] = mapping


class _Mapped:
    """Rows in arenas."""

    def __init__(self, database: Database, slots: dict[str, _Slots], kinds: dict[str, Any], records: Ints) -> None:
        self._kinds, self._kind = kinds, kinds[KIND_ROWS]
        self._lengths = np.where(records < 0, 0, database.records.lengths[records])
        lengths = np.unique(self._lengths[records >= 0]).tolist()
        self._found = {kind: own.of(records, lengths) for kind, own in slots.items()}
        self._dtype = TYPES[self._kind.dtype]
        self._coded = KIND_SCALES in kinds
        self._heads = int(kinds[KIND_SCALES].shape[-1]) if self._coded else 0
        self._size = int(self._kind.shape[-1]) * self._dtype.itemsize
        self._to_values = (self._lengths * self._size).astype(np.uint64)
        self._to_value_scales = (self._lengths * 4 * self._heads).astype(np.uint64)

    def _planes(self, kind: str, number: int, to_values: Addresses) -> tuple[Addresses, Addresses]:
        """Where K and V of a layer begin."""
        begins, steps, _ = self._found[kind]
        keys: Addresses = begins + np.uint64(number) * steps
        values: Addresses = keys + to_values
        return keys, values

    def layer(self, number: int) -> Stored:
        keys, values = self._planes(KIND_ROWS, number, self._to_values)
        scales: tuple[Any, Any] = None, None
        if self._coded:
            scales = self._planes(KIND_SCALES, number, self._to_value_scales)
        return Stored(keys, values, self._lengths, self._dtype, self._size, *scales, 4 * self._heads)

    def last(self) -> tuple[Addresses, torch.dtype]:
        return self._found[KIND_LAST][0], TYPES[self._kinds[KIND_LAST].dtype]


class HeldRows(RowStore):
    """Records in memory: the self-check serves them through the path that serves a database."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._held = list(records)

    def fetch(self, records: Ints) -> Held:
        return Held([None if record < 0 else self._held[record] for record in records.tolist()])

    def close(self) -> None:
        self._held.clear()


class Held:
    """Rows of records in memory, one for each place of a batch; None: the place has no record."""

    def __init__(self, records: Sequence[Record | None]) -> None:
        self._records = records

    def layer(self, number: int) -> Stored:
        def addresses(name: str, plane: int) -> Addresses:
            found = [None if record is None else getattr(record, name)[number, plane] for record in self._records]
            return np.array([0 if part is None else part.data_ptr() for part in found], np.uint64)

        some = next(record for record in self._records if record is not None)
        rows = np.array([0 if record is None else len(record.tokens) for record in self._records], np.int64)
        coded = some.scales is not None
        return Stored(
            addresses("rows", 0), addresses("rows", 1), rows, some.rows.dtype,
            some.rows.shape[-1] * some.rows.itemsize,
            addresses("scales", 0) if coded else None, addresses("scales", 1) if coded else None,
            some.scales.shape[-1] * 4 if some.scales is not None else 0,
        )  # fmt: skip

    def last(self) -> tuple[Addresses, torch.dtype]:
        addresses = [0 if record is None else record.last.data_ptr() for record in self._records]
        return np.array(addresses, np.uint64), next(r for r in self._records if r is not None).last.dtype
