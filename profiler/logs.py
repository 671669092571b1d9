"""Invent service logs, for a demo and for tests that need no network.

Five services of an imaginary company write to one stream: a login daemon, a web front end, a job scheduler, a storage
node and a payment API. Lines come in sessions, such as a client that tries several passwords. Sessions overlap.
`logs.txt` holds all that a service can say.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterator
from datetime import datetime, timedelta
from functools import cache
from importlib import resources
from random import Random
from typing import Any, Final, NamedTuple

PREFIXES: Final = {
    "login": "{time:%b %d %H:%M:%S}.{millis:03} {gate} logind[{pid}]: ",
    "web": "{time:%Y-%m-%dT%H:%M:%S}.{millis:03}Z {web} ",
    "jobs": "{time:%Y-%m-%d %H:%M:%S},{millis:03} dispatcher.{queue} - ",
    "storage": "[{time:%y/%m/%d %H:%M:%S}.{millis:03}] <store-{store}> ",
    "payments": "ts={time:%Y-%m-%dT%H:%M:%S}.{millis:03}+00:00 svc=payments req={request} ",
}


class Step(NamedTuple):
    """A line of a session: how often it comes, the wait before each in seconds, and its text."""

    fewest: int
    most: int
    shortest: float
    longest: float
    template: str


class Session(NamedTuple):
    """Lines that belong together: they share the fields that a star marks."""

    service: str
    weight: float
    steps: list[Step]


class _Fields(dict[str, Any]):
    """The fields of a session's lines, drawn when a template asks."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random

    def __missing__(self, name: str) -> object:
        kept, how = read_services()[1][name]
        value = _draw(how, self._random)
        if kept:
            self[name] = value
        return value


def _draw(how: str, random: Random) -> object:
    match how.split():
        case ["words", *words]:
            return random.choices(words, [1 / rank for rank in range(1, len(words) + 1)])[0]
        case ["whole", low, high]:
            return random.randint(int(low), int(high))
        case ["skewed", median, spread]:
            return max(1, int(int(median) * random.lognormvariate(0.0, float(spread))))
        case ["hexadecimal", digits]:
            return f"{random.getrandbits(4 * int(digits)):0{digits}x}"
        case ["amount"]:
            return f"{random.lognormvariate(3.2, 1.0):.2f}"
        case ["host"]:
            return f"10.20.{random.randint(0, 7)}.{random.randint(1, 254)}"
        case ["address", *blocks]:  # few addresses, so that they come back
            return f"{random.choice(blocks)}.{min(254, int(random.expovariate(1 / 60)) + 1)}"
        case ["page", *pages]:
            return random.choice(pages).format(random.randint(1, 9999))
    raise ValueError(f"logs.txt: {how!r} is no way to draw a field")


def generate_log(lines: int, seed: int = 0, services: Collection[str] = ()) -> Iterator[str]:
    """Invent a log, line by line without newlines, in order of time; lines have about 20 to 60 wordpieces.

    The same seed gives the same lines, and a longer log begins with the shorter one. Only the `services` write lines,
    by default all of `PREFIXES`; another one is a `ValueError`.
    """
    unknown = sorted(set(services) - set(PREFIXES))
    if unknown:
        raise ValueError(f"unknown service {unknown[0]!r}; expected one of {', '.join(PREFIXES)}")
    return itertools.islice(_stream(Random(seed), services or PREFIXES), max(lines, 0))


@cache
def read_services() -> tuple[list[Session], dict[str, tuple[bool, str]]]:
    """The sessions of `logs.txt`, and its fields: whether a session keeps the value, and how it is drawn."""
    sessions: list[Session] = []
    fields: dict[str, tuple[bool, str]] = {}
    text = resources.files("attmemo.profiler").joinpath("logs.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        if "|" in line:
            head, how, template = (part.strip() for part in line.split("|"))
            times, _, wait = how.partition(", ")
            fewest, _, most = times.partition("-")
            shortest, _, longest = (wait.removesuffix(" s") or "0.002-0.4").partition("-")
            if head:
                service, weight = head.split()
                sessions.append(Session(service, float(weight), []))
            step = Step(int(fewest), int(most or fewest), float(shortest), float(longest), template)
            sessions[-1].steps.append(step)
        else:
            name, _, how = line.partition(": ")
            fields[name.removesuffix("*")] = (name.endswith("*"), how)
    return sessions, fields


def _stream(random: Random, services: Collection[str]) -> Iterator[str]:
    """Lines without end: sessions begin at random moments and are merged by time."""
    sessions = [session for session in read_services()[0] if session.service in services]
    weights = list(itertools.accumulate(session.weight for session in sessions))
    waiting: list[tuple[datetime, int, str]] = []
    order = itertools.count()
    now = datetime(2031, 3, 3, 6)
    while True:
        now += timedelta(seconds=random.expovariate(1.5))
        while waiting and waiting[0][0] <= now:
            yield heapq.heappop(waiting)[2]
        (session,) = random.choices(sessions, cum_weights=weights)
        for when, line in _play(session, now, random):
            heapq.heappush(waiting, (when, next(order), line))


def _play(session: Session, when: datetime, random: Random) -> Iterator[tuple[datetime, str]]:
    """The lines of one session, each with its moment."""
    fields = _Fields(random)
    for step in session.steps:
        for nth in range(1, random.randint(step.fewest, step.most) + 1):
            when += timedelta(seconds=random.uniform(step.shortest, step.longest))
            fields |= {"time": when, "millis": when.microsecond // 1000, "nth": nth}
            yield when, (PREFIXES[session.service] + step.template).format_map(fields)
