"""Comparisons that wait until no request runs.

Parts of forwards are kept, with what is to be done about them: answers from records are compared with exact ones, or
the other way, or answers in 8 bits. They are in memory only: at the end of the process what is left is forgotten, and
nothing is lost but samples.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from attmemo.forward.batch_slices import has_loss, take
from attmemo.forward.watch import Watch
from attmemo.guard.answers import Answer
from attmemo.guard.idle import Idle
from attmemo.kernels.changes import Changes
from attmemo.kernels.members import are_empty
from attmemo.system.locking import thread_lock

if TYPE_CHECKING:
    from attmemo.guard.change_log import Case

Model = Callable[..., Any]
"""The `forward` of a whole model, head and all."""
Inputs = tuple[Any, Any]
"""Positional arguments and those by name."""

LEARNED: Final = "learned"
"""The kind of parts that were answered exactly, and that records are tried with and made of."""
MOST: Final = 256
"""Sequences that may wait: their arguments stay in memory."""
KEPT_FREE: Final = 128
"""Places of these that are left to answers that were given and are to be verified: others wait to be learned from."""
AT_ONCE: Final = 4
"""Sequences that are taken at once, where it is not known when the next request comes: it shares the cores with no
more."""
IN_A_PAUSE: Final = 16
"""Sequences that are taken in a pause whose length is known, at most."""
BEHIND: Final = 16
"""Sequences that wait to be learned from, beside which no others do as long as pauses are used: what is asked next is
like what was asked last. As many wait to be compared in 8 bits: else nothing would be learned until that is proven."""
FILLS: Final = 0.8
"""Share of such a pause that they probably take."""
PIECES: Final = 4
"""They are taken in so many pieces: behind each it is seen whether a request came before it was expected."""
LAST: Final = 16
"""Pieces of a kind that tell what a token takes: the median one, for some waited for a disk."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some sequences of a forward, and what is to be done about them.

    `compare` takes a part: this one, or one with some of its sequences. False: nothing was computed.
    """

    forward: Model
    inputs: Inputs  # for these sequences alone
    mask: Tensor | None  # [b, L]
    places: Sequence[int]  # of these sequences in the batch
    stamp: object  # of the model (`Stamp`)
    compare: Callable[[Part], bool]
    kind: str  # parts of a kind take about as long for each token
    process: int = field(default_factory=os.getpid)

    @property
    def tokens(self) -> float:
        """Tokens of a sequence, in the mean; 1: not known."""
        return 1.0 if self.mask is None else max(int(self.mask.count_nonzero()) / len(self.places), 1.0)

    def some(self, first: int, stop: int) -> Part:
        """Return a part with some of its sequences."""
        chosen, batch = torch.arange(first, min(stop, len(self.places))), len(self.places)
        mask = None if self.mask is None else self.mask[chosen]
        return replace(self, inputs=take(self.inputs, chosen, batch), mask=mask, places=self.places[first:stop])


@dataclass(frozen=True, slots=True)
class Owed:
    """An answer that is compared later."""

    answer: Answer  # alone
    changes: Changes
    evidence: int
    case: Case | None


class Deferred:
    """The parts of one model's forwards that wait, oldest first, and the thread that takes them.

    Parameters
    ----------
    model : nn.Module or None
        A part is left out once this model's weights have changed. None: nothing may wait.
    watch : Watch, optional
        Notices changes of some of the weights for good: a stamp needs the others alone.
    """

    def __init__(self, model: nn.Module | None = None, watch: Watch | None = None) -> None:
        self.model, self._watch = model, watch
        modules = () if model is None else model.modules()
        self._hooks: Any = tuple([hooks for one in modules for hooks in (one._forward_hooks, one._forward_pre_hooks)])
        self._stamp = Stamp(model, frozenset() if watch is None else watch.weights)
        self._parts: deque[Part] = deque()
        self._sequences = 0  # that wait
        self._each: dict[str, deque[float]] = {}  # seconds that a token takes, by kind of part
        self._lock, self._paying = thread_lock(), thread_lock()
        self.idle = Idle(self)

    def __len__(self) -> int:
        """Sequences that wait."""
        return self._sequences

    @property
    def room(self) -> int:
        """Sequences that may wait beside those that do.

        Hooks of the user must not be called at other times, with other inputs: with one of them there is no room.
        """
        return max(MOST - self._sequences, 0) if self.model is not None and are_empty(self._hooks) else 0

    @property
    def spare(self) -> int:
        """Sequences that may wait to be learned from."""
        return max(self.room - KEPT_FREE, 0)

    def takes(self, batch: int, kind: str = LEARNED) -> bool:
        """Whether so many sequences are to wait, of those that may be left out: to be learned from, or 8 bits."""
        if (self.spare if kind == LEARNED else self.room) < batch:
            return False
        if not self.idle.works:
            return True
        with self._lock:
            return sum(len(part.places) for part in self._parts if part.kind == kind) < BEHIND

    def add(
        self, forward: Model, inputs: Inputs, mask: Tensor | None, places: Sequence[int], batch: int,
        compare: Callable[[Part], bool], kind: str,
    ) -> None:  # fmt: skip
        """Have these sequences of a batch compared later, some at a time."""
        stamp = self._stamp.now() if self.model is not None and places else None
        if stamp is not None:
            chosen = torch.tensor(places)
            own = take(_owned(inputs, batch), chosen, batch), None if mask is None else mask[chosen]
            with self._lock:
                self._parts.append(Part(forward, *own, places, stamp, compare, kind))
                self._sequences += len(places)

    def compare_all(self) -> None:
        """Compare what waits now. What another thread compares now is done, too."""
        for _ in range(self._sequences + 1):
            with self._paying:
                part = self._take(AT_ONCE)
                if part is None:
                    return
                self._compare(part)

    def forget(self) -> None:
        """Let nothing wait any more, once the part is done that is compared now."""
        with self._lock:
            self._parts.clear()
            self._sequences = 0
        with self._paying:
            pass

    def close(self) -> None:
        """Let nothing wait, and end the thread."""
        self.forget()
        self.idle.close()

    def ended(self) -> None:
        """A request has ended."""
        self.idle.ended()
        if self._parts:
            self.idle.wake()

    def _take(self, most: int) -> Part | None:
        """The oldest part, of so many sequences at most. In a forked child its parent's parts are forgotten."""
        with self._lock:
            while self._parts:
                part = self._parts.popleft()
                if len(part.places) > most:
                    self._parts.appendleft(part.some(most, len(part.places)))
                    part = part.some(0, most)
                self._sequences -= len(part.places)
                if part.process == os.getpid():
                    return part
        return None

    def part_takes(self) -> float:
        """Return the seconds that a sequence of the oldest part probably takes; 0: not known."""
        with self._lock:
            part = self._parts[0] if self._parts else None
        last = None if part is None else self._each.get(part.kind)
        return 0.0 if part is None or last is None else statistics.median(last) * part.tokens

    def do_part(self, seconds: float) -> bool:
        """Take some of the oldest parts, in the thread for idle times; return whether there are more.

        `seconds`: so many are left, if that is known.
        """
        each, end = self.part_takes(), perf_counter() + FILLS * seconds
        pieces, piece = 1, AT_ONCE
        if seconds and each:
            pieces, piece = PIECES, math.ceil(min(max(int(FILLS * seconds / each), 1), IN_A_PAUSE) / PIECES)
        for _ in range(pieces):
            self._do_piece(piece)
            each = self.part_takes()
            if self.idle.is_over or not each or perf_counter() + piece * each > end:
                break
        return bool(self._parts)

    def _do_piece(self, most: int) -> None:
        """Take so many sequences of the oldest part, and time them."""
        with self._paying:  # before it is taken: else `compare_all` could miss it
            part, start = self._take(most), perf_counter()
            if part is not None and self._compare(part):  # others say nothing of the time of those that are
                taken = (perf_counter() - start) / (part.tokens * len(part.places))
                self._each.setdefault(part.kind, deque(maxlen=LAST)).append(taken)

    def _compare(self, part: Part) -> bool:
        """Compare a part, if it still says something; whether it was computed. `_paying` is held."""
        return are_empty(self._hooks) and self.is_current(part) and part.compare(part)

    def is_current(self, part: Part) -> bool:
        """Whether the model is as it was when the part came."""
        changed = self._watch is not None and self._watch.changed()
        return not changed and part.stamp == self._stamp.anew()


