"""Which changes have been seen to leave an answer as it was.

A change is what an input has in a slot where its record has something else (`attmemo.kernels.changes`). It is verified
if the same two values were seen there before and the answer stayed, or if both have been harmless there: numbers as
such, words by a chain of changes that leads from one to the other ("up" for "started" and "down" for "stopped" say
nothing of "down" for "up"). A slot is *free* once enough different values were harmless in it: then any value may
stand there. A number is free after few values, a word after more of them.

Words that were never exchanged for each other, in a free slot or where a chain alone leads from one to the other, ask
for a surer answer (`attmemo.guard.margin`): "Accepted" for "Failed" is hardly more harmless for "Closed" having been.

An answer that changed is held against the slot that is known least. Such a slot needs many more values.

Slots are those of all records together: what is learned about a field of one record holds for the same field of every
other one. Hashes stand for slots and values, so nothing of an input can be read from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from attmemo.kernels.plan import NOTHING_KNOWN, Evidence, Mark, table_of

Hashes = npt.NDArray[np.uint64]

NUMBERS: Final = 2
"""Harmless values that make a slot of numbers free."""
WORDS: Final = 6
"""Harmless values that make a slot of words free."""
PENALTY: Final = 4
"""Times as many values more are needed for each answer that changed."""
PLENTY: Final = 1024
"""Harmless passages of a slot that are remembered: many times what a slot needs that is blamed again and again."""
MOST: Final = 1 << 18
"""Values that are remembered."""
FEWEST: Final = 64
"""Places of the table at first."""


class Gaps(Protocol):
    """What changed between one input and its record: hashes, as in `attmemo.kernels.changes.Changes`."""

    @property
    def slot(self) -> Hashes: ...
    @property
    def value(self) -> Hashes: ...
    @property
    def former(self) -> Hashes: ...
    @property
    def change(self) -> Hashes: ...
    @property
    def word(self) -> npt.NDArray[np.uint8]: ...


class Verified:
    """Changes that were verified.

    Parameters
    ----------
    free : bool
        Whether slots become free.

    Attributes
    ----------
    needs : (int, int, int)
        Harmless values that make a slot of numbers, and of words, free; times as many more after harm.
    table : Table
        The same for `attmemo.kernels.plan`, which reads it while it grows.
    """

    def __init__(self, free: bool = True) -> None:
        self.needs: tuple[int, int, int] = (NUMBERS, WORDS, PENALTY) if free else (0, 0, 0)
        self._harmless: dict[int, dict[int, int]] = {}  # by slot the values, and the group of each
        self._changes: set[int] = set()  # that left an answer as it was
        self._harmful: set[int] = set()  # changes and values that did not
        self._harm: dict[int, int] = {}  # answers that a slot is blamed for
        self._count = 0  # of harmless values
        self._entries = 0  # of the table
        self.table = NOTHING_KNOWN

    def __len__(self) -> int:
        return self._count

    def ask(self, gaps: Gaps) -> Evidence:
        """Return how well all these changes are known: what the native plan finds in `table`."""
        found = Evidence.FULLY
        for slot, value, former, change, word in _rows(gaps):
            harmless = self._harmless.get(slot, {})
            if change in self._harmful:
                return Evidence.UNKNOWN
            if change in self._changes:
                continue
            if value in harmless and former in harmless and (not word or harmless[value] == harmless[former]):
                found = Evidence.FREELY if word else found
                continue
            if value in self._harmful or former in self._harmful:
                return Evidence.UNKNOWN
            needed = self.needs[word] * (1 + self.needs[2] * self._harm.get(slot, 0))
            if not needed or len(harmless) < needed:
                return Evidence.UNKNOWN
            if word:
                found = Evidence.FREELY
        return found

    def stayed(self, gaps: Gaps) -> None:
        """These changes, together, left the answer as it was."""
        seen = set[int]()
        for slot, value, former, change, _ in _rows(gaps):
            if self._count >= MOST or change in self._harmful:
                continue
            if value == former:  # a passage: one answer is one value, and most of them never come again
                if slot in seen or len(self._harmless.get(slot, ())) >= PLENTY:
                    continue
                seen.add(slot)
            self._join(slot, {value, former} - self._harmful)
            if len(self._changes) < MOST and change not in self._changes:
                self._changes.add(change)
                self._put(change, Mark.CHANGE)

    def _join(self, slot: int, values: Iterable[int]) -> None:
        """These values are harmless in a slot, and so is each in place of another."""
        harmless = self._harmless.setdefault(slot, {})
        group: int | None = None
        for value in values:
            own = harmless.get(value)
            group = (value if own is None else own) if group is None else group
            if own is None:
                harmless[value] = group
                self._count += 1
                self._put(value, Mark.VALUE, group)
            elif own != group:
                groups = [[one for one, its in harmless.items() if its == number] for number in (own, group)]
                group, fewer = (group, groups[0]) if len(groups[0]) < len(groups[1]) else (own, groups[1])
                for other in fewer:  # else each new value would write the large group of a slot anew
                    harmless[other] = group
                    self._put(other, Mark.VALUE, group)
        self._put_slot(slot)

    def blamed(self, gaps: Gaps) -> set[int]:
        """Return the slots that are blamed where these changes, together, changed the answer. Changes nothing."""
        known = {slot: len(self._harmless.get(slot, ())) for slot, *_ in _suspects(gaps)}
        return {slot for slot, values in known.items() if values == min(known.values())}

    def changed(self, gaps: Gaps) -> None:
        """These changes, together, changed the answer: words among them are to blame, or else numbers."""
        suspects, blamed = _suspects(gaps), self.blamed(gaps)
        for slot in blamed:  # once, however many gaps lie in the slot, as those of a time of day do
            self._harm[slot] = self._harm.get(slot, 0) + 1
            self._put_slot(slot)
        guilty = [row for row in suspects if row[0] in blamed]
        self._forbid({value for _, value, *_ in guilty} | {change for *_, change, _ in guilty})

    def _forbid(self, harmful: set[int]) -> None:
        for one in harmful:
            self._put(one, Mark.HARMFUL)
        self._harmful |= harmful
        self._changes -= harmful
        for slot, harmless in self._harmless.items():
            gone = harmful & harmless.keys()
            for value in gone:
                del harmless[value]
            if gone:
                self._put_slot(slot)
        self._count = sum(map(len, self._harmless.values()))

    def _put_slot(self, slot: int) -> None:
        self._put(slot, Mark.SLOT, len(self._harmless.get(slot, ())) | self._harm.get(slot, 0) << 32)

    def _put(self, key: int, mark: Mark, value: int = 0) -> None:
        """Write an entry of the table; a new one is seen once its mark is written."""
        if 2 * (self._entries + 1) > len(self.table.keys):
            marked = np.flatnonzero(self.table.marks)
            keys, marks, data = self.table
            self.table = table_of(keys[marked], marks[marked], data[marked], max(FEWEST, 2 * len(keys)))
        keys, marks, data = self.table
        last = len(keys) - 1
        place = key & last
        while marks[place] and int(keys[place]) != key:
            place = place + 1 & last
        self._entries += not marks[place]
        keys[place], data[place] = key, value
        marks[place] = mark

    def state(self) -> dict[str, Hashes]:
        """All that was learned, as arrays of hashes and counts."""
        values = [(slot, *pair) for slot, harmless in self._harmless.items() for pair in harmless.items()]
        return {
            "changes": np.array(sorted(self._changes), np.uint64),
            "harmful": np.array(sorted(self._harmful), np.uint64),
            "values": np.array(values, np.uint64).reshape(-1, 3),  # slot, value, group
            "harm": np.array(sorted(self._harm.items()), np.uint64).reshape(-1, 2),
        }

    def merge(self, state: Mapping[str, Hashes]) -> None:
        """Learn what another has learned. What was harmful for one is harmful for both."""
        first: dict[tuple[int, int], int] = {}  # value of a group
        for slot, value, group in state["values"].tolist():
            if self._count >= MOST:
                break
            self._join(slot, (first.setdefault((slot, group), value), value))
        for change in state["changes"][: MOST - len(self._changes)].tolist():
            self._changes.add(change)
            self._put(change, Mark.CHANGE)
        for slot, harm in state["harm"].tolist():
            self._harm[slot] = max(self._harm.get(slot, 0), harm)
            self._put_slot(slot)
        self._forbid(set(state["harmful"].tolist()) | self._harmful)


def _rows(gaps: Gaps) -> list[tuple[int, int, int, int, int]]:
    """Slot, value, former value, change and kind of each gap."""
    columns = (gaps.slot, gaps.value, gaps.former, gaps.change, gaps.word)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _suspects(gaps: Gaps) -> list[tuple[int, int, int, int, int]]:
    """The gaps that may have changed an answer: those of words, or else all."""
    rows = _rows(gaps)
    return [row for row in rows if row[4]] or rows
