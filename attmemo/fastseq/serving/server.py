"""Continuous batching: requests come and go at any step, and every step is one pass over all of them.

A step takes, oldest request first, the one next token of each that is being answered and, as far as `max_tokens`
allows, a piece of the prompts that are not yet in the cache. What several requests begin with is computed once. When
pages run out the youngest request gives its pages back and is computed again later; its answer is the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from attmemo.errors import ArgumentError, OutOfPagesError, UnknownSequenceError
from attmemo.fastseq.serving.cached_model import CachedModel

Choose = Callable[[torch.Tensor], torch.Tensor]


@dataclass(eq=False)
class Request:
    """A prompt and its answer so far."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    stop: frozenset[int] = frozenset()
    tokens: list[int] = field(default_factory=list)  # the answer; a stop token is its last
    finish: str | None = None  # "length", "stop" or "cancelled"; None while it is waiting or being answered
    shared: int = 0  # tokens that were in the cache already when it was (last) admitted
    preempted: int = 0  # how often it gave its pages back
    _sequence: int | None = None

    @property
    def text(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return (*self.prompt, *self.tokens)

    def part(self, begin: int, end: int) -> list[int]:
        """These tokens of the text."""
        split = len(self.prompt)
        return [*self.prompt[begin:end], *self.tokens[max(0, begin - split) : max(0, end - split)]]


@dataclass
class ServerStats:
    """What was done since the beginning."""

    steps: int = 0
    mixed: int = 0  # steps with both decoding and prompts in one pass
    tokens: int = 0  # computed
    shared: int = 0  # not computed, because they were in the cache
    preempted: int = 0


class Server:
    """Answers requests from one model and one cache.

    Parameters
    ----------
    model : CachedModel
        The model and its cache.
    max_tokens : int
        New tokens in one step, at most; longer prompts are computed in pieces.
    max_sequences : int
        Requests that are answered at a time, at most.
    share_prefixes : bool
        Compute what requests have in common once. At least a page has to be in common.
    choose : callable, optional
        From logits ``[K, vocabulary]`` to the next tokens ``[K]``; the most probable if not given.
    """

    def __init__(
        self,
        model: CachedModel,
        *,
        max_tokens: int = 512,
        max_sequences: int = 64,
        share_prefixes: bool = True,
        choose: Choose | None = None,
    ) -> None:
        if max_tokens < 1 or max_sequences < 1:
            raise ArgumentError(f"Server: max_tokens {max_tokens} and max_sequences {max_sequences} must be 1 or more")
        self.model, self.cache = model, model.cache
        self.max_tokens, self.max_sequences, self.share_prefixes = max_tokens, max_sequences, share_prefixes
        self.stats = ServerStats()
        self._choose: Choose = choose or (lambda logits: logits.argmax(-1))
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in the order of their admission
        self._kept: dict[int, tuple[int, ...]] = {}

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Requests without a place in the cache, the next one first."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that are being answered, oldest first."""
        return tuple(self._running)

    # --- requests come and go ----------------------------------------------------------------------------------------

    def submit(self, prompt: Iterable[int], max_new_tokens: int, stop: Iterable[int] = ()) -> Request:
        """A new request; its `tokens` grow with every `step`.

        Raises
        ------
        ArgumentError
            If the prompt is empty or has a token that the model has not, or nothing is asked for.
        OutOfPagesError
            If the cache could not hold prompt and answer even if it were empty.
        """
        request = Request(tuple(prompt), max_new_tokens, frozenset(stop))
        if not request.prompt or max_new_tokens < 1:
            raise ArgumentError(
                f"submit: {len(request.prompt)} tokens of prompt, max_new_tokens {max_new_tokens}; expected 1 or more"
            )
        self._check_tokens("submit", request.prompt)
        pages, needed = self.cache.stats().pages, self.cache.pages_for(self._room(request))
        if needed > pages:
            raise OutOfPagesError(
                f"submit: {len(request.prompt)} tokens and {max_new_tokens} more need {needed} pages of {pages}",
                "make the cache with more pages, or ask for fewer tokens",
            )
        self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Stop answering; its pages are free at once. Nothing happens to a request that is finished."""
        if request in self._waiting:
            self._waiting.remove(request)
            request.finish = "cancelled"
        elif request in self._running:
            self._leave(request)
            request.finish = "cancelled"

    def keep_prefix(self, prompt: Iterable[int]) -> int:
        """Compute the beginning of many prompts once and keep it, until `drop_prefix` is called with its number."""
        tokens = tuple(prompt)
        self._check_tokens("keep_prefix", tokens)
        near, shared = self._find_prefix(tokens, len(tokens))
        sequence = self.cache.open() if near is None else self.cache.fork(near, shared)
        try:
            for begin in range(shared, len(tokens), self.max_tokens):
                part = tokens[begin : begin + self.max_tokens]
                self.model.forward(self.cache.advance([(sequence, len(part))]), self._tensor(part))
                self.stats.tokens += len(part)
        except BaseException:
            self.cache.free(sequence)
            raise
        self._kept[sequence] = tokens
        return sequence

    def drop_prefix(self, number: int) -> None:
        """Let go of a kept prefix; requests that share it are not disturbed.

        Raises
        ------
        DoubleFreeError
            If it was dropped before.
        UnknownSequenceError
            If there never was such a prefix.
        """
        if number not in self._kept:
            self.cache.length(number)  # knows whether there ever was such a sequence
            raise UnknownSequenceError(
                f"drop_prefix: sequence {number} is no kept prefix", "keep_prefix() gives its number"
            )
        del self._kept[number]
        self.cache.free(number)

    # --- steps -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Step until every request is answered."""
        while self._waiting or self._running:
            self.step()

    def step(self) -> list[Request]:
        """One pass through the model; the requests that finished with it.

        Raises
        ------
        OutOfPagesError
            If a single request is left and finds no page, because kept prefixes hold them.
        """
        plan = self._plan(admit=True)
        while True:
            if not plan:
                if self._waiting and not self._running:
                    raise OutOfPagesError(
                        f"step: no request is running, and {self.cache.pages_free} free pages do not do for the next",
                        "drop_prefix() what is not needed, or free the sequences that were opened beside the server",
                    )
                return []
            asked = [(self._sequence(request), tokens) for request, tokens in plan]
            try:
                step = self.cache.advance(asked)
                break
            except OutOfPagesError:
                if len(self._running) < 2:
                    raise
                self._preempt(self._running[-1])
                plan = self._plan(admit=False)  # else it would come back at once
        flat: list[int] = []
        for (request, tokens), begin in zip(plan, step.start_pos.tolist(), strict=True):
            flat += request.part(begin, begin + tokens)
        try:
            logits = self.model.forward(step, self._tensor(flat))  # [B, vocabulary]
            chosen = self._choose_tokens([request for request, _ in plan], logits)
        except BaseException:
            for (sequence, _), length in zip(asked, step.start_pos.tolist(), strict=True):
                self.cache.truncate(sequence, length)
            raise
        self.stats.steps += 1
        self.stats.tokens += len(flat)
        self.stats.mixed += 0 < step.decoding_batches < len(plan)
        for request, token in chosen:
            request.tokens.append(token)
            if token in request.stop:
                request.finish = "stop"
            elif len(request.tokens) == request.max_new_tokens:
                request.finish = "length"
            if request.finish:
                self._leave(request)
        return [request for request, _ in chosen if request.finish]

    # --- inside ------------------------------------------------------------------------------------------------------

    def _check_tokens(self, what: str, tokens: tuple[int, ...]) -> None:
        """Here, not in a step, where the model would fail for all requests and not say which."""
        known = self.model.vocabulary
        for place, token in enumerate(tokens):
            if not 0 <= token < known:
                raise ArgumentError(f"{what}: token {place} is {token}, expected 0 to {known - 1}")

    def _choose_tokens(self, requests: list[Request], logits: torch.Tensor) -> list[tuple[Request, int]]:
        """The next token of each request whose whole text is in the cache."""
        whole = [at for at, request in enumerate(requests) if self._missing(request) == 0]
        tokens = self._choose(logits[whole]).tolist() if whole else []
        return list(zip([requests[at] for at in whole], tokens, strict=True))

    def _plan(self, admit: bool) -> list[tuple[Request, int]]:
        """Who computes how many tokens in the next step; those with one token first."""
        plan, budget = [], self.max_tokens
        missing = {request: self._missing(request) for request in self._running}
        for request in sorted(self._running, key=lambda request: missing[request] > 1):
            if tokens := min(missing[request], budget):
                plan.append((request, tokens))
                budget -= tokens
        for request in list(self._waiting) if admit else ():
            if not budget or len(self._running) == self.max_sequences:
                break
            near, shared = self._find_prefix(request.text, len(request.text) - 1)
            if self._is_coming(request.text, shared):
                continue
            if not self._admit(request, near, shared, plan):
                break  # the next one may be shorter, but would keep this one waiting for ever
            tokens = min(len(request.text) - shared, budget)
            plan.append((request, tokens))
            budget -= tokens
        return sorted(plan, key=lambda item: item[1] > 1)

    def _admit(self, request: Request, near: int | None, shared: int, plan: list[tuple[Request, int]]) -> bool:
        """A place in the cache for a waiting request, if there are pages for its whole text and for the plan."""
        reserve = self._room(request) if self.cache.cache_mode == 0 else 0  # there, growing means moving
        try:
            sequence = self.cache.open(reserve) if near is None else self.cache.fork(near, shared, reserve)
        except OutOfPagesError:
            return False
        asked = [(self._sequence(other), tokens) for other, tokens in plan]
        if self.cache.pages_needed([*asked, (sequence, len(request.text) - shared)]) > self.cache.pages_free:
            self.cache.free(sequence)
            return False
        request._sequence, request.shared = sequence, shared
        self.stats.shared += shared
        self._waiting.remove(request)
        self._running.append(request)
        return True

    def _find_prefix(self, text: tuple[int, ...], most: int) -> tuple[int | None, int]:
        """The sequence with the longest common beginning in the cache, and its length, `most` at most."""
        best: tuple[int | None, int] = (None, 0)
        if self.share_prefixes:
            for sequence, other in self._texts():
                length = min(_common(text, other), self.cache.length(sequence), most)
                if length >= self.cache.page_size and length > best[1]:
                    best = (sequence, length)
        return best

    def _is_coming(self, text: tuple[int, ...], shared: int) -> bool:
        """Whether a running request is about to compute at least a page more of what this text begins with."""
        if not self.share_prefixes:
            return False
        return any(
            min(_common(text, request.prompt), len(text) - 1) >= shared + self.cache.page_size
            and self.cache.length(self._sequence(request)) < len(request.prompt)
            for request in self._running
        )

    def _texts(self) -> list[tuple[int, tuple[int, ...]]]:
        return [*self._kept.items(), *((self._sequence(request), request.text) for request in self._running)]

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        self._waiting.appendleft(request)
        request.preempted += 1
        self.stats.preempted += 1

    def _leave(self, request: Request) -> None:
        self.cache.free(self._sequence(request))
        self._running.remove(request)
        request._sequence = None

    def _room(self, request: Request) -> int:
        """The most tokens of a request in the cache; no later token needs the keys of the last one."""
        return len(request.prompt) + request.max_new_tokens - 1

    def _missing(self, request: Request) -> int:
        """Tokens of a running request that are not in the cache."""
        return len(request.prompt) + len(request.tokens) - self.cache.length(self._sequence(request))

    def _sequence(self, request: Request) -> int:
        assert request._sequence is not None, "the request has no place in the cache"
        return request._sequence

    def _tensor(self, tokens: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(tokens), dtype=torch.int64, device=self.cache.cache.device)


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens two texts have in common at their beginning."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length
