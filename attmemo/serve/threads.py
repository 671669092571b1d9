"""Threads for texts, shared fairly: small requests do not wait behind large ones, large ones take turns."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from attmemo.serve.texts import Input

PIECE: Final = 64
"""Inputs that one thread works on at a time, at most."""
CHARACTERS: Final = 1 << 14
"""Characters of them, at most; a single input may have more."""

REST: Final = 3
"""After a piece of a large request its thread rests so many times as long, where the model has other work to do on the
same cores: the model's threads wait for each other, so that one that has to share its core holds up all."""

Item = TypeVar("Item", bound=Input)
Made = TypeVar("Made")


class TextThreads:
    """Two pools of threads on the same cores: one for requests of one piece, one for the pieces of others.

    Each has so many workers. `shared`: the model has the same cores.
    """

    def __init__(self, workers: int, cores: set[int], *, shared: bool) -> None:
        self._workers, self._rest, self._rests_until = workers, REST if shared else 0, 0.0
        self._small, self._large = (
            ThreadPoolExecutor(workers, f"attmemo-texts-{name}", initializer=os.sched_setaffinity, initargs=(0, cores))
            for name in ("small", "large")
        )

    async def run(self, work: Callable[[], Made]) -> Made:
        """The result of work for a large request."""
        return await asyncio.get_running_loop().run_in_executor(self._large, work)

    async def each(
        self, items: Sequence[Item], work: Callable[[Sequence[Item]], list[Made]],
        seen: Callable[[list[Made]], None] | None = None, busy: Callable[[], bool] = lambda: False,
    ) -> list[Made]:  # fmt: skip
        """Results of work on inputs, in their order; `work` is given a piece of them at a time.

        Only a few pieces of a request are handed to the threads at once: requests take turns. `seen` is told of the
        results of each piece, in the event loop; what it raises ends the work. `busy`: the model has other work.
        """
        pieces = cut(items)
        small = len(pieces) == 1 and _size(pieces[0]) <= CHARACTERS
        pool = self._small if small else self._large
        made = [list[Made]() for _ in pieces]
        left = deque(enumerate(pieces))
        loop = asyncio.get_running_loop()

        def done(piece: Sequence[Item]) -> list[Made]:
            if small:
                return work(piece)
            if busy():
                time.sleep(max(0.0, self._rests_until - time.monotonic()))
            start = time.monotonic()
            result = work(piece)
            self._rests_until = (end := time.monotonic()) + self._rest * (end - start)
            return result

        async def lane() -> None:
            while left:
                place, piece = left.popleft()
                made[place] = await loop.run_in_executor(pool, done, piece)
                if seen is not None:
                    seen(made[place])

        try:
            await asyncio.gather(*(lane() for _ in range(min(self._workers + 1, len(pieces)))))
        finally:
            left.clear()  # of a request that is refused nothing more is done
        return [one for part in made for one in part]

    def close(self) -> None:
        """End the threads, once what was handed to them is done."""
        self._small.shutdown()
        self._large.shutdown()


def cut(items: Sequence[Item]) -> list[Sequence[Item]]:
    """Inputs in pieces of at most `PIECE` inputs and `CHARACTERS` characters; token ids count as characters."""
    pieces, start, size = list[Sequence[Item]](), 0, 0
    for place, item in enumerate(items):
        more = _size([item])
        if place - start == PIECE or (place > start and size + more > CHARACTERS):
            pieces.append(items[start:place])
            start, size = place, 0
        size += more
    return [*pieces, items[start:]]


def _size(items: Sequence[Input]) -> int:
    return sum(sum(map(len, one)) if isinstance(one, tuple) else len(one) for one in items)
