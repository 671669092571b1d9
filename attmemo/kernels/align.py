"""Which rows of a stored record serve a new input, and which records are near: rules, and oracles of C kernels.

Tokens of an input and of a record are paired by their longest common subsequence. A token with a partner takes the
rows of its partner, the others are computed: `aligned` is the oracle of `native/pairing.h`. `sketch` and `nearest` are
C kernels (`native/sketch.c`); `sketch_in_numpy` and `nearest_in_numpy` give the very same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from attmemo.errors import ArgumentError
from attmemo.kernels import _sketch
from attmemo.kernels.kinds import NO_KINDS, Kinds, is_word

Tokens = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]
Planned = TypeVar("Planned", bound="Alignment")

LONG = 3
"""Tokens without a partner, side by side, from which on two tokens in front of them are computed."""

LONGEST = 8192
"""Most tokens of an input or a record that are aligned in the middle too."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Which rows are computed beside those of tokens without a partner.

    Attributes
    ----------
    near : int
        So many neighbours of each token without a partner, on both sides.
    near_numbers : int or None
        The same, where no word is without a partner, neither of the input nor of the record: only numbers changed.
        None: `near`.
    most_moved : int or None
        Two tokens whose positions differ by more are no pair. None: any two may be.
    edges : bool
        The first token of a block that follows another block at once, at another offset.
    ends : bool
        The first and the last token.
    before_long : bool
        One more in front of `LONG` and more tokens without a partner. Not known to the kernel: see `with_long`.
    """

    near: int = 1
    near_numbers: int | None = None
    most_moved: int | None = None
    edges: bool = True
    ends: bool = True
    before_long: bool = False

    def __post_init__(self) -> None:
        for name, value in (
            ("near", self.near), ("near_numbers", self.near_numbers), ("most_moved", self.most_moved)
        ):  # fmt: skip
            if value is None and name != "near":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
                what = f"{name} must be a whole number of tokens and must not be negative; got {value!r}."
                raise ArgumentError(what, f"{name}=1")

    @classmethod
    def of(cls, near: int | None, most_moved: int | None = None) -> Rule:
        """The rule that `attmemo.memoize` takes for these arguments. ArgumentError: a number is negative."""
        return cls(most_moved=most_moved) if near is None else cls(near, near, most_moved)

    def for_classes(self) -> Rule:
        """The rule where answers are classes that a model's head reads from the first row, if `near_numbers` is open.

        Then numbers have no neighbours: the first row is always computed, and sees the new numbers in every layer. A
        mean of all rows is read from the neighbours too, and those would not have seen the numbers.
        """
        return replace(self, near_numbers=0) if self.near_numbers is None else self

    def for_unguarded(self) -> Rule:
        """The rule where no guard looks at the answers, if `near_numbers` is open: nearer ones, for few rows more."""
        return replace(self, before_long=True) if self.near_numbers is None else self

    def near_where(self, words: bool) -> int:
        """Neighbours that are computed; `words`: a word is without a partner."""
        return self.near if words or self.near_numbers is None else self.near_numbers


@dataclass(frozen=True, slots=True)
class Alignment:
    """The best record of each of B inputs, and what it supplies.

    Attributes
    ----------
    record : int64 [B]
        The candidate with the fewest rows to compute, the first of equals; -1: there was none.
    source : int32 [tokens]
        For each token of the inputs the row of its record that supplies it; below 0: computed. -1: the record has no
        such token; -2 - r: row r of the record is computed anew.
    computed : int64 [B]
        Rows to compute.
    """

    record: Ints
    source: Tokens
    computed: Ints


def aligned(own: list[int], record: list[int], rule: Rule, kinds: Kinds = NO_KINDS) -> list[int]:
    """For each token of an input the row of a record that supplies it, as `Alignment.source` has it: slow and plain.

    The pairs are a longest common subsequence; `native/pairing.h` says which.
    """
    partner = pairs(own, record, rule.most_moved)
    left = [token for token, place in zip(own, partner, strict=True) if place < 0]
    left += [token for place, token in enumerate(record) if place not in partner]
    return _ruled(partner, rule, rule.near_where(any(is_word(kinds, token) for token in left)))


def pairs(own: list[int], record: list[int], most_moved: int | None = None) -> list[int]:
    """For each token of `own` the position of its partner in `record`, or -1."""

    def equal(i: int, j: int) -> bool:
        return record[i] == own[j] and (most_moved is None or abs(i - j) <= most_moved)

    n, m = len(own), len(record)
    prefix = suffix = 0
    while prefix < min(n, m) and equal(prefix, prefix):
        prefix += 1
    while suffix < min(n, m) - prefix and equal(m - 1 - suffix, n - 1 - suffix):
        suffix += 1
    partner = [*range(prefix), *[-1] * (n - suffix - prefix), *range(m - suffix, m)]
    if max(n, m) <= LONGEST:
        present = set(own)
        rows = [i for i in range(prefix, m - suffix) if record[i] in present]
        _pair_middle(partner, rows, range(prefix, n - suffix), equal)
    here = there = 0  # behind the last pair: in own, in the record
    for j in range(n):
        if partner[j] >= 0:
            moves = (here, there) != (j, partner[j]) and own[here] == record[there]
            new, old = (here, there) if moves else (j, partner[j])
            partner[j] = -1
            partner[new] = old
            here, there = new + 1, old + 1
    return partner


def _pair_middle(partner: list[int], rows: list[int], columns: range, equal: Callable[[int, int], bool]) -> None:
    """Pairs of the longest common subsequence of these rows of the record and these columns of the input."""
    length = [[0] * (len(columns) + 1)]
    for i in rows:
        above, row = length[-1], [0]
        for c, j in enumerate(columns):
            row.append(above[c] + 1 if equal(i, j) else max(above[c + 1], row[c]))
        length.append(row)
    r, c = len(rows), len(columns)
    while r and c:
        if equal(rows[r - 1], columns[c - 1]):
            r, c = r - 1, c - 1
            partner[columns[c]] = rows[r]
        elif length[r][c - 1] == length[r][c]:
            c -= 1
        else:
            r -= 1


def _ruled(partner: list[int], rule: Rule, near: int) -> list[int]:
    """`partner`, with -2 - partner for those that the rule has computed."""
    n = len(partner)
    single = [j for j in range(n) if partner[j] < 0]
    computed = {k for j in single for k in range(max(0, j - near), min(n, j + near + 1))}
    if rule.edges:
        computed |= {j for j in range(1, n) if -1 < partner[j] != partner[j - 1] + 1 > 0}
    if rule.ends and n:
        computed |= {0, n - 1}
    return [-2 - own if j in computed and own >= 0 else own for j, own in enumerate(partner)]


def with_long(found: Planned, starts: Ints) -> Planned:
    """The same, with one row more computed in front of `LONG` and more tokens without a partner.

    Tokens there look most at what changed (docs/rows.md). They do not count against the record: whether it supplies
    enough, and which one is best, is known before.
    """
    single = found.source == -1
    sequence = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    long = single[2 : len(single) - LONG + 1].copy()  # from the third token on: whether LONG of them begin here
    for ahead in range(1, LONG):
        long &= single[2 + ahead : len(single) - LONG + 1 + ahead]
    long &= ~single[1 : 1 + len(long)]
    long &= sequence[2 + LONG - 1 :][: len(long)] == sequence[: len(long)]
    places = np.flatnonzero(long)  # two tokens in front
    places = places[found.source[places] >= 0]
    source = found.source.copy()
    source[places] = -2 - source[places]
    more = np.bincount(sequence[places], minlength=len(starts) - 1)
    return replace(found, source=source, computed=found.computed + more)


def sketch(tokens: Tokens, starts: Ints, dimensions: int) -> npt.NDArray[np.float32]:
    """Sums of random signs as vectors of length 1, or 0 if there is nothing to add: float32 ``[B, dimensions]``.

    For each token of a sequence its signs are added, for each pair of neighbours two times its signs. Signs are bits
    of a hash: they need no table and are the same on every machine. `tokens` int32 ``[n]`` are those of all sequences,
    `starts` int64 ``[B + 1]`` where each begins, and n; `dimensions` is a multiple of 64, at most 1024. ValueError:
    other arrays or dimensions.
    """
    vectors = np.empty((len(starts) - 1, dimensions), np.float32)
    _sketch.sketch(tokens, starts, vectors)
    return vectors


def nearest(scores: npt.NDArray[np.float32], k: int) -> Ints:
    """The columns of the k highest scores above zero of each row, int64 ``[B, k]``: best first, then -1.

    The lower column of two equal scores is first. ValueError: k is below 1, or scores are no float32 ``[B, R]``.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1; seen {k}")
    columns = np.empty((len(scores), k), np.int64)
    _sketch.nearest(scores, columns)
    return columns


