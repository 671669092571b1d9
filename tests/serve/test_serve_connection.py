"""Connections of the service: a response is one piece, and nothing of it is lost."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from services import Live, living, tiny

from attmemo.serve.connection import LARGE, Protocol, Whole
from attmemo.serve.server import make_server


class Below(asyncio.Transport):
    """A connection that notes what is sent."""

    def __init__(self) -> None:
        super().__init__({"peername": ("1.2.3.4", 5)})
        self.sent = list[Any]()

    def write(self, data: Any) -> None:
        assert not self.is_closing(), "the event loop raises an error then"
        self.sent.append(bytes(data))

    def close(self) -> None:
        self.sent.append("closed")

    def abort(self) -> None:
        self.sent.append("aborted")

    def is_closing(self) -> bool:
        return "closed" in self.sent

    def get_write_buffer_size(self) -> int:
        return 0


def test_what_one_turn_writes_is_sent_in_one_piece_and_in_order() -> None:
    async def run() -> list[Any]:
        below = Below()
        whole = Whole(below, asyncio.get_running_loop())
        whole.write(b"head ")
        whole.write(bytearray(b"body"))
        assert not below.sent
        await asyncio.sleep(0)
        assert below.sent == [b"head body"]
        whole.write(memoryview(b"next"))
        await asyncio.sleep(0)
        for _ in range(LARGE):
            whole.write(b"xy")
        assert below.sent[1:] == [b"next", b"xy" * (LARGE // 2), b"xy" * (LARGE // 2)]
        assert whole.get_extra_info("peername") == ("1.2.3.4", 5)
        await asyncio.sleep(0)
        return below.sent

    assert len(asyncio.run(run())) == 4


def test_nothing_is_sent_to_a_client_that_went_away() -> None:
    async def run() -> list[Any]:
        below = Below()
        whole = Whole(below, asyncio.get_running_loop())
        whole.write(b"head ")
        below.close()
        await asyncio.sleep(0)
        return below.sent

    assert asyncio.run(run()) == ["closed"]


def test_the_server_has_such_connections(tmp_path: Path) -> None:
    with living(tiny(tmp_path, None)) as live:
        assert make_server(live.service).config.http is Protocol


@pytest.mark.parametrize(("end", "expected"), [("close", [b"head", "closed"]), ("abort", ["aborted"])])
def test_closing_sends_what_is_held_and_aborting_does_not(end: str, expected: list[Any]) -> None:
    async def run() -> list[Any]:
        below = Below()
        whole = Whole(below, asyncio.get_running_loop())
        whole.write(b"head")
        getattr(whole, end)()
        await asyncio.sleep(0)
        return below.sent

    assert asyncio.run(run()) == expected


def read_to_the_end(connection: socket.socket) -> bytes:
    found = b""
    while piece := connection.recv(65536):
        found += piece
    return found


def test_requests_sent_at_once_are_answered_whole_and_in_order_before_the_connection_ends(tmp_path: Path) -> None:
    def request(path: str, texts: list[str], more: str = "") -> bytes:
        body = json.dumps({"inputs": texts, "reuse": "off"})
        head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n{more}"
        return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()

    texts = ["alpha beta", "gamma", "delta epsilon zeta"]
    with living(tiny(tmp_path, None)) as live:
        expected = [live.post("/embed", {"inputs": [text], "reuse": "off"}).body for text in texts]
        host, _, port = live.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), 30) as connection:
            asked = [request("/embed", [text]) for text in texts[:2]]
            connection.sendall(b"".join([*asked, request("/embed", texts[2:], "connection: close\r\n")]))
            answers = read_to_the_end(connection)
    for body in expected:
        head, _, rest = answers.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert rest.startswith(body)
        answers = rest[len(body) :]
    assert not answers


def test_what_is_held_is_sent_before_a_client_that_sends_no_more_is_closed(tmp_path: Path) -> None:
    async def run(live: Live) -> list[Any]:
        below = Below()
        server = make_server(live.service)
        server.config.load()
        protocol = Protocol(server.config, server.server_state, {}, asyncio.get_running_loop())
        protocol.connection_made(below)
        protocol.transport.write(b"answer")
        protocol.eof_received()
        return below.sent

    with living(tiny(tmp_path, None)) as live:
        assert asyncio.run(run(live)) == [b"answer"]
