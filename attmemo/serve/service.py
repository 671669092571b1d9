"""The service behind the routes: texts in, answers out, in asyncio; the model works in a thread of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

from attmemo.machine import cores
from attmemo.serve.gauges import gauges
from attmemo.serve.metrics import Metrics
from attmemo.serve.model import Answer, ServedModel
from attmemo.serve.queue import WORTH, Queue, Request, Waiting
from attmemo.serve.refusal import Refusal, overloaded
from attmemo.serve.settings import Settings, split_cores
from attmemo.serve.texts import Input, Side, Texts, Tokens, default_prompt
from attmemo.serve.worker import Worker

PIECE: Final = 64
"""Sequences that one thread tokenizes at a time: the threads share a large request."""
SHORT: Final = 1000
"""Characters of a single text that is tokenized at once: a way to a thread and back takes longer, 100 microseconds."""
WATCHED: Final = 0.05
"""Seconds after which a request that waits is dropped if its client goes away. To watch takes a task each."""


@dataclass(slots=True)
class Done:
    """The answers to one request, and what they cost; milliseconds."""

    answers: list[Answer]
    reuse: str
    characters: int
    tokens: int
    rows: int
    total: float
    tokenization: float
    queue: float
    inference: float

    def headers(self) -> dict[str, str]:
        """Response headers: those of TEI, and ours."""
        return {
            "x-compute-type": "cpu",
            "x-compute-time": str(round(self.total)),
            "x-compute-characters": str(self.characters),
            "x-compute-tokens": str(self.tokens),
            "x-total-time": str(round(self.total)),
            "x-tokenization-time": str(round(self.tokenization)),
            "x-queue-time": str(round(self.queue)),
            "x-inference-time": str(round(self.inference)),
            "x-attmemo-rows-computed": str(self.rows),
            "x-attmemo-rows-total": str(self.tokens),
            "x-attmemo-reuse": self.reuse,
        }


class Service:
    """One model, one database, one inference thread.

    Parameters
    ----------
    settings : Settings

    Attributes
    ----------
    model : ServedModel
    texts : Texts
        The model's tokenizer.
    metrics : Metrics
    draining : bool
        The service is about to end: it answers, but calls itself unhealthy.
    """

    model: ServedModel
    texts: Texts

    def __init__(self, settings: Settings) -> None:
        self.settings, self.metrics, self.draining = settings, Metrics(), False
        split = split_cores(os.sched_getaffinity(0), cores())
        self._queue = Queue(settings.max_batch_tokens, settings.max_batch_requests, WORTH * split.threads)
        self._worker = Worker(settings, self._queue, self._finished, self.metrics.forward)
        self._waiters: dict[Request, tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = {}
        self._inside = 0  # sequences that were let in and are not answered
        self._threads = ThreadPoolExecutor(
            settings.workers, "attmemo-texts", initializer=os.sched_setaffinity, initargs=(0, split.others)
        )

    def start(self) -> Service:
        """Load the model and make it ready; raises what went wrong."""
        self._worker.start()
        self.model = self._worker.model
        settings = self.settings
        try:
            prompt = default_prompt(self.model.prompts, settings.default_prompt, settings.default_prompt_name)
            self.texts = Texts(
                self.model.tokenizer, self.model.longest, self.model.vocabulary, self.model.prompts, prompt
            )  # fmt: skip
        except BaseException:
            self.close()
            raise
        self.metrics.watch(lambda: gauges(self))
        return self

    def close(self) -> None:
        """Answer what waits, close the database whole, and end the threads."""
        self._queue.close()
        self._worker.close()
        self._threads.shutdown()

    @property
    def alive(self) -> bool:
        """Whether the model's thread runs."""
        return self._worker.alive

    @property
    def inside(self) -> int:
        """Sequences that were let in and are not answered."""
        return self._inside

    @property
    def waiting(self) -> int:
        """Sequences that wait for the model."""
        return len(self._queue)

    async def healthy(self) -> bool:
        """Whether requests should be sent here. After a failed forward the model is asked for one more."""
        if self.draining or not self._worker.alive:
            return False
        if not self._worker.failing:
            return True
        try:
            request = Request(1, each=False, reuse=False)
            await self._ask([Tokens([0], [0], 0)], request, None)
        except Refusal:
            return False
        return True

    async def answer(
        self, inputs: Sequence[Input], *, truncate: bool | None, side: Side = "right", prompt: str | None = None,
        each: bool = False, reuse: bool = True, method: str = "batch",
        gone: Callable[[], Awaitable[Any]] | None = None,
    ) -> Done:  # fmt: skip
        """Answers to inputs, in their order.

        Parameters
        ----------
        inputs : sequence of str, pair of str, or list of int
        truncate : bool, optional
            Cut what is too long. Default: as the settings say.
        side : {"right", "left"}
            Where to cut.
        prompt : str, optional
            Name of the prompt to put before each text.
        each : bool
            Also give the hidden states of all tokens.
        reuse : bool
            Records may serve.
        method : {"batch", "single"}
            How metrics count it.
        gone : callable, optional
            Awaited beside the work: when it returns, the client has gone away, and what waits is dropped.

        Raises
        ------
        Refusal
        """
        start = perf_counter()
        self.metrics.asked(method)
        self._let_in(len(inputs))
        try:
            cut = self.settings.auto_truncate if truncate is None else truncate
            encoded = await self._encode(inputs, cut, side, prompt)
            request = Request(len(encoded), each=each, reuse=reuse)
            tokenized = perf_counter()
            await self._ask(encoded, request, gone)
        finally:
            self._inside -= len(inputs)
        answers = [answer for answer in request.answers if answer is not None]
        done = Done(
            answers,
            self.model.reuse if reuse else "off",
            sum(one.characters for one in encoded),
            sum(one.tokens for one in answers),
            sum(one.rows for one in answers),
            1e3 * (perf_counter() - start),
            1e3 * (tokenized - start),
            1e3 * (request.taken - request.queued),
            1e3 * request.model_seconds / request.count,
        )
        times = done.total, done.tokenization, done.queue, done.inference
        task = "embed" if self.model.task == "embedding" else "predict"
        self.metrics.answered(method, task, request.count, done.tokens, times)
        return done

    async def in_thread(self, work: Callable[..., Any], *given: Any) -> Any:
        """The result of a function on texts, run in a thread for texts."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *given)

    def _let_in(self, count: int) -> None:
        """Count the sequences in, or refuse them. A request larger than the limit is let in where nothing is."""
        if count > self.settings.max_client_batch_size:
            most = self.settings.max_client_batch_size
            what = f"batch size {count} > maximum allowed batch size {most}"
            raise Refusal("validation", what, reason="batch_size")
        if self._inside and self._inside + count > self.settings.max_concurrent_requests:
            raise overloaded()
        self._inside += count

    async def _encode(self, inputs: Sequence[Input], truncate: bool, side: Side, prompt: str | None) -> list[Tokens]:
        """Tokens of inputs, made in threads beside the model."""

        def encode(piece: Sequence[Input]) -> list[Tokens]:
            return [self.texts.encode(one, truncate=truncate, side=side, prompt=prompt) for one in piece]

        at_once = side == "right" or not truncate  # the tokenizer that cuts on the left may have to be made
        if at_once and len(inputs) == 1 and isinstance(inputs[0], str) and len(inputs[0]) <= SHORT:
            return encode(inputs)
        pieces = [inputs[start : start + PIECE] for start in range(0, len(inputs), PIECE)]
        parts = await asyncio.gather(*(self.in_thread(encode, piece) for piece in pieces))
        return [tokens for part in parts for tokens in part]

    async def _ask(
        self, encoded: Sequence[Tokens], request: Request, gone: Callable[[], Awaitable[Any]] | None
    ) -> None:
        """Have the model answer; raises why it does not."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiters[request] = loop, future
        self._queue.put([
            Waiting(request, place, one.ids, one.types, len(one.ids)) for place, one in enumerate(encoded)
        ])  # fmt: skip
        watch = None if gone is None else _Watch(loop, gone, request)
        try:
            await future  # if the client goes away too: sequences count until the model's thread has dropped them
        except asyncio.CancelledError:
            request.gone = True
            raise
        finally:
            if watch is not None:
                watch.end()
        if request.error is not None:
            raise request.error

    def _finished(self, requests: list[Request]) -> None:
        """Called in the model's thread: wake those who wait, one call for each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        for request in requests:
            loop, future = self._waiters.pop(request)
            by_loop.setdefault(loop, []).append(future)
        for loop, futures in by_loop.items():
            with suppress(RuntimeError):  # the loop was closed; the model's thread must live
                loop.call_soon_threadsafe(_wake, futures)


class _Watch:
    """Marks a request whose client has gone away, once `gone` returns; it is not asked at first."""

    def __init__(self, loop: asyncio.AbstractEventLoop, gone: Callable[[], Awaitable[Any]], request: Request) -> None:
        self._gone, self._request = gone, request
        self._task: asyncio.Future[Any] | None = None
        self._timer = loop.call_later(WATCHED, self._begin)

    def end(self) -> None:
        """Watch no more."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = asyncio.ensure_future(self._gone())
        self._task.add_done_callback(self._mark)

    def _mark(self, task: asyncio.Future[Any]) -> None:
        if not task.cancelled():  # one that is cancelled says nothing: its request may have been marked already
            task.exception()  # retrieved, or the loop logs it
            self._request.gone = True


def _wake(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
