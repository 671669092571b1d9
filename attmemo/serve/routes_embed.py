"""Routes of models that embed: ``/embed``, ``/embed_all``, ``/embed_sparse``, ``/similarity``, ``/v1/embeddings``."""

from __future__ import annotations

import base64
from typing import Any, Final

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from attmemo.serve import answers, bodies
from attmemo.serve.http import Route, answer_inputs, reply, reply_list
from attmemo.serve.model import Floats
from attmemo.serve.refusal import Refusal, cannot
from attmemo.serve.service import Done, Service

_SHORTEST: Final = 1e-60  # below the length of any vector of float32 but zeros


def routes(service: Service) -> list[Route]:
    """Routes that embed."""

    async def vectors(body: Any, request: Request, inputs: bodies.Inputs, **more: Any) -> Done:
        if service.model.task != "embedding":
            raise cannot("Model is not an embedding model")
        if not inputs.items:
            raise Refusal("empty", "`inputs` cannot be empty")
        return await answer_inputs(service, body, request, inputs, **more)

    async def embed(body: bodies.EmbedRequest, request: Request) -> Response:
        return await embedded(body, request, body.inputs)

    async def embedded(body: bodies.Normalizing, request: Request, inputs: bodies.Inputs) -> Response:
        _check_dimensions(body.dimensions, service.model.width)
        done = await vectors(
            body, request, inputs, truncate=body.truncate, side=body.side, prompt=body.prompt_name
        )  # fmt: skip
        return reply(finish(done, body.dimensions, normalize=body.normalize), done.headers())

    async def embed_all(body: bodies.EmbedAllRequest, request: Request) -> Response:
        done = await vectors(
            body, request, body.inputs, truncate=body.truncate, side=body.side, prompt=body.prompt_name, each=True,
            hold=request.state.hold,
        )  # fmt: skip
        each = (np.ascontiguousarray(answer.each) for answer in done.answers)
        return await reply_list(each, done.headers())

    async def embed_sparse(body: bodies.EmbedAllRequest, request: Request) -> Response:
        raise cannot("Model is not an embedding model with SPLADE pooling")

    async def similarity(body: bodies.SimilarityRequest, request: Request) -> Response:
        if not body.inputs.sentences:
            raise Refusal("empty", "`inputs.sentences` cannot be empty")
        how = body.parameters or bodies.SimilarityParameters()
        inputs = bodies.Inputs([body.inputs.source_sentence, *body.inputs.sentences], False)
        done = await vectors(
            how if body.reuses else body, request, inputs, truncate=how.truncate, side=how.side,
            prompt=how.prompt_name,
        )  # fmt: skip
        found = finish(done, None, normalize=True)
        return reply(found[1:] @ found[0], done.headers())

    async def main(body: bodies.MainRequest, request: Request) -> Response:
        if isinstance(body.inputs, bodies.SimilarityInput):
            asked = bodies.SimilarityRequest(inputs=body.inputs, parameters=body.parameters, reuse=body.reuse)
            return await similarity(asked, request)
        return await embedded(body, request, body.inputs)

    async def openai(body: bodies.OpenAICompatRequest, request: Request) -> Response:
        _check_dimensions(body.dimensions, service.model.width)
        done = await vectors(body, request, body.input, truncate=None)
        base = body.encoding_format == "base64"
        data = [
            {"object": "embedding", "embedding": _base64(row) if base else row, "index": place}
            for place, row in enumerate(finish(done, body.dimensions, normalize=True))
        ]
        usage = {"prompt_tokens": done.tokens, "total_tokens": done.tokens}
        found = {"object": "list", "data": data, "model": service.settings.name, "usage": usage}
        return reply(found, done.headers())

    found = [
        Route(("/embed",), bodies.EmbedRequest, embed, "Embeddings of texts", answers.EmbedResponse),
        Route(
            ("/embed_all",), bodies.EmbedAllRequest, embed_all, "Last hidden states of all tokens",
            answers.EmbedAllResponse,
        ),
        Route(
            ("/embed_sparse",), bodies.EmbedSparseRequest, embed_sparse,
            "Refused: no model here gives sparse embeddings",
        ),
        Route(
            ("/similarity",), bodies.SimilarityRequest, similarity, "Cosines of one text to others",
            answers.SimilarityResponse,
        ),
        Route(
            ("/v1/embeddings", "/embeddings"), bodies.OpenAICompatRequest, openai, "Embeddings as OpenAI gives them",
            answers.OpenAICompatResponse, openai=True,
        ),
    ]  # fmt: skip
    if service.model.task == "embedding":
        what = "The same as /embed or /similarity"
        found.append(Route(("/", "/invocations"), bodies.MainRequest, main, what, answers.MainResponse))
    return found


def finish(done: Done, dimensions: int | None, *, normalize: bool) -> Floats:
    """Embeddings ``[N, H]`` as they are sent; cut first, then of unit length."""
    first = done.answers[0].value
    found = first[None] if len(done.answers) == 1 else np.stack([answer.value for answer in done.answers])
    if dimensions is not None:
        found = np.ascontiguousarray(found[:, :dimensions])
    if normalize:
        exact = found.astype(np.float64)
        length = np.sqrt(np.einsum("ij,ij->i", exact, exact))
        found = (exact / np.maximum(length, _SHORTEST)[:, None]).astype(np.float32)
    return found


def _check_dimensions(asked: int | None, width: int) -> None:
    if asked == 0:
        raise Refusal("validation", "`dimensions` should be positive")
    if asked is not None and asked > width:
        raise Refusal("validation", "`dimensions` should be smaller than the maximum embedding dimension.")


def _base64(row: Floats) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode()
