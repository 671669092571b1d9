"""Connections: heads of requests within bounds, and responses that are sent in one piece, or as the client reads.

uvicorn takes heads of any size, closes a connection while the client still sends (so that the client's system may drop
the response), and writes the head of a response and its body apart: each write is a call of the system, and wakes the
client once more.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from attmemo.serve.clients import Clients
from attmemo.serve.http import refuse
from attmemo.serve.refusal import Refusal

LARGE: Final = 1 << 16
"""Bytes that are sent at once: to hold more would hide from uvicorn that a client reads too slowly."""
HEAD: Final = 1 << 15
"""Bytes of a head, start line and headers together, at most; nginx takes as many in all."""
HEADERS: Final = 100
"""Headers of a request, at most; hyper, so TEI, takes as many. An object of Python is far larger than a short line."""
PIPELINED: Final = 16
"""Requests that a connection may send ahead of their answers."""
LINGER: Final = 1.0
"""Seconds for a client that still sends to read why it is refused. Nothing more of what it sends is read."""


class Whole(asyncio.Transport):
    """A connection that holds what is written until the turn of the event loop ends.

    `below` sends the pieces. Once it is closed, a client may read nothing of what it was sent for so many `seconds`.

    Attributes
    ----------
    unread : bool
        The client still sends: to close the socket now would drop what it was sent.
    """

    def __init__(self, below: asyncio.Transport, loop: asyncio.AbstractEventLoop, seconds: float = 30.0) -> None:
        super().__init__()
        self._below, self._loop, self._held, self._seconds = below, loop, bytearray(), seconds
        self._closed = self.unread = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send this at the end of the turn; at once, if it is large."""
        if self._closed:
            return
        if not self._held:
            self._loop.call_soon(self.send)
        self._held += data
        if len(self._held) >= LARGE:
            self.send()

    def send(self) -> None:
        """Send what is held; nothing goes to a client that went away."""
        held, self._held = self._held, bytearray()
        if held and not self._below.is_closing():
            self._below.write(bytes(held))

    def close(self) -> None:
        """Send what is held, and close."""
        if self._closed:
            return
        self.send()
        self._closed = True
        if self.unread and not self._below.is_closing():
            self._below.pause_reading()
            self._below.write_eof()
            self._loop.call_later(LINGER, self._finish)
        else:
            self._finish()

    def is_closing(self) -> bool:
        """Whether the connection is closed, or about to be."""
        return self._closed or self._below.is_closing()

    def abort(self) -> None:
        """Close at once."""
        self._closed = True
        self._held.clear()
        self._below.abort()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What the connection below knows."""
        return self._below.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        """Bytes that the client has yet to read."""
        return self._below.get_write_buffer_size() + len(self._held)

    def pause_reading(self) -> None:
        """Take no more from the client."""
        if not self._closed:
            self._below.pause_reading()

    def resume_reading(self) -> None:
        """Take more."""
        if not self._closed:
            self._below.resume_reading()

    def _finish(self) -> None:
        self._below.close()
        if self._below.get_write_buffer_size():
            self._loop.call_later(self._seconds, self._below.abort)


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP, over such connections, with heads within bounds."""

    server_state: Clients
    _running: RequestResponseCycle | None = None
    """The request whose response is next."""
    _in_head = True
    """No message has begun, or its head is not complete."""
    _ended = False
    """The client asks nothing more."""
    _fed = 0
    """Bytes since the last sign that a message goes on: the end of a head or a message, or a part of a body."""
    _moved = False
    """There was such a sign."""
    _keeps = False
    """The connection stays for more requests, once this message is complete."""
    _refusal: Refusal | None = None
    """Why the parser was stopped."""
    _stall: asyncio.TimerHandle | None = None
    """Rings when the client has read nothing for too long."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        self._whole = Whole(transport, self.loop, self.server_state.seconds)
        super().connection_made(self._whole)
        if not self.server_state.make_room(self.loop):
            self._whole.unread = True
            self._end(Refusal("unhealthy", "too many connections", reason="connections"))
            return
        self.server_state.begin(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self.server_state.end(self)
        self._ended = True
        self._end_stall()
        super().connection_lost(exc)
        if self._running is not None:  # uvicorn tells the request that came last
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Read what came, no more at a time than a head may have left."""
        if self._in_head and not self._ends():
            self.server_state.begin(self)
        rest = memoryview(data)
        while rest and not self._ends():
            room = HEAD - self._fed
            if not room:
                self._end(Refusal("validation", f"the head has more than {HEAD} bytes", 431, reason="head"))
                return
            piece, rest = rest[:room], rest[room:]
            self._moved = False
            super().data_received(piece)  # type: ignore[arg-type]
            self._fed = 0 if self._moved else self._fed + len(piece)

    def eof_received(self) -> None:
        """The client sends no more, but may read: both event loops close the connection behind this."""
        self._whole.send()
        super().eof_received()

    def on_message_begin(self) -> None:
        """A head begins."""
        self.server_state.begin(self)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note a header; those behind a body count too."""
        if len(self.headers) == HEADERS:
            self._stop(Refusal("validation", f"the request has more than {HEADERS} headers", 431, reason="head"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer. Only who has sent a whole request may send another one: see `on_message_complete`."""
        if len(self.pipeline) == PIPELINED:
            self._stop(Refusal("overloaded", f"more than {PIPELINED} requests wait for their answer"))
        self.server_state.end(self)
        self._in_head, self._moved = False, True
        super().on_headers_complete()
        self._keeps, self.cycle.keep_alive = self.cycle.keep_alive, False
        self._whole.unread = True
        if not self.pipeline:
            self._running = self.cycle

    def on_body(self, body: bytes) -> None:
        """A part of a body."""
        self._moved = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """All of a request is there."""
        self._in_head = self._moved = True
        super().on_message_complete()
        self.cycle.keep_alive = self._keeps
        self._whole.unread = False

    def on_response_complete(self) -> None:
        """Go on with the next request."""
        following = self.pipeline[-1][0] if self.pipeline else self._running
        super().on_response_complete()
        self._running = following

    def send_400_response(self, msg: str) -> None:
        """Say why the parser stopped."""
        self._end(self._refusal or Refusal("validation", "the request is not HTTP", 400, reason="http"))

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        super().pause_writing()
        self._end_stall()
        self._watch(self._whole.get_write_buffer_size())

    def resume_writing(self) -> None:
        """The client has read."""
        self._end_stall()
        super().resume_writing()

    def shutdown(self) -> None:
        """The server ends: no request more on this connection."""
        self._keeps = False
        super().shutdown()

    def expire(self, reason: str) -> None:
        """Close a connection whose head did not arrive. It is told nothing, as by most servers: it asked nothing yet,
        and a client that is about to send would take the words for an answer."""
        self._end(None)
        self.server_state.failed(reason)

    def _ends(self) -> bool:
        """Whether what comes is not looked at."""
        return self._ended or self._whole.is_closing()

    def _stop(self, refusal: Refusal) -> None:
        """Stop the parser: raises `refusal`."""
        self._refusal = refusal
        raise refusal

    def _end(self, refusal: Refusal | None) -> None:
        """Take nothing more, say why, and close; a request that came whole is answered instead."""
        self._ended = True
        self.server_state.end(self)
        self.pipeline.clear()
        if refusal is not None:
            self._whole.unread = True
            self.server_state.failed(refusal.reason)
        running = self._running
        if running is not None and _is_answered(running):
            running.keep_alive = False
            self.flow.pause_reading()
            return
        if refusal is not None:
            response = refuse(refusal)
            head = b"".join(name + b": " + value + b"\r\n" for name, value in response.raw_headers)
            self.transport.write(
                STATUS_LINE[refusal.status] + head + b"connection: close\r\n\r\n" + bytes(response.body)
            )  # fmt: skip
        self.transport.close()

    def _watch(self, unsent: int) -> None:
        self._stall = self.loop.call_later(self.server_state.seconds, self._look, unsent)

    def _look(self, before: int) -> None:
        unsent = self._whole.get_write_buffer_size()
        if unsent < before:
            self._watch(unsent)
        else:
            self.server_state.failed("unread")
            self._whole.abort()

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


def _is_answered(request: RequestResponseCycle) -> bool:
    """Whether its response is on its way, or will be without more from the client."""
    return not request.response_complete and (request.response_started or not request.more_body)
