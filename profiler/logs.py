"""Invent service logs, for a demo and for tests that need no network.

Five services of an imaginary company write to one stream: a login daemon, a web front end, a job scheduler, a
storage node and a payment API. What happens comes in sessions (a client that tries several passwords, a
job that starts, reports and ends), and sessions overlap. Everything a service can say is in `SESSIONS`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random

__all__ = ["SESSIONS", "Session", "Step", "generate_log"]


@dataclass(frozen=True, slots=True)
class Step:
    """A line of a session.

    Attributes
    ----------
    template : str
        The line after its service's prefix; `{name}` is filled from `FIELDS`, `{nth}` is the repetition.
    times : tuple of int
        Fewest and most repetitions; 0 makes the step optional.
    gap : tuple of float
        Shortest and longest wait before each line, in seconds.
    """

    template: str
    times: tuple[int, int] = (1, 1)
    gap: tuple[float, float] = (0.002, 0.4)


@dataclass(frozen=True, slots=True)
class Session:
    """Lines that belong together: they share the fields in `SHARED`.

    Attributes
    ----------
    service : str
        Key of `PREFIXES`.
    weight : float
        How often it happens, relative to the others.
    steps : tuple of Step
        Its lines, in order.
    """

    service: str
    weight: float
    steps: tuple[Step, ...]


_START = datetime(2031, 3, 3, 6, 0, 0)
_SESSIONS_PER_SECOND = 1.5

# {time} and {millis} are the moment of the line, {nth} (in a template) which repetition of its step it is.
PREFIXES: Mapping[str, str] = {
    "login": "{time:%b %d %H:%M:%S}.{millis} {gate} logind[{pid}]: ",
    "web": "{time:%Y-%m-%dT%H:%M:%S}.{millis}Z {web} ",
    "jobs": "{time:%Y-%m-%d %H:%M:%S},{millis} dispatcher.{queue} - ",
    "storage": "[{time:%y/%m/%d %H:%M:%S}.{millis}] <{store}> ",
    "payments": "ts={time:%Y-%m-%dT%H:%M:%S}.{millis}+00:00 svc=payments req={request} ",
}

SESSIONS: tuple[Session, ...] = (
    Session(
        "login",
        9,
        (
            Step("client {ip}:{port} connected, protocol 2.0, software {client}"),
            Step("password rejected for user '{user}' from {ip}:{port}, attempt {nth} in window", (1, 7), (0.6, 3.0)),
            Step("too many rejected passwords from {ip}, peer held back for {seconds} s", (0, 1)),
            Step("client {ip}:{port} left before login was complete, {bytes} bytes received"),
        ),
    ),
    Session(
        "login",
        4,
        (
            Step("client {ip}:{port} connected, protocol 2.0, software {client}"),
            Step("public key {fingerprint} accepted for user '{user}' from {ip}:{port}"),
            Step("session {session} opened for user '{user}' (uid={uid}) on terminal pts/{count}"),
            Step("session {session}: channel request exec, {bytes} bytes of command line", (0, 4), (1.0, 20.0)),
            Step("session {session} closed for user '{user}' after {seconds} s, {bytes} bytes out", gap=(5.0, 90.0)),
        ),
    ),
    Session("login", 1, (Step("no name on record for address {ip}, reverse lookup took {millisecs} ms"),)),
    Session("login", 0.2, (Step("host key {fingerprint} rotated, next rotation in {seconds} s"),)),
    Session(
        "web",
        26,
        (
            Step('{ip} GET {page} status={ok} bytes={bytes} took={millisecs}ms agent="{agent}"', (1, 6), (0.05, 6.0)),
            Step('{ip} GET /static/{asset} status=304 bytes=0 took={few}ms agent="{agent}" cache=hit', (0, 4)),
        ),
    ),
    Session(
        "web",
        8,
        (
            Step('{ip} POST /cart/{cart}/items status=201 bytes={bytes} took={millisecs}ms agent="{agent}"', (1, 3)),
            Step(
                '{ip} POST /cart/{cart}/checkout status=202 bytes={bytes} took={millisecs}ms agent="{agent}"', (0, 1)
            ),
        ),
    ),
    Session(
        "web",
        4,
        (Step('{ip} GET {page} status=404 bytes={bytes} took={few}ms agent="{agent}" note="no route"', (1, 9)),),
    ),
    Session(
        "web",
        1.2,
        (
            Step(
                "upstream {node}:{port} did not answer within {millisecs} ms for GET {route}, retry {nth} of 5",
                (1, 4),
            ),
            Step(
                '{ip} GET {route} status=502 bytes={bytes} took={millisecs}ms agent="{agent}" upstream={node}:{port}'
            ),
        ),
    ),
    Session(
        "web", 0.5, (Step("rate limit reached by {ip}: {count} requests in {seconds} s, replies delayed", (1, 3)),)
    ),
    Session(
        "jobs",
        11,
        (
            Step("INFO job {job}#{number} queued by {user}, priority {count}, needs {cores} cores and {memory} MiB"),
            Step(
                "INFO job {job}#{number} started on {node} as pid {pid}, waited {millisecs} ms in queue",
                gap=(0.2, 9.0),
            ),
            Step(
                "INFO job {job}#{number} progress {percent}% after {seconds} s, {memory} MiB resident",
                (0, 5),
                (2.0, 25.0),
            ),
            Step("INFO job {job}#{number} finished on {node} with exit code 0 in {seconds} s", gap=(1.0, 40.0)),
        ),
    ),
    Session(
        "jobs",
        1.5,
        (
            Step("INFO job {job}#{number} started on {node} as pid {pid}, waited {millisecs} ms in queue"),
            Step(
                "WARN job {job}#{number} lost its heartbeat on {node}, last seen {seconds} s ago", (1, 3), (5.0, 15.0)
            ),
            Step("WARN job {job}#{number} killed by signal {count} on {node}, requeued as attempt {few} of 9"),
        ),
    ),
    Session("jobs", 2, (Step("INFO node {node} reports load {percent}%, {memory} MiB free, {count} jobs running"),)),
    Session(
        "jobs", 0.3, (Step("WARN calendar '{job}' skipped its run: previous run #{number} still holds the lock"),)
    ),
    Session("jobs", 0.15, (Step("WARN node {node} drained by {user}, {count} jobs moved in {seconds} s"),)),
    Session(
        "storage",
        16,
        (
            Step("INFO writer: block {block} open for write from {host}:{port}, replica {few} of 9"),
            Step(
                "INFO writer: block {block} received {size} bytes from {host}:{port} in {millisecs} ms", gap=(0.1, 2.0)
            ),
            Step("INFO writer: block {block} acknowledged downstream by {node}, checksum {checksum}", (1, 2)),
        ),
    ),
    Session(
        "storage",
        9,
        (Step("INFO reader: block {block} sent {size} bytes to {host}:{port} in {millisecs} ms", (1, 5)),),
    ),
    Session(
        "storage",
        2.5,
        (
            Step("INFO janitor: scan of volume /vol{volume} began, {number} blocks listed"),
            Step("INFO janitor: block {stray} unlinked from /vol{volume}, {size} bytes returned", (2, 12)),
            Step(
                "INFO janitor: scan of volume /vol{volume} ended in {seconds} s, {count} blocks unlinked",
                gap=(0.5, 8.0),
            ),
        ),
    ),
    Session(
        "storage",
        0.6,
        (
            Step("WARN verifier: block {block} checksum {checksum} differs from the recorded {checksum}"),
            Step(
                "INFO verifier: block {block} copied again from {node} ({host}:{port}), {size} bytes", gap=(0.5, 4.0)
            ),
        ),
    ),
    Session(
        "storage", 0.4, (Step("WARN disk: /vol{volume} is {percent}% full, {memory} MiB left, writes moved away"),)
    ),
    Session(
        "payments",
        10,
        (
            Step('level=info msg="authorization requested" merchant={merchant} amount={amount} currency={currency}'),
            Step('level=info msg="risk score computed" merchant={merchant} score=0.{percent} rules={count}', (0, 1)),
            Step('level=info msg="authorization approved" issuer={issuer} code={checksum} elapsed_ms={millisecs}'),
            Step(
                'level=info msg="capture settled" batch={number} amount={amount} currency={currency}',
                (0, 1),
                (1.0, 30.0),
            ),
        ),
    ),
    Session(
        "payments",
        1.6,
        (
            Step('level=info msg="authorization requested" merchant={merchant} amount={amount} currency={currency}'),
            Step('level=warn msg="authorization declined" issuer={issuer} reason={reason} elapsed_ms={millisecs}'),
        ),
    ),
    Session(
        "payments",
        0.5,
        (
            Step('level=error msg="issuer timed out" issuer={issuer} elapsed_ms={millisecs} attempt={nth}', (1, 3)),
            Step('level=warn msg="circuit opened" issuer={issuer} failures={count} cooldown_s={seconds}', (0, 1)),
        ),
    ),
    Session(
        "payments", 0.7, (Step('level=info msg="refund issued" merchant={merchant} amount={amount} batch={number}'),)
    ),
)


def _one_of(words: str) -> Callable[[Random], str]:
    """A field that is one of `words`, the first far more often than the last."""
    choices = words.split()
    weights = [1 / (rank + 1) for rank in range(len(choices))]
    return lambda random: random.choices(choices, weights)[0]


def _whole(low: int, high: int) -> Callable[[Random], str]:
    return lambda random: str(random.randint(low, high))


def _skewed(median: float, spread: float) -> Callable[[Random], str]:
    """A whole number whose logarithm is normal, as durations and sizes are."""
    return lambda random: str(max(1, int(median * random.lognormvariate(0.0, spread))))


def _hexadecimal(digits: int) -> Callable[[Random], str]:
    return lambda random: f"{random.getrandbits(4 * digits):0{digits}x}"


def _address(random: Random) -> str:
    """An address of the blocks that are reserved for documentation; few addresses, so that they come back."""
    block = random.choice(("192.0.2", "198.51.100", "203.0.113"))
    return f"{block}.{min(254, int(random.expovariate(1 / 60)) + 1)}"


def _page(random: Random) -> str:
    pattern = random.choice(("/item/{}", "/item/{}/reviews", "/search?page={}", "/orders/{}", "/api/v2/stock/{}", "/"))
    return pattern.format(random.randint(1, 9999))


FIELDS: Mapping[str, Callable[[Random], str]] = {
    "agent": _one_of("shop-android/8.2 shop-ios/8.1 browser/126 browser/125 crawler/2 probe/0.9"),
    "amount": lambda random: f"{random.lognormvariate(3.2, 1.0):.2f}",
    "asset": _one_of("app.css app.js logo.svg font.woff2 cart.js hero.webp"),
    "block": _hexadecimal(12),
    "bytes": _skewed(2400, 1.2),
    "cart": _hexadecimal(6),
    "checksum": _hexadecimal(8),
    "client": _one_of("tern_4.1 tern_3.9 libterm_1.11 gosh_0.8 pyterm_2.6"),
    "cores": _one_of("1 2 4 8 16 32"),
    "count": _whole(1, 64),
    "currency": _one_of("EUR USD GBP SEK CHF"),
    "few": _whole(1, 9),
    "fingerprint": lambda random: f"k1:{random.getrandbits(64):016x}",
    "gate": _one_of("gate-1 gate-2"),
    "host": lambda random: f"10.20.{random.randint(0, 7)}.{random.randint(1, 254)}",
    "ip": _address,
    "issuer": _one_of("northbank unioncard coastal meridian alder"),
    "job": _one_of("nightly-export thumbnail-render invoice-mail index-merge report-daily geo-sync"),
    "memory": _skewed(1800, 0.9),
    "merchant": lambda random: f"m-{random.randint(100, 399)}",
    "millisecs": _skewed(45, 1.1),
    "node": lambda random: f"node-{random.randint(1, 24):02d}",
    "number": _whole(1000, 99999),
    "ok": _one_of("200 200 206 302"),
    "page": _page,
    "percent": _whole(1, 99),
    "pid": _whole(300, 32767),
    "port": _whole(1024, 65535),
    "queue": _one_of("batch mail media reports"),
    "reason": _one_of("insufficient_funds card_expired limit_reached suspected_fraud"),
    "request": _hexadecimal(10),
    "route": _page,
    "seconds": _skewed(30, 0.9),
    "session": _whole(100, 9999),
    "size": _skewed(900_000, 1.5),
    "store": lambda random: f"store-{random.randint(1, 6)}",
    "stray": _hexadecimal(12),
    "uid": _whole(1000, 1080),
    "user": _one_of("deploy root admin mira backup jonas guest oracle test ci-runner anke www"),
    "volume": _whole(1, 9),
    "web": _one_of("web-1 web-2 web-3"),
}
"""How each field is drawn."""

SHARED = frozenset(
    {
        "agent",
        "amount",
        "block",
        "cart",
        "client",
        "currency",
        "fingerprint",
        "gate",
        "host",
        "ip",
        "issuer",
        "job",
        "merchant",
        "node",
        "number",
        "pid",
        "port",
        "queue",
        "request",
        "route",
        "session",
        "store",
        "uid",
        "user",
        "volume",
        "web",
    }
)
"""Fields that keep their value through a session; the others are drawn anew for every occurrence."""


class _Values(dict[str, object]):
    """The fields of one line: drawn when the template asks, kept for the session where shared."""

    def __init__(self, random: Random, shared: dict[str, str], when: datetime, nth: int) -> None:
        super().__init__(time=when, millis=f"{when.microsecond // 1000:03d}", nth=nth)
        self._random = random
        self._shared = shared

    def __missing__(self, field: str) -> str:
        if field not in SHARED:
            return FIELDS[field](self._random)
        if field not in self._shared:
            self._shared[field] = FIELDS[field](self._random)
        return self._shared[field]


def generate_log(lines: int, seed: int = 0, services: Collection[str] = ()) -> Iterator[str]:
    """Invent a log, line by line, in order of time.

    Parameters
    ----------
    lines : int
        How many lines; none if 0 or less.
    seed : int
        The same seed gives the same lines, and a longer log begins with the shorter one.
    services : collection of str
        Only these services of `PREFIXES` write lines; none named: all of them.

    Raises
    ------
    ValueError
        A service that is not one of `PREFIXES`.

    Returns
    -------
    iterator of str
        Lines without their newline, about 20 to 60 wordpieces each.
    """
    unknown = sorted(set(services) - set(PREFIXES))
    if unknown:
        raise ValueError(f"unknown service {unknown[0]!r}; expected one of {', '.join(PREFIXES)}")
    sessions = [session for session in SESSIONS if not services or session.service in services]
    return itertools.islice(_stream(Random(seed), sessions), max(lines, 0))


def _stream(random: Random, sessions: Sequence[Session]) -> Iterator[str]:
    """Lines without end: sessions begin at random moments and are merged by time."""
    weights = list(itertools.accumulate(session.weight for session in sessions))
    waiting: list[tuple[datetime, int, str]] = []
    order = itertools.count()
    now = _START
    while True:
        now += timedelta(seconds=random.expovariate(_SESSIONS_PER_SECOND))
        while waiting and waiting[0][0] <= now:
            yield heapq.heappop(waiting)[2]
        (session,) = random.choices(sessions, cum_weights=weights)
        for when, line in _play(session, now, random):
            heapq.heappush(waiting, (when, next(order), line))


def _play(session: Session, start: datetime, random: Random) -> Iterator[tuple[datetime, str]]:
    """The lines of one session, each with its moment."""
    shared: dict[str, str] = {}
    when = start
    for step in session.steps:
        for nth in range(1, random.randint(*step.times) + 1):
            when += timedelta(seconds=random.uniform(*step.gap))
            template = PREFIXES[session.service] + step.template
            yield when, template.format_map(_Values(random, shared, when, nth))
