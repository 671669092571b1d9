"""The HTTP server of one process: it ends in order when it is told to."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import signal
import socket
import sys
from types import FrameType
from typing import Final

import uvicorn

from attmemo.errors import AttmemoError
from attmemo.serve.app import make_app
from attmemo.serve.clients import Clients, most_connections
from attmemo.serve.connection import Protocol
from attmemo.serve.service import Service

_LOG = logging.getLogger("attmemo.serve")

BACKLOG: Final = 2048
SWITCH: Final = 0.0005
"""Seconds after which Python hands its lock to another thread. The thread of the model asks for the lock after every
operation of torch, and must not wait 5 ms, the default, while requests are read."""


class Server(uvicorn.Server):
    """Ends in three steps after SIGTERM: ``/health`` says 503; no new connections; the last answers.

    uvicorn would raise the signal anew at its end, and the process would die before the database is closed.
    """

    server_state: Clients

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self.server_state = Clients(service.settings.client_seconds, service.metrics.failed, most_connections())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; a second signal ends at once."""
        if self._service.draining:
            self.should_exit = self.force_exit = True
            return
        self._service.draining = True
        seconds = 0.0 if sig == signal.SIGINT else self._service.settings.drain_seconds
        _LOG.info("ending", extra={"fields": {"signal": signal.Signals(sig).name, "drain_seconds": seconds}})
        asyncio.get_running_loop().call_later(seconds, self._stop)

    def _stop(self) -> None:
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; AttmemoError if the address is taken or is none of this machine's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise AttmemoError(f"cannot listen on {host} port {port}: {why}.", "--port with a free port") from error
    found.listen(BACKLOG)
    return found


def url_of(place: socket.socket) -> str:
    """Return the URL of a socket that listens, as a browser on this machine takes it."""
    host, port = place.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "localhost"
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def is_open(place: socket.socket) -> bool:
    """Return whether other machines reach a socket that listens."""
    address = ipaddress.ip_address(place.getsockname()[0])
    return not (getattr(address, "ipv4_mapped", None) or address).is_loopback


def make_server(service: Service) -> Server:
    """The server of a service that was started."""
    config = uvicorn.Config(
        make_app(service, direct=True), log_config=None, access_log=False, server_header=False, lifespan="off",
        proxy_headers=False, http=Protocol, ws="none", backlog=BACKLOG,
        timeout_graceful_shutdown=max(1, round(service.settings.stop_seconds)),
    )  # fmt: skip
    return Server(config, service)


def serve(service: Service, place: socket.socket) -> None:
    """Answer requests until a signal ends it; the service is closed afterwards."""
    if is_open(place) and service.settings.api_key is None:
        _LOG.warning(
            "there is no API key, and other machines reach this address: give --api-key, or --host 127.0.0.1",
            extra={"fields": {"address": place.getsockname()[0]}},
        )
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    gc.collect()
    gc.freeze()  # a collection looks at half a million objects of libraries and of the model, and no request goes on
    try:
        make_server(service).run(sockets=[place])
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()
        service.draining = True
        service.close()
        place.close()
        _LOG.info("ended; the database is closed")
