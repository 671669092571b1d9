"""A forward under a guard: serve, look at the answers, compute again what is too near to call, verify what was chosen.

    the model, with what its caller gave
      some sequences are served from records, the others computed whole
    answers
      served, below the margin ─► the same sequences again, whole; their answers replace the first ones
      to be verified           ─► the same sequences again, from their records; their answers are compared, not given

The model is run again as it is, head and all, on some sequences of its own arguments: so any head can be guarded, and
what is verified is what would be served. A verification that fails costs time, never an answer.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from attmemo.counters import Counters
from attmemo.guard import Answers, Guard, Verdict
from attmemo.guard.answers import Read, cosine
from attmemo.planner.guarded import Asking, Chosen, GuardedPlanner
from attmemo.reuse.rows import Rows

_LOG = logging.getLogger("attmemo")

Forward = Callable[..., Any]

MOST: Final = 1 << 16
"""Answers of records that are remembered."""


class Guarded:
    """Runs the forwards of one model under a guard.

    Parameters
    ----------
    guard : Guard
    answers : Answers
    planner : GuardedPlanner
    rows : Rows
        Says whether records could be read.
    """

    def __init__(self, guard: Guard, answers: Answers, planner: GuardedPlanner, rows: Rows) -> None:
        self.guard, self.answers, self.planner, self._rows = guard, answers, planner, rows
        self._known: OrderedDict[int, Tensor] = OrderedDict()  # exact answers of records, if they are vectors

    def __call__(
        self, forward: Forward, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], counters: Counters
    ) -> Any:
        """One forward of the model; `names` are those of its arguments."""
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.get("labels") is not None:  # a loss is one number for a batch: no part of it can be computed again
            return forward(*args, **kwargs)
        args, kwargs = _shallow((args, kwargs))  # sentence-transformers writes into its argument
        inputs = _shallow((args, kwargs))
        thread = self._rows.thread
        thread.reused, thread.admitted = False, {}
        with self.planner.asking() as asking:
            output = forward(*args, **kwargs)
        admitted = thread.admitted
        if not thread.reused:  # records could not be read: these answers are exact, and prove nothing
            asking.drop(Verdict.SERVE)
        if not asking.chosen and not (admitted and self.answers.are_vectors):
            return output
        mask = _mask(given)
        if _has_loss(output):
            return self._whole(forward, inputs, output, asking.where(Verdict.SERVE))
        try:
            seen = self.answers.read(output, mask)
            if len(seen.values) != asking.batch:
                raise ValueError(f"{len(seen.values)} answers to {asking.batch} sequences")
            self._remember(seen, admitted)
        except Exception as error:  # the check at memoize has seen an answer; this output is of another form
            self._failed(counters, "an answer could not be read", error)
            return self._whole(forward, inputs, output, asking.where(Verdict.SERVE))
        try:
            output = self._raise_low(forward, inputs, output, mask, seen, asking)
        except Exception as error:
            self._failed(counters, "an answer below the margin could not be computed alone", error)
            return self._whole(forward, inputs, output, asking.where(Verdict.SERVE))
        try:
            self._verify(forward, inputs, mask, seen, asking)
        except Exception as error:
            self._failed(counters, "an answer could not be verified", error)
        return output

    def _raise_low(
        self, forward: Forward, inputs: tuple[Any, Any], output: Any, mask: Tensor | None, seen: Read, asking: Asking
    ) -> Any:
        """The output, with answers below the margin computed whole."""
        low = [place for place in asking.where(Verdict.SERVE) if self._is_low(seen, place, asking)]
        if not low:
            return output
        again = self._run(forward, inputs, len(seen.values), low, [None] * len(low))
        exact = self.answers.read(again, None if mask is None else mask[low])
        for number, place in enumerate(low):
            changed = self.answers.differ(seen, place, exact, number)
            chosen = asking.chosen[place]
            margin = self._margin(seen, place, chosen)
            self.guard.compared(Verdict.SERVE, chosen.gaps, chosen.cover, margin, changed)
        return _put(output, again, torch.tensor(low), len(seen.values))

    def _is_low(self, seen: Read, place: int, asking: Asking) -> bool:
        chosen = asking.chosen[place]
        return self.guard.is_low(self._margin(seen, place, chosen), chosen.cover)

    def _margin(self, seen: Read, place: int, chosen: Chosen) -> float | None:
        """How sure an answer from a record is: ahead of the second best class, or near the record's own answer."""
        known = self._known.get(chosen.record)
        return seen.margin(place) if known is None else cosine(seen.values[place], known)

    def _remember(self, seen: Read, admitted: dict[int, int]) -> None:
        """Keep the answers of sequences that became records."""
        if seen.are_vectors:
            for place, number in admitted.items():
                self._known[number] = seen.values[place].clone()  # not a view of the whole batch
            while len(self._known) > MOST:
                self._known.popitem(last=False)

    def _verify(
        self, forward: Forward, inputs: tuple[Any, Any], mask: Tensor | None, seen: Read, asking: Asking
    ) -> None:
        """Compare exact answers with those from records."""
        places = asking.where(Verdict.SAMPLE, Verdict.LEARN)
        if not places:
            return
        chosen = [asking.chosen[place] for place in places]
        thread = self._rows.thread
        thread.reused = False
        again = self._run(forward, inputs, len(seen.values), places, chosen)
        if not thread.reused:
            return
        reused = self.answers.read(again, None if mask is None else mask[places])
        for number, (place, one) in enumerate(zip(places, chosen, strict=True)):
            changed = self.answers.differ(seen, place, reused, number)
            margin = self._margin(reused, number, one)
            if self.guard.compared(one.verdict, one.gaps, one.cover, margin, changed):
                _LOG.warning("attmemo: %s", self.guard.state().sentence(self.guard.confidence))

    def _whole(self, forward: Forward, inputs: tuple[Any, Any], output: Any, served: list[int]) -> Any:
        """The output of a batch whose answers cannot be read: nothing is served."""
        if not served:
            return output
        args, kwargs = _shallow(inputs)
        return forward(*args, **kwargs)  # outside of `asking` nothing is served

    def _run(
        self, forward: Forward, inputs: tuple[Any, Any], batch: int, places: list[int],
        given: Sequence[Chosen | None],
    ) -> Any:  # fmt: skip
        """The output for some sequences, from these records or whole."""
        args, kwargs = _take(inputs, torch.tensor(places), batch)
        with self.planner.asking(given):
            return forward(*args, **kwargs)

    def _failed(self, counters: Counters, what: str, error: Exception) -> None:
        if counters.failure(what, error, 1):
            _LOG.warning("attmemo: %s: %s", what, error)


