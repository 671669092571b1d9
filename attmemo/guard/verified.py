"""Which changes have been seen to leave an answer as it was.

A change is what an input has in a slot where its record has something else (`attmemo.kernels.changes`). It is verified
if the same two values were seen there before and the answer stayed, or if both have been harmless there: numbers as
such, words by a chain of changes that leads from one to the other ("up" for "started" and "down" for "stopped" say
nothing of "down" for "up"). A slot is *free* once enough different values were harmless in it: then any value may
stand there. A number is free after few values. A word needs more of them, and then the answer must be surer
(`attmemo.guard.margin`): "Accepted" for "Failed" is hardly more harmless for "Closed" having been.

An answer that changed is held against the slot that is known least. Such a slot needs many more values.

Slots are those of all records together: what is learned about a field of one record holds for the same field of every
other one. Hashes stand for slots and values, so nothing of an input can be read from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

NUMBERS: Final = 2
"""Harmless values that make a slot of numbers free."""
WORDS: Final = 6
"""Harmless values that make a slot of words free."""
PENALTY: Final = 4
"""Times as many values more are needed for each answer that changed."""
MOST: Final = 1 << 18
"""Values that are remembered."""


class Cover(IntEnum):
    """How well the changes of a request are verified."""

    NOT = 0
    FUTILE = 1  # all are verified, but the answer is expected to be too far away, even if more rows are computed
    UNSURE = 2  # all are verified, but the answer is expected below the margin: more rows are computed
    FREELY = 3  # some of them are words in free slots
    FULLY = 4
    SAME = 5  # nothing changed: the answer is the record's own

    @property
    def may_serve(self) -> bool:
        """Whether the record may serve, if the budget affords it."""
        return self > Cover.FUTILE


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
    """

    def __init__(self, free: bool = True) -> None:
        self._free = free
        self._harmless: dict[int, dict[int, int]] = {}  # by slot the values, and the group of each
        self._changes: set[int] = set()  # that left an answer as it was
        self._harmful: set[int] = set()  # changes and values that did not
        self._harm: dict[int, int] = {}  # answers that a slot is blamed for
        self._count = 0  # of harmless values

    def __len__(self) -> int:
        return self._count

    def ask(self, gaps: Gaps) -> Cover:
        """How well all these changes are verified."""
        found = Cover.FULLY
        for slot, value, former, change, word in _rows(gaps):
            harmless = self._harmless.get(slot)
            if harmless is None or change in self._harmful:
                return Cover.NOT
            if change in self._changes:
                continue
            if value in harmless and former in harmless and (not word or harmless[value] == harmless[former]):
                continue
            if value in self._harmful or former in self._harmful:
                return Cover.NOT
            needed = (WORDS if word else NUMBERS) * (1 + PENALTY * self._harm.get(slot, 0))
            if not self._free or len(harmless) < needed:
                return Cover.NOT
            if word:
                found = Cover.FREELY
        return found

    def stayed(self, gaps: Gaps) -> None:
        """These changes, together, left the answer as it was."""
        for slot, value, former, change, _ in _rows(gaps):
            if self._count >= MOST or change in self._harmful:
                continue
            self._join(slot, {value, former} - self._harmful)
            if len(self._changes) < MOST:
                self._changes.add(change)

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
            elif own != group:
                harmless.update((other, group) for other, theirs in harmless.items() if theirs == own)

    def changed(self, gaps: Gaps) -> None:
        """These changes, together, changed the answer: words among them are to blame, or else numbers."""
        rows = _rows(gaps)
        suspects = [row for row in rows if row[4]] or rows
        known = {slot: len(self._harmless.get(slot, ())) for slot, *_ in suspects}
        blamed = {slot for slot, values in known.items() if values == min(known.values())}
        for slot in blamed:  # once, however many gaps lie in the slot, as those of a time of day do
            self._harm[slot] = self._harm.get(slot, 0) + 1
        guilty = [row for row in suspects if row[0] in blamed]
        self._forbid({value for _, value, *_ in guilty} | {change for *_, change, _ in guilty})

    def _forbid(self, harmful: set[int]) -> None:
        self._harmful |= harmful
        self._changes -= harmful
        for harmless in self._harmless.values():
            for value in harmful & harmless.keys():
                del harmless[value]
        self._count = sum(map(len, self._harmless.values()))

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
        self._changes |= set(state["changes"][: MOST - len(self._changes)].tolist())
        for slot, harm in state["harm"].tolist():
            self._harm[slot] = max(self._harm.get(slot, 0), harm)
        self._forbid(set(state["harmful"].tolist()) | self._harmful)


def _rows(gaps: Gaps) -> list[tuple[int, int, int, int, int]]:
    """Slot, value, former value, change and kind of each gap."""
    columns = (gaps.slot, gaps.value, gaps.former, gaps.change, gaps.word)
    return list(zip(*(column.tolist() for column in columns), strict=True))
