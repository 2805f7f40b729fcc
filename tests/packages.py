"""Tiny packages for tests, written by the real writer: every layout, a few KiB."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from ginfer.artifact import Identity, PackageWriter, PlannedResource, PlannedTensor, Producer
from ginfer.formats import BF16, FP32, I32, Q4G64_F16S, W8G32_F16S, Layout, StorageFormat

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

IDENTITY = Identity(
    model_id="qwen3.8-demo",
    weights_id="groupwise-int",
    tp=1,
    drafter_tp=0,
    kv_calibration=None,
    qualified=("cpu",),
    producer=Producer(
        name="tests",
        version="1",
        recipe_sha256=hashlib.sha256(b"recipe").hexdigest(),
        source_sha256=hashlib.sha256(b"source").hexdigest(),
    ),
)


def _tensor(
    name: str, shape: tuple[int, ...], fmt: StorageFormat, layout: Layout = Layout.CONTIGUOUS
) -> PlannedTensor:
    return PlannedTensor(name=name, shape=shape, format=fmt, layout=layout)


PLAN = (
    PlannedResource(name="frontend/tokenizer.json", nbytes=301),
    PlannedResource(name="frontend/chat_template.jinja", nbytes=47),
    _tensor("text/token_embedding", (5, 64), W8G32_F16S, Layout.ROWS),
    _tensor("text/layers/0/mlp/down", (3, 5), Q4G64_F16S, Layout.TILE),
    _tensor("text/final_norm", (65,), BF16),
    _tensor("scale", (), FP32),
    _tensor("ids", (2, 3, 2), I32),
)


def payload(name: str, nbytes: int) -> bytes:
    """Return reproducible bytes for an object."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    return np.random.default_rng(seed).bytes(nbytes)


def write_package(
    path: Path,
    plan: Sequence[PlannedTensor | PlannedResource] = PLAN,
    identity: Identity = IDENTITY,
) -> Path:
    """Write a package with reproducible payloads and return its path."""
    with PackageWriter(path, identity, plan) as w:
        for item in plan:
            ranks = item.ranks if isinstance(item, PlannedTensor) else None
            w.write(item.name, payload(f"{item.name}{ranks}", item.nbytes), ranks=ranks)
    return path


def assemble(directory: bytes, payload: bytes) -> bytes:
    """Return a file with this directory, its prefix forged to match, and this payload."""
    start = -(-(64 + len(directory)) // 4096) * 4096
    digest = hashlib.sha256(directory).digest()
    prefix = struct.pack("<8sQQ32s8x", b"GINFER\0\3", len(directory), start, digest)
    return (prefix + directory).ljust(start, b"\0") + payload


def take_apart(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the directory of a valid file as a JSON value, and the payload."""
    nbytes, start = struct.unpack_from("<QQ", data, 8)
    return json.loads(data[64 : 64 + nbytes]), data[start:]


def canonical(tree: object) -> bytes:
    """Return the canonical JSON of a value."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()
