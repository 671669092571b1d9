"""Routes, fields and answers against the OpenAPI document of text-embeddings-inference, where it is at hand.

The document is not part of this repository: set ATTMEMO_TEI_OPENAPI to a copy of its `docs/openapi.json`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from services import Live, Reply

DOCUMENT = os.environ.get("ATTMEMO_TEI_OPENAPI", "")
OURS = {"reuse", "budget"}
"""Fields that TEI does not have."""

pytestmark = pytest.mark.skipif(not DOCUMENT, reason="set ATTMEMO_TEI_OPENAPI to a copy of TEI's docs/openapi.json")

BODIES: list[tuple[str, str, Any]] = [
    ("embeds", "/embed", {"inputs": "alpha", "normalize": False, "dimensions": 4, "truncate": True}),
    ("embeds", "/embed", {"inputs": ["alpha", [2, 5, 3]], "truncation_direction": "Left", "prompt_name": None}),
    ("embeds", "/embed_all", {"inputs": ["alpha", "beta"]}),
    ("embeds", "/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": None}),
    ("embeds", "/tokenize", {"inputs": ["alpha", "beta"], "add_special_tokens": False}),
    ("embeds", "/decode", {"ids": [[4, 5], [6]], "skip_special_tokens": True}),
    ("embeds", "/v1/embeddings", {"input": ["alpha"], "encoding_format": "base64"}),
    ("embeds", "/v1/embeddings", {"input": "alpha", "encoding_format": "float", "model": None}),
    ("classifies", "/predict", {"inputs": [["alpha", "beta"], ["gamma"]], "raw_scores": True}),
    ("classifies", "/predict", {"inputs": "alpha"}),
    ("ranks", "/rerank", {"query": "alpha", "texts": ["beta", "gamma"], "return_text": True}),
    # Refused ones: bodies of errors are part of the document too.
    ("embeds", "/embed", {"inputs": []}),
    ("embeds", "/embed", {"inputs": "alpha", "dimensions": 1000}),
    ("embeds", "/embed_sparse", {"inputs": "alpha"}),
    ("embeds", "/predict", {"inputs": "alpha"}),
    ("classifies", "/rerank", {"query": "alpha", "texts": ["beta"]}),
    ("embeds", "/v1/embeddings", {"input": []}),
]


@pytest.fixture(scope="module", name="document")
def _document() -> Any:
    return json.loads(Path(DOCUMENT).read_text())


def check(document: Any, path: str, method: str, reply: Reply) -> None:
    jsonschema_rs = pytest.importorskip("jsonschema_rs", reason="pip install jsonschema-rs")
    responses = document["paths"][path][method]["responses"]
    # Kind "Validation" is documented as 413 and sent as 422, as the source of TEI maps it.
    known = responses.get(str(reply.status))
    assert known is not None, (path, reply.status)
    content = known.get("content", {}).get("application/json")
    if content is not None:
        schema = {**content["schema"], "components": document["components"]}
        found = reply.json
        if reply.status != 200 and path == "/v1/embeddings":  # documented as error_type, sent as type
            found["error_type"] = found.pop("type")
        jsonschema_rs.validator_for(nullable(schema)).validate(found)


def nullable(value: Any) -> Any:
    """OpenAPI 3.0's `nullable` as JSON Schema says it."""
    if isinstance(value, dict):
        found = {name: nullable(item) for name, item in value.items()}
        if found.get("nullable") is True and "type" in found:
            found["type"] = [found["type"], "null"]
        return found
    return [nullable(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("who", "path", "body"), BODIES, ids=lambda value: str(value)[:40])
def test_answers_and_errors_validate(document: Any, lives: dict[str, Live], who: str, path: str, body: Any) -> None:
    check(document, path, "post", lives[who].post(path, body))


@pytest.mark.parametrize("who", ["embeds", "classifies", "ranks"])
def test_info_validates(document: Any, lives: dict[str, Live], who: str) -> None:
    check(document, "/info", "get", lives[who].get("/info"))


def test_every_route_of_tei_is_here(document: Any, lives: dict[str, Live]) -> None:
    ours = lives["embeds"].get("/api-doc/openapi.json").json["paths"]
    assert {(path, method) for path, item in document["paths"].items() for method in item} <= {
        (path, method) for path, item in ours.items() for method in item
    }


def test_every_field_of_a_request_is_here(document: Any, lives: dict[str, Live]) -> None:
    ours = lives["embeds"].get("/api-doc/openapi.json").json
    for path, item in document["paths"].items():
        if "post" in item:
            schema = item["post"]["requestBody"]["content"]["application/json"]["schema"]
            assert ours["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"] == schema
            name = schema["$ref"].rpartition("/")[2]
            known, own = document["components"]["schemas"][name], ours["components"]["schemas"][name]
            assert set(own["properties"]) - OURS == set(known["properties"]), path
            assert set(own.get("required", [])) == set(known["required"]), path


def test_answers_and_operations_have_the_same_names(document: Any, lives: dict[str, Live]) -> None:
    ours = lives["embeds"].get("/api-doc/openapi.json").json
    for path, item in document["paths"].items():
        for method, work in item.items():
            own = ours["paths"][path][method]
            assert own["operationId"] == work["operationId"]
            if path == "/embed_sparse":
                continue  # no model here gives any
            assert own["responses"].keys() >= work["responses"].keys()
            for code, known in work["responses"].items():
                content = known.get("content", {}).get("application/json")
                if content is not None:
                    assert own["responses"][code]["content"]["application/json"]["schema"] == content["schema"]


def test_every_component_has_the_fields_of_tei(document: Any, lives: dict[str, Live]) -> None:
    ours, known = lives["embeds"].get("/api-doc/openapi.json").json["components"]["schemas"], document["components"]
    assert set(known["schemas"]) - set(ours) == {"EmbedSparseResponse", "SparseValue"}
    for name in set(known["schemas"]) & set(ours) - {"OpenAICompatErrorResponse"}:  # documented otherwise than sent
        assert fields(ours[name]) - OURS == fields(known["schemas"][name]), name


def fields(schema: Any) -> set[str]:
    """Names of a schema's fields; of a choice, those of all its forms."""
    return set(schema.get("properties", {})).union(*(one.get("properties", {}) for one in schema.get("oneOf", [])))
