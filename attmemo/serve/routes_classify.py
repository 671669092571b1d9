"""Routes of models that classify or rerank: ``/predict`` and ``/rerank``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from attmemo.serve import answers, bodies
from attmemo.serve.http import Answered, Route, gone
from attmemo.serve.model import Floats
from attmemo.serve.refusal import Refusal, cannot
from attmemo.serve.service import Done, Service


def routes(service: Service) -> list[Route]:
    """Routes that classify."""

    async def predict(body: bodies.PredictRequest, request: Request) -> Response:
        if service.model.task == "embedding":
            raise cannot("Model is not a classifier model")
        done = await service.answer(
            body.inputs.items, method=body.inputs.method, truncate=body.truncate, side=body.side, reuse=body.reuses,
            namespace=request.state.namespace, gone=gone(request),
        )  # fmt: skip
        found = [_ranked(row, service.model.labels) for row in scores(done, raw=body.raw_scores)]
        return Answered(found[0] if body.inputs.single else found, done)

    async def rerank(body: bodies.RerankRequest, request: Request) -> Response:
        if not body.texts:
            raise Refusal("empty", "`texts` cannot be empty")
        if service.model.task != "reranker":
            raise cannot("model is not a re-ranker model")
        done = await service.answer(
            [(body.query, text) for text in body.texts], truncate=body.truncate, side=body.side, reuse=body.reuses,
            namespace=request.state.namespace, gone=gone(request),
        )  # fmt: skip
        found = scores(done, raw=body.raw_scores)[:, 0]
        ranks: list[dict[str, Any]] = []
        for place in best_first(found):
            rank = {"index": place, "score": found[place]}
            ranks.append(rank | {"text": body.texts[place]} if body.return_text else rank)
        return Answered(ranks, done)

    found = [
        Route(
            ("/predict",), bodies.PredictRequest, predict, "Classes of texts or of pairs of texts",
            answers.PredictResponse,
        ),
        Route(("/rerank",), bodies.RerankRequest, rerank, "Relevance of texts to a query", answers.RerankResponse),
    ]  # fmt: skip
    if service.model.task != "embedding":
        main = found[service.model.task == "reranker"]
        found.append(replace(main, paths=("/", "/invocations")))
    return found


def scores(done: Done, *, raw: bool) -> Floats:
    """Scores ``[N, C]``: logits, or their softmax; of one class the sigmoid."""
    logits = np.stack([answer.value for answer in done.answers])
    if raw:
        return logits
    wide = logits.astype(np.float64)
    if wide.shape[1] == 1:
        found = 1.0 / (1.0 + np.exp(-np.clip(wide, -700.0, 700.0)))
    else:
        powers = np.exp(wide - wide.max(1, keepdims=True))
        found = powers / powers.sum(1, keepdims=True)
    return found.astype(np.float32)


def _ranked(row: Floats, labels: list[str]) -> list[dict[str, Any]]:
    return [{"score": row[place], "label": labels[place]} for place in best_first(row)]


def best_first(row: Floats) -> list[int]:
    """Places of scores, the highest first; of equal ones the last first, as TEI's sort turned around has them."""
    places: list[int] = np.argsort(row, kind="stable")[::-1].tolist()
    return places
