"""Heads of requests and connections have bounds and a clock, with or without a key."""

from __future__ import annotations

import resource
import socket
from contextlib import ExitStack, suppress

import pytest
from services import POST, TYPE, Live, connect, counted, halt, is_ended, told, until, whole

from attmemo.serve import clients
from attmemo.serve.clients import CONNECTIONS, FILES, most_connections
from attmemo.serve.connection import HEAD, HEADERS, PIPELINED

GOOD = {"inputs": "alpha"}


def filled(size: int) -> bytes:
    """A GET whose head has so many bytes."""
    start, end = b"GET /health HTTP/1.1\r\nhost: x\r\na: ", b"\r\n\r\n"
    return start + b"b" * (size - len(start) - len(end)) + end


BODY = POST + TYPE + b"transfer-encoding: chunked\r\n\r\n"
TOO_LARGE = {
    "a head of one byte too many": filled(HEAD + 1),
    "a header": POST + b"a: " + b"b" * (1 << 20),
    "a name": POST + b"a" * (1 << 20),
    "a URL": b"GET /" + b"x" * (1 << 20),
    "lines before a request": b"\r\n" * (1 << 17),
    "many headers": POST + b"a: b\r\n" * (HEADERS + 1),
    "headers behind a body": BODY + b"2\r\n{}\r\n0\r\n" + b"a: b\r\n" * (HEADERS + 1),
    "a long header behind a body": BODY + b"2\r\n{}\r\n0\r\na: " + b"b" * (1 << 20),
    "words behind the length of a chunk": BODY + b"2;" + b"a" * (1 << 20),
}


@pytest.mark.parametrize("sent", TOO_LARGE.values(), ids=TOO_LARGE)
def test_a_head_that_is_too_large_is_refused_and_the_connection_closed(live: Live, sent: bytes) -> None:
    with connect(live) as connection:
        with suppress(ConnectionError):
            connection.sendall(sent)
        status, body = told(connection)
        assert (status, body["error_type"]) == (431, "Validation")
        assert is_ended(connection)
    assert counted(live, "head") == 1
    assert live.get("/health").status == 200


@pytest.mark.parametrize("piece", [1 << 20, 7000, 1000])
def test_a_head_within_the_bound_is_taken_however_it_arrives(live: Live, piece: int) -> None:
    sent = filled(HEAD)
    with connect(live) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(3):
            for start in range(0, len(sent), piece):
                connection.sendall(sent[start : start + piece])
            assert told(connection) == (200, None)


def test_as_many_headers_as_hyper_takes_are_taken(live: Live) -> None:
    with connect(live) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * HEADERS + b"\r\n")
        assert told(connection) == (200, None)


def test_a_body_is_no_head(live: Live) -> None:
    """Bytes of a body, and of heads that follow each other, do not add up to a head that is too large."""
    body = {"inputs": ["alpha"], "unknown": "x" * (5 * HEAD)}
    with connect(live) as connection:
        for _ in range(3):
            connection.sendall(whole(body))
            assert told(connection)[0] == 200
        for _ in range(PIPELINED):
            connection.sendall(filled(HEAD // 4))
        for _ in range(PIPELINED):
            assert told(connection) == (200, None)


@pytest.mark.parametrize("first", [b"", b"GET", POST, b"\r\n", POST + b"a: "])
def test_a_head_that_does_not_arrive_ends_the_connection(hasty: Live, first: bytes) -> None:
    with connect(hasty) as connection:
        connection.sendall(first)
        assert is_ended(connection), "nothing was asked, and nothing is said"
    until(lambda: not hasty.server.server_state.connections)
    assert hasty.server.server_state.heads == 0
    assert counted(hasty, "slow") == 1


@pytest.mark.parametrize("first", [b"\r\n", b"POST /em", POST])
def test_a_second_head_has_the_same_time(hasty: Live, first: bytes) -> None:
    with connect(hasty) as connection:
        connection.sendall(whole(GOOD))
        assert told(connection)[0] == 200
        connection.sendall(first)
        assert is_ended(connection)
    assert counted(hasty, "slow") == 1


def test_a_connection_between_two_requests_has_no_such_clock(live: Live) -> None:
    with connect(live) as connection:
        assert connection.fileno() >= 0
        until(lambda: live.server.server_state.heads == 1)
        connection.sendall(whole(GOOD))
        assert told(connection)[0] == 200
        until(lambda: live.server.server_state.heads == 0)
        connection.sendall(whole(GOOD) + POST)
        assert told(connection)[0] == 200
        until(lambda: live.server.server_state.heads == 1)


def test_a_request_is_answered_though_the_head_behind_it_does_not_arrive(
    hasty: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = halt(hasty, monkeypatch)
    with connect(hasty) as connection:
        connection.sendall(whole(GOOD) + POST)
        until(lambda: counted(hasty, "slow"))
        go_on.set()
        assert told(connection)[0] == 200
        assert is_ended(connection)


def test_many_requests_ahead_of_their_answers_are_not_kept(live: Live) -> None:
    with connect(live) as connection:
        connection.sendall(whole(GOOD) * (2 * PIPELINED))
        assert told(connection)[0] == 200
        assert is_ended(connection)
    assert counted(live, "overloaded") == 1


def test_words_that_are_no_request_do_not_lose_the_answer_before_them(live: Live) -> None:
    with connect(live) as connection:
        connection.sendall(whole(GOOD) + b"\0\0\r\n\r\n")
        assert told(connection)[0] == 200
        assert is_ended(connection)
    with connect(live) as connection:
        connection.sendall(b"\0\0\r\n\r\n")
        assert told(connection)[0] == 400
        assert is_ended(connection)


def test_the_oldest_connection_without_a_head_gives_way(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "YOUNG", 0.0)
    live.server.server_state._most = 3
    with ExitStack() as stack:
        held = []
        for number in range(3):
            held.append(stack.enter_context(connect(live)))
            until(lambda number=number: live.server.server_state.heads == number + 1)  # type: ignore[misc]
        assert live.post("/embed", GOOD).status == 200
        assert is_ended(held[0])
        held[2].sendall(whole(GOOD))
        assert told(held[2])[0] == 200


def test_where_no_connection_gives_way_the_new_one_is_told(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "YOUNG", 3600.0)
    live.server.server_state._most = 1
    with connect(live) as first:
        until(lambda: live.server.server_state.heads == 1)
        with connect(live) as second:
            status, body = told(second)
            assert (status, body["error_type"]) == (503, "Unhealthy")
            assert is_ended(second)
        first.sendall(whole(GOOD))
        assert told(first)[0] == 200
    assert counted(live, "connections") == 1


@pytest.mark.parametrize(
    ("limits", "most", "raised"),
    [
        ((100, 300), 300 - FILES, 300),
        ((1024, 1 << 20), CONNECTIONS, CONNECTIONS + FILES),
        ((1 << 20, 1 << 20), CONNECTIONS, None),
    ],
)
def test_files_bound_connections(
    limits: tuple[int, int], most: int, raised: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: seen.append(pair))
    assert most_connections() == most
    assert seen == ([] if raised is None else [(raised, limits[1])])
