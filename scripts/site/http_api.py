"""The routes of a service as Markdown, from its OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI

from attmemo.serve import routes_classify, routes_embed, routes_texts
from attmemo.serve.app import state_routes
from attmemo.serve.openapi import describe

MARK = "<!-- openapi -->"
Schema = Mapping[str, Any]


def document() -> dict[str, Any]:
    """The OpenAPI document of a service with a key. No model is loaded: its routes are made, and never run."""
    settings = SimpleNamespace(api_key="key")
    service: Any = SimpleNamespace(settings=settings, model=SimpleNamespace(task="embedding", pooling="mean"))
    routes = [one for room in (routes_embed, routes_classify, routes_texts) for one in room.routes(service)]
    return describe(FastAPI(title="attmemo serve"), routes, state_routes(service), key=True).openapi()


def markdown(found: Mapping[str, Any]) -> str:
    """A heading for each route, with tables of the fields of its body and of its answer."""
    schemas = found["components"]["schemas"]
    parts = []
    for path, methods in found["paths"].items():
        for method, one in methods.items():
            parts += [f"## {method.upper()} {path}\n", f"{one['summary']}.\n"]
            body = one.get("requestBody")
            if body is not None:
                parts += _fields("Body", body["content"]["application/json"]["schema"], schemas)
            for code, answer in one["responses"].items():
                content = answer.get("content", {}).get("application/json", {})
                if code == "200" and content.get("schema"):
                    parts += _fields("Answer", content["schema"], schemas)
            errors = [f"{code}: {answer['description']}" for code, answer in one["responses"].items() if code != "200"]
            parts += [f"Errors: {'; '.join(errors)}.\n"] if errors else []
    return "\n".join(parts)


def _fields(title: str, schema: Schema, schemas: Mapping[str, Schema]) -> Iterator[str]:
    own = schemas.get(_name(schema), schema)
    yield f"{title}: {_kind(schema)}\n"
    if own.get("properties"):
        yield "| field | type | default | |\n|---|---|---|---|"
        for name, field in own["properties"].items():
            default = "required" if name in own.get("required", ()) else f"`{field.get('default')}`"
            words = " ".join(field.get("description", "").split())
            yield f"| `{name}` | {_kind(field)} | {default} | {words} |"
        yield ""


def _name(schema: Schema) -> str:
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _kind(schema: Schema) -> str:
    """The type of a field in words; alternatives with a comma between them, as a bar would end a cell."""
    if _name(schema):
        return _name(schema)
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return ", ".join(dict.fromkeys(_kind(one) for one in options))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    return re.sub(r"^null$", "none", str(schema.get("type", "any")))
