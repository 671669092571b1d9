"""Connections that send the head of a response and its body in one piece, at the end of a turn of the event loop.

uvicorn writes them apart. Each write is a call of the system, and wakes the client once more.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LARGE: Final = 1 << 16
"""Bytes that are sent at once: to hold more would hide from uvicorn that a client reads too slowly."""


class Whole(asyncio.Transport):
    """A connection that holds what is written until the turn of the event loop ends.

    Parameters
    ----------
    below : asyncio.Transport
        Sends the pieces.
    loop : asyncio.AbstractEventLoop
    """

    def __init__(self, below: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._below, self._loop, self._held = below, loop, bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send this at the end of the turn; at once, if it is large."""
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
        self.send()
        self._below.close()

    def is_closing(self) -> bool:
        """Whether the connection is closed, or about to be."""
        return self._below.is_closing()

    def abort(self) -> None:
        """Close at once."""
        self._held.clear()
        self._below.abort()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What the connection below knows."""
        return self._below.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Take no more from the client."""
        self._below.pause_reading()

    def resume_reading(self) -> None:
        """Take more."""
        self._below.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Have another protocol read."""
        self._below.set_protocol(protocol)


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP, over such connections."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        self._whole = Whole(transport, self.loop)
        super().connection_made(self._whole)

    def eof_received(self) -> None:
        """The client sends no more, but may read: both event loops close the connection behind this."""
        self._whole.send()
        super().eof_received()
