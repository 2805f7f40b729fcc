"""Memory-mapped packages: everything but payload digests is checked at opening, views copy nothing.

A package must not be truncated in place while it is open; replace it by rename, as the writer does.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from ginfer.artifact import findings as f
from ginfer.artifact.findings import Findings
from ginfer.artifact.records import ResourceRecord, TensorRecord
from ginfer.artifact.validate import Contents, parse
from ginfer.backend import PackedTensor
from ginfer.errors import ArtifactError
from ginfer.formats import FORMATS, Layout

if TYPE_CHECKING:
    from types import TracebackType


class Package:
    """An open package. A context manager.

    identity: what it is. digest: SHA-256 of its directory, which names every payload's digest.
    objects: all records in physical order; tensors, resources: those of either kind.
    """

    def __init__(self, path: Path, fd: int, mapping: mmap.mmap, contents: Contents) -> None:
        self.path = path
        self.identity = contents.identity
        self.digest = contents.digest
        self.objects = contents.objects
        self.payload_offset = contents.payload_offset
        self.tensors: tuple[TensorRecord, ...] = tuple(
            o for o in self.objects if isinstance(o, TensorRecord)
        )
        self.resources: dict[str, ResourceRecord] = {
            o.name: o for o in self.objects if isinstance(o, ResourceRecord)
        }
        self.nbytes = len(mapping)
        self._fd: int | None = fd
        self._map: mmap.mmap | None = mapping
        self._by_rank = {
            rank: {t.name: t for t in self.tensors if rank in t.ranks}
            for rank in range(self.identity.tp)
        }

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Map a package and check it. Raises ArtifactError with every finding."""
        path = Path(path)
        report = Findings()
        fd = _open_regular(path, report)
        report.raise_if_any(str(path))
        mapping = None
        try:
            mapping = _map(fd, report)
            contents = None
            if mapping is not None:
                with memoryview(mapping) as data:
                    contents = parse(data, report)
            report.raise_if_any(str(path))
            assert mapping is not None
            assert contents is not None
            return cls(path, fd, mapping, contents)
        except BaseException:
            if mapping is not None:
                mapping.close()
            os.close(fd)
            raise

    def rank_tensors(self, rank: int = 0) -> dict[str, TensorRecord]:
        """Return the tensors that a rank reads, by name, in physical order. Raises KeyError."""
        return self._by_rank[rank]

    def tensor(self, name: str, rank: int = 0) -> PackedTensor:
        """Return a tensor as it lies in the file: a read-only view that keeps the mapping alive.
        Raises KeyError for a name that the rank does not read."""
        record = self._by_rank[rank][name]
        data = np.frombuffer(
            self._mapping(), np.uint8, record.bytes, self.payload_offset + record.offset
        )
        return PackedTensor(
            name=name,
            shape=record.shape,
            format=FORMATS[record.format],
            layout=Layout(record.layout),
            data=data,
            read=partial(self._read_payload, self.payload_offset + record.offset),
        )

    def resource(self, name: str) -> bytes:
        """Return a resource's bytes. Raises KeyError."""
        record = self.resources[name]
        start = self.payload_offset + record.offset
        return self._mapping()[start : start + record.bytes]

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Read file bytes from `offset` past the mapping, which stays out of resident memory;
        return their number (0: the file ends here)."""
        if self._fd is None:
            raise ValueError("the package is closed")
        return os.preadv(self._fd, [buffer], offset)

    def _read_payload(self, start: int, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from byte start + offset of the file. Raises ArtifactError when it ends."""
        done = 0
        while done < len(buffer):
            count = self.read_into(buffer[done:], start + offset + done)
            if not count:
                raise ArtifactError(f"{self.path} was cut while it was read")
            done += count

    def close(self) -> None:
        """Let the file go. Views given out stay valid and keep the mapping until they are gone."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if self._map is not None:
            with contextlib.suppress(BufferError):  # raised while views exist: the last unmaps it
                self._map.close()
            self._map = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _mapping(self) -> mmap.mmap:
        if self._map is None:
            raise ValueError("the package is closed")
        return self._map


def _open_regular(path: Path, report: Findings) -> int:
    """Return a descriptor, or -1 with a finding. Never waits on a pipe or a device."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as e:
        report.add(f.NotAFile, "file", getattr(e, "strerror", None) or str(e))
        return -1
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        report.add(f.NotAFile, "file", "not a regular file")
        return -1
    return fd


def _map(fd: int, report: Findings) -> mmap.mmap | None:
    if os.fstat(fd).st_size == 0:
        report.add(f.ShortFile, "prefix", "the file has 0 bytes")
        return None
    return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
