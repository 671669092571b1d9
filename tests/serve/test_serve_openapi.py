"""The OpenAPI document says what is taken and sent, by the names of text-embeddings-inference; `/docs` shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from services import Live, living

from attmemo.serve import answers, bodies
from attmemo.serve.openapi import ERRORS
from attmemo.serve.refusal import Kind

NAMES = {  # path: body, answer, operation
    "/embed": ("EmbedRequest", "EmbedResponse", "embed"),
    "/embed_all": ("EmbedAllRequest", "EmbedAllResponse", "embed_all"),
    "/predict": ("PredictRequest", "PredictResponse", "predict"),
    "/rerank": ("RerankRequest", "RerankResponse", "rerank"),
    "/spans": ("SpansRequest", "SpansResponse", "spans"),
    "/similarity": ("SimilarityRequest", "SimilarityResponse", "similarity"),
    "/tokenize": ("TokenizeRequest", "TokenizeResponse", "tokenize"),
    "/decode": ("DecodeRequest", "DecodeResponse", "decode"),
    "/v1/embeddings": ("OpenAICompatRequest", "OpenAICompatResponse", "openai_embed"),
}
PARTS = {
    "Input", "InputType", "InputIds", "PredictInput", "TokenizeInput", "SimilarityInput", "SimilarityParameters",
    "TruncationDirection", "EncodingFormat", "Embedding", "Prediction", "Rank", "SimpleToken", "OpenAICompatEmbedding",
    "OpenAICompatUsage", "ErrorResponse", "ErrorType", "OpenAICompatErrorResponse", "Info", "ModelType",
    "EmbeddingModel", "ClassifierModel", "EmbedSparseRequest", "Span", "SpansParameters",
}  # fmt: skip
ANSWERED: list[tuple[str, str, Any]] = [
    ("embeds", "/embed", {"inputs": ["alpha", [2, 5, 3]]}),
    ("embeds", "/embed_all", {"inputs": "alpha"}),
    ("embeds", "/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}}),
    ("embeds", "/", {"inputs": "alpha"}),
    ("embeds", "/", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}),
    ("embeds", "/v1/embeddings", {"input": "alpha"}),
    ("embeds", "/v1/embeddings", {"input": "alpha", "encoding_format": "base64"}),
    ("embeds", "/tokenize", {"inputs": ["alpha", "beta"]}),
    ("embeds", "/decode", {"ids": [4, 5]}),
    ("classifies", "/predict", {"inputs": "alpha"}),
    ("classifies", "/predict", {"inputs": [["alpha"], ["beta", "gamma"]]}),
    ("ranks", "/rerank", {"query": "alpha", "texts": ["beta"], "return_text": True}),
    ("ranks", "/", {"query": "alpha", "texts": ["beta"]}),
    ("tags", "/spans", {"inputs": "alpha beta"}),
    ("tags", "/", {"inputs": ["alpha beta", "gamma 7"], "parameters": {"aggregation_strategy": "simple"}}),
    ("classifies", "/spans", {"inputs": "alpha"}),
    ("embeds", "/embed", {"inputs": []}),
    ("embeds", "/embed", {"inputs": 3}),
    ("embeds", "/embed", {"inputs": [99_999]}),
    ("embeds", "/embed", b"{"),
    ("embeds", "/embed_sparse", {"inputs": "alpha"}),
    ("embeds", "/rerank", {"query": "alpha", "texts": ["beta"]}),
    ("embeds", "/v1/embeddings", {"input": []}),
]


@pytest.fixture(scope="module", name="documents")
def _documents(lives: dict[str, Live]) -> dict[str, Any]:
    return {name: live.get("/api-doc/openapi.json").json for name, live in lives.items()}


def reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def content_of(part: Any) -> Any:
    return part["content"]["application/json"]["schema"]


def test_bodies_and_answers_have_the_names_of_tei(model: str, documents: dict[str, Any]) -> None:
    with living(model, api_key="key") as live:
        found = live.get("/api-doc/openapi.json").json
    for path, (body, answer, operation) in NAMES.items():
        own = found["paths"][path]["post"]
        assert content_of(own["requestBody"]) == reference(body)
        assert content_of(own["responses"]["200"]) == reference(answer)
        assert own["operationId"] == operation
        refused = reference("OpenAICompatErrorResponse" if path == "/v1/embeddings" else "ErrorResponse")
        absent = {424} if path in ("/tokenize", "/decode") else set()
        assert set(own["responses"]) == {str(code) for code in {200, 401, *ERRORS} - absent}
        for code in {401, *ERRORS} - absent:
            assert content_of(own["responses"][str(code)]) == refused
        assert own["security"], "this service wants a key"
    assert content_of(found["paths"]["/info"]["get"]["responses"]["200"]) == reference("Info")
    assert content_of(found["paths"]["/health"]["get"]["responses"]["503"]) == reference("ErrorResponse")
    ours = {"MainRequest", "MainResponse"}
    assert set(found["components"]["schemas"]) == PARTS | ours | {name for own in NAMES.values() for name in own[:2]}
    assert "security" not in documents["ranks"]["paths"]["/rerank"]["post"]


def test_every_name_in_the_document_leads_somewhere(documents: dict[str, Any]) -> None:
    for found in documents.values():
        text = json.dumps(found)
        names = {part.partition('"')[0] for part in text.split('"#/components/schemas/')[1:]}
        assert names <= set(found["components"]["schemas"])
        operations = [work["operationId"] for item in found["paths"].values() for work in item.values()]
        assert len(operations) == len(set(operations))


@pytest.mark.parametrize(("who", "path", "body"), ANSWERED, ids=lambda value: str(value)[:40])
def test_what_is_sent_is_what_the_document_says(
    lives: dict[str, Live], documents: dict[str, Any], who: str, path: str, body: Any
) -> None:
    reply = lives[who].post(path, body)
    known = documents[who]["paths"][path]["post"]["responses"][str(reply.status)]
    kind = getattr(answers, content_of(known)["$ref"].rpartition("/")[2])
    kind.model_validate_json(reply.body, strict=True)
    if reply.status == 200:
        with pytest.raises(ValueError, match="validation error"):
            kind.model_validate_json(b'{"other": 1}', strict=True)


def test_info_is_what_the_document_says(lives: dict[str, Live]) -> None:
    for live in lives.values():
        reply = live.get("/info")
        found = answers.Info.model_validate_json(reply.body, strict=True)
        assert len(found.model_type.model_fields_set) == 1


def test_kinds_of_errors_are_those_of_refusals() -> None:
    assert set(get_args(answers.ErrorType.__value__)) == {kind.capitalize() for kind in get_args(Kind)}


def test_examples_of_bodies_are_taken(lives: dict[str, Live], documents: dict[str, Any]) -> None:
    for who, found in documents.items():
        for path, item in found["paths"].items():
            if "post" not in item:
                continue
            name = content_of(item["post"]["requestBody"])["$ref"].rpartition("/")[2]
            example = found["components"]["schemas"][name]["example"]
            bodies.read(getattr(bodies, name), json.dumps(example).encode())
            assert lives[who].post(path, example).status in (200, 424)


def test_docs_is_a_page_that_shows_the_document(lives: dict[str, Live]) -> None:
    reply = lives["embeds"].get("/docs")
    assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b'fetch("api-doc/openapi.json")' in reply.body


def test_a_page_of_a_service_below_a_prefix_asks_below_it(lives: dict[str, Live]) -> None:
    text = (Path(answers.__file__).parent / "reference.html").read_text()
    assert 'fetch("/' not in text
    assert 'fetch("." + path' in text
