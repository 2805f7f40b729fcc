"""JSON schemas as grammars enforce them: a closed list of keywords, all others refused by name."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from ginfer.errors import RequestError, UnsupportedError
from ginfer.frontend.grammar.disjoint import all_disjoint
from ginfer.frontend.grammar.pattern import full_match

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Schema = dict[str, Any] | bool

MAX_NODES = 4096  # schemas inside a schema
MAX_DEPTH = 32  # of one inside the other
MAX_PROPERTIES = 256  # of one object
MAX_VALUES = 4096  # of one enumeration
MAX_PATTERN = 1024
MAX_COUNT = 1_000_000  # of items, characters, properties
MAX_NUMBER = 1 << 53
LEAST_STEP = 1e-9  # of multipleOf
FORMATS = (
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
)
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
ANNOTATIONS = frozenset(
    (
        *("$schema", "$id", "$comment", "$defs", "definitions", "title", "description"),
        *("default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        *("contentEncoding", "contentMediaType", "discriminator"),
    )
)


@dataclass(frozen=True)
class _Rule:
    """What the value of a keyword must be."""

    legal: Callable[[Any], bool]
    text: str


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and isfinite(value) and abs(value) <= MAX_NUMBER


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def _are_types(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


def _are_names(value: Any) -> bool:
    names = isinstance(value, list) and len(value) <= MAX_PROPERTIES
    return names and all(isinstance(name, str) for name in value)


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            part
            for outer in level
            if isinstance(outer, list | dict)
            for part in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return not level


_NUMBER = _Rule(_is_number, f"a number of at most {MAX_NUMBER}")
_COUNT = _Rule(_is_count, f"an integer from 0 to {MAX_COUNT}")
_VALUES = {
    "type": _Rule(_are_types, f"one or more of {', '.join(TYPES)}"),
    "const": _Rule(_is_shallow, f"a value at most {MAX_DEPTH} deep"),
    "enum": _Rule(
        lambda v: isinstance(v, list) and 0 < len(v) <= MAX_VALUES and _is_shallow(v),
        f"1 to {MAX_VALUES} values, each at most {MAX_DEPTH} deep",
    ),
    "required": _Rule(_are_names, f"a list of at most {MAX_PROPERTIES} names"),
    "pattern": _Rule(
        lambda v: isinstance(v, str) and len(v) <= MAX_PATTERN,
        f"a regular expression of at most {MAX_PATTERN} characters",
    ),
    "format": _Rule(lambda v: isinstance(v, str) and v in FORMATS, f"one of {', '.join(FORMATS)}"),
    "multipleOf": _Rule(
        lambda v: _is_number(v) and v >= LEAST_STEP, f"a number of at least {LEAST_STEP}"
    ),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _COUNT
    ),
}
_ONE, _LIST, _MAP = ("items", "additionalProperties"), ("prefixItems",), ("patternProperties",)
_BRANCHES = ("anyOf", "oneOf", "allOf")
ENFORCED = (*_VALUES, *_ONE, *_LIST, *_MAP, *_BRANCHES, "properties", "$ref")


class SchemaReader:
    """Reads schemas of one document: `read` them, then take each `whole`.

    A schema that comes out has keywords of ENFORCED only, in the client's order; references point
    to `defs`; `oneOf` has become `anyOf`, its branches being provably disjoint.
    Errors: RequestError for a malformed schema, UnsupportedError for a keyword that cannot be
    enforced; `param` is the path of the keyword, under `param`.
    """

    def __init__(self, root: Any, param: str) -> None:
        self._root, self._param = root, param
        self._names: dict[str, str] = {}  # reference -> name in defs
        self._pending: deque[tuple[str, str, str]] = deque()  # reference, name, where it stands
        self._one_of: list[tuple[str, list[Schema]]] = []
        self._num_nodes = 0
        self.defs: dict[str, Schema] = {}
        self.aliases = False  # an object takes names besides those that it declares

    def read(self, schema: Any, path: str = "") -> Schema:
        """The schema at `path` of the document, and all that it refers to."""
        result = self._read(schema, path, 0)
        while self._pending:
            reference, name, where = self._pending.popleft()
            self.defs[name] = self._read(self._resolve(reference, where), reference[1:], 0)
        for where, branches in self._one_of:
            if not all_disjoint(branches, self.defs):
                raise self._refuse(
                    where, "branches of oneOf may both match; use anyOf, or a required constant"
                )
        self._one_of.clear()
        return result

    def whole(self, schema: Schema) -> Schema:
        """A schema that came out, together with the definitions that it needs."""
        needed: dict[str, Schema] = {}
        pending = list(_references(schema))
        while pending:
            name = pending.pop()
            if name not in needed:
                needed[name] = self.defs[name]
                pending += _references(needed[name])
        if not needed:
            return schema
        assert isinstance(schema, dict)
        return {**schema, "$defs": needed}

    def _read(self, schema: Any, path: str, depth: int) -> Schema:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES or depth > MAX_DEPTH:
            raise RequestError(
                f"{self._where(path)} is too large; legal: {MAX_NODES} schemas, {MAX_DEPTH} deep",
                param=self._where(path),
            )
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise self._malformed(path, "an object or a boolean")
        read = {
            name: self._keyword(name, value, f"{path}/{name}", depth)
            for name, value in schema.items()
            if not (name in ANNOTATIONS or name.startswith("x-"))
            and not (name == "uniqueItems" and value is False)
        }
        self._check_object(schema, path)
        if "oneOf" in read:
            read = self._without_one_of(read, path)
        return read

    def _keyword(self, name: str, value: Any, path: str, depth: int) -> Any:
        if name in _VALUES:
            return self._value(name, value, path)
        if name == "$ref":
            return self._reference(value, path)
        if name in _ONE:
            return self._read(value, path, depth + 1)
        if name in _BRANCHES or name in _LIST:
            if not isinstance(value, list) or not value:
                raise self._malformed(path, "a list of schemas")
            return [self._read(part, f"{path}/{i}", depth + 1) for i, part in enumerate(value)]
        if name == "properties" or name in _MAP:
            if not isinstance(value, dict) or len(value) > MAX_PROPERTIES:
                raise self._malformed(path, f"an object of at most {MAX_PROPERTIES} schemas")
            if name in _MAP:
                for pattern in value:
                    self._value("pattern", pattern, path)
            return {k: self._read(part, f"{path}/{k}", depth + 1) for k, part in value.items()}
        raise self._refuse(path, f"the keyword {name!r} cannot be enforced; leave it out")

    def _value(self, name: str, value: Any, path: str) -> Any:
        rule = _VALUES[name]
        if not rule.legal(value):
            error = UnsupportedError if name == "format" else RequestError
            raise error(f"{self._where(path)} must be {rule.text}", param=self._where(path))
        if name == "pattern":
            try:
                full_match(value)
            except ValueError as error:
                raise self._refuse(path, str(error)) from None
        return value

    def _check_object(self, schema: dict[str, Any], path: str) -> None:
        least, required = schema.get("minProperties", 0), schema.get("required", ())
        if least > max(1, len(required)):  # names may come twice where they are free
            raise self._refuse(f"{path}/minProperties", "more than the required names")
        open_ended = schema.get("additionalProperties") is not False
        if open_ended and ("properties" in schema or required):
            self.aliases = True

    def _reference(self, value: Any, path: str) -> str:
        if not isinstance(value, str) or not value.startswith("#"):
            raise self._refuse(path, "only references inside the document are followed: '#/...'")
        if value not in self._names:
            self._names[value] = name = f"d{len(self._names)}"
            self._pending.append((value, name, path))
        return f"#/$defs/{self._names[value]}"

    def _resolve(self, reference: str, path: str) -> Any:
        found = self._root
        for part in filter(None, reference[1:].split("/")):
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, dict) and name in found:
                found = found[name]
            else:
                raise self._malformed(path, f"a reference that leads somewhere, not {reference!r}")
        return found

    def _without_one_of(self, read: dict[str, Any], path: str) -> dict[str, Any]:
        branches = read["oneOf"]
        self._one_of.append((f"{path}/oneOf", branches))
        if "anyOf" in read:
            rest = {name: value for name, value in read.items() if name != "oneOf"}
            return {**rest, "allOf": [*read.get("allOf", ()), {"anyOf": branches}]}
        return {"anyOf" if name == "oneOf" else name: value for name, value in read.items()}

    # -- errors -----------------------------------------------------------------------------------

    def _where(self, path: str) -> str:
        return self._param + path.replace("/", ".")

    def _malformed(self, path: str, expected: str) -> RequestError:
        where = self._where(path)
        return RequestError(f"{where} must be {expected}", code="invalid_schema", param=where)

    def _refuse(self, path: str, reason: str) -> UnsupportedError:
        where = self._where(path)
        return UnsupportedError(f"{where}: {reason}", code="unsupported_schema", param=where)


def _references(schema: Any) -> Iterator[str]:
    """Names of the definitions that a schema that came out refers to."""
    if isinstance(schema, list):
        for part in schema:
            yield from _references(part)
    elif isinstance(schema, dict):
        for name, value in schema.items():
            if name == "$ref" and isinstance(value, str):
                yield value.rpartition("/")[2]
            elif name in ("properties", *_MAP):
                yield from _references(list(value.values()))
            elif name in (*_ONE, *_LIST, *_BRANCHES):
                yield from _references(value)