def nearest_in_numpy(scores: npt.NDArray[np.float32], k: int) -> Ints:
    """What `nearest` returns."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    found = np.where(np.take_along_axis(scores, order, 1) > 0, order, -1)
    padded: Ints = np.pad(found, ((0, 0), (0, k - found.shape[1])), constant_values=-1).astype(np.int64)
    return padded


def sketch_in_numpy(tokens: Tokens, starts: Ints, dimensions: int) -> npt.NDArray[np.float32]:
    """What `sketch` returns."""
    ids = tokens.astype(np.uint32).astype(np.uint64)
    sums = np.zeros((len(starts) - 1, dimensions), np.int32)
    for b, (start, stop) in enumerate(pairwise(starts)):
        own = ids[start:stop]
        couples = ~(own[:-1] << np.uint64(32) | own[1:])
        sums[b] = _signs(own + np.uint64(1), dimensions) + 2 * _signs(couples, dimensions)
    # The squares of whole numbers: their sum is exact in float64, so the order of adding does not matter.
    lengths = np.sqrt(np.einsum("bd,bd->b", sums, sums, dtype=np.float64))
    vectors: npt.NDArray[np.float32] = sums.astype(np.float32)
    vectors *= np.where(lengths > 0, 1.0 / np.maximum(lengths, 1.0), 0.0).astype(np.float32)[:, None]
    return vectors


def _signs(features: npt.NDArray[np.uint64], dimensions: int) -> npt.NDArray[np.int64]:
    """Sum of the signs of all features: ``[dimensions]``."""
    lanes = np.arange(1, dimensions // 64 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words = _mix(_mix(features)[:, None] + lanes).astype("<u8")
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    sums: npt.NDArray[np.int64] = (2 * bits.astype(np.int64) - 1).sum(0)
    return sums


def _mix(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    numbers = (numbers ^ numbers >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return numbers ^ numbers >> np.uint64(31)
