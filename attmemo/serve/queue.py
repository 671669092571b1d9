"""What waits for the model: sequences of requests, oldest first, taken up to a budget of rows to compute."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

from attmemo.serve.model import Answer

WORTH: Final = 512
"""Tokens for each core of the model from which on a larger batch gains nothing: what waits is parted then. Measured
with MiniLM on two cores."""
PADDING: Final = 4
"""A forward's padded tokens, at most, as a multiple of its rows: embeddings and pooling see the padding."""


@dataclass(eq=False, slots=True)
class Request:
    """The sequences of one request, and what became of them."""

    count: int
    each: bool  # hidden states of all tokens are wanted
    reuse: bool  # records may serve
    namespace: str | None = None  # whose records
    answers: list[Answer | None] = field(init=False)  # in the order of the request
    left: int = field(init=False)
    error: Exception | None = None  # why there is no answer
    gone: bool = False  # the client went away: what still waits is dropped
    queued: float = 0.0  # seconds, as the next one: when its first sequence was given to the model
    taken: float = 0.0
    model_seconds: float = 0.0  # of the forwards that computed a part of it

    def __post_init__(self) -> None:
        self.answers, self.left = [None] * self.count, self.count

    @property
    def kind(self) -> tuple[bool, str | None]:
        """Requests of one kind may be computed in one batch."""
        return self.reuse, self.namespace

    def settle(self, place: int, answer: Answer | Exception, seconds: float) -> bool:
        """Note what became of one sequence; True: the last one."""
        if isinstance(answer, Exception):
            self.error = answer
        else:
            self.answers[place] = answer
        self.left -= 1
        self.model_seconds += seconds
        return not self.left


@dataclass(eq=False, slots=True)
class Waiting:
    """One sequence that waits."""

    request: Request
    place: int  # in the request
    ids: list[int]
    types: list[int]
    rows: int  # to compute; its tokens, until it is asked
    asked: bool = False


Needs = Callable[[list[Waiting]], list[int]]
"""Rows that each of these would need now."""


class Queue:
    """Sequences that wait, for one thread that takes them.

    Parameters
    ----------
    most_rows : int
        Rows to compute in one batch, at most; a single sequence may need more.
    most_sequences : int, optional
        In one batch, at most.
    worth : int, optional
        Tokens from which on a batch is no larger than half of what waits or was just answered. Clients that wait for
        their answer before they ask again would otherwise all be in one batch, and the model would have nothing to do
        while their answers and next requests are on their way. Default: no such bound.
    """

    def __init__(self, most_rows: int, most_sequences: int | None = None, worth: int | None = None) -> None:
        self._most_rows, self._most_sequences = most_rows, most_sequences or 1 << 30
        self._worth = worth or 1 << 60
        self._tokens = self._last = 0  # that wait; of the last batch
        self._waiting: deque[Waiting] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, sequences: list[Waiting]) -> None:
        """Have sequences wait; they stay in this order."""
        now = perf_counter()
        for sequence in sequences:
            sequence.request.queued = now
        with self._changed:
            self._waiting.extend(sequences)
            self._tokens += sum(len(one.ids) for one in sequences)
            self._changed.notify()

    def take(self, needs: Needs | None = None) -> tuple[list[Waiting], list[Waiting]] | None:
        """Wait for sequences and take the next batch, and those whose clients went away; None: closed, and empty.

        A batch begins with the oldest sequence. Others that ask for reuse as it does, in its namespace, follow in
        their order, until the next one would be too much. `needs` is asked once for a sequence, and only if more may
        be taken than one batch could compute whole; without it a sequence needs all its rows.
        """
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return None
                self._changed.wait()
            unknown = [] if needs is None else self._unknown()
        if needs is not None and unknown:
            for one, rows in zip(unknown, needs(unknown), strict=True):
                one.rows, one.asked = rows, True
        with self._changed:
            return self._pick()

    def close(self) -> None:
        """Let the thread end, once nothing waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _unknown(self) -> list[Waiting]:
        """The first that wait and may be served, if not all of them fit into a batch anyway; as many as ever fit."""
        tokens, found = 0, list[Waiting]()
        if self._part() <= self._most_rows:
            return found
        for one in self._waiting:
            tokens += len(one.ids)
            if tokens > PADDING * self._most_rows:
                break
            if one.request.reuse and not one.asked:
                found.append(one)
        return found if tokens > self._most_rows else []

    def _part(self) -> int:
        """Tokens of one batch, at most."""
        return max(self._worth, -(-(self._tokens + self._last) // 2))

    def _leave(self) -> Waiting:
        one = self._waiting.popleft()
        self._tokens -= len(one.ids)
        return one

    def _pick(self) -> tuple[list[Waiting], list[Waiting]]:
        batch: list[Waiting] = []
        gone: list[Waiting] = []
        passed: list[Waiting] = []  # they are of another kind
        rows = longest = tokens = 0
        part = self._part()
        while self._waiting:
            one = self._waiting[0]
            if one.request.gone:
                gone.append(self._leave())
                continue
            if batch:
                if one.request.kind != batch[0].request.kind:
                    passed.append(self._waiting.popleft())
                    continue
                padded = max(longest, len(one.ids)) * (len(batch) + 1)
                if (
                    rows + one.rows > self._most_rows
                    or tokens + len(one.ids) > part
                    or padded > PADDING * self._most_rows
                    or len(batch) == self._most_sequences
                ):
                    break
            batch.append(self._leave())
            rows, longest, tokens = rows + one.rows, max(longest, len(one.ids)), tokens + len(one.ids)
        self._last = tokens
        self._waiting.extendleft(reversed(passed))
        return batch, gone
