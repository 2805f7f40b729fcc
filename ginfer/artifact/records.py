"""Records of a .ginfer version 3 file: the prefix, the identity and the objects of its directory.

File = prefix (64 B) + directory + zero padding to 4096 + payload, and not a byte more.
Prefix: magic `GINFER\\0\\3` | u64 directory length | u64 payload offset | SHA-256 of the
directory | 8 zeros; integers little-endian. The payload offset is the first multiple of 4096 after
the directory; the `offset` of an object is relative to it.

Directory: canonical JSON, so that one content has one encoding. Members sorted by name, no white
space, integers in decimal from 0 to 2^63 - 1, strings of printable ASCII without `"` and `\\`
(hence no escapes). Schema closed: `{identity: {drafter_tp, kv_calibration, model_id, producer
{name, recipe_sha256, source_sha256, version}, qualified, tp, weights_id}, objects: [..]}`;
an object has `kind` (`tensor` or `resource`) and the fields of its record below.

Objects lie in physical order, each at the first legal offset after the one before it: resources
anywhere, tensors at multiples of 256, the first tensor of a group at a multiple of 4096. A group is
a run of tensors with equal `ranks`; a `ranks` list occurs in one group only. Padding is zero.
A rank reads every group that names it; within a rank names are unique.
"""

from __future__ import annotations

from dataclasses import dataclass

MAGIC = b"GINFER\x00\x03"
PREFIX_NBYTES = 64
PAYLOAD_ALIGNMENT = 4096  # of the payload and of each rank group
TENSOR_ALIGNMENT = 256
MAX_DIRECTORY_NBYTES = 4 << 20  # the largest package planned (Muse, TP 4) has about 1 MiB
MAX_OBJECTS = 8192
MAX_RANK = 16  # dimensions of a tensor
MAX_INTEGER = (1 << 63) - 1
RESOURCE_ENCODING = "raw-bytes-v1"


@dataclass(frozen=True, kw_only=True)
class Producer:
    """Who made the package, from what."""

    name: str
    version: str
    recipe_sha256: str
    source_sha256: str


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What the package is: model x weight profile x TP degree."""

    model_id: str
    weights_id: str
    tp: int
    drafter_tp: int
    kv_calibration: str | None
    qualified: tuple[str, ...]
    producer: Producer


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """A tensor of the directory; shape is rank-local."""

    name: str
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    format: str
    layout: str
    offset: int
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ResourceRecord:
    """A frontend file, byte for byte."""

    name: str
    encoding: str
    offset: int
    bytes: int
    sha256: str


ObjectRecord = TensorRecord | ResourceRecord
