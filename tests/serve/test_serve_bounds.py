"""Bodies on their way in and answers on their way out: bounds for all requests together, and clocks."""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from services import POST, TYPE, Live, connect, counted, halt, is_ended, living, told, until, whole

from attmemo.serve import room, routes_texts
from attmemo.serve.refusal import Refusal
from attmemo.serve.room import Room, Share
from attmemo.serve.service import BODIES, SMALL

GOOD = {"inputs": "alpha"}


HELD = POST + TYPE + b"content-length: 200001\r\n\r\n"


def test_bodies_that_stalled_give_way_oldest_first(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "STALLED", 0.0)
    bodies = live.service.bodies
    bodies.most = 1_000_010
    with ExitStack() as stack:
        held = []
        for number in range(12):
            held.append(connection := stack.enter_context(connect(live)))
            connection.sendall(HELD + b" " * 200_000)
            kept, refused = 200_000 * min(5, number + 1), max(0, number - 4)
            until(lambda kept=kept: bodies.held == kept)  # type: ignore[misc]
            until(lambda refused=refused: counted(live, "overloaded") == refused)  # type: ignore[misc]
        for connection in held[:7]:
            status, body = told(connection)
            assert (status, body["error_type"]) == (429, "Overloaded")
            assert is_ended(connection)
        assert live.post("/embed", {"inputs": ["alpha"], "unknown": "x" * 300_000}).status == 200
        assert [told(connection)[0] for connection in held[7:9]] == [429, 429]
    until(lambda: not bodies.held)


