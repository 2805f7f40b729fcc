"""The OpenAPI document, made of the routes and of the field tables of the protocols."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from appliance.errors import ERROR_BODIES, HttpError, body_of
from appliance.protocols import (
    chat_fields,
    chat_messages,
    chat_tools,
    checks,
    fields,
    messages_blocks,
    messages_fields,
    messages_tools,
)
from appliance.protocols.fields import Field, Verdict
from appliance.protocols.responses import fields as responses_fields
from ginfer import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sanic_routing import Route

TABLES: dict[str, Mapping[str, Field]] = {
    "/v1/chat/completions": chat_fields.FIELDS,
    "/v1/responses": responses_fields.FIELDS,
    "/v1/responses/input_tokens": responses_fields.FIELDS,
    "/v1/messages": messages_fields.FIELDS,
    "/v1/messages/count_tokens": messages_fields.FIELDS,
}
STREAMS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
# of checks that are plain functions; what is not here has its rules in the description
SCHEMAS: dict[Any, dict[str, Any]] = {
    checks.string: {"type": "string"},
    checks.boolean: {"type": "boolean"},
    fields.effort: {"type": "string", "enum": list(fields.EFFORTS)},
    chat_messages.parse_messages: {"type": "array", "items": {"type": "object"}, "minItems": 1},
    messages_blocks.parse_messages: {"type": "array", "items": {"type": "object"}, "minItems": 1},
    chat_tools.parse_tools: {"type": "array", "items": {"type": "object"}},
    messages_tools.parse_tools: {"type": "array", "items": {"type": "object"}},
}
PLACEHOLDER = re.compile(r"<(\w+)(?::\w+)?>")
TEXT_PATHS = ("/metrics",)


def document(routes: Iterable[Route], model_id: str) -> dict[str, Any]:
    """The document for the routes of an application that serves `model_id`."""
    paths: dict[str, dict[str, Any]] = {}
    for route in sorted(routes, key=lambda r: r.path):
        path = "/" + PLACEHOLDER.sub(r"{\1}", route.path)
        for method in sorted(route.methods):
            if method != "OPTIONS":
                paths.setdefault(path, {})[method.lower()] = _operation(route, path)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "GInfer",
            "version": __version__,
            "description": f"Serves {model_id}. Every field is obeyed exactly, refused by name, or "
            "accepted without effect and reported.",
        },
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _operation(route: Route, path: str) -> dict[str, Any]:
    media: dict[str, Any] = {
        "text/plain" if path in TEXT_PATHS else "application/json": {"schema": {}}
    }
    if path in STREAMS:
        media["text/event-stream"] = {"schema": {"type": "string"}}
    operation: dict[str, Any] = {
        "summary": (route.handler.__doc__ or "").partition("\n")[0],
        "responses": {
            "200": {"description": "the answer", "content": media},
            "default": {
                "description": "an error in the form of the protocol",
                "content": {"application/json": {"schema": _error_schema(path)}},
            },
        },
    }
    if names := PLACEHOLDER.findall(route.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if table := TABLES.get(path):
        content = {"application/json": {"schema": body_schema(table)}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def body_schema(table: Mapping[str, Field]) -> dict[str, Any]:
    """The schema of a body whose fields are those of the table, and no others."""
    return {
        "type": "object",
        "properties": {name: field_schema(field) for name, field in table.items()},
        "required": [name for name, field in table.items() if field.note.startswith("required")],
        "additionalProperties": False,
    }


def field_schema(field: Field) -> dict[str, Any]:
    """The schema of one field; null counts as absent."""
    schema = getattr(field.check, "schema", None) or SCHEMAS.get(field.check, {})
    words = {"description": f"{field.verdict}: {field.note}"}
    if field.verdict is Verdict.REFUSED:
        return {"type": "null", "deprecated": True, **words}
    if schema and not field.note.startswith("required"):
        return {"anyOf": [schema, {"type": "null"}], **words}
    return {**schema, **words}


def _error_schema(path: str) -> dict[str, Any]:
    """The shape of an error on a path, read from an error."""
    return _shape(body_of(HttpError(400, "x"), path)) | {"title": _dialect(path)}


def _dialect(path: str) -> str:
    own = any(path.startswith(prefix) for prefix in ERROR_BODIES)
    return "AnthropicError" if own else "OpenAIError"


def _shape(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        members = {name: _shape(member) for name, member in value.items()}
        return {"type": "object", "properties": members, "required": list(members)}
    return {"type": ["string", "null"]}
