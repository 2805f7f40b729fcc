"""Records of a .ginfer version 3 file: the prefix, the identity and the objects of its directory.

File = prefix (64 B) + directory (canonical UTF-8 JSON) + zero padding + payload.
Prefix: magic `GINFER\\0\\3` | u64 directory length | u64 payload offset (multiple of 4096) |
SHA-256 of the directory | 8 zeros.
`offset` of an object is relative to the payload offset.
"""

from __future__ import annotations

from dataclasses import dataclass

MAGIC = b"GINFER\x00\x03"
PREFIX_NBYTES = 64
PAYLOAD_ALIGNMENT = 4096  # of the payload and of each rank group
TENSOR_ALIGNMENT = 256
MAX_DIRECTORY_NBYTES = 64 << 20
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
