"""The closed schema of a directory: JSON values to records, with a finding per deviation."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ginfer.artifact import findings as f
from ginfer.artifact.records import (
    MAX_INTEGER,
    MAX_OBJECTS,
    Identity,
    ObjectRecord,
    Producer,
    ResourceRecord,
    TensorRecord,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ginfer.artifact.findings import Findings

    Check = Callable[[Any, str, Findings], None]

DEGREES = (1, 2, 4)


def _integer(value: Any, where: str, report: Findings) -> None:
    if type(value) is not int:  # bool is an int to Python, not to JSON
        report.add(f.WrongType, where, f.show(value), "legal is an unsigned integer")
    elif not 0 <= value <= MAX_INTEGER:
        report.add(f.NumberRange, where, f.show(value))


def _one_of(legal: tuple[int, ...]) -> Check:
    def check(value: Any, where: str, report: Findings) -> None:
        if type(value) is not int:
            report.add(f.WrongType, where, f.show(value), "legal is an unsigned integer")
        elif value not in legal:
            text = f"legal are {', '.join(map(str, legal))}"
            report.add(f.IllegalDegree, where, f.show(value), text)

    return check


def _text(pattern: str, legal: str) -> Check:
    compiled = re.compile(pattern)

    def check(value: Any, where: str, report: Findings) -> None:
        if not isinstance(value, str):
            report.add(f.WrongType, where, f.show(value), "legal is a string")
        elif not compiled.fullmatch(value):
            report.add(f.BadString, where, f.show(value), f"legal: {legal}")

    return check


def _array(item: Check) -> Check:
    def check(value: Any, where: str, report: Findings) -> None:
        if not isinstance(value, list):
            report.add(f.WrongType, where, f.show(value), "legal is an array")
            return
        for i, v in enumerate(value):
            item(v, f"{where}[{i}]", report)

    return check


def _nullable(inner: Check) -> Check:
    def check(value: Any, where: str, report: Findings) -> None:
        if value is not None:
            inner(value, where, report)

    return check


def _any(value: Any, where: str, report: Findings) -> None:
    """Checked elsewhere."""


_SEGMENT = r"(?!\.\.?(?:/|$))[A-Za-z0-9_.-]+"
_NAME = _text(
    rf"(?=.{{1,200}}$){_SEGMENT}(?:/{_SEGMENT})*",
    "1 to 200 letters, digits, '_', '.', '-' in segments divided by '/'",
)
_ID = _text(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,127}", "1 to 128 letters, digits, '_', '.', '+', '-'")
_LABEL = _text(r"[ !#-\[\]-~]{1,200}", "1 to 200 printable ASCII characters without quotes")
_DIGEST = _text(r"[0-9a-f]{64}", "a SHA-256 in lower-case hexadecimal")

PRODUCER: dict[str, Check] = {
    "name": _LABEL,
    "version": _LABEL,
    "recipe_sha256": _DIGEST,
    "source_sha256": _DIGEST,
}


def _producer(value: Any, where: str, report: Findings) -> None:
    _members(value, where, PRODUCER, report)


IDENTITY: dict[str, Check] = {
    "model_id": _ID,
    "weights_id": _ID,
    "tp": _one_of(DEGREES),
    "drafter_tp": _one_of((0, *DEGREES)),
    "kv_calibration": _nullable(_DIGEST),
    "qualified": _array(_ID),
    "producer": _producer,
}
TENSOR: dict[str, Check] = {
    "kind": _any,
    "name": _NAME,
    "ranks": _array(_integer),
    "shape": _array(_integer),
    "format": _LABEL,
    "layout": _LABEL,
    "offset": _integer,
    "bytes": _integer,
    "sha256": _DIGEST,
}
RESOURCE: dict[str, Check] = {
    "kind": _any,
    "name": _NAME,
    "encoding": _LABEL,
    "offset": _integer,
    "bytes": _integer,
    "sha256": _DIGEST,
}
ROOT: dict[str, Check] = {"identity": _any, "objects": _any}


def _members(value: Any, where: str, schema: Mapping[str, Check], report: Findings) -> bool:
    """Check a JSON object against its closed set of members; True when nothing was found."""
    before = len(report) + report.num_unlisted
    if not isinstance(value, dict):
        report.add(f.WrongType, where, f.show(value), "legal is an object")
        return False
    legal = f"members are {', '.join(sorted(schema))}"
    for member in sorted(schema.keys() - value.keys()):
        report.add(f.MissingMember, where, f"{member} is absent", legal)
    for member, v in value.items():
        check = schema.get(member)
        if check is None:
            report.add(f.ExtraMember, where, f"member {f.show(member)}", legal)
        else:
            check(v, f"{where}.{member}", report)
    return before == len(report) + report.num_unlisted


def read_directory(
    tree: Any, report: Findings
) -> tuple[Identity | None, tuple[ObjectRecord, ...], bool]:
    """Return identity, the well-formed objects, and whether these are all. tree None: nothing was
    decoded, which has its finding already."""
    if tree is None and report:
        return None, (), False
    _members(tree, "directory", ROOT, report)
    root = tree if isinstance(tree, dict) else {}
    identity = _identity(root["identity"], report) if "identity" in root else None
    entries = root.get("objects")
    if not isinstance(entries, list):
        if "objects" in root:
            report.add(f.WrongType, "directory.objects", f.show(entries), "legal is an array")
        return identity, (), False
    if not entries:
        report.add(f.NoObjects, "directory.objects", "an empty array")
    if len(entries) > MAX_OBJECTS:
        report.add(f.DirectoryTooLarge, "directory.objects", f"{len(entries)} objects")
        return identity, (), False
    records = [_object(entry, i, report) for i, entry in enumerate(entries)]
    well_formed = tuple(r for r in records if r is not None)
    return identity, well_formed, len(well_formed) == len(records) > 0


def _identity(value: Any, report: Findings) -> Identity | None:
    if not _members(value, "identity", IDENTITY, report):
        return None
    if value["drafter_tp"] > value["tp"]:
        got = f"{value['drafter_tp']} with tp {value['tp']}"
        report.add(f.IllegalDegree, "identity.drafter_tp", got, "a drafter has at most tp ranks")
        return None
    fields = {**value, "producer": Producer(**value["producer"])}
    return Identity(**{**fields, "qualified": tuple(value["qualified"])})


def _object(value: Any, idx: int, report: Findings) -> ObjectRecord | None:
    where = f"objects[{idx}]"
    if not isinstance(value, dict):
        report.add(f.WrongType, where, f.show(value), "legal is an object")
        return None
    name = value.get("name")
    if isinstance(name, str) and name:
        where += f" {f.show(name)}"
    kind = value.get("kind")
    if kind not in ("tensor", "resource"):
        if "kind" in value:
            report.add(f.UnknownKind, where, f"kind {f.show(kind)}")
        else:
            report.add(f.MissingMember, where, "kind is absent", f.UnknownKind.legal)
        return None
    if not _members(value, where, TENSOR if kind == "tensor" else RESOURCE, report):
        return None
    fields = {k: v for k, v in value.items() if k != "kind"}
    if kind == "resource":
        return ResourceRecord(**fields)
    return TensorRecord(
        **{**fields, "ranks": tuple(value["ranks"]), "shape": tuple(value["shape"])}
    )
