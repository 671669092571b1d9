"""Routes of models that classify, rerank or tag: ``/predict``, ``/rerank`` and ``/spans``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from attmemo.serve import answers, bodies
from attmemo.serve.http import Route, answer_inputs, reply
from attmemo.serve.model import Answer, Floats, ServedModel
from attmemo.serve.refusal import Refusal, cannot
from attmemo.serve.service import Done, Service
from attmemo.serve.texts import Tokens


def routes(service: Service) -> list[Route]:
    """Routes that classify."""

    async def predict(body: bodies.PredictRequest, request: Request) -> Response:
        if service.model.task not in ("classifier", "reranker"):
            raise cannot("Model is not a classifier model")
        done = await answer_inputs(service, body, request, body.inputs, truncate=body.truncate, side=body.side)
        found = [_ranked(row, service.model.labels) for row in scores(done, raw=body.raw_scores)]
        return reply(found[0] if body.inputs.single else found, done.headers())

    async def rerank(body: bodies.RerankRequest, request: Request) -> Response:
        if not body.texts:
            raise Refusal("empty", "`texts` cannot be empty")
        if service.model.task != "reranker":
            raise cannot("model is not a re-ranker model")
        inputs = bodies.Inputs([(body.query, text) for text in body.texts], False)
        done = await answer_inputs(service, body, request, inputs, truncate=body.truncate, side=body.side)
        found = scores(done, raw=body.raw_scores)[:, 0]
        ranks: list[dict[str, Any]] = []
        for place in best_first(found):
            rank = {"index": place, "score": found[place]}
            ranks.append(rank | {"text": body.texts[place]} if body.return_text else rank)
        return reply(ranks, done.headers())

    async def spans(body: bodies.SpansRequest, request: Request) -> Response:
        if service.model.task != "tagger":
            raise cannot("Model is not a token classification model")
        if not body.inputs.items:
            raise Refusal("empty", "`inputs` cannot be empty")
        done = await answer_inputs(service, body, request, body.inputs, truncate=body.truncate, side=body.side)
        every = zip(body.inputs.items, done.encoded, done.answers, strict=True)
        found = [spans_of(str(text), tokens, answer, service.model) for text, tokens, answer in every]
        return reply(found[0] if body.inputs.single else found, done.headers())

    found = [
        Route(
            ("/predict",), bodies.PredictRequest, predict, "Classes of texts or of pairs of texts",
            answers.PredictResponse,
        ),
        Route(("/rerank",), bodies.RerankRequest, rerank, "Relevance of texts to a query", answers.RerankResponse),
        Route(("/spans",), bodies.SpansRequest, spans, "Spans that tags of tokens mark", answers.SpansResponse),
    ]  # fmt: skip
    tasks = "classifier", "reranker", "tagger"
    if service.model.task in tasks:
        found.append(replace(found[tasks.index(service.model.task)], paths=("/", "/invocations")))
    return found


def spans_of(text: str, tokens: Tokens, answer: Answer, model: ServedModel) -> list[dict[str, Any]]:
    """The spans of a text with their places in it, in characters; their score is the mean of their tokens'."""
    assert model.spans is not None
    labels, scores = answer.value.T
    found = list[dict[str, Any]]()
    for name, first, last in model.spans.of_labels(labels.astype(np.int64), tokens.ids):
        start, stop = tokens.places[first][0], tokens.places[last - 1][1]
        start += len(text[start:stop]) - len(text[start:stop].lstrip())  # some tokens begin with the space before
        score = scores[first:last].mean()
        found.append({"entity_group": name, "score": score, "word": text[start:stop], "start": start, "end": stop})
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
