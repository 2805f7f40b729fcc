"""The directory's canonical JSON: encode, and decode under bounds that hold before parsing.

The JSON parser runs only on text whose depth and number of parts are bounded, so that hostile text
costs neither stack nor memory.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ginfer.artifact import findings as f
from ginfer.artifact.records import MAX_OBJECTS, Identity, ObjectRecord, TensorRecord

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ginfer.artifact.findings import Findings

_MAX_DEPTH = 4  # root, objects, object, shape
_MAX_DIGITS = 400  # of one number: beyond it int() and float() cost more than they tell
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(set(range(256)) - set(_STEP))
_PARTS = {b"{": 1, b"[": 2, b",": 24, b'"': 36}  # most of each per object


def encode_tree(tree: object) -> bytes:
    """Return the canonical JSON of a value."""
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


def encode(identity: Identity, objects: Iterable[ObjectRecord]) -> bytes:
    """Return the directory of a package."""
    kinds = [
        {"kind": "tensor" if isinstance(o, TensorRecord) else "resource", **asdict(o)}
        for o in objects
    ]
    return encode_tree({"identity": asdict(identity), "objects": kinds})


def decode(data: bytes, report: Findings) -> Any:
    """Return the JSON value of a directory, or None when it cannot be parsed; findings go to
    report."""
    if not _bounded(data, report):
        return None
    num_before = len(report) + report.num_unlisted
    try:
        tree = json.loads(
            data,
            object_pairs_hook=lambda pairs: _unique(pairs, report),
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_constant,
        )
    except ValueError as e:
        report.add(f.NotJson, "directory", str(e))
        return None
    exact = num_before == len(report) + report.num_unlisted
    if exact and encode_tree(tree) != data:
        report.add(f.NotCanonical, "directory", "JSON in another form")
    return tree


def _bounded(data: bytes, report: Findings) -> bool:
    """Check characters, the number of parts and the depth; nothing is parsed when one fails."""
    if not data.isascii():
        try:
            data.decode()
            report.add(f.NotCanonical, "directory", "a character beyond ASCII")
        except UnicodeDecodeError as e:
            report.add(f.NotUtf8, "directory", f"byte {e.start} is no UTF-8")
        return False
    if (at := data.find(b"\\")) >= 0:
        report.add(f.NotCanonical, "directory", f"a backslash at byte {at}")
        return False
    for part, per_object in _PARTS.items():
        if (n := data.count(part)) > per_object * MAX_OBJECTS:
            report.add(f.DirectoryTooLarge, "directory", f"{n} times {part.decode()}")
            return False
    structure = b"".join(data.split(b'"')[::2])  # without escapes: all that is outside strings
    brackets = structure.translate(None, _NO_BRACKETS)
    depth = max(accumulate(_STEP[b] for b in brackets), default=0)
    if depth > _MAX_DEPTH:
        report.add(f.NestedTooDeep, "directory", f"{depth} levels")
    return depth <= _MAX_DEPTH


def _unique(pairs: list[tuple[str, object]], report: Findings) -> dict[str, object]:
    members = dict(pairs)
    if len(members) < len(pairs):
        where = str(members.get("name", "directory"))
        seen: set[str] = set()
        for member, _ in pairs:
            if member in seen:
                report.add(f.DuplicateMember, f.show(where), f"member {f.show(member)} twice")
            seen.add(member)
    return members


def _integer(text: str) -> int:
    return int(_short(text))


def _float(text: str) -> float:
    return float(_short(text))


def _short(text: str) -> str:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return text


def _constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")
