"""More requests than the service takes, clients that go away, forwards that fail: no answer is lost or mixed up."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from services import POST, TYPE, WORDS, Live, Reply, connect, counted, halt, living, rest, told, until, whole

from attmemo.serve import server
from attmemo.serve.service import WATCHED

LIMIT = 16


@pytest.fixture(name="live")
def _live(model: str) -> Iterator[Live]:
    with living(model, max_concurrent_requests=LIMIT, max_batch_tokens=64, row_headers=True) as found:
        yield found


@pytest.fixture(name="slow")
def _slow(live: Live, monkeypatch: pytest.MonkeyPatch) -> Live:
    """Each forward takes 50 ms more."""
    run = live.service.model.run

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.05)
        return run(*args, **kwargs)

    monkeypatch.setattr(type(live.service.model), "run", lambda self, *args, **kwargs: late(*args, **kwargs))
    return live


def text_of(number: int) -> str:
    return f"{WORDS[number % 12]} {number % 97} {WORDS[number // 12 % 12]} {number // 97}"


def vector(reply: Reply) -> Any:
    return np.array(reply.json[0], np.float32)


def test_overload_refuses_some_and_answers_the_others_right(slow: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = {number: vector(slow.post("/embed", {"inputs": text_of(number), "reuse": "off"})) for number in range(40)}
    go_on = halt(slow, monkeypatch)
    with ThreadPoolExecutor(40) as pool:
        asked = pool.map(lambda n: slow.post("/embed", {"inputs": text_of(n % 40)}), range(200))
        until(lambda: counted(slow, "overloaded"))  # clients of a slow machine would not ask so fast
        go_on.set()
        replies = list(asked)
    seen = Counter(reply.status for reply in replies)
    assert set(seen) == {200, 429}
    assert seen[200] >= LIMIT
    for number, reply in enumerate(replies):
        if reply.status == 200:
            assert np.abs(vector(reply) - exact[number % 40]).max() < 1e-5, "another request's answer"
        else:
            assert reply.json == {"error": "Model is overloaded", "error_type": "Overloaded"}
            assert reply.headers["retry-after"] == "1"
    rest(slow)
    assert slow.post("/embed", {"inputs": "alpha"}).status == 200


def test_requests_with_and_without_reuse_are_not_mixed(slow: Live) -> None:
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(
            lambda n: slow.post("/embed", {"inputs": "alpha beta 7", "reuse": "off" if n % 2 else "on"}), range(16)
        ))  # fmt: skip
    assert [reply.headers["x-attmemo-reuse"] for reply in replies] == ["rows", "off"] * 8


def test_a_request_larger_than_the_service_is_let_in_alone(slow: Live) -> None:
    texts = [text_of(number) for number in range(4 * LIMIT)]
    reply = slow.post("/embed", {"inputs": texts, "reuse": "off"})
    assert len(reply.json) == len(texts)
    assert np.abs(np.array(reply.json[-1]) - vector(slow.post("/embed", {"inputs": texts[-1]}))).max() < 1e-5
    assert len(slow.service.metrics.recent.show()["history"]["requests"]) == 120


def test_what_a_client_that_went_away_asked_for_is_not_computed(slow: Live) -> None:
    done = slow.service.metrics.counts().get(("attmemo_sequences", ""), 0)
    with connect(slow) as client:
        client.sendall(whole({"inputs": [text_of(number) for number in range(200)]}))
        while not slow.service.waiting:
            time.sleep(0.005)
    rest(slow)
    assert slow.service.metrics.counts().get(("attmemo_sequences", ""), 0) - done < 200
    until(lambda: counted(slow, "gone") == 1)  # a request is counted a moment after it has left


def test_what_a_cancelled_caller_asked_for_is_not_computed(slow: Live) -> None:
    """Cancelled after the service began to watch whether the client is there."""
    done = slow.service.metrics.counts().get(("attmemo_sequences", ""), 0)

    async def never() -> None:
        await asyncio.Event().wait()

    async def ask() -> None:
        texts = [text_of(number) for number in range(200)]
        task = asyncio.ensure_future(slow.service.answer(texts, truncate=True, gone=never))
        while not slow.service.waiting:
            await asyncio.sleep(0.005)
        (request,) = {one.request for one in list(slow.service._queue._waiting)}
        await asyncio.sleep(2 * WATCHED)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.01)
        assert request.gone

    asyncio.run(ask())
    rest(slow)
    assert slow.service.metrics.counts().get(("attmemo_sequences", ""), 0) - done < 200
    assert slow.service.alive, "the caller's event loop is closed by now"


def test_a_sequence_that_fails_alone_fails_alone(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    run = type(live.service.model).run
    cursed = live.service.texts.encode("mu 66", truncate=True).ids

    def failing(self: Any, sequences: Any, **kwargs: Any) -> Any:
        if any(list(ids) == cursed for ids, _ in sequences):
            raise RuntimeError("private words")
        return run(self, sequences, **kwargs)

    monkeypatch.setattr(type(live.service.model), "run", failing)
    good = live.post("/embed", {"inputs": ["alpha", "beta"]})
    bad = live.post("/embed", {"inputs": ["alpha", "mu 66", "beta"]})
    assert (good.status, bad.status) == (200, 424)
    assert bad.json == {"error": "Inference failed", "error_type": "Backend"}
    assert live.get("/health").status == 200, "other requests are answered"
    assert live.post("/embed", {"inputs": ["alpha", "beta"]}).status == 200


def test_a_model_that_always_fails_is_unhealthy_until_it_answers(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(type(live.service.model), "run", lambda *args, **kwargs: 1 / 0)
        assert live.post("/embed", {"inputs": "alpha"}).status == 424
        reply = live.get("/health")
        assert (reply.status, reply.json["error_type"]) == (503, "Unhealthy")
    assert live.get("/health").status == 200


def test_a_slow_client_is_told_to_hurry_and_holds_no_other_up(model: str) -> None:
    with living(model, client_seconds=1.0) as live, connect(live) as slow:
        slow.sendall(POST + TYPE + b'content-length: 1000\r\n\r\n{"inputs":')
        assert live.post("/embed", {"inputs": "alpha"}).status == 200
        assert told(slow)[0] == 408


def test_many_threads_ask_for_texts_of_all_sizes(live: Live) -> None:
    """Answers to requests of many sizes, put together in every way, are those of the requests alone."""
    alone = {n: vector(live.post("/embed", {"inputs": text_of(n), "reuse": "off"})) for n in range(30)}
    wrong: list[int] = []

    def ask_for(seed: int) -> None:
        generator = np.random.default_rng(seed)
        for _ in range(5):
            numbers = generator.integers(0, 30, generator.integers(1, 5)).tolist()
            reply = live.post("/embed", {"inputs": [text_of(n) for n in numbers]})
            while reply.status == 429:
                time.sleep(0.01)
                reply = live.post("/embed", {"inputs": [text_of(n) for n in numbers]})
            found = np.array(reply.json, np.float32)
            wrong.extend(n for n, row in zip(numbers, found, strict=True) if np.abs(row - alone[n]).max() > 1e-5)

    threads = [threading.Thread(target=ask_for, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_database_is_closed_with_the_service(model: str, tmp_path: Path) -> None:
    with living(model, database=None, fill=str(tmp_path / "db")) as live:
        for number in range(5):
            assert live.post("/embed", {"inputs": text_of(number)}).status == 200
    with living(model, database=str(tmp_path / "db"), row_headers=True) as live:
        reply = live.post("/embed", {"inputs": text_of(3)})
        assert int(reply.headers["x-attmemo-rows-computed"]) < int(reply.headers["x-attmemo-rows-total"])


def test_what_is_there_when_requests_begin_is_left_out_of_garbage_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Ended:
        def __init__(self, service: Any) -> None: ...

        def run(self, sockets: Any) -> None:
            seen.append(gc.get_freeze_count())
            raise KeyboardInterrupt

    service = SimpleNamespace(draining=False, close=lambda: None)
    place = SimpleNamespace(getsockname=lambda: ("127.0.0.1", 3000), close=lambda: None)
    monkeypatch.setattr(server, "make_server", Ended)
    with pytest.raises(KeyboardInterrupt):
        server.serve(service, place)  # type: ignore[arg-type]
    assert seen[0] > 10_000
    assert gc.get_freeze_count() == 0
    assert service.draining
