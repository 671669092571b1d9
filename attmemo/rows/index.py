"""Which records could serve an input, found by token ids alone: a collection of tokens where records come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_64_intdigest

from attmemo.kernels.align import Rule, nearest
from attmemo.kernels.kinds import NO_KINDS, Kinds
from attmemo.kernels.plan import NOTHING_KNOWN, Demand, RowPlan, Table, plan
from attmemo.rows.sketch import Sketch, Vectors
from attmemo.system.locking import thread_lock

Tokens = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
_Arrays = tuple[Tokens, Ints, Vectors, Ints, Flags, Floats]

FEWEST: Final = 64  # rows there is room for at first
DEFAULT: Final = Rule()
ANY: Final = Demand()
TRIED: Final = 8
"""Nearest records that are aligned with an input. To try 16 takes twice as long and leaves 0.001 of the rows less."""
_NO_NUMBERS: Final = (-1,)

GRAPH_FROM: Final = 4000
"""Records from which a graph is searched. Sketches of log lines, 256 dimensions, microseconds a line for the product
with all records and for the graph: of 4,000 records 33 and 42 in a batch of 32, 350 and 85 alone; of 15,000 records
150 and 80 in a batch. The graph lost less than 0.001 of the rows."""
BLOCK: Final = 1 << 12  # records that are added at a time: memory that was never touched costs more than the sketches
LINKED: Final = 4  # records that go to the graph with each one added, while it is behind

LINKS: Final = 16
EF_CONSTRUCTION: Final = 100
EF_SEARCH: Final = 64


@dataclass(frozen=True, slots=True)
class _Shelf:
    """What a reader sees: the first rows of arrays that have room for more. A row is a record, alive or dead.

    A writer adds behind these rows, or copies to larger arrays, and then publishes another shelf. In rows that are
    seen, these change: `living` and the vector, which becomes zero, when a record dies; `own`, when it becomes known.
    """

    tokens: Tokens  # [t]
    starts: Ints  # [rows + 1]
    vectors: Vectors  # [rows, D]
    numbers: Ints  # [rows], rising
    living: Flags  # [rows]
    own: Floats  # [rows]: how sure the record's own answer is; NaN: not known
    room: _Arrays  # the whole arrays
    alive: int

    @classmethod
    def empty(cls, rows: int, tokens: int, dimensions: int) -> _Shelf:
        """Without rows, with room for so many rows and tokens."""
        room = (
            np.zeros(tokens, np.int32),
            np.zeros(rows + 1, np.int64),
            np.zeros((rows, dimensions), np.float32),
            np.zeros(rows, np.int64),
            np.zeros(rows, np.bool_),
            np.full(rows, np.nan, np.float32),
        )
        return cls(*_parts(room, 0, 0), room, 0)

    def has_room(self, tokens: int, rows: int) -> bool:
        return len(self.numbers) + rows <= len(self.room[3]) and len(self.tokens) + tokens <= len(self.room[0])

    def with_rows(self, tokens: Tokens, lengths: Ints, vectors: Vectors, numbers: Ints, own: Floats) -> _Shelf:
        """Rows more, their tokens one behind the other; there must be room."""
        row, end = len(self.numbers), len(self.tokens) + len(tokens)
        rows = slice(row, row + len(numbers))
        all_tokens, starts, all_vectors, all_numbers, living, all_own = self.room
        all_tokens[len(self.tokens) : end] = tokens
        starts[rows.start + 1 : rows.stop + 1] = len(self.tokens) + np.cumsum(lengths)
        all_vectors[rows], all_numbers[rows], living[rows], all_own[rows] = vectors, numbers, True, own
        return _Shelf(*_parts(self.room, rows.stop, end), self.room, self.alive + len(numbers))

    def larger(self, tokens: int, more: int) -> _Shelf:
        """The living rows in new arrays, with as much room again, and for so many tokens and rows more."""
        lengths, kept = np.diff(self.starts), self.living
        own, rows = self.tokens[np.repeat(kept, lengths)], int(kept.sum())
        room = _Shelf.empty(max(FEWEST, 2 * rows + more), 2 * (len(own) + tokens), self.vectors.shape[1]).room
        room[0][: len(own)] = own
        room[1][1 : rows + 1] = np.cumsum(lengths[kept])
        room[2][:rows], room[3][:rows], room[4][:rows] = self.vectors[kept], self.numbers[kept], True
        room[5][:rows] = self.own[kept]
        return _Shelf(*_parts(room, rows, len(own)), room, rows)

    def rows_of(self, numbers: Ints) -> Ints:
        """The rows of records; -1 for those that are not here, or dead."""
        if len(self.numbers) == 0:
            return np.full_like(numbers, -1)
        rows = np.searchsorted(self.numbers, numbers).clip(max=len(self.numbers) - 1)
        return np.where((self.numbers[rows] == numbers) & self.living[rows], rows, -1)

    def row_of(self, number: int) -> int:
        """The row of a record; KeyError if there is none."""
        row = int(self.rows_of(np.array([number], np.int64))[0])
        if row < 0:
            raise KeyError(f"there is no record {number}")
        return row

    def numbers_of(self, rows: Ints) -> Ints:
        """The numbers of rows; -1 stays."""
        return np.where(rows >= 0, self.numbers[rows], -1) if len(self.numbers) else rows

    def tokens_of(self, row: int) -> Tokens:
        return self.tokens[self.starts[row] : self.starts[row + 1]]


def _parts(room: _Arrays, rows: int, tokens: int) -> _Arrays:
    """The first of these arrays, for so many rows and tokens."""
    return room[0][:tokens], room[1][: rows + 1], room[2][:rows], room[3][:rows], room[4][:rows], room[5][:rows]


class _Graph:
    """Numbers and vectors of records in a graph of hnswlib. It may be behind: records from `next` on are missing.

    hnswlib must not search while it adds, so one thread at a time does either.
    """

    def __init__(self, dimensions: int) -> None:
        import hnswlib

        self._index: Any = hnswlib.Index("ip", dimensions)
        self._index.init_index(
            GRAPH_FROM, ef_construction=EF_CONSTRUCTION, M=LINKS, random_seed=0, allow_replace_deleted=True
        )
        self._size = 0
        self._lock = thread_lock()
        self.next = 0

    def catch_up(self, shelf: _Shelf, most: int) -> None:
        """Add the next records of the shelf, so many at most. Places of removed records are used again."""
        first = int(np.searchsorted(shelf.numbers, self.next))
        for row in range(first, min(first + most, len(shelf.numbers))):
            number = int(shelf.numbers[row])
            if shelf.living[row]:
                with self._lock:
                    if self._index.get_current_count() == self._index.get_max_elements():
                        self._index.resize_index(2 * self._index.get_max_elements())
                    self._index.add_items(shelf.vectors[row][None], [number], num_threads=1, replace_deleted=True)
                    self._size += 1
            self.next = number + 1

    def remove(self, number: int) -> None:
        if number < self.next:
            with self._lock:
                self._index.mark_deleted(number)
                self._size -= 1

    def search(self, vectors: Vectors, k: int) -> Ints | None:
        """Numbers of the nearest, best first, int64 ``[B, k]``, -1 at the end; None: the graph cannot tell."""
        with self._lock:
            found = min(k, self._size)
            if found == 0:
                return None
            self._index.set_ef(max(EF_SEARCH, 2 * found))
            try:
                numbers, distances = self._index.knn_query(vectors, found, num_threads=1)
            except RuntimeError:  # so many records were removed that it cannot reach as many as were asked for
                return None
        known = np.where(distances < 1.0, numbers.astype(np.int64), -1)  # a distance is 1 - product
        return np.pad(known, ((0, 0), (0, k - found)), constant_values=-1)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Records near the inputs of a batch, as the collection was when it was asked."""

    shelf: _Shelf
    rows: Ints  # [B, k]; -1: none. First the one with the very tokens of the input, if there is one

    def without(self, inputs: Flags) -> Candidates:
        """Return the same without a record for these inputs, ``[B]``."""
        return replace(self, rows=np.where(inputs[:, None], -1, self.rows))


