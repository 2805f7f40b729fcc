"""Arguments of a tool call as JSON text that grows while the model writes the parameters.

A parameter whose schema admits strings streams as a string, as it is written; if the schema admits
null besides, the bare word null is null. Any other is buffered: JSON stays as written, Python's
True, False and None are translated, and what is not JSON becomes a string.
"""

from __future__ import annotations

import json
import re
from copy import copy
from typing import Any

import orjson

_PYTHON = {"True": "true", "False": "false", "None": "null"}
_NULL = "null"
_QUOTING = re.compile(r'\\.|["\n\\]', re.DOTALL)


class ArgumentStream:
    """Builds one JSON object. Every method returns the text that it adds."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        self._keys: set[str] = set()
        self._streams = False  # the value is a string whose quote has been written
        self._nullable = False
        self._parts: list[str] = []
        self._quoting = _Quoting()

    def has(self, key: str) -> bool:
        """Whether the parameter was given already."""
        return key in self._keys

    def begin(self, key: str) -> str:
        """Start a parameter that was not given before."""
        types = types_of(self._schema, key)
        self._streams = "string" in types and "null" not in types
        self._nullable = "string" in types and "null" in types
        self._parts = []
        self._quoting = _Quoting()
        opening = (", " if self._keys else "{") + _quoted(key) + ": "
        self._keys.add(key)
        return opening + ('"' if self._streams else "")

    def text(self, text: str) -> str:
        """More of its value."""
        if self._streams:
            return _escaped(text)
        self._parts.append(text)
        self._quoting.feed(text)
        if not self._nullable or _NULL.startswith(value := "".join(self._parts)):
            return ""
        self._streams = True
        return '"' + _escaped(value)

    def quotes(self, text: str) -> bool:
        """Whether the value, with `text` after it, ends inside a string of its JSON."""
        if self._streams or self._nullable:
            return False
        return self._quoting.after(text)

    def end(self) -> str:
        """The value is complete."""
        if self._streams:
            return '"'
        value = "".join(self._parts)
        if self._nullable:
            return _NULL if value == _NULL else _quoted(value)
        return _json_text(value)

    def close(self) -> str:
        """The object is complete."""
        return "}" if self._keys else "{}"


class _Quoting:
    """Follows JSON text: is this place inside a string? No string goes over the end of a line, so
    broken JSON is forgiven there; a value that does not begin like JSON with quotes has none."""

    def __init__(self) -> None:
        self._begun = self._is_json = self._inside = self._escaped = False

    def feed(self, text: str) -> None:
        """Go on over text."""
        if not self._begun and (first := text.strip()[:1]):
            self._begun, self._is_json = True, first in '{["'
        if not self._is_json or not text:
            return
        start, self._escaped = int(self._escaped), False
        self._inside = self._inside and not (start and text[0] == "\n")
        for token in _QUOTING.findall(text, start):
            if token.endswith("\n"):
                self._inside = False
            elif token == '"':
                self._inside = not self._inside
            self._escaped = token == "\\"

    def after(self, text: str) -> bool:
        """Whether the place after `text` is inside a string."""
        ahead = copy(self)
        ahead.feed(text)
        return ahead._inside


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return _quoted(text)[1:-1]


def _json_text(value: str) -> str:
    text = value.strip()
    text = _PYTHON.get(text, text)
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return _quoted(value)
    return text


def types_of(schema: dict[str, Any], key: str) -> set[str]:
    """JSON types that the schema admits for a parameter; empty if it does not say."""
    properties = schema.get("properties")
    declared = properties if isinstance(properties, dict) else {}
    pending = [declared.get(key, schema.get("additionalProperties"))]
    types: set[str] = set()
    seen: set[int] = set()  # schemas may refer to themselves
    while pending:
        part = pending.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        types |= _own_types(part)
        pending.append(_resolve(part.get("$ref"), schema))
        for member in ("anyOf", "oneOf", "allOf"):
            if isinstance(alternatives := part.get(member), list):
                pending += alternatives
    return types


def _own_types(schema: dict[str, Any]) -> set[str]:
    declared = schema.get("type")
    if declared is not None:
        names = declared if isinstance(declared, list) else [declared]
        types = {name for name in names if isinstance(name, str)}
    else:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        types = {_type_name(value) for value in values} if isinstance(values, list) else set()
    return types | {"null"} if schema.get("nullable") is True else types


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    return "string" if isinstance(value, str) else "other"


def _resolve(reference: Any, root: dict[str, Any]) -> Any:
    """What a reference inside the document points to; None if nothing."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for part in reference[1:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if name:
            found = found.get(name) if isinstance(found, dict) else None
    return found
