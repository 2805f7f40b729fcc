"""Deterministic streaming writer: a plan fixes all offsets, payloads pass through, a rename ends.

Same plan and payloads, same bytes. The file appears under its name complete or not at all.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from ginfer.artifact import findings as f
from ginfer.artifact.directory import encode
from ginfer.artifact.records import (
    MAGIC,
    RESOURCE_ENCODING,
    Identity,
    ObjectRecord,
    ResourceRecord,
    TensorRecord,
)
from ginfer.artifact.validate import PREFIX, check_objects, object_alignment, payload_start
from ginfer.formats import payload_nbytes
from ginfer.sizes import align_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType
    from typing import Any

    from numpy.typing import NDArray

    from ginfer.formats import Layout, StorageFormat

    Chunk = bytes | bytearray | memoryview | NDArray[Any]

_NO_DIGEST = "0" * 64


@dataclass(frozen=True, kw_only=True)
class PlannedTensor:
    """A tensor to be written. shape: rank-local, as in the directory."""

    name: str
    shape: tuple[int, ...]
    format: StorageFormat
    layout: Layout
    ranks: tuple[int, ...] = (0,)

    @property
    def nbytes(self) -> int:
        """Bytes of the payload. Raises ValueError for a shape that the layout does not take."""
        return payload_nbytes(self.format, self.layout, self.shape)


@dataclass(frozen=True, kw_only=True)
class PlannedResource:
    """A file to be written byte for byte."""

    name: str
    nbytes: int


PlannedObject = PlannedTensor | PlannedResource


def lay_out(plan: Iterable[PlannedObject]) -> tuple[ObjectRecord, ...]:
    """Return the records of a plan, digests zero: each object at its first legal offset."""
    records: list[ObjectRecord] = []
    end = 0
    group: tuple[int, ...] | None = None
    for item in plan:
        ranks = item.ranks if isinstance(item, PlannedTensor) else None
        offset = align_up(end, object_alignment(ranks, group))
        records.append(_record(item, offset))
        group = ranks
        end = offset + item.nbytes
    return tuple(records)


def _record(item: PlannedObject, offset: int) -> ObjectRecord:
    if isinstance(item, PlannedResource):
        return ResourceRecord(
            name=item.name,
            encoding=RESOURCE_ENCODING,
            offset=offset,
            bytes=item.nbytes,
            sha256=_NO_DIGEST,
        )
    return TensorRecord(
        name=item.name,
        ranks=item.ranks,
        shape=item.shape,
        format=item.format.name,
        layout=str(item.layout),
        offset=offset,
        bytes=item.nbytes,
        sha256=_NO_DIGEST,
    )


class PackageWriter:
    """Writes one package; a context manager that finishes on success and removes its temporary file
    on error.

    plan: objects in physical order, tensors with equal `ranks` together. Raises ArtifactError with
    all findings when the plan is no legal package, before anything is written.

        with PackageWriter(path, identity, plan) as w:
            w.write("frontend/tokenizer.json", data)
            w.write("text/final_norm", chunks)
    """

    def __init__(self, path: str | Path, identity: Identity, plan: Sequence[PlannedObject]) -> None:
        self.path = Path(path)
        self._identity = identity
        self._records = {(r.name, _ranks(r)): r for r in lay_out(plan)}
        if len(self._records) != len(plan):
            raise ValueError("the plan names an object twice")
        directory = self._directory()  # its length does not depend on the digests
        self._payload_offset = payload_start(len(directory))
        self._payload_nbytes = max((r.offset + r.bytes for r in self._records.values()), default=0)
        check_objects(directory, self._payload_nbytes, str(self.path))
        self._pending = set(self._records)
        self._temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.tmp")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd: int | None = os.open(self._temporary, flags, 0o666)
        try:
            os.ftruncate(self._fd, self._payload_offset + self._payload_nbytes)
        except BaseException:
            self.abort()
            raise

    def write(
        self, name: str, chunks: Chunk | Iterable[Chunk], *, ranks: tuple[int, ...] | None = None
    ) -> None:
        """Write one object, in any order; chunks are contiguous and join to its payload.

        ranks: needed only when several groups have a tensor of this name. Raises ValueError for an
        object that the plan lacks or that is written already, ArtifactError for a wrong size.
        """
        key = self._key(name, ranks)
        record = self._records[key]
        digest = hashlib.sha256()
        done = 0
        for chunk in _iterate(chunks):
            view = _byte_view(chunk)
            if done + len(view) > record.bytes:
                raise f.SizeMismatch(name, f"{done + len(view)} bytes or more", _takes(record))
            digest.update(view)
            self._write_at(view, self._payload_offset + record.offset + done)
            done += len(view)
        if done != record.bytes:
            raise f.SizeMismatch(name, f"{done} bytes", _takes(record))
        self._records[key] = replace(record, sha256=digest.hexdigest())
        self._pending.remove(key)

    def finish(self) -> None:
        """Write directory and prefix, make the file durable and give it its name."""
        if self._fd is None:
            return
        if self._pending:
            missing = ", ".join(sorted(name for name, _ in self._pending)[:8])
            raise ValueError(f"{len(self._pending)} objects are not written: {missing}")
        directory = self._directory()
        digest = hashlib.sha256(directory).digest()
        prefix = PREFIX.pack(MAGIC, len(directory), self._payload_offset, digest, bytes(8))
        self._write_at(memoryview(prefix + directory), 0)
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = None
        os.replace(self._temporary, self.path)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def abort(self) -> None:
        """Remove the temporary file. Safe to call twice, and after finish."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.abort()

    def _directory(self) -> bytes:
        return encode(self._identity, self._records.values())

    def _key(self, name: str, ranks: tuple[int, ...] | None) -> tuple[str, tuple[int, ...]]:
        keys = [k for k in self._pending if k[0] == name and ranks in (None, k[1])]
        if len(keys) != 1:
            state = "is not planned or already written" if not keys else "needs its ranks"
            raise ValueError(f"object {name!r} {state}")
        return keys[0]

    def _write_at(self, view: memoryview, offset: int) -> None:
        if self._fd is None:
            raise ValueError("the writer is closed")
        while view:
            n = os.pwrite(self._fd, view, offset)
            view, offset = view[n:], offset + n


def _iterate(chunks: Chunk | Iterable[Chunk]) -> Iterable[Chunk]:
    if isinstance(chunks, (bytes, bytearray, memoryview, np.ndarray)):
        return (chunks,)
    return chunks


def _byte_view(chunk: Chunk) -> memoryview:
    if isinstance(chunk, np.ndarray):
        return chunk.reshape(-1).view(np.uint8).data
    return memoryview(chunk).cast("B")


def _ranks(record: ObjectRecord) -> tuple[int, ...]:
    return record.ranks if isinstance(record, TensorRecord) else ()


def _takes(record: ObjectRecord) -> str:
    return f"the plan says {record.bytes}"
