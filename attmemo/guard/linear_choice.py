"""Exact or 8-bit linear layers, whichever is faster within a budget: timed, then proven on a model's own inputs.

    memoize      both are timed on a batch of its own; where 8 bits are not faster, nothing else happens
    PROVING      requests get exact answers; 8-bit ones are computed beside them and compared
    SERVING      requests get 8-bit answers; one forward of many is computed exactly, too, and compared
    EXACT        8 bits change too many answers: the model is exact from now on, and reads no record of 8-bit layers

The proof is that of `attmemo.guard.certificate`: a bound on the rate of changed answers that holds at all numbers of
samples at once. An input counts once.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from enum import Enum
from time import perf_counter
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from attmemo.forward.batch_slices import has_loss, mask_in, shallow
from attmemo.forward.engine import Engine
from attmemo.guard.answers import Answers
from attmemo.guard.certificate import Certificate
from attmemo.packed.runner import Packed
from attmemo.packed.stack import Onlookers, Stack
from attmemo.system.locking import ThreadLock

_LOG = logging.getLogger("attmemo")

FASTER: Final = 1.2
"""8 bits are proven where exact forwards take so many times as long: a proof computes hundreds of requests twice."""
ROUNDS: Final = 5
"""Forwards of each kind that are timed, in turns; the first one of each does not count."""
BATCH: Final = 8
LENGTH: Final = 48
"""Sequences that are timed, and their tokens."""
MOST: Final = 2000
"""Answers after which a proof is given up."""
VERIFIED: Final = 64
"""Once 8 bits serve, one forward of so many is verified."""


class State(Enum):
    """What becomes of a request."""

    PROVING = "proving"
    SERVING = "int8"
    EXACT = "exact"


class LinearChoice:
    """Chooses the arithmetic of one model's linear layers.

    Parameters
    ----------
    budget, confidence : float
        At most so many of all answers may change, as sure as this.
    answers : Answers
        What an answer is.
    engine : Engine
        Runs the blocks; its kind of reuse is a `Stack`.
    rounded : Packed
        The blocks with 8-bit layers.
    speed : float
        How many times as long exact forwards take.
    served : callable
        Called once, before 8-bit layers serve.
    """

    def __init__(
        self, budget: float, confidence: float, answers: Answers, engine: Engine, rounded: Packed, speed: float,
        served: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        stack = engine.reuse
        assert isinstance(stack, Stack)
        self._stack, self.exact, self.rounded = stack, stack.packed, rounded
        self._engine, self._answers, self.speed = engine, answers, speed
        self._served = served
        self.certificate = Certificate(budget, confidence)
        self.state, self._why = State.PROVING, ""
        self._stale = False  # whether 8-bit layers made the records: exact ones must not read them
        self._seen: set[int] = set()  # hashes of inputs
        self._onlookers: Onlookers | None = None
        self._random, self._lock = random.Random(0), ThreadLock()

    def watch(self, model: nn.Module) -> None:
        """Look for hooks of torch in this model from now on: where there are some, forwards run once, and exactly."""
        self._onlookers = Onlookers(list(model.modules()), [])

    def __call__(
        self, forward: Callable[..., Any], names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """One forward of the model; `names` are those of its arguments."""
        state, running = self.state, self._engine.current.forward
        if state is State.EXACT and not self._stale:
            return forward(*args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        asked_whole = state is State.EXACT or (running is not None and running.whole)
        seen = self._onlookers is not None and self._onlookers.have_hooks
        if asked_whole or seen or given.get("labels") is not None:
            with self._engine.open(packed=self.exact, whole=True):
                return forward(*args, **kwargs)
        if state is State.SERVING and self._random.random() >= 1 / VERIFIED:
            return forward(*args, **kwargs)
        args, kwargs = shallow((args, kwargs))  # sentence-transformers writes into its argument
        again = shallow((args, kwargs))
        if state is State.PROVING:
            with self._engine.open(packed=self.exact, whole=True):  # what is computed now becomes no record
                output = exact = forward(*args, **kwargs)
            rounded = self._beside(forward, again, self.rounded)
        else:
            output = rounded = forward(*args, **kwargs)
            exact = self._beside(forward, again, self.exact)
        if exact is not None and rounded is not None and not has_loss(output):
            self._compare(exact, rounded, mask_in(given), given.get("input_ids"))
        return output

    def _beside(self, forward: Callable[..., Any], inputs: tuple[Any, Any], packed: Packed) -> Any:
        """The output in another arithmetic; None: there is none."""
        args, kwargs = inputs
        try:
            with self._engine.open(packed=packed, whole=True, repeats=True):
                return forward(*args, **kwargs)
        except Exception as error:
            self._failed(error)
            return None

    def _compare(self, exact: Any, rounded: Any, mask: Tensor | None, ids: Any) -> None:
        """Count the answers of one forward, and decide."""
        try:
            expected, seen = self._answers.read(exact, mask), self._answers.read(rounded, mask)
            changed = [self._answers.differ(seen, n, expected, n) for n in range(len(expected.values))]
        except Exception as error:
            self._failed(error)
            return
        new = self._new(ids, mask, len(changed))
        with self._lock:
            serving, alarm = self.state is State.SERVING, False
            for differs in (one for one, counts in zip(changed, new, strict=True) if counts):
                self.certificate.counts.requests += serving
                self.certificate.counts.served += serving
                alarm |= self.certificate.sample(differs)
            counts, highest = self.certificate.counts, self.certificate.highest
            if self.state is State.PROVING:
                if highest <= self.certificate.budget:
                    self._serve()
                elif counts.changed + counts.same >= MOST or counts.changed > 2 + 2 * MOST * self.certificate.budget:
                    self._end("its answers could not be proven to stay within the budget")
            elif serving and alarm:
                self._end("too many answers changed")

    def _new(self, ids: Any, mask: Tensor | None, count: int) -> list[bool]:
        """Which inputs of a batch were not counted before."""
        if not isinstance(ids, Tensor) or ids.dim() != 2 or len(ids) != count:
            return [True] * count
        lengths = [ids.shape[1]] * count if mask is None or mask.dim() != 2 else mask.sum(1).long().tolist()
        found = []
        with self._lock:
            for row, length in zip(ids.numpy(), lengths, strict=True):
                own = hash(np.ascontiguousarray(row[:length]).tobytes())
                found.append(own not in self._seen)
                if len(self._seen) < 4 * MOST:
                    self._seen.add(own)
        return found

    def _serve(self) -> None:
        """Serve 8-bit layers from now on."""
        if self._served is not None:
            self._served()
        self._stack.packed = self.rounded
        self.state = State.SERVING
        _LOG.info("attmemo: %s", self.sentence)

    def _end(self, why: str) -> None:
        """Be exact from now on."""
        self._stack.packed = self.rounded = self.exact  # 8-bit weights are given back
        self._stale = self.state is State.SERVING
        self.state, self._why = State.EXACT, why
        _LOG.warning("attmemo: %s", self.sentence)

    def _failed(self, error: Exception) -> None:
        self._engine.counters.failure("8-bit layers could not be compared", error, 1)
        with self._lock:
            self._end(f"an answer could not be compared ({type(error).__name__}: {error})")

    @property
    def sentence(self) -> str:
        """What was decided, and why."""
        counts, budget = self.certificate.counts, self.certificate.budget
        seen = f"{counts.changed} of {counts.changed + counts.same} answers changed"
        if self.state is State.PROVING:
            return f"8-bit layers are being compared with exact ones: {seen}, the budget is {budget:.3g}"
        if self.state is State.SERVING:
            return f"8-bit layers serve, {self.speed:.2f} times as fast as exact ones: {seen}"
        return f"linear layers are exact: {self._why}"

    def stats(self) -> dict[str, Any]:
        """The decision and its numbers, JSON-able."""
        counts = self.certificate.counts
        return {
            "state": self.state.value, "says": self.sentence, "speed": self.speed,
            "compared": counts.changed + counts.same, "changed": counts.changed, "highest": self.certificate.highest,
        }  # fmt: skip


def speed_of(engine: Engine, host: nn.Module, exact: Packed, rounded: Packed) -> float:
    """How many times as long exact forwards take as 8-bit ones, by medians of rounds in turns.

    The batch has `BATCH` sequences of `LENGTH` different tokens, or of as many as the model takes.
    """
    config: Any = getattr(host, "config", None)
    length = min(LENGTH, int(getattr(config, "max_position_embeddings", LENGTH) or LENGTH))
    vocabulary = int(getattr(config, "vocab_size", 100))
    ids = (torch.arange(BATCH * length).view(BATCH, length) * 7919 + vocabulary // 3) % vocabulary
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    taken: dict[str, list[float]] = {"exact": [], "rounded": []}
    with torch.inference_mode():
        for _ in range(ROUNDS):
            for name, packed in (("exact", exact), ("rounded", rounded)):
                with engine.open(packed=packed, whole=True):
                    start = perf_counter()
                    host(**inputs)
                    taken[name].append(perf_counter() - start)
    middle = {name: float(np.median(times[1:])) for name, times in taken.items()}
    return middle["exact"] / middle["rounded"]


