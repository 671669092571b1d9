"""Work on texts is let in, counted and shared: who asks for much does not hold up who asks for little."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from services import Live, ask, living, rest, until

from attmemo.serve import connection
from attmemo.serve import threads as text_threads
from attmemo.serve.refusal import Refusal
from attmemo.serve.room import Share
from attmemo.serve.texts import Texts
from attmemo.serve.threads import CHARACTERS, PIECE, REST, TextThreads, cut

SCRIPTS = str(Path(__file__).parents[2] / "scripts")
LIMIT = 16
CORE = {min(os.sched_getaffinity(0))}
"""One that this process may use."""


@pytest.fixture(name="live")
def _live(model: str) -> Iterator[Live]:
    with living(model, max_concurrent_requests=LIMIT) as found:
        yield found


class Blocked:
    """Has texts that hold "kappa" wait until they may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen, self.go_on = threading.Semaphore(0), threading.Event()
        inner = Texts._encode

        def encode(texts: Texts, given: Any, *args: Any) -> Any:
            if "kappa" in given:
                self.seen.release()
                assert self.go_on.wait(30)
            return inner(texts, given, *args)

        monkeypatch.setattr(Texts, "_encode", encode)


@pytest.fixture(name="blocked")
def _blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Blocked]:
    found = Blocked(monkeypatch)
    yield found
    found.go_on.set()


def post_later(live: Live, path: str, body: Any) -> tuple[threading.Thread, list[int]]:
    """Ask from another thread; the status comes into the list."""
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.append(live.post(path, body).status))
    thread.start()
    return thread, statuses


@pytest.mark.parametrize("path", ["/tokenize", "/embed"])
def test_a_large_request_holds_no_small_one_up(live: Live, blocked: Blocked, path: str) -> None:
    """The threads of large requests are all busy."""
    large = {"inputs": ["kappa"] + ["alpha " * 1000] * 4}
    thread, statuses = post_later(live, path, large)
    assert blocked.seen.acquire(timeout=30)
    assert live.post("/embed", {"inputs": ["alpha", "beta"]}).status == 200
    assert live.post("/tokenize", {"inputs": ["alpha", "beta"]}).status == 200
    assert live.post("/decode", {"ids": [5, 6]}).status == 200
    assert not statuses
    blocked.go_on.set()
    thread.join(30)
    assert statuses == [200]


