"""The connections of a server: how many there may be, and how long each may take to send the head of a request."""

from __future__ import annotations

import asyncio
import resource
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from uvicorn.server import ServerState

if TYPE_CHECKING:
    from attmemo.serve.connection import Protocol

CONNECTIONS: Final = 4096
"""Connections at a time, at most."""
FILES: Final = 256
"""Open files that are left for all else: a process may have so many, sockets among them."""
YOUNG: Final = 1.0
"""Seconds that a connection has for a head, however many others come."""
AT_ONCE: Final = 64
"""Connections that are closed in one turn of the event loop: requests are answered between."""


class Clients(ServerState):
    """uvicorn's state of a server, with bounds.

    A clock runs from the first byte of a head (on a new connection, from its start) to the end of the head. uvicorn
    has none. Its own clock for connections that wait between two requests stays as it is.

    Parameters
    ----------
    seconds : float
        How long a head may take to arrive, and a client may read nothing of its answer.
    failed : callable
        Told why a connection was refused.
    most : int
        Connections at a time.
    """

    def __init__(self, seconds: float, failed: Callable[[str], None], most: int = CONNECTIONS) -> None:
        super().__init__()
        self.seconds, self.failed, self._most = seconds, failed, most
        self._heads: OrderedDict[Protocol, float] = OrderedDict()  # when each began, oldest first
        self._timer: asyncio.TimerHandle | None = None

    @property
    def heads(self) -> int:
        """Connections whose head is on its way."""
        return len(self._heads)

    def make_room(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Have the oldest connection that still sends its head give way to a new one; False: there is no room."""
        if len(self.connections) <= self._most:
            return True
        oldest = next(iter(self._heads), None)
        if oldest is None or self._heads[oldest] > loop.time() - YOUNG:
            return False
        self.end(oldest)
        oldest.expire("connections")
        return True

    def begin(self, connection: Protocol) -> None:
        """Start the clock of a head, unless it runs."""
        if connection not in self._heads:
            self._heads[connection] = connection.loop.time()
            if self._timer is None:
                self._timer = connection.loop.call_later(self.seconds, self._sweep, connection.loop)

    def end(self, connection: Protocol) -> None:
        """Stop the clock of a head."""
        self._heads.pop(connection, None)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close some of those whose time is over, and come again when the next one's is."""
        self._timer = None
        for _ in range(AT_ONCE):
            connection, since = next(iter(self._heads.items()), (None, 0.0))
            if connection is None or since + self.seconds > loop.time():
                break
            self.end(connection)
            connection.expire("slow")
        if self._heads:
            self._timer = loop.call_at(next(iter(self._heads.values())) + self.seconds, self._sweep, loop)


def most_connections() -> int:
    """Connections that this process may have; its limit of open files is raised as far as they need it and it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS + FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(CONNECTIONS, soft - FILES))