class TokenIndex:
    """Records by their tokens: add them, remove them, ask which are near, and what the nearest supply.

    Any number of threads may ask while others add and remove: a lookup sees the collection as it was when it began.
    So it may name a record that was removed meanwhile. No number is used twice, so such a number is known as stale.

    Attributes
    ----------
    next : int
        The number of the record that is added next.

    Notes
    -----
    Two tokens are the same if their ids are: a caller that has token types combines both into one int32. Few records
    are all compared with an input; from `GRAPH_FROM` on a graph of hnswlib is searched. It is filled by
    and by, a few records with each one that is added.
    """

    def __init__(self) -> None:
        self.sketch = Sketch()
        self._shelf = _Shelf.empty(FEWEST, 64 * FEWEST, self.sketch.dimensions)
        self._same: dict[int, tuple[int, ...]] = {}  # numbers of records by the hash of their tokens
        self._graph: _Graph | None = None
        self.next = 0
        self._writing = thread_lock()

    def __len__(self) -> int:
        return self._shelf.alive

    def __contains__(self, number: int) -> bool:
        return bool(self._shelf.rows_of(np.array([number], np.int64))[0] >= 0)

    def add(self, tokens: Tokens) -> int:
        """Add a record, int32 ``[n]``; returns its number. One thread adds at a time. ValueError: other tokens."""
        self.extend([tokens], [self.next])
        return self.next - 1

    def extend(
        self, records: Sequence[Tokens], numbers: Sequence[int], sure: Sequence[float] | None = None
    ) -> None:
        """Add records under numbers of one's own, which rise. ValueError: other tokens, or a number below `next`.

        `sure`: how sure the own answer of each is; NaN: not known.
        """
        if not records:
            return
        own, size, rows = np.asarray(numbers, np.int64), sum(map(len, records)), len(records)
        known = np.full(rows, np.nan) if sure is None else np.asarray(sure)
        with self._writing:
            if own[0] < self.next or (np.diff(own) <= 0).any():
                raise ValueError(f"numbers of records rise, from {self.next} on; seen {own[:8].tolist()}…")
            shelf = self._shelf
            if not shelf.has_room(size, rows):
                shelf = shelf.larger(size, rows)
            for row in range(0, rows, BLOCK):
                block = records[row : row + BLOCK]
                tokens, lengths = np.concatenate(block), np.array([len(one) for one in block], np.int64)
                starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
                part = slice(row, row + BLOCK)
                shelf = shelf.with_rows(tokens, lengths, self.sketch(tokens, starts), own[part], known[part])
            self.next = int(own[-1]) + 1
            for one, number in zip(records, own.tolist(), strict=True):  # first: what a shelf has is known here
                key = hash_of(one)
                self._same[key] = (*self._same.get(key, ()), number)
            self._shelf = shelf  # all of them at once
            self._link(LINKED * rows if rows < FEWEST else LINKED)

    def note_sureness(self, numbers: Sequence[int], sure: Sequence[float]) -> None:
        """Note how sure the own answers of records are. Records that are gone are passed over."""
        with self._writing:
            shelf = self._shelf
            rows = shelf.rows_of(np.asarray(numbers, np.int64))
            shelf.own[rows[rows >= 0]] = np.asarray(sure, np.float32)[rows >= 0]

    def link(self, most: int) -> bool:
        """Let the graph catch up by so many records; False: it has them all, or there is none.

        For a thread that has time. Whatever adds records does a little of it too.
        """
        with self._writing:
            self._link(most)
            return self._graph is not None and self._graph.next < self.next

    def _link(self, most: int) -> None:
        if self._graph is None and len(self) >= GRAPH_FROM:
            self._graph = _Graph(self.sketch.dimensions)
        if self._graph is not None:
            self._graph.catch_up(self._shelf, most)

    def leave_to_parent(self) -> None:
        """In a forked child."""
        self._graph = None  # a thread of the parent may have been inside of it; it is made anew by and by

    def numbers(self) -> list[int]:
        """All records."""
        shelf = self._shelf
        found: list[int] = shelf.numbers[shelf.living].tolist()
        return found

    def remove(self, number: int) -> None:
        """Forget a record; KeyError if there is no such record. Its memory is used again when the arrays are full."""
        with self._writing:
            shelf = self._shelf
            row = shelf.row_of(number)
            shelf.living[row] = False
            shelf.vectors[row] = 0.0  # never found again: only positive products are
            self._shelf = replace(shelf, alive=shelf.alive - 1)
            key = hash_of(shelf.tokens_of(row))
            left = tuple(other for other in self._same.get(key, ()) if other != number)
            if left:
                self._same[key] = left
            else:
                self._same.pop(key, None)
            if self._graph is not None:
                self._graph.remove(number)

    def tokens_of(self, number: int) -> Tokens:
        """The tokens of a record, a copy; KeyError if there is no such record."""
        shelf = self._shelf
        return shelf.tokens_of(shelf.row_of(number)).copy()

    def lengths_of(self, numbers: Ints) -> Ints:
        """Return the tokens of records ``[B]``; 0 where there is no such record."""
        shelf = self._shelf
        rows = shelf.rows_of(numbers)
        return np.where(rows >= 0, shelf.starts[rows + 1] - shelf.starts[rows], 0)

    def best(
        self, tokens: Tokens, starts: Ints, rule: Rule = DEFAULT, tried: int = TRIED, kinds: Kinds = NO_KINDS
    ) -> RowPlan:
        """Return the plan that any record may serve: of the `tried` nearest the one with the fewest rows."""
        return self.plan(tokens, starts, self.candidates(tokens, starts, tried), rule, kinds, ANY)

    def candidates(self, tokens: Tokens, starts: Ints, tried: int = TRIED) -> Candidates:
        """Return what is near: the first half of a plan. An input with a record of just its tokens needs no other."""
        shelf = self._shelf
        same = self._same_rows(shelf, tokens, starts)[:, None]
        if same.size and same.min() >= 0:
            return Candidates(shelf, same)
        return Candidates(shelf, np.concatenate([same, self._rows(shelf, tokens, starts, tried)], 1))

    def plan(
        self, tokens: Tokens, starts: Ints, candidates: Candidates, rule: Rule, kinds: Kinds, demand: Demand,
        table: Table = NOTHING_KNOWN,
    ) -> RowPlan:  # fmt: skip
        """Return which of these candidates serve: the second half. See `attmemo.kernels.plan`.

        `record` has numbers of records. A record of just the tokens of an input supplies all of them.
        """
        shelf = candidates.shelf
        found = plan(
            tokens, starts, candidates.rows, shelf.tokens, shelf.starts, shelf.own, kinds, rule, demand, table
        )
        return replace(found, record=shelf.numbers_of(found.record))

    def same(self, tokens: Tokens) -> int:
        """Return the number of a record of just these tokens; -1: there is none."""
        shelf = self._shelf
        row = int(self._same_rows(shelf, tokens, np.array([0, len(tokens)], np.int64))[0])
        found = row >= 0 and np.array_equal(shelf.tokens_of(row), tokens)
        return int(shelf.numbers[row]) if found else -1

    def _same_rows(self, shelf: _Shelf, tokens: Tokens, starts: Ints) -> Ints:
        """Return rows whose tokens have the hash of each input, ``[B]``: nearly always just its tokens."""
        ends, data, known = starts.tolist(), np.ascontiguousarray(tokens).data.cast("B"), self._same
        numbers = list[int]()
        for begin, end in pairwise(ends):
            numbers.append(known.get(xxh3_64_intdigest(data[4 * begin : 4 * end]), _NO_NUMBERS)[0])
        return shelf.rows_of(np.array(numbers, np.int64))

    def _rows(self, shelf: _Shelf, tokens: Tokens, starts: Ints, k: int) -> Ints:
        """Rows of the k records with the nearest sketches, best first, then -1: int64 ``[B, k]``.

        Records that share nothing with an input are not found.
        """
        vectors, graph = self.sketch(tokens, starts), self._graph
        if graph is not None and len(shelf.numbers) and graph.next > shelf.numbers[-1]:
            numbers = graph.search(vectors, k)
            if numbers is not None:
                return shelf.rows_of(numbers)
        # torch and not numpy: numpy's threads would fight with torch's for the cores.
        products = torch.mm(torch.from_numpy(vectors), torch.from_numpy(shelf.vectors).T)
        return nearest(products.numpy(), k)


def hash_of(tokens: Tokens) -> int:
    """Return a hash of tokens and their order."""
    return xxh3_64_intdigest(np.ascontiguousarray(tokens).data.cast("B"))