def test_texts_of_the_tokenizer_are_let_in_and_leave_half_to_the_model(live: Live, blocked: Blocked) -> None:
    thread, statuses = post_later(live, "/tokenize", {"inputs": ["kappa"] * (LIMIT // 2)})
    assert blocked.seen.acquire(timeout=30)
    assert live.service.inside == LIMIT // 2
    for path, body in (("/tokenize", {"inputs": "alpha"}), ("/decode", {"ids": [5]})):
        reply = live.post(path, body)
        assert (reply.status, reply.json["error_type"], reply.headers["retry-after"]) == (429, "Overloaded", "1")
    assert live.post("/embed", {"inputs": "alpha"}).status == 200
    assert live.post("/embed", {"inputs": ["alpha"] * (LIMIT // 2 + 1)}).status == 429
    blocked.go_on.set()
    thread.join(30)
    assert statuses == [200]
    rest(live)
    assert live.post("/decode", {"ids": [5]}).status == 200


def test_more_texts_than_the_half_are_let_in_where_no_others_are(live: Live) -> None:
    texts = ["alpha"] * (10 * LIMIT)
    assert len(live.post("/tokenize", {"inputs": texts}).json) == len(texts)
    assert len(live.post("/decode", {"ids": [[5]] * (10 * LIMIT)}).json) == len(texts)
    rest(live)


def test_requests_of_the_tokenizer_are_counted(live: Live) -> None:
    assert live.post("/tokenize", {"inputs": ["alpha", "beta"]}).status == 200
    assert live.post("/decode", {"ids": [[5]]}).status == 200
    assert live.post("/decode", {"ids": [[1 << 20]]}).status == 422
    counts = live.service.metrics.counts()
    assert counts["te_request_count", "tokenize"] == counts["te_request_success", "tokenize"] == 1
    assert (counts["te_request_count", "decode"], counts["te_request_success", "decode"]) == (2, 1)
    assert b'te_request_count{method="tokenize"} 1' in live.get("/metrics").body
    assert live.get("/live").json["requests"] == 2


def test_a_large_body_is_read_beside_the_event_loop(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    from attmemo.serve import http

    seen = dict[bool, set[str]]()
    inner = http.read

    def read(kind: Any, raw: bytes) -> Any:
        seen.setdefault(len(raw) > http.SMALL, set()).add(threading.current_thread().name)
        return inner(kind, raw)

    monkeypatch.setattr(http, "read", read)
    for more in (0, 10, http.SMALL, 2 * http.SMALL):
        assert live.post("/embed", {"inputs": "alpha", "unknown": "x" * more}).status == 200
    assert not any(name.startswith("attmemo-texts") for name in seen[False])
    assert all(name.startswith("attmemo-texts-large") for name in seen[True])


@given(st.lists(st.text("a", max_size=CHARACTERS // 3 + 5), max_size=3 * PIECE), st.integers(1, 3 * PIECE))
def test_pieces_are_small_and_whole(texts: list[str], many: int) -> None:
    for items in (texts, texts[:1] * many):
        pieces = cut(items)
        assert [one for piece in pieces for one in piece] == items
        assert all(piece for piece in pieces) or not items
        for piece in pieces:
            assert len(piece) <= PIECE
            assert len(piece) == 1 or sum(map(len, piece)) <= CHARACTERS
        if len(items) <= PIECE and sum(map(len, items)) <= CHARACTERS:
            assert len(pieces) == 1


def test_large_requests_take_turns() -> None:
    """The second one is done though most of the first one still waits."""
    threads, order = TextThreads(1, CORE, shared=True), list[str]()
    first_came, second_came = threading.Event(), threading.Event()

    def work(piece: Sequence[str]) -> list[str]:
        first_came.set()
        assert second_came.wait(30)
        order.append(piece[0])
        return [one.upper() for one in piece]

    async def run() -> tuple[list[str], list[str]]:
        first = asyncio.ensure_future(threads.each(["a"] * (20 * PIECE), work))
        await asyncio.get_running_loop().run_in_executor(None, first_came.wait)
        second = asyncio.ensure_future(threads.each(["b"] * (2 * PIECE), work))
        await asyncio.sleep(0)
        second_came.set()
        return await first, await second

    try:
        first, second = asyncio.run(run())
    finally:
        threads.close()
    assert (set(first), set(second)) == ({"A"}, {"B"})
    assert len(first) == 20 * PIECE
    assert max(place for place, name in enumerate(order) if name == "b") < 8


@pytest.mark.parametrize(
    ("shared", "busy", "texts"), [(True, True, 90), (True, False, 90), (False, True, 90), (True, True, 9)]
)
def test_large_requests_rest_where_the_model_works_on_the_same_cores(
    shared: bool, busy: bool, texts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of the test: a piece takes 2 seconds of it."""
    now, rests = [100.0], list[float]()
    threads = TextThreads(1, CORE, shared=shared)

    def work(piece: Sequence[str]) -> list[str]:
        now[0] += 2.0
        return list(piece)

    def sleep(seconds: float) -> None:
        now[0] += seconds
        rests.append(seconds)

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(text_threads, "time", clock)
    for _ in range(2):
        asyncio.run(threads.each(["a"] * texts, work, busy=lambda: busy))
    threads.close()
    assert [rest for rest in rests if rest] == ([2.0 * REST] * 3 if shared and busy and texts > PIECE else [])


def test_of_a_request_that_is_refused_nothing_more_is_done() -> None:
    threads, done = TextThreads(1, CORE, shared=True), list[str]()

    def work(piece: Sequence[str]) -> list[str]:
        done.append(piece[0])
        return list(piece)

    def seen(made: list[str]) -> None:
        if made[0] == "3":
            raise Refusal("validation", "enough")

    async def run() -> None:
        with pytest.raises(Refusal, match="enough"):
            await threads.each([str(number // PIECE) for number in range(20 * PIECE)], work, seen)

    asyncio.run(run())
    threads.close()
    assert "3" in done
    assert len(done) < 8


def test_a_soak_in_small(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attack is refused as it should be, good clients are answered, and nothing is left of either."""
    monkeypatch.syspath_prepend(SCRIPTS)
    import soak_service as soak

    monkeypatch.setattr(connection, "LINGER", 3.0)  # all clients share one thread, which is busy at first
    how = soak.Attack(heads=40, bodies=40, body=150_000, tokenize=6, chunked=2, large=2, most=2_000_000)
    with living(model, client_seconds=6.0, payload_limit=1_900_000) as live:
        bodies, largest, take = live.service.bodies, [0], Share.take
        bodies.most = 4_000_000

        def watched(self: Share, count: int, clock: Any = None) -> None:
            take(self, count, clock)
            largest[0] = max(largest[0], bodies.held)

        monkeypatch.setattr(Share, "take", watched)

        async def attack() -> dict[str, Counter[str]]:
            kinds = soak.attackers(how)
            statuses = await asyncio.gather(*(soak.told(live.url, kind, how) for kind in kinds))
            found: dict[str, Counter[str]] = {kind.__name__: Counter() for kind in kinds}
            for kind, status in zip(kinds, statuses, strict=True):
                found[kind.__name__][status] += 1
            return found

        async def both() -> tuple[dict[str, Counter[str]], Any]:
            return await asyncio.gather(attack(), soak.good(live.url, 1.0, 4))

        told, good = asyncio.run(both())
        assert set(good.statuses) == {"200"}
        assert told["slow_head"] == {"closed": how.heads}
        assert set(told["held_body"]) <= {"408", "429"}
        assert told["held_body"]["429"] >= how.bodies - bodies.most // how.body
        assert set(told["tokenize"]) <= {"422", "429"}
        assert set(told["chunked"]) <= {"413", "429"}
        assert told["large_head"] == told["large_url"] == {"431": 2}
        assert 0 < largest[0] <= bodies.most
        until(lambda: not live.server.server_state.connections)
        until(lambda: not (bodies.held or live.service.answers.held or live.service.inside))
        assert ask(live.url + "/embed", {"inputs": "alpha"}).status == 200
