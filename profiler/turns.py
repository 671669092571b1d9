"""Time ways to the same result in turns: a machine drifts, so each way sees every moment of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

Job = Callable[[int], object]  # called with the number of the turn
Progress = Callable[[str, int, int], None]  # called with what is being done, how much is done, and how much there is
Name = TypeVar("Name")


def silent(_what: str, _done: int, _total: int) -> None:
    """Say nothing of how far the work is."""


def told(tell: Progress, what: str, items: Sequence[Name]) -> Iterator[Name]:
    """Go through items; say before each, and at the end, how many are done."""
    for done, item in enumerate(items):
        tell(what, done, len(items))
        yield item
    tell(what, len(items), len(items))


@dataclass
class Times:
    """One job: milliseconds, turn by turn."""

    milliseconds: list[float] = field(default_factory=list)

    @property
    def ms(self) -> float:
        return median(self.milliseconds)


def alternate(names: Sequence[Name], turn: int) -> list[Name]:
    """Return names as they follow each other in a turn: forth, then back, then forth from the next name on.

    So no way always runs on the caches that the same other one left.
    """
    first = turn // 2 % max(1, len(names))
    found = [*names[first:], *names[:first]]
    return found[::-1] if turn % 2 else found


def interleave(
    jobs: Mapping[str, Job], turns: int, *, seconds: float = 0.0, tell: Progress = silent, what: str = "measure",
    before: Callable[[int], object] | None = None, ready: Callable[[str], object] | None = None,
    after: Callable[[str, int], object] | None = None, clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Times]:  # fmt: skip
    """Time jobs in turns of all of them. The first turn is not counted.

    Parameters
    ----------
    jobs : mapping of str to callable
    turns : int
        That are counted; more of them until `seconds` are over.
    tell, what : callable and str
        Told before each turn, under this name.
    before, ready, after : callable, optional
        Not timed: called before a turn with its number, before a job with its name, after it with its name and turn.
    clock : callable
        Gives seconds, of the wall or of the processor.
    """
    times = {name: Times() for name in jobs}
    end, turn = time.monotonic() + seconds, 0
    while turn <= turns or time.monotonic() < end:
        tell(what, min(turn, turns), 1 + turns)
        if before is not None:
            before(turn)
        for name in alternate(list(jobs), turn):
            if ready is not None:
                ready(name)
            start = clock()
            result = jobs[name](turn)
            spent = clock() - start
            del result  # freed outside the time
            if turn > 0:
                times[name].milliseconds.append(1e3 * spent)
            if after is not None:
                after(name, turn)
        turn += 1
    tell(what, 1 + turns, 1 + turns)
    return times
