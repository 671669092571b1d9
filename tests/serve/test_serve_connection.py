"""Connections of the service: a response is one piece, and nothing of it is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from services import Live, connect, is_ended, told, whole

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


def test_the_server_has_such_connections(live: Live) -> None:
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


def test_requests_sent_at_once_are_answered_whole_and_in_order_before_the_connection_ends(live: Live) -> None:
    asked = [{"inputs": [text], "reuse": "off"} for text in ("alpha beta", "gamma", "delta epsilon zeta")]
    expected = [(200, live.post("/embed", body).json) for body in asked]
    with connect(live) as connection:
        connection.sendall(whole(asked[0]) + whole(asked[1]) + whole(asked[2], b"connection: close\r\n"))
        assert [told(connection) for _ in asked] == expected
        assert is_ended(connection)


def test_what_is_held_is_sent_before_a_client_that_sends_no_more_is_closed(live: Live) -> None:
    async def run() -> list[Any]:
        below = Below()
        server = make_server(live.service)
        server.config.load()
        protocol = Protocol(server.config, server.server_state, {}, asyncio.get_running_loop())
        protocol.connection_made(below)
        protocol.transport.write(b"answer")
        protocol.eof_received()
        return below.sent

    assert asyncio.run(run()) == [b"answer"]
