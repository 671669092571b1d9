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

from torch import Tensor, nn

from attmemo.guard.answers import Answer
from attmemo.guard.guard import Guard
from attmemo.kernels.changes import Changes
from attmemo.system.locking import ThreadLock

Model = Callable[..., Any]
"""The `forward` of a whole model, head and all."""
Inputs = tuple[Any, Any]
"""Positional arguments and those by name."""

MOST: Final = 64
"""Answers that may be owed. They are few, for their arguments stay in memory."""
_IDS: Final = "input_ids"


@dataclass(frozen=True, slots=True)
class Debt:
    """One answer that was served from a record."""

    forward: Model
    inputs: Inputs  # for this sequence alone
    mask: Tensor | None  # [1, L]
    answer: Answer  # alone
    changes: Changes
    evidence: int
    epoch: int  # of the guard, when it decided
    guard: Guard
    stamp: object  # of the model (`stamp_of`)
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
        """The oldest debts, to be paid now.

        Those that a forked child found are its parent's: they are forgotten.

        Parameters
        ----------
        most : int
            So many at most.
        """
        with self._lock:
            taken = [self._debts.popleft() for _ in range(min(most, len(self._debts)))]
        return [debt for debt in taken if debt.process == os.getpid()]

    def forget(self) -> None:
        """Owe nothing any more."""
        with self._lock:
            self._debts.clear()


def stamp_of(model: nn.Module) -> object:
    """What changes when a model's weights do, or when it begins to train; None while it trains."""
    if model.training:
        return None
    weights = (*model.parameters(), *model.buffers())
    return [(one.data_ptr(), 0 if one.is_inference() else one._version) for one in weights]


@dataclass(frozen=True, slots=True)
class Batch:
    """Debts that one forward pays."""

    debts: list[Debt]
    inputs: Inputs
    mask: Tensor | None


def batches(debts: Sequence[Debt], pad: int | None) -> list[Batch]:
    """Debts, grouped by what one forward can compute.

    Parameters
    ----------
    debts : sequence of Debt
    pad : int or None
        The id of padding, which shorter sequences get on the right; None: only sequences of one padded length are
        computed together.
    """
    groups: list[list[Debt]] = []
    for debt in debts:
        group = next((one for one in groups if _joined_or_none([one[0], debt], pad) is not None), None)
        if group is None:
            groups.append([debt])
        else:
            group.append(debt)
    found = []
    for group in groups:
        joined = _joined_or_none(group, pad) if len(group) > 1 else None
        if joined is None:
            found += [Batch([debt], debt.inputs, debt.mask) for debt in group]
        else:
            found.append(Batch(group, joined[:2], joined[2]))
    return found


def _joined_or_none(debts: Sequence[Debt], pad: int | None) -> tuple[Any, Any, Tensor] | None:
    """Arguments and mask of one forward for all of these; None: there is no such forward."""
    first, lengths = debts[0], [0 if debt.mask is None else int(debt.mask.shape[1]) for debt in debts]
    if any(debt.mask is None or debt.forward != first.forward for debt in debts):
        return None
    if pad is None and len(set(lengths)) > 1:
        return None
    try:
        args, kwargs = _joined([debt.inputs for debt in debts], lengths, pad or 0)
        mask = _stacked([debt.mask for debt in debts], lengths, 0)
    except Exception:  # of another form, or values that cannot be compared: they are computed one by one
        return None
    return args, kwargs, mask


def _joined(values: Sequence[Any], lengths: Sequence[int], pad: int, name: str | None = None) -> Any:
    """One argument for all sequences, of these padded lengths. ValueError: they make no batch.

    Ids get the id of padding; types, positions and masks get 0: behind a mask of 0 nothing reads them. An argument
    without a name may be either: it gets no padding.
    """
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        raise ValueError("different types")
    if isinstance(first, Tensor):
        if name is None and len(set(lengths)) > 1:
            raise ValueError("it is not known what this is")
        return _stacked(values, lengths, pad if name == _IDS else 0)
    if isinstance(first, Mapping):
        if any(value.keys() != first.keys() for value in values):
            raise ValueError("different names")
        return {key: _joined([value[key] for value in values], lengths, pad, key) for key in first}
    if type(first) in (tuple, list):
        return type(first)(_joined(part, lengths, pad, name) for part in zip(*values, strict=True))
    if any(value is not first and value != first for value in values):
        raise ValueError("different values")
    return first


def _stacked(tensors: Sequence[Any], lengths: Sequence[int], pad: int) -> Tensor:
    if any(tuple(one.shape) != (1, length) for one, length in zip(tensors, lengths, strict=True)):
        raise ValueError("not a number for each token")
    if any(one.dtype != tensors[0].dtype or one.is_floating_point() for one in tensors):
        raise ValueError("no whole numbers")
    found: Tensor = tensors[0].new_full((len(tensors), max(lengths)), pad)
    for row, one in zip(found, tensors, strict=True):
        row[: one.shape[1]] = one[0]
    return found