def _owned(value: Any, batch: int) -> Any:
    """The same arguments; tensors that `take` leaves as they are, copied: their caller may write into them."""
    if isinstance(value, Tensor):
        return value if value.dim() and value.shape[0] == batch else value.clone()
    if isinstance(value, dict):
        return {name: _owned(item, batch) for name, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_owned(item, batch) for item in value)
    return value


def teaches_nothing(output: Any) -> bool:
    """Return whether an output says nothing of blocks: a loss was asked for, or an arithmetic that is not theirs."""
    return has_loss(output) or torch.is_autocast_enabled("cpu")


class Stamp:
    """What changes when a model's weights do, or when it begins to train; None while it trains.

    `but`: weights that are left out, by their `id`.

    To find all weights takes a third of a millisecond, so those that were found last are asked. A weight that was
    replaced since makes one stamp wrong: it is like none that is found anew.
    """

    def __init__(self, model: nn.Module | None, but: frozenset[int] = frozenset()) -> None:
        self._model, self._but = model, but
        self._weights: tuple[Tensor, ...] = ()
        self.anew()

    def now(self) -> object:
        """Return the stamp, by the weights that were found last."""
        if self._model is None or self._model.training:
            return None
        return [(one.data_ptr(), 0 if one.is_inference() else one._version) for one in self._weights]

    def anew(self) -> object:
        """Return the stamp, by the weights that the model has now."""
        if self._model is not None:
            every = (*self._model.parameters(), *self._model.buffers())
            self._weights = tuple([one for one in every if id(one) not in self._but])
        return self.now()
