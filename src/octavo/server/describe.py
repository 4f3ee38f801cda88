"""The API described for people and programs: an OpenAPI document, and a page made from it that loads nothing."""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

import octavo

_SCHEMAS = "#/components/schemas/"
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field that is wrong, as messages.0.content."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


class DescribedRoute(Protocol):
    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def endpoint(self) -> Any: ...
    @property
    def body(self) -> type[msgspec.Struct] | None: ...


def openapi_document(routes: Iterable[DescribedRoute]) -> dict[str, Any]:
    """OpenAPI 3.1, with the schema of every body."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {"Error": _ERROR_SCHEMA}
    for route in routes:
        path = re.sub(r"{(\w+):path}", r"{\1}", route.path)
        text = inspect.getdoc(route.endpoint) or ""
        operation: dict[str, Any] = {
            "operationId": route.endpoint.__name__,
            "summary": route.endpoint.__name__.replace("_", " "),
            "responses": {
                "200": {"description": "The answer."},
                "default": {
                    "description": "An error, in OpenAI's shape.",
                    "content": {"application/json": {"schema": {"$ref": _SCHEMAS + "Error"}}},
                },
            },
        }
        if text:
            operation["description"] = text
        if names := re.findall(r"{(\w+)}", path):
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        if route.body is not None:
            schemas |= msgspec.json.schema_components([route.body], ref_template=_SCHEMAS + "{name}")[1]
            reference = {"schema": {"$ref": _SCHEMAS + route.body.__name__}}
            operation["requestBody"] = {"required": True, "content": {"application/json": reference}}
        paths.setdefault(path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": octavo.__version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def docs_page(document: dict[str, Any]) -> str:
    """The document as one page without scripts."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Octavo API</title><style>"
        "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
        "td,th{text-align:left;vertical-align:top;padding:.15em 1em .15em 0}code{font-size:95%}</style>"
        f"<h1>Octavo {html.escape(document['info']['version'])}</h1>"
        "<p>The same for programs: <a href=openapi.json>openapi.json</a>."
    ]
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            parts.append(f"<p>{html.escape(operation.get('description', ''))}")
            if "requestBody" in operation:
                reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                parts.append(_table(schemas[reference.removeprefix(_SCHEMAS)], schemas))
    return "".join(parts)


def _table(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{html.escape(name)}</code><td>{html.escape(_type(field, schemas))}"
        f"<td>{html.escape(field.get('description', ''))}"
        for name, field in schema["properties"].items()
    )
    return f"<table><tr><th>field<th>type<th>{rows}</table>"


def _type(field: dict[str, Any], schemas: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(kind for one in field["anyOf"] if (kind := _type(one, schemas)) != "null")
    if "$ref" in field:
        fields = schemas[field["$ref"].removeprefix(_SCHEMAS)]["properties"]
        return f"object with {', '.join(fields)}"
    if "enum" in field:
        return " or ".join(map(repr, field["enum"]))
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}), schemas)}"
    return str(field.get("type", "any"))