def _mask(given: Mapping[str, Any]) -> Tensor | None:
    """The attention mask among the arguments, also inside of a dict of features."""
    found = given.get("attention_mask")
    for value in given.values():
        if found is None and isinstance(value, Mapping):
            found = value.get("attention_mask")
    return found if isinstance(found, Tensor) else None


def _shallow(value: Any) -> Any:
    """Copies of containers with the same tensors."""
    if isinstance(value, Mapping):
        return {name: _shallow(item) for name, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(_shallow, value))
    return value


def _take(value: Any, places: Tensor, batch: int) -> Any:
    """The same arguments for some sequences of the batch."""
    if isinstance(value, Tensor):
        return value.index_select(0, places) if value.dim() and value.shape[0] == batch else value
    if isinstance(value, dict):
        return {name: _take(item, places, batch) for name, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_take(item, places, batch) for item in value)
    return value


def _put(value: Any, new: Any, places: Tensor, batch: int) -> Any:
    """An output with some sequences replaced; its type stays."""
    if isinstance(value, Tensor):
        if not value.dim() or value.shape[0] != batch or not isinstance(new, Tensor):
            return value
        return value.index_copy(0, places, new.to(value.dtype))
    if isinstance(value, dict):  # model outputs of transformers are dicts
        for name in list(value):
            value[name] = _put(value[name], new.get(name), places, batch)
        return value
    if isinstance(value, (tuple, list)):
        parts = [_put(one, other, places, batch) for one, other in zip(value, new, strict=True)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _has_loss(output: Any) -> bool:
    """Whether some number of an output belongs to the whole batch: no part of it can be computed again."""
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else ()
    return any(isinstance(value, Tensor) and not value.dim() for value in values)
