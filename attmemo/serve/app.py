"""The FastAPI application of a service. It only mounts routes: `make_app(service)` runs under any ASGI server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from attmemo.serve import bodies, routes_classify, routes_embed, routes_texts
from attmemo.serve.gauges import live
from attmemo.serve.http import check_key, handler, refuse, reply
from attmemo.serve.model import own_labels
from attmemo.serve.refusal import Refusal
from attmemo.serve.service import Service

OPENAPI = "/api-doc/openapi.json"


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
        title="attmemo serve", version=version("attmemo"), docs_url=None, redoc_url=None, openapi_url=OPENAPI,
        description="The wire format of text-embeddings-inference, and OpenAI's /v1/embeddings.",
    )  # fmt: skip
    routes = [*routes_embed.routes(service), *routes_classify.routes(service), *routes_texts.routes(service)]
    # FastAPI's own endpoints open two exit stacks and look for dependencies in every request: some 70 microseconds.
    # Plain routes of Starlette do the work, and routes that never run make the document.
    described = FastAPI(title=app.title, version=app.version, description=app.description)
    app.openapi = described.openapi  # type: ignore[method-assign]
    for route in routes:
        work = handler(service, route)
        body = {"required": True, "content": {"application/json": {"schema": bodies.schema_of(route.body)}}}
        for path in route.paths:
            app.add_route(path, work, methods=["POST"])
            if direct:
                app.direct[path] = work
            described.add_api_route(
                path, work, methods=["POST"], summary=route.what, openapi_extra={"requestBody": body},
                response_model=None, name=path,
            )  # fmt: skip
    for path, state, what in state_routes(service):
        app.add_api_route(path, state, methods=["GET"], summary=what, response_model=None, name=path)
        described.add_api_route(path, state, methods=["GET"], summary=what, response_model=None, name=path)

    async def missing(request: Request, error: Exception) -> Response:
        return refuse(Refusal("validation", "there is no such route", 404))

    async def method(request: Request, error: Exception) -> Response:
        return refuse(Refusal("validation", "this route has another method", 405))

    app.add_exception_handler(404, missing)
    app.add_exception_handler(405, method)
    return app


def state_routes(service: Service) -> list[tuple[str, Callable[..., Awaitable[Response]], str]]:
    """Paths, work and meanings of the routes about the service itself. They need no key, but for ``/info``."""
    page = (files("attmemo.serve") / "page.html").read_text(encoding="utf-8")
    settings, model = service.settings, service.model
    kinds: dict[str, Any] = {
        "embedding": {"pooling": model.pooling}, "classifier": own_labels(model.labels),
        "reranker": own_labels(model.labels),
    }  # fmt: skip

    async def health() -> Response:
        if await service.healthy():
            return Response()
        return refuse(Refusal("unhealthy", "unhealthy"))

    async def home() -> Response:
        return HTMLResponse(page, 200 if await service.healthy() else 503)

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
            "model_type": {model.task: kinds[model.task]},
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
        ("/health", health, "200: send requests here"), ("/ping", health, "The same"), ("/", home, "The live page"),
        ("/live", numbers, "Its numbers"), ("/metrics", metrics, "For Prometheus"),
        ("/info", info, "The model and the settings"),
    ]  # fmt: skip
