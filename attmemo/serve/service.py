"""The service behind the routes: texts in, answers out, in asyncio; the model works in a thread of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, TypeVar

from attmemo.arguments import check_namespace
from attmemo.errors import ArgumentError
from attmemo.serve.gauges import gauges
from attmemo.serve.metrics import Metrics
from attmemo.serve.model import Answer, ServedModel
from attmemo.serve.queue import WORTH, Queue, Request, Waiting
from attmemo.serve.refusal import Refusal, overloaded
from attmemo.serve.room import Room
from attmemo.serve.settings import Settings, split_cores
from attmemo.serve.texts import SHORT, Input, Side, Texts, Tokens, default_prompt
from attmemo.serve.threads import TextThreads
from attmemo.serve.worker import Worker
from attmemo.system.machine import cores

BODIES: Final = 32 << 20
"""Bytes of all bodies that are in the service, at most."""
LARGEST: Final = 8
"""Bodies of `payload_limit` for which there is room, if that takes more."""
SMALL: Final = 1 << 16
"""A body that is no larger is let in whatever others hold; `max_concurrent_requests` bounds how many these are."""
ANSWERS: Final = 256 << 20
"""Bytes of all large answers that are made or sent, at most."""
NUMBER: Final = 16
"""Bytes of a number of a hidden state until it is sent: 4 as it was computed, and 12 digits."""
WATCHED: Final = 0.05
"""Seconds after which a request that waits is dropped if its client goes away. To watch takes a task each."""

Item = TypeVar("Item", str, list[int])
Made = TypeVar("Made")


@dataclass(slots=True)
class Done:
    """The answers to one request, and what they cost; milliseconds."""

    answers: list[Answer]
    encoded: Sequence[Tokens]
    reuse: str
    characters: int
    tokens: int
    rows: int
    total: float
    tokenization: float
    queue: float
    inference: float
    shows_rows: bool

    def headers(self) -> dict[str, str]:
        """Response headers: those of TEI, and ours where they are asked for."""
        found = {
            "x-compute-type": "cpu",
            "x-compute-time": str(round(self.total)),
            "x-compute-characters": str(self.characters),
            "x-compute-tokens": str(self.tokens),
            "x-total-time": str(round(self.total)),
            "x-tokenization-time": str(round(self.tokenization)),
            "x-queue-time": str(round(self.queue)),
            "x-inference-time": str(round(self.inference)),
        }
        if self.shows_rows:
            found["x-attmemo-rows-computed"] = str(self.rows)
            found["x-attmemo-rows-total"] = str(self.tokens)
            found["x-attmemo-reuse"] = self.reuse
        return found


class Service:
    """One model, one database, one inference thread.

    Attributes
    ----------
    threads : TextThreads
        They work on texts and on large bodies.
    bodies, answers : Room
        What requests hold.
    draining : bool
        The service is about to end: it answers, but calls itself unhealthy.
    inside : int
        Sequences that were let in and are not answered.
    """

    model: ServedModel
    texts: Texts

    def __init__(self, settings: Settings) -> None:
        self.settings, self.metrics, self.draining = settings, Metrics(), False
        split = split_cores(os.sched_getaffinity(0), cores())
        self._queue = Queue(settings.max_batch_tokens, settings.max_batch_requests, WORTH * split.threads)
        self._worker = Worker(settings, self._queue, self._finished, self.metrics.forward)
        self._waiters: dict[Request, tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = {}
        self.inside = 0
        self._shown = 0  # of these, inputs of the tokenizer's own routes
        self.threads = TextThreads(settings.workers, split.others, shared=split.others == split.model)
        self.bodies, self.answers = Room(max(BODIES, LARGEST * settings.payload_limit), SMALL), Room(ANSWERS)

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
        self.metrics.now = lambda: gauges(self)
        return self

    def close(self) -> None:
        """Answer what waits, close the database whole, and end the threads."""
        self._queue.close()
        self._worker.close()
        self.threads.close()

    @property
    def alive(self) -> bool:
        """Whether the model's thread runs."""
        return self._worker.alive

    @property
    def waiting(self) -> int:
        """Sequences that wait for the model."""
        return len(self._queue)

    async def healthy(self) -> bool:
        """Whether requests should be sent here. Of a model that fails one more forward is asked."""
        if self.draining or not self._worker.alive:
            return False
        if not self._worker.failing:
            return True
        try:
            request = Request(1, each=False, reuse=False)
            await self._ask([Tokens(*self._worker.doubtful, 0)], request, None)
        except Refusal:
            return False
        return True

    def check_namespace(self, namespace: str) -> None:
        """Refuse what can be no namespace here."""
        if not self.settings.namespaces:
            raise Refusal("validation", "this service has no namespaces (--namespaces)", reason="namespace")
        try:
            check_namespace(namespace)
        except ArgumentError as error:
            raise Refusal("validation", error.what, reason="namespace") from error

    def _admit(self, namespace: str) -> None:
        """Let a namespace in, or refuse it: there is room for so many."""
        try:
            if (spaces := self.model.handle.spaces) is not None:
                spaces.admit(namespace)
        except ArgumentError as error:
            raise Refusal("validation", error.what, reason="namespace") from error

    async def answer(
        self, inputs: Sequence[Input], *, truncate: bool | None, side: Side = "right", prompt: str | None = None,
        each: bool = False, reuse: bool = True, namespace: str | None = None, method: str = "batch",
        gone: Callable[[], Awaitable[Any]] | None = None, hold: Callable[[int], None] | None = None,
    ) -> Done:  # fmt: skip
        """Answers to inputs, in their order, or a `Refusal`.

        Parameters
        ----------
        inputs : sequence of str, pair of str, or list of int
        truncate, side, prompt
            Whether to cut what is too long (None: as the settings say), on which side, and the name of what stands
            before each text.
        each : bool
            Also give the hidden states of all tokens.
        reuse, namespace
            Whether records may serve, and whose; `check_namespace` has seen it.
        method : {"batch", "single"}
            How metrics count it.
        gone : callable, optional
            Awaited beside the work: when it returns, the client has gone away, and what waits is dropped.
        hold : callable, optional
            Given the bytes that hidden states of all tokens will take, before they are computed; it may refuse them.
        """
        start = perf_counter()
        self.metrics.asked(method)
        self._check_count(len(inputs))
        self._let_in(len(inputs))
        try:
            cut = self.settings.auto_truncate if truncate is None else truncate
            encoded = await self._encode(inputs, cut, side, prompt)
            if namespace is not None:  # only now: what is refused takes no room
                self._admit(namespace)
            request = Request(len(encoded), each=each, reuse=reuse, namespace=namespace)
            tokenized = perf_counter()
            if each and hold is not None:
                hold(NUMBER * self.model.width * sum(len(one.ids) for one in encoded))
            await self._ask(encoded, request, gone)
        finally:
            self.inside -= len(inputs)
        answers = [answer for answer in request.answers if answer is not None]
        done = Done(
            answers,
            encoded,
            self.model.reuse if reuse else "off",
            sum(one.characters for one in encoded),
            sum(one.tokens for one in answers),
            sum(one.rows for one in answers),
            1e3 * (perf_counter() - start),
            1e3 * (tokenized - start),
            1e3 * (request.taken - request.queued),
            1e3 * request.model_seconds / request.count,
            self.settings.row_headers,
        )
        times = done.total, done.tokenization, done.queue, done.inference
        task = "embed" if self.model.task == "embedding" else "predict"
        self.metrics.answered(method, task, request.count, done.tokens, times)
        return done

    async def show(
        self, inputs: Sequence[Item], work: Callable[[Sequence[Item]], list[Made]], method: str,
        seen: Callable[[list[Made]], None] | None = None,
    ) -> list[Made]:  # fmt: skip
        """Results of work on inputs, of a route that needs the tokenizer alone, or a `Refusal`.

        Such inputs are sequences in the service too. They may take half of `max_concurrent_requests`: the other half
        is for the model. A request of more inputs is let in where no other such request is. `work` and `seen` are as
        of `TextThreads.each`; metrics count it as `method`.
        """
        start = perf_counter()
        self.metrics.asked(method)
        self._check_count(len(inputs))
        half = -(-self.settings.max_concurrent_requests // 2)
        count = min(len(inputs), half)
        if self._shown + count > half:
            raise overloaded()
        self._let_in(count)
        self._shown += count
        try:
            made = await self.threads.each(inputs, work, seen, busy=lambda: self.inside > self._shown)
        finally:
            self._shown -= count
            self.inside -= count
        self.metrics.shown(method, len(inputs), 1e3 * (perf_counter() - start))
        return made

    def _check_count(self, count: int) -> None:
        most = self.settings.max_client_batch_size
        if count > most:
            what = f"batch size {count} > maximum allowed batch size {most}"
            raise Refusal("validation", what, reason="batch_size")

    def _let_in(self, count: int) -> None:
        """Count the sequences in, or refuse them. A request larger than the limit is let in where nothing is."""
        if self.inside and self.inside + count > self.settings.max_concurrent_requests:
            raise overloaded()
        self.inside += count

    async def _encode(self, inputs: Sequence[Input], truncate: bool, side: Side, prompt: str | None) -> list[Tokens]:
        """Tokens of inputs, made in threads beside the model."""

        def encode(piece: Sequence[Input]) -> list[Tokens]:
            how: dict[str, Any] = {"truncate": truncate, "side": side, "prompt": prompt}
            return [self.texts.encode(one, placed=self.model.task == "tagger", **how) for one in piece]

        at_once = side == "right" or not truncate  # the tokenizer that cuts on the left may have to be made
        if at_once and len(inputs) == 1 and isinstance(inputs[0], str) and len(inputs[0]) <= SHORT:
            return encode(inputs)
        return await self.threads.each(inputs, encode, busy=lambda: self.inside - self._shown > len(inputs))

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
