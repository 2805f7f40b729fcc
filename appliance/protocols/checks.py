"""Strict checks of decoded JSON: every error names the member by its path."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import orjson

from ginfer.errors import RequestError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

SHOWN_CHARS = 60
MAX_DEPTH = 64


def decoded(data: bytes | str, path: str = "body") -> Any:
    """The value of a JSON text; integers of any size stay exact.

    Raises RequestError: invalid_json, or duplicate_member for an object that has a member twice,
    because readers disagree about which one counts."""
    text = data if isinstance(data, str) else data.decode(errors="surrogateescape")
    try:
        orjson.loads(data)  # refuses what the next line lets pass: NaN, infinity, lone surrogates
        return json.loads(text, object_pairs_hook=_once)
    except orjson.JSONDecodeError as error:
        why = str(error)
    except RecursionError:
        why = "it nests too deep"
    raise RequestError(f"{path} is not JSON: {why}", code="invalid_json")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose members all have different names."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        message = f"the member {shown(twice)} is given twice in one object; give it once"
        raise RequestError(message, code="duplicate_member", param=twice)
    return found


def shown(value: object) -> str:
    """A wire value as an error message quotes it: short, whatever it holds."""
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    text = repr(value[:SHOWN_CHARS]) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."


def wrong(path: str, value: object, want: str, *, code: str = "invalid_value") -> RequestError:
    """The error for a member whose value is not what it must be."""
    return RequestError(f"{path} is {shown(value)}; give {want}", code=code, param=path)


def refused(path: str, why: str, *, code: str) -> UnsupportedError:
    """The error for a well-formed wish that we do not obey."""
    return UnsupportedError(f"{path}: {why}", code=code, param=path)


def string(value: Any, path: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise wrong(path, value, "a string", code="invalid_type")
    return value


def boolean(value: Any, path: str) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise wrong(path, value, "true or false", code="invalid_type")
    return value


def integer(value: Any, path: str, low: int, high: int) -> int:
    """An integer within low..high."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(path, value, "an integer", code="invalid_type")
    if not low <= value <= high:
        raise wrong(path, value, f"an integer from {low} to {high}")
    return value


def number(value: Any, path: str, low: float, high: float) -> float:
    """A number within low..high."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(path, value, "a number", code="invalid_type")
    if not low <= value <= high:
        raise wrong(path, value, f"a number from {low:g} to {high:g}")
    return float(value)


def array(value: Any, path: str) -> list[Any]:
    """An array."""
    if not isinstance(value, list):
        raise wrong(path, value, "an array", code="invalid_type")
    return value


def mapping(value: Any, path: str) -> dict[str, Any]:
    """An object with any members."""
    if not isinstance(value, dict):
        raise wrong(path, value, "an object", code="invalid_type")
    return value


def members(value: Any, path: str, known: Collection[str]) -> dict[str, Any]:
    """An object whose members all have known names; those that are null count as absent."""
    found = mapping(value, path)
    for name in found:
        if name not in known:
            raise unknown(f"{path}.{name}")
    return {name: member for name, member in found.items() if member is not None}


def shallow(value: dict[str, Any], path: str) -> dict[str, Any]:
    """The object itself, if it nests at most MAX_DEPTH levels deep (printing it recurses)."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner = [v.values() if isinstance(v, dict) else v for v in level]
        level = [v for values in inner for v in values if isinstance(v, dict | list)]
        if not level:
            return value
    raise RequestError(f"{path} nests deeper than {MAX_DEPTH} levels", param=path)


def unknown(path: str) -> RequestError:
    """The error for a member that the protocol does not have."""
    path = path or "''"
    return RequestError(
        f"{path} is not a parameter of this request; remove it",
        code="unknown_parameter",
        param=path,
    )


def required(found: Mapping[str, Any], path: str, name: str) -> Any:
    """The member `name` of the object at `path`."""
    if name not in found:
        where = f"{path}.{name}" if path else name
        raise RequestError(f"{where} is missing", code="missing_required_parameter", param=where)
    return found[name]


def one_of(value: Any, path: str, legal: Collection[str], *, code: str = "invalid_value") -> str:
    """One of the legal strings."""
    if string(value, path) not in legal:
        raise wrong(path, value, "one of " + ", ".join(legal), code=code)
    return str(value)
