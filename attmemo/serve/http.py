"""What all routes share: keys, bodies with a limit, errors as JSON, and one line of log for each request."""

from __future__ import annotations

import asyncio
import hmac
import logging
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import orjson
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from attmemo.serve.bodies import Body, Inputs, Reusing, read
from attmemo.serve.refusal import Refusal, overloaded
from attmemo.serve.room import Share
from attmemo.serve.service import SMALL, Done, Service

LOG = logging.getLogger("attmemo.serve")
JSON = "application/json"
REUSE_HEADER = "x-attmemo-reuse"
GUARD_HEADER = "x-attmemo-guard"
NAMESPACE_HEADER = "x-attmemo-namespace"
_NONE = Response()

Work = Callable[[Any, Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Route:
    """A route that takes a body."""

    paths: tuple[str, ...]
    body: type[Body]
    work: Work
    what: str  # for the OpenAPI document
    answer: type[BaseModel] | None = None  # for the document too; None: the route refuses all
    openai: bool = False  # errors have OpenAI's form


@dataclass(frozen=True, slots=True)
class StateRoute:
    """A route that says how the service is; all but the first two fields are for the OpenAPI document."""

    path: str
    work: Callable[..., Awaitable[Response]]
    what: str
    form: type[Response] = Response
    answer: type[Any] | None = None  # in JSON
    fails: bool = False  # it says 503 where the service is not well
    keyed: bool = False  # it needs the key


class Flowing(Response):
    """A response in JSON that is sent as the client reads; its share of the room is freed when all is sent."""

    share: Share | None = None

    def __init__(self, parts: list[bytes], headers: Mapping[str, str]) -> None:
        self.size, self.parts = sum(map(len, parts)), parts
        super().__init__(headers={**headers, "content-length": str(self.size)}, media_type=JSON)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            for part in self.parts:
                for start in range(0, len(part), SMALL):
                    piece = part[start : start + SMALL]
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            if self.share is not None:
                self.share.free()


def reply(value: Any, headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    """A response in JSON; arrays of numpy may be part of it."""
    return Response(_dumped(value), status, dict(headers or {}), JSON)


async def reply_list(values: Iterable[Any], headers: Mapping[str, str] | None = None) -> Flowing:
    """A list in JSON, made item by item: other requests go on meanwhile. Bytes are JSON already."""
    parts, last = list[bytes](), bytearray(b"[")
    for value in values:
        if len(last) > 1 or parts:
            last += b","
        if isinstance(value, bytes):
            last += value
        else:
            last += _dumped(value)
            await asyncio.sleep(0)
        if len(last) >= SMALL:
            parts.append(bytes(last))
            last.clear()
    return Flowing([*parts, bytes(last) + b"]"], headers or {})


def refuse(refusal: Refusal, openai: bool = False) -> Response:
    """The response to a request that is not answered."""
    headers = {"retry-after": "1"} if refusal.kind in ("overloaded", "unhealthy") else None
    if openai:
        body: dict[str, Any] = {"message": refusal.text, "code": refusal.status, "type": refusal.kind.capitalize()}
    else:
        body = {"error": refusal.text, "error_type": refusal.kind.capitalize()}
    return reply(body, headers, refusal.status)


def handler(service: Service, route: Route) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint of a route."""
    key = service.settings.api_key

    async def handle(request: Request) -> Response:
        start, reason, response = perf_counter(), "none", _NONE
        given, answer = service.bodies.share(), service.answers.share()
        request.state.hold = answer.take  # called with bytes of an answer before they are made
        request.state.done = None
        try:
            check_key(request, key)
            request.state.namespace = _namespace(request, service)
            response = await route.work(await _asked(request, service, route, given), request)
            if not isinstance(response, Flowing) and len(response.body) > SMALL:
                response = Flowing([bytes(response.body)], response.headers)
            if isinstance(response, Flowing):
                answer.take(max(0, response.size - answer.held))
                response.share = answer
        except Refusal as refusal:
            reason = refusal.reason
            response = refuse(refusal, route.openai)
        except ClientDisconnect:
            reason = "gone"
            response = Response(status_code=499)
        except Exception as error:
            reason = "error"
            LOG.error("%s failed: %s", route.paths[0], _place(error))
            response = refuse(Refusal("backend", "internal error", 500), route.openai)
        finally:
            given.free()
            if not isinstance(response, Flowing):
                answer.free()
        if reason != "none":
            service.metrics.failed(reason)
        if LOG.isEnabledFor(level := logging.DEBUG if reason == "none" else logging.INFO):
            LOG.log(level, "request", extra={"fields": _line(route, request, response, reason, start)})
        return response

    return handle


def check_key(request: Request, key: str | None) -> None:
    """A `Refusal` for a request that does not bring the key."""
    if key is None:
        return
    given = request.headers.get("authorization", "").encode("utf-8", "replace")
    if not hmac.compare_digest(given, f"Bearer {key}".encode()):
        raise Refusal("validation", "the API key is missing or wrong", 401, reason="key")


async def answer_inputs(service: Service, body: Reusing, request: Request, inputs: Inputs, **how: Any) -> Done:
    """Answers of the model to inputs of a request; what they cost is noted for its line of log."""
    done = await service.answer(
        inputs.items, method=inputs.method, reuse=body.reuses, namespace=request.state.namespace,
        gone=request.receive, **how,
    )  # fmt: skip
    request.state.done = done
    return done


def _line(route: Route, request: Request, response: Response, reason: str, start: float) -> dict[str, Any]:
    found: dict[str, Any] = {"route": route.paths[0], "status": response.status_code}
    found["ms"] = round(1e3 * (perf_counter() - start), 2)
    done: Done | None = request.state.done
    if reason != "none":
        found["reason"] = reason
    elif done is not None:
        found |= {"compute-tokens": done.tokens, "rows-computed": done.rows, "reuse": done.reuse}
    return found


def _dumped(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


async def _asked(request: Request, service: Service, route: Route, share: Share) -> Body:
    """What a request asks; a large body is read in a thread, since it takes long."""
    raw = await _body(request, service.settings.payload_limit, service.settings.client_seconds, share)
    if len(raw) <= SMALL:
        found: Body = read(route.body, raw)
    else:
        found = await service.threads.run(partial(read, route.body, raw))
    wanted = request.headers.get(REUSE_HEADER, "on").strip().lower()
    if wanted not in ("on", "off"):
        raise Refusal("validation", f"header {REUSE_HEADER} must be on or off; got {wanted[:40]!r}")
    if wanted == "off" and isinstance(found, Reusing):
        found.reuse = "off"
    return found


def _namespace(request: Request, service: Service) -> str | None:
    """The namespace that a request names; None: none."""
    named = request.headers.getlist(NAMESPACE_HEADER)
    if not named:
        return None
    if len(named) > 1:  # a client's own, and that of the gateway before it
        raise Refusal("validation", f"header {NAMESPACE_HEADER} was given {len(named)} times", reason="namespace")
    service.check_namespace(named[0].strip())
    return named[0].strip()


async def _body(request: Request, limit: int, seconds: float, share: Share) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON and not kind.endswith("+json"):
        raise Refusal("validation", f"Expected request with `Content-Type: {JSON}`", 415, reason="content_type")
    too_large = Refusal("validation", f"the body has more than {limit} bytes", 413, reason="payload")
    stated = request.headers.get("content-length", "")
    if stated.isdecimal():
        if int(stated) > limit:
            raise too_large
        share.make_room(int(stated))
    body = bytearray()
    try:
        async with asyncio.timeout(seconds) as clock:
            async for chunk in request.stream():
                if len(body) + len(chunk) > limit:
                    raise too_large
                share.take(len(chunk), clock)
                body += chunk
    except TimeoutError:
        if share.lost:
            raise overloaded() from None
        raise Refusal("validation", "the body did not arrive in time", 408, reason="slow") from None
    share.keep()
    return bytes(body)


def _place(error: BaseException) -> str:
    """Where an error was raised; its message may show values of a request, and goes nowhere."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(last.filename).name}:{last.lineno}"
