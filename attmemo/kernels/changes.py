"""What changed between an input and its record, in plain Python: the oracle of `native/gaps.h`.

Tokens of an input and of its record are paired (`attmemo.kernels.align`). Where tokens of either have no partner,
there is a gap: tokens of the record were replaced, removed or put in. A gap lies in a *slot*, mostly that behind the
nearest word to the left that both share. "Failed password for root" and "Failed password for guest" differ in the slot
behind "for".

A long text is seldom changed twice at the same place. So some gaps in it are *passages*: gaps of many tokens with a
word among them, and words put in or removed at the end; one token, such as a closing mark, may follow them. Passages
of about the same share of their texts lie in one slot. The words that were removed and put in are one value, in either
direction. The change is one of these two texts alone: the same words in another text are another change.

Slots, values and changes are hashes of token ids, the same on every machine and in every process.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from attmemo.kernels.kinds import IDS, Kinds, is_word

Tokens = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

LONG_TEXT: Final = 64
"""Tokens of an input or its record from which on there are passages."""
PASSAGE: Final = 8
"""Tokens of either, side by side, from which on a gap is a passage."""

_ALL: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Changes:
    """The gaps between the sequences of a batch and their records, in order.

    Attributes
    ----------
    sequence : int64 [g]
        The sequence that each gap lies in, ascending.
    slot : uint64 [g]
        Where the gap lies.
    value : uint64 [g]
        What the input has there, and where; of a passage what both have.
    former : uint64 [g]
        What the record has there, and where; of a passage what both have.
    change : uint64 [g]
        What the record and the input have there, in any order, and where; of a passage the whole texts, too.
    word : uint8 [g]
        1: a token that is a word was replaced, removed or put in.
    """

    sequence: Ints
    slot: Hashes
    value: Hashes
    former: Hashes
    change: Hashes
    word: Kinds

    def of(self, sequence: int) -> Changes:
        """The gaps of one sequence."""
        first, last = np.searchsorted(self.sequence, [sequence, sequence + 1])
        part = slice(int(first), int(last))
        return Changes(*[column[part] for column in self.columns])

    def first(self, count: int) -> Changes:
        """So many gaps from the start."""
        part = slice(count)
        return Changes(
            self.sequence[part], self.slot[part], self.value[part], self.former[part], self.change[part],
            self.word[part],
        )  # fmt: skip

    @property
    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        """All arrays, in the order above."""
        return self.sequence, self.slot, self.value, self.former, self.change, self.word

    def __len__(self) -> int:
        return len(self.sequence)


def changes(
    tokens: Tokens,
    starts: Ints,
    rows: Ints,
    record_tokens: Tokens,
    record_starts: Ints,
    partner: Tokens,
    kinds: Kinds,
) -> Changes:
    """The gaps between sequences and their records.

    Parameters
    ----------
    tokens : int32 [n]
        Token ids of B sequences, one behind the other.
    starts : int64 [B + 1]
        Where each sequence starts, and n.
    rows : int64 [B]
        The record of each sequence; -1: none, and no gaps.
    record_tokens : int32 [t]
        Token ids of the records.
    record_starts : int64 [R + 1]
        Record r is ``record_tokens[record_starts[r] : record_starts[r + 1]]``.
    partner : int32 [n]
        For each token its partner's place in the record, rising in each sequence; -1: none.
    kinds : uint8 [V]
        `NUMBER` or `WORD` for each token id; ids from V on are words.
    """
    gaps: list[tuple[int, int, int, int, int, int]] = []
    for b, (start, stop) in enumerate(pairwise(starts.tolist())):
        if rows[b] < 0:
            continue
        own = tokens[start:stop].tolist()
        record = record_tokens[record_starts[rows[b]] : record_starts[rows[b] + 1]].tolist()
        here = there = 0  # behind the last pair: in the input, in the record
        anchor = -1
        for j, p in [*enumerate(partner[start:stop].tolist()), (len(own), len(record))]:
            if p < 0:
                continue
            if j > here or p > there:
                old, new = record[there:p], own[here:j]
                word = int(any(is_word(kinds, token) for token in old + new))
                slot = _mix((anchor + 1) * 2 + word)
                before, after = _mix(_run(old)), _mix(_run(new))
                text, most = max(len(own), len(record)), max(len(old), len(new))
                at_end = j >= len(own) - 1 and p >= len(record) - 1 and not (old and new)
                if word and text >= LONG_TEXT and (most >= PASSAGE or at_end):
                    slot = _slot_of_passage(text, most)
                    words = _mix(slot + before + after)
                    change = _mix(words + _mix(_run(own)) + _mix(_run(record)))
                    value = former = _mix(words)
                else:
                    change, value, former = _mix(slot + before + after), _mix(slot + after), _mix(slot + before)
                gaps.append((b, slot, value, former, change, word))
            if p < len(record) and is_word(kinds, record[p]):
                anchor = record[p] & IDS
            here, there = j + 1, p + 1
    columns: list[Any] = list(zip(*gaps, strict=True)) if gaps else [()] * 6
    types = (np.int64, np.uint64, np.uint64, np.uint64, np.uint64, np.uint8)
    return Changes(*(np.array(column, kind) for column, kind in zip(columns, types, strict=True)))


def _slot_of_passage(text: int, passage: int) -> int:
    """The slot of a passage: the text has 2^size times as many tokens, or more. No word has such a number."""
    return _mix((1 << 40) + (text // passage).bit_length() - 1)


def _run(tokens: list[int]) -> int:
    """A hash of some tokens in their order."""
    found = len(tokens) + 1
    for token in tokens:
        found = _mix(found * 0x9E3779B97F4A7C15 + (token & 0xFFFFFFFF))
    return found


def _mix(number: int) -> int:
    number &= _ALL
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _ALL
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _ALL
    return number ^ number >> 31
