"""What a model expects of a package against what the package has: every difference at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ginfer.artifact import findings as f
from ginfer.artifact.findings import Finding, Findings

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ginfer.artifact.reader import Package
    from ginfer.artifact.records import TensorRecord
    from ginfer.formats import Layout, StorageFormat


@dataclass(frozen=True, kw_only=True)
class ExpectedTensor:
    """What a model wants under a name. shape: rank-local."""

    shape: tuple[int, ...]
    format: StorageFormat
    layout: Layout


def diff_inventory(
    package: Package,
    tensors: Mapping[str, ExpectedTensor],
    resources: Collection[str],
    *,
    rank: int = 0,
) -> tuple[Finding, ...]:
    """Return all missing, unexpected, misshapen and wrongly stored objects of a rank."""
    report = Findings()
    have = package.rank_tensors(rank)
    for name, expected in tensors.items():
        if name in have:
            _compare(have[name], expected, report)
        elif name in package.resources:
            report.add(f.KindMismatch, name, "a resource", "the model expects a tensor")
        else:
            legal = f"the model needs {_describe(expected)}"
            report.add(f.MissingObject, name, f"no such tensor on rank {rank}", legal)
    for name in resources:
        if name in have:
            report.add(f.KindMismatch, name, "a tensor", "the model expects a resource")
        elif name not in package.resources:
            report.add(f.MissingObject, name, "no such resource", "the model needs it")
    for name in (*have, *package.resources):
        if name not in tensors and name not in resources:
            report.add(f.UnexpectedObject, name, "not in the model's inventory")
    report.close()
    return tuple(report)


def _compare(record: TensorRecord, expected: ExpectedTensor, report: Findings) -> None:
    if record.shape != expected.shape:
        got = f"shape {f.show(record.shape)}"
        report.add(f.ShapeMismatch, record.name, got, f"the model needs {f.show(expected.shape)}")
    if (record.format, record.layout) != (expected.format.name, expected.layout):
        legal = f"the model needs {expected.format.name} {expected.layout}"
        report.add(f.StorageMismatch, record.name, f"{record.format} {record.layout}", legal)


def _describe(expected: ExpectedTensor) -> str:
    return f"{f.show(expected.shape)} {expected.format.name} {expected.layout}"
