"""Exact or 8-bit linear layers, whichever is faster within a budget: timed, then proven on a model's own inputs.

    memoize      both are timed on a batch of its own; where 8 bits are not faster, nothing else happens
    PROVING      requests get exact answers; some 8-bit ones are computed beside them and compared: while no request
                 runs, and beside requests as far as the time account affords that
    SERVING      requests get 8-bit answers; those below the margin are computed again, exactly. Of one forward of
                 many, some are computed exactly, too, and compared
    EXACT        8 bits change too many answers: the model is exact from now on, and reads no record of 8-bit layers

The proof is that of `attmemo.guard.certificate`: a bound on the rate of changed answers that holds at all numbers of
samples at once. An input counts once.

A class that is not far ahead of the second best one changes most easily. So there is a proof for each step of a margin
(`attmemo.guard.margin`): that with those answers alone few enough change. The lowest step that is proven serves. All
steps are proven from the same samples, and no confidence is lost by that: what changes at a higher step changes at a
lower one, too. So no step that breaks the budget is proven unless the highest such step is: one mistake of one test (a
fixed sequence of tests: Angelopoulos et al., arXiv 2110.01052).
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from functools import partial
from time import perf_counter, thread_time
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from attmemo.forward.batch_slices import has_loss, ids_in, put, shallow, take, tensors_in, tokens_in
from attmemo.forward.engine import Engine
from attmemo.forward.row_usage import Observed
from attmemo.guard.answers import Answers, Read
from attmemo.guard.certificate import Certificate
from attmemo.guard.deferred import Deferred, Model, Part, teaches_nothing
from attmemo.guard.margin import ROUNDED, Margin
from attmemo.guard.planner import GuardedPlanner
from attmemo.guard.time_account import TimeAccount
from attmemo.models.base import inputs_of
from attmemo.packed.runner import Packed
from attmemo.packed.stack import Onlookers, Stack
from attmemo.system.locking import thread_lock

_LOG = logging.getLogger("attmemo")

FASTER: Final = 1.2
"""8 bits are proven where exact forwards take so many times as long, answers that are computed twice included."""
ROUNDS: Final = 5
"""Forwards of each kind that are timed, in turns; the first one of each does not count."""
BATCH: Final = 8
LENGTH: Final = 48
"""Sequences that are timed, and their tokens."""
MOST: Final = 2000
"""Answers after which a proof is given up."""
VERIFIED: Final = 64
"""Once 8 bits serve, one forward of so many is verified."""
AT_ONCE: Final = 16
"""Sequences of a forward that are compared, chosen by chance."""
KIND: Final = "8 bits"
"""Of parts that are compared later."""


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
    served : callable, optional
        Gives a context in which 8-bit layers begin to serve, once.
    deferred : Deferred
        What is compared while no request runs.
    rows : GuardedPlanner, optional
        Serves rows of records beside. Its account pays for the proof, too.
    always : bool
        Whether every forward is compared, whatever that costs.
    """

    def __init__(
        self, budget: float, confidence: float, answers: Answers, engine: Engine, rounded: Packed, speed: float,
        deferred: Deferred, *, served: Callable[[], AbstractContextManager[None]] | None = None,
        rows: GuardedPlanner | None = None, always: bool = False,
    ) -> None:  # fmt: skip
        stack = engine.reuse
        assert isinstance(stack, Stack)
        self._stack, self.exact, self.rounded = stack, stack.packed, rounded
        self._engine, self._answers, self.speed = engine, answers, speed
        self._served, self._rows = served, rows
        self.certificate = Certificate(budget, confidence)
        self.margin = Margin(budget, ROUNDED, self.certificate.rules_out)
        self.least = math.inf  # the lowest margin that was proven: a proof that was made holds
        self._account = TimeAccount(always)
        self.state, self._why = State.PROVING, ""
        self._stale = False  # whether 8-bit layers made the records: exact ones must not read them
        self._seen: set[int] = set()  # hashes of inputs
        self._onlookers: Onlookers | None = None
        self._random, self._lock = random.Random(0), thread_lock()
        self.deferred = deferred

    def watch(self, model: nn.Module) -> None:
        """Look for hooks of torch in this model from now on: where there are some, forwards run once, and exactly."""
        self._onlookers = Onlookers(list(model.modules()), [])

    @property
    def account(self) -> TimeAccount:
        """What pays for comparisons beside requests."""
        return self._account if self._rows is None else self._rows.times

    def __call__(
        self, forward: Model, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """One forward of the model; `names` are those of its arguments."""
        state, running = self.state, self._engine.current.running.get()
        if state is State.EXACT and not self._stale:
            return forward(*args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        asked_whole = state is State.EXACT or (running is not None and running.whole)
        seen = self._onlookers is not None and self._onlookers.have_hooks
        if asked_whole or seen or given.get("labels") is not None:
            with self._engine.open(packed=self.exact, whole=True):
                return forward(*args, **kwargs)
        compares = state is not State.SERVING or self._random.random() < 1 / VERIFIED
        if not compares and not self.least:
            return forward(*args, **kwargs)
        self.deferred.idle.began()
        try:
            if state is State.SERVING:
                return self._raised(forward, given, args, kwargs, compares)
            return self._proving(forward, given, args, kwargs)
        finally:
            self.deferred.ended()

    def _raised(
        self, forward: Model, given: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any], compares: bool
    ) -> Any:
        """The output in 8 bits, with answers below the margin computed again, exactly; some are compared, if asked."""
        args, kwargs = shallow((args, kwargs))  # sentence-transformers writes into its argument
        inputs = shallow((args, kwargs))
        output = forward(*args, **kwargs)
        if has_loss(output):
            return output
        mask = self._answers.mask_in(given)
        rounded, low = self._read(output, mask), np.zeros(0, np.int64)
        if rounded is not None:
            batch = len(rounded.values)
            if compares:
                keys = keys_of(ids_in(given), mask, places := self._drawn(batch))
                compare = partial(self._compare, keys, None, rounded)
                compare(_part(forward, inputs, mask, places, batch, compare))
            if rounded.margins is not None:
                low = np.flatnonzero(~(rounded.margins.numpy() >= self.least))
        if self.state is State.SERVING and not len(low):
            return output
        with self._engine.open(packed=self.exact, whole=True, repeats=True):
            if self.state is not State.SERVING:  # too many answers changed, or they cannot be compared
                args, kwargs = shallow(inputs)
                return forward(*args, **kwargs)
            chosen = torch.from_numpy(low)
            try:
                args, kwargs = take(inputs, chosen, batch)
                again = forward(*args, **kwargs)
                if tensors_in(output) is not None:
                    return put(output, again, chosen, batch)
            except Exception as error:  # arguments or outputs that cannot be taken apart
                self._engine.counters.failure("an answer below the margin could not be computed alone", error, 1)
            args, kwargs = shallow(inputs)
            return forward(*args, **kwargs)

    def _proving(
        self, forward: Model, given: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The exact output; some of its answers are compared with those in 8 bits now, or later."""
        args, kwargs = shallow((args, kwargs))  # sentence-transformers writes into its argument
        inputs = shallow((args, kwargs))
        start = thread_time()
        with self._engine.open() as opened:
            output = forward(*args, **kwargs)
        if teaches_nothing(output):
            return output
        mask, ids = self._answers.mask_in(given), ids_in(given)
        sized = next((one for one in (mask, ids) if isinstance(one, Tensor) and one.dim() == 2), None)
        batch = 0 if sized is None else len(sized)
        if self._rows is None and mask is not None:
            self._account.record(tokens_in(mask), batch, thread_time() - start, reused=False)
        now = self.account.has_own and self.deferred.idle.is_busy
        kind = f"{KIND} and exact" if opened.outcome.served else KIND
        if not batch or not (now or self.deferred.takes(1, kind)):
            return output
        start, places = thread_time(), self._drawn(batch)
        exact = None if opened.outcome.served else self._read(output, mask)  # of some, records gave the answer
        compare = partial(self._compare, keys_of(ids, mask, places), exact, None)
        if now:
            compare(_part(forward, inputs, mask, places, batch, compare))
            self.account.spend(thread_time() - start)
        else:
            self.deferred.add(forward, inputs, mask, places, batch, compare, kind)
        return output

    def _drawn(self, batch: int) -> list[int]:
        """Sequences of a batch that are compared."""
        return sorted(self._random.sample(range(batch), AT_ONCE)) if batch > AT_ONCE else list(range(batch))

    def _compare(self, keys: Mapping[int, int | None], exact: Read | None, rounded: Read | None, part: Part) -> bool:
        """Compare answers of some sequences. What is given are answers of the whole batch; the rest is computed.

        False: nothing was. What the original code computed, as where hidden states are asked for, says nothing.
        """
        if rounded is None and self.state is not State.PROVING:
            return False
        try:
            with torch.no_grad():
                expected = exact or self._beside(part, self.exact)
                seen = rounded or self._beside(part, self.rounded)
            if expected is None or seen is None:
                return False
            own, places = range(len(part.places)), part.places
            pairs = zip(own if rounded is None else places, own if exact is None else places, strict=True)
            compared = [
                (self._answers.differ(seen, one, expected, other), seen.margin(one)) for one, other in pairs
            ]
        except Exception as error:
            self._failed(error)
            return False
        self._count(compared, [keys[place] for place in places])
        return True

    def _read(self, output: Any, mask: Tensor | None) -> Read | None:
        """The answers of an output; None: there are none, and nothing is compared any more."""
        try:
            return self._answers.read(output, mask)
        except Exception as error:
            self._failed(error)
            return None

    def _beside(self, part: Part, packed: Packed) -> Read | None:
        """The answers of some sequences in another arithmetic; None: no blocks computed them."""
        args, kwargs = shallow(part.inputs)
        outer, observed = self._engine.current.running.get(), Observed()
        with self._engine.open(packed=packed, whole=True, repeats=True, observed=observed):
            found = self._answers.read(part.forward(*args, **kwargs), part.mask)
        if outer is not None and outer.observed is not None:
            outer.observed.extra += observed.extra
        return found if observed.extra else None

    def _count(self, compared: Sequence[tuple[bool, float | None]], keys: Sequence[int | None]) -> None:
        """Count answers of inputs with these keys, and decide: whether each changed, and the margin in 8 bits.

        An input says nothing a second time.
        """
        with self._lock:
            serving, alarm, least = self.state is State.SERVING, False, self.least
            for (differs, margin), key in zip(compared, keys, strict=True):
                if key in self._seen:
                    continue
                if key is not None and len(self._seen) < 4 * MOST:
                    self._seen.add(key)
                self.certificate.counts.requests += serving
                self.certificate.counts.served += serving
                own = ROUNDED.steps[-2] if margin is None else margin
                self.margin.request(1.0, 1.0)
                self.margin.sample(own, differs)
                self.least = min(self.least, self.margin.least)
                alarm |= self.certificate.sample(differs and (own >= least or not serving))
            if serving and alarm:
                self._end("too many answers changed")
            elif serving and self.least < least:
                self._count_given()
            elif self.state is State.PROVING:
                counts = self.certificate.counts
                if self.least < math.inf and 1 / self.speed + self.margin.share_below(self.least) <= 1 / FASTER:
                    self._serve()
                elif counts.changed + counts.same >= MOST or self._is_hopeless:
                    self._end("its answers could not be proven to stay within the budget")

    @property
    def _is_hopeless(self) -> bool:
        """Whether more answers have changed at every step than a proof could bear."""
        return self.margin.changed_from(ROUNDED.steps[-2]) > 2 + 2 * MOST * self.certificate.budget

    def _count_given(self) -> None:
        """Have the certificate hold what changed among answers as they are given now."""
        counts = self.certificate.counts
        samples = counts.changed + counts.same
        counts.changed = self.margin.changed_from(self.least)
        counts.same = samples - counts.changed
        self.certificate.adopt(counts)

    def _serve(self) -> None:
        """Serve 8-bit layers from now on."""
        try:
            with nullcontext() if self._served is None else self._served():
                self._count_given()
                self._stack.packed = self.rounded
                self.state = State.SERVING
        except TimeoutError as error:
            self._end(str(error))
            return
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
            below = f"; those with a margin below {least:g} are exact" if (least := self.least) else ""
            return f"8-bit layers serve, {self.speed:.2f} times as fast as exact ones: {seen}{below}"
        return f"linear layers are exact: {self._why}"

    def stats(self) -> dict[str, Any]:
        """The decision and its numbers, JSON-able."""
        counts, serving = self.certificate.counts, self.state is State.SERVING
        return {
            "state": self.state.value, "says": self.sentence, "speed": self.speed,
            "compared": counts.changed + counts.same, "changed": counts.changed, "highest": self.certificate.highest,
            "margin": self.least if serving else None,
            "share_below": self.margin.share_below(self.least) if serving else None,
        }  # fmt: skip


def _part(
    forward: Model, inputs: Any, mask: Tensor | None, places: list[int], batch: int, compare: Callable[[Part], bool]
) -> Part:
    """Some sequences of a forward, to be compared at once."""
    chosen = torch.tensor(places)
    own = None if mask is None else mask[chosen]
    return Part(forward, take(inputs, chosen, batch), own, places, None, compare, KIND)


def keys_of(ids: Any, mask: Tensor | None, places: Sequence[int]) -> dict[int, int | None]:
    """Return a number for each input, by its place in the batch, that equal inputs share; None: there are no ids."""
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return dict.fromkeys(places)
    rows, own = ids.numpy(), None if mask is None or mask.dim() != 2 else mask.numpy() != 0  # padding may be left
    return {place: hash((rows[place] if own is None else rows[place][own[place]]).tobytes()) for place in places}


def speed_of(engine: Engine, host: nn.Module, exact: Packed, rounded: Packed) -> float:
    """How many times as long exact forwards take as 8-bit ones, by medians of rounds in turns.

    The batch has `BATCH` sequences of `LENGTH` different tokens, or of as many as the model takes.
    """
    config: Any = getattr(host, "config", None)
    length = min(LENGTH, int(getattr(config, "max_position_embeddings", LENGTH) or LENGTH))
    inputs = inputs_of(config, [length] * BATCH)
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


