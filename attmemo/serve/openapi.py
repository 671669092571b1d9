"""The OpenAPI document of a service, with the names that text-embeddings-inference (TEI) gives bodies and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer
from starlette.responses import Response

from attmemo.serve.answers import DecodeResponse, ErrorResponse, OpenAICompatErrorResponse, TokenizeResponse
from attmemo.serve.http import Route, StateRoute

PATH: Final = "/api-doc/openapi.json"
ERRORS: Final = {
    400: "The body is not JSON, or an input is empty",
    408: "The body did not arrive in time",
    413: "The body is too large",
    415: "The body is not said to be JSON",
    422: "A field or a text is wrong, or there are too many",
    424: "The model cannot do this, or its answer is not finite",
    429: "Too much waits",
    500: "An error of the service",
}
_NO_KEY: Final = {401: "The key is missing or wrong"}
_NAMES: Final = {"/v1/embeddings": "openai_embed", "/info": "get_model_info"}  # others have those of their paths


def describe(app: FastAPI, routes: Sequence[Route], states: Sequence[StateRoute], *, key: bool) -> FastAPI:
    """Make an application whose routes never run: its `openapi` is the document of `app`. `key`: requests need one."""
    found = FastAPI(title=app.title, version=app.version, description=app.description)
    bearer = HTTPBearer(description="The key of --api-key")
    guarded: dict[str, Any] = {"dependencies": [Security(bearer)]} if key else {}
    for route in routes:
        errors = dict(sorted((ERRORS | (_NO_KEY if key else {})).items()))
        if route.answer in (TokenizeResponse, DecodeResponse):  # the model is not asked
            del errors[424]
        kind = OpenAICompatErrorResponse if route.openai else ErrorResponse
        for path in route.paths:
            found.add_api_route(
                path, _taking(route.body), methods=["POST"], summary=route.what, operation_id=_name(path) or "main",
                response_model=route.answer or kind, status_code=200 if route.answer else 424,
                response_description=route.what if route.answer else errors[424],
                responses={code: {"model": kind, "description": what} for code, what in errors.items()},
                **guarded,
            )  # fmt: skip
    for state in states:
        refused: dict[int | str, dict[str, Any]] = {}
        if state.fails:
            refused[503] = {"description": "Send nothing here"}
            refused[503] |= {"model": ErrorResponse} if state.form is Response else {}  # a page stays a page
        if state.keyed and key:
            refused[401] = {"description": _NO_KEY[401], "model": ErrorResponse}
        found.add_api_route(
            state.path, state.work, methods=["GET"], summary=state.what, operation_id=_name(state.path) or "page",
            response_model=state.answer, response_class=state.form, response_description=state.what,
            responses=refused, **(guarded if state.keyed else {}),
        )  # fmt: skip
    return found


def _taking(kind: type[Any]) -> Any:
    """An endpoint that takes a body of this kind."""

    async def endpoint(body: Any) -> None:
        """Only its signature is read: the document takes no requests."""

    endpoint.__annotations__ = {"body": kind}
    return endpoint


def _name(path: str) -> str:
    return _NAMES.get(path, path.strip("/").replace("/", "_"))
