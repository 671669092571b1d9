"""Which records could serve an input, found by token ids alone: a collection of records' tokens that comes and goes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from attmemo.embed.sketch import Sketch, Vectors
from attmemo.kernels.align import Alignment, Rule, align, nearest

Tokens = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]

FEWEST: Final = 64  # rows there is room for at first
DEFAULT: Final = Rule()


@dataclass(frozen=True, slots=True)
class _Shelf:
    """What a reader sees: the first rows of arrays that have room for more. A row is a record, dead or alive.

    A writer adds behind these rows, or copies to larger arrays, and then publishes another shelf. Only the vectors
    and the numbers of a row that dies are overwritten: with zeros, and with -1.
    """

    tokens: Tokens  # [t]
    starts: Ints  # [rows + 1]
    vectors: Vectors  # [rows, D]
    numbers: Ints  # [rows], rising but for -1
    room: tuple[Tokens, Ints, Vectors, Ints]  # the whole arrays
    alive: int

    @classmethod
    def empty(cls, rows: int, tokens: int, dimensions: int) -> _Shelf:
        """Without rows, with room for so many rows and tokens."""
        room = (
            np.zeros(tokens, np.int32),
            np.zeros(rows + 1, np.int64),
            np.zeros((rows, dimensions), np.float32),
            np.zeros(rows, np.int64),
        )
        return cls(room[0][:0], room[1][:1], room[2][:0], room[3][:0], room, 0)

    def has_room(self, tokens: int) -> bool:
        return len(self.numbers) < len(self.room[3]) and len(self.tokens) + tokens <= len(self.room[0])

    def with_row(self, tokens: Tokens, vector: Vectors, number: int) -> _Shelf:
        """One row more; there must be room."""
        row, end = len(self.numbers), len(self.tokens) + len(tokens)
        room = self.room
        room[0][len(self.tokens) : end] = tokens
        room[1][row + 1], room[2][row], room[3][row] = end, vector, number
        return _Shelf(room[0][:end], room[1][: row + 2], room[2][: row + 1], room[3][: row + 1], room, self.alive + 1)

    def row_of(self, number: int) -> int:
        """The row of a record; KeyError if there is none."""
        rows = np.flatnonzero(self.numbers == number)
        if number < 0 or len(rows) == 0:
            raise KeyError(f"there is no record {number}")
        return int(rows[0])

    def tokens_of(self, row: int) -> Tokens:
        return self.tokens[self.starts[row] : self.starts[row + 1]]


class TokenIndex:
    """Records by their tokens: add them, remove them, ask which are near, and what the nearest supply.

    Any number of threads may ask while one or more add and remove: a lookup sees the collection as it was when it
    began. So it may still name a record that was removed meanwhile, and its number says so: no number is used twice.

    Parameters
    ----------
    sketch : Sketch, optional
        What turns tokens into vectors.

    Notes
    -----
    An id may be any int32: a caller that has token types combines both into one number. Two tokens are the same if
    their ids are. Sketches of all records are compared with those of the inputs: a product of matrices.
    """

    def __init__(self, sketch: Sketch | None = None) -> None:
        self.sketch = sketch or Sketch()
        self._shelf = _Shelf.empty(FEWEST, 64 * FEWEST, self.sketch.dimensions)
        self._next = 0
        self._writing = threading.Lock()

    def __len__(self) -> int:
        return self._shelf.alive

    def __contains__(self, number: int) -> bool:
        return number >= 0 and bool((self._shelf.numbers == number).any())

    def add(self, tokens: Tokens) -> int:
        """Add a record, int32 ``[n]``; returns its number. ValueError: other tokens."""
        vector = self.sketch(tokens, np.array([0, len(tokens)], np.int64))[0]
        with self._writing:
            number = self._next
            shelf = self._shelf if self._shelf.has_room(len(tokens)) else self._larger(len(tokens))
            self._shelf = shelf.with_row(tokens, vector, number)
            self._next += 1
        return number

    def remove(self, number: int) -> None:
        """Forget a record; KeyError if there is no such record. Its memory is used again when the arrays are full."""
        with self._writing:
            shelf = self._shelf
            row = shelf.row_of(number)
            shelf.vectors[row] = 0.0  # never found again: only positive products are
            shelf.numbers[row] = -1
            self._shelf = replace(shelf, alive=shelf.alive - 1)

    def tokens_of(self, number: int) -> Tokens:
        """The tokens of a record, a copy; KeyError if there is no such record."""
        shelf = self._shelf
        return shelf.tokens_of(shelf.row_of(number)).copy()

    def find(self, tokens: Tokens, starts: Ints, k: int = 8) -> Ints:
        """Numbers of the k records with the nearest sketches, best first, then -1: int64 ``[B, k]``.

        `tokens` is int32 ``[n]``, `starts` int64 ``[B + 1]``. Records that share nothing with an input are not found.
        ValueError: other arrays, or k is below 1.
        """
        shelf = self._shelf
        return _numbers(shelf, self._rows(shelf, tokens, starts, k))

    def best(self, tokens: Tokens, starts: Ints, rule: Rule = DEFAULT, tried: int = 4) -> Alignment:
        """Of the `tried` records with the nearest sketches that with the fewest rows to compute, for each input.

        See `attmemo.kernels.align.align`; `record` has numbers of records. ValueError: as `find`.
        """
        shelf = self._shelf
        found = align(tokens, starts, self._rows(shelf, tokens, starts, tried), shelf.tokens, shelf.starts, rule)
        return replace(found, record=_numbers(shelf, found.record))

    def _rows(self, shelf: _Shelf, tokens: Tokens, starts: Ints, k: int) -> Ints:
        """Rows of the shelf, as `find`."""
        inputs = torch.from_numpy(self.sketch(tokens, starts))
        # torch and not numpy: numpy's threads would fight with torch's for the cores.
        products = torch.mm(inputs, torch.from_numpy(shelf.vectors).T)
        return nearest(products.numpy(), k)

    def _larger(self, tokens: int) -> _Shelf:
        """The living rows in new arrays, with as much room again, and for so many tokens more."""
        old = self._shelf
        rows = np.flatnonzero(old.numbers >= 0)
        used = int((old.starts[rows + 1] - old.starts[rows]).sum())
        shelf = _Shelf.empty(max(FEWEST, 2 * len(rows)), 2 * (used + tokens), self.sketch.dimensions)
        for row in rows.tolist():
            shelf = shelf.with_row(old.tokens_of(row), old.vectors[row], int(old.numbers[row]))
        return shelf


def _numbers(shelf: _Shelf, rows: Ints) -> Ints:
    """Numbers of records for rows; -1 stays."""
    if len(shelf.numbers) == 0:
        return rows
    return np.where(rows >= 0, shelf.numbers[rows], -1)
