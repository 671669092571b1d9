"""The FastAPI application of a service. It only mounts routes: `make_app(service)` runs under any ASGI server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from attmemo.serve import routes_classify, routes_embed, routes_texts
from attmemo.serve.answers import Info
from attmemo.serve.gauges import live, stats_of
from attmemo.serve.http import GUARD_HEADER, StateRoute, check_key, handler, refuse, reply
from attmemo.serve.openapi import PATH, describe
from attmemo.serve.refusal import Refusal
from attmemo.serve.service import Service


class Application(FastAPI):
    """Calls routes in `direct` without the layers of the library, which take a quarter of the time of HTTP.

    These endpoints answer their errors themselves. If there is middleware or a prefix, nothing is left out.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.direct: dict[str, Callable[[Request], Awaitable[Response]]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self.direct.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if work is None or self.user_middleware or self.root_path or scope.get("root_path"):
            await super().__call__(scope, receive, send)
            return
        response = await work(Request(scope, receive, send))
        await response(scope, receive, send)


def make_app(service: Service, *, direct: bool = False) -> FastAPI:
    """The routes of a service that was started.

    `direct`: the short way (`Application`). Instrumentation that changes FastAPI from outside does not see it.
    """
    app = Application(
        title="attmemo serve", version=version("attmemo"), docs_url=None, redoc_url=None, openapi_url=PATH,
        description="The wire format of text-embeddings-inference, and OpenAI's /v1/embeddings.",
    )  # fmt: skip
    routes = [*routes_embed.routes(service), *routes_classify.routes(service), *routes_texts.routes(service)]
    states = state_routes(service)
    # FastAPI's own endpoints open two exit stacks and look for dependencies in every request: some 70 microseconds.
    # Plain routes of Starlette do the work, and routes that never run make the document.
    described = describe(app, routes, states, key=service.settings.api_key is not None)
    app.openapi = described.openapi  # type: ignore[method-assign]
    for route in routes:
        work = handler(service, route)
        for path in route.paths:
            app.add_route(path, work, methods=["POST"])
            if direct:
                app.direct[path] = work
    for state in states:
        app.add_api_route(state.path, state.work, methods=["GET"], response_model=None, name=state.path)

    async def missing(request: Request, error: Exception) -> Response:
        return refuse(Refusal("validation", "there is no such route", 404))

    async def method(request: Request, error: Exception) -> Response:
        return refuse(Refusal("validation", "this route has another method", 405))

    app.add_exception_handler(404, missing)
    app.add_exception_handler(405, method)
    return app


def state_routes(service: Service) -> list[StateRoute]:
    """Routes about the service itself. They need no key, but for ``/info``."""
    page, reference = (
        (files("attmemo.serve") / name).read_text(encoding="utf-8") for name in ("page.html", "reference.html")
    )
    settings, model = service.settings, service.model
    kind: dict[str, Any] = {"pooling": model.pooling}
    if model.task != "embedding":
        kind = {
            "id2label": {str(place): name for place, name in enumerate(model.labels)},
            "label2id": {name: place for place, name in enumerate(model.labels)},
        }

    async def health() -> Response:
        if await service.healthy():
            guard = stats_of(service).get("guard")
            return Response(headers=None if guard is None else {GUARD_HEADER: guard["state"]})
        return refuse(Refusal("unhealthy", "unhealthy"))

    async def home() -> Response:
        return HTMLResponse(page, 200 if await service.healthy() else 503)

    async def docs() -> Response:
        return HTMLResponse(reference)

    async def metrics() -> Response:
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=1.0.0")

    async def numbers() -> Response:
        return reply(live(service), {"cache-control": "no-store"})

    async def info(request: Request) -> Response:
        try:
            check_key(request, settings.api_key)
        except Refusal as refusal:
            return refuse(refusal)
        return reply({
            "model_id": settings.model_name,
            "model_sha": None,
            "model_dtype": settings.dtype,
            "served_model_name": settings.name,
            "model_type": {model.task: kind},
            "max_concurrent_requests": settings.max_concurrent_requests,
            "max_input_length": model.longest,
            "max_batch_tokens": settings.max_batch_tokens,
            "max_batch_requests": settings.max_batch_requests,
            "max_client_batch_size": settings.max_client_batch_size,
            "auto_truncate": settings.auto_truncate,
            "tokenization_workers": settings.workers,
            "version": version("attmemo"),
            "sha": None,
            "docker_label": None,
            "reuse": model.reuse,
            "budget": settings.budget if model.reuse == "rows" else None,
        })  # fmt: skip

    return [
        StateRoute("/health", health, "200: send requests here", fails=True),
        StateRoute("/ping", health, "The same", fails=True),
        StateRoute("/", home, "The live page", HTMLResponse, fails=True),
        StateRoute("/live", numbers, "Its numbers", JSONResponse, dict[str, Any]),
        StateRoute("/metrics", metrics, "For Prometheus", PlainTextResponse),
        StateRoute("/info", info, "The model and the settings", JSONResponse, Info, keyed=True),
        StateRoute("/docs", docs, "This document as a page", HTMLResponse),
    ]
