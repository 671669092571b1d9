"""Attacks `attmemo serve` for a minute, beside good clients, and says what these felt.

    python scripts/soak_service.py [--seconds 60] [--json OUT.json] [OPTIONS of attmemo serve]

A service of MiniLM is started on a free port; where no options are given, with --budget 0.01 --database auto. Eight
clients ask short texts, each as soon as it has its answer: alone first, then beside the attack, then alone again. The
attack, from another process on the same machine: 3,000 connections that never end their head, 200 that hold a body
back, 12 large `/tokenize` at once, 4 bodies of 100 MB in chunks, 4 heads and 4 URLs of 50 MB. Who is refused tries
again after a second or so. Printed: what the good clients felt, memory, and what each kind of attack was told.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np

CLIENTS = 8
AGAIN = 1.0  # seconds until an attacker comes again, in the mean
PIECE = 1 << 16
JSON = b"content-type: application/json\r\n"


@dataclass
class Attack:
    """How many connections there are of each kind, and how much each sends."""

    heads: int = 3000
    bodies: int = 200
    body: int = 1_000_000  # bytes that are sent of a body; one more would complete it
    tokenize: int = 12
    texts: int = 1000
    chunked: int = 4
    large: int = 4
    most: int = 100_000_000  # bytes of a body in chunks; half as many of a head and of a URL


@dataclass
class Seen:
    """What good clients felt."""

    milliseconds: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Ends]:
    """A connection to the service."""
    place = urlparse(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def answer(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Status and body of the next answer; "closed" where the service says nothing."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return head.split()[1].decode(), await reader.readexactly(int(length.partition(b":")[2]))
    except (OSError, asyncio.IncompleteReadError):
        return "closed", b""


def request(path: str, body: Any) -> bytes:
    """A request that is whole."""
    raw = json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\nhost: x\r\n%scontent-length: %d\r\n\r\n" % (path.encode(), JSON, len(raw)) + raw


async def until_refused(ends: Ends, first: bytes, piece: bytes, count: int) -> str:
    """What a client is told that sends pieces until it is refused."""
    reader, writer = ends

    async def send() -> None:
        with suppress(OSError):
            writer.write(first)
            for _ in range(count):
                writer.write(piece)
                await writer.drain()

    sending = asyncio.ensure_future(send())
    try:
        return (await answer(reader))[0]
    finally:
        sending.cancel()


async def slow_head(ends: Ends, how: Attack) -> str:
    """A head that never ends."""
    ends[1].write(b"GET /health HTTP/1.1\r\nhost: x\r\n")
    return (await answer(ends[0]))[0]


async def held_body(ends: Ends, how: Attack) -> str:
    """A body whose last byte never comes."""
    head = b"POST /embed HTTP/1.1\r\nhost: x\r\n%scontent-length: %d\r\n\r\n" % (JSON, how.body + 1)
    return await until_refused(ends, head, b" " * (how.body // 16), 16)


async def tokenize(ends: Ends, how: Attack) -> str:
    """Many texts for the tokenizer."""
    ends[1].write(request("/tokenize", {"inputs": ["a b c " * 300] * how.texts}))
    return (await answer(ends[0]))[0]


async def chunked(ends: Ends, how: Attack) -> str:
    """A body of unknown length."""
    head = b"POST /embed HTTP/1.1\r\nhost: x\r\n" + JSON + b"transfer-encoding: chunked\r\n\r\n"
    return await until_refused(ends, head, b"%x\r\n" % PIECE + b" " * PIECE + b"\r\n", how.most // PIECE)


async def large_head(ends: Ends, how: Attack) -> str:
    """Headers without end."""
    line = b"a: " + b"b" * PIECE + b"\r\n"
    return await until_refused(ends, b"POST /embed HTTP/1.1\r\nhost: x\r\n", line, how.most // 2 // PIECE)


async def large_url(ends: Ends, how: Attack) -> str:
    """A URL without end."""
    return await until_refused(ends, b"GET /", b"x" * PIECE, how.most // 2 // PIECE)


Kind = Callable[[Ends, Attack], Awaitable[str]]


def attackers(how: Attack) -> list[Kind]:
    """What each attacker does."""
    counts: dict[Kind, int] = {
        slow_head: how.heads, held_body: how.bodies, tokenize: how.tokenize, chunked: how.chunked,
        large_head: how.large, large_url: how.large,
    }  # fmt: skip
    return [kind for kind, count in counts.items() for _ in range(count)]


async def told(url: str, kind: Kind, how: Attack) -> str:
    """What one attacker is told."""
    try:
        async with connected(url) as ends:
            return await kind(ends, how)
    except OSError:
        return "no connection"


async def attack(url: str, how: Attack, seconds: float) -> dict[str, Counter[str]]:
    """What attackers are told until the time is over; "held": their connection is still open then."""
    seen = {kind.__name__: Counter[str]() for kind in attackers(how)}

    async def attacker(kind: Kind, chance: random.Random) -> None:
        while True:
            status = "held"
            try:
                status = await told(url, kind, how)
            finally:
                seen[kind.__name__][status] += 1
            await asyncio.sleep(AGAIN * chance.uniform(0.5, 1.5))

    tasks = [asyncio.ensure_future(attacker(kind, random.Random(n))) for n, kind in enumerate(attackers(how))]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return seen


async def good(url: str, seconds: float, clients: int = CLIENTS) -> Seen:
    """What good clients feel: one asks a list of two short texts, the others single ones."""
    seen, end = Seen(), time.monotonic() + seconds

    async def client(number: int) -> None:
        async with connected(url) as (reader, writer):
            asked = 0
            while not asked or time.monotonic() < end:
                text = f"Failed password for user{asked} from 10.0.{number}.{asked % 250} port {asked} ssh2"
                start = time.perf_counter()
                writer.write(request("/embed", {"inputs": text if number else [text, "a short text"]}))
                status, _ = await answer(reader)
                seen.milliseconds.append(1e3 * (time.perf_counter() - start))
                seen.statuses[status] += 1
                if status == "closed":
                    raise RuntimeError("the service closed the connection of a good client")
                asked += 1

    await asyncio.gather(*(client(number) for number in range(clients)))
    return seen


def percentiles(seen: Seen) -> dict[str, Any]:
    """Percentiles of good clients, milliseconds."""
    p50, p99 = np.percentile(seen.milliseconds, [50, 99]).tolist()
    return {"requests": len(seen.milliseconds), "p50_ms": p50, "p99_ms": p99, "statuses": dict(seen.statuses)}


def soak(options: list[str], seconds: float) -> dict[str, Any]:
    """Good clients alone, beside the attack, and alone again."""
    from bench_serve import URL, attmemo, get, post, resident, server

    memory = dict[str, list[int]]()

    async def watched(name: str, process: int, work: Awaitable[Seen]) -> dict[str, Any]:
        async def watch() -> None:
            while True:
                memory.setdefault(name, []).append(resident(process))
                await asyncio.sleep(0.25)

        watching = asyncio.ensure_future(watch())
        found = percentiles(await work)
        watching.cancel()
        return found | {"memory_mb": max(memory[name])}

    options = options or ["--budget", "0.01", "--database", "auto"]
    with server(*attmemo("--log-level", "warning", *options)) as process:
        asyncio.run(good(URL, 3))
        before = asyncio.run(watched("before", process.pid, good(URL, seconds / 2)))
        attacking = subprocess.Popen([sys.executable, __file__, "--attack", str(seconds + 2)], stdout=subprocess.PIPE)
        time.sleep(2)
        beside = asyncio.run(watched("beside", process.pid, good(URL, seconds)))
        statuses = json.loads(attacking.communicate()[0])
        time.sleep(2)
        after = asyncio.run(watched("after", process.pid, good(URL, seconds / 2)))
        again = asyncio.run(watched("again", process.pid, good(URL, seconds / 2)))
        left = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
        post("/embed", {"inputs": "alive"})
        failures = json.loads(get("/live"))["refused"]
    return {
        "before": before, "beside": beside, "after": after, "again": again,
        "p99_ratio": beside["p99_ms"] / before["p99_ms"], "memory_ratio": beside["memory_mb"] / before["memory_mb"],
        "told": statuses, "counted": failures, "open_files_afterwards": left,
    }  # fmt: skip


def main() -> None:
    """Run the soak, or be the attackers of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--attack", type=float, help=argparse.SUPPRESS)
    args, options = parser.parse_known_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if args.attack is not None:
        from bench_serve import URL

        print(json.dumps(asyncio.run(attack(URL, Attack(), args.attack))))
        return
    from attmemo.system.machine import conditions

    found = soak(options, args.seconds) | {"attack": asdict(Attack()), "conditions": conditions()}
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
