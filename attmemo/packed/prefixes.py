"""Prefixes: what sequences of a batch begin with alike. Where a token sees those before alone, it is computed once.

A row of a causal block depends on the rows up to its own. So of sequences that begin with the same embedded rows, one
computes these rows, and the others read its K and V where they lie. For ids, and cuts anywhere::

    0: 7 7 7 1 2        computes five rows
    1: 7 7 7 1 3        computes the last, and reads four of 0
    2: 7 7 7 4          computes the last, and reads three of 0

In the order of their rows each sequence has most in common with the one before: so a walk over neighbours finds all
(RadixMLP, arXiv 2601.15013, folds a batch into the same trie). Sequences are cut at multiples of `CUT` alone, where
the attention kernel promises the bits of whole sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attmemo.kernels.row_attention import Layout

Ints = npt.NDArray[np.int64]
Sources = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64] | npt.NDArray[np.uint8]

CUT: Final = 16
"""Tokens: as in `native/row_attention.c`."""

MARK: Final = 8
"""Bytes of a row by which rows are told apart at first: of words they differ."""


class Embedded:
    """Embedded rows of a batch as bytes.

    Parameters
    ----------
    hidden : Tensor
        ``[B, L, H]``.
    lengths : sequence of int
        Valid tokens of each sequence, at least 1.
    left : bool
        Whether padding is on the left of them.
    """

    def __init__(self, hidden: Tensor, lengths: Sequence[int], left: bool) -> None:
        rows = octets_of(hidden if hidden.stride(-1) == 1 else hidden.contiguous())
        self._rows: Words = rows.view(np.uint64) if rows.shape[-1] % 8 == 0 else rows
        marks = np.ascontiguousarray(rows[:, :, :MARK])
        self.padded, self.lengths = rows.shape[1], list(lengths)
        self.begins = [self.padded - n if left else 0 for n in lengths]
        self.marks = [
            marks[b, at : at + n].tobytes() for b, (at, n) in enumerate(zip(self.begins, lengths, strict=True))
        ]

    def of(self, sequence: int, begin: int, stop: int) -> Words:
        """Some rows of a sequence, ``[stop - begin, words]``."""
        at = self.begins[sequence]
        return self._rows[sequence, at + begin : at + stop]

    def alike(self, one: int, other: int) -> int:
        """How many rows two sequences begin with alike, cut."""
        first, second = self.marks[one], self.marks[other]
        if first[: CUT * MARK] != second[: CUT * MARK] or min(len(first), len(second)) < CUT * MARK:
            return 0
        count = min(len(first), len(second)) // MARK
        marks = (np.frombuffer(marks, np.uint64, count) for marks in (first, second))
        stop = cut(first_of(np.not_equal(*marks)))
        own, its = (self.of(b, 0, stop) for b in (one, other))
        return stop if np.array_equal(own, its) else cut(first_of((own != its).any(1)))


def octets_of(rows: Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of rows on the CPU."""
    found: npt.NDArray[np.uint8] = rows.detach().view(torch.uint8).numpy()
    return found


def first_of(found: npt.NDArray[np.bool_]) -> int:
    """Where the first True is; behind the end if there is none."""
    return int(found.argmax()) if found.any() else len(found)


def cut(rows: int) -> int:
    """So many rows of them a sequence may begin with that another one has too."""
    return rows // CUT * CUT


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Which rows of a batch are computed.

    Attributes
    ----------
    order : list of int
        The sequences, each behind the one that it has most in common with.
    begins : int64 [B]
        The first row of each that is computed; `CUT` divides it.
    before : int64 [B]
        The sequence that its rows before that are read from; -1: they are stored, or there are none.
    """

    order: list[int]
    begins: Ints
    before: Ints

    @classmethod
    def of(cls, embedded: Embedded, own: Ints, stored: Ints | None = None) -> Prefixes:
        """The prefixes of some sequences of a batch.

        Parameters
        ----------
        embedded : Embedded
        own : int64 [W]
            The sequences.
        stored : int64 [B], optional
            Rows of each that are there already; `CUT` divides them.
        """
        order = sorted(own.tolist(), key=embedded.marks.__getitem__)
        batch = len(embedded.lengths)
        begins, before = np.zeros(batch, np.int64) if stored is None else stored.copy(), np.full(batch, -1)
        for one, other in pairwise(order):
            alike = embedded.alike(one, other)
            if alike > begins[other]:
                begins[other], before[other] = alike, one
        return cls(order, begins, before)

    def sources(self, lengths: Ints, starts: Ints, slots: Mapping[int, Sources] | None = None) -> dict[int, Sources]:
        """Where the row of each token lies: the number of a computed row, or ``-1 - slot`` of a stored one.

        Parameters
        ----------
        lengths : int64 [B]
            Tokens of each sequence.
        starts : int64 [B]
            The first computed row of each.
        slots : mapping of int to int32 [n]
            Where stored rows of a sequence lie.
        """
        found: dict[int, Sources] = {}
        for b in self.order:
            begin, length = int(self.begins[b]), int(lengths[b])
            found[b] = own = np.empty(length, np.int32)
            if begin:
                own[:begin] = (
                    -1 - slots[b][:begin] if slots and self.before[b] < 0 else found[int(self.before[b])][:begin]
                )
            own[begin:] = np.arange(starts[b], starts[b] + length - begin)
        return found


@dataclass(frozen=True, slots=True)
class Folded:
    """A batch of which rows that sequences share are there once.

    Attributes
    ----------
    layout : Layout
        Of the computed rows, sequences in the order of the batch.
    places : int64 [N]
        Of the computed rows in the flat batch.
    every : int64 [M]
        Of all tokens.
    sources : int32 [M]
        Of all tokens, as `Prefixes.sources` gives them.
    """

    layout: Layout
    places: Ints
    every: Ints
    sources: Sources

    @classmethod
    def of(cls, prefixes: Prefixes, embedded: Embedded, slots: Mapping[int, Sources] | None = None) -> Folded:
        own = np.sort(np.array(prefixes.order, np.int64))
        lengths, begins = np.array(embedded.lengths), prefixes.begins
        some, first = lengths[own], begins[own]
        starts, key_starts = np.zeros((2, len(own) + 1), np.int64)
        np.cumsum(some - first, out=starts[1:])
        np.cumsum(some, out=key_starts[1:])
        computed = np.zeros(len(lengths), np.int64)
        computed[own] = starts[:-1]
        found = prefixes.sources(lengths, computed, slots)
        sources = np.concatenate([found[b] for b in own.tolist()])
        positions = np.arange(key_starts[-1]) - np.repeat(key_starts[:-1], some)
        every = positions + np.repeat(own * embedded.padded + np.array(embedded.begins)[own], some)
        fresh = positions >= np.repeat(first, some)
        layout = Layout(starts, key_starts, positions[fresh].astype(np.int32), sources)
        return cls(layout, every[fresh], every, sources)