def test_a_large_body_without_room_is_refused_before_it_comes_and_a_small_one_taken(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "STALLED", 1e9)
    bodies = live.service.bodies
    bodies.most = 1_000_010
    with ExitStack() as stack:
        held = [stack.enter_context(connect(live)) for _ in range(5)]
        for number, connection in enumerate(held):
            connection.sendall(HELD + b" " * 200_000)
            until(lambda number=number: bodies.held == 200_000 * (number + 1))  # type: ignore[misc]
        with connect(live) as late:
            late.sendall(HELD)
            status, body = told(late)
            assert (status, body["error_type"]) == (429, "Overloaded")
            assert is_ended(late)
        assert bodies.held == 1_000_000
        assert live.post("/embed", {"inputs": ["alpha"], "unknown": "x" * (SMALL // 2)}).status == 200
        assert told(held[0])[0] == 429
    until(lambda: not bodies.held)


def test_bodies_that_are_in_work_give_way_to_none(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = halt(live, monkeypatch)
    live.service.bodies.most = 1_000_000
    large = {"inputs": "alpha", "unknown": "x" * 900_000}
    with connect(live) as first, connect(live) as small:
        first.sendall(whole(large))
        until(lambda: live.service.inside == 1)
        reply = live.post("/embed", large)
        assert (reply.status, reply.headers["retry-after"]) == (429, "1")
        small.sendall(whole({"inputs": "alpha", "unknown": "x" * (SMALL // 2)}))
        until(lambda: live.service.inside == 2)
        go_on.set()
        assert [told(first)[0], told(small)[0]] == [200, 200]
    until(lambda: not live.service.bodies.held)


class Clock:
    """Of a body that arrives."""

    rung = False

    def expired(self) -> bool:
        return self.rung

    def reschedule(self, when: float) -> None:
        self.rung = True


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40), st.sampled_from(["arrives", "is there", "goes"]))))
def test_a_room_holds_what_its_shares_hold_and_never_too_much(steps: list[tuple[int, int, str]]) -> None:
    whole_room, clocks = Room(100, small=10), [Clock() for _ in range(5)]
    shares: list[Share] = [whole_room.share() for _ in range(5)]
    for which, count, what in steps:
        share, clock = shares[which], clocks[which]
        if what == "goes":
            share.free()
            shares[which], clocks[which] = whole_room.share(), Clock()
        else:
            with suppress(Refusal):
                share.take(count, cast(Any, clock) if what == "arrives" else None)
        assert whole_room.held == sum(one.held for one in shares)
        assert sum(one.held for one in shares if one.held > 10) <= 100
        for one, clock in zip(shares, clocks, strict=True):
            assert one.lost == clock.rung
            assert not (one.lost and one.held)


def test_the_bound_of_bodies_grows_with_the_largest_body(model: str) -> None:
    with living(model, payload_limit=BODIES) as live:
        assert live.service.bodies.most == 8 * BODIES


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (POST + TYPE + b"content-length: 1000000\r\n\r\n", 401),
        (POST + TYPE + b"transfer-encoding: chunked\r\n\r\n", 401),
        (POST + TYPE + b"expect: 100-continue\r\ncontent-length: 1000000\r\n\r\n", 401),
        (POST + TYPE + b"authorization: Bearer key\r\ncontent-length: 100000000\r\n\r\n", 413),
        (POST + b"authorization: Bearer key\r\ncontent-length: 1000000\r\n\r\n", 415),
        (b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n", 404),
        (b"GET /health HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n", 200),
    ],
)
def test_who_is_answered_before_the_body_came_is_answered_at_once_and_sends_no_more(
    model: str, head: bytes, status: int
) -> None:
    with living(model, api_key="key") as live, connect(live) as connection:
        connection.sendall(head)
        assert told(connection)[0] == status
        with suppress(ConnectionError):
            for _ in range(50):
                connection.sendall(b" " * 1_000_000)
        assert is_ended(connection)
        assert live.service.bodies.held == 0


def test_a_connection_stays_where_the_refused_request_was_whole(model: str) -> None:
    with living(model, api_key="key") as live, connect(live) as connection:
        connection.sendall(whole(GOOD))
        assert told(connection)[0] == 401
        connection.sendall(whole(GOOD, more=b"authorization: Bearer key\r\n"))
        assert told(connection)[0] == 200


def test_a_client_that_reads_nothing_holds_nothing_for_long(hasty: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is larger than what the system keeps of a connection."""
    answers, take, held = hasty.service.answers, Share.take, list[int]()

    def noted(self: Share, count: int, clock: Any = None) -> None:
        take(self, count, clock)
        held.append(answers.held)

    monkeypatch.setattr(Share, "take", noted)
    text = " ".join(["7"] * 7000)
    with connect(hasty) as connection:
        raw = json.dumps({"inputs": [text] * 18}).encode()
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\n" + TYPE + b"content-length: %d\r\n\r\n" % len(raw))
        connection.sendall(raw)
        until(lambda: counted(hasty, "unread"))
        until(lambda: not answers.held)
        assert max(held) > 7_000_000
        assert counted(hasty, "unread") == 1
    until(lambda: not hasty.server.server_state.connections)


def test_a_large_answer_comes_whole(live: Live) -> None:
    text = " ".join(["7"] * 7000)
    (one,) = live.post("/tokenize", {"inputs": [text]}).json
    assert live.post("/tokenize", {"inputs": [text] * 3}).json == [one] * 3
    assert (
        live.post("/tokenize", {"inputs": ["alpha", "beta"] * 200}).json
        == [live.post("/tokenize", {"inputs": [word]}).json[0] for word in ("alpha", "beta")] * 200
    )
    many = live.post("/embed_all", {"inputs": ["alpha beta"] * 300, "reuse": "off"}).json
    assert len(many) == 300
    assert len(many[0]) == 4
    until(lambda: not live.service.answers.held)


def test_hidden_states_without_room_are_refused_before_they_are_computed(live: Live) -> None:
    tokens = live.service.metrics.counts().get(("attmemo_tokens", ""), 0)
    live.service.answers.most = 100_000
    reply = live.post("/embed_all", {"inputs": ["alpha beta"] * 30})
    assert (reply.status, reply.json["error_type"]) == (413, "Validation")
    other = live.service.answers.share()
    other.take(90_000)
    assert live.post("/embed_all", {"inputs": ["alpha beta"] * 10}).status == 429
    assert live.service.metrics.counts().get(("attmemo_tokens", ""), 0) == tokens
    other.free()
    assert live.post("/embed_all", {"inputs": ["alpha beta"] * 10}).status == 200
    until(lambda: not live.service.answers.held)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"inputs": ["7 " * 30] * 2}),
        ("/tokenize", {"inputs": "7 " * 60}),
        ("/decode", {"ids": [[7] * 60]}),
        ("/decode", {"ids": [[7] * 9] * 9}),
    ],
)
def test_tokens_of_a_request_are_bounded(live: Live, path: str, body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert live.post(path, body).status == 200
    monkeypatch.setattr(routes_texts, "TOKENS", 50)
    reply = live.post(path, body)
    assert (reply.status, reply.json["error_type"]) == (422, "Validation")
    assert "less than 50 tokens" in reply.json["error"]
    assert live.service.inside == 0
