"""Answers that were served from records and are verified afterwards: what is owed.

The arguments of the model are kept for each such sequence, and the answer that was given. To pay is to run the model
on these arguments without records, and to compare. Debts are in memory only: at the end of the process what is left
is forgotten, and nothing is lost but samples.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from attmemo.guard.answers import Read
from attmemo.locking import ThreadLock
from attmemo.planner.guarded import Chosen

Forward = Callable[..., Any]
Inputs = tuple[Any, Any]
"""Positional arguments and those by name."""

MOST: Final = 64
"""Answers that may be owed. They are few, for their arguments stay in memory."""


@dataclass(frozen=True, slots=True)
class Debt:
    """One answer that was served from a record."""

    forward: Forward
    inputs: Inputs  # for this sequence alone
    mask: Tensor | None  # [1, L]
    answer: Read  # of one sequence
    margin: float | None
    chosen: Chosen
    epoch: int  # of the guard
    process: int = field(default_factory=os.getpid)


class Debts:
    """What one model owes, oldest first."""

    def __init__(self) -> None:
        self._debts: deque[Debt] = deque()
        self._lock = ThreadLock()

    def __len__(self) -> int:
        return len(self._debts)

    @property
    def room(self) -> int:
        """Answers that may be owed beside those that are."""
        return MOST - len(self._debts)

    def add(self, debt: Debt) -> None:
        """Owe one more."""
        with self._lock:
            self._debts.append(debt)

    def take(self, most: int) -> list[Debt]:
        """So many debts, to be paid now. Those that a forked child found are its parent's: they are forgotten."""
        with self._lock:
            taken = [self._debts.popleft() for _ in range(min(most, len(self._debts)))]
        return [debt for debt in taken if debt.process == os.getpid()]

    def forget(self) -> None:
        """Owe nothing any more."""
        with self._lock:
            self._debts.clear()


def batches(debts: Sequence[Debt]) -> list[tuple[list[Debt], Inputs, Tensor | None]]:
    """Debts that can be paid by one forward, with its arguments and its mask."""
    try:
        if len({debt.forward for debt in debts}) == 1 and all(debt.mask is not None for debt in debts):
            lengths = [0 if debt.mask is None else int(debt.mask.shape[1]) for debt in debts]
            args, kwargs, mask = _joined([(*debt.inputs, debt.mask) for debt in debts], lengths)
            return [(list(debts), (args, kwargs), mask)]
    except _ApartError:
        pass
    return [([debt], debt.inputs, debt.mask) for debt in debts]


class _ApartError(Exception):
    """Arguments of different sequences do not make a batch."""


def _joined(values: Sequence[Any], lengths: Sequence[int]) -> Any:
    """One argument for all sequences, of these padded lengths. What holds a number for each token gets more padding.

    The padding of ids, types, positions and masks is 0: behind a mask of 0 the others are not read.
    """
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        raise _ApartError
    if isinstance(first, Tensor):
        return _stacked(values, lengths)
    if isinstance(first, Mapping):
        if any(value.keys() != first.keys() for value in values):
            raise _ApartError
        return {name: _joined([value[name] for value in values], lengths) for name in first}
    if type(first) in (tuple, list):
        if any(len(value) != len(first) for value in values):
            raise _ApartError
        return type(first)(_joined(parts, lengths) for parts in zip(*values, strict=True))
    if any(value is not first and value != first for value in values):
        raise _ApartError
    return first


def _stacked(tensors: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    if any(tuple(one.shape) != (1, length) for one, length in zip(tensors, lengths, strict=True)):
        raise _ApartError
    if any(one.dtype != tensors[0].dtype or one.is_floating_point() for one in tensors):
        raise _ApartError
    found = tensors[0].new_zeros(len(tensors), max(lengths))
    for row, one in zip(found, tensors, strict=True):
        row[: one.shape[1]] = one[0]
    return found
