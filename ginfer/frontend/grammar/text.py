"""String schemas as terminals over raw text: what a call's string parameter may be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ginfer.errors import UnsupportedError
from ginfer.frontend.grammar.builder import literal
from ginfer.frontend.grammar.pattern import full_match

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ginfer.frontend.grammar.schema import Schema

ANYTHING = "/(?s:.*)/"
_DAY = (
    r"[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|"
    r"(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_HOUR, _SIXTY = r"(?:[01][0-9]|2[0-3])", r"[0-5][0-9]"
_TIME = rf"{_HOUR}:{_SIXTY}:{_SIXTY}(?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR}:{_SIXTY})"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,7}}"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = r"[0-9A-Fa-f]"
FORMATS = {
    "date": _DAY,
    "time": _TIME,
    "date-time": f"{_DAY}T{_TIME}",
    "email": rf"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": rf"(?:{_HEX}{{1,4}}:){{7}}{_HEX}{{1,4}}|(?:{_HEX}{{1,4}}(?::{_HEX}{{1,4}}){{0,5}})?::",
    "uuid": rf"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    "duration": r"P(?:[0-9]+W|[0-9]+D(?:T[0-9]+H)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|T[0-9]+H)",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:(?:[A-Za-z0-9._~:/?#@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+",
}
_DEPTH = 64  # of references and branches inside each other
_MAX_CHARS = 1 << 16  # of one terminal


def regex(pattern: str) -> str:
    """An expression as a grammar spells it, to be matched in full."""
    out, escaped = [], False
    for char in pattern:
        out.append("\\/" if char == "/" and not escaped else "\\n" if char == "\n" else char)
        escaped = char == "\\" and not escaped
    return f"/{''.join(out)}/"


def text_terminal(schema: Schema, defs: Mapping[str, Schema], where: str) -> str | None:
    """The terminal of the strings that a schema of `SchemaReader` admits, as raw text; None if it
    admits none. where: path of the schema, for UnsupportedError."""
    return _Terminals(defs, where).of(schema)


class _Terminals:
    """Terminals of the schemas inside one; each is made once."""

    def __init__(self, defs: Mapping[str, Schema], where: str) -> None:
        self._defs, self._where = defs, where
        self._known: dict[int, str | None] = {}  # by the id of a schema
        self._open: set[int] = set()

    def of(self, schema: Schema) -> str | None:
        """Terminal of one schema; None if it admits no string."""
        if isinstance(schema, bool):
            return ANYTHING if schema else None
        if id(schema) in self._open:
            raise self._refuse("refers to itself")
        if id(schema) not in self._known:
            self._open.add(id(schema))
            self._known[id(schema)] = self._make(schema)
            self._open.remove(id(schema))
        return self._known[id(schema)]

    def _make(self, schema: dict[str, Any]) -> str | None:
        if len(self._open) > _DEPTH:
            raise self._refuse("is too deep")
        kinds = schema.get("type", "string")
        if "string" not in (kinds if isinstance(kinds, list) else [kinds]):
            return None
        parts: list[str | None] = list(_own(schema))
        listed = [schema["enum"]] if "enum" in schema else []
        listed += [[schema["const"]]] if "const" in schema else []
        parts += [_either([literal(v) for v in values if isinstance(v, str)]) for values in listed]
        inner = list(schema.get("allOf", ()))
        if "$ref" in schema:
            inner.append(self._defs[schema["$ref"].rpartition("/")[2]])
        parts += map(self.of, inner)
        if "anyOf" in schema:
            branches = map(self.of, schema["anyOf"])
            parts.append(_either([branch for branch in branches if branch is not None]))
        wanted = [part for part in parts if part is not None]
        if len(wanted) < len(parts):
            return None
        joined = " & ".join(wanted) if wanted else ANYTHING
        if len(joined) > _MAX_CHARS:
            raise self._refuse("is too large")
        return joined

    def _refuse(self, reason: str) -> UnsupportedError:
        message = f"{self._where} {reason}: no string parameter can be like that"
        return UnsupportedError(message, code="unsupported_schema", param=self._where)


def _own(schema: dict[str, Any]) -> list[str]:
    """Terminals of the keywords about strings."""
    parts = []
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        parts.append(f"/(?s:.{{{least},{most}}})/")
    if "pattern" in schema:
        parts.append(regex(full_match(schema["pattern"])))
    if "format" in schema:
        parts.append(regex(FORMATS[schema["format"]]))
    return parts


def _either(terminals: list[str]) -> str | None:
    if len(terminals) < 2:
        return next(iter(terminals), None)
    return f"({' | '.join(terminals)})"
