"""Whether the branches of a oneOf exclude each other, as far as that is easy to see.

Two schemas do when they admit different types, when they enumerate different scalars, or when both
require a property whose schemas do.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_BRANCHES = 64
_DEPTH = 4  # of properties inside properties
_REFERENCES = 32  # of one pointing at the next
_EVERYTHING = frozenset(("null", "boolean", "number", "string", "array", "object"))


def all_disjoint(branches: Sequence[Any], defs: Mapping[str, Any]) -> bool:
    """Whether no value matches two of the branches; schemas and defs as `SchemaReader` gives them.

    False where it cannot be seen, and for more than MAX_BRANCHES."""
    if len(branches) > MAX_BRANCHES:
        return False
    judge = _Judge(defs)
    return all(judge.disjoint(a, b, _DEPTH) for a, b in combinations(branches, 2))


class _Judge:
    def __init__(self, defs: Mapping[str, Any]) -> None:
        self._defs = defs
        self._known: dict[int, frozenset[str]] = {}  # types by the id of a schema

    def disjoint(self, a: Any, b: Any, depth: int) -> bool:
        """Whether no value can match both; depth: how many properties to look into."""
        a, b = self._target(a), self._target(b)
        kinds = self._kinds(a) & self._kinds(b)
        if not kinds:
            return True
        one, two = _scalars(a), _scalars(b)
        if one is not None and two is not None:
            return one.isdisjoint(two)
        if depth == 0 or kinds != {"object"}:
            return False
        members, others = _required(a), _required(b)
        return any(
            self.disjoint(members[name], others[name], depth - 1)
            for name in members.keys() & others.keys()
        )

    def _target(self, schema: Any) -> Any:
        """What a bare chain of references leads to."""
        for _ in range(_REFERENCES):
            if not isinstance(schema, dict) or schema.keys() != {"$ref"}:
                break
            schema = self._definition(schema)
        return schema

    def _definition(self, schema: dict[str, Any]) -> Any:
        return self._defs[schema["$ref"].rpartition("/")[2]]

    def _kinds(self, schema: Any) -> frozenset[str]:
        """Types that a schema may admit; all of them while it refers to itself."""
        if isinstance(schema, bool):
            return _EVERYTHING if schema else frozenset()
        found = self._known.get(id(schema))
        if found is None:
            self._known[id(schema)] = _EVERYTHING
            found = self._known[id(schema)] = self._admitted(schema)
        return found

    def _admitted(self, schema: dict[str, Any]) -> frozenset[str]:
        kinds = _EVERYTHING
        if "type" in schema:
            names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            kinds = frozenset("number" if name == "integer" else name for name in names)
        for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
            if values is not None:
                kinds &= {_kind(value) for value in values}
        if "anyOf" in schema:
            kinds &= frozenset().union(*map(self._kinds, schema["anyOf"]))
        parts = [*schema.get("allOf", ())]
        if "$ref" in schema:
            parts.append(self._definition(schema))
        for part in parts:
            kinds &= self._kinds(part)
        return kinds


def _required(schema: Any) -> dict[str, Any]:
    """Schemas of the properties that must be there."""
    if not isinstance(schema, dict):
        return {}
    declared = schema.get("properties", {})
    return {name: declared[name] for name in schema.get("required", ()) if name in declared}


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object" if isinstance(value, dict) else "number"


def _scalars(schema: Any) -> set[tuple[str, Any]] | None:
    """The scalars that a schema enumerates; None if it does not, or not only scalars."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is None or any(isinstance(value, list | dict) for value in values):
        return None
    return {(_kind(value), value) for value in values}
