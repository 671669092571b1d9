"""The one thread that computes: it takes what waits whenever the model is free."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final

import torch

from attmemo.errors import UnsupportedModelError
from attmemo.forward.finite_weights import check_weights, weight_not_finite
from attmemo.serve.model import Answer, ServedModel, load
from attmemo.serve.queue import Queue, Request, Waiting
from attmemo.serve.refusal import Refusal
from attmemo.serve.settings import Settings, split_cores
from attmemo.system.machine import cores, trim

_LOG = logging.getLogger("attmemo.serve")

REPEATED: Final = 2
"""Forwards one behind the other without a finite answer that make a service unhealthy."""
TRIM: Final = 10.0
"""Seconds after which freed memory is given back. Without that a minute of overload took 80 MB more, and kept them."""

Seen = Callable[[int, int, int, int, float], None]
"""Told of each forward: sequences, tokens, rows computed for answers and beside them, seconds."""


class Worker:
    """Loads the model in a thread of its own, and answers in this thread.

    torch keeps a team of threads for each thread that computes: one thread, one team, on the cores of the model.

    It calls `finished` with the requests of a batch that are complete, and `seen` for each forward.

    Attributes
    ----------
    failing : bool
        The last forward failed, or the last ones gave no finite answer.
    doubtful : tuple of list of int
        Token ids and types to ask for then: of the last sequence whose answer was not finite, else of padding.
    """

    model: ServedModel

    def __init__(
        self, settings: Settings, queue: Queue, finished: Callable[[list[Request]], None], seen: Seen
    ) -> None:
        self.failing = False
        self.doubtful: tuple[list[int], list[int]] = _PADDING
        self._not_finite = 0  # forwards without a finite answer, one behind the other
        self._settings, self._queue, self._finished, self._seen = settings, queue, finished, seen
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="attmemo-model", daemon=True)

    def start(self) -> None:
        """Load the model and warm it up; raises what went wrong."""
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Answer what waits, close the database whole, and end; the queue must be closed."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self._begin()
        except BaseException as error:  # told to the one who starts it
            self._failure = error
            self._ready.set()
            return
        self._ready.set()
        try:
            trimmed = perf_counter()
            while (taken := self._queue.take(self._needs)) is not None:
                self._answer(*taken)
                if perf_counter() - trimmed > TRIM:  # here, where no forward runs
                    trim()
                    trimmed = perf_counter()
        except BaseException:
            _LOG.exception("the model's thread ended")
            raise
        finally:
            self.model.close()

    def _begin(self) -> None:
        split = split_cores(os.sched_getaffinity(0), cores())
        os.sched_setaffinity(0, split.model)  # of this thread; its team inherits them
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(split.threads)
        settings = self._settings
        self.model = load(settings)
        if (name := weight_not_finite(self.model.module)) is not None:
            _LOG.warning("weight %s is not finite: answers that depend on it are refused", name)
        self._warm()  # of the bare model: its own code answers what cannot be served from records
        self.model.memoize(  # its checks run the path that serves
            database=settings.database, reuse=settings.reuse, budget=settings.budget, max_bytes=settings.max_bytes,
            fill=settings.fill, linear=settings.linear, confidence=settings.confidence,
            min_cosine=settings.min_cosine, threshold=settings.threshold, near=settings.near,
            shadow=settings.shadow, log_changes=settings.log_changes, namespaces=settings.namespaces,
        )  # fmt: skip
        self._warm()
        trim()  # what loading and warming took

    def _warm(self) -> None:
        """Run short and long sequences once, so that no request pays for what the first forward allocates.

        Raises what is wrong with a model whose answers to them are not finite.
        """
        token = self.model.tokenizer.pad_token_id or 0
        longest = min(self.model.longest, self._settings.max_batch_tokens)
        for length in (2, longest):
            (answer,) = self.model.run([([token] * length, [0] * length)], reuse=False, each=False)
            if not answer.is_finite:
                check_weights(self.model.module)
                what = f"{self._settings.model} gives an answer that is not finite to {length} tokens of padding."
                raise UnsupportedModelError(what, "--dtype float32, or another model")

    def _needs(self, waiting: list[Waiting]) -> list[int]:
        found, names = [0] * len(waiting), {one.request.namespace for one in waiting}
        for name in names:
            own = [place for place, one in enumerate(waiting) if one.request.namespace == name]
            ids, types = [waiting[place].ids for place in own], [waiting[place].types for place in own]
            for place, rows in zip(own, self.model.rows_to_compute(ids, types, name), strict=True):
                found[place] = rows
        return found

    def _answer(self, batch: list[Waiting], gone: list[Waiting]) -> None:
        complete = [one.request for one in gone if one.request.settle(one.place, _GONE, 0.0)]
        if batch:
            now = perf_counter()
            for one in batch:
                one.request.taken = one.request.taken or now
            answers = self._compute(batch)
            seconds = perf_counter() - now
            for one, answer in zip(batch, answers, strict=True):
                if one.request.settle(one.place, answer, seconds):
                    complete.append(one.request)
        if complete:
            self._finished(complete)

    def _compute(self, batch: list[Waiting]) -> Sequence[Answer | Exception]:
        """Answers to a batch; where a batch fails, its sequences are tried one by one."""
        start, extra = perf_counter(), self.model.extra_rows
        try:
            answers = self.model.run(
                [(one.ids, one.types) for one in batch],
                reuse=batch[0].request.reuse,
                each=any(one.request.each for one in batch),
                namespace=batch[0].request.namespace,
            )
        except Exception as error:
            # The message may show values of a request: only its type is logged.
            _LOG.error("a forward of %d sequences failed: %s", len(batch), type(error).__name__)
            if len(batch) > 1:
                return [self._compute([one])[0] for one in batch]
            self.failing, self.doubtful = True, _PADDING
            return [Refusal("backend", "Inference failed", reason="inference")]
        tokens, rows = sum(one.tokens for one in answers), sum(one.rows for one in answers)
        self._seen(len(answers), tokens, rows, self.model.extra_rows - extra, perf_counter() - start)
        return self._checked(batch, answers)

    def _checked(self, batch: list[Waiting], answers: list[Answer]) -> Sequence[Answer | Exception]:
        """The answers that are finite, and refusals in place of the others; all routes get their answers from here."""
        finite = [answer.is_finite for answer in answers]
        self._not_finite = 0 if any(finite) else self._not_finite + 1
        self.failing = not any(finite) and (self.failing or self._not_finite >= REPEATED)
        if all(finite):
            return answers
        _LOG.error("%d of %d answers of a forward are not finite", finite.count(False), len(finite))
        last = next(one for one, well in zip(batch, finite, strict=True) if not well)
        self.doubtful = last.ids, last.types
        refusal = Refusal("backend", "the model's answer is not finite", reason="inference")
        return [answer if well else refusal for answer, well in zip(answers, finite, strict=True)]


_PADDING: Final = [0], [0]
_GONE: Final = Refusal("unhealthy", "the client went away", 499, reason="gone")
