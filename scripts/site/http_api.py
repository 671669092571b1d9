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
    """A heading for each route, with the fields of its body and of its answer; then the types of these fields."""
    schemas, parts, used = found["components"]["schemas"], list[str](), list[str]()
    for path, methods in found["paths"].items():
        for method, one in methods.items():
            parts += [f"## {method.upper()} {path}\n", f"{one['summary']}.\n"]
            for title, part in (("Body", one.get("requestBody", {})), ("Answer", one["responses"].get("200", {}))):
                schema = part.get("content", {}).get("application/json", {}).get("schema")
                if schema:
                    own = schemas.get(_name(schema), schema)
                    parts += [f"{title}: {_kind(own) if 'properties' not in own else _kind(schema)}\n", *_fields(own)]
                    used += _names(own)
            errors = [f"{code}: {answer['description']}" for code, answer in one["responses"].items() if code != "200"]
            parts += [f"Errors: {'; '.join(errors)}.\n"] if errors else []
    parts.append("## Types\n")
    for name in used:  # it grows: types have fields of other types
        used += [other for other in _names(schemas[name]) if other not in used]
    for name in dict.fromkeys(used):
        own = schemas[name]
        parts += [f"### {name}\n", *(_fields(own) if "properties" in own else [f"{_kind(own)}\n"])]
    return "\n".join(parts)


def _fields(schema: Schema) -> Iterator[str]:
    if schema.get("properties"):
        yield "| field | type | default | |\n|---|---|---|---|"
        for name, field in schema["properties"].items():
            default = "required" if name in schema.get("required", ()) else ""
            default = f"`{field['default']}`" if "default" in field else default
            words = " ".join(field.get("description", "").split())
            yield f"| `{name}` | {_kind(field)} | {default} | {words} |"
        yield ""


def _names(schema: Any) -> list[str]:
    """The types that a schema refers to, in order, each once."""
    if isinstance(schema, dict):
        own = [_name(schema)] if "$ref" in schema else []
        return list(dict.fromkeys(own + [name for part in schema.values() for name in _names(part)]))
    if isinstance(schema, list):
        return list(dict.fromkeys(name for part in schema for name in _names(part)))
    return []


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
