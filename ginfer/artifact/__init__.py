"""The .ginfer package, version 3: write, read, validate."""

from ginfer.artifact.binding import ExpectedTensor, diff_inventory
from ginfer.artifact.digests import verify_digests
from ginfer.artifact.findings import Finding
from ginfer.artifact.reader import Package
from ginfer.artifact.records import Identity, ObjectRecord, Producer, ResourceRecord, TensorRecord
from ginfer.artifact.writer import PackageWriter, PlannedResource, PlannedTensor

__all__ = [
    "ExpectedTensor",
    "Finding",
    "Identity",
    "ObjectRecord",
    "Package",
    "PackageWriter",
    "PlannedResource",
    "PlannedTensor",
    "Producer",
    "ResourceRecord",
    "TensorRecord",
    "diff_inventory",
    "verify_digests",
]
